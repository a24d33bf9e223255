"""Cost of the running program: its start, its memory, a second of its life."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.host import FullHost
from bench.http import Cost, Program, measure, started
from testing.ports import free_port

ROOT = Path(__file__).parents[1]


MODULES = (
    *("bench.stage", "mps_exporter.commands.serve"),
    *("mps_exporter.web.app", "mps_exporter.web.server"),
)


def installed(*modules: str) -> dict[str, str]:
    """Return the environment of installed programs: these modules are compiled.

    Compiling pynvml alone leaves 12 MiB in the process that does it.
    """
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "mps-exporter-bench")
    words = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(words, env=environment, cwd=ROOT, check=True)
    return environment


@contextmanager
def running(full: FullHost, **environment_variables: str) -> Iterator[Program]:
    port = free_port()
    environment = installed(*MODULES) | environment_variables
    command = [
        sys.executable,
        "-m",
        "bench.stage",
        str(full.folder),
        *full.flags,
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        (full.folder / "exporter.log").open("wb") as log,
        started(command, url, stderr=log, cwd=ROOT, env=environment) as program,
    ):
        yield program


@dataclass(frozen=True)
class Life:
    """Measurements of a running program."""

    first_scrape_seconds: float
    threads: int
    cost: Cost


def life(clients: int, seconds: int) -> Life:
    """Run the program this long without scrapes, then this long with a scrape a second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FullHost(Path(folder), clients) as full,
        running(full) as program,
    ):
        first = program.until_good('mps_control_up{daemon="')
        program.until_good("mps_client_contexts")
        time.sleep(2)
        (cost,) = measure({"mps-exporter": program}, seconds)
        return Life(first, program.status("Threads"), cost)

"""Runs the whole program on a synthetic host."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.host import FullHost
from bench.http import Program, started
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
def running(full: FullHost, *flags: str) -> Iterator[Program]:
    port = free_port()
    environment = installed(*MODULES)
    command = [
        sys.executable,
        "-m",
        "bench.stage",
        str(full.folder),
        *full.flags,
        *flags,
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        (full.folder / "exporter.log").open("wb") as log,
        started(command, url, stderr=log, cwd=ROOT, env=environment) as program,
    ):
        yield program

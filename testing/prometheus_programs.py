"""Prometheus, Alertmanager and other programs as processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.ports import free_port
from testing.rule_files import ROOT
from testing.waiting import PATIENCE_SECONDS, wait_for

TREE = ROOT.parent
Series = tuple[dict[str, str], list[float]]


def program(name: str) -> Path:
    """Return a program of .tools/bin, of this Python's environment or of PATH.

    A test without the program proves nothing, and fails.
    """
    ours = (TREE / ".tools" / "bin", Path(sys.executable).parent)
    places = os.pathsep.join((*map(str, ours), os.environ.get("PATH", "")))
    found = shutil.which(name, path=places)
    assert found, f"no {name} on PATH or in .tools/bin: `make tools-servers`, else `make tools`"
    return Path(found)


@contextmanager
def running(
    folder: Path, name: str, *command: str | Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that writes to a log of this name, and end it."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_ready(url: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server replies with status 200; fail at once if its process ends."""

    def ready() -> bool:
        assert process is None or process.poll() is None, f"it ended with {process.poll()}"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=PATIENCE_SECONDS).close()  # noqa: S310 - loopback
            return True
        return False

    wait_for(ready)


@dataclass(frozen=True)
class Prometheus:
    address: str

    def api(self, path: str, **parameters: object) -> Any:
        """Return the data of a reply."""
        url = f"http://{self.address}/api/v1/{path}"
        if path in ("targets", "metadata"):  # which have no POST
            body = None
        else:
            body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(url, body, timeout=PATIENCE_SECONDS) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as failure:
            raise AssertionError(f"{failure.read().decode()}\n{parameters}") from failure

    def moment(self, expr: str, at: float | None = None) -> list[Series]:
        """Query one time (Unix time); None is now."""
        time = {} if at is None else {"time": at}
        found = self.api("query", query=expr, **time)["result"]
        return [(series["metric"], [float(series["value"][1])]) for series in found]

    def targets(self) -> dict[str, dict[str, Any]]:
        found = self.api("targets")["activeTargets"]
        return {target["labels"]["job"]: target for target in found}


@contextmanager
def prometheus(
    folder: Path, config: str | dict[str, Any], *flags: str, name: str = "prometheus"
) -> Iterator[Prometheus]:
    """Run a Prometheus with this configuration, below a folder."""
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    (folder / "prometheus.yml").write_text(text)
    address = f"127.0.0.1:{free_port()}"
    with running(
        folder,
        name,
        program(name),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
        *flags,
    ):
        until_ready(f"http://{address}/-/ready")
        yield Prometheus(address)


DEBIAN_TEMPLATES = Path("/usr/share/prometheus/alertmanager")


def alertmanager() -> list[str]:
    """Return the command that starts Alertmanager.

    Debian's build reads its standard templates from one fixed directory. If its package is
    unpacked in .tools instead of being installed, a mount namespace shows it that directory.
    """
    found = program("alertmanager").resolve()
    share = found.parents[1] / "share"
    if DEBIAN_TEMPLATES.exists() or not (share / "prometheus" / "alertmanager").exists():
        return [str(found)]
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(share), str(found)]

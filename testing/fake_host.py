"""Parts of a simulated host: the stand-in for the control tool, its daemons and their locks."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testing import fake_mps_control, fake_mps_daemon

H200: Mapping[str, Any] = fake_mps_daemon.DEVICE


def install_tool(directory: Path) -> Path:
    """Write the stand-in as an executable file, and give its path."""
    tool = directory / fake_mps_control.NAME
    source = Path(fake_mps_control.__file__).read_text("utf-8")
    tool.write_text(f"#!{sys.executable} -SE\n{source}", "utf-8")
    tool.chmod(0o755)
    return tool


def set_daemon(pipe_directory: Path, **state: Any) -> None:
    """Set the state of a daemon; see fake_mps_control."""
    pipe_directory.mkdir(parents=True, exist_ok=True)
    draft = pipe_directory / f"{fake_mps_control.STATE_FILE}.new"
    draft.write_text(json.dumps({"devices": [H200], **state}), "utf-8")
    draft.replace(pipe_directory / fake_mps_control.STATE_FILE)


def server(pid: int, *clients: int, **more: Any) -> dict[str, Any]:
    """Describe a server whose clients have one context each on device 0."""
    return {
        "pid": pid,
        "clients": [{"pid": client, "contexts": {"0": [1]}} for client in clients],
        **more,
    }


IDLE = ("/bin/sh", "-c", "echo; read line")
"""A program that prints a line once it runs, and ends with its standard input."""


@contextmanager
def idle_process(**environment: str) -> Iterator[int]:
    """Run a program with exactly this environment; yield its PID."""
    pipe = subprocess.PIPE
    with subprocess.Popen(IDLE, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until then its environment may be that of this process
        yield process.pid
        process.kill()


_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_lock(pipe_directory: Path) -> Iterator[int]:
    """Hold control_lock as a daemon does; yield the PID of the process that holds it."""
    pipe_directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _HOLDER, str(pipe_directory / "control_lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid
        holder.kill()

"""Looks for what MPS left on a host, and for what says that a daemon should run.

For the doctor only: a walk through the open files of all processes is nothing for every scrape.
What cannot be read is left out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mps_exporter.observations import DaemonFacts, HostTraces, MpsDirectory, OpenFiles, ProcessFacts
from mps_exporter.sources.daemon_directories import DEFAULT_PIPE_DIRECTORIES, is_left_over
from mps_exporter.sources.procfs_parse import (
    parse_arguments,
    parse_stat,
    parse_status,
    program_name,
)

PROMISES = (
    ("run/nvidia/mps/*/*/pipe", "NVIDIA's device plugin for Kubernetes"),
    ("var/lib/kubelet/plugins/gpu.nvidia.com/mps/*/pipe", "NVIDIA's DRA driver for Kubernetes"),
)
"""Pipe directories that exist as long as a daemon should run there, and whose they are."""

UNITS = "etc/systemd/system/*.wants/*.service"
_START = re.compile(rb"^ExecStart\S*=.*nvidia-cuda-mps-control", re.MULTILINE)
_DIRECTORY = re.compile(rb"CUDA_MPS_PIPE_DIRECTORY=[\"']?([^\s\"']+)")
_OPEN_FILES = re.compile(rb"^Max open files\s+(\d+)", re.MULTILINE)
_COMM = b"nvidia-cuda-mps"
_MAX_BYTES = 1 << 16
_MAX_ENTRIES = 256
HOLDERS_SECONDS = 0.15
"""Longest search for open device files: 4,000 files take about 10 ms."""


def look_for_traces(
    daemons: Iterable[DaemonFacts], procfs: str = "/proc", root: str = "/"
) -> HostTraces:
    """Look at the whole host.

    Args:
        daemons: Those that run.
        procfs: Where procfs is mounted.
        root: The host's root directory.
    """
    zombies, orphans = [], []
    programs = {one.pid: one for one in _programs(Path(procfs))}
    for one in programs.values():
        if one.state == "Z":
            zombies.append(one)
        elif one.name.endswith("-server") and one.parent_pid not in programs:
            orphans.append(one)
    running = [one for one in daemons if one.process is not None]
    return HostTraces(
        tuple(zombies),
        tuple(orphans),
        tuple(one for one in _left_directories(Path(root)) if not _is_served(root, one, running)),
        open_files(running, procfs),
        tuple(_driver_holders(Path(procfs))),
    )


def open_files(daemons: Iterable[DaemonFacts], procfs: str = "/proc") -> tuple[OpenFiles, ...]:
    """Count the open files of the servers of daemons."""
    found = []
    for daemon in daemons:
        for server in daemon.servers:
            base, count = Path(procfs, str(server.pid)), None
            with suppress(OSError):
                count = sum(1 for _ in (base / "fd").iterdir())
            with suppress(OSError):
                if limit := _OPEN_FILES.search(_read_start(base / "limits")):
                    pipe = daemon.pipe_directory
                    found.append(OpenFiles(server.pid, pipe, int(limit[1]), count))
    return tuple(found)


def _programs(procfs: Path) -> Iterator[ProcessFacts]:
    for pid in _all_pids(procfs):
        base = procfs / str(pid)
        with suppress(OSError):
            if _read_start(base / "comm").rstrip(b"\n") == _COMM:
                yield from _process_facts(base, pid)


def _process_facts(base: Path, pid: int) -> Iterator[ProcessFacts]:
    stat = parse_stat(_read_start(base / "stat"))
    if stat is not None:
        arguments = parse_arguments(_read_start(base / "cmdline"))
        yield ProcessFacts(
            pid,
            0.0,
            uid=parse_status(_read_start(base / "status")).uid,
            name=program_name(arguments) if arguments else stat.comm,
            state=stat.state,
            parent_pid=stat.parent_pid,
        )


def _all_pids(procfs: Path) -> list[int]:
    with suppress(OSError):
        return sorted(int(one.name) for one in procfs.iterdir() if one.name.isdecimal())
    return []


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _left_directories(root: Path) -> Iterator[MpsDirectory]:
    for name in DEFAULT_PIPE_DIRECTORIES:
        path = root / name[1:]
        if is_left_over(str(path)):
            yield from _left_directory(root, path, "")
    for pattern, promised_by in PROMISES:
        for path in list(root.glob(pattern))[:_MAX_ENTRIES]:
            yield from _left_directory(root, path, promised_by)
    for unit in list(root.glob(UNITS))[:_MAX_ENTRIES]:
        with suppress(OSError):
            text = _read_start(unit)
            if _START.search(text):
                named = _DIRECTORY.search(text)
                name = os.fsdecode(named[1]) if named else DEFAULT_PIPE_DIRECTORIES[0]
                yield MpsDirectory(name, unit.stat().st_uid, f"the enabled unit {unit.name}")


def _left_directory(root: Path, path: Path, promised_by: str) -> Iterator[MpsDirectory]:
    with suppress(OSError):
        yield MpsDirectory(f"/{path.relative_to(root)}", path.stat().st_uid, promised_by)


def _is_served(root: str, one: MpsDirectory, running: Iterable[DaemonFacts]) -> bool:
    path = Path(root, one.path[1:])
    for daemon in running:
        if one.path == daemon.pipe_directory:
            return True
        with suppress(OSError, ValueError):
            if path.samefile(daemon.pipe_path):
                return True
    return False


def _driver_holders(procfs: Path) -> Iterator[ProcessFacts]:
    """Give who has one of the driver's files open, but for this program, which is about to end."""
    end, own = time.monotonic() + HOLDERS_SECONDS, _pid_of_self(procfs)
    for pid in _all_pids(procfs):
        if time.monotonic() > end:
            return
        if pid == own:
            continue
        with suppress(OSError):
            files = islice((procfs / str(pid) / "fd").iterdir(), _MAX_ENTRIES)
            if any(str(file.readlink()).startswith("/dev/nvidia") for file in files):
                yield from _process_facts(procfs / str(pid), pid)


def _pid_of_self(procfs: Path) -> int | None:
    """This process's number in the PID namespace of this mount; None: it does not show there."""
    with suppress(OSError, ValueError):
        return int(str((procfs / "self").readlink()))
    return None

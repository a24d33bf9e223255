"""The files of a simulated host, for the exporter's own readers: each host has its own copy.

Other users' files need root's rights; without them, no procfs is written.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from mps_exporter.commands import doctor
from mps_exporter.flags import Settings, StartError
from mps_exporter.observations import (
    DaemonFacts,
    LogName,
    LogsObservation,
    ProcessView,
    ProcfsObservation,
)
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources import SourceTimeoutError, process_view
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.log_follower import LogFollower, skipped_log_states
from mps_exporter.sources.processes import Processes
from testing.fake_proc import BOOT_TIME, HOST_NAMESPACE, FakeProc
from testing.mps_logs import LOGS
from testing.world.daemon import Daemon
from testing.world.model import World
from testing.world.obstacles import OFTEN, AtOnce, Obstacles
from testing.world.processes import DEBUGGER_PID, Process
from testing.world.settings import KUBELET_LINK, MEMORY_OF_GROUPS, PLACES

MEMORY = Path("/dev/shm")
NAMES = {0: "root", 1001: "anna", 1002: "bert"}
OPEN_GROUP = 7  # May pass the folder /tmp/closed.
SHARE_WITH_DMEM = 0.4
SHARE_IN_PIECES = 0.3
SHARE_OF_COPIES = 0.5  # Share of truncations that leave a rotated copy, and of complete ones.


class ProcessesAtOnce(Processes):
    def __init__(self, procfs: str) -> None:
        super().__init__(procfs)
        self._calls = AtOnce()  # type: ignore[assignment]


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="world-", dir=MEMORY if MEMORY.is_dir() else None))


def _remove(folder: Path, follower: LogFollower | None = None) -> None:
    if follower is not None:
        for pipe in list(follower._daemons):
            follower.forget(pipe)
    shutil.rmtree(folder, ignore_errors=True)


class ProcFiles:
    """A procfs with the world's processes, and the daemons' pipe directories."""

    def __init__(
        self,
        world: World,
        clock: Callable[[], float],
        environment: Callable[[Process], Mapping[str, str]],
        obstacles: Obstacles,
    ) -> None:
        self._world, self._environment = world, environment
        self._obstacles = obstacles
        self._folder = temporary_folder()
        self._proc = FakeProc(self._folder / "proc")
        self._written: dict[int, tuple[Process, str]] = {}
        self._stepped_ms = 0
        passwd = self._folder / "passwd"
        passwd.write_text("".join(f"{name}:x:{uid}:\n" for uid, name in NAMES.items()))
        containers = self._folder / "containers"
        containers.mkdir()
        (containers / KUBELET_LINK).touch()
        if world.random("dmem", "used").random() < SHARE_WITH_DMEM:
            self._write_memory_of_groups()
        closed = self._folder / "root" / "tmp" / "closed"
        (closed / "mps").mkdir(parents=True)
        os.chown(closed, 0, OPEN_GROUP)
        closed.chmod(0o710)
        for folder in ("root", "root/tmp", "root/tmp/closed/mps"):
            (self._folder / folder).chmod(0o755)
        self._discovery = discovery = DaemonDiscovery(
            str(self._proc.root),
            str(passwd),
            str(self._folder / "containers"),
            str(self._folder / "cgroups"),
            now=lambda: world.now_ms / 1000,
            clock=clock,
        )
        for one in (discovery, discovery._processes):
            one._calls = AtOnce(obstacles)  # type: ignore[assignment]
        self._found: tuple[DaemonFacts, ...] = ()
        weakref.finalize(self, _remove, self._folder)

    def _write_memory_of_groups(self) -> None:
        """Write what the kernel's dmem controller shows of the control groups of clients."""
        root = self._folder / "cgroups"
        root.mkdir()
        regions = [f"nvidia/0000{gpu.pci[4:]}.0/vidmem" for gpu in self._world.gpus]
        (root / "dmem.capacity").write_text("".join(f"{one} 150754820096\n" for one in regions))
        for place, found in zip(PLACES, MEMORY_OF_GROUPS, strict=False):
            folder = root / place.path[1:]
            folder.mkdir(parents=True)
            for name, size in found.items():
                text = "max" if size is None else size
                lines = (f"{one} {text}\n" for one in regions)
                (folder / f"dmem.{name}").write_text("".join(lines))

    def view(self, pid: int) -> ProcessView:
        """Return what `doctor --pid` reads."""
        self._write()
        groups = str(self._folder / "cgroups")
        with mock.patch.multiple(process_view, Processes=ProcessesAtOnce, CGROUPS=groups):
            return process_view.view_process(pid, self._found, str(self._proc.root))

    def report(self, snapshot: Snapshot, **about: Any) -> str:
        """Return what `doctor` prints about the host, or with --user or --job about processes."""
        procfs, folder = str(self._proc.root), str(self._folder)
        settings = Settings(path_procfs=procfs, record_directory=folder, **about)
        at_once = partial(mock.patch.multiple, doctor, port_lines=list, _read_in_time=_read)
        with mock.patch.object(process_view, "CGROUPS", f"{folder}/cgroups"), at_once():
            try:
                return doctor._report(snapshot, settings, procfs)[1]
            except StartError as error:
                return str(error)

    def discover(self) -> tuple[DaemonFacts, ...]:
        self._write()
        self._found = found = self._discovery.discover((), search=True)
        # No process of this machine holds their locks.
        self._discovery._found = tuple(
            replace(
                one,
                root="",
                lock_tested=True,
                lock_holder_pid=one.process.pid if one.process else None,
            )
            for one in found
        )
        return self._discovery._found

    @property
    def daemon_pids(self) -> set[int]:
        """The PIDs of the daemons that were found last."""
        return {one.process.pid for one in self._discovery._found if one.process is not None}

    def observe(self, pids: Collection[int]) -> ProcfsObservation:
        self._write()
        return self._discovery.observe(pids)

    def _write(self) -> None:
        """Write what has begun, has changed, or has ended."""
        world = self._world
        if world.stepped_ms != self._stepped_ms:
            self._stepped_ms = world.stepped_ms
            boot = BOOT_TIME + world.stepped_ms // 1000
            (self._proc.root / "stat").write_text(f"btime {boot}\n")
        for pid in self._written.keys() - world.processes.keys():
            self._proc.remove(pid)
            del self._written[pid]
        for pid, process in world.processes.items():
            if self._written.get(pid) != (process, process.halted):
                self._add(process)
                self._written[pid] = process, process.halted

    def _add(self, process: Process) -> None:
        root = self._folder / "root"
        if isinstance(process, Daemon):
            pipe = root / process.pipe[1:]
            pipe.mkdir(parents=True, exist_ok=True)
            os.chown(pipe, process.uid, process.uid)
        place = process.settings.place
        if place.holds_only(process.pid):
            group = self._folder / "cgroups" / place.path[1:]
            group.mkdir(parents=True, exist_ok=True)
            frozen = int(process.halted == "frozen")
            (group / "cgroup.events").write_text(f"populated 1\nfrozen {frozen}\n")
            (group / "cgroup.freeze").write_text(f"{frozen}\n")
        environment = {"PATH": "/usr/bin", **self._environment(process)}
        if process.settings.limiter:
            environment["LD_PRELOAD"] = "/lib/libvgpu.so"
        self._proc.add(
            process.pid,
            argv=(f"/usr/bin/{process.name}", *process.arguments),
            environ=None if self._obstacles.random(OFTEN) else environment,
            cgroup=place.cgroup,
            groups=process.groups,
            uid=process.uid,
            parent=process.parent_pid,
            state=process.letter,
            namespace_pids=process.inner_pids,
            pid_namespace=HOST_NAMESPACE + process.pid_namespace,
            tracer=DEBUGGER_PID if process.halted == "t" else 0,
            started=(process.started_ms - self._world.stepped_ms) / 1000 - BOOT_TIME,
            sees=root,
        )


def _read(reads: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
    return {name: read() for name, read in reads.items()}


@dataclass
class _Written:
    size: int = 0  # Bytes of the daemon's log that are in files.
    truncations: int = 0
    new_files: int = 0
    renamed: bool = False


class LogFiles:
    """The daemons' logs, rotated as the operators do, and read by the exporter's LogFollower."""

    def __init__(
        self, world: World, hidden: Collection[LogName], obstacles: Obstacles, *, history: bool
    ) -> None:
        self._world = world
        self._history = history
        self._hidden = hidden
        self._written: dict[tuple[str, LogName], _Written] = {}
        self._folder = temporary_folder()
        self._polls = 0
        # The follower must not refer to the host, which the finalizer below would keep.
        self._follower = LogFollower(
            clock=lambda: world.now_ms / 1000,
            monotonic=lambda: (world.now_ms - world.stepped_ms) / 1000,
        )
        self._follower._calls = AtOnce(obstacles)  # type: ignore[assignment]
        weakref.finalize(self, _remove, self._folder, self._follower)

    @property
    def behind(self) -> bool:
        """Whether there is more to read."""
        logs = self._follower._daemons.values()
        return any(
            not tail._complete
            for one in logs
            for tail in one.tails()
            if tail.descriptor is not None
        )

    async def poll(self, daemons: Sequence[DaemonFacts]) -> LogsObservation:
        """Write what the world has logged, now and then in pieces, and read it."""
        self._polls += 1
        random = Random(f"{self._world.seed}/pieces/{self._polls}")
        shut = {pipe for pipe, _ in self._world.sight.gone_logs}
        seen = [one for one in daemons if one.pipe_directory not in shut]
        parts = []
        root = [one for one in seen if not one.limited]
        if root and self._written and random.random() < SHARE_IN_PIECES:
            self._write(root, random)
            parts.append(await self._read(root, daemons))
        self._write(seen)
        with suppress(*(SourceTimeoutError,) if parts else ()):
            parts.append(await self._read(seen, daemons))
        states = [one for one in parts[-1].states if one.log not in self._hidden]
        for one in daemons:
            states += [
                state
                for state in skipped_log_states(one, "hidden")
                if one.pipe_directory in shut or state.log in self._hidden
            ]
        chunks = (chunk for part in parts for chunk in part.chunks)
        return LogsObservation(
            parts[-1].at, tuple(one for one in chunks if one.log not in self._hidden), tuple(states)
        )

    async def _read(
        self, daemons: Iterable[DaemonFacts], known: Iterable[DaemonFacts]
    ) -> LogsObservation:
        root, owners = str(self._folder), (os.geteuid(),)
        there = [replace(one, root=root, log_owners=owners) for one in daemons]
        return await self._follower.poll(there, 2.0, kept=[one.pipe_directory for one in known])

    def _write(self, daemons: Iterable[DaemonFacts], pieces: Random | None = None) -> None:
        for one in daemons:
            daemon = self._world.daemons[one.pipe_directory]
            for log in LOGS:
                self._write_log(daemon, log, pieces)

    def _write_log(self, daemon: Daemon, log: LogName, pieces: Random | None) -> None:
        written = self._written.setdefault((daemon.pipe, log), _Written())
        end, truncations, new = (
            len(daemon.logs[log]),
            daemon.truncations[log],
            daemon.new_files[log],
        )
        if pieces is not None:
            end = pieces.randint(written.size, end)
        folder = Path(f"{self._folder}{daemon.log_directory}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{log}.log"
        while True:
            nexts = [*truncations[written.truncations :][:1], *new[written.new_files :][:1], end]
            until = min(nexts)
            self._append(daemon, log, path, until, written)
            if until in truncations[written.truncations :]:
                self._truncate(daemon, log, path, written)
                written.truncations += 1
            elif until in new[written.new_files :]:
                self._rename(path, written)
                written.new_files += 1
                written.renamed = False
            else:
                break
        if log in daemon.renamed and pieces is None:
            self._rename(path, written)

    def _append(
        self, daemon: Daemon, log: LogName, path: Path, until: int, written: _Written
    ) -> None:
        file = path.with_name(f"{path.name}.{written.new_files}") if written.renamed else path
        if until > written.size or not file.exists():
            with file.open("ab") as opened:
                opened.write(daemon.logs[log][written.size : until])
            written.size = until
            at = daemon.written_ms[log] / 1000
            os.utime(file, (at, at))

    def _rename(self, path: Path, written: _Written) -> None:
        if not written.renamed:
            with suppress(FileNotFoundError):
                path.rename(path.with_name(f"{path.name}.{written.new_files}"))
                if self._world.seed % 2:
                    path.touch()  # as logrotate's "create" does: no program writes there
            written.renamed = True

    def _truncate(self, daemon: Daemon, log: LogName, path: Path, written: _Written) -> None:
        """Truncate a log, with or without a copy (copytruncate)."""
        random = self._world.random(daemon.key, f"copy {log} {written.truncations}")
        copied, data = random.random() < SHARE_OF_COPIES, path.read_bytes()
        whole = random.random() < SHARE_OF_COPIES
        if copied:
            copy = Path(shutil.copy2(path, path.with_name(f"{path.name}-{written.truncations}")))
            if not whole:  # The last line is written between the copy and the cut.
                copy.write_bytes(data[: data.rfind(b"\n", 0, -1) + 1])
                os.utime(copy, (at := path.stat().st_mtime, at))
        logs = self._follower._daemons.get(daemon.pipe)
        tail = logs and (logs.control if log == "control" else logs.server)
        read = tail._offset if tail else 0
        # A copy is found by the last bytes that were read.
        if not self._history and len(data) > read and not (copied and whole and read):
            daemon.truth.unknowable.add("lines were lost")
        os.truncate(path, 0)

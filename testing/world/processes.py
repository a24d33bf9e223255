"""Processes and GPUs of a simulated host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from testing.world.settings import NOTHING_SET, Settings

if TYPE_CHECKING:
    from testing.world.daemon import Daemon


SMS, DEBUGGER_PID = 132, 50
CLIENT_BYTES = 790 << 20
USED = (0.5, 0.93, 0.96, 1.0)  # Parts of a memory limit that clients use.


@dataclass(frozen=True)
class Gpu:
    index: int

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index:08d}-1111-2222-3333-444444444444"

    @property
    def pci(self) -> str:
        return f"0000:00:{6 + self.index:02x}"


@dataclass(eq=False)
class Process:
    pid: int
    uid: int
    started_ms: int
    name: str = ""
    parent_pid: int = 1
    exists: bool = True
    halted: str = ""  # "T": by a signal, "t": by a debugger, "frozen": with its control group.
    settings: Settings = NOTHING_SET
    groups: tuple[int, ...] = (0,)  # Its group, and its supplementary groups.

    @property
    def stopped(self) -> bool:
        return bool(self.halted)

    @property
    def letter(self) -> str:
        """Letter in /proc/PID/stat."""
        return self.halted if len(self.halted) == 1 else "S"

    @property
    def inner_pids(self) -> tuple[int, ...]:
        """Its PID in the PID namespace of its container."""
        return (7,) if "container_id" in self.settings.place.labels else ()

    @property
    def pid_namespace(self) -> int:
        """Number of its PID namespace; 0: the host's."""
        return self.pid if self.inner_pids else 0

    @property
    def ready(self) -> bool:
        return True

    @property
    def arguments(self) -> tuple[str, ...]:
        return ()


@dataclass(eq=False, kw_only=True)
class Direct(Process):
    """A process that computes without MPS."""

    gpu: Gpu
    directory: str | None = None  # Its CUDA_MPS_PIPE_DIRECTORY.


@dataclass(eq=False, kw_only=True)
class Client(Process):
    key: str
    daemon: Daemon
    gpus: tuple[int, ...]  # Ordinals among the daemon's GPUs.
    busy: bool = True  # It waits for its kernels all the time, so it notices a fault at once.
    reservations: tuple[tuple[int, int], ...] = ()
    """Address ranges without access: one for each context, and its memory."""
    mapped_ms: int | None = None  # When an exporter had read its address ranges.
    alive: bool = True  # It has not begun to exit.
    dead_ms: int | None = None  # When it died in the daemon's queue.
    accepted: bool = False  # The daemon has taken its connection.
    queued_ms: int | None = None
    blocked: bool = False  # Another user's server held the GPU while this client was queued.
    connected_ms: int | None = None
    active_ms: int | None = None
    ended_ms: int | None = None  # When its process disconnected.
    contexts: dict[int, int] = field(default_factory=dict)  # Context ID -> ordinal of the GPU.
    torn: bool = False  # A fault took its contexts down.
    lost: bool = False
    leaves_work: bool = False

    @property
    def shown_uid(self) -> int:
        """User in the logs: 0 for all clients of a server that serves every user."""
        return 0 if self.daemon.multiuser else self.uid

    def named(self, context: int) -> str:
        """Return what the logs call one of its contexts; 0: its process."""
        return f"{{PID: {self.pid}, Context ID: {context}}}"

    def reserves(self, address: int | None) -> bool:
        return address is not None and any(a <= address < b for a, b in self.reservations)

    def limit_on(self, ordinal: int) -> int | None:
        """Return the lower of its own limit, which is on its first GPU, and the default (H200)."""
        own = self.settings.bytes if ordinal == self.gpus[0] else None
        return min(own or 1 << 30, 1 << 30) if str(ordinal) in self.daemon.limits else own

    def used_on(self, ordinal: int) -> int:
        limit = self.limit_on(ordinal)
        return CLIENT_BYTES if limit is None else round(USED[self.pid % len(USED)] * limit)

    @property
    def complete(self) -> bool:
        """It has a context on each of its GPUs."""
        return len(self.contexts) == len(self.gpus)

    @property
    def healthy(self) -> bool:
        return self.exists and self.alive and not self.torn and not self.lost

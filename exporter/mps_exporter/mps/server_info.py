"""What the logs show of one server process, apart from its clients and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mps_exporter.observations import LogName

MAX_DEVICES = 64


@dataclass(slots=True, eq=False)
class ServerInfo:
    """A server process."""

    pid: int
    uid: int | None
    started_at: float
    readable: Mapping[LogName, bool]
    """Which logs of the daemon can be read now."""
    start_unknown: bool = False
    """Its start is not in the log that was read."""
    ready_at: float | None = None
    failure: str = ""
    """Why it could not start, in the words of the logs."""
    logs_pids: bool | None = None
    """False: its log does not name the client of a line (before driver 580)."""
    thread_ratio: float | None = None
    memory_limits: Mapping[int, int] = field(default_factory=dict)
    """Device ordinal -> bytes. Replaced, never changed: clients keep those they connected with."""
    devices: dict[int, str] = field(default_factory=dict)
    """Device ordinal -> name."""

    @property
    def names_clients(self) -> bool:
        """Whether server.log shows which clients connect and disconnect."""
        return self.readable["server"] and self.logs_pids is not False

    def set_memory_limit(self, device: int, limit_bytes: int) -> None:
        """Clients that connect from now on have this limit."""
        if device in self.memory_limits or len(self.memory_limits) < MAX_DEVICES:
            self.memory_limits = {**self.memory_limits, device: limit_bytes}

    def add_device(self, device: int, name: str) -> None:
        """It made its context on a device."""
        if device in self.devices or len(self.devices) < MAX_DEVICES:
            self.devices[device] = name

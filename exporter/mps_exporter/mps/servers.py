"""Servers and their clients, as the log tells of them, while it is being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mps_exporter.mps.unfinished_work import Ending, Last
from mps_exporter.mps.waits import QueuedClient

MAX_CLIENTS = 2048
"""Client processes of a server that are followed. The hardware serves 48 or 60 contexts a GPU."""

MAX_CONTEXTS = 256
"""Contexts of one client process that are followed."""


@dataclass(slots=True)
class TrackedClient:
    """A client process that is connected."""

    pid: int
    uid: int | None
    connected_at: float
    contexts: dict[int, str] = field(default_factory=dict)
    """Context ID -> GPU UUID, "" while it is not known."""
    creating: dict[int, float] = field(default_factory=dict)
    """Context ID -> since when it is being created: it is not ACTIVE yet."""
    had_context: bool = False
    active_since: float | None = None
    """When its first context became ACTIVE, as server.log says."""
    torn_down_at: float | None = None
    """A fatal GPU error hit it: it cannot use the GPU any more."""
    wait: QueuedClient | None = None
    """It waited behind another user's server, which is over once it has a context."""
    terminating: bool = False
    """An operator asked for its end."""
    lost: bool = False
    """Counted as lost already: what becomes of it afterwards is no further loss."""
    from_control_tool: bool = False
    """Known from the control tool only."""
    inferred: bool = False
    """Known from the daemon's word only, not from the server's."""
    thread_ratio: float | None = None
    memory_limits: dict[int, int] | None = None
    """Those of its server when it connected, which it keeps; None where they are not known."""
    missing_since: float | None = None

    @property
    def leaving(self) -> bool:
        """Its last context is closed: it ends by itself."""
        return self.had_context and not self.contexts


@dataclass(slots=True)
class Admission:
    """A client that the daemon sent to the server, and that has not connected there yet."""

    pid: int
    uid: int | None
    at: float
    wait: QueuedClient | None = None
    for_context: bool = False
    """It was sent again, for a context: the server's own word on it counts, where it gives it."""


@dataclass(slots=True)
class Fault:
    """A fatal GPU error."""

    at: float
    blamed: set[int] = field(default_factory=set)
    victims: list[int] = field(default_factory=list)
    """Client processes that it took along, the culprit too, in the order of the log."""
    devices: set[int] = field(default_factory=set)
    open_devices: set[int] = field(default_factory=set)
    """Devices whose context is not destroyed yet."""
    contexts: set[tuple[int, int]] = field(default_factory=set)
    """(PID, context) of the clients that the log blames."""
    hit: set[int] = field(default_factory=set)
    """Devices of those contexts; others may be reset with them."""
    uuids: list[str] = field(default_factory=list)
    """GPUs that it hit, for which it is counted; "" where the log does not tell."""
    handled: bool = False
    listed: bool = False
    # Whose fault it was
    open: bool = False
    """A client was ending, or ended alone before: who caused it is not decided yet."""
    endings: tuple[Ending, ...] = ()
    """Clients that had ended or were ending when it came."""
    last: tuple[Last, ...] = ()
    """Who had been the last on a GPU, with nobody but newcomers since."""
    closed: bool = False
    """The log has said all about it."""
    cause: str = ""
    """The loss cause of its victims, where it is not the one that MPS's words suggest."""
    losses: list[tuple[int | None, str]] = field(default_factory=list)
    """Not counted yet: user, and the cause that MPS's words suggest."""
    recovered_at: float | None = None


@dataclass(slots=True)
class TrackedServer:
    """A server process."""

    pid: int
    uid: int | None
    started_at: float
    ready_at: float | None = None
    start_unknown: bool = False
    """Its start is not in the log that was read."""
    # How it ends
    exiting: bool = False
    shutdown_requested_at: float | None = None
    """The daemon last asked it to end."""
    shutdown_declined: bool = False
    missing_since: float | None = None
    unlisted_since: float | None = None
    """The daemon does not name it any more."""
    # How it words its log
    has_log: bool = False
    logs_pids: bool | None = None
    """False: its log does not say which client it speaks of (before driver 580)."""
    # Clients
    clients: dict[int, TrackedClient] = field(default_factory=dict)
    admitted_at: dict[int, float] = field(default_factory=dict)
    """PIDs that the daemon sent here and that have not left -> when."""
    admissions: list[Admission] = field(default_factory=list)
    unnamed_disconnections: int = 0
    """Clients that left without the log saying which."""
    ever_connected: bool = False
    queued_pids: dict[int, bool] = field(default_factory=dict)
    """PIDs that were queued for it -> known to be gone."""
    queued_unnamed: int = 0
    ghost: bool = False
    credentials_missing: bool = False
    """It says that a queued client did not send credentials: there was nobody any more. Whatever
    connects, it serves nobody from then on."""
    handover_counted: bool = False
    """Somebody's UID wait ends with it, and has not been counted as a handover yet."""
    terminating_pid: int | None = None
    # Devices
    devices: dict[int, str] = field(default_factory=dict)
    unassociated_contexts: deque[tuple[int, int]] = field(default_factory=deque)
    """(client, context) that have no GPU yet, oldest first."""
    last_associated: tuple[int, int] | None = None
    thread_ratio: float | None = None
    memory_limits: dict[int, int] = field(default_factory=dict)
    """Never changed, only replaced: clients hold those that they connected with."""
    client_limit: int | None = None
    # Faults and refusals
    faults: list[Fault] = field(default_factory=list)
    """Open ones."""
    current_fault: Fault | None = None
    """The fault of which the log is speaking."""
    listing: Literal["devices", "clients"] | None = None
    endings: deque[Ending] = field(default_factory=deque)
    """Clients that ended a moment ago or are ending, oldest first."""
    last: list[Last] = field(default_factory=list)
    """Who may have left work that nobody has met yet, for each GPU."""
    undecided: list[Fault] = field(default_factory=list)
    """Faults of which it is not known yet who caused them."""
    rejected_at: dict[int, float] = field(default_factory=dict)
    """PIDs that were refused -> when."""
    counted_refusals: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_CONTEXTS))
    """Refusals that have been counted, whose status lines may follow."""
    contradiction: tuple[float, frozenset[int]] = (0.0, frozenset())
    """When the control tool last contradicted the log, and about which clients."""
    reported_state: str | None = None
    """What the control tool said, where server.log cannot be read."""
    _unnamed_key: int = 0

    @property
    def client_count(self) -> int:
        """Client processes that are connected."""
        return len(self.clients) - self.unnamed_disconnections

    @property
    def occupied(self) -> bool:
        """Whether anybody is connected."""
        return len(self.clients) > self.unnamed_disconnections

    def add_client(self, client: TrackedClient) -> bool:
        """Take in a client. False: there are too many to follow."""
        if len(self.clients) >= MAX_CLIENTS:
            return False
        if client.pid == 0:
            self._unnamed_key -= 1
        self.clients[client.pid or self._unnamed_key] = client
        self.ever_connected = True
        return True

    def find_client(self, pid: int, context: int | None = None) -> tuple[int, TrackedClient] | None:
        """Give a client and its key.

        Of those with PID 0: who has this context; else who is leaving; else the oldest.
        """
        if pid:
            client = self.clients.get(pid)
            return None if client is None else (pid, client)
        unnamed = list(self._unnamed_clients())
        if context is not None:
            for key, client in unnamed:
                if context in client.contexts:
                    return key, client
        for key, client in unnamed:
            if client.leaving:
                return key, client
        return unnamed[0] if unnamed else None

    def find_unnamed_without(self, context: int) -> tuple[int, TrackedClient] | None:
        """Give the oldest client with PID 0 that does not have this context yet."""
        for key, client in self._unnamed_clients():
            if context not in client.contexts:
                return key, client
        return None

    def creating(self, pid: int, context: int) -> TrackedClient | None:
        """Give the client that is creating this context; of those with PID 0 the oldest."""
        if pid:
            client = self.clients.get(pid)
            return client if client is not None and context in client.creating else None
        return next((one for _, one in self._unnamed_clients() if context in one.creating), None)

    def pop_admission(self, pid: int) -> Admission | None:
        """Remove and give the admission of a client that connects."""
        for index, admission in enumerate(self.admissions):
            if admission.pid == pid:
                return self.admissions.pop(index)
        return None

    def _unnamed_clients(self) -> Iterator[tuple[int, TrackedClient]]:
        return ((key, client) for key, client in self.clients.items() if client.pid == 0)

"""The clients of one server, as both logs and the control tool show them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mps_exporter.mps.admissions import Admission, Admissions
from mps_exporter.mps.record import FULL, Moment, Quota
from mps_exporter.mps.waits import ClientQueue, QueuedClient
from mps_exporter.observations import LogName
from mps_exporter.snapshot import ClientState

MAX_CONTEXTS = 256
"""Contexts of one client process that are followed."""

MAX_WAITING_CONTEXTS = 256
MAX_DEVICES = 64

NO_CONTEXT = "no_context"
"""Of an abandoned wait: the client connected to its server, and never had a context."""


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


@dataclass(slots=True, eq=False)
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
    activations: int = 0
    """Contexts that became ACTIVE."""
    ranges_requested: int = 0
    """How many of them had, when its address ranges were last requested."""
    torn_down_at: float | None = None
    """A fatal GPU error hit it: it cannot use the GPU any more."""
    wait: QueuedClient | None = None
    """It waited behind another user's server, which is over once it has a context."""
    terminating: bool = False
    """An operator requested its termination."""
    lost: bool = False
    """Counted as lost: a client is lost once."""
    from_control_tool: bool = False
    """Known from the control tool only."""
    inferred: bool = False
    """Known from control.log only."""
    thread_ratio: float | None = None
    memory_limits: Mapping[int, int] | None = None
    """Those of its server when it connected, which it keeps; None where they are not known."""
    missing_since: float | None = None
    """When its process was first seen to be gone."""
    key: int = 0
    """Its PID; a negative number of its own if that is 0."""

    @property
    def contexts_by_gpu(self) -> dict[str, int]:
        """GPU UUID -> contexts."""
        return dict(Counter(self.contexts.values()))

    @property
    def state(self) -> tuple[ClientState | None, float | None]:
        """What it is doing, and since when; None where server.log does not say."""
        if self.torn_down_at is not None:
            return "torn_down", self.torn_down_at
        if self.creating:
            return "creating_context", min(self.creating.values())
        if self.inferred and not self.contexts:
            return None, None
        if self.had_context:
            return "active", self.active_since
        return (None, None) if self.from_control_tool else ("connecting", self.connected_at)

    @property
    def leaving(self) -> bool:
        """Its last context is closed: it ends by itself."""
        return self.had_context and not self.contexts

    def lose(self, cause: str, when: Moment) -> bool:
        """Count an abnormal end, at most once; returns whether it was counted."""
        if self.lost:
            return False
        self.lost = True
        when.count_loss(self.uid, cause)
        return True

    def count_termination(self, when: Moment) -> None:
        """An operator has ended it."""
        if self.lose("terminated", when):
            when.add_incident("client_terminated", uid=self.uid, pids=(self.pid,))


class Associations:
    """Contexts of one server that have no GPU yet, oldest first.

    server.log names the GPU without the context:

        Client {PID: 440, Context ID: 1} connected
        Device NVIDIA H200 (uuid GPU-5e4dfbf1-...) is associated        of which context?
        Status of client {PID: 440, Context ID: 1} is ACTIVE            of this one

    The GPU is taken for that of the oldest context without one. The server's threads write in any
    order, so the status line that follows corrects it.
    """

    def __init__(self, clients: Mapping[int, TrackedClient]) -> None:
        self._clients = clients
        self._waiting: deque[tuple[int, int]] = deque(maxlen=MAX_WAITING_CONTEXTS)
        """(key of the client, context ID)."""
        self._last: tuple[int, int] | None = None
        """The context that the last GPU was given to, until its status is written."""

    def add(self, key: int, context: int) -> None:
        self._waiting.append((key, context))

    def associate(self, uuid: str) -> None:
        """A GPU is associated with a context."""
        if not self._waiting:
            return
        key, context = self._waiting.popleft()
        client = self._clients.get(key)
        if client is not None and context in client.contexts:
            client.contexts[context] = uuid
            self._last = key, context

    def confirm(self, pid: int, context: int, *, active: bool) -> None:
        """The status of a context follows: if it is ACTIVE, the last GPU is its own."""
        guessed, self._last = self._last, None
        actual = (pid, context)
        if not active or pid == 0 or guessed is None or guessed == actual:
            return
        own, other = self._clients.get(pid), self._clients.get(guessed[0])
        if own is None or other is None or own.contexts.get(context) != "":
            return
        own.contexts[context] = other.contexts.get(guessed[1], "")
        if guessed[1] in other.contexts:
            other.contexts[guessed[1]] = ""
            self._waiting.appendleft(guessed)
        if actual in self._waiting:
            self._waiting.remove(actual)


class ServerClients:
    """The clients of one server."""

    def __init__(self, server: ServerInfo, queue: ClientQueue, quota: Quota = FULL) -> None:
        self._quota = quota
        self.unfollowed = 0
        """Connections beyond the quota, less disconnections of clients that are not known."""
        self.admissions = Admissions()
        self.ever_connected = False
        self._server = server
        self._queue = queue
        self._clients: dict[int, TrackedClient] = {}
        self.associations = Associations(self._clients)
        self._unnamed_key = 0
        self._unnamed_disconnections = 0
        """Clients that disconnected without the log showing which."""
        self._terminating_pid: int | None = None
        self._handover_counted = False

    def __iter__(self) -> Iterator[TrackedClient]:
        return iter(list(self._clients.values()))

    @property
    def count(self) -> int:
        """Client processes that are connected."""
        return len(self._clients) - self._unnamed_disconnections

    @property
    def may_have_context(self) -> bool:
        """Whether a client has an ACTIVE context, or one of which the log does not tell."""
        return any(
            client.contexts.keys() - client.creating.keys()
            or client.from_control_tool
            or client.inferred
            for client in self
        )

    def get(self, pid: int) -> TrackedClient | None:
        return self._clients.get(pid)

    def sole_newcomer(self) -> int | None:
        """Return the only client whose first context is being created: a refusal is of that one."""
        new = [one.pid for one in self if one.creating and not one.had_context]
        return new[0] if len(new) == 1 and new[0] else None

    def find(self, pid: int, context: int | None = None) -> TrackedClient | None:
        """Return a client. Of those with PID 0: with this context; or leaving; or the oldest."""
        if pid:
            return self._clients.get(pid)
        unnamed = self._unnamed()
        with_context = (one for one in unnamed if context is not None and context in one.contexts)
        leaving = (one for one in unnamed if one.leaving)
        return next(with_context, None) or next(leaving, None) or next(iter(unnamed), None)

    def gpu_of(self, pid: int, context: int) -> str:
        """Return the UUID of the GPU of a context, "" if it is not known."""
        client = self.find(pid, context)
        return "" if client is None else client.contexts.get(context, "")

    # ------------------------------------------------------------------ connect

    def admit(self, pid: int, uid: int, when: Moment, wait: QueuedClient | None = None) -> None:
        """The daemon sends a client process to this server."""
        self.admissions.mark_admitted(pid)
        if pid and pid in self._clients:
            return  # the stamps are equal, and server.log came first
        self.admissions.add(Admission(pid, uid, when.at, wait))
        if not self._server.names_clients:
            self.connect(pid, when)

    def readmit(self, pid: int) -> None:
        """The daemon sends a connected client again: for a context."""
        client = self._clients.get(pid)
        if client is not None and not self._server.names_clients:
            client.had_context = True
        self.admissions.mark_for_context(pid)

    def connect_admitted(self, when: Moment) -> None:
        """The server's log does not name its clients: those that were admitted are connected."""
        for admission in self.admissions:
            self.connect(admission.pid, when._replace(at=admission.at))

    def connect(self, pid: int, when: Moment) -> TrackedClient | None:
        """A client process is connected. None: there are too many to follow."""
        known = self._clients.get(pid)
        if known is not None and (known.from_control_tool or known.inferred):
            if known.from_control_tool:
                when.increment("mps_client_connections_total", uid=known.uid)
            known.from_control_tool = known.inferred = False
            return known
        server, admission = self._server, self.admissions.pop(pid)
        uid = server.uid if admission is None else admission.uid
        wait = self._queue.pop_client(pid, uid) if admission is None else admission.wait
        if known is not None:  # the PID was reused: the older client is gone
            self.disconnect(pid, when)
        client = TrackedClient(
            pid,
            uid,
            when.at,
            inferred=not server.names_clients,
            thread_ratio=server.thread_ratio,
            memory_limits=None if server.start_unknown else server.memory_limits,
        )
        client.had_context = client.inferred and admission is not None and admission.for_context
        if not self._add(client):
            return None
        when.increment("mps_client_connections_total", uid=uid)
        if wait is not None:
            self.admissions.mark_admitted(pid)
            if client.inferred:
                self._serve(wait, when)  # its contexts cannot be seen
            else:
                client.wait = wait
        return client

    def adopt(self, pid: int, at: float) -> None:
        """The control tool lists a client whose connection is not in the log."""
        if pid not in self._clients:
            self._add(TrackedClient(pid, self._server.uid, at, from_control_tool=True))

    def _add(self, client: TrackedClient) -> bool:
        if len(self._clients) >= self._quota.clients:
            self.unfollowed += 1
            return False
        if client.pid == 0:
            self._unnamed_key -= 1
        client.key = client.pid or self._unnamed_key
        self._clients[client.key] = client
        self.ever_connected = True
        return True

    def _serve(self, wait: QueuedClient, when: Moment) -> None:
        if wait.serve(self._server.ready_at, when) and not self._handover_counted:
            self._handover_counted = True
            when.increment("mps_uid_handovers_total")

    def refuse(self, pid: int, context: int, when: Moment) -> None:
        """A client that was sent to the server may not connect."""
        if pid and not context and pid not in self._clients:
            self.admissions.refuse(pid, when)

    # ------------------------------------------------------------------ contexts

    def open_context(self, pid: int, context: int, when: Moment) -> bool:
        """A client opens a context. False: there are too many clients to follow."""
        if pid:
            client = self._clients.get(pid)
        else:
            client = next((one for one in self._unnamed() if context not in one.contexts), None)
        if client is None:
            client = self.connect(pid, when)
        if client is None:
            return False
        if context not in client.contexts and len(client.contexts) < MAX_CONTEXTS:
            client.contexts[context] = ""
            client.creating[context] = when.at
            self.associations.add(client.key, context)
        return True

    def is_new_context(self, pid: int, context: int) -> bool:
        """Whether a client's context is not open yet, as far as the log shows."""
        client = self._clients.get(pid)
        return client is not None and context not in (client.contexts | client.creating)

    def activate_context(self, pid: int, context: int, when: Moment) -> bool:
        """A context that was being created is ACTIVE. False: no such context."""
        candidates = self._unnamed() if pid == 0 else [self._clients.get(pid)]
        client = next((one for one in candidates if one and context in one.creating), None)
        if client is None:
            return False
        del client.creating[context]
        client.had_context = True
        client.activations += 1
        client.active_since = when.at if client.active_since is None else client.active_since
        wait, client.wait = client.wait, None
        if wait is not None:
            self._serve(wait, when)
        return True

    def close_context(self, pid: int, context: int, when: Moment) -> None:
        client = self.find(pid, context)
        if client is None:
            return
        client.contexts.pop(context, None)
        client.creating.pop(context, None)
        if client.terminating:
            client.count_termination(when)

    # ------------------------------------------------------------------ disconnect

    def request_termination(self, pid: int) -> None:
        """An operator requests the termination of a client."""
        self._terminating_pid = pid
        client = self.find(pid)
        if client is not None:
            client.terminating = True

    def terminated(self, when: Moment) -> None:
        """The client whose termination was requested last has ended."""
        pid, self._terminating_pid = self._terminating_pid, None
        client = None if pid is None else self.find(pid)
        if client is not None:
            client.count_termination(when)

    def disconnect(self, pid: int, when: Moment) -> None:
        self.admissions.disconnected(pid)
        client = self.find(pid)
        if client is None:
            self.unfollowed = max(0, self.unfollowed - 1)
            return
        if client.terminating:
            client.count_termination(when)
        del self._clients[client.key]
        self._count_end(client, when, known_end=True)

    def drop(self, client: TrackedClient, when: Moment) -> None:
        """A client is gone, and nothing shows since when: its session is not observed."""
        client.from_control_tool = True
        self.disconnect(client.pid, when)

    def confirm_exit(self, client: TrackedClient, when: Moment) -> None:
        """The process of a client is gone, and no line of the log shows its end."""
        if self._unnamed_disconnections:
            self._unnamed_disconnections -= 1  # counted when it disconnected
            self.admissions.disconnected(client.pid)
            del self._clients[client.key]
        else:
            self.drop(client, when)

    def disconnect_unnamed(self, when: Moment) -> None:
        """A client process is gone, and the log does not show which."""
        if self.count <= 0:
            return
        if self.count == 1 and len(self._clients) == 1:
            self.disconnect(next(iter(self)).pid, when)
            return
        self._unnamed_disconnections += 1
        when.increment("mps_client_disconnections_total", uid=self._server.uid)
        if self.count == 0:
            self._clients.clear()
            self.admissions.disconnected_all()
            self._unnamed_disconnections = 0

    def end(self, cause: str, when: Moment, *, ghost: bool) -> list[int]:
        """The server is gone. Returns the PIDs of the clients that were lost with it.

        Args:
            cause: The loss cause of its clients, "" if its end is no loss.
            when: The moment.
            ghost: Whether it was a ghost server.
        """
        lost = []
        departed = self._unnamed_disconnections
        for client in self:
            if departed:
                departed -= 1
                continue
            if self._lost_with_server(client, cause, ghost=ghost) and client.lose(cause, when):
                lost.append(client.pid)
            self._count_end(client, when, known_end=self._server.logs_pids is not False)
        self.admissions.expire_all(when)
        return lost

    def _lost_with_server(self, client: TrackedClient, cause: str, *, ghost: bool) -> bool:
        if not cause or client.leaving or (ghost and client.wait is not None):
            return False  # the latter never had a context: its wait is abandoned
        # Without server.log, clients that are left at an orderly end have most likely ended before.
        return cause != "terminated" or (self._server.names_clients and client.had_context)

    def _count_end(self, client: TrackedClient, when: Moment, *, known_end: bool) -> None:
        wait, client.wait = client.wait, None
        if wait is not None and self._server.names_clients:
            wait.abandon(when, NO_CONTEXT)
        when.increment("mps_client_disconnections_total", uid=client.uid)
        if known_end and client.pid and client.had_context and not client.from_control_tool:
            seconds = when.at - client.connected_at
            when.observe("mps_client_session_seconds", seconds, uid=client.uid)

    def _unnamed(self) -> list[TrackedClient]:
        return [client for client in self._clients.values() if client.pid == 0]

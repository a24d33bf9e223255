"""The clients of one server, as both logs and the control tool show them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.incidents_and_counters import Moment
from mps_exporter.mps.waits import Admissions, QueuedClient
from mps_exporter.snapshot import ClientState, Incident

if TYPE_CHECKING:
    from mps_exporter.mps.servers import TrackedServer


@dataclass(slots=True, eq=False)
class TrackedClient:
    """A client process that is connected."""

    pid: int
    uid: int | None
    connected_at: float
    contexts: dict[int, str] = field(default_factory=dict)  # Context ID -> GPU UUID or "".
    creating: dict[int, float] = field(default_factory=dict)
    """Contexts that are being created, not ACTIVE yet: ID -> time at which creation began."""
    had_context: bool = False
    active_since: float | None = None  # Time when its first context became ACTIVE (server.log).
    unmapped: bool = False  # A context became ACTIVE since the address ranges were last requested.
    torn_down_at: float | None = None  # Time of the fatal GPU error that took it down.
    wait: QueuedClient | None = None  # Its queue entry, until it has a context.
    terminating: bool = False  # An operator requested its termination.
    lost: bool = False  # Whether the client is lost: counted at most once.
    from_control_tool: bool = False  # Known from the control tool only.
    inferred: bool = False  # Known from control.log only.
    thread_ratio: float | None = None
    memory_limits: Mapping[int, int] | None = None  # Limits at its connection; None if unknown.
    missing_since: float | None = None  # Time since which its process is missing.
    key: int = 0  # Its PID; a unique negative number if the PID is 0.

    @property
    def contexts_by_gpu(self) -> dict[str, int]:
        """GPU UUID -> number of contexts."""
        return dict(Counter(self.contexts.values()))

    @property
    def state(self) -> tuple[ClientState | None, float | None]:
        """The client's state, and its start; None for what server.log does not show."""
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
        """Whether its last context is closed, so that it is not lost with its server."""
        return self.had_context and not (self.contexts or self.inferred)

    def lose(self, cause: str, when: Moment) -> None:
        self.lost = True
        when.count_loss(self.uid, cause)

    def count_termination(self, when: Moment) -> None:
        if not self.lost:
            self.lose("terminated", when)
            incident = Incident(when.at, "client_terminated", uid=self.uid, pids=(self.pid,))
            when.add_incident(incident)


class Associations:
    """Contexts of one server that have no GPU yet, oldest first.

    server.log names the GPU without the context:

        Client {PID: 440, Context ID: 1} connected
        Device NVIDIA H200 (uuid GPU-5e4dfbf1-...) is associated        with an unnamed context
        Status of client {PID: 440, Context ID: 1} is ACTIVE            that context

    The GPU is assigned to the oldest context without a GPU. The server's threads write in any
    order, so the status line that follows corrects the assignment.
    """

    def __init__(self, clients: Mapping[int, TrackedClient]) -> None:
        self._clients = clients
        self._waiting: deque[tuple[int, int]] = deque(maxlen=policy.MAX_CONTEXTS)
        """(key of the client, context ID)."""
        self._last: tuple[int, int] | None = None  # Context of the last GPU, until a status line.

    def add(self, key: int, context: int) -> None:
        self._waiting.append((key, context))

    def associate(self, uuid: str) -> None:
        """Assign a GPU to the oldest context without a GPU."""
        if not self._waiting:
            return
        key, context = self._waiting.popleft()
        client = self._clients.get(key)
        if client is not None and context in client.contexts:
            client.contexts[context] = uuid
            self._last = key, context

    def confirm(self, pid: int, context: int, *, active: bool) -> None:
        """Apply a context's status: the last GPU belongs to the ACTIVE context."""
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

    def __init__(self, server: TrackedServer) -> None:
        self.unfollowed = 0  # Connections beyond the quota, less disconnections of unknown clients.
        self.admissions = Admissions()
        self.ever_connected = False
        self._server = server
        self._clients: dict[int, TrackedClient] = {}
        self.associations = Associations(self._clients)
        self._unnamed_key = 0
        self._unnamed_disconnections = 0  # Clients that disconnected without the log showing which.
        self._terminating_pid: int | None = None
        self._handover_counted = False

    def __iter__(self) -> Iterator[TrackedClient]:
        return iter(list(self._clients.values()))

    def __len__(self) -> int:
        """Return the number of connected client processes, without those that left unnamed."""
        return max(0, len(self._clients) - self._unnamed_disconnections)

    @property
    def may_have_context(self) -> bool:
        """Whether a client has an ACTIVE context, or may have an unlogged context."""
        return any(
            client.contexts.keys() - client.creating.keys()
            or client.from_control_tool
            or client.inferred
            for client in self
        )

    def get(self, pid: int) -> TrackedClient | None:
        return self._clients.get(pid)

    def sole_new_client(self) -> int | None:
        """Return the PID if only one client creates its first context: refusals may lack a PID."""
        new = [client.pid for client in self if client.creating and not client.had_context]
        return new[0] if len(new) == 1 and new[0] else None

    def find(self, pid: int, context: int | None = None) -> TrackedClient | None:
        """Return a client; for PID 0, one with this context, or else one that is leaving.

        Else one without contexts, which close before a client ends, and else the oldest.
        """
        if pid:
            return self._clients.get(pid)

        def order(one: TrackedClient) -> tuple[bool, bool, bool]:
            return context not in one.contexts, not one.leaving, bool(one.contexts)

        return min(self._unnamed(), key=order, default=None)

    def gpu_of(self, pid: int, context: int) -> str:
        client = self.find(pid, context)
        return "" if client is None else client.contexts.get(context, "")

    def admit(self, entry: QueuedClient, when: Moment) -> None:
        self.admissions.mark_admitted(entry.pid)
        if entry.pid and (known := self._clients.get(entry.pid)) is not None:
            # The timestamps are equal, and server.log came first.
            if not known.had_context:
                known.wait = known.wait or entry
            return
        self.admissions.add(entry, when)
        if not self._server.names_clients:
            self.connect(entry.pid, when)

    def readmit(self, pid: int) -> None:
        """Record that the daemon sends a client to the server again, for a context."""
        client = self._clients.get(pid)
        if client is not None and not self._server.names_clients:
            client.had_context = True

    def connect_admitted(self, when: Moment) -> None:
        """Count all admitted clients as connected: the server's log names no client."""
        for entry in self.admissions:
            self.connect(entry.pid, when._replace(at=entry.sent_at))

    def connect(self, pid: int, when: Moment) -> TrackedClient | None:
        """Add a client process that is connected. Return None beyond the quota."""
        known = self._clients.get(pid)
        if known is not None and (known.from_control_tool or known.inferred):
            if known.from_control_tool:
                when.increment("mps_client_connections_total", uid=known.uid)
            known.from_control_tool = known.inferred = False
            return known
        server = self._server
        wait = self.admissions.pop(pid) or server.daemon.queue.pop_client(pid, server.uid)
        uid = server.uid if wait is None else wait.uid
        if known is not None:  # the PID was reused: the older client has exited
            self.disconnect(pid, when)
        client = TrackedClient(
            pid,
            uid,
            when.at,
            inferred=not (server.names_clients or server.deaf_since),
            thread_ratio=server.thread_ratio,
            memory_limits=None if server.start_unknown else server.memory_limits,
        )
        if not self._add(client):
            return None
        when.increment("mps_client_connections_total", uid=uid)
        if wait is not None:
            self.admissions.mark_admitted(pid)
            if client.inferred:
                self._serve(wait, when)  # its contexts are not visible
            else:
                client.wait = wait
        return client

    def adopt(self, pid: int, at: float) -> None:
        """Add a client that the control tool lists and whose connection is not in the log."""
        if pid not in self._clients:
            self._add(TrackedClient(pid, self._server.uid, at, from_control_tool=True))

    def _add(self, client: TrackedClient) -> bool:
        if len(self._clients) >= self._server.daemon.quota.clients:
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

    def open_context(self, pid: int, context: int, when: Moment) -> bool:
        """Open a context of a client. Return False if there are too many clients to follow."""
        if pid:
            client = self._clients.get(pid)
        else:
            client = next((one for one in self._unnamed() if context not in one.contexts), None)
        if client is None:
            client = self.connect(pid, when)
        if client is None:
            return False
        if context not in client.contexts and len(client.contexts) < policy.MAX_CONTEXTS:
            client.contexts[context] = ""
            client.creating[context] = when.at
            self.associations.add(client.key, context)
        return True

    def is_new_context(self, pid: int, context: int) -> bool:
        """Return whether the client is known, but this context is new."""
        client = self._clients.get(pid)
        return client is not None and context not in (client.contexts | client.creating)

    def activate_context(self, pid: int, context: int, when: Moment) -> bool:
        """Mark a context that was being created as ACTIVE. Return False if there is none."""
        candidates = self._unnamed() if pid == 0 else [self._clients.get(pid)]
        client = next((one for one in candidates if one and context in one.creating), None)
        if client is None:
            return False
        del client.creating[context]
        client.had_context = True
        client.unmapped = True
        client.active_since = when.at if client.active_since is None else client.active_since
        wait, client.wait = client.wait, None
        if wait is not None:
            self._serve(wait, when)
        return True

    def close_context(self, pid: int, context: int, when: Moment) -> None:
        self._server.daemon.evidence.client_ending(pid, when.at)
        client = self.find(pid, context)
        if client is None:
            return
        client.contexts.pop(context, None)
        client.creating.pop(context, None)
        if client.terminating:
            client.count_termination(when)

    def request_termination(self, pid: int, _context: int, _when: Moment) -> None:
        self._terminating_pid = pid
        client = self.find(pid)
        if client is not None:
            client.terminating = True

    def terminated(self, when: Moment) -> None:
        pid, self._terminating_pid = self._terminating_pid, None
        client = None if pid is None else self.find(pid)
        if client is not None:
            client.count_termination(when)

    def disconnect(self, pid: int, when: Moment) -> None:
        self.admissions.admitted.pop(pid, None)
        client = self.find(pid)
        if client is None:
            self.unfollowed = max(0, self.unfollowed - 1)
            return
        if client.terminating:
            client.count_termination(when)
        if pid and not client.had_context:
            self.admissions.refuse(pid, when)
        del self._clients[client.key]
        self._count_end(client, when, known_end=True)

    def drop(self, client: TrackedClient, when: Moment) -> None:
        """Remove a client that ended at an unknown time: its session is not observed."""
        client.from_control_tool = True
        self.disconnect(client.pid, when)

    def confirm_exit(self, client: TrackedClient, when: Moment) -> None:
        """Remove a client whose process has exited without a log line that names the client."""
        if self._unnamed_disconnections:
            self._unnamed_disconnections -= 1  # counted when it disconnected
            self.admissions.admitted.pop(client.pid, None)
            del self._clients[client.key]
        else:
            self.drop(client, when)

    def disconnect_unnamed(self, when: Moment) -> None:
        """Count the end of a client; which client it was shows when its process has exited."""
        if not self:
            return
        if len(self) == len(self._clients) == 1:
            self.disconnect(next(iter(self)).pid, when)
            return
        self._unnamed_disconnections += 1
        when.increment("mps_client_disconnections_total", uid=self._server.uid)
        if not self:
            self._clients.clear()
            self.admissions.admitted.clear()
            self._unnamed_disconnections = 0

    def end(self, cause: str, when: Moment, *, ghost: bool) -> list[int]:
        """End all clients with their server (cause "": they are not lost); return the lost PIDs."""
        lost = []
        for client in list(self)[self._unnamed_disconnections :]:
            if not client.lost and self._lost_with_server(client, cause, ghost=ghost):
                client.lose(cause, when)
                lost.append(client.pid)
            self._count_end(client, when, known_end=self._server.logs_pids is not False)
        self.admissions.expire(when, ended=True)
        return lost

    def _lost_with_server(self, client: TrackedClient, cause: str, *, ghost: bool) -> bool:
        if not cause or client.leaving or (ghost and client.wait is not None):
            return False  # the waiting client never had a context: its wait is abandoned
        # Without server.log, clients that remain at an orderly end have most likely ended before.
        return cause != "terminated" or (self._server.names_clients and client.had_context)

    def _count_end(self, client: TrackedClient, when: Moment, *, known_end: bool) -> None:
        self._server.daemon.evidence.client_ended(client.pid, when.at)
        wait, client.wait = client.wait, None
        if wait is not None and self._server.names_clients:
            wait.abandon(when, "no_context")  # it connected, and never had a context
        when.increment("mps_client_disconnections_total", uid=client.uid)
        if known_end and client.pid and client.had_context and not client.from_control_tool:
            seconds = when.at - client.connected_at
            when.observe("mps_client_session_seconds", seconds, uid=client.uid)

    def _unnamed(self) -> list[TrackedClient]:
        return [client for client in self._clients.values() if client.pid == 0]

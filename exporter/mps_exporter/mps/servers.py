"""The servers of one daemon: their start, their end, and their disappearance without a log line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.clients import ServerClients
from mps_exporter.mps.gpu_faults import ServerFaults
from mps_exporter.mps.incidents_and_counters import BoundedDict, Moment
from mps_exporter.mps.waits import QueuedClient
from mps_exporter.snapshot import Incident, PossibleUnfinishedWork, Wait

if TYPE_CHECKING:
    from mps_exporter.mps.state import DaemonState

_REFUSALS = {807: "server_not_ready", 808: "context_limit", 809: "context_limit"}
"""CUDA error with which a client is refused -> cause."""

_LOSSES = {"crashed": "server_crashed", "daemon_died": "daemon_died", "requested": "terminated"}
"""Cause of a server's exit -> loss cause of its clients."""


@dataclass(slots=True, eq=False)
class TrackedServer:
    """A server process with its clients and faults. Lines of server.log call its methods."""

    pid: int
    uid: int | None
    started_at: float
    daemon: DaemonState
    start_unknown: bool = False  # Its start is not in the log that was read.
    clients: ServerClients = field(init=False)
    faults: ServerFaults = field(init=False)
    ready_at: float | None = None
    failure: str = ""  # Reason of a failed start, as the logs show it.
    logs_pids: bool | None = None
    """False if its log does not name the client of a line (before driver 580)."""
    thread_ratio: float | None = None
    memory_limits: Mapping[int, int] = field(default_factory=dict)
    """Device ordinal -> bytes. Replaced, never changed: clients keep their limits."""
    devices: set[int] = field(default_factory=set)  # Ordinals.
    client_limit: int | None = None
    shares_by_file: bool = False  # Its memory for clients is a file in /dev/shm.
    has_log: bool = False  # The server has written to server.log.
    has_all_lines: bool = False  # Its first line was read, and no later line may be missing.
    exiting: bool = False  # Its log has the line of an orderly end.
    finishing: bool = False  # Its log has the line that precedes the line of an orderly end.
    missing_since: float | None = None  # Time since which its process is missing.
    unlisted_since: float | None = None  # Time since which the control tool omits the server.
    contradiction: tuple[float, frozenset[int]] = (0.0, frozenset())
    """The control tool's last contradiction of the log: time, and the clients."""
    ghost: bool = False
    shutdown_requested_at: float | None = None
    """Time of the daemon's last shutdown request, unless the server declined it."""
    deaf_since: float | None = None
    """Time at which its log shows a client without credentials: the client had died, or no file
    descriptor was free. Since then the server accepts no client (48 of 48 on an H200), and only
    serves its connected clients."""
    may_be_deaf: bool = False  # Lines were lost since its last connection request.
    _counted_refusals: deque[float] = field(default_factory=lambda: deque(maxlen=policy.MAX_RECENT))
    """Times of counted refusals whose status lines may follow."""
    _queued_dead: dict[int, bool] = field(default_factory=dict)
    """PIDs queued for it that had no context yet -> whether known to have exited."""
    _queued_unnamed: bool = False  # A client with PID 0 was queued for it, too.

    def __post_init__(self) -> None:
        self.clients = ServerClients(self)
        self.faults = ServerFaults(self)

    @property
    def names_clients(self) -> bool:
        """Whether server.log shows which clients connect and disconnect."""
        return self.daemon.readable["server"] and self.logs_pids is not False

    @property
    def state(self) -> str:
        """INITIALIZING until Ready or used, FAULT in a fault, else ACTIVE."""
        if self.ready_at is None and not self.clients.ever_connected:
            return "INITIALIZING"
        return "FAULT" if self.faults else "ACTIVE"

    @property
    def is_ghost(self) -> bool | None:
        """Whether the server is a ghost whose process still exists.

        None if not a known ghost while server.log, which alone excludes one, is unreadable or may
        lack the line that makes it deaf; and for a deaf server whose clients may work unlogged.
        """
        if self.deaf_since is not None and (self._hides_clients() or not self.ghost):
            return None
        if self.ghost:
            return self.missing_since is None
        return False if self.daemon.readable["server"] and not self.may_be_deaf else None

    @property
    def possible_unfinished_work(self) -> PossibleUnfinishedWork | None:
        return self.faults.endings.possible_unfinished_work

    def set_owner(self, uid: int, _when: Moment) -> None:
        self.uid = uid if self.uid is None else self.uid

    def share_by_file(self, _when: Moment) -> None:
        self.shares_by_file = True

    def set_memory_limit(self, device: int, limit_bytes: int, _when: Moment) -> None:
        if device in self.memory_limits or len(self.memory_limits) < policy.MAX_GPUS:
            self.memory_limits = {**self.memory_limits, device: limit_bytes}

    def add_device(self, device: int, _when: Moment) -> None:
        if len(self.devices) < policy.MAX_GPUS:
            self.devices.add(device)

    def set_thread_ratio(self, ratio: float, _when: Moment) -> None:
        """Set the limit of later clients; the first limit also applies to earlier clients."""
        if self.thread_ratio is None:  # written once, when the server starts
            for client in self.clients:
                client.thread_ratio = ratio
        self.thread_ratio = ratio

    def expect(self, entry: QueuedClient) -> None:
        if entry.pid:
            self._queued_dead.setdefault(entry.pid, entry.dead)
        else:
            self._queued_unnamed = True

    def awaited_pids(self) -> list[int]:
        """Return the PIDs it was started for, not known as dead, until a client connects."""
        if self.clients.ever_connected:
            return []
        return [pid for pid, dead in self._queued_dead.items() if not dead]

    def note_missing_queued(self, alive: Callable[[int, float], bool | None]) -> None:
        """Record which of the processes that it was started for have exited."""
        for pid in self.awaited_pids():
            if alive(pid, self.started_at) is False:
                self._queued_dead[pid] = True

    def detect_ghost(self, when: Moment) -> None:
        """Set whether it is a ghost: ready, all queued clients dead, and no client connected."""
        if self.deaf_since is not None:
            return
        if self.clients.ever_connected or self.ready_at is None:
            self.ghost = False
        elif self.names_clients and not self.has_all_lines:
            return
        elif self._queued_dead and all(self._queued_dead.values()) and not self._queued_unnamed:
            self._become_ghost(when)

    def _hides_clients(self) -> bool:
        """Return whether clients from before it was deaf may do what the log does not show."""
        seen = self.has_all_lines and self.names_clients and not self.clients.unfollowed
        deaf = self.deaf_since
        return not seen and any(deaf and one.connected_at <= deaf for one in self.clients)

    def credentials_missing(self, when: Moment) -> None:
        """Record that it is deaf: a ghost if all clients that would be lost with it are known."""
        self.deaf_since = when.at
        known = self.has_all_lines and not self.clients.unfollowed
        if known and not any(client.inferred for client in self.clients):
            self._become_ghost(when)

    def _become_ghost(self, when: Moment) -> None:
        if self.ghost:
            return
        self.ghost = True
        dead = tuple(sorted(pid for pid in self._queued_dead if self.clients.get(pid) is None))
        when.add_incident(Incident(when.at, "ghost", server_pid=self.pid, uid=self.uid, pids=dead))

    def ghost_waits(self) -> list[Wait]:
        """Return the waits of queued clients that are connected to it while it is a ghost."""
        waits = [one.wait for one in self.clients if self.ghost and one.wait and one.wait.blocked]
        return [Wait(wait.pid, wait.uid, wait.since, self.uid) for wait in waits]

    def request_connection(self, _when: Moment) -> None:
        """Record a connection request. Its PID is not the client's; later lines have the PID."""
        self.logs_pids, self.may_be_deaf = True, False
        if self.deaf_since is not None:  # never seen: it accepts clients after all
            self.ghost, self.deaf_since = False, None

    def request_unnamed_connection(self, when: Moment) -> None:
        """Record a connection request on a driver whose lines do not name clients."""
        if self.logs_pids is None:
            self.logs_pids = False
            self.clients.connect_admitted(when)

    def connect(self, pid: int, context: int, when: Moment) -> None:
        """Connect a client process (context 0) or a context of a client (from 1 on)."""
        self.logs_pids = True
        if not context:
            self.clients.connect(pid, when)
        else:
            self._open_context(pid, context, when)

    def _open_context(self, pid: int, context: int, when: Moment) -> None:
        if self.clients.open_context(pid, context, when):
            self.faults.endings.client_continues(pid, when.at)

    def associate_gpu(self, uuid: str, _when: Moment) -> None:
        """Assign a GPU to the oldest context without a GPU."""
        self.daemon.gpus.add_gpu(uuid)
        self.clients.associations.associate(uuid)

    def context_active(self, pid: int, context: int, when: Moment) -> None:
        """Mark a context as usable; a context refused for the limit never becomes ACTIVE."""
        if self.clients.is_new_context(pid, context):
            # A server's threads write in any order: the line of the context's connection follows.
            self._open_context(pid, context, when)
        if self.clients.activate_context(pid, context, when):
            self._queued_dead.pop(pid, None)
            self.daemon.evidence.client_active(pid)
        self.faults.endings.forget((self.clients.gpu_of(pid, context),))
        self.clients.associations.confirm(pid, context, active=True)

    def context_inactive(self, pid: int, context: int, _when: Moment) -> None:
        self.clients.associations.confirm(pid, context, active=False)

    def connection_lost(self, pid: int, context: int, when: Moment) -> None:
        """Record that a context (from 1 on) or a process (context 0) closed its connection.

        This is the first sign of an end; the next two lines are late if other clients end, too.
        """
        if context:
            self.faults.endings.context_ends(pid, context, when)
        else:
            self.faults.process_ends(pid, when)
        if self.deaf_since is not None:  # then these lines are missing (measured)
            clients = self.clients
            clients.close_context(pid, context, when) if context else clients.disconnect(pid, when)

    def limit_reached(self, limit: int, when: Moment) -> None:
        """Count a refused client: `limit` contexts exist, or (0) too many device connections."""
        self.client_limit = limit or self.client_limit
        pid = self.clients.sole_new_client()
        self._count_refusal("context_limit", () if pid is None else (pid,), when)

    def refuse_in_teardown(self, pid: int, context: int, when: Moment) -> None:
        """Count the refusal of a client: the server is recovering from a fault."""
        self._count_refusal("server_not_ready", (pid,), when)
        self._refuse(pid, context, when)

    def accept_failed(self, pid: int, context: int, status: int, when: Moment) -> None:
        """Count a refusal with this CUDA error, unless a line with its cause was counted."""
        counted = self._counted_refusals
        while counted and when.at - counted[0] > policy.REFUSAL_SECONDS:
            counted.popleft()
        if counted:
            counted.popleft()
        elif status in _REFUSALS:
            when.count_rejection(self.uid, _REFUSALS[status], (pid,))
        self._refuse(pid, context, when)

    def _count_refusal(self, cause: str, pids: tuple[int, ...], when: Moment) -> None:
        when.count_rejection(self.uid, cause, pids)
        self._counted_refusals.append(when.at)

    def _refuse(self, pid: int, context: int, when: Moment) -> None:
        if pid and not context and self.clients.get(pid) is None:
            self.clients.admissions.refuse(pid, when)

    def finish(self, _when: Moment) -> None:
        self.finishing = True

    def only_seen_after(self, at: float) -> bool:
        """Return whether nothing shows that it ran before this time.

        Logs that are read late have lines from before the control tool's list; and of two lines
        with equal timestamps the line of server.log is applied first.
        """
        return self.start_unknown and self.started_at >= at

    @property
    def failed_to_start(self) -> bool:
        """Whether the server, whose start was logged, was never ready."""
        return self.ready_at is None and not self.clients.ever_connected and not self.start_unknown

    def _had_to_end(self, at: float) -> bool:
        """Return whether the daemon requested its end or, if that is not logged, had a reason."""
        daemon, requested_at = self.daemon.daemon, self.shutdown_requested_at
        if daemon.logs_shutdown_requests:
            return requested_at is not None and at - requested_at <= policy.SHUTDOWN_TIMEOUT_SECONDS
        others_wait = any(entry.uid != self.uid for entry in self.daemon.queue)
        return daemon.quit_requested_at is not None or others_wait

    def exit_cause(self, status: int | None, at: float) -> tuple[str, str]:
        """Return why it ended (label `cause` of mps_server_exits_total), and how that is known.

        The exit status in control.log proves nothing: it is 0 after SIGKILL, too (driver 580).
        `status` is None if that log cannot be read.
        """
        lost_at = self.daemon.server_log_lost_at
        log_lost = lost_at is not None and lost_at >= at - policy.SHUTDOWN_TIMEOUT_SECONDS
        seen = "its exit status cannot be seen" if status is None else f"exit status {status}"
        if self.exiting or (self.finishing and not self.clients):
            return "requested", ""
        if self.ghost and not self.clients.may_have_context:
            return "ghost_ended", seen  # usually killed by an operator
        if self.failed_to_start:
            return "start_failed", f"{seen}, {self.failure}" if self.failure else seen
        orderly = self._had_to_end(at)
        if log_lost and orderly and not self.clients:
            return "requested", ""
        if self.names_clients and self.has_log:  # its log would show an orderly end
            seen += ", no orderly end in server.log"
            seen += ", of which lines were lost" if log_lost else ""
            return "crashed", f"{seen}, although it had been asked to end" if orderly else seen
        cause = "crashed" if status or not orderly else "requested"
        return cause, seen if status is None else f"{seen}, judged by control.log alone"

    def end(self, cause: str, when: Moment, detail: str) -> None:
        self.faults.run_timers()
        lost = tuple(self.clients.end(_LOSSES.get(cause, ""), when, ghost=self.ghost))
        when.counters.set_latest("mps_server_last_exit_timestamp_seconds", when.at, cause=cause)
        when.increment("mps_server_exits_total", cause=cause)
        at, pid, uid = when.at, self.pid, self.uid
        if cause == "crashed":
            when.add_incident(Incident(at, "server_crashed", pid, uid, pids=lost, detail=detail))
        elif cause == "ghost_ended":
            when.add_incident(Incident(at, "ghost_ended", pid, uid))
        elif cause == "start_failed":
            when.add_incident(Incident(at, "server_start_failed", uid=uid, detail=detail))


class Servers:
    """The servers that are running, in the order in which they were started."""

    def __init__(self, daemon: DaemonState) -> None:
        self._daemon = daemon
        self._servers: BoundedDict[int, TrackedServer] = BoundedDict(daemon.quota.servers)
        self._ended_pids: BoundedDict[int, None] = BoundedDict(policy.MAX_RECENT)
        self._vanished: BoundedDict[int, TrackedServer] = BoundedDict(daemon.quota.servers)
        """Servers that disappeared without a line in the log, which may follow."""

    def __iter__(self) -> Iterator[TrackedServer]:
        return iter(list(self._servers.values()))

    def get(self, pid: int) -> TrackedServer | None:
        return self._servers.get(pid)

    def has_ended(self, pid: int) -> bool:
        return pid in self._ended_pids

    def latest(self, uid: int | None = None) -> TrackedServer | None:
        """Return this user's server, or else the server that was started last."""
        own = (server for server in self if uid is not None and server.uid == uid)
        return next(own, None) or next(reversed(self._servers.values()), None)

    def adopt(self, pid: int, at: float) -> TrackedServer:
        """Add a running server whose start is not in the log."""
        self._servers[pid] = TrackedServer(pid, None, at, self._daemon, start_unknown=True)
        return self._servers[pid]

    def start(self, pid: int, uid: int, when: Moment) -> None:
        server = self._servers.get(pid)
        if server is not None and server.start_unknown:
            # The timestamps are equal, and server.log came first.
            server.uid, server.started_at, server.start_unknown = uid, when.at, False
        else:
            server = self._servers[pid] = TrackedServer(pid, uid, when.at, self._daemon)
        self._daemon.queue.block_others(uid, when)
        for entry in self._daemon.queue:
            if entry.uid == uid:
                server.expect(entry)
        when.increment("mps_server_starts_total", uid=uid)

    def ready(self, server: TrackedServer, when: Moment) -> None:
        """Record that a server accepts clients, and admit the queued clients of its user."""
        if server.ready_at is not None:
            return
        server.ready_at = when.at
        if not server.start_unknown:
            when.observe("mps_server_startup_seconds", when.at - server.started_at)
        if server.uid is None:
            return
        for entry in self._daemon.queue.pop_user(server.uid):
            server.expect(entry)
            if not entry.dead:
                server.clients.admit(entry, when)

    def remove(self, server: TrackedServer) -> None:
        del self._servers[server.pid]
        self._ended_pids[server.pid] = None

    def mark_vanished(self, server: TrackedServer) -> None:
        """Remove a server that disappeared, for an unknown cause, without a line in the log."""
        server.faults.run_timers()
        self.remove(server)
        self._vanished[server.pid] = server

    def restore_vanished(self, pid: int) -> TrackedServer | None:
        """Restore a removed server that the log or the control tool names after all."""
        server = self._vanished.pop(pid, None)
        if server is not None:
            self._servers[pid] = server
            self._ended_pids.pop(pid, None)
            server.missing_since = server.unlisted_since = None
        return server

    def forget_vanished(self) -> None:
        """Forget the servers of the last daemon: their lines will not follow."""
        self._vanished.clear()

    def drop_foreign(self, pid: int) -> None:
        """Drop a server of another daemon, known from its own lines only."""
        server = self._servers.get(pid)
        if server is not None and server.start_unknown:
            del self._servers[pid]

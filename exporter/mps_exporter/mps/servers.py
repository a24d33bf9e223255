"""The servers of one daemon: their start, their end, and those that ended without a log line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from mps_exporter.mps.clients import ServerClients, ServerInfo
from mps_exporter.mps.fault_evidence import FaultEvidence
from mps_exporter.mps.faults import ServerFaults
from mps_exporter.mps.record import FULL, GpuNames, Moment, Quota
from mps_exporter.mps.waits import ClientQueue, QueuedClient
from mps_exporter.observations import LogName
from mps_exporter.snapshot import PossibleUnfinishedWork, Wait

MAX_ENDED = 256

SHUTDOWN_SECONDS = 5.0
"""A server that agrees to end has ended by then: 0.06 to 0.1 s were measured on driver 580."""

_LOSSES = {"crashed": "server_crashed", "daemon_died": "daemon_died", "requested": "terminated"}
"""Cause of a server's exit -> loss cause of its clients."""


class TrackedServer(ServerInfo):
    """A server process with its clients and faults."""

    def __init__(
        self,
        pid: int,
        uid: int | None,
        at: float,
        *,
        start_unknown: bool,
        readable: Mapping[LogName, bool],
        queue: ClientQueue,
        gpus: GpuNames,
        evidence: FaultEvidence,
        quota: Quota = FULL,
    ) -> None:
        super().__init__(pid, uid, at, readable, start_unknown=start_unknown)
        self.gpus = gpus
        self.evidence = evidence
        self.clients = ServerClients(self, queue, quota)
        self.faults = ServerFaults(self, self.clients, gpus, evidence)
        self.client_limit: int | None = None
        self.has_log = False
        """It has written to server.log."""
        self.exiting = False
        """Its log has the line of an orderly end."""
        self.finishing = False
        """Its log has the line that precedes that one."""
        self.missing_since: float | None = None
        """When its process was first seen to be gone."""
        self.unlisted_since: float | None = None
        """Since when the control tool does not list it."""
        self.contradiction: tuple[float, frozenset[int]] = (0.0, frozenset())
        """When the control tool last contradicted the log, and about which clients."""
        self.reported_state: str | None = None
        """The control tool's word, while server.log cannot be read."""
        self.ghost = False
        self._credentials_missing = False
        """Its log says that a queued client sent no credentials: that client was dead already.
        Whatever connects, the server serves nothing from then on."""
        self._shutdown_requested_at: float | None = None
        """When the daemon last asked it to end; None also after it declined."""
        self._queued_dead: dict[int, bool] = {}
        """PIDs that were queued for it -> known to be gone."""
        self._queued_unnamed = False
        """A client with PID 0 was queued for it, too."""

    @property
    def state(self) -> str:
        """INITIALIZING until Ready, FAULT from a fatal error to its recovery, else ACTIVE."""
        state = "FAULT" if self.faults else "ACTIVE"
        if self.ready_at is None and not self.clients.ever_connected:
            state = "INITIALIZING"
        return self.reported_state or state

    @property
    def is_ghost(self) -> bool | None:
        """Whether it is a ghost that is still there.

        None: without server.log that shows only while no client connects.
        """
        if self.ghost:
            return self.missing_since is None
        return False if self.readable["server"] else None

    @property
    def possible_unfinished_work(self) -> PossibleUnfinishedWork | None:
        """Work that the last client on a GPU may have left there."""
        return self.faults.endings.possible_unfinished_work

    @property
    def occupied(self) -> bool:
        """Whether a client is connected."""
        return self.clients.count > 0

    def set_thread_ratio(self, ratio: float) -> None:
        """Clients that connect from now on have this limit."""
        if self.thread_ratio is None:  # written once, when the server starts
            for client in self.clients:
                client.thread_ratio = ratio
        self.thread_ratio = ratio

    # ------------------------------------------------------------------ those it was started for

    def expect(self, entry: QueuedClient) -> None:
        """A client waits for this server."""
        if entry.pid:
            self._queued_dead.setdefault(entry.pid, entry.dead)
        else:
            self._queued_unnamed = True

    def awaited_pids(self) -> list[int]:
        """Return the living processes that it was started for, until a client connects."""
        if self.clients.ever_connected:
            return []
        return [pid for pid, dead in self._queued_dead.items() if not dead]

    def note_missing_queued(self, alive: Callable[[int, float], bool | None]) -> None:
        """Note which of those that it was started for are gone."""
        for pid in self.awaited_pids():
            if alive(pid, self.started_at) is False:
                self._queued_dead[pid] = True

    def detect_ghost(self, when: Moment) -> None:
        """It is ready, the clients that it was started for are dead, and no client connected."""
        if self._credentials_missing:
            return
        if self.clients.ever_connected or self.ready_at is None:
            self.ghost = False
        elif self.names_clients and not self.has_log:
            return  # what should show who connected is not its log, or has lost lines
        elif self._queued_dead and all(self._queued_dead.values()) and not self._queued_unnamed:
            self.become_ghost(when)

    def credentials_missing(self, when: Moment) -> None:
        """Its log says that a queued client sent no credentials.

        A server that has no file descriptor left writes the same, and serves those it has.
        """
        if self.clients.may_have_context:
            return
        self._credentials_missing = True
        self.become_ghost(when)

    def become_ghost(self, when: Moment) -> None:
        """It waits for a client that died in the queue."""
        if not self.ghost:
            self.ghost = True
            dead = sorted(pid for pid in self._queued_dead if self.clients.get(pid) is None)
            when.add_incident("ghost", server_pid=self.pid, uid=self.uid, pids=dead)

    def ghost_waits(self) -> list[Wait]:
        """Return the waits of clients that are connected to it while it is a ghost."""
        if not self.ghost:
            return []
        waits = [client.wait for client in self.clients if client.wait is not None]
        return [Wait(wait.pid, wait.uid, wait.since, self.uid) for wait in waits]

    # ------------------------------------------------------------------ contexts

    def open_context(self, pid: int, context: int, when: Moment) -> None:
        """A client opens a context."""
        if self.clients.open_context(pid, context, when):
            self.faults.endings.client_continues(pid, when.at)

    def context_active(self, pid: int, context: int, when: Moment) -> None:
        """A context can be used; one that is refused for the limit never becomes ACTIVE."""
        if self.clients.is_new_context(pid, context):
            # The server's threads write in any order: the line of its connection follows.
            self.open_context(pid, context, when)
        if self.clients.activate_context(pid, context, when):
            self.ghost = self._credentials_missing = False
            self.evidence.client_active(pid)
        self.faults.endings.context_ready(self.clients.gpu_of(pid, context), when)

    # ------------------------------------------------------------------ its end

    def shutdown_requested(self, at: float | None) -> None:
        """The daemon asks it to end; None: it declined."""
        self._shutdown_requested_at = at

    def agreed_to_end(self, at: float) -> bool:
        """Whether its end at this moment was requested by the daemon (driver 580)."""
        requested_at = self._shutdown_requested_at
        return requested_at is not None and at - requested_at <= SHUTDOWN_SECONDS

    def only_seen_after(self, at: float) -> bool:
        """Whether nothing shows that it ran before this moment.

        Where logs are read late, as on a slow file system, their lines tell of the time before the
        control tool listed it. And of two lines with equal stamps that of server.log comes first,
        although the daemon wrote of its own start before.
        """
        return self.start_unknown and self.started_at >= at

    @property
    def failed_to_start(self) -> bool:
        """Whether it never was ready."""
        return self.ready_at is None and not self.clients.ever_connected and not self.start_unknown

    @property
    def logs_exit(self) -> bool:
        """Whether its log would show an orderly end."""
        return self.names_clients and self.has_log

    def exit_cause(
        self, status: int | None, at: float, *, had_to_end: bool | None, log_lost: bool = False
    ) -> tuple[str, str]:
        """Return why it ended (label `cause` of mps_server_exits_total), and how that is known.

        The exit status in control.log proves nothing: it is 0 after SIGKILL, too (driver 580).

        Args:
            status: Its exit status in control.log; None: it cannot be seen.
            at: When it ended.
            had_to_end: Whether the daemon was asked to quit, or another user waited: where the
                daemon does not log that it asks a server to end. None: it does.
            log_lost: Whether lines of server.log were lost in the seconds before.
        """
        seen = "its exit status cannot be seen" if status is None else f"exit status {status}"
        if self.exiting or (self.finishing and not self.occupied):
            return "requested", ""
        if self.ghost:
            return "ghost_ended", seen  # most often killed, as it must be
        if self.failed_to_start:
            return "start_failed", f"{seen}, {self.failure}" if self.failure else seen
        orderly = self.agreed_to_end(at) if had_to_end is None else had_to_end
        if log_lost and orderly and not self.occupied:
            return "requested", ""
        if self.logs_exit:
            seen += ", no orderly end in server.log"
            seen += ", of which lines were lost" if log_lost else ""
            return "crashed", f"{seen}, although it had been asked to end" if orderly else seen
        cause = "crashed" if status or not orderly else "requested"
        return cause, seen if status is None else f"{seen}, judged by control.log alone"

    def end(self, cause: str, when: Moment, detail: str) -> None:
        self.faults.decide_all(when)
        lost = self.clients.end(_LOSSES.get(cause, ""), when, ghost=self.ghost)
        when.counters.set_latest("mps_server_last_exit_timestamp_seconds", when.at, cause=cause)
        when.increment("mps_server_exits_total", cause=cause)
        if cause == "crashed":
            when.add_incident(
                "server_crashed", server_pid=self.pid, uid=self.uid, pids=lost, detail=detail
            )
        elif cause == "ghost_ended":
            when.add_incident("ghost_ended", server_pid=self.pid, uid=self.uid)
        elif cause == "start_failed":
            when.add_incident("server_start_failed", uid=self.uid, detail=detail)


class Servers:
    """The servers that are running, in the order in which they were started."""

    def __init__(
        self,
        readable: Mapping[LogName, bool],
        queue: ClientQueue,
        gpus: GpuNames,
        evidence: FaultEvidence,
        quota: Quota = FULL,
    ) -> None:
        self._quota = quota
        self._readable = readable
        self._queue = queue
        self._gpus = gpus
        self._evidence = evidence
        self._servers: dict[int, TrackedServer] = {}
        self._ended_pids: deque[int] = deque(maxlen=MAX_ENDED)
        self._vanished: dict[int, TrackedServer] = {}
        """Servers that are gone without a line in the log, which may follow."""

    def __iter__(self) -> Iterator[TrackedServer]:
        return iter(list(self._servers.values()))

    def get(self, pid: int) -> TrackedServer | None:
        return self._servers.get(pid)

    def has_ended(self, pid: int) -> bool:
        """Whether a server with this PID has ended."""
        return pid in self._ended_pids

    def latest(self, uid: int | None = None) -> TrackedServer | None:
        """Return the server that was started last; this user's if there is one."""
        latest = None
        for server in self._servers.values():
            if uid is not None and server.uid == uid:
                return server
            latest = server
        return latest

    def adopt(self, pid: int, at: float) -> TrackedServer:
        """A server is running whose start is not in the log."""
        return self._add(pid, None, at, start_unknown=True)

    def start(self, pid: int, uid: int, when: Moment) -> None:
        """The daemon starts a server process."""
        server = self._servers.get(pid)
        if server is not None and server.start_unknown:
            # The stamps are equal, and server.log came first.
            server.uid, server.started_at, server.start_unknown = uid, when.at, False
        else:
            server = self._add(pid, uid, when.at, start_unknown=False)
        self._queue.block_others(uid, when)
        for entry in self._queue:
            if entry.uid == uid:
                server.expect(entry)

    def ready(self, server: TrackedServer, when: Moment) -> None:
        """A server accepts clients: those in the queue for its user are sent to it."""
        if server.ready_at is not None:
            return
        server.ready_at = when.at
        if not server.start_unknown:
            when.observe("mps_server_startup_seconds", when.at - server.started_at)
        if server.uid is None:
            return
        for entry in self._queue.pop_user(server.uid):
            server.expect(entry)
            if not entry.dead:
                server.clients.admit(entry.pid, entry.uid, when, entry)

    def remove(self, server: TrackedServer) -> None:
        del self._servers[server.pid]
        self._ended_pids.append(server.pid)

    def mark_vanished(self, server: TrackedServer, when: Moment) -> None:
        """A server is gone, and the log does not say so: its cause is not known."""
        server.faults.decide_all(when)
        self.remove(server)
        self._vanished[server.pid] = server
        while len(self._vanished) > self._quota.servers:
            del self._vanished[next(iter(self._vanished))]

    def restore_vanished(self, pid: int) -> TrackedServer | None:
        """The log or the control tool names a server that was thought to be gone."""
        server = self._vanished.pop(pid, None)
        if server is not None:
            self._servers[pid] = server
            self._ended_pids.remove(pid)
            server.missing_since = server.unlisted_since = None
        return server

    def forget_vanished(self) -> None:
        """The daemon was restarted: their log lines will not follow."""
        self._vanished.clear()

    def drop_foreign(self, pid: int) -> None:
        """A server that only its own lines show belongs to another daemon."""
        server = self._servers.get(pid)
        if server is not None and server.start_unknown:
            del self._servers[pid]

    def _add(self, pid: int, uid: int | None, at: float, *, start_unknown: bool) -> TrackedServer:
        while len(self._servers) >= self._quota.servers:
            del self._servers[next(iter(self._servers))]
        server = self._servers[pid] = TrackedServer(
            pid,
            uid,
            at,
            start_unknown=start_unknown,
            readable=self._readable,
            queue=self._queue,
            gpus=self._gpus,
            evidence=self._evidence,
            quota=self._quota,
        )
        return server

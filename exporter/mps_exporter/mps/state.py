"""The ledger's state, and everything that can be done to it.

The readers of the two logs (control_reader, server_reader) say what happened in the words used
here; what follows from it, and what is counted, is decided here.

Running totals are kept in whole milliseconds, as the logs' stamps are, so that they do not depend
on the steps in which time is advanced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mps_exporter.mps.counters import Counters
from mps_exporter.mps.incidents import MAX_PIDS, Incidents
from mps_exporter.mps.servers import (
    MAX_CLIENTS,
    MAX_CONTEXTS,
    Admission,
    Fault,
    TrackedClient,
    TrackedServer,
)
from mps_exporter.mps.unfinished_work import (
    DECISION_SECONDS,
    MAX_ENDINGS,
    QUEUED_END_SECONDS,
    Ending,
    Verdict,
    failed_start,
    judge,
    just_ended,
    last_on_gpu,
    suspects,
)
from mps_exporter.mps.waits import ClientQueue, QueuedClient
from mps_exporter.snapshot import Incident, IncidentKind

ADMISSION_SECONDS = 10.0
"""A client that was sent to a ready server connects within a millisecond (driver 580); one that
has not after this long will not."""

CREDENTIALS_SECONDS = 10.0
"""NEW CLIENT follows within a millisecond; a caller without one after this long was refused."""

FAULT_BLOCK_SECONDS = 0.5
"""All lines about one fault are written in one go."""

EXIT_CONFIRM_SECONDS = 1.0
"""A process was seen to be gone: its last lines are in the log by then, if it wrote any."""

SHUTDOWN_SECONDS = 5.0
"""A server that agrees to end has ended by then: 0.06 to 0.1 s were seen on driver 580."""

FORBIDDEN_START_ATTEMPTS = 6
"""How often the daemon tries a server that it may not start, before it lets the client go (580)."""

CLOCK_JUMP_MS = 60_000
"""Time that runs back by more than this has been set back."""

SIMULTANEOUS_SECONDS = 0.01
"""The two logs may tell of one thing in either order when their stamps are this close."""

NO_CONTEXT = "no_context"
"""Of a wait that was given up: the client came to its server, and never had a context."""

MAX_SERVERS = 64
MAX_ENDED = 256
MAX_UUIDS = 64
MAX_MISSING_CREDENTIALS = 256


@dataclass(slots=True)
class DaemonLifetime:
    """The control daemon's present life."""

    started_at: float | None = None
    pid: int | None = None
    binary_version: str | None = None
    quit_requested_at: float | None = None
    ended_at: float | None = None
    died: bool = False
    missing_since: float | None = None
    counted: bool = False
    """It started, or was seen, since the exporter began to look: so its end is news."""
    configured_at: float | None = None
    """Somebody last gave it a set_... command."""
    served_at: float | None = None
    """It last did something for a client or a server: its only thread was not stuck then."""
    silent_since: float | None = None
    """When it wrote a line that another one follows at once, and none has followed."""
    sent_at: float | None = None
    """When it sent a client to a server, and neither log has said more since."""
    logs_shutdown_requests: bool = False
    """Its log says when it asks a server to end (driver 580)."""
    backoff_seconds: float | None = None
    missing_credentials: deque[float] = field(
        default_factory=lambda: deque(maxlen=MAX_MISSING_CREDENTIALS)
    )
    """Callers without credentials that no NEW CLIENT has followed yet."""
    forbidden_starts: dict[int, int] = field(default_factory=dict)
    """User -> servers in a row that the daemon was not allowed to start."""


class DaemonState:
    """All that is known of one daemon."""

    def __init__(self) -> None:
        self.daemon = DaemonLifetime()
        self.servers: dict[int, TrackedServer] = {}
        self.ended_pids: deque[int] = deque(maxlen=MAX_ENDED)
        self.vanished: dict[int, TrackedServer] = {}
        """Servers that are gone without a line in the log, which may come yet."""
        self.queue = ClientQueue()
        self.counters = Counters()
        self.incidents = Incidents()
        self.ordinals: dict[int, str] = {}
        """Device ordinal of the daemon -> GPU UUID."""
        self.gpu_names: dict[str, str] = {}
        """GPU UUID -> name, of all that clients were associated with."""
        self.readable: dict[str, bool] = {"control": False, "server": False}
        self.server_heard_at: float | None = None
        """The last line of server.log."""
        self.clock_ms: int | None = None
        """Everything up to here is in the running totals."""
        self.counting_from_ms: int | None = None
        """Running totals begin here: when the exporter did."""

    # ------------------------------------------------------------------ time

    def advance_to(self, at: float) -> None:
        """Advance the running totals, and do what was due by then."""
        while (due := self._next_timer()) <= at:
            self._accumulate_until(due)
            self._run_timers(due)
        self._accumulate_until(at)

    def _accumulate_until(self, at: float) -> None:
        to = round(at * 1000.0)
        clock = self.clock_ms
        if clock is None or to <= clock:
            if clock is None or to < clock - CLOCK_JUMP_MS:
                self.clock_ms = to
            return
        start = clock if self.counting_from_ms is None else max(clock, self.counting_from_ms)
        if to > start:
            for server in self.servers.values():
                if server.occupied:
                    self.counters.accumulate(
                        "mps_uid_holding_seconds_total", to - start, uid=server.uid
                    )
            if self.is_idle_while_waiting():
                self.counters.accumulate("mps_uid_handover_idle_seconds_total", to - start)
        self.clock_ms = to

    def is_idle_while_waiting(self) -> bool:
        """Whether somebody waits behind another user while nobody uses the GPU."""
        for server in self.servers.values():
            if server.occupied or server.admissions:
                return False
        return self.queue.has_blocked_clients()

    def _next_timer(self) -> float:
        due = float("inf")
        if self.daemon.missing_credentials:
            due = self.daemon.missing_credentials[0] + CREDENTIALS_SECONDS
        for server in self.servers.values():
            if server.admissions:
                due = min(due, server.admissions[0].at + ADMISSION_SECONDS)
            if server.current_fault is not None:
                due = min(due, server.current_fault.at + FAULT_BLOCK_SECONDS)
            for fault in server.undecided:
                due = min(due, fault.at + DECISION_SECONDS)
            for last in server.last:
                due = min(due, last.resolved_at)
        return due

    def _run_timers(self, at: float) -> None:
        counting = self.counters.counting
        self.counters.counting = self.is_counted(at)
        for server in self.servers.values():
            while server.admissions and server.admissions[0].at + ADMISSION_SECONDS <= at:
                self.admission_expired(server.admissions.pop(0), at)
            if (
                server.current_fault is not None
                and server.current_fault.at + FAULT_BLOCK_SECONDS <= at
            ):
                self.close_fault_report(server)
            for fault in list(server.undecided):
                if fault.at + DECISION_SECONDS <= at:
                    self._decide(server, fault, final=True)
            # Where a newcomer has run, nothing had been left behind.
            server.last = [last for last in server.last if last.resolved_at > at]
        unanswered = self.daemon.missing_credentials
        while unanswered and unanswered[0] + CREDENTIALS_SECONDS <= at:
            unanswered.popleft()
            if self.daemon.quit_requested_at is None:  # a draining daemon answers nobody
                self.count_rejection(None, "credentials", (), at)
        self.counters.counting = counting

    def is_counted(self, at: float) -> bool:
        """Whether what happens at this moment is counted."""
        return self.counting_from_ms is None or round(at * 1000.0) >= self.counting_from_ms

    def add_incident(
        self,
        at: float,
        kind: IncidentKind,
        *,
        server_pid: int | None = None,
        uid: int | None = None,
        pids: Iterable[int] = (),
        blamed_pid: int | None = None,
        left_by_pid: int | None = None,
        ended_pids: Iterable[int] = (),
        gpu_uuids: Iterable[str] = (),
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Note something for the operator."""
        self.incidents.add(
            Incident(
                at=at,
                kind=kind,
                server_pid=server_pid,
                uid=uid,
                pids=tuple(pids),
                blamed_pid=blamed_pid,
                left_by_pid=left_by_pid,
                ended_pids=tuple(ended_pids)[:MAX_PIDS],
                gpu_uuids=tuple(uuid for uuid in gpu_uuids if uuid),
                seconds=None if seconds is None else round(max(seconds, 0.0), 3),
                detail=detail,
                counted=self.counters.counting,
            )
        )

    # ------------------------------------------------------------------ daemon

    def daemon_started(self, pid: int, at: float) -> None:
        """The log says that a control daemon came up: whatever was before it is gone."""
        daemon = self.daemon
        if (
            daemon.pid == pid
            and daemon.ended_at is None
            and daemon.started_at is not None
            and at - daemon.started_at <= 1.0
            and not self.servers
        ):
            return  # said in two lines
        self.advance_to(at)
        lives = daemon.started_at is not None and daemon.ended_at is None
        if lives or self.servers:
            self.daemon_died(at)
        self.daemon = DaemonLifetime(started_at=at, pid=pid)
        self.daemon.counted = self.counters.counting
        self.vanished.clear()
        self.ordinals.clear()
        self.counters.increment("mps_control_starts_total")
        self.add_incident(at, "daemon_started")

    def daemon_died(self, at: float) -> None:
        """It is gone without a word; its servers died with it."""
        lost = [pid for server in self.servers.values() for pid in _client_pids(server)]
        for server in list(self.servers.values()):
            self.end_server(server, at, "daemon_died")
        self._abandon_queue(at)
        self.daemon.ended_at = at
        self.daemon.died = True
        self.daemon.quit_requested_at = None
        self.daemon.missing_credentials.clear()
        self.add_incident(at, "daemon_died", pids=lost)

    def daemon_exited(self, at: float) -> None:
        """It says that it ends."""
        self.advance_to(at)
        for server in list(self.servers.values()):
            self.end_server(server, at, "requested")
        self._abandon_queue(at)
        self.daemon.ended_at = at
        self.daemon.quit_requested_at = None
        self.daemon.backoff_seconds = None
        self.daemon.missing_credentials.clear()
        self.add_incident(at, "daemon_quit")

    def _abandon_queue(self, at: float) -> None:
        for entry in self.queue.pop_all():
            self.wait_abandoned(entry, at)

    # ------------------------------------------------------------------ servers

    def latest_server(self, uid: int | None = None) -> TrackedServer | None:
        """The server that was started last; of this user, if one is."""
        latest = None
        for server in self.servers.values():
            if uid is not None and server.uid == uid:
                return server
            latest = server
        return latest

    def start_server(
        self, pid: int, uid: int | None, at: float, *, adopted: bool = False
    ) -> TrackedServer:
        """A server process was made."""
        self.advance_to(at)
        known = self.servers.get(pid)
        if known is not None and known.start_unknown and not adopted:
            # server.log spoke first: the stamps are equal.
            known.uid, known.started_at, known.start_unknown = uid, at, False
            server = known
        else:
            while len(self.servers) >= MAX_SERVERS:
                del self.servers[next(iter(self.servers))]
            server = TrackedServer(pid, uid, at, start_unknown=adopted)
            self.servers[pid] = server
        if uid is None:
            return server
        for entry in self.queue.mark_blocked(uid):
            self.wait_started(entry)
        own_entries = self.queue.for_user(uid)
        server.queued_pids.update({entry.pid: entry.dead for entry in own_entries if entry.pid})
        server.queued_unnamed += sum(1 for entry in own_entries if not entry.pid)
        return server

    def server_ready(self, server: TrackedServer, at: float) -> None:
        """A server takes clients: those in the queue for its user are sent to it."""
        self.advance_to(at)
        if server.ready_at is not None:
            return
        server.ready_at = at
        if not server.start_unknown:
            self.counters.observe("mps_server_startup_seconds", at - server.started_at)
        if server.uid is None:
            return
        self.daemon.forbidden_starts.pop(server.uid, None)
        for entry in self.queue.pop_user(server.uid):
            server.queued_pids.setdefault(entry.pid, entry.dead)
            if not entry.dead:
                self.admit(server, entry.pid, entry.uid, at, entry)

    def end_server(self, server: TrackedServer, at: float, cause: str, detail: str = "") -> None:
        """A server is gone."""
        self.advance_to(at)
        self.close_fault_report(server)
        for fault in list(server.undecided):
            self._decide(server, fault, final=True)
        lost: list[int] = []
        loss = {
            "crashed": "server_crashed",
            "daemon_died": "daemon_died",
            "requested": "terminated",
        }.get(cause)
        departed = server.unnamed_disconnections
        for client in server.clients.values():
            if departed:
                departed -= 1  # it left before, only its name is not known
                continue
            if loss is not None and self._lost_with_server(server, client, cause):
                self.count_loss(client, loss, at, lost)
            self._end_wait(server, client, at)
            self.count_disconnection(client, at, known_end=server.logs_pids is not False)
        for admission in server.admissions:
            self.admission_expired(admission, at)
        server.clients.clear()
        server.admissions.clear()
        del self.servers[server.pid]
        self.ended_pids.append(server.pid)
        self.daemon.backoff_seconds = None
        self.counters.set_latest("mps_server_last_exit_timestamp_seconds", at, cause=cause)
        self.counters.increment("mps_server_exits_total", cause=cause)
        if cause == "crashed":
            self.add_incident(
                at, "server_crashed", server_pid=server.pid, uid=server.uid, pids=lost,
                detail=detail,
            )  # fmt: skip
        elif cause == "ghost_ended":
            self.add_incident(at, "ghost_ended", server_pid=server.pid, uid=server.uid)
        elif cause == "start_failed":
            self.add_incident(at, "server_start_failed", uid=server.uid, detail=detail)

    def _lost_with_server(self, server: TrackedServer, client: TrackedClient, cause: str) -> bool:
        """Whether a server's end took this client along."""
        if client.leaving or (server.ghost and client.wait is not None):
            return False  # the latter never got so far: its wait is given up
        # Without server.log, who is left at an orderly end has most likely left before it.
        return cause != "requested" or (self.logs_client_pids(server) and client.had_context)

    def mark_vanished(self, server: TrackedServer) -> None:
        """A server is gone, and the log does not say so: there is no evidence of a cause."""
        for fault in list(server.undecided):
            self._decide(server, fault, final=True)
        del self.servers[server.pid]
        self.ended_pids.append(server.pid)
        self.vanished[server.pid] = server
        while len(self.vanished) > MAX_SERVERS:
            del self.vanished[next(iter(self.vanished))]

    def restore_vanished(self, pid: int) -> TrackedServer | None:
        """Take back a server that was thought to be gone: somebody speaks of it."""
        server = self.vanished.pop(pid, None)
        if server is not None:
            self.servers[pid] = server
            self.ended_pids.remove(pid)
            server.missing_since = server.unlisted_since = None
        return server

    def exit_cause(self, server: TrackedServer, status: int | None, at: float) -> tuple[str, str]:
        """Why a server ended, and how that is known.

        The status itself proves nothing: it is 0 after SIGKILL, too (driver 580). None where
        control.log, which alone tells it, cannot be read.
        """
        seen = "its exit status cannot be seen" if status is None else f"exit status {status}"
        if server.exiting:
            return "requested", ""
        if server.ghost:
            return "ghost_ended", seen  # most often killed, as it must be
        if server.ready_at is None and not server.ever_connected and not server.start_unknown:
            return "start_failed", seen
        if self.logs_exit(server):
            return "crashed", f"{seen}, no orderly end in server.log"
        if self.daemon.logs_shutdown_requests:
            requested = (
                server.shutdown_requested_at is not None
                and at - server.shutdown_requested_at <= SHUTDOWN_SECONDS
            )
            orderly = requested and not server.shutdown_declined
        else:
            orderly = self.daemon.quit_requested_at is not None or any(
                entry.uid != server.uid for entry in self.queue
            )
        cause = "crashed" if status or not orderly else "requested"
        if status is None:
            return cause, seen
        return cause, f"{seen}, judged by control.log alone"

    def logs_exit(self, server: TrackedServer) -> bool:
        """Whether an orderly end would stand in this server's log."""
        return self.readable["server"] and server.has_log and server.logs_pids is not False

    def logs_client_pids(self, server: TrackedServer) -> bool:
        """Whether server.log tells which clients come and go."""
        return self.readable["server"] and server.logs_pids is not False

    def server_forbidden(self, uid: int, at: float) -> None:
        """The daemon may not start a server for this user; it gives up after six attempts."""
        forbidden = self.daemon.forbidden_starts
        if len(forbidden) >= MAX_SERVERS and uid not in forbidden:
            forbidden.clear()
        forbidden[uid] = forbidden.get(uid, 0) + 1
        if forbidden[uid] >= FORBIDDEN_START_ATTEMPTS:
            del forbidden[uid]
            self.advance_to(at)
            for entry in self.queue.pop_user(uid):
                self.wait_abandoned(entry, at)

    # ------------------------------------------------------------------ waits

    def client_queued(self, pid: int, uid: int, at: float) -> None:
        """The daemon told a client to wait."""
        self.advance_to(at)
        entry, replaced = self.queue.push(pid, uid, at)
        if replaced is not None:
            self.wait_abandoned(replaced, at)
        server = self.latest_server(uid)
        if server is None:
            return
        if server.uid == uid:
            if pid:
                server.queued_pids.setdefault(pid, False)
            else:
                server.queued_unnamed += 1
            return
        entry.behind_uid = server.uid
        if not entry.blocked:
            entry.blocked = True
            self.wait_started(entry)

    def wait_started(self, entry: QueuedClient) -> None:
        """A client waits behind another user's server."""
        self.add_incident(entry.since, "wait_started", uid=entry.uid, pids=(entry.pid,))

    def wait_served(self, server: TrackedServer, entry: QueuedClient, at: float) -> None:
        """A queued client has a context; the wait itself was over when the server was ready."""
        if not entry.blocked or entry.dead:
            return
        waited = max(at if server.ready_at is None else server.ready_at, entry.since) - entry.since
        self.counters.observe("mps_uid_wait_seconds", waited, uid=entry.uid)
        if not server.handover_counted:
            server.handover_counted = True
            self.counters.increment("mps_uid_handovers_total")
        self.add_incident(at, "wait_served", uid=entry.uid, pids=(entry.pid,), seconds=waited)

    def wait_abandoned(self, entry: QueuedClient, at: float, detail: str = "") -> None:
        """A queued client is gone without having been served."""
        if entry.dead or not entry.blocked:
            return
        entry.dead = True
        self.counters.increment("mps_uid_waits_abandoned_total", uid=entry.uid)
        self.add_incident(
            at, "wait_abandoned", uid=entry.uid, pids=(entry.pid,), seconds=at - entry.since,
            detail=detail,
        )  # fmt: skip

    def _end_wait(self, server: TrackedServer, client: TrackedClient, at: float) -> None:
        """A client that waited leaves: without a context it was not served."""
        wait, client.wait = client.wait, None
        if wait is not None and self.logs_client_pids(server):
            self.wait_abandoned(wait, at, NO_CONTEXT)

    def ghost(self, server: TrackedServer, at: float) -> None:
        """A server waits for a client that died in the queue, and serves nobody."""
        if server.ghost:
            return
        server.ghost = True
        dead = sorted(server.queued_pids.keys() - server.clients.keys())
        self.add_incident(at, "ghost", server_pid=server.pid, uid=server.uid, pids=dead)

    # ------------------------------------------------------------------ clients come

    def admit(
        self, server: TrackedServer, pid: int, uid: int, at: float, wait: QueuedClient | None = None
    ) -> None:
        """The daemon sent a client process to a server."""
        if pid:
            if len(server.admitted_at) >= MAX_CLIENTS:
                del server.admitted_at[next(iter(server.admitted_at))]
            server.admitted_at[pid] = at
            if pid in server.clients:
                return  # server.log spoke first: the stamps are equal
        server.admissions.append(Admission(pid, uid, at, wait))
        if not self.logs_client_pids(server):
            self.connect(server, pid, at)

    def was_just_rejected(self, server: TrackedServer, pid: int, at: float) -> bool:
        """Whether server.log told already, at the same moment, that this client was refused."""
        refused = server.rejected_at.pop(pid, None)
        return refused is not None and at - refused < SIMULTANEOUS_SECONDS

    def reconnected(self, server: TrackedServer, pid: int) -> None:
        """The daemon sent a client again: for a context, if the server lets it."""
        client = server.clients.get(pid)
        if client is not None and not self.logs_client_pids(server):
            client.had_context = True
        for admission in server.admissions:
            admission.for_context |= admission.pid == pid

    def count_overtake(self, uid: int) -> None:
        """A client of the running user was let in although somebody else waits."""
        if self.queue.has_blocked_clients():
            self.counters.increment("mps_uid_overtakes_total", uid=uid)

    def connect(self, server: TrackedServer, pid: int, at: float) -> TrackedClient | None:
        """A client process is connected: server.log says so, or the daemon where it cannot."""
        self.advance_to(at)
        known = server.clients.get(pid)
        if known is not None and (known.from_control_tool or known.inferred):
            if known.from_control_tool:
                self.counters.increment("mps_client_connections_total", uid=known.uid)
            known.from_control_tool = known.inferred = False
            return known
        admission = server.pop_admission(pid)
        uid = server.uid if admission is None else admission.uid
        wait = admission.wait if admission is not None else self.queue.pop_client(pid, uid)
        if known is not None:  # the same number again: the first one is gone
            self.disconnect(server, pid, at)
        client = TrackedClient(
            pid, uid, at,
            inferred=not self.logs_client_pids(server),
            thread_ratio=server.thread_ratio,
            memory_limits=None if server.start_unknown else server.memory_limits,
        )  # fmt: skip
        client.had_context = client.inferred and admission is not None and admission.for_context
        if not server.add_client(client):
            return None
        self.counters.increment("mps_client_connections_total", uid=uid)
        if wait is not None:
            if pid:
                server.admitted_at.setdefault(pid, at)
            if client.inferred:
                self.wait_served(server, wait, at)  # nothing more can be seen of it
            else:
                client.wait = wait
        return client

    def connect_admitted(self, server: TrackedServer) -> None:
        """The server turns out not to name its clients: believe the daemon's word."""
        for admission in list(server.admissions):
            self.connect(server, admission.pid, admission.at)

    def admission_expired(self, admission: Admission, at: float) -> None:
        """A client that was sent to a server did not come."""
        if admission.wait is not None:
            self.wait_abandoned(admission.wait, at)

    def open_context(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client made a context."""
        found = server.find_unnamed_without(context) if pid == 0 else server.find_client(pid)
        if found is None:
            client = self.connect(server, pid, at)
            found = None if client is None else server.find_client(pid)
        if found is None:
            return
        key, client = found
        if pid and (ending := _ending(server, pid)) is not None:
            server.endings.remove(ending)  # it goes on with another context
        if context not in client.contexts and len(client.contexts) < MAX_CONTEXTS:
            client.contexts[context] = ""
            client.creating[context] = at
            server.unassociated_contexts.append((key, context))
            while len(server.unassociated_contexts) > MAX_CONTEXTS:
                server.unassociated_contexts.popleft()

    def context_active(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client's context can be used: one that is refused for the limit never comes so far."""
        client = server.creating(pid, context)
        known = server.clients.get(pid)
        if client is None and known is not None and context not in known.contexts:
            # The server's threads write in any order: the line of its connection is still to come.
            self.open_context(server, pid, context, at)
            client = server.creating(pid, context)
        if client is None:
            return
        self.advance_to(at)
        del client.creating[context]
        client.had_context = True
        client.active_since = at if client.active_since is None else client.active_since
        server.ghost = server.credentials_missing = False
        wait, client.wait = client.wait, None
        if wait is not None:
            self.wait_served(server, wait, at)

    def context_ready(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client's context can be used: the first after unfinished work meets it."""
        self.advance_to(at)
        found = server.find_client(pid, context)
        gpu = "" if found is None else found[1].contexts.get(context, "")
        for last in server.last:
            if last.newcomer_at is None and last.was_on((gpu,)):
                last.newcomer_at = at

    # ------------------------------------------------------------------ clients go

    def context_ends(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client has closed the connection of a context, most often because it ends."""
        self.advance_to(at)
        endings = server.endings
        while endings and (endings[0].closed_at() or at) < at - QUEUED_END_SECONDS:
            endings.popleft()
        if len(endings) >= MAX_ENDINGS:
            endings.popleft()
        found = server.find_client(pid, context)
        client = None if found is None else found[1]
        ending = None if pid == 0 else _ending(server, pid)
        if ending is None:
            ending = Ending(pid, server.uid if client is None else client.uid)
            endings.append(ending)
        if client is not None:
            ending.excused |= client.terminating or client.lost
        ending.contexts.append((at, "" if client is None else client.contexts.get(context, "")))

    def process_ends(self, server: TrackedServer, pid: int, at: float) -> None:
        """A client has closed its last connection: its process ends."""
        self.advance_to(at)
        ending = _ending(server, pid)
        if ending is None:
            return
        ending.ended_at = at
        others = [
            list(client.contexts.values())
            for client in server.clients.values()
            if client.contexts and (client.pid != pid or pid == 0)
        ]
        undecided = list(server.undecided)
        hit = any(ending in fault.endings for fault in undecided)
        for fault in undecided:
            self._decide(server, fault, final=False)
        if not hit:
            server.last = last_on_gpu(ending, server.endings, others, server.last)[-MAX_UUIDS:]

    def close_context(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client's context ended."""
        found = server.find_client(pid, context)
        if found is None:
            return
        _, client = found
        client.contexts.pop(context, None)
        client.creating.pop(context, None)
        if client.terminating:
            self.count_loss(client, "terminated", at)

    def disconnect(self, server: TrackedServer, pid: int, at: float) -> None:
        """A client process is gone."""
        self.advance_to(at)
        server.admitted_at.pop(pid, None)
        found = server.find_client(pid)
        if found is None:
            return
        key, client = found
        if client.terminating:
            self.count_loss(client, "terminated", at)
        del server.clients[key]
        self._end_wait(server, client, at)
        self.count_disconnection(client, at, known_end=True)

    def disconnect_unnamed(self, server: TrackedServer, at: float) -> None:
        """A client process is gone, and the log does not say which."""
        self.advance_to(at)
        if server.client_count <= 0:
            return
        if server.client_count == 1 and len(server.clients) == 1:
            self.disconnect(server, next(iter(server.clients.values())).pid, at)
            return
        server.unnamed_disconnections += 1
        self.counters.increment("mps_client_disconnections_total", uid=server.uid)
        if not server.occupied:
            server.clients.clear()
            server.admitted_at.clear()
            server.unnamed_disconnections = 0

    def count_disconnection(self, client: TrackedClient, at: float, *, known_end: bool) -> None:
        """Count a client's end; its stay, too, where both ends of it are known."""
        self.counters.increment("mps_client_disconnections_total", uid=client.uid)
        if known_end and client.pid and client.had_context and not client.from_control_tool:
            self.counters.observe(
                "mps_client_session_seconds", at - client.connected_at, uid=client.uid
            )

    def count_loss(
        self, client: TrackedClient, cause: str, at: float, lost: list[int] | None = None
    ) -> None:
        """A client came to a bad end, once."""
        if client.lost:
            return
        client.lost = True
        self.counters.increment("mps_client_losses_total", uid=client.uid, cause=cause)
        if lost is not None:
            lost.append(client.pid)
        if cause == "terminated" and lost is None:
            self.add_incident(at, "client_terminated", uid=client.uid, pids=(client.pid,))

    def count_rejection(self, uid: int | None, cause: str, pids: Iterable[int], at: float) -> None:
        """A newcomer was refused."""
        self.counters.increment("mps_client_rejections_total", uid=uid, cause=cause)
        self.add_incident(at, "client_rejected", uid=uid, pids=pids, detail=cause)

    def client_rejected(self, server: TrackedServer, pid: int, context: int, at: float) -> None:
        """A client that was sent to a server was not let in."""
        if pid == 0 or context != 0 or pid in server.clients:
            return
        if len(server.rejected_at) >= MAX_SERVERS:
            server.rejected_at.clear()
        server.rejected_at[pid] = at
        server.admitted_at.pop(pid, None)
        admission = server.pop_admission(pid)
        if admission is not None:
            self.advance_to(at)
            self.admission_expired(admission, at)

    # ------------------------------------------------------------------ devices and faults

    def learn_gpu(self, uuid: str, name: str) -> None:
        """A GPU is named."""
        if uuid in self.gpu_names or len(self.gpu_names) < MAX_UUIDS:
            self.gpu_names[uuid] = name

    def learn_ordinal(self, device: int, uuid: str) -> None:
        """A device's number is tied to its UUID."""
        if device in self.ordinals or len(self.ordinals) < MAX_UUIDS:
            self.ordinals[device] = uuid

    def uuid_of(self, server: TrackedServer, device: int) -> str:
        """A device's UUID, "" when the logs did not tell."""
        known = self.ordinals.get(device)
        if known is not None:
            return known
        if len(self.gpu_names) == 1 and len(server.devices) <= 1:
            return next(iter(self.gpu_names))
        return ""

    def fault_of_line(self, server: TrackedServer, at: float, *, begins: bool) -> Fault:
        """The fault of which the log speaks; a new one when this line begins one."""
        self.advance_to(at)
        fault = server.current_fault
        if fault is None and server.faults and not begins:
            return server.faults[-1]  # a late line of its block
        if fault is None or begins:
            self.close_fault_report(server)
            met = tuple(last for last in server.last if last.may_have_hit(at))
            fault = Fault(at, endings=tuple(server.endings), last=met)
            fault.open = bool(
                met or suspects(at, (), fault.endings) or just_ended(at, (), fault.endings)
            )
            if fault.open:
                server.undecided.append(fault)
            server.current_fault = fault
            server.faults.append(fault)
            del server.faults[:-MAX_SERVERS]
            self.counters.set_latest("mps_server_last_fault_timestamp_seconds", at)
        return fault

    def add_fault_victim(self, server: TrackedServer, fault: Fault, pid: int) -> None:
        """A client goes down with a fault."""
        if pid and pid in fault.victims:
            return
        if len(fault.victims) >= MAX_CONTEXTS:
            return
        # Where the log blames nobody, one of them did it, and all are of one user.
        first = pid in fault.blamed or not fault.blamed
        own = first and pid not in fault.victims and (bool(fault.blamed) or not fault.victims)
        cause = "own_fault" if own else "neighbour_fault"
        fault.victims.append(pid)
        if pid == 0:
            self._lost_to(fault, server.uid, cause)
            for client in server.clients.values():
                if client.pid == 0 and not client.lost:
                    client.lost, client.torn_down_at = True, fault.at
                    break
            return
        found = server.find_client(pid)
        if found is None:
            self._lost_to(fault, server.uid, cause)
        else:
            found[1].torn_down_at = fault.at
            if found[1].lost:
                return
            found[1].lost = True
            self._lost_to(fault, found[1].uid, cause)

    def _lost_to(self, fault: Fault, uid: int | None, cause: str) -> None:
        """Count a victim as soon as it is known whose fault it was; cause is what MPS suggests."""
        if fault.open:
            fault.losses.append((uid, cause))
        else:
            self.counters.increment("mps_client_losses_total", uid=uid, cause=fault.cause or cause)

    def add_fault_device(self, fault: Fault, device: int) -> None:
        """A device is reset after a fault."""
        if device not in fault.devices and len(fault.devices) < MAX_UUIDS:
            fault.devices.add(device)
            fault.open_devices.add(device)

    def close_fault_report(self, server: TrackedServer) -> None:
        """The log has said all about a fault."""
        fault, server.current_fault, server.listing = server.current_fault, None, None
        if fault is None:
            return
        self.fault_listed(server, fault)
        fault.closed = True
        if fault.open:
            self._decide(server, fault, final=False)
        else:
            self._tell(server, fault, Verdict(None, ()))

    def _decide(self, server: TrackedServer, fault: Fault, *, final: bool) -> None:
        """Settle whose fault it was, and count its victims, once the evidence is complete."""
        if final and fault is server.current_fault:
            self.close_fault_report(server)
        if not fault.open or not fault.closed:
            return
        met = [last for last in fault.last if last.was_on(fault.uuids)]
        verdict = judge(
            fault.at,
            fault.uuids,
            fault.endings,
            met,
            failed_start=failed_start(fault.at, fault.victims, server.endings),
            final=final,
        )
        if verdict is None:
            return
        server.undecided.remove(fault)
        fault.open = False
        culprit = verdict.culprit
        if culprit is not None:
            fault.cause = "unfinished_work"
            if not culprit.counted:
                culprit.counted = True
                self.counters.increment("mps_client_unfinished_exits_total", uid=culprit.uid)
        elif verdict.suspects:
            fault.cause = "unattributed_fault"
        for uid, cause in fault.losses:
            self.counters.increment("mps_client_losses_total", uid=uid, cause=fault.cause or cause)
        fault.losses.clear()
        # What they left, if anything, is gone with the fault.
        server.last = [last for last in server.last if last not in met]
        self._tell(server, fault, verdict)
        if fault.recovered_at is not None:
            self._tell_recovery(server, fault, fault.recovered_at)

    def _tell(self, server: TrackedServer, fault: Fault, verdict: Verdict) -> None:
        culprit, blamed = verdict.culprit, next(iter(sorted(fault.blamed)), None)
        self.add_incident(
            fault.at,
            "fault" if culprit is None else "unfinished_work",
            server_pid=server.pid,
            uid=server.uid,
            pids=[pid for pid in fault.victims if culprit is not None or pid not in fault.blamed],
            blamed_pid=blamed,
            left_by_pid=None if culprit is None else culprit.pid,
            ended_pids=() if culprit is not None else [one.pid for one in verdict.suspects],
            gpu_uuids=fault.uuids,
        )

    def fault_hit(self, server: TrackedServer, fault: Fault, pid: int, device: int) -> None:
        """A fault hit a device: a context that the log blames was on it."""
        if device in fault.hit:
            return
        fault.hit.add(device)
        if pid:  # clients with PID 0 cannot be told apart: which of them it was is not known
            self._count_fault(fault, self.uuid_of(server, device))

    def fault_listed(self, server: TrackedServer, fault: Fault) -> None:
        """All devices of a fault are known: where nobody is blamed, the only one was hit."""
        if not fault.uuids:
            devices = fault.hit or fault.devices
            self._count_fault(fault, self.uuid_of(server, *devices) if len(devices) == 1 else "")

    def _count_fault(self, fault: Fault, uuid: str) -> None:
        fault.uuids.append(uuid)
        self.counters.increment("mps_server_faults_total", uuid=uuid)

    def _tell_recovery(self, server: TrackedServer, fault: Fault, at: float) -> None:
        self.add_incident(
            at,
            "fault_recovered",
            server_pid=server.pid,
            uid=server.uid,
            gpu_uuids=fault.uuids,
            seconds=at - fault.at,
        )

    def device_closed(self, server: TrackedServer, device: int, at: float) -> None:
        """A context was destroyed: a fault there is over."""
        self.close_fault_report(server)
        for fault in list(server.faults):
            fault.open_devices.discard(device)
            if fault.open_devices:
                continue
            server.faults.remove(fault)
            self.counters.observe("mps_server_fault_recovery_seconds", at - fault.at)
            if fault.open:
                fault.recovered_at = at  # told after the fault itself
            else:
                self._tell_recovery(server, fault, at)


def _ending(server: TrackedServer, pid: int) -> Ending | None:
    """Give the end of a client that is under way; of those with PID 0, the oldest."""
    for ending in server.endings:
        if ending.pid == pid and ending.ended_at is None:
            return ending
    return None


def _client_pids(server: TrackedServer) -> list[int]:
    return [client.pid for client in server.clients.values() if not client.lost]

"""The state of one daemon: its servers, its queue, its GPUs, and the passing of time.

Lines of the logs call its methods. Running totals are kept in whole milliseconds, like the logs'
timestamps, so that they do not depend on the steps in which time advances.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.limits_without_a_flag import FULL, Quota
from mps_exporter.mps.incidents_and_counters import (
    BoundedDict,
    Counters,
    GpuNames,
    Incidents,
    Moment,
)
from mps_exporter.mps.servers import Servers, TrackedServer
from mps_exporter.mps.waits import ClientQueue, Occupant, QueuedClient, Timeline
from mps_exporter.mps.xid_lines import FaultEvidence
from mps_exporter.observations import LogName
from mps_exporter.snapshot import Handover, Incident, Wait

FORBIDDEN_START_ATTEMPTS = 6
"""Number of times that the daemon tries a server that it may not start, before it rejects the
client (driver 580)."""


@dataclass(slots=True)
class DaemonLifetime:
    """The control daemon, from its start to its end."""

    started_at: float | None = None
    pid: int | None = None
    binary_version: str | None = None
    quit_requested_at: float | None = None
    ended_at: float | None = None
    died: bool = False
    missing_since: float | None = None  # Time since which its process is missing.
    counted: bool = False  # Seen since the exporter's start, so that the end is counted.
    configured_at: float | None = None  # Time of the last set_... command.
    served_at: float | None = None
    """Time at which it last served a client or a server: its only thread was not stuck then."""
    silent_since: float | None = None
    """Time of the last line, if another line always follows such a line immediately."""
    handover: Handover | None = None  # Its last line, if this sent a client to a server.
    logs_shutdown_requests: bool = False  # Its log has its shutdown requests (driver 580).
    backoff_seconds: float | None = None
    missing_credentials: deque[float] = field(
        default_factory=lambda: deque(maxlen=policy.MAX_RECENT)
    )
    """Times of callers without credentials that no NEW CLIENT has followed yet."""
    forbidden_starts: BoundedDict[int, int] = field(
        default_factory=lambda: BoundedDict(policy.MAX_RECENT)
    )
    """User -> successive starts of servers that were forbidden."""

    def match_credentials(self) -> bool:
        """Match NEW CLIENT with the oldest caller without credentials; return False without any."""
        if not self.missing_credentials:
            return False
        self.missing_credentials.popleft()
        return True

    def end(self, at: float, *, died: bool) -> None:
        self.ended_at = at
        self.died |= died
        self.quit_requested_at = None
        self.missing_credentials.clear()


class DaemonState:
    """The state of one daemon."""

    def __init__(self, quota: Quota = FULL) -> None:
        self.daemon = DaemonLifetime()
        self.quota = quota
        self.readable: dict[LogName, bool] = {"control": False, "server": False}
        """Log of the daemon -> whether it is readable."""
        self.queue = ClientQueue(quota)
        self.gpus = GpuNames()
        self.evidence = FaultEvidence()
        self.servers = Servers(self)
        self.counters = Counters(quota)
        self.incidents = Incidents()
        self.timeline = Timeline()
        self.server_log_at: float | None = None  # Time of the last line of server.log.
        self.server_log_lost_at: float | None = None
        """Last time at which lines of server.log may have been lost."""
        self.clock_ms: int | None = None  # Time up to which the running totals are complete.
        self._counted_from_ms: int | None = None  # Time from which running totals count.

    @property
    def waits(self) -> tuple[Wait, ...]:
        before = dict[int, int]()  # user -> number of users before
        waits = [
            Wait(
                one.pid,
                one.uid,
                one.since,
                one.behind_uid,
                one.dead,
                one.overtaken_by,
                users_before=before.setdefault(one.uid, len(before)),
            )
            for one in self.queue
            if one.blocked
        ]
        return (*waits, *(wait for server in self.servers for wait in server.ghost_waits()))

    @property
    def handover_backoff_seconds(self) -> float | None:
        """The daemon's retry interval, while a client waits or the daemon was asked to quit."""
        shown = self.daemon.quit_requested_at is not None or self.waits
        return self.daemon.backoff_seconds if shown else None

    @property
    def handover(self) -> Handover | None:
        """The daemon's last line, if it shows that a client was sent to a server."""
        last, log_at = self.daemon.handover, self.server_log_at
        if last is None or log_at is None:
            return last
        return replace(last, answered=log_at >= last.at)

    @property
    def stuck_since(self) -> float | None:
        """Time of a line that another line normally follows at once, if none did; else None."""
        daemon, sent = self.daemon, self.handover
        if daemon.quit_requested_at is not None or daemon.ended_at is not None:
            return None
        unanswered = sent is not None and not sent.answered and self.readable["server"]
        return sent.at if sent is not None and unanswered else daemon.silent_since

    @property
    def devices(self) -> dict[int, str]:
        """Device ordinal -> GPU UUID."""
        return self.gpus.by_ordinal({d for server in self.servers for d in server.devices})

    def pids_to_watch(self) -> list[int]:
        """Return the processes, as the logs number them, whose exit no log shows in time."""
        pids = [pid for server in self.servers for pid in (server.pid, *server.awaited_pids())]
        pids += [entry.pid for entry in self.queue if not entry.dead]
        return [pid for pid in pids if pid]

    def pids_to_look_up(self) -> frozenset[int]:
        """Return the processes to search /proc for: queued, serving and connected processes."""
        pids = {*self.pids_to_watch(), *(entry.pid for entry in self.queue)}
        pids.update(client.pid for server in self.servers for client in server.clients)
        if (handover := self.daemon.handover) is not None:
            pids.add(handover.pid)
        return frozenset(pids - {0})

    def clients_to_map(self) -> list[int]:
        """Return the clients whose address ranges must be read now: a new context reserves a range.

        After a running client's fault, all of the server's clients: memory may have grown.
        """
        found = []
        for server in self.servers:
            again = server.faults.request_memory()
            for client in server.clients:
                if again or client.unmapped:
                    client.unmapped = False
                    found.append(client.pid)
        return [pid for pid in found if pid]

    def count_from(self, at: float) -> None:
        """Set, once, the time from which running totals and timers count: the first read."""
        if self._counted_from_ms is None:
            self._counted_from_ms = round(at * 1000.0)

    def moment(self, at: float) -> Moment:
        """Return the Moment of events at this time, which count from count_from() on."""
        counted = self._counted_from_ms is None or round(at * 1000.0) >= self._counted_from_ms
        return Moment(at, counted, self.counters, self.incidents)

    def advance_to(self, at: float) -> None:
        """Advance the running totals to this time, and run the timers that are due by then."""
        while (due := self._next_timer()) <= at:
            self._accumulate_until(due)
            self._run_timers(self.moment(due))
        self._accumulate_until(at)

    def _accumulate_until(self, at: float) -> None:
        to, clock = round(at * 1000.0), self.clock_ms
        if clock is None or to < clock - policy.CLOCK_JUMP_SECONDS * 1000:
            self.clock_ms = to
            if clock is not None:
                self.timeline = Timeline()
            return
        if to > clock:
            self.timeline.add(clock, to, sorted(self._occupants(), key=str))
        start = max(clock, self._counted_from_ms or 0)
        if to > start:
            for server in self.servers:
                if server.clients:
                    self.counters.increment(
                        "mps_uid_holding_seconds_total", to - start, uid=server.uid
                    )
            if self._is_idle_while_waiting():
                self.counters.increment("mps_uid_handover_idle_seconds_total", to - start)
        self.clock_ms = max(to, clock)

    def _is_idle_while_waiting(self) -> bool:
        busy = any(server.clients or server.clients.admissions for server in self.servers)
        return not busy and bool(self.queue.blocked_clients())

    def _occupants(self) -> set[Occupant]:
        """Return kind and user of each timeline span that is open."""
        found: set[Occupant] = {("waited", e.uid) for e in self.queue if e.blocked and not e.dead}
        for server in self.servers:
            found.update(("waited", wait.uid) for wait in server.ghost_waits())
            if server.ghost and not server.clients.may_have_context:
                found.add(("ghost", server.uid))
            elif server.clients:
                found.add(("held", server.uid))
        if self._is_idle_while_waiting():
            found.update(("idle", server.uid) for server in self.servers if not server.ghost)
        return found

    def _next_timer(self) -> float:
        due = float("inf")
        if self.daemon.missing_credentials:
            due = self.daemon.missing_credentials[0] + policy.ADMISSION_TIMEOUT_SECONDS
        for server in self.servers:
            due = min(due, server.clients.admissions.next_timer(), server.faults.next_timer())
        return due

    def _run_timers(self, when: Moment) -> None:
        for server in self.servers:
            server.clients.admissions.expire(when)
            server.faults.run_timers(when.at)
        unmatched = self.daemon.missing_credentials
        while unmatched and unmatched[0] + policy.ADMISSION_TIMEOUT_SECONDS <= when.at:
            unmatched.popleft()
            if self.daemon.quit_requested_at is None:  # a draining daemon serves no new client
                when.count_rejection(None, "credentials")

    def lines_lost(self, log: LogName, at: float, *, certain: bool) -> None:
        """Record that server.log may lack lines, or does; ignore gaps in control.log."""
        if log == "server":
            self.server_log_lost_at = at
            for server in self.servers:
                server.has_all_lines = False
                server.may_be_deaf |= certain

    def daemon_started(self, pid: int, when: Moment) -> None:
        """Record a control daemon's start, which ends the last daemon."""
        daemon = self.daemon
        alive = daemon.started_at is not None and daemon.ended_at is None
        second_line = daemon.pid == pid and when.at - (daemon.started_at or 0.0) <= 1.0
        if alive and second_line and not self._servers_at(when.at):
            return
        if alive or self._servers_at(when.at):
            died_at = min(when.at, daemon.missing_since or when.at)
            self.daemon_died(when._replace(at=died_at))
        self.daemon = DaemonLifetime(started_at=when.at, pid=pid, counted=when.counted)
        self.servers.forget_vanished()
        self.gpus.clear_ordinals()
        when.increment("mps_control_starts_total")
        when.add_incident(Incident(when.at, "daemon_started"))

    def _servers_at(self, at: float) -> list[TrackedServer]:
        return [server for server in self.servers if not server.only_seen_after(at)]

    def daemon_died(self, when: Moment) -> None:
        """End the daemon, which died without logging, and its servers, which exited with it."""
        if self.daemon.quit_requested_at is not None and not self._servers_at(when.at):
            # The daemon was asked to quit, and its servers had ended: it exits then, and its last
            # line, which follows immediately, was lost.
            self.daemon_exited(when)
            return
        lost = [
            client.pid
            for server in self._servers_at(when.at)
            for client in server.clients
            if not client.lost
        ]
        self._end_daemon("daemon_died", when)
        unseen = "control.log cannot be read, so it may have been asked to quit"
        detail = "" if self.readable["control"] else unseen
        # The time is known if the daemon was seen to run, or a successor logs a start.
        if when.counted or lost or self.daemon.missing_since is None:
            when.add_incident(Incident(when.at, "daemon_died", pids=tuple(lost), detail=detail))

    def daemon_exited(self, when: Moment) -> None:
        """End the daemon, which logs its exit. A killed daemon writes no line."""
        self._end_daemon("requested", when)
        when.add_incident(Incident(when.at, "daemon_quit"))

    def _end_daemon(self, cause: str, when: Moment) -> None:
        for server in self._servers_at(when.at):
            self.end_server(server, when, cause)
        self.queue.abandon_all(when)
        self.daemon.end(when.at, died=cause == "daemon_died")

    def server_ready(self, pid: int, when: Moment) -> None:
        self.daemon.served_at = when.at
        self.open_server(self.servers.get(pid) or self.servers.adopt(pid, when.at), when)

    def open_server(self, server: TrackedServer, when: Moment) -> None:
        if server.uid is not None:
            self.daemon.forbidden_starts.pop(server.uid, None)
        self.servers.ready(server, when)

    def end_server(self, server: TrackedServer, when: Moment, cause: str, detail: str = "") -> None:
        server.end(cause, when, detail)
        self.servers.remove(server)
        self.daemon.backoff_seconds = None

    def server_exited(self, pid: int, status: int, when: Moment) -> None:
        """End a server by control.log, even if no earlier line names it."""
        self.daemon.served_at = when.at
        servers = self.servers
        server = servers.get(pid) or servers.restore_vanished(pid)
        if server is None and not servers.has_ended(pid):
            server = servers.adopt(pid, when.at)
        if server is not None:
            self.judge_server_exit(server, when, status)

    def judge_server_exit(
        self, server: TrackedServer, when: Moment, status: int | None = None
    ) -> None:
        """End a server; the cause follows from earlier lines. See TrackedServer.exit_cause()."""
        self.end_server(server, when, *server.exit_cause(status, when.at))

    def server_forbidden(self, uid: int, reason: str, when: Moment) -> None:
        """Record a server that the daemon may not start for this user; it tries six times."""
        for server in self.servers:
            if server.uid == uid and server.failed_to_start:
                server.failure = reason
        forbidden = self.daemon.forbidden_starts
        forbidden[uid] = forbidden.get(uid, 0) + 1
        if forbidden[uid] >= FORBIDDEN_START_ATTEMPTS:
            del forbidden[uid]
            for entry in self.queue.pop_user(uid):
                entry.abandon(when)

    def shutdown_tried(self, pid: int, when: Moment) -> None:
        """Record a shutdown request, for another user's client or for the daemon's own end."""
        self.daemon.silent_since = when.at
        self.daemon.logs_shutdown_requests = True
        if (server := self.servers.get(pid)) is not None:
            server.shutdown_requested_at = when.at

    def shutdown_declined(self, pid: int, when: Moment) -> None:
        self.daemon.served_at = when.at
        if (server := self.servers.get(pid)) is not None:
            server.shutdown_requested_at = None

    def shutdown_retry(self, milliseconds: int, _when: Moment) -> None:
        self.daemon.backoff_seconds = milliseconds / 1000.0

    def credentials_missing(self, when: Moment) -> None:
        """Record a caller without credentials: a refusal only when no NEW CLIENT follows.

        Every healthy client causes this line just before its first NEW CLIENT.
        """
        self.daemon.missing_credentials.append(when.at)

    def client_queued(self, pid: int, uid: int, when: Moment) -> None:
        """Add a client to the queue: no server is ready for its user."""
        self.daemon.silent_since = self.daemon.served_at = when.at
        self.daemon.match_credentials()
        entry = self.queue.push(pid, uid, when)
        server = self.servers.latest(uid)
        if server is None:
            return
        if server.uid == uid:
            server.expect(entry)
        else:
            entry.block(server.uid, when)

    def client_sent(self, pid: int, uid: int, when: Moment) -> None:
        """Record a connection sent to the running server: of a process, or of a context.

        The PID is 0 if the daemon does not see the client's PID namespace, the user is 0 if one
        server serves all users.
        """
        daemon = self.daemon
        daemon.served_at = when.at
        daemon.handover = Handover(when.at, pid, uid)
        server = self.servers.latest(uid)
        if server is None:
            return
        admissions = server.clients.admissions
        # A process that the server refused without a line may connect again.
        again = daemon.missing_credentials and any(one.pid == pid for one in admissions)
        if pid in admissions.admitted and not again:
            server.clients.readmit(pid)
            return
        # A line about missing credentials precedes only the first connection of a process.
        is_first = daemon.match_credentials()
        if pid == 0 and not is_first:
            return
        if pid and admissions.pop_refusal(pid, when.at):
            return
        entry = self.queue.pop_client(pid, uid) if pid else None
        if entry is None:
            self.queue.count_overtake(uid, when)
            entry = QueuedClient(pid, uid, when.at)
        server.clients.admit(entry, when)

"""The state of one daemon: its servers, its queue, its GPUs, and the passing of time.

Running totals are kept in whole milliseconds, as the logs' stamps are, so that they do not depend
on the steps in which time advances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from mps_exporter.mps.fault_evidence import FaultEvidence
from mps_exporter.mps.record import FULL, Counters, GpuNames, Incidents, Moment, Quota
from mps_exporter.mps.servers import SHUTDOWN_SECONDS, Servers, TrackedServer
from mps_exporter.mps.timeline import Occupant, Timeline
from mps_exporter.mps.waits import ClientQueue
from mps_exporter.observations import LogName
from mps_exporter.snapshot import Handover, Wait

CREDENTIALS_SECONDS = 10.0
"""NEW CLIENT follows within a millisecond; a caller without one after this long was refused."""

FORBIDDEN_START_ATTEMPTS = 6
"""How often the daemon tries a server that it may not start, before it rejects the client (580)."""

UNSEEN_END = "control.log cannot be read, so it may have been asked to quit"

CLOCK_JUMP_MS = 60_000
"""Time that runs back by more than this has been set back."""

MAX_MISSING_CREDENTIALS = 256
MAX_FORBIDDEN = 64


@dataclass(slots=True)
class DaemonLifetime:
    """The control daemon, from its start to its end."""

    started_at: float | None = None
    pid: int | None = None
    binary_version: str | None = None
    quit_requested_at: float | None = None
    ended_at: float | None = None
    died: bool = False
    missing_since: float | None = None
    """When its process was first seen to be gone."""
    counted: bool = False
    """It started, or was seen, since the exporter started: so its end is counted."""
    configured_at: float | None = None
    """The last set_... command."""
    served_at: float | None = None
    """It last did something for a client or a server: its only thread was not stuck then."""
    silent_since: float | None = None
    """When it wrote a line that another one follows at once, and none has followed."""
    sent_at: float | None = None
    """When it sent a client to a server, and neither log has had a line since."""
    handover: Handover | None = None
    """The last line, if it says that a client was sent to a server."""
    logs_shutdown_requests: bool = False
    """Its log says when it asks a server to end (driver 580)."""
    backoff_seconds: float | None = None
    missing_credentials: deque[float] = field(
        default_factory=lambda: deque(maxlen=MAX_MISSING_CREDENTIALS)
    )
    """Callers without credentials that no NEW CLIENT has followed yet."""
    forbidden_starts: dict[int, int] = field(default_factory=dict)
    """User -> servers in a row that the daemon was not allowed to start."""

    @property
    def stuck_since(self) -> float | None:
        """When it wrote a line that another one follows at once, and none has followed."""
        if self.quit_requested_at is not None or self.ended_at is not None:
            return None
        return self.sent_at if self.silent_since is None else self.silent_since

    def match_credentials(self) -> bool:
        """A NEW CLIENT follows: it explains the oldest caller without credentials."""
        if not self.missing_credentials:
            return False
        self.missing_credentials.popleft()
        return True

    def end(self, at: float, *, died: bool) -> None:
        """Its process is gone, or it says that it ends."""
        self.ended_at = at
        self.died |= died
        self.quit_requested_at = None
        self.missing_credentials.clear()
        if not died:
            self.backoff_seconds = None


class DaemonState:
    """What is known of one daemon."""

    def __init__(self, quota: Quota = FULL) -> None:
        self.daemon = DaemonLifetime()
        self.readable: dict[LogName, bool] = {"control": False, "server": False}
        self.queue = ClientQueue(quota)
        self.gpus = GpuNames()
        self.evidence = FaultEvidence()
        self.servers = Servers(self.readable, self.queue, self.gpus, self.evidence, quota)
        self.counters = Counters(quota)
        self.incidents = Incidents()
        self.timeline = Timeline()
        self.server_log_at: float | None = None
        """The last line of server.log."""
        self.server_log_lost_at: float | None = None
        """When lines of server.log may have been lost last."""
        self._clock_ms: int | None = None
        """Everything up to here is in the running totals."""
        self._counted_from_ms: int | None = None
        """When the exporter started."""

    # ------------------------------------------------------------------ what is shown

    @property
    def waits(self) -> tuple[Wait, ...]:
        """The clients that wait behind another user's server."""
        waits = [
            Wait(entry.pid, entry.uid, entry.since, entry.behind_uid, entry.dead)
            for entry in self.queue
            if entry.blocked
        ]
        for server in self.servers:
            waits += server.ghost_waits()
        return tuple(waits)

    @property
    def handover_backoff_seconds(self) -> float | None:
        """The daemon's retry interval, while a client waits or the daemon was asked to quit."""
        shown = self.daemon.quit_requested_at is not None or self.waits
        return self.daemon.backoff_seconds if shown else None

    @property
    def handover(self) -> Handover | None:
        """The last line, if it says that a client was sent to a server."""
        last, log_at = self.daemon.handover, self.server_log_at
        if last is None or log_at is None:
            return last
        return replace(last, answered=log_at >= last.at)

    @property
    def devices(self) -> dict[int, str]:
        """Device ordinal -> GPU UUID."""
        return self.gpus.by_ordinal({d for one in self.servers for d in one.devices})

    # ------------------------------------------------------------------ processes

    def pids_to_watch(self) -> list[int]:
        """Return the processes, as the logs number them, whose exit no log shows in time.

        Servers, the clients that a server was started for and that have not connected, the queue.
        """
        pids = []
        for server in self.servers:
            pids += [server.pid, *server.awaited_pids()]
        return pids + [entry.pid for entry in self.queue if not entry.dead]

    def pids_to_look_up(self) -> frozenset[int]:
        """Return the processes that /proc is searched for: queued, serving and connected ones."""
        pids = {entry.pid for entry in self.queue}
        if (handover := self.daemon.handover) is not None:
            pids.add(handover.pid)
        for server in self.servers:
            pids.add(server.pid)
            pids.update(client.pid for client in server.clients)
            pids.update(server.awaited_pids())
        return frozenset(pids - {0})

    def clients_to_map(self) -> list[int]:
        """Return the clients whose address ranges are to be read now, each once.

        A context reserves its range when it is made. The memory of a running client that caused a
        fault may have grown since.
        """
        found = []
        for server in self.servers:
            again = server.faults.request_memory()
            for client in server.clients:
                if again or client.activations > client.ranges_requested:
                    client.ranges_requested = client.activations
                    found.append(client.pid)
        return [pid for pid in found if pid]

    # ------------------------------------------------------------------ time

    def count_from(self, at: float) -> None:
        """The exporter started at this moment: what happened before is not counted."""
        if self._counted_from_ms is None:
            self._counted_from_ms = round(at * 1000.0)

    def moment(self, at: float) -> Moment:
        """Return a moment; what happens then is counted from the exporter's start on."""
        counted = self._counted_from_ms is None or round(at * 1000.0) >= self._counted_from_ms
        return Moment(at, counted, self.counters, self.incidents)

    def advance_to(self, at: float) -> None:
        """Advance the running totals, and do what was due by then."""
        while (due := self._next_timer()) <= at:
            self._accumulate_until(due)
            self._run_timers(self.moment(due))
        self._accumulate_until(at)

    def _accumulate_until(self, at: float) -> None:
        to, clock = round(at * 1000.0), self._clock_ms
        if clock is None or to < clock - CLOCK_JUMP_MS:
            self._clock_ms = to
            if clock is not None:
                self.timeline.restart()
            return
        if to > clock:
            self.timeline.add(clock, to, sorted(self._occupants(), key=str))
        start = max(clock, self._counted_from_ms or 0)
        if to > start:
            occupied = [server for server in self.servers if server.occupied]
            for server in occupied:
                self.counters.accumulate(
                    "mps_uid_holding_seconds_total", to - start, uid=server.uid
                )
            if self._is_idle_while_waiting():
                self.counters.accumulate("mps_uid_handover_idle_seconds_total", to - start)
        self._clock_ms = max(to, clock)

    def _is_idle_while_waiting(self) -> bool:
        if any(server.occupied or server.clients.admissions for server in self.servers):
            return False
        return self.queue.has_blocked_clients()

    def _occupants(self) -> set[Occupant]:
        """What goes on now, for the timeline."""
        found: set[Occupant] = {("waited", e.uid) for e in self.queue if e.blocked and not e.dead}
        for server in self.servers:
            if server.ghost:
                found.add(("ghost", server.uid))
                found.update(("waited", wait.uid) for wait in server.ghost_waits())
            elif server.occupied:
                found.add(("held", server.uid))
        if self._is_idle_while_waiting():
            found.update(("idle", one.uid) for one in self.servers if not one.ghost)
        return found

    def _next_timer(self) -> float:
        due = float("inf")
        if self.daemon.missing_credentials:
            due = self.daemon.missing_credentials[0] + CREDENTIALS_SECONDS
        for server in self.servers:
            due = min(due, server.clients.admissions.next_timer(), server.faults.next_timer())
        return due

    def _run_timers(self, when: Moment) -> None:
        for server in self.servers:
            server.clients.admissions.run_timers(when)
            server.faults.run_timers(when)
        unanswered = self.daemon.missing_credentials
        while unanswered and unanswered[0] + CREDENTIALS_SECONDS <= when.at:
            unanswered.popleft()
            if self.daemon.quit_requested_at is None:  # a draining daemon serves no new client
                when.count_rejection(None, "credentials")

    # ------------------------------------------------------------------ daemon

    def daemon_started(self, pid: int, when: Moment) -> None:
        """A control daemon started: what was before it is gone."""
        daemon = self.daemon
        alive = daemon.started_at is not None and daemon.ended_at is None
        if alive and daemon.pid == pid and self._is_second_start_line(when.at):
            return
        if alive or self._servers_at(when.at):
            self.daemon_died(when)
        self.daemon = DaemonLifetime(started_at=when.at, pid=pid, counted=when.counted)
        self.servers.forget_vanished()
        self.gpus.clear_ordinals()
        when.increment("mps_control_starts_total")
        when.add_incident("daemon_started")

    def _is_second_start_line(self, at: float) -> bool:
        return at - (self.daemon.started_at or 0.0) <= 1.0 and not self._servers_at(at)

    def _servers_at(self, at: float) -> list[TrackedServer]:
        """Return the servers that end with a daemon that ends at this moment."""
        return [server for server in self.servers if not server.only_seen_after(at)]

    def daemon_died(self, when: Moment) -> None:
        """The daemon died without logging; its servers exited with it."""
        if self.daemon.quit_requested_at is not None and not self._servers_at(when.at):
            # It was asked to quit, and its servers had ended: it exits then, and its last line,
            # which follows at once, was lost.
            self.daemon_exited(when)
            return
        lost = [
            client.pid
            for server in self._servers_at(when.at)
            for client in server.clients
            if not client.lost
        ]
        self._daemon_ended("daemon_died", when)
        detail = "" if self.readable["control"] else UNSEEN_END
        when.add_incident("daemon_died", pids=lost, detail=detail)

    def daemon_exited(self, when: Moment) -> None:
        """The daemon logs that it exits."""
        self._daemon_ended("requested", when)
        when.add_incident("daemon_quit")

    def _daemon_ended(self, cause: str, when: Moment) -> None:
        for server in self._servers_at(when.at):
            self.end_server(server, when, cause)
        self.queue.abandon_all(when)
        self.daemon.end(when.at, died=cause == "daemon_died")

    # ------------------------------------------------------------------ servers

    def server_ready(self, server: TrackedServer, when: Moment) -> None:
        if server.uid is not None:
            self.daemon.forbidden_starts.pop(server.uid, None)
        self.servers.ready(server, when)

    def end_server(self, server: TrackedServer, when: Moment, cause: str, detail: str = "") -> None:
        server.end(cause, when, detail)
        self.servers.remove(server)
        self.daemon.backoff_seconds = None

    def server_exited(self, server: TrackedServer, when: Moment, status: int | None = None) -> None:
        """A server is gone; its cause follows from what was logged before.

        Args:
            server: The server.
            when: The moment.
            status: The exit status in control.log. None where control.log, which alone has it,
                cannot be read.
        """
        had_to_end = None
        if not self.daemon.logs_shutdown_requests:
            had_to_end = self.daemon.quit_requested_at is not None or any(
                entry.uid != server.uid for entry in self.queue
            )
        lost_at = self.server_log_lost_at
        cause = server.exit_cause(
            status,
            when.at,
            had_to_end=had_to_end,
            log_lost=lost_at is not None and lost_at >= when.at - SHUTDOWN_SECONDS,
        )
        self.end_server(server, when, *cause)

    def server_forbidden(self, uid: int, reason: str, when: Moment) -> None:
        """The daemon may not start a server for this user; it gives up after six attempts."""
        for server in self.servers:
            if server.uid == uid and server.failed_to_start:
                server.failure = reason
        forbidden = self.daemon.forbidden_starts
        if len(forbidden) >= MAX_FORBIDDEN and uid not in forbidden:
            forbidden.clear()
        forbidden[uid] = forbidden.get(uid, 0) + 1
        if forbidden[uid] >= FORBIDDEN_START_ATTEMPTS:
            del forbidden[uid]
            for entry in self.queue.pop_user(uid):
                entry.abandon(when)

    # ------------------------------------------------------------------ clients

    def client_queued(self, pid: int, uid: int, when: Moment) -> None:
        """The daemon makes a client wait."""
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
        """The daemon sends a connection of a client to the running server."""
        server = self.servers.latest(uid)
        if server is None:
            return
        if pid == 0:
            # The first connection of a process is the one that credentials were missing for.
            if self.daemon.match_credentials():
                self.queue.count_overtake(uid, when)
                server.clients.admit(pid, uid, when)
            return
        if pid in server.clients.admissions:
            server.clients.readmit(pid)
            return
        self.daemon.match_credentials()
        if server.clients.admissions.pop_refusal(pid, when.at):
            return
        wait = self.queue.pop_client(pid, uid)
        if wait is None:
            self.queue.count_overtake(uid, when)
        server.clients.admit(pid, uid, when, wait)

"""Clients that wait for a server: the daemon's queue, admissions, and the timeline of both.

A *UID wait* is a place in the queue behind another user's server; waiting for one's own server to
start is not a UID wait. Nothing is logged when a queued client exits: its entry stays in the
daemon's queue, and so here, marked as dead once its process is known to have exited.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.limits_without_a_flag import FULL, Quota
from mps_exporter.mps.incidents_and_counters import BoundedDict, Moment
from mps_exporter.snapshot import Incident, IncidentKind, TimelineKind, TimelineSpan

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class QueuedClient:
    """A client in the daemon's queue, or sent to a server, until it has a context."""

    pid: int
    uid: int
    since: float
    blocked: bool = False  # A UID wait: another user's server holds the GPU, or did.
    behind_uid: int | None = None
    missing_since: float | None = None  # Time since which its process is missing.
    dead: bool = False  # Its process has exited, or its UID wait was abandoned.
    sent_at: float = 0.0  # Time at which the daemon sent it to a server.
    overtaken_by: int = 0  # Clients of other users that were admitted while it waited.

    def block(self, behind_uid: int | None, when: Moment) -> None:
        """Record that another user's server holds the GPU."""
        self.behind_uid = behind_uid
        if not self.blocked:
            self.blocked = True
            when.counters.start_user(self.uid)
            when.add_incident(Incident(self.since, "wait_started", uid=self.uid, pids=(self.pid,)))

    def serve(self, server_ready_at: float | None, when: Moment) -> bool:
        """Record that the client has a context, and return whether that ended a UID wait."""
        if not self.blocked or self.dead:
            return False
        waited_until = when.at if server_ready_at is None else server_ready_at
        seconds = max(waited_until - self.since, 0.0)
        when.observe("mps_uid_wait_seconds", seconds, uid=self.uid)
        self._end(when, "wait_served", seconds)
        return True

    def abandon(self, when: Moment, detail: str = "") -> None:
        """End a UID wait: the client has exited, or will never be served."""
        if self.dead or not self.blocked:
            return
        self.dead = True
        when.increment("mps_uid_waits_abandoned_total", uid=self.uid)
        self._end(when, "wait_abandoned", when.at - self.since, detail)

    def _end(self, when: Moment, kind: IncidentKind, seconds: float, detail: str = "") -> None:
        pids = (self.pid,)
        when.add_incident(
            Incident(when.at, kind, uid=self.uid, pids=pids, seconds=seconds, detail=detail)
        )


class ClientQueue:
    """Queued clients, oldest first."""

    def __init__(self, quota: Quota = FULL) -> None:
        self._entries: deque[QueuedClient] = deque(maxlen=quota.queued)

    def __iter__(self) -> Iterator[QueuedClient]:
        return iter(list(self._entries))

    def push(self, pid: int, uid: int, when: Moment) -> QueuedClient:
        """Return a client's entry, new if not queued; drop another process's entry with its PID.

        Clients with PID 0 cannot be distinguished: each has an entry of its own.
        """
        known = next((entry for entry in self._entries if pid and entry.pid == pid), None)
        if known is not None:
            gone = known.missing_since is not None and known.missing_since <= when.at
            if known.uid == uid and not known.dead and not gone:
                return known
            self._entries.remove(known)
            known.abandon(when)
        entry = QueuedClient(pid, uid, when.at)
        self._entries.append(entry)
        return entry

    def pop_user(self, uid: int) -> list[QueuedClient]:
        """Remove and return a user's clients: the server is ready, or forbidden."""
        popped = [entry for entry in self._entries if entry.uid == uid]
        for entry in popped:
            self._entries.remove(entry)
        return popped

    def pop_client(self, pid: int, uid: int | None) -> QueuedClient | None:
        """Remove and return a client; for PID 0, the user's oldest client with PID 0."""
        found = next((one for one in self._entries if (one.pid, one.uid) == (pid, uid)), None)
        if found is not None:
            self._entries.remove(found)
        return found

    def abandon_all(self, when: Moment) -> None:
        for entry in self:
            entry.abandon(when)
        self._entries.clear()

    def block_others(self, uid: int, when: Moment) -> None:
        """Record that the clients of all other users wait behind this user's new server."""
        for entry in self:
            if entry.uid != uid:
                entry.block(uid, when)

    def blocked_clients(self, at: float = 0.0) -> list[QueuedClient]:
        """Return the clients in a UID wait whose processes were not missing by this time."""
        return [e for e in self if e.blocked and not e.dead and (e.missing_since or NEVER) > at]

    def count_overtake(self, uid: int, when: Moment) -> None:
        """Count the admission of the running user's client, if another user's client waits."""
        if overtaken := self.blocked_clients(when.at):
            when.increment("mps_uid_overtakes_total", uid=uid)
        for entry in overtaken:
            entry.overtaken_by += 1


class Admissions:
    """The clients that were sent to one server and have not connected, oldest first; refusals."""

    def __init__(self) -> None:
        self._open: list[QueuedClient] = []
        self.admitted: BoundedDict[int, None] = BoundedDict(FULL.clients)
        """PIDs that were sent here and have not disconnected."""
        self._refused_at: BoundedDict[int, float] = BoundedDict(policy.MAX_RECENT)

    def __iter__(self) -> Iterator[QueuedClient]:
        return iter(list(self._open))

    def __bool__(self) -> bool:
        return bool(self._open)

    def mark_admitted(self, pid: int) -> None:
        if pid:
            self.admitted[pid] = None

    def add(self, entry: QueuedClient, when: Moment) -> None:
        entry.sent_at = when.at
        self._open.append(entry)

    def pop(self, pid: int) -> QueuedClient | None:
        found = next((one for one in self._open if one.pid == pid), None)
        if found is not None:
            self._open.remove(found)
        return found

    def next_timer(self) -> float:
        return self._open[0].sent_at + policy.ADMISSION_TIMEOUT_SECONDS if self._open else NEVER

    def expire(self, when: Moment, *, ended: bool = False) -> None:
        """Drop the clients that have not connected in time; all of them if the server ended."""
        while self._open and (ended or self.next_timer() <= when.at):
            entry = self._open.pop(0)
            self.admitted.pop(entry.pid, None)
            entry.abandon(when)

    def refuse(self, pid: int, when: Moment) -> None:
        """Record that a client process sent to the server was refused."""
        self._refused_at[pid] = when.at
        self.admitted.pop(pid, None)
        if (entry := self.pop(pid)) is not None:
            entry.abandon(when)

    def pop_refusal(self, pid: int, at: float) -> bool:
        """Forget this client's refusal; return whether server.log showed the refusal just now."""
        refused_at = self._refused_at.pop(pid, None)
        return refused_at is not None and at - refused_at < policy.SIMULTANEOUS_SECONDS


Occupant = tuple[TimelineKind, int | None]  # A kind of span, and the user.


@dataclass(slots=True)
class _Span:
    occupant: Occupant
    start_ms: int
    end_ms: int


class Timeline:
    """Spans in which users held the GPU or waited during the last ten minutes, oldest first.

    Times are whole milliseconds: they do not depend on the steps in which time is advanced.
    """

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque(maxlen=policy.MAX_TIMELINE_SPANS)
        self._open: dict[Occupant, _Span] = {}
        self._since_ms: int | None = None

    def line_read(self, at: float) -> None:
        """Record that a line was applied: the first line is where the timeline begins."""
        if self._since_ms is None:
            self._since_ms = round(at * 1000)

    def add(self, from_ms: int, to_ms: int, occupants: Iterable[Occupant]) -> None:
        """Extend the spans of these occupants to `to_ms`; open a span for each new occupant."""
        now_open: dict[Occupant, _Span] = {}
        for occupant in occupants:
            span = self._open.get(occupant)
            if span is None:
                span = _Span(occupant, from_ms, to_ms)
                self._spans.append(span)
            span.end_ms = to_ms
            now_open[occupant] = span
        self._open = now_open
        while self._spans and self._spans[0].end_ms < to_ms - policy.TIMELINE_SECONDS * 1000:
            self._spans.popleft()

    def snapshot(self, now: float) -> tuple[float | None, tuple[TimelineSpan, ...]]:
        """Return the time from which on the timeline is known, and its spans up to `now`."""
        begin_ms = round(now * 1000) - policy.TIMELINE_SECONDS * 1000
        spans = tuple(
            TimelineSpan(
                kind=span.occupant[0],
                uid=span.occupant[1],
                start=max(span.start_ms, begin_ms) / 1000,
                end=span.end_ms / 1000,
                ongoing=self._open.get(span.occupant) is span,
            )
            for span in self._spans
            if span.end_ms > begin_ms
        )
        since_ms = self._since_ms
        if since_ms is None and self._spans:
            since_ms = self._spans[0].start_ms  # without logs, only the control tool reports
        return (None if since_ms is None else max(since_ms, begin_ms) / 1000), spans

"""Clients that the daemon has sent to a server, from there to their connection or refusal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from mps_exporter.mps.record import Moment
from mps_exporter.mps.waits import QueuedClient

ADMISSION_SECONDS = 10.0
"""A client that was sent to a ready server connects within a millisecond (driver 580); one that
has not after this long will not."""

SIMULTANEOUS_SECONDS = 0.01
"""The two logs may show one event in either order when their stamps are this close."""

REFUSAL_SECONDS = 1.0
"""The lines about one refused client are written at once."""

NEVER = float("inf")
MAX_ADMITTED = 2048
MAX_REFUSED = 64
MAX_COUNTED_REFUSALS = 256

_CAUSES = {807: "server_not_ready", 808: "context_limit", 809: "context_limit"}
"""CUDA errors with which a client is refused."""


@dataclass(slots=True, eq=False)
class Admission:
    """A client that the daemon sent to the server, and that has not connected there yet."""

    pid: int
    uid: int
    at: float
    wait: QueuedClient | None = None
    for_context: bool = False
    """It was sent a second time: for a context."""

    def expire(self, when: Moment) -> None:
        if self.wait is not None:
            self.wait.abandon(when)


class Admissions:
    """The admissions and refusals of one server, oldest first."""

    def __init__(self) -> None:
        self._open: list[Admission] = []
        self._admitted: dict[int, None] = {}
        """PIDs that were sent here and have not disconnected."""
        self._refused_at: dict[int, float] = {}
        self._counted_refusals: deque[float] = deque(maxlen=MAX_COUNTED_REFUSALS)
        """Refusals that have been counted, whose status lines may follow."""

    def __iter__(self) -> Iterator[Admission]:
        return iter(list(self._open))

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, pid: int) -> bool:
        """Whether this PID was sent here and has not disconnected."""
        return pid in self._admitted

    def mark_admitted(self, pid: int) -> None:
        """A client with this PID was sent here, or is connected."""
        if pid and pid not in self._admitted:
            if len(self._admitted) >= MAX_ADMITTED:
                del self._admitted[next(iter(self._admitted))]
            self._admitted[pid] = None

    def add(self, admission: Admission) -> None:
        self._open.append(admission)

    def pop(self, pid: int) -> Admission | None:
        """Remove the admission of a client that connects."""
        for index, admission in enumerate(self._open):
            if admission.pid == pid:
                return self._open.pop(index)
        return None

    def mark_for_context(self, pid: int) -> None:
        """The daemon sends a client a second time."""
        for admission in self._open:
            admission.for_context |= admission.pid == pid

    def disconnected(self, pid: int) -> None:
        """A client is gone: its PID may be sent again."""
        self._admitted.pop(pid, None)

    def disconnected_all(self) -> None:
        self._admitted.clear()

    def expire_all(self, when: Moment) -> None:
        for admission in self._open:
            admission.expire(when)
        self._open.clear()

    def next_timer(self) -> float:
        """Return when run_timers() has something to do."""
        return self._open[0].at + ADMISSION_SECONDS if self._open else NEVER

    def run_timers(self, when: Moment) -> None:
        """Drop those that have not connected in time."""
        while self.next_timer() <= when.at:
            self._open.pop(0).expire(when)

    # ------------------------------------------------------------------ refusals

    def count_refusal(
        self, uid: int | None, cause: str, when: Moment, pid: int | None = None
    ) -> None:
        """The server refuses a client and writes why; a line with the status may follow."""
        when.count_rejection(uid, cause, () if pid is None else (pid,))
        self._counted_refusals.append(when.at)

    def count_status(self, uid: int | None, pid: int, status: int, when: Moment) -> None:
        """The server refuses a client with a CUDA error; counted unless the reason was."""
        refusals = self._counted_refusals
        while refusals and when.at - refusals[0] > REFUSAL_SECONDS:
            refusals.popleft()
        cause = _CAUSES.get(status)
        if refusals:
            refusals.popleft()
        elif cause is not None:
            when.count_rejection(uid, cause, (pid,))

    def refuse(self, pid: int, when: Moment) -> None:
        """A client process that was sent here may not connect."""
        if len(self._refused_at) >= MAX_REFUSED:
            self._refused_at.clear()
        self._refused_at[pid] = when.at
        self._admitted.pop(pid, None)
        admission = self.pop(pid)
        if admission is not None:
            admission.expire(when)

    def pop_refusal(self, pid: int, at: float) -> bool:
        """Whether server.log has shown, at the same moment, that this client was refused."""
        refused_at = self._refused_at.pop(pid, None)
        return refused_at is not None and at - refused_at < SIMULTANEOUS_SECONDS

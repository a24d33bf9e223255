"""Which client left GPU work behind that caused a fatal error: the rule, from server.log alone.

A client that ends, in any way, without waiting for its kernels leaves them to the server, which
meets a fatal error 0.1 to 0.3 s later. MPS then names one of the clients that are still there. The
end of a client takes two lines, and the time between them distinguishes such an end from an
ordinary one (driver 580.159.04, H200):

    52.688 ... with status 806, assuming client {PID: 477, Context ID: 1} exit    its context ends
    52.851 Client {PID: 472, Context: 1} encountered a fatal GPU error.           472 is innocent
    52.883 ... with status 806, assuming client {PID: 477, Context ID: 0} exit    its process ends

A long end alone proves nothing: the ends of clients that leave together wait for each other (0.1 to
1.4 s were measured, without a fault). So a client is named only if it is the only one that can have
caused the fault. docs/unfinished-work.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CONTEXT_TO_FAULT_SECONDS = (0.1, 0.3)
"""From the end of the context to the fault: 0.122 to 0.257 s were measured, and once 0.362 s, where
the work was on pinned host memory: there no client is named."""

LONG_END_SECONDS = (0.12, 0.8)
"""From the end of the context to the end of the process, of a client that ends by itself: 0.146 to
0.487 s were measured where a fault followed (4 of 166 took 0.019 to 0.021 s), 0.012 to 0.093 s
where no work was left (on a busy machine 0.137 s once). A program that takes longer has destroyed
its context and gone on without."""

CERTAIN_END_SECONDS = 0.28
FAULT_TO_END_SECONDS = 0.085
"""A client is named only if its end took no longer in all, and no longer after the fault: with
unfinished work 0.147 to 0.268 s and up to 0.080 s, but for 3 of 120. A fault of another client
holds up an ordinary end as well (0.291 s, 0.088 s after the fault, in 1 of 35)."""

END_TO_FAULT_SECONDS = 0.1
"""From the end of the process to the fault: with busy neighbours the fault comes first, with idle
ones at most 0.058 s later."""

NEWCOMER_TO_FAULT_SECONDS = 1.0
"""Where no other client was on the GPU, from the moment at which the next one's context is ACTIVE
to the fault: 0.172 to 0.697 s were measured."""

FAILED_START_SECONDS = 0.008
"""A client that gets error 46 in its first call closes its context 0.05 to 0.33 s after the fault
and its last connection 0 to 0.003 s later, 0.006 s once. Every other end took 0.012 s or more, but
for one of 20 that left together: 0.006 s."""

AFTERMATH_SECONDS = 0.3
"""A long end this shortly before a fault leaves a doubt, even if the times are not the above."""

QUEUED_END_SECONDS = 2.0
"""Who has not ended so long after its context goes on without it. The longest end took 1.4 s, when
48 clients left together."""

CROWD = 3
"""So many others that end at the same time explain a long end: four that left together took up to
0.089 s each, eight 0.097 to 0.227 s."""

DECISION_SECONDS = 0.5
"""So long after a fault every end that was in progress is complete, unless it waits for others."""

MAX_ENDINGS = 256
"""Ends of clients that are kept for a server. Those older than 2 s matter no more."""


@dataclass(slots=True, eq=False)
class Ending:
    """A client that ends: first its contexts, then its process."""

    pid: int
    """0 where the daemon cannot see the client's PID namespace."""
    uid: int | None
    contexts: list[tuple[float, str]] = field(default_factory=list)
    """When each of its contexts ended, and the UUID of its GPU, "" if unknown."""
    ended_at: float | None = None
    """When its process ended."""
    excused: bool = False
    """An operator terminated it, or a fault had taken it down."""
    counted: bool = False
    """It has been counted as a client that left work behind."""

    def closed_at(self, gpus: Collection[str] = ()) -> float | None:
        """Return when its last context on one of these GPUs ended; None: it had none there."""
        return max((at for at, gpu in self.contexts if same_gpu((gpu,), gpus)), default=None)

    def was_on(self, gpus: Collection[str]) -> bool:
        """Whether it may have had a context on one of these GPUs."""
        return self.closed_at(gpus) is not None

    def span(self, until: float) -> tuple[float, float]:
        """Return from when to when it was ending, as far as this moment."""
        begun_at = self.closed_at()
        ended_at = until if self.ended_at is None else min(self.ended_at, until)
        return (ended_at if begun_at is None else begun_at), ended_at

    def seconds(self, until: float) -> float:
        """Return how long its end took, or has taken at this moment."""
        begun_at, ended_at = self.span(until)
        return ended_at - begun_at

    def overlaps(self, other: Ending, until: float) -> bool:
        """Whether both were ending at one moment up to this one."""
        (own, my_end), (its, its_end) = self.span(until), other.span(until)
        return own <= its_end and its <= my_end


@dataclass(slots=True, eq=False)
class Last:
    """The last clients on a GPU: what they left there is met by the next one."""

    endings: tuple[Ending, ...]
    """More than one where they left together."""
    suspicious: bool
    """It was one alone, and its end was long."""
    newcomer_at: float | None = None
    """When the context of the next client on that GPU was ACTIVE."""

    @property
    def resolved_at(self) -> float:
        """When it is certain that they left nothing, if no fault comes."""
        if self.newcomer_at is None:
            return float("inf")
        return self.newcomer_at + NEWCOMER_TO_FAULT_SECONDS

    def may_have_hit(self, at: float) -> bool:
        """Whether a fault at this moment may come from what they left."""
        return self.newcomer_at is not None and at <= self.resolved_at

    def was_on(self, gpus: Collection[str]) -> bool:
        """Whether they may have left something on one of these GPUs."""
        return any(ending.was_on(gpus) for ending in self.endings)


class Verdict(NamedTuple):
    """What the evidence about a fault amounts to."""

    culprit: Ending | None
    """The only client that can have left the work."""
    suspects: tuple[Ending, ...]
    """Clients that can have, whether or not one is singled out; none: MPS's word stands."""


def same_gpu(some: Collection[str], others: Collection[str]) -> bool:
    """Whether they may have a GPU in common. Nothing, and "", stand for an unknown one."""
    if not some or not others or "" in some or "" in others:
        return True
    return not set(some).isdisjoint(others)


def suspects(at: float, gpus: Collection[str], endings: Iterable[Ending]) -> tuple[Ending, ...]:
    """Return the clients whose end may have to do with a fault at this moment on these GPUs.

    Args:
        at: When the fault was.
        gpus: UUIDs of the GPUs that it hit; nothing, or "", where they are unknown.
        endings: Clients of this server that had ended or were ending.
    """
    found = []
    for ending in endings:
        closed_at = ending.closed_at(gpus)
        if ending.excused or closed_at is None:
            continue
        waits = CONTEXT_TO_FAULT_SECONDS[0] <= at - closed_at <= QUEUED_END_SECONDS
        fresh = ending.ended_at is None or at - ending.ended_at <= AFTERMATH_SECONDS
        if waits and fresh and ending.seconds(at) >= LONG_END_SECONDS[0]:
            found.append(ending)
    return tuple(found)


def find_culprit(
    at: float,
    gpus: Collection[str],
    endings: Collection[Ending],
    met: Sequence[Last],
    *,
    failed_start: bool | None,
    final: bool,
) -> Verdict | None:
    """Find who left the work that caused a fault.

    Args:
        at: When the fault was.
        gpus: See suspects().
        endings: See suspects().
        met: Who had been the last on these GPUs before a newcomer that had hardly begun.
        failed_start: Whether all victims failed in their first call; see failed_start().
        final: No more evidence will come.

    Returns:
        None while more evidence is awaited.
    """
    found = suspects(at, gpus, endings)
    awaited = any(one.ended_at is None for one in found) or (met and failed_start is None)
    if awaited and not final:
        return None
    if met and not found:
        return _of_last(met, failed_start=failed_start)
    if (
        len(found) == 1
        and _fits_measured_times(found[0], at, gpus)
        and not _crowded(found[0], at, endings)
    ):
        return Verdict(found[0], found)
    return Verdict(None, found or just_ended(at, gpus, endings))


def just_ended(at: float, gpus: Collection[str], endings: Iterable[Ending]) -> tuple[Ending, ...]:
    """Return the clients whose context ended when that of a culprit would have.

    One of 132 that left work behind, beside others, ended as quickly as an ordinary client, in
    0.021 s: a quick end is no evidence, but it leaves a doubt.
    """
    least, most = CONTEXT_TO_FAULT_SECONDS
    return tuple(
        ending
        for ending in endings
        if not ending.excused and least <= at - (ending.closed_at(gpus) or 0.0) <= most
    )


def _of_last(met: Sequence[Last], *, failed_start: bool | None) -> Verdict:
    able = tuple(ending for last in met for ending in last.endings)
    if failed_start:
        # A client whose first call fails has run nothing that could have caused the fault.
        return Verdict(able[0] if len(able) == 1 else None, able)
    return Verdict(None, able if any(is_long(ending) for ending in able) else ())


def _fits_measured_times(ending: Ending, at: float, gpus: Collection[str]) -> bool:
    """Whether the times are like those that were measured with other clients on the GPU."""
    closed_at, ended_at = ending.closed_at(gpus), ending.ended_at
    if closed_at is None or ended_at is None:
        return False
    if not -FAULT_TO_END_SECONDS <= at - ended_at <= END_TO_FAULT_SECONDS:
        return False
    least, most = CONTEXT_TO_FAULT_SECONDS
    certain = LONG_END_SECONDS[0] <= ended_at - closed_at <= CERTAIN_END_SECONDS
    return least <= at - closed_at <= most and certain


def _crowded(ending: Ending, at: float, endings: Iterable[Ending]) -> bool:
    others = [other for other in endings if other is not ending and other.overlaps(ending, at)]
    return len(others) >= CROWD


def is_long(ending: Ending) -> bool:
    """Whether its end took as long as with unfinished work."""
    least, most = LONG_END_SECONDS
    return ending.ended_at is not None and least <= ending.seconds(ending.ended_at) <= most


def failed_start(at: float, victims: Iterable[int], endings: Iterable[Ending]) -> bool | None:
    """Return whether all victims of a fault failed in their first call, before they ran anything.

    Args:
        at: When the fault was.
        victims: PIDs of the clients that it took down.
        endings: Clients of this server that have ended or are ending by now.

    Returns:
        None while one of them has not ended.
    """
    after = [ending for ending in endings if (ending.closed_at() or at) >= at]
    ends = [[ending for ending in after if ending.pid == pid] for pid in victims]
    if any(
        ending.seconds(ending.ended_at) > FAILED_START_SECONDS
        for of_pid in ends
        for ending in of_pid
        if ending.ended_at is not None
    ):
        return False
    complete = all(
        of_pid and all(ending.ended_at is not None for ending in of_pid) for of_pid in ends
    )
    return True if ends and complete else None


def last_on_gpu(
    ending: Ending,
    endings: Iterable[Ending],
    present: Iterable[Collection[str]],
    before: Iterable[Last],
) -> list[Last]:
    """Return who may have left work that no client has met yet, when a client has just ended.

    Args:
        ending: The client.
        endings: All that ended or are ending, this one among them.
        present: The GPUs on which each of the other clients of the server has contexts.
        before: Who had been the last before this client.
    """
    closed_at, before = ending.closed_at(), list(before)
    gpus = [gpu for _, gpu in ending.contexts]
    if closed_at is None or any(same_gpu(gpus, theirs) for theirs in present):
        return before
    # What others had left earlier would have hit this one, if it was there for long enough.
    together = [
        one
        for one in endings
        if one.ended_at is None or one.ended_at >= closed_at - AFTERMATH_SECONDS
        if one.was_on(gpus)
    ]
    unmet = [last for last in before if last.was_on(gpus)]
    able = [one for last in unmet for one in last.endings if one not in together]
    able += [one for one in together if not one.excused]
    kept = [last for last in before if last not in unmet]
    if able:
        alone = len(together) == len(able) == 1
        kept.append(Last(tuple(able), suspicious=alone and is_long(ending)))
    return kept

"""What an ordinary user gets: which of any number of processes are looked at, and how often."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PROGRAMS_PER_USER = 24
"""Eight daemons, their servers, and as many runs of the control tool."""

MAX_DAEMONS_PER_USER = 8
MAX_DAEMONS = 64
"""Of all users but root together."""

MAX_PROGRAMS = 512
"""Of all users but root together; eight GPUs of seven MIG instances make 56 daemons of one user."""

NEW_PROGRAMS_PER_SECOND = 1.0
MAX_NEW_PROGRAMS_PER_SECOND = 16.0
"""So many new processes of a user, and of all users but root, are looked at in the long run: one
costs 0.3 ms, and if it is called like a daemon and ends at once, a hundred times as much."""

_LISTINGS = 64
"""A process that is left out is looked at again once in so many listings."""

UserAndParent = Callable[[int], tuple[int | None, int | None]]
"""PID -> whose process it is, and its parent."""


@dataclass(frozen=True, slots=True)
class _Seen:
    user: int | None
    parent: int | None


class FairShare:
    """Chooses processes: all of root's and the exporter's own, a few of each other user.

    A server runs as its clients' user, so the children of these daemons are chosen, too.

    Args:
        own_user: The exporter's user.
        clock: Monotonic time.
    """

    def __init__(self, own_user: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._unlimited = frozenset({0, own_user})
        self._clock = clock
        self._new = Allowances(MAX_PROGRAMS_PER_USER, NEW_PROGRAMS_PER_SECOND)
        self._all_new = Allowances(MAX_PROGRAMS, MAX_NEW_PROGRAMS_PER_SECOND)
        self._seen: dict[int, _Seen] = {}
        self._chosen: frozenset[int] = frozenset()
        self._listings = 0

    def choose(self, pids: Sequence[int], look: UserAndParent) -> tuple[list[int], Counter[int]]:
        """Give the processes that are looked at, and of each user how many are not.

        Those that were chosen stay; of new ones those with the lowest PIDs come first.
        """
        self._listings += 1
        before, self._seen = self._seen, {}
        for pid in pids:
            found = before.get(pid)
            if found is None or not (pid + self._listings) % _LISTINGS:
                found = _Seen(*look(pid))
            self._seen[pid] = found
        unlimited = {pid for pid in pids if self._seen[pid].user in self._unlimited}
        chosen = set(unlimited)
        taken, left_out = Counter[int | None](), Counter[int]()
        for pid in sorted(pids, key=lambda pid: (pid not in self._chosen, pid)):
            seen = self._seen[pid]
            if pid in chosen:
                continue
            if seen.parent in unlimited:  # a server
                chosen.add(pid)
            elif (
                taken[seen.user] < MAX_PROGRAMS_PER_USER
                and taken.total() < MAX_PROGRAMS
                and (pid in self._chosen or self._may_be_new(seen.user))
            ):
                taken[seen.user] += 1
                chosen.add(pid)
            elif seen.user is not None:
                left_out[seen.user] += 1
        self._chosen = frozenset(chosen)
        return sorted(chosen), left_out

    def _may_be_new(self, user: int | None) -> bool:
        """Count a new process of a user; False: there were too many lately."""
        now = self._clock()
        if self._new.left(user, now) < 1.0 or self._all_new.left(None, now) < 1.0:
            return False
        self._new.use(user, 1.0, now)
        self._all_new.use(None, 1.0, now)
        return True


class Allowances:
    """What each user may use: so much at once, and so much a second in the long run.

    Args:
        most: What a user has at first, and never more.
        per_second: How fast it grows again.
    """

    def __init__(self, most: float, per_second: float) -> None:
        self._most = most
        self._per_second = per_second
        self._used: dict[int | None, tuple[float, float]] = {}
        """How much a user has used up, and as of when; nothing of one who has all of it again."""

    def left(self, user: int | None, now: float) -> float:
        """Give what a user has at a moment (seconds of any clock)."""
        used, at = self._used.get(user, (0.0, now))
        # (Before then: the clock was set back.)
        return self._most - max(0.0, used - max(0.0, now - at) * self._per_second)

    def use(self, user: int | None, amount: float, now: float) -> None:
        """Take some of it, more than is left if need be."""
        used = {one: self._most - self.left(one, now) for one in {*self._used, user}}
        used[user] += amount
        self._used = {one: (much, now) for one, much in used.items() if much > 0.0}

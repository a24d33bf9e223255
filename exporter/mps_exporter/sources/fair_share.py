"""Which processes of MPS's programs are looked at: a user may start any number of them."""

from __future__ import annotations

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
    """

    def __init__(self, own_user: int) -> None:
        self._unlimited = frozenset({0, own_user})
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
            elif taken[seen.user] < MAX_PROGRAMS_PER_USER and taken.total() < MAX_PROGRAMS:
                taken[seen.user] += 1
                chosen.add(pid)
            elif seen.user is not None:
                left_out[seen.user] += 1
        self._chosen = frozenset(chosen)
        return sorted(chosen), left_out

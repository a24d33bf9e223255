"""What ordinary users may cost the exporter: processes, daemons, tool runs.

Every limit holds for each user, and a second one for all ordinary users together: one person may
have many user IDs (/etc/subuid).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from weakref import WeakValueDictionary

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import DaemonFacts
from mps_exporter.sources.processes import Account, ProcessStatus


class UserTokenBuckets:
    """A token bucket for each user, which is full at first."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._used: dict[Hashable, tuple[float, float]] = {}
        """Tokens consumed, and the time of that number; users with a full bucket are left out."""

    def available(self, user: Hashable, now: float) -> float:
        """Return the tokens of a user at a time (seconds of any clock)."""
        used, at = self._used.get(user, (0.0, now))
        elapsed = max(0.0, now - at)  # 0 if the clock was set back
        return self._burst - max(0.0, used - elapsed * self._per_second)

    def consume(self, user: Hashable, amount: float, now: float) -> None:
        """Take tokens from a user's bucket, if need be more than the bucket contains."""
        used = {other: self._burst - self.available(other, now) for other in {*self._used, user}}
        used[user] += amount
        self._used = {other: (tokens, now) for other, tokens in used.items() if tokens > 0.0}


class UserBudget:
    """Admits processes, daemons and tool runs by account (see Processes.account)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_user = UserTokenBuckets(
            policy.MAX_PROCESSES_PER_USER, policy.NEW_PROCESSES_PER_SECOND
        )
        self._of_all = UserTokenBuckets(policy.MAX_PROCESSES, policy.MAX_NEW_PROCESSES_PER_SECOND)
        self._admitted: frozenset[int] = frozenset()
        self._trusted_runs = asyncio.Semaphore(policy.MAX_TOOL_RUNS)
        self._other_runs = asyncio.Semaphore(policy.MAX_TOOL_RUNS)
        self._user_runs: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    def admit_processes(
        self, statuses: Mapping[int, ProcessStatus]
    ) -> tuple[list[int], Counter[int]]:
        """Return the PIDs to read, and the number of ignored processes of each user.

        Processes admitted before come first. A server runs as its clients' user, so the
        children of trusted processes are admitted, too.
        """
        trusted = {pid for pid, one in statuses.items() if one.account is None}
        admitted = trusted | {pid for pid, one in statuses.items() if one.parent_pid in trusted}
        taken, ignored = Counter[Account](), Counter[int]()
        for pid in sorted(
            statuses.keys() - admitted, key=lambda pid: (pid not in self._admitted, pid)
        ):
            user = statuses[pid].account
            if (
                taken[user] < policy.MAX_PROCESSES_PER_USER
                and taken.total() < policy.MAX_PROCESSES
                and (pid in self._admitted or self._admit(user))
            ):
                taken[user] += 1
                admitted.add(pid)
            elif (uid := statuses[pid].real_uid) is not None:
                ignored[uid] += 1
        self._admitted = frozenset(admitted)
        return sorted(admitted), ignored

    def admit_daemon(self, daemon: DaemonFacts, shown: Counter[Hashable]) -> bool:
        """Return whether a daemon is shown; count it in `shown`, the ordinary users' daemons."""
        if not daemon.limited:
            return True
        user = daemon.account
        room = shown[user] < policy.MAX_DAEMONS_PER_USER and shown.total() < policy.MAX_DAEMONS
        shown[user] += room
        return room

    def tool_slots(self, daemon: DaemonFacts) -> tuple[asyncio.Semaphore, ...]:
        """Return the semaphores to hold, in this order, during a run of the control tool.

        Daemons of ordinary users, which may all hang, do not use up the runs for trusted daemons.
        """
        if not daemon.limited:
            return (self._trusted_runs,)
        own = self._user_runs.get(daemon.account)
        if own is None:
            own = self._user_runs[daemon.account] = asyncio.Semaphore(policy.MAX_TOOL_RUNS_PER_USER)
        return own, self._other_runs

    def _admit(self, user: Account) -> bool:
        """Take a token from a user's bucket and from the common bucket; False if one is empty."""
        now = self._clock()
        admitted = min(self._of_user.available(user, now), self._of_all.available(None, now)) >= 1.0
        if admitted:
            self._of_user.consume(user, 1.0, now)
            self._of_all.consume(None, 1.0, now)
        return admitted

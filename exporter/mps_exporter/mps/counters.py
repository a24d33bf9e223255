"""What only ever grows: the ledger's counters, which begin at 0 when the exporter does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

from mps_exporter.mps.histogram import (
    RECOVERY_BOUNDS,
    SESSION_BOUNDS,
    STARTUP_BOUNDS,
    WAIT_BOUNDS,
    HistogramBuilder,
)
from mps_exporter.snapshot import EXIT_CAUSES, LedgerCounters

MAX_KEYS = 512
"""Users, or GPUs, that are counted apart. Anybody may write into the daemon's log pipe, so a log
can name as many as it likes; those beyond count as unknown."""

K = TypeVar("K", bound=Hashable)


class Counters:
    """Counts while `counting`; what it is told otherwise happened before the exporter began."""

    def __init__(self) -> None:
        self.counting = True
        self.daemon_starts = 0
        self.server_starts: Counter[int | None] = Counter()
        self.server_exits: Counter[str] = Counter(dict.fromkeys(EXIT_CAUSES, 0))
        self.server_last_exit_at: dict[str, float] = {}
        self.server_startup = HistogramBuilder(STARTUP_BOUNDS)
        self.faults: Counter[str] = Counter()
        self.last_fault_at: float | None = None
        self.fault_recovery = HistogramBuilder(RECOVERY_BOUNDS)
        self.connections: Counter[int | None] = Counter()
        self.disconnections: Counter[int | None] = Counter()
        self.sessions: dict[int | None, HistogramBuilder] = {}
        self.losses: Counter[tuple[int | None, str]] = Counter()
        self.unfinished_exits: Counter[int | None] = Counter()
        self.rejections: Counter[tuple[int | None, str]] = Counter()
        self.waits: dict[int | None, HistogramBuilder] = {}
        self.waits_abandoned: Counter[int | None] = Counter()
        self.overtakes: Counter[int | None] = Counter()
        self.handovers = 0
        self.handover_idle_ms = 0
        self.holding_ms: Counter[int | None] = Counter()
        self.log_lines = {"control": 0, "server": 0}
        self.unrecognized_lines = {"control": 0, "server": 0}
        self.query_lines = 0
        self._users: set[int] = set()

    def bounded_uid(self, uid: int | None) -> int | None:
        """Give the user to count for: itself, or None for one too many."""
        if uid is None or uid in self._users:
            return uid
        if len(self._users) >= MAX_KEYS:
            return None
        self._users.add(uid)
        return uid

    def count_for_user(self, counter: Counter[int | None], uid: int | None) -> None:
        """Count one for a user."""
        if self.counting:
            counter[self.bounded_uid(uid)] += 1

    def count_for_cause(
        self, counter: Counter[tuple[int | None, str]], uid: int | None, cause: str
    ) -> None:
        """Count one for a user and a cause."""
        if self.counting:
            counter[self.bounded_uid(uid), cause] += 1

    def observe(self, histogram: HistogramBuilder, seconds: float) -> None:
        """Count a duration."""
        if self.counting:
            histogram.observe(seconds)

    def observe_session(self, uid: int | None, seconds: float) -> None:
        """Count a client's stay."""
        if self.counting:
            self._histogram(self.sessions, uid, SESSION_BOUNDS).observe(seconds)

    def observe_wait(self, uid: int | None, seconds: float) -> None:
        """Count a wait that was served."""
        if self.counting:
            self._histogram(self.waits, uid, WAIT_BOUNDS).observe(seconds)

    def count_exit(self, cause: str, at: float) -> None:
        """Count a server's end. When it was is kept for those before the exporter, too."""
        self.server_last_exit_at[cause] = at
        if self.counting:
            self.server_exits[cause] += 1

    def count_fault(self, uuid: str) -> None:
        """Count a fault on a GPU."""
        if self.counting:
            known = uuid in self.faults or len(self.faults) < MAX_KEYS
            self.faults[uuid if known else ""] += 1

    def snapshot(self) -> LedgerCounters:
        """Give what was counted so far."""
        return LedgerCounters(
            daemon_starts=self.daemon_starts,
            server_starts=dict(self.server_starts),
            server_exits=dict(self.server_exits),
            server_last_exit_at=dict(self.server_last_exit_at),
            server_startup=self.server_startup.snapshot(),
            faults=dict(self.faults),
            last_fault_at=self.last_fault_at,
            fault_recovery=self.fault_recovery.snapshot(),
            connections=dict(self.connections),
            disconnections=dict(self.disconnections),
            sessions={uid: histogram.snapshot() for uid, histogram in self.sessions.items()},
            losses=dict(self.losses),
            unfinished_exits=dict(self.unfinished_exits),
            rejections=dict(self.rejections),
            waits={uid: histogram.snapshot() for uid, histogram in self.waits.items()},
            waits_abandoned=dict(self.waits_abandoned),
            overtakes=dict(self.overtakes),
            handovers=self.handovers,
            handover_idle_seconds=self.handover_idle_ms / 1000.0,
            holding_seconds={uid: ms / 1000.0 for uid, ms in self.holding_ms.items()},
            log_lines=dict(self.log_lines),
            unrecognized_lines=dict(self.unrecognized_lines),
            query_lines=self.query_lines,
        )

    def _histogram(
        self,
        histograms: dict[int | None, HistogramBuilder],
        uid: int | None,
        bounds: tuple[float, ...],
    ) -> HistogramBuilder:
        return histograms.setdefault(self.bounded_uid(uid), HistogramBuilder(bounds))

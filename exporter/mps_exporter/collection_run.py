"""A collection under way: what has come in so far, and how each source fared."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import ControlObservation, NvmlObservation, ProcfsObservation
from mps_exporter.snapshot import COLLECTORS, CollectorName, CollectorResult, Snapshot
from mps_exporter.sources.host import SourceError, SourceTimeoutError

SELF_LOGGING_COLLECTORS = ("nvml", "control")
"""Sources that log their own failures and recoveries, in more detail than is known here."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectionRun:
    """A collection under way: what has come in so far."""

    started: float
    deadline_seconds: float
    collectors: frozenset[str]
    results: dict[CollectorName, CollectorResult] = field(default_factory=dict)
    gpus: NvmlObservation | None = None
    processes: ProcfsObservation | None = None
    queried: set[str] = field(default_factory=set)
    probes: dict[str, ControlObservation] = field(default_factory=dict)
    """Pipe directory -> what its daemon answered in this collection."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    snapshot: Snapshot | None = None
    """Made once the run has ended; None until then."""
    _timeouts: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Of the sources being read: timeout -> its share of the deadline."""

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.started

    def remaining_seconds(self) -> float:
        return max(0.01, self.deadline_seconds - self.age_seconds)

    def extend(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now if it is earlier, also for reads under way."""
        self.deadline_seconds = max(self.deadline_seconds, self.age_seconds + seconds)
        for timeout, share in self._timeouts.items():
            timeout.reschedule(self._end(share))

    def _end(self, share: float) -> float:
        return self.started + share * self.deadline_seconds

    @asynccontextmanager
    async def time_limit(self, share: float = 1.0) -> AsyncIterator[None]:
        """Cancel what is inside after this share of the deadline, wherever extend() moves it.

        Raises:
            SourceTimeoutError: It was cancelled.
        """
        # The event loop's clock is time.monotonic().
        timeout = asyncio.timeout_at(self._end(share))
        self._timeouts[timeout] = share
        try:
            async with timeout:
                yield
        except TimeoutError as late:
            if not timeout.expired():
                raise
            limit = share * self.deadline_seconds
            raise SourceTimeoutError(f"no answer within {limit:.3g} s") from late
        finally:
            del self._timeouts[timeout]

    def add_result(
        self, name: CollectorName, duration_seconds: float, error: str | None, *, timed_out: bool
    ) -> None:
        """Note how a source fared; one that ran before is judged by both runs."""
        earlier = self.results.get(name)
        if earlier is not None:
            duration_seconds += earlier.duration_seconds
            error = earlier.error or error
            timed_out = timed_out or earlier.timed_out
        self.results[name] = CollectorResult(
            name=name,
            success=error is None,
            duration_seconds=duration_seconds,
            timed_out=timed_out,
            error=error,
        )

    def collector_results(self) -> tuple[CollectorResult, ...]:
        """How each source fared; one that is not done is marked as late."""
        elapsed = time.monotonic() - self.started
        return tuple(
            self.results.get(name)
            or CollectorResult(
                name,
                success=False,
                duration_seconds=elapsed,
                timed_out=True,
                error="no answer before the deadline",
            )
            for name in COLLECTORS
            if name in self.collectors
        )


async def run_source(
    transitions: TransitionLogger, run: CollectionRun, name: CollectorName, work: Awaitable[None]
) -> None:
    """Run one source and note how it fared: the only place that times and judges."""
    if name not in run.collectors:
        if asyncio.iscoroutine(work):
            work.close()
        return
    started = time.monotonic()
    error: str | None = None
    timed_out = False
    try:
        await work
    except (SourceTimeoutError, TimeoutError) as late:
        timed_out, error = True, str(late) or "no answer before the deadline"
    except (SourceError, OSError) as failed:
        error = str(failed)
    except Exception as bug:  # noqa: BLE001 - a bug in one source leaves the others' metrics
        _log.exception("collector failed", extra={"fields": {"collector": name}})
        error = f"{type(bug).__name__}: {bug}"
    run.add_result(name, time.monotonic() - started, error, timed_out=timed_out)
    if name in SELF_LOGGING_COLLECTORS:
        return
    if error is None:
        transitions.recovered(name, message="collector works again", collector=name)
    else:
        transitions.failed(name, message="collector failed", collector=name, err=error)

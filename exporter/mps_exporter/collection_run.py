"""A collection in progress: its results, its deadline, and its queries of the daemons."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from mps_exporter import policy
from mps_exporter.daemon_registry import DaemonRecord, DaemonRegistry
from mps_exporter.flags import Settings
from mps_exporter.logging import TransitionLogger
from mps_exporter.mps.control_protocol import server_replies
from mps_exporter.mps.server_queries import servers_due, with_probe, with_servers
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    NvmlObservation,
    Observation,
    Outcome,
    ProcfsObservation,
)
from mps_exporter.snapshot import COLLECTORS, CollectorName, CollectorResult
from mps_exporter.sources.host import Host, SourceError, SourceTimeoutError

SELF_LOGGING_COLLECTORS = ("nvml", "control")
"""Sources that log their own failures and recoveries in more detail."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectionRun:
    """A collection in progress."""

    started: float
    deadline_seconds: float
    collectors: frozenset[str]
    transitions: TransitionLogger
    results: dict[CollectorName, CollectorResult] = field(default_factory=dict)
    gpus: NvmlObservation | None = None
    processes: ProcfsObservation | None = None
    probes: dict[str, ControlObservation | None] = field(default_factory=dict)
    """Pipe directory -> reply of its daemon in this collection; None: there is none, or not yet."""
    reconciled: bool = False
    """Whether servers were queried: their replies wait until the logs are read up to them."""

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.started

    def remaining_seconds(self, ratio: float = 1.0) -> float:
        """Return the time that is left of this part of the deadline."""
        return max(0.01, ratio * self.deadline_seconds - self.age_seconds)

    async def run_source(
        self, name: CollectorName, read: Callable[[CollectionRun], Awaitable[None]]
    ) -> None:
        """Read one source, or a further part of it, and record its duration and success."""
        if name not in self.collectors:
            return
        started = time.monotonic()
        before = self.results.get(name) or CollectorResult(name, success=True, duration_seconds=0.0)
        error, timed_out = None, False
        try:
            await read(self)
        except (SourceTimeoutError, TimeoutError) as late:
            error, timed_out = str(late) or "no answer before the deadline", True
        except (SourceError, OSError) as failed:
            error = str(failed)
        except Exception as bug:  # noqa: BLE001 - a bug in one source leaves the others' metrics
            _log.exception("collector failed", extra={"fields": {"collector": name}})
            error = f"{type(bug).__name__}: {bug}"
        error = before.error or error
        self.results[name] = CollectorResult(
            name,
            success=error is None,
            duration_seconds=before.duration_seconds + time.monotonic() - started,
            timed_out=before.timed_out or timed_out,
            error=error,
        )
        if name in SELF_LOGGING_COLLECTORS:
            return
        if error is None:
            self.transitions.recovered(name, message="collector works again", collector=name)
        else:
            self.transitions.failed(name, message="collector failed", collector=name, err=error)

    def collector_results(self) -> tuple[CollectorResult, ...]:
        """Return the result of each source; a source in progress is late."""
        late = "no answer before the deadline"
        return tuple(
            self.results.get(name)
            or CollectorResult(
                name, success=False, duration_seconds=self.age_seconds, timed_out=True, error=late
            )
            for name in COLLECTORS
            if name in self.collectors
        )


class DaemonQueries:
    """Queries daemons and their servers."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        daemons: DaemonRegistry,
        on_observation: Callable[[Observation], None],
    ) -> None:
        self._host = host
        self._settings = settings
        self._daemons = daemons
        self._on_observation = on_observation
        self._users_tasks: dict[str, asyncio.Task[None]] = {}
        """Queries of ordinary users' daemons that are in progress, by pipe directory."""

    async def query(self, run: CollectionRun) -> None:
        """Query every daemon; a daemon that fails or hangs does not affect the others.

        Daemons of ordinary users are waited for only briefly, and their failures are not the
        exporter's; the next collection shows a late reply.
        """
        users = [record for record in self._daemons.values() if record.facts.limited]
        others = [record for record in self._daemons.values() if not record.facts.limited]
        started = self._start_users_queries(run, users)
        outcomes = await asyncio.gather(
            *(self._query_daemon(run, record) for record in others), return_exceptions=True
        )
        if started:
            timeout = min(policy.USERS_QUERY_WAIT_SECONDS, run.remaining_seconds())
            await asyncio.wait(started, timeout=timeout)
        for record in users:
            name = record.facts.pipe_directory
            run.probes[name] = run.probes.get(name) or record.last_probe
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, SourceError | SourceTimeoutError):
                raise error
        if errors:
            text = "; ".join(sorted({str(error) for error in errors}))
            late = any(isinstance(error, SourceTimeoutError) for error in errors)
            raise SourceTimeoutError(text) if late else SourceError(text)

    def _start_users_queries(
        self, run: CollectionRun, records: Sequence[DaemonRecord]
    ) -> list[asyncio.Task[None]]:
        """Begin to query these daemons, except where an earlier query is in progress."""
        tasks = {name: task for name, task in self._users_tasks.items() if not task.done()}
        missing = [record for record in records if record.facts.pipe_directory not in tasks]
        started = [asyncio.create_task(self._query_users_daemon(run, one)) for one in missing]
        names = (record.facts.pipe_directory for record in missing)
        self._users_tasks = {**tasks, **dict(zip(names, started, strict=True))}
        return started

    async def _query_users_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        with contextlib.suppress(SourceError, SourceTimeoutError):  # the daemon's metrics show it
            await self._query_daemon(run, record)

    async def _query_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        """Probe one daemon, and query its servers when that is due."""
        run.probes[record.facts.pipe_directory] = None
        if record.known_absent:
            record.clear_answers()
            return
        max_age_seconds = policy.PROBE_VALID_INTERVALS * self._settings.mps_min_query_interval
        probe = record.valid_probe(self._host.now(), max_age_seconds)
        if probe is None:
            # Another process may have replaced it when the reply arrives.
            record.answered_by = record.facts.process_identity
            since = record.tracker.silent_since or 0.0
            probe = await self._host.probe(record.facts, run.remaining_seconds(), since)
            self._on_observation(probe)
        run.probes[record.facts.pipe_directory] = record.last_probe = probe
        record.answers = with_probe(record.answers, probe)
        record.record_query(probe)
        if _confirmed_absent(probe, record.facts):
            record.tracker.mark_absent(probe.at)
        # A daemon without a process may be absent: that is not a failure.
        if probe.outcome is not Outcome.ABSENT or record.facts.process is not None:
            _raise_for_outcome(probe)
        if probe.outcome is Outcome.OK:
            await self._reconcile(run, record, probe)

    async def _reconcile(
        self, run: CollectionRun, record: DaemonRecord, probe: ControlObservation
    ) -> None:
        """Query the servers that are due; an MPS v3 daemon for its clients and partitions."""
        state = record.state
        servers = servers_due(
            now=self._host.now(),
            interval_seconds=self._settings.mps_reconcile_interval,
            blind_interval_seconds=self._settings.mps_min_query_interval,
            answers=record.answers,
            facts=record.facts,
            state=state,
            logs_readable=record.logs_readable,
        )
        if not servers and not record.answers.v3_due(probe):
            return
        logged = [server.pid for server in state.servers] if servers else ()
        reply = await self._host.reconcile(record.facts, servers, run.remaining_seconds())
        self._on_observation(reply)
        record.answers = with_servers(record.answers, reply, servers, logged)
        if servers:
            listed = record.answers.probe.server_pids if record.answers.probe is not None else None
            record.tracker.reconcile(self._host.now(), reply.at, listed, server_replies(reply))
            run.reconciled = True
        record.record_query(reply)
        if reply.outcome is Outcome.TIMEOUT:
            # The reply to the probe is no longer valid.
            run.probes[record.facts.pipe_directory] = reply
            record.last_probe = None
        _raise_for_outcome(reply)


def _raise_for_outcome(observation: ControlObservation) -> None:
    if observation.outcome is Outcome.OK:
        return
    text = observation.error or f"{observation.pipe_directory}: {observation.outcome}"
    late = observation.outcome is Outcome.TIMEOUT
    raise SourceTimeoutError(text) if late else SourceError(text)


def _confirmed_absent(probe: ControlObservation, facts: DaemonFacts) -> bool:
    """Return whether no process was found, and the tool ran and found no daemon."""
    ran = any(exchange.return_code is not None for exchange in probe.exchanges)
    return facts.process is None and probe.outcome is Outcome.ABSENT and ran

"""One collection: all sources in parallel, each with its deadline, merged into a Snapshot.

Scrapes that overlap share a collection. A source that is late costs its own metrics and nothing
else. Between collections only the logs are followed (and the GPUs' event counters kept up).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from mps_exporter.collection_run import CollectionRun, run_source
from mps_exporter.config import Settings
from mps_exporter.daemon_queries import DaemonQueries
from mps_exporter.daemon_registry import DaemonRecord, DaemonRegistry
from mps_exporter.logging import TransitionLogger
from mps_exporter.merge import DaemonInputs, merge, pids_of_interest
from mps_exporter.metrics.gpus import series_of
from mps_exporter.mps.fault_evidence import KernelFault, parse_fault, pci_address
from mps_exporter.mps.log_parser import DAEMON_STARTING_LINE
from mps_exporter.mps.server_queries import ServerAnswers
from mps_exporter.observations import (
    AddressRanges,
    DaemonFacts,
    KernelObservation,
    LogChunk,
    NvmlObservation,
    Observation,
    Outcome,
    ProcfsObservation,
)
from mps_exporter.snapshot import Incident, KernelLog, Snapshot
from mps_exporter.sources.host import Host, SourceError, SourceTimeoutError

TAIL_INTERVAL_SECONDS = 0.2
"""Interval between polls of the logs."""

GPU_TICK_SECONDS = 1.0
"""How often the GPUs' activity is sampled between collections: an integral in steps of this size is
right within 2 %."""

STALE_ANSWER_FACTOR = 3.0
STALE_ANSWER_SECONDS = 15.0
"""So many times --mps.min-query-interval, but at least so long, a server's answer is shown where
the logs cannot be read: a server that is stopped is not asked, and may have changed since."""

WATCH_SECONDS = 1.0
"""So long the logs wait for a look at processes of which one ended; then it is tried again."""

NO_DAEMON_SECONDS = 5.0
"""How often /proc is searched for a first daemon between collections."""

MAX_FAULTS = 64
MAX_RANGES = 256
"""Maximum number of faults and of clients' address ranges that are kept for a daemon that is found
later: a recording has them before the daemon."""

GPU_SHARE_OF_DEADLINE = 0.7
"""What is left after the GPUs' deadline is for identifying the processes that they listed."""

_log = logging.getLogger(__name__)


class Collector:
    """Turns a host into snapshots."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        on_observation: Callable[[Observation], None] = lambda _observation: None,
        on_incident: Callable[[str, Incident], None] | None = None,
    ) -> None:
        self._host = host
        self._settings = settings
        self._on_observation = on_observation
        self._on_incident = on_incident
        self._daemons = DaemonRegistry()
        self._queries = DaemonQueries(
            host, settings, on_observation=on_observation, poll_logs=self.poll_logs
        )
        self._collections: dict[frozenset[str], CollectionRun] = {}
        self._transitions = TransitionLogger(_log)
        self._tail_lock = asyncio.Lock()
        self._stranded_since: dict[int, float] = {}
        self._unknown_readings = 0
        self._kernel: KernelObservation | None = None
        self._faults: deque[KernelFault] = deque(maxlen=MAX_FAULTS)
        self._ranges: deque[AddressRanges] = deque(maxlen=MAX_RANGES)
        self._gpu_addresses: dict[str, str] = {}
        """PCI address -> UUID of the GPUs that were read last."""
        self._identified: frozenset[int] = frozenset()
        """The processes that the last collection asked for."""

    @property
    def enabled(self) -> tuple[str, ...]:
        return self._settings.enabled_collectors()

    # ------------------------------------------------------------------ collections

    async def collect(
        self, deadline_seconds: float | None = None, collectors: Collection[str] | None = None
    ) -> Snapshot:
        """A snapshot of the host, as complete as the deadline allows.

        Joins the collection that is under way for the same collectors, and extends its deadline
        to the own one. One in which a source has been late for --collector.timeout is not joined:
        what its other sources read is old.
        """
        deadline = deadline_seconds or self._settings.collector_timeout
        chosen = frozenset(self.enabled if collectors is None else collectors)
        run = self._collections.get(chosen)
        if run is None or run.age_seconds >= self._settings.collector_timeout:
            # A scraper in a hurry leaves early; its short deadline must not bind who joins.
            least = self._settings.collector_timeout
            run = CollectionRun(time.monotonic(), max(deadline, least), chosen)
            self._collections[chosen] = run
            run.task = asyncio.create_task(self._collect(run), name="collection")
        run.extend(deadline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await run.done.wait()
        if run.task is not None and run.task.done() and not run.task.cancelled():
            error = run.task.exception()
            if error is not None:
                raise error
        return self._whole(run) if run.done.is_set() else self._snapshot(run)

    async def _collect(self, run: CollectionRun) -> None:
        try:
            # Side by side, although each thread keeps waiting for the interpreter: one after the
            # other takes longer (docs/performance.md).
            gpus = run_source(self._transitions, run, "nvml", self._read_gpus(run))
            await asyncio.gather(gpus, self._read_mps(run))
            await self._identify(run)
            self._publish()
        finally:
            if self._collections.get(run.collectors) is run:
                del self._collections[run.collectors]
            run.done.set()

    async def _read_gpus(self, run: CollectionRun) -> None:
        async with run.time_limit(GPU_SHARE_OF_DEADLINE):
            observation = await self._host.read_gpus(math.inf)
        run.gpus = observation
        self._on_observation(observation)
        self._gpu_addresses |= {
            pci_address(gpu.pci_bus_id): gpu.uuid for gpu in observation.gpus if gpu.pci_bus_id
        }
        self._unknown_readings += _log_unknown_readings(observation, self._transitions)
        if observation.outcome is not Outcome.OK:
            raise SourceError(observation.error or "NVML could not be read")

    async def _read_mps(self, run: CollectionRun) -> None:
        await run_source(self._transitions, run, "process", self._discover(run))
        if "process" not in run.collectors:
            await self._discover_configured(run)
        await run_source(self._transitions, run, "logs", self._read_logs(run))
        await run_source(self._transitions, run, "control", self._ask_daemons(run))

    async def _discover_configured(self, run: CollectionRun) -> None:
        with contextlib.suppress(SourceTimeoutError, SourceError):
            await self._discover(run)

    async def _discover(self, run: CollectionRun) -> None:
        async with run.time_limit():
            self._update_daemons(await self._host.discover(math.inf))

    async def _ask_daemons(self, run: CollectionRun) -> None:
        await self._queries.ask(run, list(self._daemons.values()))

    async def _identify(self, run: CollectionRun) -> None:
        await run_source(self._transitions, run, "process", self._read_processes(run))

    async def _read_processes(self, run: CollectionRun) -> None:
        inputs = [self._inputs(run, record) for record in self._daemons.values()]
        pids = pids_of_interest(run.gpus, inputs).union(self._daemons.pids_to_look_up())
        self._identified = frozenset(pids)
        async with run.time_limit():
            observation = await self._host.identify(pids, math.inf)
        run.processes = observation
        self._take_processes(observation, self._daemons.values())
        if observation.error is not None:
            raise SourceError(observation.error)

    def _take_processes(
        self, observation: ProcfsObservation, records: Iterable[DaemonRecord]
    ) -> None:
        self._on_observation(observation)
        requested = {*observation.processes, *observation.gone}
        for record in records:
            record.tracker.observe(observation.at, record.facts, observation.processes, requested)

    # ------------------------------------------------------------------ daemons

    def _facts(self) -> list[DaemonFacts]:
        return [record.facts for record in self._daemons.values()]

    def _update_daemons(self, found: tuple[DaemonFacts, ...]) -> None:
        self._daemons.update(found, self._host.now())
        self._host.forget(self._daemons.keys())

    async def poll_logs(self, deadline_seconds: float = 5.0) -> bool:
        """Read what the logs gained and fold it into the ledgers.

        Gives whether more is waiting that may be read at once: of limited daemons, the next poll
        brings the next part.
        """
        if "logs" not in self.enabled:
            return False
        async with self._tail_lock:
            self._read_kernel()
            observation = await self._host.poll_logs(self._facts(), deadline_seconds)
            self._on_observation(observation)
            if any(
                _daemon_starts(chunk) and not self._is_limited(chunk.pipe_directory)
                for chunk in observation.chunks
            ):
                # Whose line it is: of the daemon that was there, or of one beside it?
                with contextlib.suppress(SourceError, SourceTimeoutError):
                    self._update_daemons(await self._host.discover(deadline_seconds))
            for state in observation.states:
                record = self._daemons.get(state.pipe_directory)
                if record is not None:
                    record.note_log(state)
            for record in self._daemons.values():
                record.tracker.add_logs(observation)
            self._read_kernel()
        self._publish()
        return any(
            chunk.complete_until is None and not self._is_limited(chunk.pipe_directory)
            for chunk in observation.chunks
        )

    def _read_kernel(self) -> None:
        """Take in what shows who caused a fault, and request the memory of new clients."""
        wanted: dict[int, int | None] = {}
        # An ordinary user's log may name any process: what it asks for comes last, and replaces
        # nothing.
        for record in sorted(self._daemons.values(), key=lambda one: one.facts.limited):
            if record.has_host_pids:
                user = record.facts.user if record.facts.limited else None
                for pid in record.state.clients_to_map():
                    wanted.setdefault(pid, user)
        self._kernel = observation = self._host.read_kernel(wanted)
        self._on_observation(observation)
        faults = (parse_fault(line, self._gpu_addresses) for line in observation.lines)
        self._faults.extend(fault for fault in faults if fault is not None)
        self._ranges.extend(observation.ranges)
        for record in self._daemons.values():
            record.observe_kernel(observation, self._faults, self._ranges)

    def _is_limited(self, pipe_directory: str) -> bool:
        record = self._daemons.get(pipe_directory)
        return record is not None and record.facts.limited

    async def watch_processes(self, deadline_seconds: float = WATCH_SECONDS) -> None:
        """Take in which daemons, servers and queued clients ended, and when."""
        if "process" not in self.enabled:
            return
        watched = self._daemons.pids_to_watch()
        for observation in await self._host.exit_observations(
            watched, self._identified, deadline_seconds
        ):
            self._update_daemons(observation.daemons)
            # Of a daemon that is new here the logs are read first: they tell what was before.
            known = [record for record in self._daemons.values() if record.logs]
            self._take_processes(observation, known)

    async def _read_logs(self, run: CollectionRun) -> None:
        """Read the logs to their ends, or as far as half of the time that is left goes."""
        stop_at = time.monotonic() + run.remaining_seconds() / 2
        while await self.poll_logs(run.remaining_seconds()) and time.monotonic() < stop_at:
            pass

    # ------------------------------------------------------------------ results

    def _whole(self, run: CollectionRun) -> Snapshot:
        """Return the one snapshot of a collection that has ended: all who waited render it once.

        Next to 100 clients with 20 pending requests each, a scrape took 0.7 s when each request had
        its own snapshot, and takes 0.1 s.
        """
        if run.snapshot is None:
            run.snapshot = self._snapshot(run)
        return run.snapshot

    def _snapshot(self, run: CollectionRun) -> Snapshot:
        """What has come in so far; a source that is not done is marked as late."""
        now = self._host.now()
        snapshot = merge(
            taken_at=now,
            gpus=run.gpus,
            processes=run.processes,
            daemons=[self._inputs(run, record) for record in self._daemons.values()],
            collectors=run.collector_results(),
            clients_max=self._settings.collector_clients_max,
            stranded_since=self._stranded_since,
        )
        if run.gpus is not None:
            self._stranded_since = {
                pid: self._stranded_since.get(pid, run.gpus.at)
                for gpu in snapshot.gpus
                for pid in gpu.seems_stranded or ()
            }
        return replace(
            snapshot, unknown_readings=self._unknown_readings, kernel_log=self._kernel_log()
        )

    def _kernel_log(self) -> KernelLog | None:
        kernel = self._kernel
        if kernel is None or not (kernel.readable or kernel.error):
            return None
        return KernelLog(kernel.readable, kernel.error)

    def _inputs(self, run: CollectionRun, record: DaemonRecord) -> DaemonInputs:
        now, interval = self._host.now(), self._settings.mps_min_query_interval
        counts = self._host.query_counts(record.facts.pipe_directory)
        return _daemon_inputs(run, record, now, counts, interval)

    # ------------------------------------------------------------------ between collections

    async def run_between_collections(self) -> None:
        """Follow the logs until cancelled; finds daemons first, so that nothing is missed."""
        tick_at = search_at = 0.0
        while True:
            try:
                if not self._daemons and time.monotonic() >= search_at:
                    search_at = time.monotonic() + NO_DAEMON_SECONDS
                    self._update_daemons(await self._host.discover(5.0))
                while await self.poll_logs():
                    pass
                with contextlib.suppress(SourceTimeoutError, OSError):  # a collection says it
                    await self.watch_processes()
            except (SourceTimeoutError, SourceError, OSError) as error:
                self._transitions.failed("tail", message="cannot follow the logs", err=error)
            except Exception as bug:  # noqa: BLE001 - the next look may go well
                self._transitions.failed("tail", message="cannot follow the logs", err=repr(bug))
            else:
                self._transitions.recovered("tail", message="the logs are followed again")
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + GPU_TICK_SECONDS
                with contextlib.suppress(SourceTimeoutError):  # a collection says so better
                    await self._host.tick_gpus()
            await asyncio.sleep(TAIL_INTERVAL_SECONDS)

    def _publish(self) -> None:
        for name, record in self._daemons.items():
            new_incidents, record.published_incidents = record.state.incidents.since(
                record.published_incidents
            )
            if self._on_incident is not None:
                for incident in new_incidents:
                    self._on_incident(name, incident)


def _daemon_starts(chunk: LogChunk) -> bool:
    return not chunk.history and DAEMON_STARTING_LINE.search(chunk.data) is not None


def _log_unknown_readings(observation: NvmlObservation, log: TransitionLogger) -> int:
    """Log the readings that no metric shows; gives how many there are."""
    readings = [reading for gpu in observation.gpus for reading in gpu.readings]
    unknown = [reading for reading in readings if series_of(reading) is None]
    for reading in unknown:
        log.failed(
            "reading",
            reading.quantity,
            message="a GPU reading is left out: no metric shows it",
            quantity=reading.quantity,
            labels=",".join(f"{name}={value}" for name, value in reading.labels),
        )
    return len(unknown)


def _daemon_inputs(
    run: CollectionRun,
    record: DaemonRecord,
    now: float,
    counts: tuple[int, Mapping[str, int]],
    interval_seconds: float,
) -> DaemonInputs:
    """Return what is known of a daemon.

    Args:
        run: The collection.
        record: The daemon.
        now: Unix time.
        counts: Queries, and failures by reason.
        interval_seconds: How often a daemon is asked at most.
    """
    name, (queries, failures) = record.facts.pipe_directory, counts
    answers = record.answers if name in run.queried else ServerAnswers()
    if not record.logs_readable:
        # No log says whether it is still so.
        max_age_seconds = max(STALE_ANSWER_SECONDS, STALE_ANSWER_FACTOR * interval_seconds)
        answers = answers.younger_than(max_age_seconds, now)
    return DaemonInputs(
        facts=record.facts,
        probe=run.probes.get(name),
        answers=answers,
        state=record.state,
        logs=tuple(record.logs[name] for name in sorted(record.logs)),
        was_readable=record.was_readable,
        hung=record.hangs(now),
        resumed=record.resumed,
        queries=queries,
        query_failures=failures,
    )

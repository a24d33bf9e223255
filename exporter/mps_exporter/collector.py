"""One collection: all sources in parallel, each with its deadline, merged into a Snapshot.

Scrapes that overlap share a collection. A source that is late costs its own metrics and nothing
else. Between collections only the logs are followed (and the GPUs' event counters kept up).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from mps_exporter.config import Settings
from mps_exporter.logging import TransitionLogger
from mps_exporter.merge import DaemonInputs, merge, pids_of_interest
from mps_exporter.metrics.gpu_readings import series_of
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.mps.ledger import Ledger
from mps_exporter.mps.log_parser import DAEMON_STARTING_LINE
from mps_exporter.mps.query_schedule import (
    ServerAnswers,
    can_answer,
    server_replies,
    servers_due,
    with_probe,
    with_servers,
)
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    LogChunk,
    LogState,
    NvmlObservation,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import (
    COLLECTORS,
    CollectorName,
    CollectorResult,
    Incident,
    LedgerView,
    Snapshot,
)
from mps_exporter.sources.host import Host, SourceError, SourceTimeoutError

TAIL_INTERVAL_SECONDS = 0.2
"""How often the logs are looked at: two fstat calls for each daemon."""

GPU_TICK_SECONDS = 1.0
"""How often the GPUs' activity is sampled between collections: an integral in steps of this size is
right within 2 %."""

PROBE_CACHE_FACTOR = 5.0
"""So many times --mps.min-query-interval a daemon's answer is good while its logs show no change.

The tool writes 0.4 kB into control.log each time: 2.3 MB a day at a scrape every 15 s."""

GONE_AFTER_QUIT_SECONDS = 120.0
"""A daemon that was found, not configured, and quit in order, is shown as absent this long."""

GONE_AFTER_DEATH_SECONDS = 24 * 3600.0
"""The same for one that died."""

MAX_GONE_DAEMONS = 32
"""So many daemons that are gone are remembered."""

MIN_DEADLINE_SECONDS = 2.0
"""A collection has so long, whatever the scraper says that starts it: others may join."""

MIN_POLL_SECONDS = 1.0
"""With less time left, the logs are not read: a read that is late helps nobody."""

STALE_ANSWER_FACTOR = 3.0
STALE_ANSWER_SECONDS = 15.0
"""So many times --mps.min-query-interval, but at least so long, a server's answer is shown where
the logs cannot be read: a server that is stopped is not asked, and may have changed since."""

WATCH_SECONDS = 1.0
"""So long the logs wait for a look at processes of which one ended; then it is tried again."""

NO_DAEMON_SECONDS = 5.0
"""How often /proc is searched for a first daemon between collections."""

GPU_SHARE_OF_DEADLINE = 0.7
"""What is left after the GPUs' deadline is for identifying the processes that they listed."""

SELF_LOGGING_COLLECTORS = ("nvml", "control")
"""Sources that log their own failures and recoveries, in more detail than is known here."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DaemonRecord:
    """All that the collector keeps of one daemon between collections."""

    facts: DaemonFacts
    tracker: DaemonTracker
    in_job: bool = False
    """Its process was part of a Slurm job, or of a pod."""
    gone_since: float | None = None
    last_probe: ControlObservation | None = None
    answered_by: tuple[int, float] | None = None
    """The process that gave the last answer."""
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    was_readable: bool = False
    hung_at: float | None = None
    """When its last question was given up; None: that was answered."""
    logs: dict[str, LogState] = field(default_factory=dict)
    published_incidents: int = 0

    @property
    def ledger(self) -> Ledger:
        """What its logs say."""
        return self.tracker.ledger

    @property
    def ephemeral(self) -> bool:
        """It belongs to a job or a pod, and ends with it: nobody starts it again by this name."""
        if self.facts.configured:
            return False
        return self.in_job or self.facts.pipe_directory.startswith("/proc/")

    def watched(self) -> list[int]:
        """PIDs, as the host numbers them, whose end must be seen when it happens."""
        process = self.facts.process
        if process is None:
            return []
        # A daemon in a PID namespace of its own numbers its servers and clients otherwise.
        own_numbers = len(process.namespace_pids) > 1
        return [process.pid] if own_numbers else [process.pid, *self.ledger.watched()]

    def clear_answers(self) -> None:
        """There is another process now, or none: what the last one said means nothing."""
        self.answers = ServerAnswers()
        self.last_probe = None
        self.hung_at = None

    def note(self, reply: ControlObservation) -> None:
        """Note whether a question was answered, if it was put."""
        if reply.outcome is not Outcome.SKIPPED:
            took = sum(exchange.duration_seconds for exchange in reply.exchanges)
            self.hung_at = reply.at + took if reply.outcome is Outcome.TIMEOUT else None


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

    def remaining_seconds(self) -> float:
        """Seconds until the deadline."""
        return max(0.01, self.started + self.deadline_seconds - time.monotonic())


class Collector:
    """Turns a host into snapshots."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        on_observation: Callable[[Observation], None] | None = None,
        on_incident: Callable[[str, Incident], None] | None = None,
    ) -> None:
        self._host = host
        self._settings = settings
        self._listeners = [on_observation] if on_observation is not None else []
        self._on_incident = on_incident
        self._daemons: dict[str, DaemonRecord] = {}
        self._collections: dict[frozenset[str], CollectionRun] = {}
        self._transitions = TransitionLogger(_log)
        self._tail_lock = asyncio.Lock()
        self._stranded_since: dict[int, float] = {}
        self._unknown_readings = 0
        self._identified: frozenset[int] = frozenset()
        """The processes that the last collection asked for."""

    @property
    def enabled(self) -> tuple[str, ...]:
        """The collectors that are switched on."""
        return self._settings.enabled_collectors()

    # ------------------------------------------------------------------ collections

    async def collect(
        self, deadline_seconds: float | None = None, collectors: Collection[str] | None = None
    ) -> Snapshot:
        """A snapshot of the host, as complete as the deadline allows.

        Joins the collection that is under way for the same collectors, if there is one.
        """
        deadline = deadline_seconds or self._settings.collector_timeout
        chosen = frozenset(self.enabled if collectors is None else collectors)
        run = self._collections.get(chosen)
        if run is None:
            run = CollectionRun(time.monotonic(), max(deadline, MIN_DEADLINE_SECONDS), chosen)
            self._collections[chosen] = run
            run.task = asyncio.create_task(self._collect(run), name="collection")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.done.wait(), deadline)
        if run.task is not None and run.task.done() and not run.task.cancelled():
            error = run.task.exception()
            if error is not None:
                raise error
        return self._snapshot(run)

    async def _collect(self, run: CollectionRun) -> None:
        try:
            gpus = self._run_source(run, "nvml", self._read_gpus(run))
            mps = self._read_mps(run)
            await asyncio.gather(gpus, mps)
            await self._identify(run)
        finally:
            self._collections.pop(run.collectors, None)
            run.done.set()

    async def _run_source(
        self, run: CollectionRun, name: CollectorName, work: Awaitable[None]
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
        duration = time.monotonic() - started
        earlier = run.results.get(name)
        if earlier is not None:
            duration += earlier.duration_seconds
            error = earlier.error or error
            timed_out = timed_out or earlier.timed_out
        run.results[name] = CollectorResult(
            name=name,
            success=error is None,
            duration_seconds=duration,
            timed_out=timed_out,
            error=error,
        )
        if name in SELF_LOGGING_COLLECTORS:
            return
        if error is None:
            self._transitions.recovered(name, message="collector works again", collector=name)
        else:
            self._transitions.failed(name, message="collector failed", collector=name, err=error)

    async def _read_gpus(self, run: CollectionRun) -> None:
        observation = await self._host.read_gpus(run.remaining_seconds() * GPU_SHARE_OF_DEADLINE)
        run.gpus = observation
        self._on_observation(observation)
        self._count_unknown_readings(observation)
        if observation.outcome is not Outcome.OK:
            raise SourceError(observation.error or "NVML could not be read")

    def _count_unknown_readings(self, observation: NvmlObservation) -> None:
        for gpu in observation.gpus:
            for reading in gpu.readings:
                if series_of(reading) is None:
                    self._unknown_readings += 1
                    self._transitions.failed(
                        "reading",
                        reading.quantity,
                        message="a GPU reading is left out: no metric shows it",
                        quantity=reading.quantity,
                        labels=",".join(f"{name}={value}" for name, value in reading.labels),
                    )

    async def _read_mps(self, run: CollectionRun) -> None:
        await self._run_source(run, "process", self._discover(run))
        if "process" not in run.collectors:
            await self._discover_configured(run)
        await self._run_source(run, "logs", self._read_logs(run))
        await self._run_source(run, "control", self._query_daemons(run))

    async def _discover_configured(self, run: CollectionRun) -> None:
        with contextlib.suppress(SourceTimeoutError, SourceError):
            self._update_daemons(await self._host.discover(run.remaining_seconds()))

    async def _discover(self, run: CollectionRun) -> None:
        self._update_daemons(await self._host.discover(run.remaining_seconds()))

    async def _identify(self, run: CollectionRun) -> None:
        await self._run_source(run, "process", self._read_processes(run))

    async def _read_processes(self, run: CollectionRun) -> None:
        # What the logs name, the ledger tells without a view of all that it knows.
        inputs = [
            self._inputs(run, record, LedgerView(at=self._host.now()))
            for record in self._daemons.values()
        ]
        pids = pids_of_interest(run.gpus, inputs).union(
            *(record.ledger.watched_pids() for record in self._daemons.values())
        )
        self._identified = frozenset(pids)
        observation = await self._host.identify(pids, run.remaining_seconds())
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
            record.ledger.observe(observation.at, record.facts, observation.processes, requested)

    # ------------------------------------------------------------------ daemons

    def _update_daemons(self, found: tuple[DaemonFacts, ...]) -> None:
        """Keep the records of daemons up with what was found in /proc."""
        now = self._host.now()
        names = set()
        for facts in found:
            names.add(facts.pipe_directory)
            record = self._daemons.get(facts.pipe_directory)
            if record is None:
                record = DaemonRecord(facts, DaemonTracker(facts.pipe_directory))
                self._daemons[facts.pipe_directory] = record
            if _process_identity(facts) != _process_identity(record.facts):
                record.clear_answers()
            record.facts = facts
            running = facts.process is not None
            if facts.process is not None:
                place = parse_cgroup(facts.process.cgroup)
                record.in_job = bool(place.slurm_job_id or place.pod_uid)
            record.gone_since = None if running else record.gone_since or now
        for name, record in list(self._daemons.items()):
            if name in names:
                continue
            record.facts = replace(record.facts, process=None, servers=(), lock_holder_pid=None)
            record.gone_since = record.gone_since or now
            daemon_view = record.ledger.view(now, clients=False)
            quit_in_order = daemon_view.daemon_ended_at is not None and not daemon_view.daemon_died
            short_retention = quit_in_order or record.ephemeral
            max_age_seconds = (
                GONE_AFTER_QUIT_SECONDS if short_retention else GONE_AFTER_DEATH_SECONDS
            )
            if now - record.gone_since > max_age_seconds:
                del self._daemons[name]
        self._forget_oldest()
        self._set_foreign_writers()
        self._host.forget(self._daemons.keys())

    def _set_foreign_writers(self) -> None:
        """Tell the daemons that write to the same logs which lines are not theirs.

        Often only CUDA_MPS_PIPE_DIRECTORY is set for each GPU, and all log into one directory.
        """
        running = [record for record in self._daemons.values() if record.facts.process is not None]
        for record in running:
            record.tracker.foreign_pids = frozenset(
                process.namespace_pids[-1] if process.namespace_pids else process.pid
                for other in running
                if other is not record and other.facts.log_path == record.facts.log_path
                for process in _processes(other.facts)
            )

    def _forget_oldest(self) -> None:
        """Of the daemons that are gone, keep the last ones."""
        gone = {
            name: record.gone_since
            for name, record in self._daemons.items()
            if record.gone_since is not None and not record.facts.configured
        }
        for name in sorted(gone, key=gone.__getitem__)[: max(0, len(gone) - MAX_GONE_DAEMONS)]:
            del self._daemons[name]

    async def poll_logs(self, deadline_seconds: float = 5.0) -> bool:
        """Read what the logs gained and fold it into the ledgers; gives whether more is waiting."""
        if "logs" not in self.enabled:
            return False
        async with self._tail_lock:
            facts = [record.facts for record in self._daemons.values()]
            observation = await self._host.poll_logs(facts, deadline_seconds)
            self._on_observation(observation)
            if any(_daemon_starts(chunk) for chunk in observation.chunks):
                # Whose line it is: of the daemon that was there, or of one beside it?
                with contextlib.suppress(SourceError, SourceTimeoutError):
                    self._update_daemons(await self._host.discover(deadline_seconds))
            for state in observation.states:
                record = self._daemons.get(state.pipe_directory)
                if record is not None:
                    record.logs[state.log] = state
                    record.was_readable |= state.log == "control" and state.readable
            for record in self._daemons.values():
                record.tracker.add_logs(observation)
        self._publish()
        return any(chunk.complete_until is None for chunk in observation.chunks)

    async def watch_processes(self, deadline_seconds: float = WATCH_SECONDS) -> None:
        """Take in which daemons, servers and queued clients ended, and when."""
        if "process" not in self.enabled:
            return
        watched = [pid for record in self._daemons.values() for pid in record.watched()]
        for observation in await self._host.ended(watched, self._identified, deadline_seconds):
            self._update_daemons(observation.daemons)
            # Of a daemon that is new here the logs are read first: they tell what was before.
            known = [record for record in self._daemons.values() if record.logs]
            self._take_processes(observation, known)

    async def _read_logs(self, run: CollectionRun) -> None:
        """Read the logs to their ends, or as far as half of the time that is left goes."""
        stop_at = time.monotonic() + run.remaining_seconds() / 2
        while await self.poll_logs(run.remaining_seconds()) and time.monotonic() < stop_at:
            pass

    async def _query_daemons(self, run: CollectionRun) -> None:
        """Ask every daemon; one that fails or hangs does not keep the others from answering."""
        records = list(self._daemons.values())
        outcomes = await asyncio.gather(
            *(self._query_daemon(run, record) for record in records), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, SourceError | SourceTimeoutError):
                raise error
        if errors:
            text = "; ".join(sorted({str(error) for error in errors}))
            late = any(isinstance(error, SourceTimeoutError) for error in errors)
            raise SourceTimeoutError(text) if late else SourceError(text)

    async def _query_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        """Probe one daemon and, when it is due, its servers."""
        run.queried.add(record.facts.pipe_directory)
        if _known_absent(record.facts):
            record.clear_answers()
            return
        probe = self._cached_probe(record)
        if probe is None:
            record.answered_by = _process_identity(
                record.facts
            )  # there may be another when it has answered
            since = record.tracker.silent_since or 0.0
            probe = await self._host.probe(record.facts, run.remaining_seconds(), since)
            self._on_observation(probe)
        run.probes[record.facts.pipe_directory] = record.last_probe = probe
        record.answers = with_probe(record.answers, probe)
        record.note(probe)
        if _confirmed_absent(probe, record.facts):
            record.ledger.mark_absent(probe.at)
        # Nobody there, where nobody is expected, is a state and no failure of ours.
        if probe.outcome is not Outcome.ABSENT or record.facts.process is not None:
            _raise_for_outcome(probe)
        if probe.outcome is Outcome.OK:
            await self._reconcile(run, record)

    def _cached_probe(self, record: DaemonRecord) -> ControlObservation | None:
        """The last answer, where the logs say that nothing has happened since."""
        probe, reply = record.last_probe, record.answers.probe
        max_age_seconds = PROBE_CACHE_FACTOR * self._settings.mps_min_query_interval
        # Younger than nothing: the clock was set back.
        if probe is None or reply is None or not 0 <= self._host.now() - probe.at < max_age_seconds:
            return None
        silent_since = record.tracker.silent_since
        if silent_since is not None and probe.at < silent_since:
            return None
        view = record.ledger.view(probe.at, clients=False)
        unchanged = (
            probe.outcome is Outcome.OK
            and _log_readable(record, "control")
            and _log_readable(record, "server")
            and record.answered_by == _process_identity(record.facts)
            and all(can_answer(process.pid, (process,)) for process in _processes(record.facts))
            and view.quit_requested_at is None
            and (view.configured_at or 0.0) < probe.at
            and {server.pid for server in view.servers} == set(reply.server_pids)
        )
        return probe if unchanged else None

    async def _reconcile(self, run: CollectionRun, record: DaemonRecord) -> None:
        now = self._host.now()
        view = record.ledger.view(now, clients=False)
        servers = servers_due(
            now=now,
            interval_seconds=self._settings.mps_reconcile_interval,
            blind_interval_seconds=self._settings.mps_min_query_interval,
            answers=record.answers,
            facts=record.facts,
            view=view,
            logs_readable=_log_readable(record, "control") and _log_readable(record, "server"),
        )
        if not servers:
            return
        reply = await self._host.reconcile(record.facts, servers, run.remaining_seconds())
        self._on_observation(reply)
        record.answers = with_servers(record.answers, reply, servers, view)
        listed = record.answers.probe.server_pids if record.answers.probe is not None else None
        record.tracker.reconcile(self._host.now(), reply.at, listed, server_replies(reply))
        if run.remaining_seconds() >= MIN_POLL_SECONDS:
            with contextlib.suppress(SourceError, SourceTimeoutError):  # "logs" says so
                await self.poll_logs(run.remaining_seconds())
        record.note(reply)
        if reply.outcome is Outcome.TIMEOUT:
            # What it answered a moment ago stands no longer.
            run.probes[record.facts.pipe_directory] = reply
            record.last_probe = None
        _raise_for_outcome(reply)

    # ------------------------------------------------------------------ results

    def _snapshot(self, run: CollectionRun) -> Snapshot:
        """What has come in so far; a source that is not done is marked as late."""
        now = self._host.now()
        collectors = []
        for name in COLLECTORS:
            if name not in run.collectors:
                continue
            elapsed = time.monotonic() - run.started
            late = CollectorResult(
                name, success=False, duration_seconds=elapsed, timed_out=True,
                error="no answer before the deadline",
            )  # fmt: skip
            collectors.append(run.results.get(name, late))
        snapshot = merge(
            taken_at=now,
            gpus=run.gpus,
            processes=run.processes,
            daemons=[
                self._inputs(run, record, record.ledger.view(now))
                for record in self._daemons.values()
            ],
            collectors=tuple(collectors),
            clients_max=self._settings.collector_clients_max,
            stranded_since=self._stranded_since,
        )
        if run.gpus is not None:
            self._stranded_since = {
                pid: self._stranded_since.get(pid, run.gpus.at)
                for gpu in snapshot.gpus
                for pid in gpu.stranded_pids or ()
            }
        return replace(snapshot, unknown_readings=self._unknown_readings)

    def _inputs(self, run: CollectionRun, record: DaemonRecord, view: LedgerView) -> DaemonInputs:
        queries, failures = self._host.query_counts(record.facts.pipe_directory)
        name = record.facts.pipe_directory
        answers = record.answers if name in run.queried else ServerAnswers()
        if not (_log_readable(record, "control") and _log_readable(record, "server")):
            # No log says whether it is still so.
            interval = self._settings.mps_min_query_interval
            max_age_seconds = max(STALE_ANSWER_SECONDS, STALE_ANSWER_FACTOR * interval)
            answers = answers.younger_than(max_age_seconds, view.at)
        hung_at, served_at = record.hung_at, view.daemon_served_at
        return DaemonInputs(
            facts=record.facts,
            probe=run.probes.get(name),
            answers=answers,
            view=view,
            logs=tuple(record.logs[name] for name in sorted(record.logs)),
            was_readable=record.was_readable,
            # What the log shows of it since is newer than the question that it did not answer.
            hung=hung_at is not None and not (served_at and hung_at < served_at <= view.at),
            queries=queries,
            query_failures=failures,
        )

    # ------------------------------------------------------------------ between collections

    async def follow(self) -> None:
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
            new_incidents, record.published_incidents = record.ledger.incidents_since(
                record.published_incidents
            )
            if self._on_incident is not None:
                for incident in new_incidents:
                    self._on_incident(name, incident)

    # ------------------------------------------------------------------ listeners

    def add_listener(self, listener: Callable[[Observation], None]) -> None:
        """Show this function every observation from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[Observation], None]) -> None:
        """No longer show it any."""
        self._listeners.remove(listener)

    def _on_observation(self, observation: Observation) -> None:
        for listener in self._listeners:
            listener(observation)


def _raise_for_outcome(observation: ControlObservation) -> None:
    """Raise what kept the control tool from answering."""
    if observation.outcome is Outcome.OK:
        return
    text = observation.error or f"{observation.pipe_directory}: {observation.outcome}"
    late = observation.outcome is Outcome.TIMEOUT
    raise SourceTimeoutError(text) if late else SourceError(text)


def _process_identity(facts: DaemonFacts) -> tuple[int, float] | None:
    process = facts.process
    return None if process is None else (process.pid, process.start_time_seconds)


def _processes(facts: DaemonFacts) -> tuple[ProcessFacts, ...]:
    return facts.servers if facts.process is None else (facts.process, *facts.servers)


def _daemon_starts(chunk: LogChunk) -> bool:
    return not chunk.history and DAEMON_STARTING_LINE.search(chunk.data) is not None


def _confirmed_absent(probe: ControlObservation, facts: DaemonFacts) -> bool:
    """No process is seen, and the tool, which ran, found nobody."""
    ran = any(exchange.return_code is not None for exchange in probe.exchanges)
    return facts.process is None and probe.outcome is Outcome.ABSENT and ran


def _known_absent(facts: DaemonFacts) -> bool:
    """No process and nobody holds the lock: the tool need not be run to know."""
    return facts.process is None and facts.lock_tested and facts.lock_holder_pid is None


def _log_readable(record: DaemonRecord, log: str) -> bool:
    state = record.logs.get(log)
    return state is not None and state.readable

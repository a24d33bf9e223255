"""One collection: all sources in parallel, each with its deadline, merged into a Snapshot.

Scrapes that overlap share a collection. A source that is late costs its own metrics and nothing
else. Between collections only the logs are followed (and the GPUs' event counters kept up).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace

from exporter.logfmt import Complaints
from exporter.merge import DaemonInputs, merge, pids_of_interest
from exporter.model import (
    COLLECTORS,
    CollectorName,
    CollectorResult,
    Incident,
    LedgerView,
    Snapshot,
)
from exporter.mps.fold import Fold
from exporter.mps.ledger import Ledger
from exporter.mps.reconciliation import (
    ServerAnswers,
    able,
    due,
    server_replies,
    with_probe,
    with_servers,
)
from exporter.observations import (
    ControlObservation,
    DaemonFacts,
    LogState,
    NvmlObservation,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from exporter.settings import Settings
from exporter.sources.host import Host, SourceError, SourceTimeoutError

TAIL_INTERVAL_SECONDS = 0.2
"""How often the logs are looked at: two fstat calls for each daemon."""

GPU_TICK_SECONDS = 1.0
"""How often the GPUs' activity is sampled between collections: an integral in steps of this size is
right within 2 %."""

PATIENCE_WITH_LOGS = 5.0
"""So many times --mps.min-query-interval a daemon's answer is good while its logs show no change.

The tool writes 0.4 kB into control.log each time: 2.3 MB a day at a scrape every 15 s."""

GONE_AFTER_QUIT_SECONDS = 120.0
"""A daemon that was found, not configured, and quit in order, is shown as absent this long."""

GONE_AFTER_DEATH_SECONDS = 24 * 3600.0
"""The same for one that died."""

GPU_SHARE_OF_DEADLINE = 0.7
"""What is left after the GPUs' deadline is for identifying the processes that they listed."""

SPEAK_FOR_THEMSELVES = ("nvml", "control")
"""Sources that log their own failures and recoveries, in more detail than is known here."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DaemonRecord:
    """All that the collector keeps of one daemon between collections."""

    facts: DaemonFacts
    fold: Fold
    seen_running: bool = False
    gone_since: float | None = None
    probe: ControlObservation | None = None
    last_probe: ControlObservation | None = None
    asked: tuple[int, float] | None = None
    """The process that gave the last answer."""
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    was_readable: bool = False
    hung: bool = False
    """Its last question was not answered in time."""
    logs: dict[str, LogState] = field(default_factory=dict)
    published_incidents: int = 0

    @property
    def ledger(self) -> Ledger:
        """What its logs say."""
        return self.fold.ledger


@dataclass(slots=True)
class Run:
    """A collection under way: what has come in so far."""

    started: float
    deadline_seconds: float
    collectors: frozenset[str]
    results: dict[CollectorName, CollectorResult] = field(default_factory=dict)
    gpus: NvmlObservation | None = None
    processes: ProcfsObservation | None = None
    asked: set[str] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def left(self) -> float:
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
        self._runs: dict[frozenset[str], Run] = {}
        self._complaints = Complaints(_log)
        self._tail_lock = asyncio.Lock()
        self.collections = 0
        self._stranded_since: dict[int, float] = {}

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
        run = self._runs.get(chosen)
        if run is None:
            run = Run(time.monotonic(), deadline, chosen)
            self._runs[chosen] = run
            run.task = asyncio.create_task(self._run(run), name="collection")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.done.wait(), deadline)
        if run.task is not None and run.task.done() and not run.task.cancelled():
            error = run.task.exception()
            if error is not None:
                raise error
        return self._snapshot(run)

    async def _run(self, run: Run) -> None:
        try:
            self.collections += 1
            gpus = self._timed(run, "nvml", self._gpus(run))
            mps = self._mps(run)
            await asyncio.gather(gpus, mps)
            await self._identify(run)
        finally:
            self._runs.pop(run.collectors, None)
            run.done.set()

    async def _timed(self, run: Run, name: CollectorName, work: Awaitable[None]) -> None:
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
        if name in SPEAK_FOR_THEMSELVES:
            return
        if error is None:
            self._complaints.fine(name, message="collector works again", collector=name)
        else:
            self._complaints.failing(name, message="collector failed", collector=name, err=error)

    async def _gpus(self, run: Run) -> None:
        observation = await self._host.read_gpus(run.left() * GPU_SHARE_OF_DEADLINE)
        run.gpus = observation
        self._on_observation(observation)
        if observation.outcome is not Outcome.OK:
            raise SourceError(observation.error or "NVML could not be read")

    async def _mps(self, run: Run) -> None:
        await self._timed(run, "process", self._discover(run))
        if "process" not in run.collectors:
            await self._discover_configured(run)
        await self._timed(run, "logs", self._read_logs(run))
        await self._timed(run, "control", self._control(run))

    async def _discover_configured(self, run: Run) -> None:
        with contextlib.suppress(SourceTimeoutError, SourceError):
            self._adopt(await self._host.discover(run.left()))

    async def _discover(self, run: Run) -> None:
        self._adopt(await self._host.discover(run.left()))

    async def _identify(self, run: Run) -> None:
        await self._timed(run, "process", self._read_processes(run))

    async def _read_processes(self, run: Run) -> None:
        now = self._host.now()
        # What the logs name, the ledger tells without a view of all that it knows.
        inputs = [
            self._inputs(run, record, LedgerView(at=now)) for record in self._daemons.values()
        ]
        pids = pids_of_interest(run.gpus, inputs).union(
            *(record.ledger.pids() for record in self._daemons.values())
        )
        observation = await self._host.identify(pids, run.left())
        run.processes = observation
        self._on_observation(observation)
        asked = {*observation.processes, *observation.gone}
        for record in self._daemons.values():
            record.ledger.observe(now, record.facts, observation.processes, asked)
        if observation.error is not None:
            raise SourceError(observation.error)

    # ------------------------------------------------------------------ daemons

    def _adopt(self, found: tuple[DaemonFacts, ...]) -> None:
        """Keep the records of daemons up with what was found in /proc."""
        now = self._host.now()
        names = set()
        for facts in found:
            names.add(facts.pipe_directory)
            record = self._daemons.get(facts.pipe_directory)
            if record is None:
                record = DaemonRecord(facts, Fold(facts.pipe_directory))
                self._daemons[facts.pipe_directory] = record
            record.facts = facts
            running = facts.process is not None
            record.seen_running = record.seen_running or running
            record.gone_since = None if running else record.gone_since or now
        for name, record in list(self._daemons.items()):
            if name in names:
                continue
            record.facts = replace(record.facts, process=None, servers=(), lock_holder_pid=None)
            record.gone_since = record.gone_since or now
            life = record.ledger.view(now, clients=False)
            quit_in_order = life.daemon_ended_at is not None and not life.daemon_died
            patience = GONE_AFTER_QUIT_SECONDS if quit_in_order else GONE_AFTER_DEATH_SECONDS
            if now - record.gone_since > patience:
                del self._daemons[name]
        self._host.forget(self._daemons.keys())

    async def poll_logs(self, deadline_seconds: float = 5.0) -> bool:
        """Read what the logs gained and fold it into the ledgers; gives whether more is waiting."""
        if "logs" not in self.enabled:
            return False
        async with self._tail_lock:
            facts = [record.facts for record in self._daemons.values()]
            observation = await self._host.poll_logs(facts, deadline_seconds)
            self._on_observation(observation)
            for state in observation.states:
                record = self._daemons.get(state.pipe_directory)
                if record is not None:
                    record.logs[state.log] = state
                    record.was_readable |= state.log == "control" and state.readable
            for record in self._daemons.values():
                record.fold.take(observation)
        self._publish()
        return any(chunk.complete_until is None for chunk in observation.chunks)

    async def _read_logs(self, run: Run) -> None:
        """Read the logs to their ends, or as far as half of the time that is left goes."""
        enough = time.monotonic() + run.left() / 2
        while await self.poll_logs(run.left()) and time.monotonic() < enough:
            pass

    async def _control(self, run: Run) -> None:
        """Ask every daemon; one that fails or hangs does not keep the others from answering."""
        records = list(self._daemons.values())
        outcomes = await asyncio.gather(
            *(self._ask(run, record) for record in records), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, SourceError | SourceTimeoutError):
                raise error
        if errors:
            text = "; ".join(sorted({str(error) for error in errors}))
            late = any(isinstance(error, SourceTimeoutError) for error in errors)
            raise SourceTimeoutError(text) if late else SourceError(text)

    async def _ask(self, run: Run, record: DaemonRecord) -> None:
        """Probe one daemon and, when it is due, its servers."""
        run.asked.add(record.facts.pipe_directory)
        record.probe = None
        if _surely_absent(record.facts):
            record.answers = ServerAnswers()
            record.hung = False
            return
        probe = self._answer_still_good(record)
        if probe is None:
            probe = await self._host.probe(record.facts, run.left())
            record.asked = _process(record.facts)
            self._on_observation(probe)
        record.probe = record.last_probe = probe
        record.answers = with_probe(record.answers, probe)
        if probe.outcome is not Outcome.SKIPPED:
            record.hung = probe.outcome is Outcome.TIMEOUT
        # Nobody there, where nobody is expected, is a state and no failure of ours.
        if probe.outcome is not Outcome.ABSENT or record.facts.process is not None:
            _demand(probe)
        if probe.outcome is Outcome.OK:
            await self._reconcile(run, record)

    def _answer_still_good(self, record: DaemonRecord) -> ControlObservation | None:
        """The last answer, where the logs say that nothing has happened since."""
        probe, said = record.last_probe, record.answers.probe
        patience = PATIENCE_WITH_LOGS * self._settings.mps_min_query_interval
        if probe is None or said is None or self._host.now() - probe.at >= patience:
            return None
        view = record.ledger.view(probe.at, clients=False)
        unchanged = (
            probe.outcome is Outcome.OK
            and _follows(record, "control")
            and _follows(record, "server")
            and record.asked == _process(record.facts)
            and all(able(process.pid, (process,)) for process in _processes(record.facts))
            and view.quit_requested_at is None
            and {server.pid for server in view.servers} == set(said.server_pids)
        )
        return probe if unchanged else None

    async def _reconcile(self, run: Run, record: DaemonRecord) -> None:
        now = self._host.now()
        servers = due(
            now=now,
            interval_seconds=self._settings.mps_reconcile_interval,
            blind_interval_seconds=self._settings.mps_min_query_interval,
            answers=record.answers,
            facts=record.facts,
            view=record.ledger.view(now, clients=False),
            logs_readable=_follows(record, "control") and _follows(record, "server"),
        )
        if not servers:
            return
        said = await self._host.reconcile(record.facts, servers, run.left())
        self._on_observation(said)
        record.answers = with_servers(record.answers, said)
        listed = record.answers.probe.server_pids if record.answers.probe is not None else None
        record.fold.reconcile(self._host.now(), said.at, listed, server_replies(said))
        with contextlib.suppress(SourceError, SourceTimeoutError):  # the collector "logs" says so
            await self.poll_logs(run.left())
        record.hung = said.outcome is Outcome.TIMEOUT
        _demand(said)

    # ------------------------------------------------------------------ results

    def _snapshot(self, run: Run) -> Snapshot:
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
        read_at = run.gpus.at if run.gpus is not None else now
        self._stranded_since = {
            pid: self._stranded_since.get(pid, read_at)
            for gpu in snapshot.gpus
            for pid in gpu.stranded_pids or ()
        }
        return snapshot

    def _inputs(self, run: Run, record: DaemonRecord, view: LedgerView) -> DaemonInputs:
        queries, failures = self._host.query_counts(record.facts.pipe_directory)
        asked = record.facts.pipe_directory in run.asked
        return DaemonInputs(
            facts=record.facts,
            probe=record.probe if asked else None,
            answers=record.answers if asked else ServerAnswers(),
            view=view,
            logs=tuple(record.logs[name] for name in sorted(record.logs)),
            was_readable=record.was_readable,
            hung=record.hung,
            queries=queries,
            query_failures=failures,
        )

    # ------------------------------------------------------------------ between collections

    async def follow(self) -> None:
        """Follow the logs until cancelled; finds daemons first, so that nothing is missed."""
        tick_at = 0.0
        while True:
            try:
                if not self._daemons:
                    self._adopt(await self._host.discover(5.0))
                while await self.poll_logs():
                    pass
            except (SourceTimeoutError, SourceError, OSError) as error:
                self._complaints.failing("tail", message="cannot follow the logs", err=error)
            else:
                self._complaints.fine("tail", message="the logs are followed again")
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + GPU_TICK_SECONDS
                with contextlib.suppress(SourceTimeoutError):  # a collection says so better
                    await self._host.tick_gpus()
            await asyncio.sleep(TAIL_INTERVAL_SECONDS)

    def _publish(self) -> None:
        for name, record in self._daemons.items():
            news, record.published_incidents = record.ledger.incidents_since(
                record.published_incidents
            )
            if self._on_incident is not None:
                for incident in news:
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


def _demand(observation: ControlObservation) -> None:
    """Raise what kept the control tool from answering."""
    if observation.outcome is Outcome.OK:
        return
    text = observation.error or f"{observation.pipe_directory}: {observation.outcome}"
    late = observation.outcome is Outcome.TIMEOUT
    raise SourceTimeoutError(text) if late else SourceError(text)


def _process(facts: DaemonFacts) -> tuple[int, float] | None:
    process = facts.process
    return None if process is None else (process.pid, process.start_time_seconds)


def _processes(facts: DaemonFacts) -> tuple[ProcessFacts, ...]:
    return facts.servers if facts.process is None else (facts.process, *facts.servers)


def _surely_absent(facts: DaemonFacts) -> bool:
    """No process and nobody holds the lock: the tool need not be run to know."""
    return facts.process is None and facts.lock_tested and facts.lock_holder_pid is None


def _follows(record: DaemonRecord, log: str) -> bool:
    state = record.logs.get(log)
    return state is not None and state.readable

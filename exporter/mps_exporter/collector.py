"""Collections: all sources in parallel, each with its deadline, merged into a Snapshot.

Scrapes that overlap share a collection. A late source affects only its own metrics. Between
collections only logs and exits are followed, and NVML and the kernel log are read.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Self

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.daemon_registry import DaemonRecord, DaemonRegistry
from mps_exporter.flags import Settings
from mps_exporter.logging import TransitionLogger
from mps_exporter.merge import DaemonInputs, merge, pids_of_interest
from mps_exporter.mps.log_parser import DAEMON_STARTING_LINE
from mps_exporter.mps.server_queries import ServerAnswers, servers_due, with_probe, with_servers
from mps_exporter.mps.tool_commands import server_replies
from mps_exporter.mps.xid_lines import KernelFault, parse_fault, pci_address
from mps_exporter.observations import (
    AddressRanges,
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogChunk,
    NvmlObservation,
    Observation,
    Outcome,
    ProcfsObservation,
)
from mps_exporter.sm_use import SmUseCounter
from mps_exporter.snapshot import COLLECTORS, CollectorName, CollectorResult, Incident, Snapshot
from mps_exporter.sources import Host, SourceError, SourceTimeoutError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectionRun:
    """A collection in progress."""

    started: float
    deadline_seconds: float
    collectors: frozenset[str]
    transitions: TransitionLogger
    task: asyncio.Task[Snapshot] = field(init=False)
    results: dict[CollectorName, CollectorResult] = field(default_factory=dict)
    gpus: NvmlObservation | None = None
    processes: ProcfsObservation | None = None
    probes: dict[str, ControlObservation | None] = field(default_factory=dict)
    """Pipe directory -> its daemon's reply in this collection; None without a reply so far."""
    reconciled: bool = False  # Servers were queried: their replies wait for the logs.

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.started

    def remaining_seconds(self, ratio: float = 1.0) -> float:
        """Return the time left of a part of the deadline (minimum 10 ms)."""
        return max(0.01, ratio * self.deadline_seconds - self.age_seconds)

    async def run_source(
        self, name: CollectorName, read: Callable[[Self], Awaitable[None]], *, always: bool = False
    ) -> None:
        """Read one source, or a further part of it, and record its duration and success.

        With `always`, a source that is switched off is read, too, but recorded only if it fails.
        """
        if name not in self.collectors and not always:
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
        if name not in self.collectors and error is None:
            return
        self.results[name] = CollectorResult(
            name,
            success=error is None,
            duration_seconds=before.duration_seconds + time.monotonic() - started,
            timed_out=before.timed_out or timed_out,
            error=error,
        )
        if name == "control":  # it logs its own failures and recoveries, by daemon
            return
        if error is None:
            self.transitions.recovered(name, message="collector works again", collector=name)
        else:
            # NVML's reasons are few, and each needs another remedy.
            reason = error if name == "nvml" else ""
            message = "collector failed"
            self.transitions.failed(name, message=message, reason=reason, collector=name, err=error)

    def collector_results(self) -> tuple[CollectorResult, ...]:
        """Return the results of the sources; a source in progress counts as late."""
        late = "no answer before the deadline"
        return tuple(
            self.results.get(name)
            or CollectorResult(
                name, success=False, duration_seconds=self.age_seconds, timed_out=True, error=late
            )
            for name in COLLECTORS
            if name in self.collectors or name in self.results
        )


class Collector:
    """Turns a host into snapshots."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        on_observation: Callable[[Observation], None] = lambda _observation: None,
        on_incident: Callable[[DaemonFacts, Incident], None] = lambda _daemon, _incident: None,
    ) -> None:
        self._host = host
        self._settings = settings
        self._enabled = settings.enabled_collectors()
        self.on_observation = on_observation
        self._on_incident = on_incident
        self._daemons = DaemonRegistry()
        self._users_queries: dict[str, asyncio.Task[None]] = {}
        """Queries of ordinary users' daemons that are in progress, by pipe directory."""
        self._collections: dict[frozenset[str], CollectionRun] = {}
        """The collections in progress, by their collectors."""
        self._transitions = TransitionLogger(_log)
        self._tail_lock = asyncio.Lock()
        self._stranded_since: dict[int, float] = {}
        self._sm_use = SmUseCounter()
        self._kernel: KernelObservation | None = None
        self._faults: deque[KernelFault] = deque(maxlen=policy.MAX_KEPT_EVIDENCE)
        self._ranges: deque[AddressRanges] = deque(maxlen=policy.MAX_KEPT_EVIDENCE)
        self._gpu_addresses: dict[str, str] = {}  # PCI address -> UUID, of all readings.
        self._identified: frozenset[int] = frozenset()  # Processes of the last collection.

    # ------------------------------------------------------------------ collections

    async def collect(
        self, deadline_seconds: float | None = None, collectors: Collection[str] | None = None
    ) -> Snapshot:
        """Return a snapshot of the host, as complete as the deadline allows.

        Join the collection that is in flight for the same collectors. A collection older than
        --collector.timeout is not joined: its data is old.
        """
        least = self._settings.collector_timeout
        deadline = deadline_seconds or least
        chosen = frozenset(self._enabled if collectors is None else collectors)
        run = self._collections.get(chosen)
        if run is None or run.age_seconds >= least:
            # The short deadline of one scraper must not apply to others that join.
            run = CollectionRun(time.monotonic(), max(deadline, least), chosen, self._transitions)
            run.task = asyncio.create_task(self._collect(run), name="collection")
            self._collections[chosen] = run
        done, _ = await asyncio.wait((run.task,), timeout=deadline)
        return run.task.result() if done else self._snapshot(run)

    async def _collect(self, run: CollectionRun) -> Snapshot:
        try:
            # In parallel, although the threads wait for the interpreter: one after the other takes
            # longer (docs/performance.md).
            await asyncio.gather(run.run_source("nvml", self._read_gpus), self._read_mps(run))
            await run.run_source("process", self._identify)
            self._publish()
            return self._snapshot(run)
        finally:
            if self._collections.get(run.collectors) is run:
                del self._collections[run.collectors]

    async def _read_gpus(self, run: CollectionRun) -> None:
        left = run.remaining_seconds(policy.GPU_DEADLINE_RATIO)
        observation = await self._host.read_gpus(left)
        run.gpus = observation
        self.on_observation(observation)
        self._gpu_addresses |= {
            pci_address(gpu.pci_bus_id): gpu.uuid for gpu in observation.gpus if gpu.pci_bus_id
        }
        if observation.outcome is not Outcome.OK:
            raise SourceError(observation.error or "NVML could not be read")

    async def _read_mps(self, run: CollectionRun) -> None:
        # Without "process", configured daemons are still found, and only failures are shown.
        await run.run_source("process", self._discover, always=True)
        await run.run_source("logs", self._read_logs)
        await run.run_source("control", self._query)
        if run.reconciled:
            with contextlib.suppress(SourceError, SourceTimeoutError):  # "logs" reports it
                await self.poll_logs(run.remaining_seconds())

    async def _discover(self, run: CollectionRun) -> None:
        self._update_daemons(await self._host.discover(run.remaining_seconds()))

    async def _identify(self, run: CollectionRun) -> None:
        inputs = [self._inputs(run, record) for record in self._daemons.values()]
        pids = pids_of_interest(run.gpus, inputs).union(self._daemons.pids_to_look_up())
        self._identified = frozenset(pids)
        observation = await self._host.identify(pids, run.remaining_seconds())
        run.processes = observation
        self._apply_processes(observation, self._daemons.values())
        if observation.error is not None:
            raise SourceError(observation.error)

    def _apply_processes(
        self, observation: ProcfsObservation, records: Iterable[DaemonRecord]
    ) -> None:
        self.on_observation(observation)
        requested = {*observation.processes, *observation.gone}
        for record in records:
            record.tracker.observe(observation.at, record.facts, observation.processes, requested)

    # ------------------------------------------------------------------ daemons

    def is_limited(self, daemon: str) -> bool:
        """Return whether a daemon is known and limited."""
        record = self._daemons.get(daemon)
        return record is not None and record.facts.limited

    def _update_daemons(self, found: tuple[DaemonFacts, ...]) -> None:
        self._daemons.refresh(found, self._host.now())
        self._host.control.forget(self._daemons.keys())

    async def poll_logs(
        self, deadline_seconds: float = policy.DAEMON_SEARCH_TIMEOUT_SECONDS
    ) -> bool:
        """Read the new data of the logs, and apply it to the state of the daemons.

        Return whether a log has more data to be read immediately. Logs of ordinary users' daemons
        wait for the next poll.
        """
        if "logs" not in self._enabled:
            return False
        async with self._tail_lock:
            limited = {name for name, one in self._daemons.items() if one.facts.limited}
            self._read_kernel(self._clients_to_map())
            facts = [record.facts for record in self._daemons.values()]
            observation = await self._host.poll_logs(facts, deadline_seconds)
            self.on_observation(observation)
            roots = [one for one in observation.chunks if one.pipe_directory not in limited]
            if _daemon_starts(roots):
                # The line may be of a new daemon that shares the logs.
                with contextlib.suppress(SourceError, SourceTimeoutError):
                    self._update_daemons(await self._host.discover(deadline_seconds))
            for state in observation.states:
                record = self._daemons.get(state.pipe_directory)
                if record is not None:
                    record.record_log(state)
            for record in self._daemons.values():
                record.tracker.add_logs(observation)
            if new_clients := self._clients_to_map():
                self._read_kernel(new_clients)
        self._publish()
        return any(chunk.complete_until is None for chunk in roots)

    def _clients_to_map(self) -> dict[int, int | None]:
        """Return the clients whose ranges are needed, each with the user required, if any."""
        wanted: dict[int, int | None] = {}
        # An ordinary user's log may name any process: its requests come last, and replace none.
        for record in sorted(self._daemons.values(), key=lambda one: one.facts.limited):
            if record.has_host_pids:
                user = record.facts.user if record.facts.limited else None
                for pid in record.state.clients_to_map():
                    wanted.setdefault(pid, user)
        return wanted

    def _read_kernel(self, wanted: dict[int, int | None]) -> None:
        """Apply evidence for the cause of faults; request the address ranges of clients."""
        self._kernel = observation = self._host.read_kernel(wanted)
        self.on_observation(observation)
        faults = (parse_fault(line, self._gpu_addresses) for line in observation.lines)
        self._faults.extend(fault for fault in faults if fault is not None)
        self._ranges.extend(observation.ranges)
        for record in self._daemons.values():
            record.observe_kernel(observation, self._faults, self._ranges)

    async def watch_processes(
        self, deadline_seconds: float = policy.EXIT_DETAILS_TIMEOUT_SECONDS
    ) -> None:
        """Apply exits of watched processes, and facts of newly watched ones."""
        if "process" not in self._enabled:
            return
        watched = self._daemons.pids_to_watch()
        others = self._identified
        for observation in await self._host.exit_observations(watched, others, deadline_seconds):
            self._update_daemons(observation.daemons)
            # The logs of a new daemon are read first: they contain its history.
            known = [record for record in self._daemons.values() if record.logs]
            self._apply_processes(observation, known)

    async def _read_logs(self, run: CollectionRun) -> None:
        """Read the logs to their ends; begin no poll after half of the time."""
        stop_at = time.monotonic() + run.remaining_seconds() / 2
        while await self.poll_logs(run.remaining_seconds()) and time.monotonic() < stop_at:
            pass

    # ------------------------------------------------------------------ queries

    async def _query(self, run: CollectionRun) -> None:
        """Query every daemon; a daemon that fails or hangs does not affect the others.

        Ordinary users' daemons are waited for briefly; the next collection shows a late reply.
        """
        users = {name: one for name, one in self._daemons.items() if one.facts.limited}
        running = {name: task for name, task in self._users_queries.items() if not task.done()}
        started = {
            name: asyncio.create_task(self._query_users_daemon(run, record))
            for name, record in users.items()
            if name not in running
        }
        self._users_queries = running | started
        others = (one for one in self._daemons.values() if not one.facts.limited)
        outcomes = await asyncio.gather(
            *(self._query_daemon(run, one) for one in others), return_exceptions=True
        )
        if started:
            timeout = min(policy.USERS_QUERY_WAIT_SECONDS, run.remaining_seconds())
            await asyncio.wait(started.values(), timeout=timeout)
        for name, record in users.items():
            run.probes[name] = run.probes.get(name) or record.last_probe
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, SourceError | SourceTimeoutError):
                raise error
        if errors:
            text = "; ".join(sorted({str(error) for error in errors}))
            late = any(isinstance(error, SourceTimeoutError) for error in errors)
            raise SourceTimeoutError(text) if late else SourceError(text)

    async def _query_users_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        with contextlib.suppress(SourceError, SourceTimeoutError):  # the daemon's metrics show it
            await self._query_daemon(run, record)

    async def _query_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        """Probe a daemon if its reply is old; query its servers if due."""
        run.probes[record.facts.pipe_directory] = None
        if record.known_absent:
            record.clear_answers()
            return
        max_age_seconds = policy.PROBE_VALID_INTERVALS * self._settings.mps_min_query_interval
        probe = record.valid_probe(self._host.now(), max_age_seconds)
        if probe is None:
            # Another process may be the daemon when the reply arrives.
            record.answered_by = record.facts.process_identity
            since = record.tracker.silent_since or 0.0
            active_at = max(record.state.daemon.served_at or 0.0, record.resumed_at or 0.0)
            probe = await self._host.control.probe(
                record.facts, run.remaining_seconds(), since, active_at
            )
            self.on_observation(probe)
        run.probes[record.facts.pipe_directory] = record.last_probe = probe
        record.answers = with_probe(record.answers, probe)
        record.record_query(probe)
        ran = any(exchange.return_code is not None for exchange in probe.exchanges)
        if record.facts.process is None and probe.outcome is Outcome.ABSENT and ran:
            record.tracker.update_liveness(probe.at, lambda *_: None, daemon=False)
        # A daemon without a process may be absent: that is not a failure.
        if probe.outcome is not Outcome.ABSENT or record.facts.process is not None:
            _raise_for_outcome(probe)
        if probe.outcome is Outcome.OK:
            record.state.daemon.counted = True
            await self._reconcile(run, record, probe)

    async def _reconcile(
        self, run: CollectionRun, record: DaemonRecord, probe: ControlObservation
    ) -> None:
        """Query the due servers, or the clients and partitions of an MPS v3 daemon."""
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
        reply = await self._host.control.reconcile(record.facts, servers, run.remaining_seconds())
        self.on_observation(reply)
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

    # ------------------------------------------------------------------ results

    def _snapshot(self, run: CollectionRun) -> Snapshot:
        """Return the results so far; a source that is in progress is late."""
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
            snapshot = replace(snapshot, sm_use=self._sm_use.count(snapshot, run.gpus.at))
        kernel = self._kernel
        known = kernel is not None and (kernel.readable or kernel.error)
        return replace(snapshot, kernel_log=kernel if known else None)

    def _inputs(self, run: CollectionRun, record: DaemonRecord) -> DaemonInputs:
        name, now = record.facts.pipe_directory, self._host.now()
        answers = record.answers if name in run.probes else ServerAnswers()
        if not record.logs_readable:
            # No log shows that the replies are still valid.
            interval = self._settings.mps_min_query_interval
            max_age_seconds = policy.SERVER_REPLY_VALID_INTERVALS * interval
            max_age_seconds = max(policy.MIN_SERVER_REPLY_VALID_SECONDS, max_age_seconds)
            answers = answers.younger_than(max_age_seconds, now)
        queries, failures = self._host.control.counts(name)
        return DaemonInputs(
            facts=record.facts,
            last=record.last,
            probe=run.probes.get(name),
            answers=answers,
            state=record.state,
            logs=tuple(record.logs[name] for name in sorted(record.logs)),
            was_readable=record.was_readable,
            server_log_was_readable=record.server_log_was_readable,
            hung=record.last_query_timed_out(now),
            resumed=record.resumed,
            queries=queries,
            query_failures=failures,
        )

    # ------------------------------------------------------------------ between collections

    async def run_between_collections(self) -> None:
        """Follow logs and exits until cancelled; find daemons first, so that no line is missed."""
        search_at = 0.0
        while True:
            failure: Exception | None = None
            try:
                if not self._daemons and time.monotonic() >= search_at:
                    search_at = time.monotonic() + policy.DAEMON_SEARCH_INTERVAL_SECONDS
                    timeout = policy.DAEMON_SEARCH_TIMEOUT_SECONDS
                    self._update_daemons(await self._host.discover(timeout))
                while await self.poll_logs():
                    pass
                with contextlib.suppress(SourceTimeoutError, OSError):  # a collection reports it
                    await self.watch_processes()
            except Exception as error:  # noqa: BLE001 - the next poll may succeed
                failure = error
            try:  # NVML is read here, even if the logs failed
                await self._host.wait_for_next_poll()
            except Exception as error:  # noqa: BLE001 - no thread was left, for example
                failure = error
            if failure is None:
                self._transitions.recovered("tail", message="the logs are followed again")
            else:
                text = "cannot follow the logs"
                self._transitions.failed("tail", message=text, err=repr(failure))
                await asyncio.sleep(policy.LOG_POLL_INTERVAL_SECONDS)

    def _publish(self) -> None:
        for record in self._daemons.values():
            new_incidents, record.published_incidents = record.state.incidents.since(
                record.published_incidents
            )
            for incident in new_incidents:
                self._on_incident(record.facts, incident)


def _daemon_starts(chunks: Iterable[LogChunk]) -> bool:
    """Return whether a daemon started: its first line may be in two chunks of its log."""
    new = (chunk for chunk in chunks if not chunk.history)
    return any(
        DAEMON_STARTING_LINE.search(b"".join(chunk.data for chunk in log))
        for _, log in groupby(new, attrgetter("pipe_directory", "log"))
    )


def _raise_for_outcome(observation: ControlObservation) -> None:
    if observation.outcome is Outcome.OK:
        return
    text = observation.error or f"{observation.pipe_directory}: {observation.outcome}"
    late = observation.outcome is Outcome.TIMEOUT
    raise SourceTimeoutError(text) if late else SourceError(text)

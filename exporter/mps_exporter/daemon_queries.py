"""Questions to the daemons in a collection: who is asked, and what an earlier answer is worth."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from mps_exporter.collection_run import CollectionRun
from mps_exporter.config import Settings
from mps_exporter.daemon_registry import DaemonRecord
from mps_exporter.mps.server_queries import server_replies, servers_due, with_probe, with_servers
from mps_exporter.observations import ControlObservation, DaemonFacts, Observation, Outcome
from mps_exporter.sources.budget import UserTokenBuckets
from mps_exporter.sources.host import Host, SourceError, SourceTimeoutError

PROBE_CACHE_FACTOR = 5.0
"""So many times --mps.min-query-interval a daemon's answer is good while its logs show no change.

The tool writes 0.4 kB into control.log each time: 2.3 MB a day at a scrape every 15 s."""

PATIENCE_SECONDS = 0.5
PATIENCE_PER_SECOND = 0.1 / 60.0
"""So long collections wait for the daemons of an ordinary user when all others have answered: all
collections together, and so much longer each second. A user whose socket answers after 0.4 s would
otherwise make each scrape that much slower."""

MIN_SECONDS_TO_READ_LOGS = 1.0
"""With less time left, the logs are not read: a read that is late helps nobody."""


class DaemonQueries:
    """Asks daemons and their servers."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        on_observation: Callable[[Observation], None],
        poll_logs: Callable[[float], Awaitable[object]],
    ) -> None:
        self._host = host
        self._settings = settings
        self._on_observation = on_observation
        self._poll_logs = poll_logs
        self._limited: dict[str, asyncio.Task[None]] = {}
        """Questions to daemons of ordinary users that are under way, by pipe directory."""
        self._patience = UserTokenBuckets(PATIENCE_SECONDS, PATIENCE_PER_SECOND)

    async def ask(self, run: CollectionRun, records: Iterable[DaemonRecord]) -> None:
        """Ask every daemon; one that fails or hangs does not keep the others from answering.

        Those of ordinary users are waited for PATIENCE_SECONDS at most, and less after that user's
        were slow, nor is it a failure of ours when they do not answer; what they answer later is
        shown by the next collection.
        """
        all_of_them = list(records)
        limited = self._start_limited(run, [one for one in all_of_them if one.facts.limited])
        outcomes = await asyncio.gather(
            *(self._ask_daemon(run, record) for record in all_of_them if not record.facts.limited),
            return_exceptions=True,
        )
        await self._wait_for_limited(run, limited)
        for record in all_of_them:
            name = record.facts.pipe_directory
            if record.facts.limited and name not in run.probes and record.last_probe is not None:
                run.probes[name] = record.last_probe  # its last answer, until the next comes
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, SourceError | SourceTimeoutError):
                raise error
        if errors:
            text = "; ".join(sorted({str(error) for error in errors}))
            late = any(isinstance(error, SourceTimeoutError) for error in errors)
            raise SourceTimeoutError(text) if late else SourceError(text)

    def _start_limited(
        self, run: CollectionRun, records: Iterable[DaemonRecord]
    ) -> dict[asyncio.Task[None], int | None]:
        """Begin to ask these, where no earlier question is under way; that answer stands.

        Returns:
            The questions, and whose daemons are asked.
        """
        self._limited = {name: task for name, task in self._limited.items() if not task.done()}
        started = {}
        for record in records:
            name = record.facts.pipe_directory
            if name not in self._limited:
                task = asyncio.create_task(self._ask_limited(run, record))
                self._limited[name] = task
                started[task] = record.facts.user
            run.queried.add(name)
        return started

    async def _wait_for_limited(
        self, run: CollectionRun, asked: Mapping[asyncio.Task[None], int | None]
    ) -> None:
        await asyncio.gather(
            *(
                self._wait_for_user(
                    run, user, [task for task, other in asked.items() if other == user]
                )
                for user in set(asked.values())
            )
        )

    async def _wait_for_user(
        self, run: CollectionRun, user: int | None, asked: Collection[asyncio.Task[None]]
    ) -> None:
        patience = self._patience.available(user, self._host.now())
        timeout = min(patience, run.remaining_seconds())
        if timeout > 0:
            began = time.monotonic()
            await asyncio.wait(asked, timeout=timeout)
            self._patience.consume(user, time.monotonic() - began, self._host.now())

    async def _ask_limited(self, run: CollectionRun, record: DaemonRecord) -> None:
        with contextlib.suppress(SourceError, SourceTimeoutError):  # the daemon's metrics say it
            await self._ask_daemon(run, record)

    async def _ask_daemon(self, run: CollectionRun, record: DaemonRecord) -> None:
        """Probe one daemon and, when it is due, its servers."""
        run.queried.add(record.facts.pipe_directory)
        if record.known_absent:
            record.clear_answers()
            return
        probe = self._probe_still_good(record)
        if probe is None:
            # Now: there may be another process when it has answered.
            record.answered_by = record.process_identity
            since = record.tracker.silent_since or 0.0
            probe = await self._host.probe(record.facts, run.remaining_seconds(), since)
            self._on_observation(probe)
        run.probes[record.facts.pipe_directory] = record.last_probe = probe
        record.answers = with_probe(record.answers, probe)
        record.note(probe)
        if _confirmed_absent(probe, record.facts):
            record.tracker.mark_absent(probe.at)
        # Nobody there, where nobody is expected, is a state and no failure of ours.
        if probe.outcome is not Outcome.ABSENT or record.facts.process is not None:
            _raise_for_outcome(probe)
        if probe.outcome is Outcome.OK:
            await self._reconcile(run, record)

    def _probe_still_good(self, record: DaemonRecord) -> ControlObservation | None:
        """The last answer, where the logs say that nothing has happened since."""
        probe, reply = record.last_probe, record.answers.probe
        max_age_seconds = PROBE_CACHE_FACTOR * self._settings.mps_min_query_interval
        # Younger than nothing: the clock was set back.
        if probe is None or not 0 <= self._host.now() - probe.at < max_age_seconds:
            return None
        if reply is None:  # of a v3 daemon the logs do not tell which clients it has
            return probe if record.v3_answer_holds(probe) else None
        return probe if record.unchanged_since(probe, reply.server_pids) else None

    async def _reconcile(self, run: CollectionRun, record: DaemonRecord) -> None:
        now = self._host.now()
        if (probe := record.last_probe) is not None and record.answers.v3_due(probe):
            reply = await self._host.reconcile(record.facts, (), run.remaining_seconds())
            self._take_details(run, record, reply)
            return
        servers = servers_due(
            now=now,
            interval_seconds=self._settings.mps_reconcile_interval,
            blind_interval_seconds=self._settings.mps_min_query_interval,
            answers=record.answers,
            facts=record.facts,
            state=record.tracker.state,
            logs_readable=record.logs_readable,
        )
        if not servers:
            return
        logged = [server.pid for server in record.tracker.state.servers]
        reply = await self._host.reconcile(record.facts, servers, run.remaining_seconds())
        self._on_observation(reply)
        record.answers = with_servers(record.answers, reply, servers, logged)
        listed = record.answers.probe.server_pids if record.answers.probe is not None else None
        record.tracker.reconcile(self._host.now(), reply.at, listed, server_replies(reply))
        if run.remaining_seconds() >= MIN_SECONDS_TO_READ_LOGS:
            with contextlib.suppress(SourceError, SourceTimeoutError):  # "logs" says so
                await self._poll_logs(run.remaining_seconds())
        self._note_reconciliation(run, record, reply)

    def _take_details(
        self, run: CollectionRun, record: DaemonRecord, reply: ControlObservation
    ) -> None:
        """Take what a v3 daemon said of its clients and partitions."""
        self._on_observation(reply)
        record.answers = with_servers(record.answers, reply)
        self._note_reconciliation(run, record, reply)

    @staticmethod
    def _note_reconciliation(
        run: CollectionRun, record: DaemonRecord, reply: ControlObservation
    ) -> None:
        record.note(reply)
        if reply.outcome is Outcome.TIMEOUT:
            # What it answered a moment ago stands no longer.
            run.probes[record.facts.pipe_directory] = reply
            record.last_probe = None
        _raise_for_outcome(reply)


def _raise_for_outcome(observation: ControlObservation) -> None:
    """Raise what kept the control tool from answering."""
    if observation.outcome is Outcome.OK:
        return
    text = observation.error or f"{observation.pipe_directory}: {observation.outcome}"
    late = observation.outcome is Outcome.TIMEOUT
    raise SourceTimeoutError(text) if late else SourceError(text)


def _confirmed_absent(probe: ControlObservation, facts: DaemonFacts) -> bool:
    """No process is seen, and the tool, which ran, found nobody."""
    ran = any(exchange.return_code is not None for exchange in probe.exchanges)
    return facts.process is None and probe.outcome is Outcome.ABSENT and ran

"""Queries control daemons through nvidia-cuda-mps-control.

The daemon has one thread, and a query about a stuck server blocks all its users. Two queries at a
time collide: beside three busy callers, 285 of 1000 runs were refused, and 32 ended with status 0
and no output. So each daemon has one run at a time, a deadline, a second attempt after a refusal,
and a pause after a hang, which doubles. Only read commands are sent (mps.control_protocol).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from mps_exporter.logging import TransitionLogger
from mps_exporter.mps.control_protocol import (
    PROBE,
    SOCKET_PATH_BYTES,
    ProbeReply,
    ServerReply,
    control_socket_bytes,
    limit_commands,
    other_interface,
    parse_probe,
    parse_server,
    server_commands,
)
from mps_exporter.mps.protocol_v3 import DETAILS_V3, FIXED_V3, PROBE_V3, SERVERS, V2_PARTITIONS
from mps_exporter.observations import ControlObservation, DaemonFacts, Exchange, Outcome
from mps_exporter.sources.budget import UserBudget
from mps_exporter.sources.control_tool_runs import ControlToolRuns, Runner, Silence, run_process

DEFAULT_BINARY = "nvidia-cuda-mps-control"

_BUSY = "another question to it is still under way"
_TOO_MANY = "too many daemons of this user have been started lately"

LIMITED_PAUSE_SECONDS = 5.0
MAX_LIMITED_PAUSE_SECONDS = 60.0
"""Delays before another query of an ordinary user's daemon that refuses or is not there: the first
and the last. Each is twice the one before. A run of the tool costs the exporter 8 ms."""

INITIAL_BACKOFF_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 300.0

QueryKind = Literal["probe", "reconciliation"]


class CircuitBreaker:
    """Open after a hang: 10 s, then twice as long each time, up to 300 s; closed by any reply.

    The first sign of life ends the pause at once, a later one 10 s after the hang.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_seconds = 0.0
        self._hung_at = self._until = float("-inf")
        self._seen_alive = False

    def remaining_seconds(self) -> float:
        """For how long nobody may ask; 0 when one may."""
        return max(self._until - self._clock(), 0.0)

    def record_hang(self) -> float:
        """Open it; return for how long."""
        longer = self._pause_seconds * 2 or INITIAL_BACKOFF_SECONDS
        self._pause_seconds = min(longer, MAX_BACKOFF_SECONDS)
        self._hung_at = self._clock()
        self._until = self._hung_at + self._pause_seconds
        return self._pause_seconds

    def record_activity(self) -> None:
        """It was seen to work since it hung: no need to wait for the whole pause."""
        if not self._pause_seconds:
            return
        least = INITIAL_BACKOFF_SECONDS if self._seen_alive else 0.0
        self._until = min(self._until, self._hung_at + least)
        self._seen_alive = True

    def record_success(self) -> None:
        self._pause_seconds = 0.0
        self._until = float("-inf")
        self._seen_alive = False


@dataclass(slots=True)
class _QueryState:
    """What is remembered of one daemon between questions."""

    identity: tuple[object, ...]
    lock: asyncio.Lock
    """Held while it is asked."""
    breaker: CircuitBreaker
    """For all questions."""
    server_breaker: CircuitBreaker
    """For questions that a server must answer: one that hangs again and again is asked less."""
    silence: Silence = field(default_factory=Silence)
    asked: bool = False
    hung_at: float = float("-inf")
    """When it was given up last (Unix time)."""
    probe: ControlObservation | None = None
    probed_at: float = float("-inf")
    pause_seconds: float = 0.0
    """So long the last probe stands at least: it failed, and the daemon is an ordinary user's."""
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Server -> ordinals of its devices, once it told which device is which."""
    interface: str | None = None
    """The one in which it answered last; None: it has not answered yet."""
    fixed: tuple[str, tuple[Exchange, ...]] = ("", ())
    """What changes with a v3 daemon's servers only, and the list of servers it was for."""


class ControlTool:
    """The control tool, for any number of daemons.

    Args:
        binary: The tool, by name on PATH or by path.
        timeout_seconds: Deadline for one run.
        min_interval_seconds: Within it a probe gives the last observation again (the same object).
        procfs: Where procfs is mounted.
        budget: What ordinary users may cost; None: a budget of its own.
        run: Runs a program.
        now: Unix time.
        clock: Monotonic time.
    """

    def __init__(
        self,
        binary: str = DEFAULT_BINARY,
        timeout_seconds: float = 2.0,
        min_interval_seconds: float = 5.0,
        *,
        procfs: str = "/proc",
        budget: UserBudget | None = None,
        run: Runner = run_process,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_interval_seconds = min_interval_seconds
        self._now = now
        self._clock = clock
        self._budget = budget or UserBudget(clock=clock)
        self._runs = ControlToolRuns(binary, timeout_seconds, self._budget, procfs, run, clock)
        self._daemons: dict[str, _QueryState] = {}
        self._transitions = TransitionLogger(logging.getLogger(__name__))

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        """Ask what the daemon answers alone. Never raises; the outcome says how it went.

        An observation from before `since` (Unix time) is not given again, however young it is.
        """
        deadline = self._clock() + deadline_seconds
        async with self._exclusive(daemon, deadline_seconds) as known:
            if known is None:
                return self._skipped(daemon, "probe", _BUSY)
            age = self._clock() - known.probed_at
            young = age < self._min_interval_seconds and known.probe and known.probe.at >= since
            if known.probe and (young or age < known.pause_seconds):
                return known.probe
            if (why := _skip_reason(daemon, known.breaker)) is not None:
                return self._skipped(daemon, "probe", why)
            if not known.asked and not self._budget.admit_first_query(daemon):
                return self._skipped(daemon, "probe", _TOO_MANY)
            known.asked = True
            at, clock = self._now(), self._clock()
            exchanges = await self._probe(daemon, known, deadline)
            observation = self._make_observation(daemon, known, "probe", at, exchanges)
            if observation.outcome not in (Outcome.SKIPPED, Outcome.TIMEOUT):
                known.probe, known.probed_at = observation, clock
                failed = daemon.limited and observation.outcome is not Outcome.OK
                longer = max(LIMITED_PAUSE_SECONDS, 2 * known.pause_seconds)
                known.pause_seconds = min(longer, MAX_LIMITED_PAUSE_SECONDS) if failed else 0.0
            return observation

    async def _probe(
        self, daemon: DaemonFacts, known: _QueryState, deadline: float
    ) -> list[Exchange]:
        """Ask in the interface that it speaks; in the other one, if its answer says so."""
        interface = known.interface or daemon.protocol or "2"
        exchanges = await self._probe_in(interface, daemon, known, deadline)
        other = other_interface(exchanges[0])
        if other is not None:
            again = await self._probe_in(other, daemon, known, deadline)
            if again[0].outcome is Outcome.OK:
                interface, exchanges = other, again
        if exchanges[0].outcome is Outcome.OK:
            known.interface = interface
        return exchanges

    async def _probe_in(
        self, interface: str, daemon: DaemonFacts, known: _QueryState, deadline: float
    ) -> list[Exchange]:
        if interface == "3":
            return await self._query_each(daemon, known, PROBE_V3, deadline)
        exchanges = [await self._runs.query(daemon, known.silence, PROBE, deadline)]
        reply = parse_probe(exchanges[0]) if exchanges[0].outcome is Outcome.OK else None
        # Its first partition makes the daemon initialise CUDA, and so may this query: with a server
        # there is one already.
        if daemon.static_partitioning and isinstance(reply, ProbeReply) and reply.server_pids:
            found = await self._runs.query(daemon, known.silence, (V2_PARTITIONS,), deadline)
            exchanges.append(_optional(found))
        return exchanges

    async def _query_each(
        self, daemon: DaemonFacts, known: _QueryState, queries: Iterable[str], deadline: float
    ) -> list[Exchange]:
        """Put queries of the v3 interface, up to one that hangs or that nobody answers.

        Only the list of servers must be answered: a driver may not have all that is asked for.
        """
        found: list[Exchange] = []
        for query in queries:
            one = await self._runs.query(daemon, known.silence, (query,), deadline)
            found.append(one if query == SERVERS else _optional(one))
            if found[-1].outcome is not Outcome.OK:
                break
        return found

    async def reconcile(
        self, daemon: DaemonFacts, server_pids: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        """Ask what the daemon must ask its servers; stops at the first question that hangs.

        server_pids (as the daemon numbers processes) must not be stopped or gone: the daemon would
        wait for them.
        """
        deadline = self._clock() + deadline_seconds
        async with self._exclusive(daemon, deadline_seconds) as known:
            if known is None:
                return self._skipped(daemon, "reconciliation", _BUSY)
            if (why := _skip_reason(daemon, known.breaker, known.server_breaker)) is not None:
                return self._skipped(daemon, "reconciliation", why)
            known.devices = {pid: known.devices[pid] for pid in server_pids if pid in known.devices}
            at, requested = self._now(), list[Exchange]()
            if known.interface == "3":
                requested = await self._query_details(daemon, known, deadline)
            for server_pid in server_pids:
                requested += await self._query_server(daemon, known, server_pid, deadline)
                if requested[-1].outcome in (Outcome.TIMEOUT, Outcome.SKIPPED):
                    break
            observation = self._make_observation(daemon, known, "reconciliation", at, requested)
            if observation.outcome is Outcome.TIMEOUT:
                known.server_breaker.record_hang()
            elif observation.outcome is not Outcome.SKIPPED:
                known.server_breaker.record_success()
            return observation

    async def _query_details(
        self, daemon: DaemonFacts, known: _QueryState, deadline: float
    ) -> list[Exchange]:
        """Ask a v3 daemon for what its servers have; for what is fixed, once for these servers."""
        found = await self._query_each(daemon, known, DETAILS_V3, deadline)
        probe = known.probe
        servers = probe.exchanges[0].stdout if probe is not None and probe.exchanges else ""
        if found[-1].outcome is Outcome.OK and (not known.fixed[1] or known.fixed[0] != servers):
            fixed = await self._query_each(daemon, known, FIXED_V3, deadline)
            if any(one.outcome is not Outcome.OK for one in fixed):
                return found + fixed
            known.fixed = servers, tuple(fixed)
        return [*found, *known.fixed[1]]

    def record_activity(self, pipe_directory: str, at: float) -> None:
        """Say that a daemon was seen to serve somebody at a moment (Unix time).

        If it hung or failed before that, it is asked again soon.
        """
        known = self._daemons.get(pipe_directory)
        if known is None:
            return
        if at > known.hung_at:
            known.breaker.record_activity()
        if known.probe is not None and at > known.probe.at:
            known.pause_seconds = 0.0

    def counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Return the runs of the tool for a daemon, and its failures by outcome."""
        return self._runs.counts(pipe_directory)

    def forget(self, present: Iterable[str]) -> None:
        """Drop what is remembered of all daemons but these (pipe directories)."""
        kept = set(present)
        for gone in self._daemons.keys() - kept:
            if not self._daemons[gone].lock.locked():
                del self._daemons[gone]
                self._transitions.forget("daemon", gone)
        self._runs.forget(kept)

    @asynccontextmanager
    async def _exclusive(
        self, daemon: DaemonFacts, timeout_seconds: float
    ) -> AsyncIterator[_QueryState | None]:
        """Wait until no other question to this daemon is under way; None: that took too long."""
        lock = self._state_of(daemon).lock
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                await lock.acquire()
        except TimeoutError:
            yield None
            return
        try:
            yield self._state_of(daemon)
        finally:
            lock.release()

    def _state_of(self, daemon: DaemonFacts) -> _QueryState:
        """Return what is remembered; nothing of another process in this directory."""
        process = daemon.process
        identity: tuple[object, ...] = (daemon.pipe_path, daemon.lock_holder_pid)
        if process is not None:
            identity = (daemon.pipe_path, process.pid, process.start_time_seconds)
        known = self._daemons.get(daemon.pipe_directory)
        if known is None or known.identity != identity:
            lock = asyncio.Lock() if known is None else known.lock
            breakers = CircuitBreaker(self._clock), CircuitBreaker(self._clock)
            known = self._daemons[daemon.pipe_directory] = _QueryState(identity, lock, *breakers)
        return known

    async def _query_server(
        self, daemon: DaemonFacts, known: _QueryState, server_pid: int, deadline: float
    ) -> list[Exchange]:
        """Ask about one server; at the first time also which devices it has, and then for these."""
        devices = known.devices.get(server_pid)
        commands = server_commands(server_pid, devices or (), map_devices=devices is None)
        exchanges = [await self._runs.query(daemon, known.silence, commands, deadline)]
        if devices is None and exchanges[0].outcome is Outcome.OK:
            reply = parse_server(exchanges[0])
            if isinstance(reply, ServerReply) and reply.devices:
                found = tuple(reply.devices)
                known.devices[server_pid] = found
                exchanges.append(
                    await self._runs.query(
                        daemon, known.silence, limit_commands(server_pid, found), deadline
                    )
                )
        return exchanges

    def _make_observation(
        self,
        daemon: DaemonFacts,
        known: _QueryState,
        kind: QueryKind,
        at: float,
        requested: Sequence[Exchange],
    ) -> ControlObservation:
        """Draw the conclusions: how it went, whether to keep away, what to say in the log."""
        worst = next(
            (exchange for exchange in requested if exchange.outcome is not Outcome.OK), None
        )
        outcome = worst.outcome if worst else Outcome.OK
        error = _error_text(worst) if worst else None
        if outcome is Outcome.TIMEOUT:
            known.probe, pause = None, known.breaker.record_hang()
            known.hung_at = self._now()
            error = f"{error}; it is left alone for {pause:.0f} s"
        elif any(exchange.outcome is not Outcome.SKIPPED for exchange in requested):
            known.breaker.record_success()
        self._log_outcome(daemon, outcome, error)
        return ControlObservation(at, daemon.pipe_directory, kind, outcome, tuple(requested), error)

    def _skipped(self, daemon: DaemonFacts, kind: QueryKind, why: str) -> ControlObservation:
        return ControlObservation(
            self._now(), daemon.pipe_directory, kind, Outcome.SKIPPED, error=f"not asked: {why}"
        )

    def _log_outcome(self, daemon: DaemonFacts, outcome: Outcome, error: str | None) -> None:
        """One line when a daemon's answers stop, one when they are back."""
        name = daemon.pipe_directory
        if outcome is Outcome.OK:
            self._transitions.recovered(
                "daemon", name, message="control daemon answers", daemon=name
            )
        elif outcome is not Outcome.SKIPPED:
            self._transitions.failed(
                "daemon", name, message=_MESSAGES[outcome], daemon=name, err=error
            )


_MESSAGES = {
    Outcome.TIMEOUT: "control daemon does not answer",
    Outcome.ABSENT: "no control daemon to ask",
    Outcome.REFUSED: "control daemon refuses to answer",
    Outcome.UNPARSABLE: "control daemon's answer is not understood",
}


def _skip_reason(daemon: DaemonFacts, *breakers: CircuitBreaker) -> str | None:
    socket = f"{daemon.pipe_path}/control"
    length = control_socket_bytes(daemon.pipe_path)
    if length > SOCKET_PATH_BYTES:
        return (
            f"the path of its socket has {length} bytes, and only {SOCKET_PATH_BYTES} are possible:"
            f" {socket}; mount the directory at a shorter path and name that with"
            " --mps.pipe-directory"
        )
    left = max(breaker.remaining_seconds() for breaker in breakers)
    return f"it hung, and is left alone for another {left:.0f} s" if left > 0 else None


def _optional(exchange: Exchange) -> Exchange:
    """Let a refusal of what not every driver has be no failure; why is kept in `error`."""
    refused = exchange.outcome in (Outcome.REFUSED, Outcome.UNPARSABLE)
    return replace(exchange, outcome=Outcome.OK) if refused else exchange


def _error_text(exchange: Exchange) -> str:
    more = len(exchange.commands) - 1
    requested = exchange.commands[0] + (f" and {more} more" if more else "")
    return f"{requested}: {exchange.error}"

"""Queries control daemons through nvidia-cuda-mps-control.

The daemon has one thread, and a query about a stuck server blocks the daemon's users. Two queries
collide: next to three busy callers, 285 of 1000 runs were refused, and 32 ended with status 0
and no output. So each daemon has one run at a time, a deadline, a second attempt after a refusal,
and a pause after a hang, which doubles. Only read commands are sent (mps.tool_commands).
"""

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.logging import TransitionLogger
from mps_exporter.mps.protocol_v3 import DETAILS_V3, PROBE_V3, SERVERS, V2_PARTITIONS
from mps_exporter.mps.tool_commands import (
    PROBE,
    SOCKET_PATH_BYTES,
    ProbeReply,
    ServerReply,
    failure_of,
    invocation,
    limit_commands,
    other_interface,
    parse_probe,
    parse_server,
    path_bytes,
    server_commands,
)
from mps_exporter.observations import ControlObservation, DaemonFacts, Exchange, Outcome, QueryKind
from mps_exporter.sources.child_process import (
    CAP_SYS_PTRACE,
    ChildRights,
    ProcessResult,
    effective_capabilities,
    may_change_user,
    run_process,
)
from mps_exporter.sources.fairness import UserBudget
from mps_exporter.sources.resolve_in_root import opened_directory, process_root

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_BUSY = "another question to it is still under way"
_NO_SLOT = "too many other daemons are being asked"

Runner = Callable[
    [Sequence[str], bytes, Mapping[str, str], float, ChildRights], Awaitable[ProcessResult]
]
"""Function that runs a program, as run_process does."""

Query = Callable[[tuple[str, ...]], Awaitable[Exchange]]  # Sends commands to one daemon.


class Pause:
    """Pause after a failure. Pauses double up to a limit until a success.

    The first activity in a series ends the pause; later activity cuts it to the first length.
    """

    def __init__(self, clock: Callable[[], float], first: float, longest: float) -> None:
        self._clock = clock
        self._first_seconds, self._longest_seconds = first, longest
        self._seconds, self._was_active = 0.0, False
        self._began = self._until = float("-inf")

    def remaining_seconds(self) -> float:
        return max(self._until - self._clock(), 0.0)

    def record_failure(self) -> float:
        """Begin a pause, and return its length in seconds."""
        self._seconds = min(self._seconds * 2 or self._first_seconds, self._longest_seconds)
        self._began = self._clock()
        self._until = self._began + self._seconds
        return self._seconds

    def record_activity(self) -> None:
        """Shorten the pause: the daemon served a client or continued."""
        if self._seconds:
            least = self._first_seconds if self._was_active else 0.0
            self._until = min(self._until, self._began + least)
            self._was_active = True

    def record_success(self) -> None:
        self._seconds, self._was_active, self._until = 0.0, False, float("-inf")


@dataclass(slots=True)
class _QueryState:
    """State of one daemon between queries."""

    daemon: DaemonFacts  # Its last known facts.
    identity: tuple[object, ...]
    lock: asyncio.Lock  # Lock that is held during a query.
    pause: Pause  # Pause of all queries after a hang.
    server_pause: Pause  # Pause of queries to which a server must reply, after such a query hung.
    failed_pause: Pause  # Time for which an ordinary user's failed probe is reused.
    hung_at: float = float("-inf")  # When the last query timed out (Unix time).
    probe: ControlObservation | None = None
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Server -> ordinals of its devices, if it has reported them."""
    interface: str | None = None  # Interface of the last successful probe; None before the first.


class ControlTool:
    """The control tool, for any number of daemons.

    Within `min_interval_seconds`, a probe returns the last observation object, unless stale.
    """

    def __init__(
        self,
        binary: str,
        timeout_seconds: float,
        min_interval_seconds: float,
        *,
        procfs: str = "/proc",
        budget: UserBudget | None = None,
        run: Runner = run_process,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._binary = binary
        self._timeout_seconds = timeout_seconds
        self._min_interval_seconds = min_interval_seconds
        self._procfs = procfs
        self._run = run
        self._now = now
        self._clock = clock
        self._may_change_user = may_change_user()
        has_ptrace = effective_capabilities() >> CAP_SYS_PTRACE & 1
        self._kept_capabilities = (CAP_SYS_PTRACE,) if has_ptrace else ()
        self._budget = budget or UserBudget(clock=clock)
        self._daemons: dict[str, _QueryState] = {}
        self._runs: dict[str, Counter[Outcome]] = {}
        self._transitions = TransitionLogger(logging.getLogger(__name__))

    async def probe(
        self,
        daemon: DaemonFacts,
        deadline_seconds: float,
        since: float = 0.0,
        active_at: float = 0.0,
    ) -> ControlObservation:
        """See Control; the outcome shows a failure."""
        deadline = self._clock() + deadline_seconds
        async with _held([self._state_of(daemon).lock], deadline_seconds) as free:
            state = self._state_of(daemon)
            if active_at > state.hung_at:
                state.pause.record_activity()
            if free and (probe := state.probe) is not None:
                if active_at > probe.at:
                    state.failed_pause.record_activity()
                age = self._now() - probe.at  # negative: the clock was set back
                fresh = 0 <= age < self._min_interval_seconds and probe.at >= since
                if fresh or state.failed_pause.remaining_seconds() > 0:
                    return probe
            why = _skip_reason(daemon, state.pause) if free else _BUSY
            if why is not None:
                return self._skipped(daemon, "probe", why)
            at = self._now()
            exchanges = await _probe(state, partial(self._query, state, deadline))
            observation = self._make_observation(state, "probe", at, exchanges)
            if observation.outcome not in (Outcome.SKIPPED, Outcome.TIMEOUT):
                state.probe = observation
                if observation.outcome is Outcome.OK:
                    state.failed_pause.record_success()
                elif daemon.limited:
                    state.failed_pause.record_failure()
            return observation

    async def reconcile(
        self, daemon: DaemonFacts, server_pids: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        """Query a daemon about its servers, until a query of a server hangs or is skipped.

        server_pids (as the daemon numbers processes) must not be stopped or exited: the daemon
        would wait for them.
        """
        deadline = self._clock() + deadline_seconds
        async with _held([self._state_of(daemon).lock], deadline_seconds) as free:
            state = self._state_of(daemon)
            why = _skip_reason(daemon, state.pause, state.server_pause) if free else _BUSY
            if why is not None:
                return self._skipped(daemon, "reconciliation", why)
            state.devices = {pid: state.devices[pid] for pid in server_pids if pid in state.devices}
            at, query = self._now(), partial(self._query, state, deadline)
            exchanges = await _query_each(DETAILS_V3, query) if state.interface == "3" else []
            for server_pid in server_pids:
                exchanges += await _query_server(state, server_pid, query)
                if exchanges[-1].outcome in (Outcome.TIMEOUT, Outcome.SKIPPED):
                    break
            observation = self._make_observation(state, "reconciliation", at, exchanges)
            if observation.outcome is Outcome.TIMEOUT:
                state.server_pause.record_failure()
            elif observation.outcome is not Outcome.SKIPPED:
                state.server_pause.record_success()
            return observation

    def counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        runs = self._runs.get(pipe_directory, Counter())
        harmless = (Outcome.OK, Outcome.SKIPPED)
        failures = {one.value: count for one, count in runs.items() if one not in harmless}
        return runs.total(), failures

    def forget(self, present: Iterable[str]) -> None:
        """Drop the state of all daemons except these (pipe directories)."""
        kept = set(present)
        for gone in self._daemons.keys() - kept:
            if not self._daemons[gone].lock.locked():
                del self._daemons[gone]
                self._transitions.forget(gone)
        for gone in self._runs.keys() - kept:
            del self._runs[gone]

    # ------------------------------------------------------------------ one daemon

    def _state_of(self, daemon: DaemonFacts) -> _QueryState:
        """Return the state of this daemon; a new state for another process in its directory."""
        identity = daemon.pipe_path, daemon.process_identity or daemon.lock_holder_pid
        state = self._daemons.get(daemon.pipe_directory)
        if state is None or state.identity != identity:
            lock = asyncio.Lock() if state is None else state.lock
            hang = policy.CONTROL_BACKOFF_SECONDS, policy.MAX_CONTROL_BACKOFF_SECONDS
            failure = policy.USERS_CONTROL_BACKOFF_SECONDS, policy.MAX_USERS_CONTROL_BACKOFF_SECONDS
            pause = partial(Pause, self._clock)
            pauses = pause(*hang), pause(*hang), pause(*failure)
            state = _QueryState(daemon, identity, lock, *pauses)
            self._daemons[daemon.pipe_directory] = state
        state.daemon = daemon
        return state

    def _make_observation(
        self, state: _QueryState, kind: QueryKind, at: float, exchanges: Sequence[Exchange]
    ) -> ControlObservation:
        """Return the observation of some queries; pause after a hang, and log a change."""
        failed = next((one for one in exchanges if one.outcome is not Outcome.OK), None)
        outcome = failed.outcome if failed else Outcome.OK
        error = _error_text(failed) if failed else None
        if outcome is Outcome.TIMEOUT:
            state.probe, pause = None, state.pause.record_failure()
            state.hung_at = self._now()
            error = f"{error}; it is left alone for {pause:.0f} s"
        elif any(one.outcome is not Outcome.SKIPPED for one in exchanges):
            state.pause.record_success()
        name = state.daemon.pipe_directory
        if outcome is Outcome.OK:
            message = "a control daemon replies again"
            self._transitions.recovered(name, message=message, daemon=name)
        elif outcome is not Outcome.SKIPPED:
            message = "queries of a control daemon fail"
            self._transitions.failed(name, message=message, daemon=name, err=error)
        return ControlObservation(at, name, kind, outcome, tuple(exchanges), error)

    def _skipped(self, daemon: DaemonFacts, kind: QueryKind, why: str) -> ControlObservation:
        return ControlObservation(
            self._now(), daemon.pipe_directory, kind, Outcome.SKIPPED, error=f"not asked: {why}"
        )

    # ------------------------------------------------------------------ one query

    async def _query(
        self, state: _QueryState, deadline: float, commands: tuple[str, ...]
    ) -> Exchange:
        """Run the tool, again if a collision with another caller may explain a failure.

        No run begins after the deadline, but each has its full timeout: a shorter silence proves
        no hang.
        """
        daemon = state.daemon
        exchange = Exchange(commands, Outcome.SKIPPED, attempts=0, error="no time was left to ask")
        while (
            exchange.attempts < policy.MAX_CONTROL_ATTEMPTS
            and deadline - self._clock() >= policy.MIN_CONTROL_RUN_SECONDS
        ):
            if exchange.attempts:
                await asyncio.sleep(policy.CONTROL_RETRY_DELAY_SECONDS)
            slots = self._budget.tool_slots(daemon)
            async with _held(slots, deadline - self._clock()) as free:
                if not free:
                    return replace(exchange, error=_NO_SLOT)
                attempt = await self._run_once(daemon, commands)
            exchange = replace(attempt, attempts=exchange.attempts + 1)
            self._runs.setdefault(daemon.pipe_directory, Counter())[exchange.outcome] += 1
            if not _should_retry(exchange, daemon):
                break
        return exchange

    async def _run_once(self, daemon: DaemonFacts, commands: tuple[str, ...]) -> Exchange:
        try:
            with self._reached(daemon) as (path, rights):
                arguments, stdin, more = invocation(commands)
                environment = {"CUDA_MPS_PIPE_DIRECTORY": path, "PATH": PATH, **more}
                argv = (shutil.which(self._binary) or self._binary, *arguments)
                child = await self._run(argv, stdin, environment, self._timeout_seconds, rights)
        except OSError as error:
            return Exchange(commands, Outcome.ABSENT, error=start_error_text(self._binary, error))
        return _exchange(commands, child, self._timeout_seconds)

    @contextmanager
    def _reached(self, daemon: DaemonFacts) -> Iterator[tuple[str, ChildRights]]:
        """Yield the pipe directory as the tool must name it, and the rights of the tool.

        The tool runs as the daemon's user if possible, and without capabilities. It keeps
        CAP_SYS_PTRACE for root's daemons in containers only, to enter /proc/PID/root.
        Other directories in containers are opened here; the tool inherits the descriptor.
        """
        user, path = daemon.user, daemon.pipe_path
        uid = user if user and self._may_change_user else None
        if not process_root(path, self._procfs)[0]:
            yield path, ChildRights(uid)
        elif not user and not daemon.limited:
            yield path, ChildRights(uid, self._kept_capabilities)
        else:
            with opened_directory(path, self._procfs) as directory:
                yield f"/proc/self/fd/{directory}", ChildRights(uid, descriptors=(directory,))


@asynccontextmanager
async def _held(
    locks: Iterable[asyncio.Lock | asyncio.Semaphore], timeout_seconds: float
) -> AsyncIterator[bool]:
    """Acquire the locks in their order; yield False after a timeout."""
    async with AsyncExitStack() as held:
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                for lock in locks:
                    await held.enter_async_context(lock)
        except TimeoutError:
            yield False
            return
        yield True


# ---------------------------------------------------------------------- which queries


async def _probe(state: _QueryState, query: Query) -> list[Exchange]:
    """Query a daemon in its interface, or in the other if the reply names that."""
    interface = state.interface or state.daemon.protocol or "2"
    exchanges = await _probe_in(interface, state.daemon, query)
    other = other_interface(exchanges[0])
    if other is not None:
        again = await _probe_in(other, state.daemon, query)
        if again[0].outcome is Outcome.OK:
            interface, exchanges = other, again
    if exchanges[0].outcome is Outcome.OK:
        state.interface = interface
    return exchanges


async def _probe_in(interface: str, daemon: DaemonFacts, query: Query) -> list[Exchange]:
    if interface == "3":
        return await _query_each(PROBE_V3, query)
    exchanges = [await query(PROBE)]
    reply = parse_probe(exchanges[0]) if exchanges[0].outcome is Outcome.OK else None
    # The daemon initializes CUDA for its first partition, and perhaps for this query: with a
    # server, CUDA is initialized already.
    if daemon.static_partitioning and isinstance(reply, ProbeReply) and reply.server_pids:
        exchanges.append(_optional(await query((V2_PARTITIONS,))))
    return exchanges


async def _query_each(commands: Iterable[str], query: Query) -> list[Exchange]:
    """Send queries of v3, up to the first failure; a driver may lack all but the server list."""
    found: list[Exchange] = []
    for command in commands:
        exchange = await query((command,))
        found.append(exchange if command == SERVERS else _optional(exchange))
        if found[-1].outcome is not Outcome.OK:
            break
    return found


async def _query_server(state: _QueryState, server_pid: int, query: Query) -> list[Exchange]:
    """Query one server; the first time also its devices, and then the limits on its devices."""
    devices = state.devices.get(server_pid)
    exchanges = [await query(server_commands(server_pid, devices or (), map_devices=not devices))]
    if devices is None and exchanges[0].outcome is Outcome.OK:
        reply = parse_server(exchanges[0])
        if isinstance(reply, ServerReply) and reply.devices:
            found = state.devices[server_pid] = tuple(reply.devices)
            exchanges.append(await query(limit_commands(server_pid, found)))
    return exchanges


def _skip_reason(daemon: DaemonFacts, *pauses: Pause) -> str | None:
    socket = f"{daemon.pipe_path}/control"
    length = path_bytes(socket)
    if length > SOCKET_PATH_BYTES:
        return (
            f"the path of its socket has {length} bytes, and only {SOCKET_PATH_BYTES} are possible:"
            f" {socket}; mount the directory at a shorter path and name that with"
            " --mps.pipe-directory"
        )
    left = max(pause.remaining_seconds() for pause in pauses)
    return f"it hung, and is left alone for another {left:.0f} s" if left > 0 else None


# ---------------------------------------------------------------------- results


def _exchange(commands: tuple[str, ...], child: ProcessResult, limit_seconds: float) -> Exchange:
    exchange = Exchange(
        commands=commands,
        outcome=Outcome.OK,
        stdout=child.stdout.decode("utf-8", "backslashreplace"),
        stderr=child.stderr.decode("utf-8", "backslashreplace"),
        return_code=child.return_code,
        duration_seconds=child.duration_seconds,
    )
    if child.timed_out:
        error = f"no answer within {limit_seconds:.3g} s"
        return replace(exchange, outcome=Outcome.TIMEOUT, error=error)
    if child.output_exceeded:
        kept = slice(policy.MAX_KEPT_OUTPUT_CHARACTERS)
        return replace(
            exchange,
            outcome=Outcome.UNPARSABLE,
            stdout=exchange.stdout[kept],
            stderr=exchange.stderr[kept],
            error=f"it wrote more than {policy.MAX_CONTROL_OUTPUT_BYTES} bytes",
        )
    failure = failure_of(exchange)
    if failure is None:
        return exchange
    return replace(exchange, outcome=Outcome(failure.kind), error=failure.text or "it said nothing")


def _should_retry(exchange: Exchange, daemon: DaemonFacts) -> bool:
    """Return whether a collision with another caller may be the reason of a failure.

    An existing process proves that a daemon is not absent. But an ordinary user may give any
    process the name of a daemon.
    """
    if exchange.outcome is Outcome.ABSENT:
        alive = daemon.process is not None or daemon.lock_holder_pid is not None
        return alive and not daemon.limited and exchange.return_code is not None
    return exchange.outcome in (Outcome.REFUSED, Outcome.UNPARSABLE)


def _optional(exchange: Exchange) -> Exchange:
    """Accept a refusal of a query that not every driver has; `error` keeps the reason."""
    refused = exchange.outcome in (Outcome.REFUSED, Outcome.UNPARSABLE)
    return replace(exchange, outcome=Outcome.OK) if refused else exchange


def _error_text(exchange: Exchange) -> str:
    more = len(exchange.commands) - 1
    commands = exchange.commands[0] + (f" and {more} more" if more else "")
    return f"{commands}: {exchange.error}"


def start_error_text(binary: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"the control tool {binary} is not there: it comes with the NVIDIA driver (Debian:"
            " nvidia-cuda-mps, Ubuntu: nvidia-compute-utils); install it, or name it with"
            " --mps.control-binary"
        )
    return f"the control tool {binary} cannot be run: {error.strerror or error}"

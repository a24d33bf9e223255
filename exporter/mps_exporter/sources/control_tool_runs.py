"""Runs the control tool: few runs at a time, few rights, a second run after a refusal."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import shutil
import signal
import struct
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from mps_exporter.mps.control_protocol import failure_of, invocation
from mps_exporter.observations import DaemonFacts, Exchange, Outcome
from mps_exporter.sources.budget import UserBudget
from mps_exporter.sources.resolve_in_root import opened_directory, process_root

MAX_OUTPUT_BYTES = 1 << 20
"""Maximum length of each stream. A program that writes more is killed."""

_READ_BYTES = 1 << 16
_DRAIN_SECONDS = 0.2
"""Time to read output after the exit: a child of the program may hold the pipes open."""
_REAP_SECONDS, _REAP_ATTEMPTS = 0.005, 200

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NO_GROUP = 65534
"""The group that belongs to nobody: a user's groups are not known here."""

CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE = 5, 6, 7, 19

_LIMITS = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, 10), (resource.RLIMIT_NOFILE, 64))

_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522

# Looked up now: between fork and exec no lock of the dynamic loader may be taken.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _capset = _libc.prctl, _libc.capset


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a program ended."""

    return_code: int | None
    """None: it was killed by us."""
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    output_exceeded: bool = False
    duration_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChildRights:
    """As whom a program runs."""

    uid: int | None = None
    """None: as this program."""
    capabilities: tuple[int, ...] = ()
    """The capabilities of this program that it keeps."""
    descriptors: tuple[int, ...] = ()
    """Descriptors of this program, open in the child by the same numbers."""


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    timeout_seconds: float,
    rights: ChildRights = ChildRights(),
) -> ProcessResult:
    """Run a program in a session of its own, with this environment and no other.

    Whatever happens, also when the caller is cancelled, the program's process group is dead and
    reaped afterwards; a process that the kernel does not let die is reaped when it does.

    Raises:
        OSError: It could not be started.
    """
    started, loop = time.monotonic(), asyncio.get_running_loop()
    user: dict[str, Any] = {}
    if rights.uid is not None:
        user = {"user": rights.uid, "group": NO_GROUP, "extra_groups": []}
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(_READ_BYTES, loop),
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        cwd="/",
        umask=0o077,
        start_new_session=True,
        pass_fds=rights.descriptors,
        preexec_fn=partial(give_up_rights, *rights.capabilities),
        **user,
    )
    output = bytearray(), bytearray()
    timed_out = exceeded = False
    try:
        async with asyncio.timeout(timeout_seconds):
            exceeded = await _communicate(Process(transport, protocol, loop), stdin, output)
    except TimeoutError:
        timed_out = True
    finally:
        ending = asyncio.ensure_future(_terminate(transport))
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)
        await asyncio.shield(ending)
    return ProcessResult(
        return_code=None if timed_out or exceeded else transport.get_returncode(),
        stdout=bytes(output[0]),
        stderr=bytes(output[1]),
        timed_out=timed_out,
        output_exceeded=exceeded,
        duration_seconds=time.monotonic() - started,
    )


_ENDING: set[asyncio.Future[None]] = set()
"""Children on their way out: a task that nobody refers to could be collected before it is done."""


async def _communicate(child: Process, stdin: bytes, output: tuple[bytearray, bytearray]) -> bool:
    """Write the input and read the output to its end; return whether it is too long."""
    pipe = cast("asyncio.StreamWriter", child.stdin)
    pipe.write(stdin)
    pipe.close()
    streams = cast("tuple[asyncio.StreamReader, ...]", (child.stdout, child.stderr))
    pairs = zip(streams, output, strict=True)
    reading = {asyncio.create_task(_read_stream(stream, kept)) for stream, kept in pairs}
    try:
        while reading:
            done, reading = await asyncio.wait(
                reading, timeout=_DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.result() for task in done):
                return True
            if not done and child.returncode is not None:
                return False
        await child.wait()
        return False
    finally:
        for task in reading:
            task.cancel()


async def _read_stream(stream: asyncio.StreamReader, kept: bytearray) -> bool:
    """Read a stream to its end; return whether it is too long."""
    while data := await stream.read(_READ_BYTES):
        kept += data[: MAX_OUTPUT_BYTES - len(kept)]
        if len(kept) >= MAX_OUTPUT_BYTES:
            return True
    return False


async def _terminate(transport: asyncio.SubprocessTransport) -> None:
    """Kill what still runs and wait for it to be reaped, before the transport is closed.

    (Closing first would let two parties wait for the same child.)
    """
    if transport.get_returncode() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        for _ in range(_REAP_ATTEMPTS):
            if transport.get_returncode() is not None:
                break
            await asyncio.sleep(_REAP_SECONDS)
    transport.close()


def effective_capabilities() -> int:
    """Return this process's effective capabilities, a bit for each."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def may_change_user() -> bool:
    """Whether a child may be given another user, and be killed then."""
    needed = 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_KILL
    return os.geteuid() == 0 and effective_capabilities() & needed == needed


def give_up_rights(*kept: int) -> None:
    """Drop all capabilities but these, for good. Called in a child, between fork and exec.

    Whatever cannot be dropped (a filter of system calls forbids capset) is left: what an exec
    hands on is the ambient set, and that goes first.
    """
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    mask = sum(1 << one for one in kept)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    # (effective, permitted, inheritable), of the lower and the upper 32
    dropped = _capset(header, struct.pack("6I", low, low, low, high, high, high)) == 0
    for one in kept if dropped or kept else ():
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, one, 0, 0)
    # With it a program of root's gets no more than this at its start, either.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for limit, value in _LIMITS:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(limit)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (bound, bound))


_RETRY_DELAY_SECONDS = 0.04
_ATTEMPTS = 2
_MIN_RUN_SECONDS = 0.5
"""Minimum time for a run (or half of its timeout): starting the tool takes a part of it."""
_MIN_RETRY_SECONDS = 0.1
_HANG_FRACTION = 0.9
"""Silence for this part of the timeout of a run, all together, is a hang."""

_MAX_KEPT_OUTPUT = 4096
_NO_SLOT = "too many other daemons are being asked"


Runner = Callable[
    [Sequence[str], bytes, Mapping[str, str], float, ChildRights], Awaitable[ProcessResult]
]
"""Runs a program, as run_process does."""


@dataclass(slots=True)
class Silence:
    """For how long a daemon has not replied: one short run is no evidence, several are."""

    seconds: float = 0.0


class ControlToolRuns:
    """Runs of the control tool, for any number of daemons.

    Args:
        binary: The tool, by name on PATH or by path.
        timeout_seconds: Deadline for one run.
        budget: What ordinary users may cost.
        procfs: Where procfs is mounted.
        run: Runs a program.
        clock: Monotonic time.
    """

    def __init__(
        self,
        binary: str,
        timeout_seconds: float,
        budget: UserBudget,
        procfs: str = "/proc",
        run: Runner = run_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._binary = binary
        self._timeout_seconds = timeout_seconds
        self._budget = budget
        self._procfs = procfs
        self._run = run
        self._clock = clock
        self._may_change_user = may_change_user()
        has_ptrace = effective_capabilities() >> CAP_SYS_PTRACE & 1
        self._kept = (CAP_SYS_PTRACE,) if has_ptrace else ()
        self._runs: Counter[str] = Counter()
        self._failures: dict[str, Counter[str]] = {}

    def counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Return the runs of the tool for a daemon, and its failures by outcome."""
        return self._runs[pipe_directory], dict(self._failures.get(pipe_directory, ()))

    def forget(self, kept: set[str]) -> None:
        """Drop the counts of all daemons but these (pipe directories)."""
        for gone in self._runs.keys() - kept:
            del self._runs[gone]
            self._failures.pop(gone, None)

    async def query(
        self, daemon: DaemonFacts, silence: Silence, commands: tuple[str, ...], deadline: float
    ) -> Exchange:
        """Run the tool, a second time after a refusal."""
        exchange = Exchange(commands, Outcome.SKIPPED, attempts=0, error="no time was left to ask")
        least = min(_MIN_RUN_SECONDS, self._timeout_seconds / 2)
        while exchange.attempts < _ATTEMPTS and deadline - self._clock() >= least:
            if exchange.attempts:
                await asyncio.sleep(_RETRY_DELAY_SECONDS)
            async with self._slot(daemon, deadline - self._clock()) as free:
                if not free:
                    return replace(exchange, error=_NO_SLOT)
                attempt = await self._run_once(daemon, silence, commands, deadline - self._clock())
            least = _MIN_RETRY_SECONDS
            exchange = replace(attempt, attempts=exchange.attempts + 1)
            self._runs[daemon.pipe_directory] += 1
            if not _should_retry(exchange, daemon):
                break
        if exchange.outcome not in (Outcome.OK, Outcome.SKIPPED):
            failures = self._failures.setdefault(daemon.pipe_directory, Counter())
            failures[exchange.outcome.value] += 1
        return exchange

    async def _run_once(
        self, daemon: DaemonFacts, silence: Silence, commands: tuple[str, ...], left_seconds: float
    ) -> Exchange:
        limit = max(min(left_seconds, self._timeout_seconds), 0.0)
        try:
            with self._reached(daemon) as (path, rights):
                arguments, stdin, more = invocation(commands)
                environment = {"CUDA_MPS_PIPE_DIRECTORY": path, "PATH": PATH, **more}
                argv = (shutil.which(self._binary) or self._binary, *arguments)
                child = await self._run(argv, stdin, environment, limit, rights)
        except OSError as error:
            return Exchange(commands, Outcome.ABSENT, error=cannot_run(self._binary, error))
        exchange = _exchange(commands, child, limit)
        silence.seconds = silence.seconds + limit if child.timed_out else 0.0
        if child.timed_out and silence.seconds < _HANG_FRACTION * self._timeout_seconds:
            why = f"{exchange.error}, and no more time was left"
            return replace(exchange, outcome=Outcome.SKIPPED, error=why)
        return exchange

    @contextmanager
    def _reached(self, daemon: DaemonFacts) -> Iterator[tuple[str, ChildRights]]:
        """Return the name of the pipe directory for the tool, and as whom it asks there.

        It runs as the daemon's user where that can be done, and has no capability. Only to reach
        root's own daemons in containers it must look into /proc/PID/root, which takes
        CAP_SYS_PTRACE; the directories of others are opened here, and it has a descriptor.
        """
        user, path = daemon.user, daemon.pipe_path
        uid = user if user and self._may_change_user else None
        if not process_root(path, self._procfs)[0]:
            yield path, ChildRights(uid)
        elif not user:
            yield path, ChildRights(uid, self._kept)
        else:
            with opened_directory(path, self._procfs) as directory:
                yield f"/proc/self/fd/{directory}", ChildRights(uid, descriptors=(directory,))

    @asynccontextmanager
    async def _slot(self, daemon: DaemonFacts, timeout_seconds: float) -> AsyncIterator[bool]:
        """Wait until the tool may be run once more; return whether it may."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(max(timeout_seconds, 0.0)):
                    for slot in self._budget.tool_slots(daemon):
                        await held.enter_async_context(slot)
            except TimeoutError:
                yield False
                return
            yield True


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
        return replace(
            exchange,
            outcome=Outcome.UNPARSABLE,
            stdout=exchange.stdout[:_MAX_KEPT_OUTPUT],
            stderr=exchange.stderr[:_MAX_KEPT_OUTPUT],
            error=f"it wrote more than {MAX_OUTPUT_BYTES} bytes",
        )
    failure = failure_of(exchange)
    if failure is None:
        return exchange
    quoted_reply = failure.text or "it said nothing"
    return replace(exchange, outcome=Outcome(failure.kind), error=quoted_reply)


def _should_retry(exchange: Exchange, daemon: DaemonFacts) -> bool:
    """After a refusal: callers collide. Also when nobody seems to be there whose process is.

    (But any number of processes of an ordinary user are called like a daemon and are none.)
    """
    if exchange.outcome is Outcome.ABSENT:
        alive = daemon.process is not None or daemon.lock_holder_pid is not None
        return alive and not daemon.limited and exchange.return_code is not None
    return exchange.outcome in (Outcome.REFUSED, Outcome.UNPARSABLE)


def cannot_run(binary: str, error: OSError) -> str:
    """Why the tool cannot be run, for a person."""
    if isinstance(error, FileNotFoundError):
        return (
            f"the control tool {binary} is not there: it comes with the NVIDIA driver (Debian:"
            " nvidia-cuda-mps, Ubuntu: nvidia-compute-utils); install it, or name it with"
            " --mps.control-binary"
        )
    return f"the control tool {binary} cannot be run: {error.strerror or error}"

"""Runs one short-lived program: bounded in time, output and rights, killed with its group, reaped.

The control tool meets sockets of other users. It runs as the daemon's user where this program may
change users, and without capabilities everywhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import struct
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

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

_LIMITS = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, 10),
    (resource.RLIMIT_NOFILE, 64),
)

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

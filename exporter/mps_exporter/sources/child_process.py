"""Runs a program with a deadline, bounded output, and few rights.

The control tool connects to other users' sockets, and may run as another user, who can make it do
anything. So the tool gets no more rights than its user has, only the capabilities that it needs,
and on known machines (_MACHINES) cannot start a process, which could outlive it in a new session.
"""

import asyncio
import ctypes
import errno
import os
import resource
import signal
import struct
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.sources.processes import Processes

NO_GROUP = 65534  # The group without members: the groups of a user are not known here.

CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE = 5, 6, 7, 19

_LIMITS = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_FSIZE, policy.MAX_CONTROL_OUTPUT_BYTES),
    (resource.RLIMIT_CPU, policy.MAX_CONTROL_CPU_SECONDS),
    (resource.RLIMIT_NOFILE, policy.MAX_CONTROL_OPEN_FILES),
)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522

# Resolved now: between fork and exec no lock of the dynamic loader may be taken.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _capset = _libc.prctl, _libc.capset

_SECCOMP_MODE_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOWED, _FAILS_WITH = 0x7FFF0000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_CALLS, _CLONE3, _CLONE_THREAD = 0x40000000, 435, 0x10000
_MACHINES = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""Machine -> AUDIT_ARCH, and the system calls clone, and (fork, vfork)."""


def _without_processes() -> bytes:
    """Return a filter of system calls that allows threads, not processes; b"" if not supported.

    An instruction is (operation, instructions skipped if true, if false, operand). Without clone3,
    whose flags are in memory, the C library uses clone.
    """
    if (known := _MACHINES.get(os.uname().machine)) is None:
        return b""
    machine, clone, older = known
    refused = _RETURN, 0, 0, _FAILS_WITH | errno.EPERM
    steps = [(_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 1, 0, machine), refused]
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32_CALLS), refused]
    for number in older:
        steps += [(_EQUAL, 0, 1, number), refused]
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAILS_WITH | errno.ENOSYS)]
    steps += [(_EQUAL, 1, 0, clone), (_RETURN, 0, 0, _ALLOWED)]
    steps += [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_HAS_BIT, 1, 0, _CLONE_THREAD), refused]
    steps.append((_RETURN, 0, 0, _ALLOWED))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


_FILTER = ctypes.create_string_buffer(_without_processes())
_FILTER_ARGUMENT = struct.pack("HP", len(_FILTER) // 8, ctypes.addressof(_FILTER))


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Output and exit of a program."""

    return_code: int | None  # None after a timeout or too much output.
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    output_exceeded: bool = False
    duration_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChildRights:
    """User and rights of a child."""

    uid: int | None = None  # None: the exporter's user.
    capabilities: tuple[int, ...] = ()  # Capabilities that the child keeps.
    descriptors: tuple[int, ...] = ()  # Descriptors that the child inherits.


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    timeout_seconds: float,
    rights: ChildRights = ChildRights(),
) -> ProcessResult:
    """Run a program in a new session, with exactly this environment.

    Input and output are files in memory: the kernel limits the output. Afterwards a program that
    did not exit is dead and reaped, also if the caller is cancelled; a process that the kernel
    cannot kill yet is reaped later. The program dies with this process, too.

    Raises:
        OSError: If the program cannot be started.
    """
    started, timed_out = time.monotonic(), False
    with ExitStack() as files:
        given, output, errors = (_anonymous_file(files, name) for name in ("in", "out", "err"))
        os.pwrite(given, stdin, 0)
        user: dict[str, Any] = {}
        if rights.uid is not None:
            user = {"user": rights.uid, "group": NO_GROUP, "extra_groups": []}
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=given,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            cwd="/",
            umask=0o077,
            start_new_session=True,
            pass_fds=rights.descriptors,
            preexec_fn=partial(_restrict, os.getpid(), rights.capabilities),
            **user,
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                await child.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await asyncio.shield(asyncio.ensure_future(_terminate(child)))
        limit = policy.MAX_CONTROL_OUTPUT_BYTES
        texts = os.pread(output, limit, 0), os.pread(errors, limit, 0)
    exceeded = max(map(len, texts)) == limit
    return ProcessResult(
        None if timed_out or exceeded else child.returncode,
        *texts,
        timed_out=timed_out,
        output_exceeded=exceeded,
        duration_seconds=time.monotonic() - started,
    )


def _anonymous_file(files: ExitStack, name: str) -> int:
    descriptor = os.memfd_create(name)
    files.callback(os.close, descriptor)
    return descriptor


async def _terminate(child: Process) -> None:
    """Kill a running program; wait a limited time for its exit."""
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            child.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(policy.CONTROL_REAP_SECONDS):
                await child.wait()


def effective_capabilities() -> int:
    return Processes().status(os.getpid()).capabilities


def may_change_user() -> bool:
    """Return whether this process may run a child as another user, and kill it."""
    needed = 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_KILL
    return effective_capabilities() & needed == needed


def _restrict(parent_pid: int, kept: Sequence[int]) -> None:
    """Drop all rights except these capabilities. Called in a child, between fork and exec.

    A filter of system calls may forbid capset; so the ambient set, which an exec hands on, is
    cleared first.
    """
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    mask = sum(1 << one for one in kept)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    # (effective, permitted, inheritable), for the lower and the upper 32 capabilities
    _capset(header, struct.pack("6I", low, low, low, high, high, high))
    for one in kept:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, one, 0, 0)
    # An exec of root's program then gets no more capabilities, either.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for limit, value in _LIMITS:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(limit)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (bound, bound))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _FILTER_ARGUMENT, 0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)

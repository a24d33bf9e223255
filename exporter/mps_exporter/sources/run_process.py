"""Runs one short-lived program: bounded in time and output, killed with its group, reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mps_exporter.sources.least_rights import NO_GROUP, give_up_rights

MAX_OUTPUT_BYTES = 1 << 20
"""Of each stream; a program that writes more is killed."""

_DRAIN_SECONDS = 0.2
_REAP_SECONDS = 1.0


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
    """What it keeps of this program's."""
    descriptors: tuple[int, ...] = ()
    """Of this program, open in the child by the same numbers."""


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    timeout_seconds: float,
    rights: ChildRights = ChildRights(),
) -> ProcessResult:
    """Run a program in a session of its own, with this environment and no other.

    It has no capability but those that are named, and gets none; see least_rights for its limits.
    Whatever happens, also when the caller is cancelled, the program's process group is dead and
    reaped afterwards; one that the kernel does not let die is reaped when it does.

    Raises:
        OSError: It could not be started.
    """
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        _ProcessProtocol,
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
        **_as_user(rights.uid),
    )
    timed_out = False
    try:
        _write(transport, stdin)
        async with asyncio.timeout(timeout_seconds):
            await protocol.wait_ended()
    except TimeoutError:
        timed_out = True
    finally:
        ending = asyncio.ensure_future(_terminate(transport, protocol))
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)
        await asyncio.shield(ending)
    killed = timed_out or protocol.output_exceeded
    return ProcessResult(
        return_code=None if killed else transport.get_returncode(),
        stdout=bytes(protocol.output[1]),
        stderr=bytes(protocol.output[2]),
        timed_out=timed_out,
        output_exceeded=protocol.output_exceeded,
        duration_seconds=time.monotonic() - started,
    )


def _as_user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": NO_GROUP, "extra_groups": []}


_ENDING: set[asyncio.Future[None]] = set()
"""Children on their way out: a task that nobody refers to could be collected before it is done."""


class _ProcessProtocol(asyncio.SubprocessProtocol):
    """Collects what a program writes, up to the bound."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.output = {1: bytearray(), 2: bytearray()}
        self.exited: asyncio.Future[None] = loop.create_future()
        self._output_exceeded: asyncio.Future[None] = loop.create_future()
        self._silent: asyncio.Future[None] = loop.create_future()

    @property
    def output_exceeded(self) -> bool:
        return self._output_exceeded.done()

    async def wait_ended(self) -> None:
        """Wait for its exit and its last words.

        For the latter not long: a child of its own may hold the pipes open.
        """
        await asyncio.wait(
            (self.exited, self._output_exceeded), return_when=asyncio.FIRST_COMPLETED
        )
        if not self.output_exceeded:
            await asyncio.wait((self._silent,), timeout=_DRAIN_SECONDS)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep it while there is room."""
        kept = self.output[fd]
        kept += data[: MAX_OUTPUT_BYTES - len(kept)]
        if len(kept) >= MAX_OUTPUT_BYTES:
            _resolve(self._output_exceeded)

    def process_exited(self) -> None:
        _resolve(self.exited)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """It was reaped and its pipes are closed."""
        _resolve(self._silent)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _write(transport: asyncio.SubprocessTransport, stdin: bytes) -> None:
    pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
    pipe.write(stdin)
    pipe.close()


async def _terminate(transport: asyncio.SubprocessTransport, protocol: _ProcessProtocol) -> None:
    """Kill what still runs and wait for it to be reaped, before the transport is closed.

    (Closing first would let two parties wait for the same child.)
    """
    if not protocol.exited.done():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await asyncio.wait((protocol.exited,), timeout=_REAP_SECONDS)
    transport.close()

"""Lost lines of a log: no crash and no death is reported because of them.

Recordings of real hosts, without log lines that a rotation loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mps_exporter.observations import LogChunk, LogsObservation
from mps_exporter.sources.recording import read_recording
from testing.player import RECORDINGS, Metrics, Player


async def at_end(name: str, change: Callable[[LogChunk], LogChunk]) -> Metrics:
    """Play a recording whose chunks of logs were changed."""
    whole = read_recording(RECORDINGS / f"{name}.rec.gz")
    observations = tuple(
        replace(one, chunks=tuple(map(change, one.chunks)))
        if isinstance(one, LogsObservation)
        else one
        for one in whole.observations
    )
    return await Player(replace(whole, observations=observations)).to_end()


def without(*lines: bytes) -> Callable[[LogChunk], LogChunk]:
    """These lines are missing from a log that is otherwise complete."""

    def change(chunk: LogChunk) -> LogChunk:
        kept = [
            line
            for line in chunk.data.splitlines(keepends=True)
            if not line.rstrip().endswith(lines)
        ]
        return replace(chunk, data=b"".join(kept))

    return change


NOTIFIED = (b"Server has been notified to shutdown", b"Waiting for current clients to finish")


async def test_a_server_that_only_control_log_says_was_asked_may_have_crashed() -> None:
    look = await at_end("two-daemons", without(b"Exiting", *NOTIFIED))
    crashes = [
        one
        for daemon in look.snapshot.daemons
        for one in daemon.incidents
        if one.kind == "server_crashed"
    ]
    assert crashes
    assert all(one.detail.endswith("although it had been asked to end") for one in crashes)


async def test_a_server_whose_last_lines_were_truncated_has_not_crashed() -> None:
    def change(chunk: LogChunk) -> LogChunk:
        if chunk.log == "server" and b"Exiting" in chunk.data:
            return replace(chunk, data=b"", restarted=True)
        return chunk

    look = await at_end("two-daemons", change)
    assert not look.value("mps_server_exits_total", cause="crashed")
    assert look.value("mps_server_exits_total", cause="requested")


async def test_a_daemon_that_was_asked_to_quit_and_whose_servers_ended_has_not_died() -> None:
    look = await at_end("wait-served", without(b"Exit with status 0"))
    (daemon,) = look.snapshot.daemons
    kinds = [one.kind for one in daemon.incidents]
    assert "daemon_quit" in kinds
    assert "daemon_died" not in kinds

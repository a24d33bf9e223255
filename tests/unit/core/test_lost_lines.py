"""Lost lines of a log: no process is accused because of them.

Recordings of real hosts, without log lines that a rotation loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mps_exporter.findings import findings
from mps_exporter.observations import LogChunk, LogsObservation
from mps_exporter.sources.recording import Recording, read_recording
from testing.player import RECORDINGS, Metrics, Player

FIRST_CLIENT = b"PID: 810, Context ID: 0} connected"

Change = Callable[[LogChunk], LogChunk | None]


def recording(name: str, change: Change = lambda chunk: chunk) -> Recording:
    whole = read_recording(RECORDINGS / f"{name}.rec.gz")
    return replace(
        whole,
        observations=tuple(
            replace(one, chunks=tuple(new for chunk in one.chunks if (new := change(chunk))))
            if isinstance(one, LogsObservation)
            else one
            for one in whole.observations
        ),
    )


def without_server_log(chunk: LogChunk) -> LogChunk | None:
    """Drop server.log, which stays empty after a rotation with a new file."""
    return None if chunk.log == "server" else chunk


def truncated(lost_bytes: int) -> Change:
    def change(chunk: LogChunk) -> LogChunk:
        if chunk.log == "server" and FIRST_CLIENT in chunk.data:
            return replace(chunk, data=b"", restarted=True, lost_bytes=lost_bytes)
        return chunk

    return change


async def played(whole: Recording, step: float = 1.0) -> list[Metrics]:
    player, moment, looks = Player(whole), whole.header.started_at, list[Metrics]()
    while moment < whole.ended_at:
        moment = min(moment + step, whole.ended_at)
        looks.append(await player.to(moment))
    return looks


def killed(look: Metrics) -> set[str]:
    """The kill commands of all findings."""
    offered = [each for one in findings(look.snapshot) for each in one.actions]
    return {each.command for each in offered if "kill" in each.command}


@pytest.mark.parametrize("change", [without_server_log, truncated(0), truncated(4096)])
async def test_clients_whose_lines_were_lost_are_not_stranded(change: Change) -> None:
    for look in await played(recording("tour", change)):
        names = {one.advice.name for one in findings(look.snapshot)}
        assert "stranded_client" not in names
        if any(server.state == "ACTIVE" for one in look.snapshot.daemons for server in one.servers):
            assert not look.value("mps_gpu_stranded_clients")


async def test_a_server_without_lines_is_no_ghost() -> None:
    looks = await played(recording("wait-served", without_server_log))
    assert not any(killed(look) for look in looks)
    assert looks[-1].value("mps_server_exits_total", cause="ghost_ended") == 0
    assert looks[-1].value("mps_server_exits_total", cause="requested") == 2


async def test_a_daemon_that_was_continued_is_not_to_be_killed() -> None:
    remedies = list[str]()
    for look in await played(recording("stopped")):
        process = look.snapshot.daemons[0].facts.process
        if process is not None and process.state == "S":
            remedies += killed(look)
    assert not [remedy for remedy in remedies if "kill -9" in remedy]


def without(*lines: bytes) -> Change:
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
    look = (await played(recording("two-daemons", without(b"Exiting", *NOTIFIED))))[-1]
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

    look = (await played(recording("two-daemons", change)))[-1]
    assert not look.value("mps_server_exits_total", cause="crashed")
    assert look.value("mps_server_exits_total", cause="requested")


async def test_a_daemon_that_was_asked_to_quit_and_whose_servers_ended_has_not_died() -> None:
    looks = await played(recording("wait-served", without(b"Exit with status 0")))
    (daemon,) = looks[-1].snapshot.daemons
    kinds = [one.kind for one in daemon.incidents]
    assert "daemon_quit" in kinds
    assert "daemon_died" not in kinds


async def test_whether_a_server_is_a_ghost_is_not_known_without_its_log() -> None:
    def unreadable(whole: Recording) -> Recording:
        def hide(one: LogsObservation) -> LogsObservation:
            states = tuple(
                replace(state, readable=state.log != "server" and state.readable)
                for state in one.states
            )
            chunks = tuple(chunk for chunk in one.chunks if chunk.log != "server")
            return replace(one, chunks=chunks, states=states)

        return replace(
            whole,
            observations=tuple(
                hide(one) if isinstance(one, LogsObservation) else one for one in whole.observations
            ),
        )

    looks = await played(unreadable(recording("deaf-server")))
    assert any(look.snapshot.daemons[0].servers for look in looks if look.snapshot.daemons)
    assert not any(value == 0.0 for look in looks for _, value in look.all("mps_server_ghost"))

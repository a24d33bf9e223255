"""Lines of a log that were lost: what they would have said is not known, and nobody is accused.

Recordings of real hosts, from which the log lines are taken that a rotation loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mps_exporter.diagnostics import findings
from mps_exporter.diagnostics.actions import actions
from mps_exporter.observations import LogChunk, LogsObservation
from mps_exporter.sources.recording import Recording, read
from tests.support.player import RECORDINGS, Metrics, Player

FIRST_CLIENT = b"PID: 810, Context ID: 0} connected"

Change = Callable[[LogChunk], LogChunk | None]


def recording(name: str, change: Change = lambda chunk: chunk) -> Recording:
    whole = read(RECORDINGS / f"{name}.rec.gz")
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
    """As after a rotation with a new file: the one that is read stays empty."""
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
    """Everything that is said to be killed at this moment, in words and as a command."""
    said = set[str]()
    for one in findings(look.snapshot):
        said |= {one.remedy} if "kill " in one.remedy else set()
        said |= {each.command for each in actions(one, look.snapshot) if "kill" in each.command}
    return said


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
        process = look.snapshot.daemons[0].facts.process  # type: ignore[union-attr]
        if process is not None and process.state == "S":
            remedies += killed(look)
    assert not [remedy for remedy in remedies if "kill -9" in remedy]

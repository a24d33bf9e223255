"""Playing recordings: the demo's chapters, jumps, and the viewer's clock."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.backend import Backend, advance
from mps_exporter.collector import Collector
from mps_exporter.commands.serve import FIRST_CHAPTER, built_in_playlist
from mps_exporter.flags import Settings
from mps_exporter.humanize import UserNames
from mps_exporter.observations import DaemonFacts, ProcfsObservation
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.sources.recording import read_recording
from mps_exporter.sources.replay_host import Playlist, ReplayHost
from mps_exporter.web.status_api import make_status, to_json
from testing.player import RECORDINGS
from testing.waiting import until_awaited

CHAPTERS = ["limits", "wait", "hand-over", "fault", "unfinished-work", "ghost", "crash"]


@pytest.fixture(scope="module")
def playlist() -> Playlist:
    return built_in_playlist()


async def moment_of(playlist: Playlist, position: float) -> Snapshot:
    """What is seen at a position of the playlist."""
    scene = playlist.scene_at(position)
    host = ReplayHost(playlist.recording(scene), end=scene.end)
    elapsed = scene.begin + position - scene.starts_at
    return await advance(host, Collector(host, Settings()), elapsed)


def headline(*snapshots: Snapshot) -> str:
    """What the page says of the last one, with the names of users that the others told."""
    names = UserNames()
    for snapshot in snapshots:
        names.update(snapshot)
    return str(make_status(snapshots[-1], None, names).headline.text)


def test_the_demo_has_the_chapters_that_are_documented(playlist: Playlist) -> None:
    assert [chapter.name for chapter in playlist.chapters] == CHAPTERS
    positions = [chapter.at_seconds for chapter in playlist.chapters]
    assert positions == sorted(set(positions))
    for chapter in playlist.chapters:
        assert playlist.chapter_at(chapter.at_seconds) is chapter


@pytest.mark.parametrize(
    ("chapter", "seconds", "shows"),
    [
        ("wait", 0, r"^Bob .*\b2 s behind alice's server 607"),
        ("hand-over", 4, r"\b1 client "),
        ("fault", 5, r"^Root's server 1171 is in FAULT"),
        ("unfinished-work", 15, r"^Process 2192 .*root's server 2178"),
        ("ghost", 10, r"^Bob's server 6811 was started for clients that had died"),
        ("crash", 4, r"^Bob's server 791 crashed"),
    ],
)
async def test_a_chapter_shows_what_it_is_called(
    playlist: Playlist, chapter: str, seconds: float, shows: str
) -> None:
    (begin,) = (one.at_seconds for one in playlist.chapters if one.name == chapter)
    opened = await moment_of(playlist, begin)
    assert re.search(shows, headline(opened, await moment_of(playlist, begin + seconds)))


def test_time_goes_on_after_a_recording_whose_scene_is_longer(playlist: Playlist) -> None:
    (scene,) = (one for one in playlist.scenes if one.path.name == "ending-jobs.rec.gz")
    recording = playlist.recording(scene)
    host = ReplayHost(recording, end=scene.end)
    host.hold(scene.end + 1)
    assert host.now() - recording.header.started_at == pytest.approx(scene.end)
    assert scene.end > recording.duration_seconds


def test_only_names_of_users_and_programs_are_replaced(playlist: Playlist) -> None:
    for scene in playlist.scenes:
        recorded, shown = read_recording(scene.path), playlist.recording(scene)
        assert shown.header == recorded.header
        names: dict[tuple[int | None, str], set[str]] = {}
        for before, after in zip(recorded.observations, shown.observations, strict=True):
            if not isinstance(before, ProcfsObservation):
                assert after == before
                continue
            assert isinstance(after, ProcfsObservation)
            for pid, facts in before.processes.items():
                names.setdefault((facts.uid, facts.name), set()).add(after.processes[pid].name)
            renamed = {
                pid: replace(
                    facts, name=before.processes[pid].name, user=before.processes[pid].user
                )
                for pid, facts in after.processes.items()
            }
            assert replace(after, processes=renamed) == before
        assert all(len(found) == 1 for found in names.values())
        assert not any(re.search(r"program-\d", name) for found in names.values() for name in found)


# ------------------------------------------------------------------------------- the player


@asynccontextmanager
async def played(playlist: Playlist, speed: float = 1.0) -> AsyncIterator[Backend]:
    service = Backend(Settings(replay_speed=speed), playlist)
    assert service.player is not None
    (begin,) = (one.at_seconds for one in playlist.chapters if one.name == FIRST_CHAPTER)
    await service.player.start(begin)
    running = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await service.close()


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, f"{path}.{key}")
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one, path)
    elif isinstance(value, float | int):
        yield path, float(value)


def check_that_moments_are_the_viewers(snapshot: Snapshot) -> None:
    status = make_status(snapshot)
    assert snapshot.recording is not None
    recorded = snapshot.recording.header.started_at
    document = json.loads(to_json(status))
    found = {path for path, one in numbers(document) if abs(one - recorded) < 100}
    assert found <= {".recording.recorded_from"}
    assert abs(status.taken_at - time.time()) < 3600
    assert all(one.at <= status.taken_at for one in status.incidents)


async def test_it_opens_at_the_wait_and_jumps_in_the_viewers_clock(playlist: Playlist) -> None:
    async with played(playlist) as service:
        snapshot = await service.collect(None, None)
        assert [wait.uid for daemon in snapshot.daemons for wait in daemon.waits] == [1002]
        assert snapshot.recording is not None
        assert snapshot.recording.chapter == FIRST_CHAPTER == "wait"
        assert service.player is not None
        assert not await service.player.jump("intermission")
        for chapter in (*reversed(CHAPTERS), "ghost"):
            assert await service.player.jump(chapter)
            snapshot = await service.collect(None, None)
            assert snapshot.recording is not None
            assert snapshot.recording.chapter == chapter
            assert snapshot.recording.names_replaced
            check_that_moments_are_the_viewers(snapshot)


async def test_scenes_follow_each_other_and_begin_again(playlist: Playlist) -> None:
    async with played(playlist, speed=50.0) as service:

        async def played_all() -> bool:
            recording = (await service.collect(None, None)).recording
            assert recording is not None
            return recording.loop > len(playlist.scenes) + 1

        await until_awaited(played_all)


async def test_only_what_happens_while_it_is_played_is_an_event(playlist: Playlist) -> None:
    async with played(playlist, speed=5.0) as service:
        events = asyncio.Queue[tuple[DaemonFacts, Incident]]()
        service.subscribe(lambda *one: events.put_nowait(one))
        assert service.player is not None
        before = time.time()
        await service.player.jump("crash")
        _, incident = await events.get()
        while incident.kind != "server_crashed":  # on a slow machine, of the chapter before
            assert incident.at >= before, "in the viewer's time"
            _, incident = await events.get()
        assert incident.at >= before


async def test_a_recording_of_ones_own_has_no_chapters() -> None:
    recording = read_recording(RECORDINGS / "one-client.rec.gz")
    service = Backend(Settings(), Playlist.of(recording))
    snapshot = await service.collect(None, None)
    await service.close()
    assert snapshot.recording is not None
    assert snapshot.recording.chapters == ()
    assert not snapshot.recording.names_replaced
    assert service.player is not None
    assert not await service.player.jump("wait")

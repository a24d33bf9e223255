from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import pytest

from mps_exporter.backend import CollectorBackend
from mps_exporter.config import Settings
from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.loops import Count, LoopCounters
from mps_exporter.metrics.render import Build, render
from mps_exporter.metrics.spec import Family, HistogramValue
from mps_exporter.sources.playlist import Playlist
from mps_exporter.sources.recording import read_recording
from testing.player import RECORDINGS, Player

LOOPS = 4
Counts = dict[tuple[str, tuple[str, ...]], Count]


def counts(families: Iterable[Family]) -> Counts:
    return {
        (family.spec.name, labels): value
        for family in families
        if family.spec.kind in {"counter", "histogram"}
        for labels, value in family.samples
        if isinstance(value, float | int | HistogramValue)
    }


def number(value: Count) -> float:
    return value.buckets[-1][1] if isinstance(value, HistogramValue) else value


async def moments(name: str) -> list[list[Family]]:
    """A recording's families, second by second."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    started_at = player.recording.header.started_at
    length = int(player.recording.duration_seconds)
    found = []
    for second in range(length + 1):
        metrics = await player.to(started_at + second)
        found.append(render(metrics.snapshot, Build("test", "", "")))
    return found


@pytest.mark.parametrize("name", ["server-killed", "three-users"])
async def test_over_loops_a_counter_rises_by_a_loops_increase_and_never_falls(name: str) -> None:
    played = await moments(name)
    first = counts(played[0])
    gained: Counts = {}
    for families in played:
        gained |= counts(families)
    loops = LoopCounters()
    shown: dict[tuple[str, tuple[str, ...]], float] = {}
    for loop in range(1, LOOPS + 1):
        loops.begin(loop, played[0])
        for families in played:
            for key, value in counts(loops.applied(loop, families)).items():
                assert number(value) >= shown.get(key, 0), f"{key} in loop {loop}"
                shown[key] = number(value)
    for key, last in gained.items():
        began = number(first[key]) if key in first else 0.0
        assert shown[key] - began == pytest.approx(LOOPS * (number(last) - began)), key
    assert any(number(last) > number(first.get(key, 0.0)) for key, last in gained.items())


async def test_one_loop_shows_the_recording_itself() -> None:
    played = await moments("server-killed")
    loops = LoopCounters()
    loops.begin(1, played[0])
    assert [loops.applied(1, families) for families in played] == played


async def test_the_last_moment_of_an_event_stays_known_in_the_next_loop() -> None:
    played = await moments("server-killed")
    loops = LoopCounters()
    loops.begin(1, played[0])
    ended = loops.applied(1, played[-1])
    loops.begin(2, played[0])
    name = "mps_server_last_exit_timestamp_seconds"
    (before,) = (family for family in ended if family.spec.name == name)
    (after,) = (family for family in loops.applied(2, played[0]) if family.spec.name == name)
    assert dict(before.samples).items() <= dict(after.samples).items()


async def test_a_page_of_the_loop_before_is_not_counted_twice() -> None:
    played = await moments("server-killed")
    loops = LoopCounters()
    loops.begin(1, played[0])
    ended = counts(loops.applied(1, played[-1]))
    loops.begin(2, played[0])
    assert counts(loops.applied(1, played[-1])) == ended


def test_a_loop_that_was_not_shown_adds_nothing() -> None:
    def energy(joules: float) -> list[Family]:
        return [Family(CATALOGUE["mps_gpu_energy_joules_total"], ((("0", "GPU-a"), joules),))]

    loops = LoopCounters()
    loops.begin(1, energy(100.0))
    loops.applied(1, energy(130.0))
    loops.begin(2, energy(100.0))
    loops.begin(3, energy(100.0))
    assert loops.applied(3, energy(100.0)) == energy(130.0)


async def test_a_served_replay_counts_on() -> None:
    """Through the service, over real loops: counters of its pages never fall, and go on."""
    recording = read_recording(RECORDINGS / "crash-loop.rec.gz")
    service = CollectorBackend(
        Settings(replay="crash-loop", replay_speed=20.0), Playlist.of(recording)
    )
    running = asyncio.create_task(service.run())
    shown: dict[str, float] = {}
    try:
        loop = 0
        while loop < LOOPS:
            snapshot = await service.collect(None, None)
            page = await service.expose(snapshot, TEXT_0_0_4, gzip=False)
            for line in page.decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("mps_") and "_total{" in name:
                    assert float(value) >= shown.get(name, 0.0), f"{line} in loop {loop}"
                    shown[name] = float(value)
            assert snapshot.recording is not None
            loop = snapshot.recording.loop
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await service.close()
    failed = [v for k, v in shown.items() if "server_exits" in k and '"start_failed"' in k]
    assert sum(failed) >= 6 * (LOOPS - 1)


async def test_an_older_page_that_is_rendered_later_does_not_fall() -> None:
    played = await moments("server-killed")
    loops = LoopCounters()
    loops.begin(1, played[0])
    newer = counts(loops.applied(1, played[-1]))
    older = counts(loops.applied(1, played[0]))
    assert older
    assert all(number(value) >= number(newer[key]) for key, value in older.items())

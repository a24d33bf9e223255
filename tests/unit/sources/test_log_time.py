"""Local stamps through changes of the clocks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from mps_exporter.observations import LogChunk
from mps_exporter.sources.log_follower import LogFollower
from mps_exporter.sources.log_tail import stamps_in
from testing.log_folder import own_logs, poll_all

PIPE = "/tmp/nvidia-mps"


@pytest.fixture(params=["Europe/Berlin", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ZoneInfo]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield ZoneInfo(request.param)
    monkeypatch.undo()
    time.tzset()


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def lines(zone: ZoneInfo, *moments: float) -> bytes:
    return "".join(
        f"[{datetime.fromtimestamp(at, zone):%Y-%m-%d %H:%M:%S.000} Control   400] NEW UI\n"
        for at in moments
    ).encode()


class Folder:
    """Logs that are written at their time, and read."""

    def __init__(self, folder: Path, zone: ZoneInfo, now: float) -> None:
        self.folder, self.zone, self.now = folder, zone, now
        self.tails = LogFollower(clock=lambda: self.now)

    def write(self, log: str, *moments: float) -> None:
        with (self.folder / f"{log}.log").open("ab") as file:
            file.write(lines(self.zone, *moments))
        os.utime(self.folder / f"{log}.log", (moments[-1], moments[-1]))

    def read(self, log: str) -> list[float]:
        """Give the moments of the lines that come."""
        found = []
        for _ in range(6):
            for chunk in poll_all(self.tails, own_logs(PIPE, self.folder)).chunks:
                found += _moments(chunk) if chunk.log == log else []
        return found


def _moments(chunk: LogChunk) -> list[float]:
    assert chunk.utc_offset_seconds is not None or not chunk.data
    return [stamp - (chunk.utc_offset_seconds or 0.0) for _, stamp in stamps_in(chunk.data)]


WINTER, SUMMER = moment("2026-03-01 12:00"), moment("2026-04-12 07:00")
LATE = moment("2026-11-20 07:00")


def test_a_history_from_before_a_change_keeps_its_times(tmp_path: Path, zone: ZoneInfo) -> None:
    folder = Folder(tmp_path, zone, now=LATE + 5.0)
    written = (WINTER, WINTER + 60.0, SUMMER, SUMMER + 5.0, LATE)
    folder.write("control", *written)
    assert folder.read("control") == list(written)


def test_a_log_that_is_idle_since_before_sets_no_zone_for_the_other(
    tmp_path: Path, zone: ZoneInfo
) -> None:
    folder = Folder(tmp_path, zone, now=SUMMER + 5.0)
    folder.write("control", WINTER, SUMMER)
    folder.write("server", WINTER)
    assert folder.read("control") == [WINTER, SUMMER]
    poll_all(folder.tails)
    folder.tails = LogFollower(clock=lambda: folder.now)
    assert folder.read("server") == [WINTER]


def back(zone: ZoneInfo) -> float:
    """When the clocks go back in the autumn of 2026."""
    return moment("2026-10-25 01:00" if zone.key == "Europe/Berlin" else "2026-11-01 06:00")


def test_the_hour_that_comes_twice_in_a_history(tmp_path: Path, zone: ZoneInfo) -> None:
    change = back(zone)
    written = tuple(change + minute * 60.0 for minute in (-90, -50, -10, -1, 1, 10, 50, 90))
    folder = Folder(tmp_path, zone, now=LATE)
    folder.write("control", *written)
    assert folder.read("control") == list(written)


def test_the_hour_that_comes_twice_while_following(tmp_path: Path, zone: ZoneInfo) -> None:
    """Also when nothing was written around the change: the file's own time tells."""
    change = back(zone)
    folder = Folder(tmp_path, zone, now=change - 7200.0)
    for minute in (-90, -50, -40, 30, 40, 90):
        folder.now = change + minute * 60.0
        folder.write("control", folder.now)
        assert folder.read("control") == [folder.now], minute


def test_a_first_line_that_comes_in_halves_has_its_offset(tmp_path: Path, zone: ZoneInfo) -> None:
    folder = Folder(tmp_path, zone, now=LATE)
    folder.read("control")
    data = lines(zone, LATE)
    log = tmp_path / "control.log"
    found: list[LogChunk] = []
    for part in (data[:40], data[40:]):
        with log.open("ab") as file:
            file.write(part)
        os.utime(log, (LATE + 900.5, LATE + 900.5 + 123.0))  # which shows no zone
        found += poll_all(folder.tails, own_logs(PIPE, tmp_path)).chunks
    assert found[-1].utc_offset_seconds is not None
    assert timedelta(seconds=found[-1].utc_offset_seconds) == zone.utcoffset(
        datetime.fromtimestamp(LATE, zone)
    )


def test_a_zone_of_its_own_is_one_offset(tmp_path: Path, zone: ZoneInfo) -> None:
    """A container's: its rules are not known here."""
    folder = Folder(tmp_path, ZoneInfo("Asia/Kathmandu"), now=SUMMER + 5.0)
    folder.write("control", WINTER, SUMMER)
    assert folder.read("control") == [WINTER, SUMMER]

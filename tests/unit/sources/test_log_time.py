"""Local stamps through changes of the clocks."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from mps_exporter.observations import LogChunk, LogsObservation
from mps_exporter.sources.log_tail import infer_zone, stamps_in
from testing.log_folder import PIPE, LogFolder, own_logs, poll_all


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


class Folder(LogFolder):
    """Logs that are written at their time, and read."""

    def __init__(self, folder: Path, zone: ZoneInfo, now: float) -> None:
        super().__init__(folder, now)
        self.zone = zone

    def add(self, log: str, *moments: float) -> None:
        self.write(log, lines(self.zone, *moments), mtime=moments[-1])

    def moments(self, log: str) -> list[float]:
        """Return the moments of the new lines."""
        return [moment for chunk in self.read(log) for moment in _moments(chunk)]

    def poll(self) -> LogsObservation:
        return poll_all(self.tails, own_logs(PIPE, self.folder))


def _moments(chunk: LogChunk) -> list[float]:
    assert chunk.utc_offset_seconds is not None
    return [stamp - chunk.utc_offset_seconds for _, stamp in stamps_in(chunk.data)]


WINTER, SUMMER = moment("2026-03-01 12:00"), moment("2026-04-12 07:00")
LATE = moment("2026-11-20 07:00")


def back(zone: ZoneInfo) -> float:
    """When the clocks go back in the autumn of 2026."""
    return moment("2026-10-25 01:00" if zone.key == "Europe/Berlin" else "2026-11-01 06:00")


def test_the_hour_that_comes_twice_in_a_history(tmp_path: Path, zone: ZoneInfo) -> None:
    change = back(zone)
    written = tuple(change + minute * 60.0 for minute in (-90, -50, -10, -1, 1, 10, 50, 90))
    folder = Folder(tmp_path, zone, now=LATE)
    folder.add("control", *written)
    assert folder.moments("control") == list(written)


def test_the_hour_that_comes_twice_while_following(tmp_path: Path, zone: ZoneInfo) -> None:
    """Also when nothing was written around the change: the file's own time tells."""
    change = back(zone)
    folder = Folder(tmp_path, zone, now=change - 7200.0)
    for minute in (-90, -50, -40, 30, 40, 90):
        folder.now = change + minute * 60.0
        folder.add("control", folder.now)
        assert folder.moments("control") == [folder.now], minute


def test_a_zone_of_its_own_is_one_offset(tmp_path: Path, zone: ZoneInfo) -> None:
    """A container's: its rules are not known here."""
    folder = Folder(tmp_path, ZoneInfo("Asia/Kathmandu"), now=SUMMER + 5.0)
    folder.add("control", WINTER, SUMMER)
    assert folder.moments("control") == [WINTER, SUMMER]
    assert infer_zone(SUMMER + 20 * 3600.0, SUMMER) is None, "the file's time is not the line's"

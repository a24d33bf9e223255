"""Which lines are history and which are new, however often a log is opened."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.log_folder import LogFolder, poll_all, state
from testing.mps_logs import at, script

START = "{} C630 Starting control daemon using socket /tmp/mps/control"
OLD = f"{START.format('00:01.000')}\n00:02.000 C630 Exit with status 0\n" + START.format(
    "00:03.000"
)
STARTED_AT = at("10:00")
NEWS = "11:00.000 C630 NEW UI"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LogFolder]:
    made = LogFolder(tmp_path / "log", now=STARTED_AT)
    made.folder.mkdir()
    yield made
    poll_all(made.tails)


def new_lines_appear(host: LogFolder) -> None:
    host.now = at("11:00")
    host.write("control", NEWS, mtime=at("11:00"))


@pytest.mark.parametrize("change", ["none", "copied", "truncated"])
@pytest.mark.parametrize("call", ["pread", "fstat"])
def test_after_a_failed_read_the_position_is_kept(
    host: LogFolder, monkeypatch: pytest.MonkeyPatch, call: str, change: str
) -> None:
    """If the file system was mounted again, the same file has other numbers."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    host.write("control", OLD, mtime=at("00:03"))
    assert [chunk.history for chunk in host.read("control")] == [True]
    log, copy = host.folder / "control.log", host.folder / "copy"
    shutil.copy(log, copy)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not state(host.poll(), "control").readable
    if change == "copied":
        copy.replace(log)
    if change == "truncated":
        os.truncate(log, 0)
    new_lines_appear(host)
    (chunk,) = host.read("control")
    assert (chunk.data, chunk.history) == (script(NEWS).control, False)
    assert chunk.restarted == (change == "truncated")


def test_in_a_log_that_appears_late_what_is_new_is_counted(host: LogFolder) -> None:
    host.read("control")
    host.write("control", OLD)
    new_lines_appear(host)
    old, new = host.read("control")
    assert (old.data, old.history) == (script(START.format("00:03.000")).control, True)
    assert (new.data, new.history) == (script(NEWS).control, False)


@pytest.mark.parametrize(("stamp", "history"), [("09:59.999", True), ("10:00.000", False)])
def test_a_line_of_the_millisecond_in_which_the_exporter_started_is_news(
    tmp_path: Path, stamp: str, history: bool
) -> None:
    """Its stamp is cut to milliseconds, so it lies before the start."""
    host = LogFolder(tmp_path, now=at("10:00") + 0.0007)
    host.read("control")
    host.write("control", f"{stamp} C630 NEW UI")
    assert [chunk.history for chunk in host.read("control")] == [history]
    poll_all(host.tails)


@pytest.mark.parametrize("found_again", [False, True])
def test_every_start_since_the_exporters_own_is_counted(host: LogFolder, found_again: bool) -> None:
    """A daemon that is found again is followed from its last start."""
    host.read("control")
    if found_again:
        poll_all(host.tails)
    host.now = at("12:00")
    last = START.format("12:00.000")
    starts = f"{START.format('11:00.000')}\n{last}"
    host.write("control", starts)
    (chunk,) = host.read("control")
    assert (chunk.data, chunk.history) == (script(last if found_again else starts).control, False)


def test_another_log_directory_is_judged_by_its_stamps(host: LogFolder, tmp_path: Path) -> None:
    host.write("control", OLD, mtime=at("00:03"))
    host.read("control")
    host.folder = tmp_path / "other"
    host.folder.mkdir()
    host.write("control", OLD.replace("630", "640"), mtime=at("00:03"))
    (chunk,) = host.read("control")
    assert (chunk.history, chunk.restarted) == (True, True)

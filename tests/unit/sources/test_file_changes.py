"""What the kernel tells of files that are open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mps_exporter.sources import file_changes
from mps_exporter.sources.file_changes import FileChanges


class Folder:
    """Two files, of which the first is watched."""

    def __init__(self, folder: Path) -> None:
        self.watched, self.other = folder / "watched", folder / "other"
        self.other.write_text("")
        self.watched.write_text("text")
        self.file = self.watched.open("rb")
        self.changes = FileChanges()
        assert self.changes.watch([self.file.fileno()])

    def append(self) -> None:
        with self.watched.open("a") as file:
            file.write("more")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.file.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.append(),
        lambda folder: folder.watched.write_text(""),
        lambda folder: folder.watched.rename(folder.watched.with_suffix(".1")),
        lambda folder: folder.other.rename(folder.watched),
        lambda folder: folder.watched.unlink(),
        lambda folder: folder.watched.chmod(0o640),
    ],
    ids=["written", "cut", "renamed", "replaced", "removed", "mode"],
)
def test_a_change_is_told_until_the_next_watch(
    folder: Folder, change: Callable[[Folder], object]
) -> None:
    assert not folder.changes.happened()
    change(folder)
    assert folder.changes.happened()
    assert folder.changes.happened()
    assert folder.changes.watch([folder.file.fileno()])
    assert not folder.changes.happened()


def test_reading_and_other_files_are_no_change(folder: Folder) -> None:
    folder.other.write_text("more")
    folder.file.read()
    assert not folder.changes.happened()


def test_a_file_that_is_written_to_often_is_told_of_once(folder: Folder) -> None:
    for _ in range(3):
        folder.append()
        folder.changes.happened()
    assert folder.changes.descriptor is not None
    with pytest.raises(BlockingIOError):
        os.read(folder.changes.descriptor, 4096)


def test_what_cannot_be_watched(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = 1 << 20
    assert not folder.changes.watch([folder.file.fileno(), closed])
    monkeypatch.setattr(file_changes, "_libc", NoneLeft())
    none = FileChanges()
    assert none.descriptor is None
    assert not none.watch([folder.file.fileno()])
    assert not none.happened()


class NoneLeft:
    """A kernel that gives a user no more of them."""

    def inotify_init1(self, _flags: int) -> int:
        return -1

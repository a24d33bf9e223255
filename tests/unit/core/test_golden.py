"""What the recordings show stays as it is, but for what a change says that it changes."""

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest

from mps_exporter.metrics import CATALOGUE
from mps_exporter.observations import LogChunk, LogsObservation
from mps_exporter.sources.recording import Recording, RecordingWriter, read_recording
from testing.golden import GOLDEN, TEXTS, golden_text, recording_of, recordings, shown
from testing.player import RECORDINGS, Metrics, Player

SHORT = 21_000
"""Bytes. Longer recordings take most of the time; only a debugger's name is of another kind."""

REPLACED = r"(?<![\w/])/[\w./@-]+|\[\d+\]|(?:program|GPU|MIG)-[0-9a-f-]+"


@pytest.mark.parametrize("name", recordings())
async def test_a_recording_shows_what_it_showed(name: str, tmp_path: Path) -> None:
    recording = recording_of(name)
    moments = await shown(recording)
    compare(name, golden_text(moments))
    file = RECORDINGS / f"{name}.rec.gz"
    if file.exists() and file.stat().st_size < SHORT:
        others = await shown(anonymised(recording, tmp_path))
        for at in list(moments)[2::2]:  # the middle and the end
            assert without_names(moments[at]) == without_names(others[at]), "anonymised"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_says_what_it_said(name: str) -> None:
    compare(name, TEXTS[name]())


def compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    before = path.read_text().splitlines() if path.exists() else []
    difference = list(unified_diff(before, text.splitlines(), "before", "now", n=0, lineterm=""))
    assert not difference, (
        "\n".join(difference[:60]) + f"\n{len(difference)} lines; to accept: make golden"
    )


def anonymised(recording: Recording, folder: Path) -> Recording:
    header = replace(recording.header, anonymised=True)
    with closing(RecordingWriter(folder / "x", header)) as writer:
        for observation in recording.observations:
            writer.add(observation)
    return replace(read_recording(folder / "x"), ended_at=recording.ended_at)


def without_names(values: Mapping[str, str]) -> list[str]:
    """Return what is shown, in an order without what an anonymised recording replaces."""
    text = "\n".join(f"{key} = {value}" for key, value in values.items())
    return sorted(re.sub(REPLACED, "*", text).splitlines())


def test_no_text_is_left_of_a_recording_that_is_gone() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted([*recordings(), *TEXTS])


def test_no_label_has_a_value_that_is_not_documented() -> None:
    text = "\n".join(path.read_text() for path in GOLDEN.glob("*.txt"))
    seen: dict[tuple[str, str], set[str]] = {}
    for name, labels in set(re.findall(r"^metric (\w+){(.+)} = ", text, re.MULTILINE)):
        for label, value in re.findall(r"(?:^|,)(\w+)=([^,]*)", labels):
            seen.setdefault((name, label), set()).add(value)
    for spec in CATALOGUE.values():
        for label, allowed in spec.values.items():
            found = seen.get((spec.name, label), set())
            assert found <= {*allowed, *([""] if spec.kind == "info" else [])}, (spec.name, label)


# ------------------------------------------------------------------------------ lost lines of logs


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

"""``mps-exporter demo``: serves recordings of a real host instead of this host."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from mps_exporter.commands.common import StartError, load_recording
from mps_exporter.commands.serve import Replay, clock, serve
from mps_exporter.config import Settings
from mps_exporter.sources.replay_host import Playlist, read_playlist
from mps_exporter.terminal import print_output

FIRST_CHAPTER = "wait"


async def demo(
    settings: Settings, *, recording: str | None, chapter: str | None, speed: float
) -> int:
    """Serve the metrics of a recording, or of the built-in ones, until told to stop."""
    settings = replace(settings, replay_speed=speed)
    if recording is not None:
        if chapter is not None:
            raise StartError("--chapter: only the built-in recordings have chapters")
        return await serve(settings, Replay(Playlist.of(load_recording(Path(recording))), 0.0))
    playlist = built_in_playlist()
    name = chapter or FIRST_CHAPTER
    position = next((one.at_seconds for one in playlist.chapters if one.name == name), None)
    if position is None:
        raise StartError(f"no chapter {name!r}: --list-chapters lists them")
    return await serve(settings, Replay(playlist, position))


def list_chapters() -> int:
    for chapter in built_in_playlist().chapters:
        print_output(f"{chapter.name:<16} {clock(chapter.at_seconds):>5}  {chapter.title}")
    return 0


def built_in_playlist() -> Playlist:
    """The recordings that come with the program."""
    return read_playlist(Path(str(resources.files("mps_exporter") / "recordings" / "demo.json")))

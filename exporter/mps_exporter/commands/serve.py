"""``mps-exporter serve`` and ``demo``: a collector, or a replay, behind the web server."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

import mps_exporter
from mps_exporter import humanize
from mps_exporter.backend import Backend, ReplayPlayer
from mps_exporter.commands import on_signals
from mps_exporter.flags import DEMO_LISTEN_ADDRESS, InvalidSettingError, Settings
from mps_exporter.logging import print_output, print_status
from mps_exporter.sources.recording import read_recording
from mps_exporter.sources.replay_host import Playlist, read_playlist
from mps_exporter.web import WEB_CONFIG
from mps_exporter.web.app import create_app
from mps_exporter.web.server import serve_app

WILDCARD_HOSTS = ("", "[::]", "0.0.0.0")  # noqa: S104 - compared with, not listened on

FIRST_CHAPTER = "wait"
MAX_HEADER_CHARACTERS = 500

_log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------- demo


async def demo(settings: Settings) -> int:
    """Serve the metrics of a recording, or of the built-in recordings, until stopped."""
    settings = replace(
        settings,
        replay=settings.demo_file,
        replay_speed=settings.demo_speed,
        web_listen_address=free_address(settings.web_listen_address),
    )
    if settings.demo_file is not None:
        if settings.demo_chapter is not None:
            raise InvalidSettingError("--chapter: only the built-in recordings have chapters")
        return await serve(settings)
    playlist = built_in_playlist()
    name = settings.demo_chapter or FIRST_CHAPTER
    position = next((one.at_seconds for one in playlist.chapters if one.name == name), None)
    if position is None:
        raise InvalidSettingError(f"no chapter {name!r}: --list-chapters lists them")
    return await serve(settings, playlist, position)


def free_address(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses, or a free one where the demo's default is taken."""
    for port in (9400, 0) if addresses == DEMO_LISTEN_ADDRESS else ():
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return (f"127.0.0.1:{probe.getsockname()[1]}",)
    return addresses


def list_chapters() -> int:
    for chapter in built_in_playlist().chapters:
        print_output(f"{chapter.name:<16} {clock(chapter.at_seconds):>5}  {chapter.title}")
    return 0


def built_in_playlist() -> Playlist:
    return read_playlist(Path(str(resources.files("mps_exporter") / "recordings" / "demo.json")))


# ---------------------------------------------------------------------------------- serve


async def serve(settings: Settings, playlist: Playlist | None = None, position: float = 0.0) -> int:
    """Serve the metrics of this host, or of a playlist from this position (seconds)."""
    if settings.replay is not None:
        playlist = Playlist.of(read_recording(Path(settings.replay)))
    gc.freeze()  # otherwise each full garbage collection takes 14 ms to scan the modules
    gc.set_threshold(5_000)  # fewer collections during a scrape
    backend = Backend(settings, playlist)
    player = backend.player
    if player is not None:
        await player.start(position)
    stop = asyncio.Event()
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
    app = create_app(backend)
    watch = app.get(WEB_CONFIG)
    note = "SIGHUP: the web configuration is checked every second; restart for other settings"
    # On a terminal, SIGHUP means that it has closed.
    on_signals(stop.set if sys.stderr.isatty() else partial(_log.info, note), signal.SIGHUP)
    work = asyncio.create_task(backend.run(), name="follow")
    first = asyncio.create_task(backend.collect(None, None), name="first collection")
    _log_start(settings, replay=player is not None)

    def listening(addresses: Sequence[str]) -> None:
        if player is not None:
            tls = watch is not None and watch.active.context is not None
            shown = _browse_addresses(addresses, settings.web_telemetry_path, tls=tls)
            _print_replay_notice(player, settings, shown)

    web = asyncio.create_task(serve_app(app, stop, on_listening=listening), name="web")
    try:
        # The program ends with the first of them: web by the stop event, work by a bug.
        done, _ = await asyncio.wait({web, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for other in (first, work, web):
            other.cancel()
        await asyncio.gather(first, work, web, return_exceptions=True)
        await backend.close()
    return 0


def _log_start(settings: Settings, *, replay: bool) -> None:
    addresses = ",".join(settings.web_listen_address)
    fields = {
        "version": mps_exporter.__version__,
        "listen": "the sockets of systemd" if settings.web_systemd_socket else addresses,
        "collectors": ",".join(settings.enabled_collectors()),
        "replay": settings.replay or ("demo" if replay else None),
    }
    _log.info("starting mps-exporter", extra={"fields": fields})


# --------------------------------------------------------------- messages about a replay


def _browse_addresses(addresses: Sequence[str], metrics: str, *, tls: bool) -> str:
    """Return the lines with the pages' URLs, or with the Unix socket if there is no other."""
    address = next((one for one in addresses if not one.startswith("unix:")), addresses[0])
    if address.startswith("unix:"):
        return f"  Socket       {address.removeprefix('unix:')}\n"
    host, _, port = address.rpartition(":")
    name = "localhost" if host in WILDCARD_HOSTS else host
    url = f"{'https' if tls else 'http'}://{name}:{port}"
    return f"  Status page  {url}/\n  Metrics      {url}{metrics}\n"


def _print_replay_notice(player: ReplayPlayer, settings: Settings, addresses_text: str) -> None:
    playlist = player.playlist
    seconds = playlist.duration_seconds / settings.replay_speed
    if playlist.chapters:
        names = ", ".join(chapter.name for chapter in playlist.chapters)
        what = (
            f"  Demo: recordings of a real host, not this one, in a loop of {seconds:.0f} s.\n"
            "  The names of users and programs are stand-ins; all else is as it was recorded.\n"
            f"  Chapters: {names} (mps-exporter demo --chapter=NAME)\n\n"
        )
    else:
        header = player.playing.recording.header
        scenario, machine, driver, recorded_at = (
            humanize.printable(text, MAX_HEADER_CHARACTERS)
            for text in (header.scenario, header.machine, header.driver_version, header.recorded_at)
        )
        what = (
            f"  A recording of a real host, not this one, in a loop of {seconds:.0f} s.\n"
            f"  {scenario}\n"
            f"  Recorded on {machine}, driver {driver}, {recorded_at}.\n\n"
        )
    print_status(f"\n{what}{addresses_text}\n  Ctrl-C ends it.\n\n")


def clock(seconds: float) -> str:
    """Return 75.3 as 1:15."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

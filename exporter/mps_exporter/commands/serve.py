"""``mps-exporter serve``: connects a collector and the web server, and runs them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mps_exporter
from mps_exporter import humanize
from mps_exporter.backend import CollectorBackend, build
from mps_exporter.commands.common import StartError, load_recording, on_signals
from mps_exporter.config import Settings
from mps_exporter.replay import ReplayPlayer
from mps_exporter.sources.recording import RecordingError
from mps_exporter.sources.replay_host import Playlist
from mps_exporter.terminal import print_status, show_progress
from mps_exporter.web.app import create_app
from mps_exporter.web.listen import ListenError
from mps_exporter.web.options import TLS_CONTEXT, WEB_CONFIG, WebOptions
from mps_exporter.web.server import serve_app
from mps_exporter.web.webconfig import WebConfigError

WILDCARD_HOSTS = ("", "[::]", "0.0.0.0")  # noqa: S104 - to tell a person where to look

MAX_HEADER_CHARACTERS = 500

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replay:
    """What is served instead of this host."""

    playlist: Playlist
    position: float
    """Where it begins, in seconds."""


async def serve(settings: Settings, replay: Replay | None = None) -> int:
    """Serve metrics until told to stop."""
    if settings.replay is not None:
        replay = Replay(Playlist.of(load_recording(Path(settings.replay))), 0.0)
    gc.freeze()  # else each full collection of garbage takes 14 ms to look at modules
    backend = CollectorBackend(settings, None if replay is None else replay.playlist)
    player = backend.player
    if player is not None and replay is not None:
        try:
            await player.start(replay.position)
        except RecordingError as error:
            raise StartError(str(error)) from error
    stop = asyncio.Event()
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
    options = WebOptions(
        listen_addresses=settings.web_listen_address,
        telemetry_path=settings.web_telemetry_path,
        config_file=settings.web_config_file,
        systemd_socket=settings.web_systemd_socket,
        max_requests=settings.web_max_requests,
        host=os.environ.get("NODE_NAME") or socket.gethostname(),
        version=mps_exporter.__version__,
        revision=build().revision,
    )
    try:
        jump = player.jump if player is not None and player.playlist.chapters else None
        app = create_app(backend, options, jump=jump)
    except WebConfigError as error:
        raise StartError(str(error)) from error
    watch = app.get(WEB_CONFIG)
    _install_sighup_handler(stop, None if watch is None else watch.check_files)
    work = asyncio.create_task(backend.run(), name="follow")
    first = asyncio.create_task(backend.collect(None, None), name="first collection")
    _log.info(
        "starting mps-exporter",
        extra={
            "fields": {
                "version": mps_exporter.__version__,
                "listen": "the sockets of systemd"
                if settings.web_systemd_socket
                else ",".join(settings.web_listen_address),
                "collectors": ",".join(settings.enabled_collectors()),
                "replay": settings.replay or ("demo" if replay is not None else None),
            }
        },
    )
    tls = TLS_CONTEXT in app
    progress: list[asyncio.Task[None]] = []

    def listening(addresses: Sequence[str]) -> None:
        if player is not None:
            addresses_text = _browse_addresses(addresses, settings.web_telemetry_path, tls=tls)
            _print_replay_notice(player, settings, addresses_text)
            progress.append(asyncio.create_task(_report_progress(player), name="progress"))

    web = asyncio.create_task(serve_app(app, options, stop, on_listening=listening), name="web")
    try:
        # The first of them to end, ends the program: web by the stop event, work by a bug.
        done, _ = await asyncio.wait({web, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except ListenError as error:
        raise StartError(str(error)) from error
    finally:
        tasks: list[asyncio.Task[Any]] = [work, first, web, *progress]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        show_progress("")
        await backend.close()
    return 0


def _install_sighup_handler(
    stop: asyncio.Event, check_files: Callable[[], Coroutine[None, None, None]] | None
) -> None:
    """SIGHUP: look at the web configuration and go on; a terminal sends it when it is closed."""
    # Asked now: of a terminal that is gone nobody can tell that it was one.
    on_terminal = sys.stderr.isatty()
    checks: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        if on_terminal:
            _log.info("the terminal is gone (SIGHUP): stopping")
            stop.set()
            return
        _log.info("SIGHUP: looking at the web configuration; other settings need a restart")
        if check_files is not None:
            task = asyncio.create_task(check_files(), name="look")
            checks.add(task)
            task.add_done_callback(checks.discard)

    on_signals(hang_up, signal.SIGHUP)


def _browse_addresses(addresses: Sequence[str], metrics: str, *, tls: bool) -> str:
    """Where to look, of the addresses that are listened on: those of a browser first."""
    address = next((one for one in addresses if not one.startswith("unix:")), addresses[0])
    if address.startswith("unix:"):
        return f"  Socket       {address.removeprefix('unix:')}\n"
    host, _, port = address.rpartition(":")
    name = "localhost" if host in WILDCARD_HOSTS else host
    address_text = f"{'https' if tls else 'http'}://{name}:{port}"
    return f"  Status page  {address_text}/\n  Metrics      {address_text}{metrics}\n"


def _print_replay_notice(player: ReplayPlayer, settings: Settings, addresses_text: str) -> None:
    """Say what is being replayed, and where to look."""
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
        header = player.header
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


PROGRESS_SECONDS = 0.5


async def _report_progress(player: ReplayPlayer) -> None:
    """Show on a terminal what is played, until cancelled."""
    while True:
        show_progress(_progress_text(player))
        await asyncio.sleep(PROGRESS_SECONDS)


def _progress_text(player: ReplayPlayer) -> str:
    """Return the position, the speed and the chapter that are played."""
    playlist = player.playlist
    position = player.position
    text = f"  {clock(position)} / {clock(playlist.duration_seconds)}  speed {player.speed:g}"
    chapter = playlist.chapter_at(position)
    return text if chapter is None else f"{text}  {chapter.name}: {chapter.title}"


def clock(seconds: float) -> str:
    """Return 75.3 as 1:15."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

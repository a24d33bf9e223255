"""``mps-exporter serve``: connects a collector and the web server, and runs them."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import mps_exporter
from mps_exporter import humanize
from mps_exporter.backend import CollectorBackend, build
from mps_exporter.commands.common import StartError, load_recording, on_signals
from mps_exporter.config import Settings
from mps_exporter.sources.recording import Recording
from mps_exporter.terminal import print_status
from mps_exporter.web.app import create_app
from mps_exporter.web.listen import ListenError
from mps_exporter.web.options import WebOptions
from mps_exporter.web.server import serve as serve_web
from mps_exporter.web.state import TLS_CONTEXT, WEB_CONFIG
from mps_exporter.web.webconfig import WebConfigError

WILDCARD_HOSTS = ("", "[::]", "0.0.0.0")  # noqa: S104 - to tell a person where to look

MAX_HEADER_CHARACTERS = 500

_log = logging.getLogger(__name__)


async def serve(settings: Settings, *, demo: bool = False) -> int:
    """Serve metrics until told to stop."""
    recording = None if settings.replay is None else load_recording(Path(settings.replay))
    gc.freeze()  # else each full collection of garbage takes 14 ms to look at modules
    backend = CollectorBackend(settings, recording)
    stop = asyncio.Event()
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
    options = WebOptions(
        listen_addresses=settings.web_listen_address,
        telemetry_path=settings.web_telemetry_path,
        config_file=settings.web_config_file,
        systemd_socket=settings.web_systemd_socket,
        max_requests=settings.web_max_requests,
        enable_debug=settings.web_enable_debug,
        version=mps_exporter.__version__,
        revision=build().revision,
    )
    try:
        app = create_app(backend, options)
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
                "replay": settings.replay,
            }
        },
    )
    tls = TLS_CONTEXT in app

    def listening(addresses: Sequence[str]) -> None:
        if recording is not None:
            addresses_text = _browse_addresses(addresses, settings.web_telemetry_path, tls=tls)
            _print_replay_notice(recording, settings, addresses_text, demo=demo)

    web = asyncio.create_task(serve_web(app, options, stop, on_listening=listening), name="web")
    try:
        # The first of them to end, ends the program: web by the stop event, work by a bug.
        done, _ = await asyncio.wait({web, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except ListenError as error:
        raise StartError(str(error)) from error
    finally:
        work.cancel()
        first.cancel()
        web.cancel()
        await asyncio.gather(work, first, web, return_exceptions=True)
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


def _print_replay_notice(
    recording: Recording, settings: Settings, addresses_text: str, *, demo: bool
) -> None:
    """Say what is being replayed, and where to look."""
    header = recording.header
    scenario, machine, driver, recorded_at = (
        humanize.printable(text, MAX_HEADER_CHARACTERS)
        for text in (
            header.scenario, header.machine, header.driver_version, header.recorded_at
        )
    )  # fmt: skip
    print_status(
        f"\n  {'Demo' if demo else 'Replay'}: a recording of a real host, not this one, in a loop "
        f"of {recording.duration_seconds / settings.replay_speed:.0f} s.\n"
        f"  {scenario}\n"
        f"  Recorded on {machine}, driver {driver}, {recorded_at}.\n\n"
        f"{addresses_text}\n"
        "  Ctrl-C ends it.\n\n"
    )

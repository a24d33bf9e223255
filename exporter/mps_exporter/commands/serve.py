"""Puts the parts together: a host, a collector, and the web side or a recording."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip as gzip_format
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, ProcessCollector

import mps_exporter
from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4, ContentFormat
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, render
from mps_exporter.observations import NvmlObservation, Observation
from mps_exporter.snapshot import Incident, RecordingInfo, Snapshot
from mps_exporter.sources.host import Host
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import Header, Recording, RecordingError, RecordingWriter, read
from mps_exporter.sources.replay_host import ReplayHost
from mps_exporter.terminal import print_output, print_status, supports_colour
from mps_exporter.web.backend import DebugReport, DebugSource
from mps_exporter.web.options import WebOptions

DOCTOR_PAUSE_SECONDS = 1.5
"""Between the doctor's two looks: one server must be this old before it is asked."""

REPLAY_STEP_SECONDS = 0.5
"""How closely a recording is gone through when only one moment of it is wanted."""

GZIP_LEVEL = 1
"""Twice as fast as the default level for pages hardly larger."""

MAX_QUEUED_INCIDENTS = 100
"""Incidents kept for a reader of the event stream who does not keep up; the oldest go first."""

WILDCARD_HOSTS = ("", "[::]", "0.0.0.0")  # noqa: S104 - to tell a person where to look

FLUSH_SECONDS = 2.0
"""A recorder that is killed loses no more than this."""

_log = logging.getLogger(__name__)


class StartError(Exception):
    """The program cannot do what it was asked to; the message says why and what to do."""


def build() -> Build:
    """This program's version."""
    revision = os.environ.get("MPS_EXPORTER_BUILD_REVISION", "")
    return Build(mps_exporter.__version__, revision, platform.python_version())


class Service:
    """What the web side asks (see mps_exporter.web.backend.Backend)."""

    def __init__(self, settings: Settings, recording: Recording | None = None) -> None:
        self._settings = settings
        self._recording = recording
        self._loop_number = 0
        self._encoder = Encoder()
        self._renderers = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._process = CollectorRegistry()
        if not settings.web_disable_exporter_metrics:
            ProcessCollector(registry=self._process)
        self._subscribers: set[asyncio.Queue[tuple[str, Incident]]] = set()
        self._ready = False
        self._restart()

    def _restart(self) -> None:
        """A fresh host and collector; a recording that is played again begins like a restart."""
        self._loop_number += 1
        self._host: Host = (
            LiveHost(self._settings)
            if self._recording is None
            else ReplayHost(self._recording, speed=self._settings.replay_speed)
        )
        self._collector = Collector(self._host, self._settings, on_incident=self._publish)

    # -- the collector's life

    async def run(self) -> None:
        """Follow the logs until cancelled; a recording begins again when it ends."""
        while True:
            host = self._host
            if isinstance(host, ReplayHost):
                follower = asyncio.create_task(self._collector.follow())
                await host.until_finished()
                follower.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await follower
                self._restart()
            else:
                await self._collector.follow()

    async def close(self) -> None:
        """Let go of everything."""
        await self._host.close()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    # -- what the web side asks

    @property
    def ready(self) -> bool:
        """The first collection is done."""
        return self._ready

    @property
    def enabled_collectors(self) -> tuple[str, ...]:
        """Names that collect[] may ask for."""
        return self._collector.enabled

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join the collection in flight."""
        snapshot = await self._collector.collect(timeout_seconds, collectors)
        self._ready = True
        if self._recording is None:
            return snapshot
        header = self._recording.header
        info = RecordingInfo(
            scenario=header.scenario,
            machine=header.machine,
            driver_version=header.driver_version,
            recorded_at=header.recorded_at,
            speed=self._settings.replay_speed,
            loop=self._loop_number,
        )
        return replace(snapshot, recording=info)

    def _wall(self) -> Callable[[float], float]:
        host = self._host
        return host.wall if isinstance(host, ReplayHost) else lambda moment: moment

    async def expose(self, snapshot: Snapshot, content_format: ContentFormat, gzip: bool) -> bytes:
        """Render the metrics on a thread of its own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._renderers, self._encode, snapshot, content_format, gzip, self._wall()
        )

    def _encode(
        self,
        snapshot: Snapshot,
        content_format: ContentFormat,
        gzip: bool,
        wall: Callable[[float], float],
    ) -> bytes:
        families = render(snapshot, build(), wall=wall)
        own: list[Metric] = list(self._process.collect())
        page = self._encoder.encode(families, own, content_format)
        return gzip_format.compress(page, GZIP_LEVEL, mtime=0) if gzip else page

    def _publish(self, daemon: str, incident: Incident) -> None:
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait((daemon, incident))

    async def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        """(daemon, incident) from now on, as they are found."""
        queue: asyncio.Queue[tuple[str, Incident]] = asyncio.Queue(MAX_QUEUED_INCIDENTS)
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    async def debug(self, collectors: frozenset[str] | None) -> DebugReport:
        """One collection, with what each source read and said."""
        from mps_exporter.sources.recording import as_json

        seen: list[Observation] = []
        lines = _LogCapture()
        logger = logging.getLogger("mps_exporter")
        logger.addHandler(lines)
        self._collector.add_listener(seen.append)
        began = time.monotonic()
        try:
            snapshot = await self.collect(None, collectors)
        finally:
            self._collector.remove_listener(seen.append)
            logger.removeHandler(lines)
        page = await self.expose(snapshot, TEXT_0_0_4, gzip=False)
        raw: dict[str, list[tuple[str, str]]] = {}
        for observation in seen:
            source, text = as_json(observation)
            raw.setdefault(source, []).append((source, text))
        names = {"process": "procfs"}
        return DebugReport(
            taken_at=snapshot.taken_at,
            duration_seconds=time.monotonic() - began,
            sources=tuple(
                DebugSource(
                    name=result.name,
                    success=result.success,
                    duration_seconds=result.duration_seconds,
                    error=result.error,
                    log=tuple(lines.lines) if result.error else (),
                    raw=tuple(raw.get(names.get(result.name, result.name), ())),
                )
                for result in snapshot.collectors
            ),
            metrics=page.decode(),
        )


class _LogCapture(logging.Handler):
    """Keeps log lines for the debug page."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def _load(settings: Settings) -> Recording | None:
    return None if settings.replay is None else _load_file(Path(settings.replay))


def _load_file(path: Path) -> Recording:
    try:
        return read(path)
    except RecordingError as error:
        raise StartError(str(error)) from error


async def serve(settings: Settings, *, demo: bool = False) -> int:
    """Serve metrics until told to stop."""
    # Imported late: recording needs no web side.
    from mps_exporter.web.app import create_app
    from mps_exporter.web.listen import ListenError
    from mps_exporter.web.server import serve as serve_web
    from mps_exporter.web.state import TLS_CONTEXT, WEB_CONFIG
    from mps_exporter.web.webconfig import WebConfigError

    recording = _load(settings)
    gc.freeze()  # else each full collection of garbage takes 14 ms to look at modules
    service = Service(settings, recording)
    stop = asyncio.Event()
    _on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
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
        app = create_app(service, options)
    except WebConfigError as error:
        raise StartError(str(error)) from error
    watch = app.get(WEB_CONFIG)
    _install_sighup_handler(stop, None if watch is None else watch.check_files)
    work = asyncio.create_task(service.run(), name="follow")
    first = asyncio.create_task(service.collect(None, None), name="first collection")
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
        await service.close()
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

    _on_signals(hang_up, signal.SIGHUP)


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
    print_status(
        f"\n  {'Demo' if demo else 'Replay'}: a recording of a real host, not this one, in a loop "
        f"of {recording.duration_seconds / settings.replay_speed:.0f} s.\n"
        f"  {header.scenario}\n"
        f"  Recorded on {header.machine}, driver {header.driver_version}, {header.recorded_at}.\n\n"
        f"{addresses_text}\n"
        "  Ctrl-C ends it.\n\n"
    )


async def diagnose(
    settings: Settings, *, as_json: bool, recording: Path | None, at_seconds: float | None
) -> int:
    """Look at the host once and print what is found; gives the exit status."""
    from mps_exporter.commands import doctor

    if recording is None:
        snapshot = await _collect_twice(settings)
    else:
        snapshot = await _collect_from_recording(settings, recording, at_seconds)
    paint = doctor.coloured if supports_colour(sys.stdout, os.environ) else doctor.plain
    lines = doctor.report(snapshot, paint)
    try:
        print_output(doctor.as_json(snapshot) if as_json else "\n".join(lines))
    except OSError as error:
        raise StartError(f"cannot print what was found: {error.strerror}") from error
    return doctor.exit_status(snapshot)


async def _collect_twice(settings: Settings) -> Snapshot:
    """Look twice: the second look is one at a host that is known.

    By then a server is old enough to be asked, and the GPUs' activity has an interval to be of.
    """
    host = LiveHost(replace(settings, mps_min_query_interval=0.0))
    collector = Collector(host, settings)
    try:
        await collector.collect()
        await asyncio.sleep(DOCTOR_PAUSE_SECONDS)
        return await collector.collect()
    finally:
        await host.close()


async def _collect_from_recording(
    settings: Settings, path: Path, at_seconds: float | None
) -> Snapshot:
    recording = _load_file(path)
    length = recording.duration_seconds
    if at_seconds is not None and at_seconds > length:
        raise StartError(f"--at: {path} ends {length:.1f} s after its start")
    moments = count(0.0, REPLAY_STEP_SECONDS)
    end = length if at_seconds is None else at_seconds
    elapsed = 0.0
    host = ReplayHost(recording, clock=lambda: elapsed)
    collector = Collector(host, settings)
    for moment in moments:
        elapsed = min(moment, end)
        await collector.poll_logs()
        await collector.watch_processes()
        snapshot = await collector.collect()
        if moment >= end:
            return snapshot
    raise AssertionError("unreachable: count() does not end")


async def record(
    settings: Settings,
    *,
    path: Path,
    duration_seconds: float,
    interval_seconds: float,
    anonymise: bool,
    scenario: str,
) -> int:
    """Write what this host's sources read to a file."""
    stop = asyncio.Event()
    # A terminal that is closed (SIGHUP) ends a recording like Ctrl-C: what there is, is kept.
    _on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    host = LiveHost(settings)
    try:
        gpus = await host.read_gpus(settings.collector_timeout) if settings.collector_nvml else None
        header = Header(
            scenario=scenario or "no description given",
            machine=_machine(gpus, anonymise=anonymise),
            driver_version=(gpus.driver_version if gpus else None) or "unknown",
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            started_at=host.now(),
            exporter_version=mps_exporter.__version__,
            anonymised=anonymise,
        )
        writer = _writer(path, header)
        collector = Collector(host, settings, on_observation=writer.add)
        tasks = [
            asyncio.create_task(collector.follow()),
            asyncio.create_task(_flush_periodically(writer, stop)),
        ]
        end = time.monotonic() + duration_seconds
        try:
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                _progress(f"recording to {path}: {left:.0f} s left, Ctrl-C ends it now")
                await collector.collect()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(interval_seconds, left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
    finally:
        await host.close()
    _progress("")
    if writer.failure is not None:
        raise StartError(
            f"cannot write {path}: {writer.failure.strerror}; what was written until then can be "
            "read"
        )
    print_status(
        f"Recorded {path} ({path.stat().st_size} bytes). "
        f"Look at it with: mps-exporter demo {path}\n"
    )
    return 0


async def _flush_periodically(writer: RecordingWriter, stop: asyncio.Event) -> None:
    """Bring what was recorded to the file, again and again; stop when that fails."""
    while writer.failure is None:
        await asyncio.sleep(FLUSH_SECONDS)
        writer.flush()
    stop.set()


def _on_signals(action: Callable[[], object], *signals: signal.Signals) -> None:
    for received in signals:
        # nohup(1) has SIGHUP ignored, and means it. A shell that has SIGINT ignored, for what it
        # runs in the background, only keeps Ctrl-C for itself.
        if received is signal.SIGHUP and signal.getsignal(received) is signal.SIG_IGN:
            continue
        asyncio.get_running_loop().add_signal_handler(received, action)


def _writer(path: Path, header: Header) -> RecordingWriter:
    try:
        return RecordingWriter(path, header)
    except RecordingError as error:
        raise StartError(str(error)) from error


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print_status(f"\r\033[K{text}")


def _machine(gpus: NvmlObservation | None, *, anonymise: bool) -> str:
    names = [gpu.name or "GPU" for gpu in gpus.gpus] if gpus is not None else []
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    address_text = f"Linux {platform.release()}"
    if not anonymise:
        address_text = f"{socket.gethostname()}, {address_text}"
    return f"{counts or 'no GPU'}, {address_text}"

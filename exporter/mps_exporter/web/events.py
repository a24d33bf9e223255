"""/api/v1/events: incidents as they happen, as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from aiohttp import web

from mps_exporter.humanize import UserNames
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.web.backend import Backend
from mps_exporter.web.guard import Limiter, LimitExceededError
from mps_exporter.web.history import History
from mps_exporter.web.options import BACKEND, OPTIONS, busy_response
from mps_exporter.web.status_api import incident_view, to_json

REPLAYED = 256
"""Events that are kept for those who lost their connection."""
QUEUED = 64
"""Events that a slow reader may be behind; beyond, it loses the oldest and is told so."""
KEEP_ALIVE_SECONDS = 15.0
RETRY_MILLISECONDS = 3000

ServerSentEvent = tuple[int, bytes]

_log = logging.getLogger(__name__)


class Stream:
    """One reader's queue."""

    def __init__(self, missed: Iterable[ServerSentEvent] = ()) -> None:
        self._events: deque[ServerSentEvent] = deque(missed)
        self._room = QUEUED + len(self._events)
        """What was missed before is no fault of this reader: it is sent whole."""
        self._lost = 0
        self._news = asyncio.Event()
        if self._events:
            self._news.set()
        self._closed = False

    def put(self, event: ServerSentEvent) -> None:
        """Add an event; the oldest gives way."""
        if len(self._events) >= self._room:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def take(self) -> bytes | None:
        """All that has come since; a comment when nothing has; None at the end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), KEEP_ALIVE_SECONDS)
        self._news.clear()
        if self._closed:
            return None
        lost, self._lost = self._lost, 0
        parts = [f"event: lost\ndata: {lost}\n\n".encode()] if lost else []
        parts += [event for _, event in self._events]
        self._events.clear()
        self._room = QUEUED
        return b"".join(parts) or b": still here\n\n"


class Events:
    """Follows the backend's incidents and hands them to every reader."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(4)
        """Tells this run's numbers from those of another."""
        self._number = 0
        self._kept: deque[ServerSentEvent] = deque(maxlen=REPLAYED)
        self.streams: set[Stream] = set()
        self.user_names = UserNames()
        self.history = History()
        self._noted: Snapshot | None = None
        self.last_at = 0.0
        """When the last incident came, by the clock of the event loop."""

    def note(self, snapshot: Snapshot) -> None:
        """Remember of a collection what outlives it."""
        if snapshot is not self._noted:  # scrapes at the same moment share one
            self._noted = snapshot
            self.user_names.update(snapshot)
            self.history.add(snapshot)

    async def publish_incidents(self, backend: Backend) -> None:
        async for daemon, incident in backend.subscribe():
            self.add(daemon, incident)

    def add(self, daemon: str, incident: Incident) -> None:
        self.last_at = asyncio.get_running_loop().time()
        self._number += 1
        known = self._noted.daemons if self._noted is not None else ()
        limited = any(one.limited for one in known if one.pipe_directory == daemon)
        view = incident_view(daemon, incident, self.user_names, limited=limited)
        data = to_json(view)
        event = (
            self._number,
            f"id: {self._run}-{self._number}\nevent: incident\ndata: {data}\n\n".encode(),
        )
        self._kept.append(event)
        for stream in self.streams:
            stream.put(event)

    def missed(self, last_id: str) -> list[ServerSentEvent]:
        """What a reader who knows ``last_id`` has not seen, as far as it is kept.

        Who names an event of another run of the exporter gets all that this one has.
        """
        run, _, number = last_id.partition("-")
        if run != self._run or not (number.isascii() and number.isdecimal()):
            return list(self._kept)
        return [event for event in self._kept if event[0] > int(number[:12])]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


EVENTS = web.AppKey[Events]("EVENTS")
STREAM_LIMITER = web.AppKey[Limiter]("READERS")

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


async def events(request: web.Request) -> web.StreamResponse:
    """Stream until the reader or the program goes."""
    if request.method == "HEAD":
        return web.Response(headers=_HEADERS)
    try:
        async with request.app[STREAM_LIMITER].place(request.remote):
            return await _stream(request, request.app[EVENTS])
    except LimitExceededError:
        limit = request.app[OPTIONS].max_event_streams
        return busy_response(f"{limit} readers already", retry_after=30)


async def _stream(request: web.Request, hub: Events) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEADERS)
    last_id = request.headers.get("Last-Event-ID")
    stream = Stream(() if last_id is None else hub.missed(last_id))
    hub.streams.add(stream)
    try:
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MILLISECONDS}\n\n".encode())
        while (part := await stream.take()) is not None:
            await response.write(part)
    except ConnectionError:
        pass  # the reader went away
    finally:
        hub.streams.discard(stream)
    return response


async def run_event_hub(app: web.Application) -> AsyncIterator[None]:
    """Follow the backend for as long as the application runs."""
    task = asyncio.create_task(app[EVENTS].publish_incidents(app[BACKEND]), name="events")
    task.add_done_callback(_log_failure)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("no more events will be streamed", exc_info=task.exception())


async def close_streams(app: web.Application) -> None:
    """The program stops: let no reader hold it up."""
    app[EVENTS].close()

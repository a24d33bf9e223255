"""/api/v1/events: incidents as server-sent events."""

import asyncio
import secrets
from collections import deque
from heapq import merge

from aiohttp import web

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.humanize import UserNames
from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.web.guard import Limiter
from mps_exporter.web.status_api import History, incident_view, to_json


class Stream:
    """The queue of one reader."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(policy.MAX_QUEUED_EVENTS)
        self._lost = 0

    def put(self, event: bytes | None, *, limited: bool = False) -> None:
        """Add an event or None, the end. If full drop the oldest; if half full a `limited` one."""
        if limited and 2 * self._events.qsize() >= policy.MAX_QUEUED_EVENTS:
            self._lost += 1  # the other half is for the node's daemons
            return
        if self._events.full():
            self._events.get_nowait()
            self._lost += 1
        self._events.put_nowait(event)

    async def take(self) -> bytes | None:
        """Return the next event, or a comment after a while without events. None at the end."""
        try:
            event = await asyncio.wait_for(self._events.get(), policy.KEEP_ALIVE_INTERVAL_SECONDS)
        except TimeoutError:
            return b": still here\n\n"
        if event is None or not self._lost:
            return event
        lost, self._lost = self._lost, 0
        return f"event: lost\ndata: {lost}\n\n".encode() + event


class Events:
    """Distributes incidents to the readers, and remembers facts from earlier collections."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(4)  # Prefix of this run's event IDs.
        self._number = 0
        self._past = [deque[tuple[int, bytes]](maxlen=policy.REPLAYED_EVENTS) for _ in range(2)]
        """Past events: those of the node's daemons, then those of ordinary users' daemons."""
        self.streams: set[Stream] = set()
        self.user_names = UserNames()
        self.history = History()

    def note(self, snapshot: Snapshot) -> None:
        """Record the user names and the history of a collection."""
        self.user_names.update(snapshot)
        self.history.add(snapshot)

    def add(self, daemon: DaemonFacts, incident: Incident) -> None:
        self._number += 1
        data = to_json(incident_view(daemon, incident, self.user_names))
        event = f"id: {self._run}-{self._number}\nevent: incident\ndata: {data}\n\n".encode()
        self._past[daemon.limited].append((self._number, event))
        for stream in self.streams:
            stream.put(event, limited=daemon.limited)

    def after(self, last_id: str) -> bytes:
        """Return the past events after ``last_id``; all if this run did not send that ID."""
        run, _, number = last_id.partition("-")
        known = run == self._run and number.isascii() and number.isdecimal()
        last = int(number[:12]) if known else 0
        return b"".join(event for number, event in merge(*self._past) if number > last)


EVENTS = web.AppKey[Events]("EVENTS")
STREAM_LIMITER = web.AppKey[Limiter]("STREAMS")

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


async def events(request: web.Request) -> web.StreamResponse:
    """Stream incidents until the reader or the program exits."""
    if request.method == "HEAD":
        return web.Response(headers=_STREAM_HEADERS)
    async with request.app[STREAM_LIMITER].slot(request.remote):
        return await _stream(request, request.app[EVENTS])


async def _stream(request: web.Request, hub: Events) -> web.StreamResponse:
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    last_id = request.headers.get("Last-Event-ID")
    missed = b"" if last_id is None else hub.after(last_id)
    stream = Stream()
    hub.streams.add(stream)
    try:
        await response.prepare(request)
        await response.write(f"retry: {policy.RECONNECT_MILLISECONDS}\n\n".encode() + missed)
        while (part := await stream.take()) is not None:
            await response.write(part)
    except ConnectionError:
        pass  # the reader has disconnected
    finally:
        hub.streams.discard(stream)
    return response


async def close_streams(app: web.Application) -> None:
    """End the event streams, which would delay the shutdown."""
    for stream in app[EVENTS].streams:
        stream.put(None)

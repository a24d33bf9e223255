import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import ClientResponse

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Incident
from mps_exporter.web import events
from testing import snapshots as hosts
from testing.waiting import PATIENCE_SECONDS
from tests.unit.web.conftest import MakeClient
from tests.unit.web.fakes import ROOTS, FakeBackend

CRASH = Incident(at=1.0, kind="server_crashed", server_pid=634, uid=1001, pids=(641,))
ALICES = DaemonFacts("/tmp/alice", "/tmp/alice", owner_uid=2001, limited=True)


async def event(answer: ClientResponse) -> dict[str, str]:
    """The next event; comments are passed over."""
    fields: dict[str, str] = {}
    while True:
        read = await asyncio.wait_for(answer.content.readline(), PATIENCE_SECONDS)
        line = read.decode().rstrip("\n")
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            return fields


async def test_incidents_are_streamed(backend: FakeBackend, make_client: MakeClient) -> None:
    backend.snapshot = hosts.healthy()
    client = await make_client()
    await client.get("/metrics")  # where the names of users come from
    async with client.get("/api/v1/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert await answer.content.readline() == b"retry: 3000\n"
        backend.publish(ROOTS, CRASH)
        got = await event(answer)

    assert got["event"] == "incident"
    data = json.loads(got["data"])
    assert data["text"] == "Alice's server 634 crashed; 1 client was lost (process 641)."
    assert data["daemon"] == "/tmp/nvidia-mps"


async def test_an_ordinary_users_crash_is_a_warning_before_any_scrape_shows_the_daemon(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    client = await make_client()
    async with client.get("/api/v1/events") as answer:
        for daemon, severity in ((ALICES, "warning"), (ROOTS, "critical")):
            backend.publish(daemon, CRASH)
            assert json.loads((await event(answer))["data"])["severity"] == severity


async def test_missed_events_are_sent_after_a_reconnect(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    client = await make_client()
    async with client.get("/api/v1/events") as answer:
        backend.publish(replace(ROOTS, pipe_directory="a"), CRASH)
        first = await event(answer)
    backend.publish(replace(ROOTS, pipe_directory="b"), CRASH)
    async with client.get("/api/v1/events", headers={"Last-Event-ID": first["id"]}) as answer:
        assert json.loads((await event(answer))["data"])["daemon"] == "b"
    for other_user in ("other-1", "", "x", first["id"].partition("-")[0] + "-\u00b2"):
        async with client.get("/api/v1/events", headers={"Last-Event-ID": other_user}) as answer:
            assert json.loads((await event(answer))["data"])["daemon"] == "a"


async def test_an_idle_stream_stays_open(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "KEEP_ALIVE_INTERVAL_SECONDS", 0.05)
    client = await make_client()
    async with client.get("/api/v1/events") as answer:
        await answer.content.readuntil(b"\n\n")
        assert await answer.content.readuntil(b"\n\n") == b": still here\n\n"


async def test_a_slow_reader_loses_the_oldest() -> None:
    stream = events.Stream()
    for number in range(policy.MAX_QUEUED_EVENTS + 3):
        stream.put(f"data: {number}\n\n".encode())

    assert await stream.take() == b"event: lost\ndata: 3\n\ndata: 3\n\n"
    assert await stream.take() == b"data: 4\n\n"


async def test_a_reconnected_reader_gets_all_past_events(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    client = await make_client()
    hub = client.server.app[events.EVENTS]
    for number in range(policy.REPLAYED_EVENTS + 10):
        hub.add(replace(ROOTS, pipe_directory=str(number)), CRASH)
    async with client.get("/api/v1/events", headers={"Last-Event-ID": "other-1"}) as answer:
        got = [await event(answer) for _ in range(policy.REPLAYED_EVENTS)]

    assert {one["event"] for one in got} == {"incident"}  # and none "lost"
    assert [json.loads(one["data"])["daemon"] for one in got] == [
        str(number) for number in range(10, policy.REPLAYED_EVENTS + 10)
    ]


async def test_an_ordinary_users_incidents_replace_none_of_roots() -> None:
    hub, stream = events.Events(), events.Stream()
    hub.streams.add(stream)
    hub.add(ROOTS, CRASH)
    for _ in range(policy.REPLAYED_EVENTS + policy.MAX_QUEUED_EVENTS):
        hub.add(ALICES, CRASH)
    hub.add(ROOTS, CRASH)
    past = hub.after("").split(b"\n\n")[:-1]
    assert len(past) == 2 + policy.REPLAYED_EVENTS
    assert [number for number, one in enumerate(past) if b"nvidia-mps" in one] == [0, 257]
    waiting = [await stream.take() or b"" for _ in range(policy.MAX_QUEUED_EVENTS // 2 + 1)]
    assert waiting[0].startswith(b"event: lost")
    assert all(past[number] in waiting[number] for number in (0, -1))


async def test_one_address_leaves_streams_for_others(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_EVENT_STREAMS", 4)
    client = await make_client()
    places = client.server.app[events.STREAM_LIMITER]
    async with (
        client.get("/api/v1/events"),
        client.get("/api/v1/events"),
        client.get("/api/v1/events"),
    ):
        fourth = await client.get("/api/v1/events")
        assert fourth.status == 503
        assert "one address" in await fourth.text()
        assert fourth.headers["Retry-After"] == "30"
        async with places.slot("192.0.2.1"):
            pass

"""The server on real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout, UnixConnector

from exporter.web.listen import ListenError
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import connected, served


async def test_all_addresses_answer(tmp_path: Path) -> None:
    path = tmp_path / "s"
    addresses = ("127.0.0.1:0", ":0", f"unix:{path}")
    async with served(FakeBackend(), listen_addresses=addresses) as (shown, _):
        port = shown[1].rpartition(":")[2]
        async with ClientSession() as session:
            for address in (shown[0], f"127.0.0.1:{port}"):
                async with session.get(f"http://{address}/metrics") as answer:
                    assert await answer.text() == "mps_control_up 1\n"
        async with (
            ClientSession(connector=UnixConnector(str(path))) as session,
            session.get("http://exporter/metrics") as answer,
        ):
            assert answer.status == 200
    assert not path.exists()


async def test_an_answer_under_way_is_finished_before_the_end() -> None:
    backend = FakeBackend(seconds=0.5)
    async with served(backend) as (shown, stop), ClientSession() as session:
        scrape = asyncio.create_task(session.get(f"http://{shown[0]}/metrics"))
        while not backend.collections:
            await asyncio.sleep(0.01)
        stop.set()
        answer = await scrape
        assert answer.status == 200
        assert await answer.text() == "mps_control_up 1\n"


async def test_the_end_does_not_wait_for_idle_connections() -> None:
    async with served(FakeBackend()) as (shown, stop), ClientSession() as session:
        async with session.get(f"http://{shown[0]}/-/healthy") as answer:
            await answer.read()
        async with connected(shown[0]):
            before = asyncio.get_running_loop().time()
            stop.set()
    assert asyncio.get_running_loop().time() - before < 2


async def test_a_taken_address_is_fatal() -> None:
    async with served(FakeBackend()) as (shown, _):
        with pytest.raises(ListenError, match="in use"):
            async with served(FakeBackend(), listen_addresses=(shown[0],)):
                pass


async def test_connections_are_kept_between_scrapes() -> None:
    async with served(FakeBackend()) as (shown, _), connected(shown[0]) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET /-/healthy HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(8) == b"Healthy\n"


async def test_a_slow_request_is_cut() -> None:
    timeout = ClientTimeout(total=5)
    async with served(FakeBackend(), request_timeout=0.5) as (shown, _):
        async with connected(shown[0]) as (reader, writer):
            writer.write(b"GET /metr")
            before = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            assert asyncio.get_running_loop().time() - before < 3
        async with (
            ClientSession(timeout=timeout) as session,
            session.get(f"http://{shown[0]}/metrics") as answer,
        ):
            assert answer.status == 200

"""The server on real sockets."""

import asyncio
import errno
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout, UnixConnector

from testing.waiting import PATIENCE_SECONDS, until, until_awaited
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import connected, served

FOR_EVER = 10 * PATIENCE_SECONDS  # Longer than any test: a test that waits for it fails.


async def refuses(address: str) -> bool:
    """Return whether no server listens there any more."""
    try:
        async with connected(address):
            return False
    except OSError:
        return True


async def test_all_addresses_answer(tmp_path: Path) -> None:
    path = tmp_path / "s"
    addresses = ("127.0.0.1:0", ":0", f"unix:{path}")
    async with served(FakeBackend(), web_listen_address=addresses) as (shown, _):
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


async def test_a_response_in_progress_is_finished_before_the_end() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    options = {"DRAIN_TIMEOUT_SECONDS": PATIENCE_SECONDS}
    async with served(backend, **options) as (shown, stop), ClientSession() as session:
        scrape = asyncio.create_task(session.get(f"http://{shown[0]}/metrics"))
        await until(lambda: backend.collections)
        stop.set()
        await until_awaited(lambda: refuses(shown[0]))  # it has begun to end
        assert backend.gate is not None
        backend.gate.set()
        answer = await scrape
        assert answer.status == 200
        assert await answer.text() == "mps_control_up 1\n"


async def test_the_end_does_not_wait_for_idle_connections() -> None:
    options = {"DRAIN_TIMEOUT_SECONDS": FOR_EVER, "REQUEST_TIMEOUT_SECONDS": FOR_EVER}
    async with served(FakeBackend(), **options) as (shown, stop), ClientSession() as session:
        async with session.get(f"http://{shown[0]}/-/healthy") as answer:
            await answer.read()
        async with connected(shown[0]) as (reader, _):
            stop.set()
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""


async def test_connections_are_kept_between_scrapes() -> None:
    async with served(FakeBackend()) as (shown, _), connected(shown[0]) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET /-/healthy HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(8) == b"Healthy\n"


async def test_a_slow_request_is_cut() -> None:
    timeout = ClientTimeout(total=PATIENCE_SECONDS)
    async with served(FakeBackend(), REQUEST_TIMEOUT_SECONDS=0.5) as (shown, _):
        async with connected(shown[0]) as (reader, writer):
            writer.write(b"GET /metr")
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        async with (
            ClientSession(timeout=timeout) as session,
            session.get(f"http://{shown[0]}/metrics") as answer,
        ):
            assert answer.status == 200


async def test_connections_are_limited_in_all_and_for_one_address() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    async with served(backend, MAX_CONNECTIONS=4) as (shown, _), AsyncExitStack() as clients:

        async def client(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            made = connected(shown[0], local_addr=(address, 0))
            reader, writer = await clients.enter_async_context(made)
            with suppress(OSError):
                writer.write(request)
            return reader, writer

        greedy = [(await client("127.0.0.2"))[0] for _ in range(3)]
        await until(lambda: len(backend.collections) == 3)
        for reader in [(await client("127.0.0.2"))[0] for _ in range(3)]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        honest, writer = await client("127.0.0.1")
        await until(lambda: len(backend.collections) == 4)
        with suppress(ConnectionError):
            refused, _ = await client("127.0.0.3")
            assert await asyncio.wait_for(refused.read(), PATIENCE_SECONDS) == b""
        assert backend.gate is not None
        backend.gate.set()
        for reader in (honest, *greedy):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
            assert head.startswith(b"HTTP/1.1 200")
        writer.close()
        await until_awaited(lambda: answers(shown[0]))


async def answers(address: str) -> bool:
    """Whether a new connection is answered."""
    async with connected(address, local_addr=("127.0.0.3", 0)) as (reader, writer):
        with suppress(OSError):
            writer.write(b"GET /-/healthy HTTP/1.1\r\nHost: a\r\n\r\n")
            return (await reader.read(12)) == b"HTTP/1.1 200"
        return False


async def test_a_scrape_whose_client_leaves_the_queue_is_not_handled() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    async with served(backend, web_max_requests=1) as (shown, _):
        request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
        async with connected(shown[0]) as (first, writer):
            writer.write(request)
            await until(lambda: len(backend.collections) == 1)
            for _ in range(5):
                async with connected(shown[0]) as (_, left):
                    left.write(request)
                    await left.drain()
            assert await answers(shown[0])
            assert backend.gate is not None
            backend.gate.set()
            await first.readuntil(b"\r\n\r\n")
        async with connected(shown[0]) as (last, writer):
            writer.write(request)
            await last.readuntil(b"\r\n\r\n")
        assert len(backend.collections) == 2


async def test_a_client_that_sends_too_much_before_its_reply_is_aborted() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    async with served(backend) as (shown, _), connected(shown[0]) as (reader, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 5000)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""


async def test_who_leaves_a_stream_leaves_its_place_at_once() -> None:
    async with served(FakeBackend(), MAX_EVENT_STREAMS=1) as (shown, _):

        async def has_a_place() -> bool:
            async with connected(shown[0]) as (reader, writer):
                writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: a\r\n\r\n")
                return (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

        for _ in range(5):
            await until_awaited(has_a_place)


async def test_a_request_without_a_host_asks_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> str:
        raise AssertionError("the resolver was asked")

    monkeypatch.setattr("socket.getfqdn", resolve)
    async with served(FakeBackend()) as (shown, _):
        for path in ("/", "/metrics", "/api/v1/status", "/nothing"):
            async with connected(shown[0]) as (reader, writer):
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
                assert answer.split()[1] == (b"404" if path == "/nothing" else b"200")


async def test_streams_do_not_hold_up_the_end() -> None:
    async with (
        served(FakeBackend(), DRAIN_TIMEOUT_SECONDS=FOR_EVER) as (shown, stop),
        ClientSession() as session,
        session.get(f"http://{shown[0]}/api/v1/events") as answer,
    ):
        await answer.content.readline()
        stop.set()
        while not answer.content.at_eof():
            await asyncio.wait_for(answer.content.readany(), PATIENCE_SECONDS)


async def test_a_shortage_of_descriptors_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections of one client would otherwise fill the log with ten lines a second."""
    tried = 0

    async def no_descriptor(_: object) -> None:
        nonlocal tried
        tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async with served(FakeBackend()) as (shown, _):
        monkeypatch.setattr("mps_exporter.limits_without_a_flag.ACCEPT_RETRY_SECONDS", 0.0)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", no_descriptor)
        async with connected(shown[0]):
            await until(lambda: tried >= 4)
        monkeypatch.undo()
    assert caplog.text.count("cannot accept a connection") == 1

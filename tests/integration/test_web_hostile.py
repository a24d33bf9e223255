"""Hostile clients on the loopback, and an honest scraper that must not be affected.

The honest scraper connects from 127.0.0.1; the hostile clients from 127.0.0.2, as on a real
network, or from the same address, like a hostile user of the scraper's host.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from bench.http import Program
from testing.waiting import PATIENCE_SECONDS, until

HOSTILE = ("127.0.0.2", 0)
MAX_GROWTH_MIB = 160


@dataclass
class Honest:
    """Number of honest scrapes, and their failures."""

    scrapes: int = 0
    failures: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def big_server() -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.web.big_server",
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_SECONDS)
        yield Program(process.pid, f"http://{line.decode().strip()}/metrics")
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0


async def scrape_on(server: Program, honest: Honest) -> None:
    """Scrape four times a second over a persistent connection."""
    timeout = ClientTimeout(total=PATIENCE_SECONDS)
    async with ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(
                    server.url, headers={"Accept-Encoding": "identity"}
                ) as answer:
                    body = await answer.read()
                    if answer.status != 200 or len(body) < 1_000_000:
                        honest.failures[str(answer.status)] += 1
            except (ClientError, TimeoutError) as error:
                honest.failures[type(error).__name__] += 1
            honest.scrapes += 1
            await asyncio.sleep(0.25)


async def connect(
    server: Program, source: tuple[str, int] = HOSTILE
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        server.connection.host, server.connection.port, local_addr=source
    )


async def end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# ------------------------------------------------------------------------- hostile clients


async def a_byte_a_second(server: Program) -> str:
    """500 connections that send their request a byte a second, and reconnect when cut."""
    cut = 0

    async def one() -> None:
        nonlocal cut
        while cut < 1000:
            try:
                reader, writer = await connect(server)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            try:
                for letter in b"GET /metrics HTTP/1.1\r\nHost: a\r\n":
                    writer.write(bytes((letter,)))
                    await writer.drain()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), 1)
                        break  # the end of the stream, or a response
                cut += 1
            except OSError:
                cut += 1
            finally:
                await end(writer)

    await asyncio.gather(*(one() for _ in range(500)))
    return f"{cut} connections cut"


async def headers_of_megabytes(server: Program) -> str:
    """60 requests of 8 MiB of headers: half in one line, half in many."""
    statuses: Counter[str] = Counter()

    async def one(line: bytes) -> None:
        reader, writer = await connect(server)
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
            for _ in range(8 * 2**20 // len(line)):
                writer.write(line)
                await asyncio.wait_for(writer.drain(), PATIENCE_SECONDS)
        except (OSError, TimeoutError):
            statuses["cut"] += 1
        else:
            statuses[(await reader.read(12)).decode() or "cut"] += 1
        finally:
            await end(writer)

    long, many = b"X" * 65536, b"X-Header: y\r\n" * 1000
    await asyncio.gather(*(one(line) for line in (long, many) for _ in range(30)))
    assert "HTTP/1.1 200" not in statuses
    return str(dict(statuses))


async def a_thousand_scrapes_at_once(server: Program) -> str:
    statuses: Counter[str] = Counter()
    connector = TCPConnector(limit=0, local_addr=HOSTILE)
    timeout = ClientTimeout(total=PATIENCE_SECONDS)
    async with ClientSession(connector=connector, timeout=timeout) as session:

        async def one() -> None:
            try:
                async with session.get(server.url) as answer:
                    await answer.read()
                    statuses[str(answer.status)] += 1
            except (ClientError, TimeoutError) as error:
                statuses[type(error).__name__] += 1

        await asyncio.gather(*(one() for _ in range(1000)))
    assert statuses["200"] >= 20
    return str(dict(statuses))


async def clients_that_never_read(server: Program, source: tuple[str, int] = HOSTILE) -> str:
    """30 at a time request 1.3 MB and read none of it."""
    writers = []
    for _ in range(3):
        for _ in range(30):
            _, writer = await connect(server, source)
            cast("asyncio.Transport", writer.transport).pause_reading()
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
            writers.append(writer)
        await asyncio.sleep(0.5)
    await until(lambda: len(server.open_files) < 50)  # all are cut
    for writer in writers:
        writer.transport.abort()
    return f"{len(writers)} of them"


async def neighbours_that_never_read(server: Program) -> str:
    return await clients_that_never_read(server, ("127.0.0.1", 0))


async def nonsense(server: Program) -> str:
    """Data that is not HTTP, or invalid HTTP."""
    lines = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 500,
        b"\x00" * 4096,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe\x80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /static/../../app.py HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /static/%2e%2e%2f%2e%2e%2fapp.py HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics?collect[]=%ff%00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: " + b"," * 8000 + b"\r\n\r\n",
        b'GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: text/plain;version="\xff\r\n\r\n',
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Prometheus-Scrape-Timeout-Seconds: 1e999\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: <script>\"'\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 99999,
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
        b"GET http://elsewhere/metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ]
    statuses: Counter[str] = Counter()
    for line in lines:
        reader, writer = await connect(server)
        try:
            writer.write(line)
            await writer.drain()
            first = await asyncio.wait_for(reader.read(64), PATIENCE_SECONDS)
            statuses[first[9:12].decode("ascii", "replace") or "cut"] += 1
            assert b" 500 " not in first, line[:80]
        except OSError:
            statuses["cut"] += 1
        finally:
            await end(writer)
    return str(dict(statuses))


@pytest.mark.parametrize(
    "attack",
    [
        a_byte_a_second,
        headers_of_megabytes,
        a_thousand_scrapes_at_once,
        clients_that_never_read,
        neighbours_that_never_read,
        nonsense,
    ],
)
async def test_honest_scrapes_go_on(attack: Callable[[Program], Awaitable[str]]) -> None:
    honest = Honest()
    async with big_server() as server:
        scraping = asyncio.create_task(scrape_on(server, honest))
        await until(lambda: honest.scrapes >= 3)
        before = server.status("VmRSS") / 1024
        scrapes = honest.scrapes
        outcome = await attack(server)
        await until(lambda: honest.scrapes > scrapes + 1)
        await until(lambda: len(server.open_files) < 100)
        peak = server.status("VmHWM") / 1024
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)

    print(f"{attack.__name__}: {outcome}; memory {before:.0f} -> at most {peak:.0f} MiB")
    assert not honest.failures
    assert peak - before < MAX_GROWTH_MIB

import asyncio
import gzip
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest import mock

import pytest
from aiohttp import web

from mps_exporter.backend import Backend
from mps_exporter.flags import Settings
from mps_exporter.metrics.exposition import TEXT_0_0_4
from mps_exporter.snapshot import Snapshot
from mps_exporter.web import guard
from mps_exporter.web.guard import Limiter
from mps_exporter.web.handlers import TIMEOUT_HEADER, collection_deadline
from testing.waiting import PATIENCE_SECONDS, until
from tests.unit.web.conftest import MakeClient
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import connected, served


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        *((None, None), ("", None), ("soon", None), ("nan", None), ("inf", None), ("-1", None)),
        *(("0", None), ("1", 0.9), ("1.5", 1.35), ("10", 9.5), ("1e9", 299.5)),
    ],
)
def test_deadline_leaves_a_margin(header: str | None, expected: float | None) -> None:
    assert collection_deadline(header) == (None if expected is None else pytest.approx(expected))


async def test_metrics_are_rendered_while_reads_of_recordings_hang() -> None:
    hung = threading.Event()
    shared = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(shared)
    shared.submit(hung.wait)
    backend = Backend(Settings(web_disable_exporter_metrics=True))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            page = await backend.expose(Snapshot(1_000.0), TEXT_0_0_4, 0)
    finally:
        hung.set()
        await backend.close()
    assert b"mps_exporter_build_info" in page


async def test_metrics_have_the_requested_format(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    client = await make_client()

    answer = await client.get(
        "/metrics",
        headers={
            "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8",
            "Accept-Encoding": "gzip",
            "X-Prometheus-Scrape-Timeout-Seconds": "10",
        },
    )

    assert answer.status == 200
    assert gzip.decompress(await answer.read()) == backend.body + b"# EOF\n"
    assert answer.headers["Content-Type"] == (
        "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
    )
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    ((seconds, collectors),) = backend.collections
    assert seconds is not None
    assert 0 < seconds <= 9.5
    assert collectors is None
    plain = await client.get("/metrics", headers={"Accept-Encoding": "identity"})
    assert await plain.read() == backend.body


async def test_head_does_not_collect(backend: FakeBackend, make_client: MakeClient) -> None:
    client = await make_client()

    answer = await client.head("/metrics")

    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert backend.collections == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?collect[]=nvml", {"nvml"}),
        ("?collect[]=nvml&collect[]=logs", {"nvml", "logs"}),
        ("?exclude[]=nvml", {"control", "logs", "process"}),
        ("?other=1", None),
    ],
)
async def test_collectors_can_be_chosen(
    backend: FakeBackend, make_client: MakeClient, query: str, expected: set[str] | None
) -> None:
    client = await make_client()

    answer = await client.get("/metrics" + query)

    assert answer.status == 200
    assert backend.collections == [(None, expected)]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?collect[]=gpu", "no collector 'gpu' here; enabled are nvml, control, logs, process"),
        ("?collect[]=", "no collector '' here"),
        ("?exclude[]=gpu", "no collector 'gpu' here"),
        ("?collect[]=%FF%0A<b>", "no collector '"),
        ("?collect[]=nvml&exclude[]=logs", "cannot be used together"),
    ],
)
async def test_a_wrong_choice_is_refused(
    backend: FakeBackend, make_client: MakeClient, query: str, words: str
) -> None:
    client = await make_client()

    answer = await client.get("/metrics" + query)

    assert answer.status == 400
    assert answer.content_type == "text/plain"
    assert words in await answer.text()
    assert backend.collections == []


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/status"])
async def test_too_many_requests_get_503(
    backend: FakeBackend, make_client: MakeClient, path: str
) -> None:
    backend.gate = asyncio.Event()
    client = await make_client(web_max_requests=4)

    hurry = {TIMEOUT_HEADER: "0.1"}
    asking = [asyncio.create_task(client.get(path, headers=hurry)) for _ in range(10)]
    await until(lambda: sum(one.done() for one in asking) == 7)
    backend.gate.set()
    answers = await asyncio.gather(*asking)

    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200] * 3 + [503] * 7  # one address gets three quarters
    refused = next(answer for answer in answers if answer.status == 503)
    assert "--web.max-requests" in await refused.text()
    assert refused.headers["Retry-After"] == "1"
    assert (await client.get(path)).status == 200


async def test_a_crowd_waits_for_its_turn(backend: FakeBackend, make_client: MakeClient) -> None:
    backend.gate = asyncio.Event()
    client = await make_client(web_max_requests=4)

    asking = [asyncio.create_task(client.get("/metrics")) for _ in range(100)]
    await until(lambda: len(backend.collections) == 3)
    backend.gate.set()

    assert {answer.status for answer in await asyncio.gather(*asking)} == {200}


@pytest.mark.parametrize(("total", "of_one"), [(2, 1), (4, 3)])
async def test_a_crowd_of_one_address_leaves_places_for_another(total: int, of_one: int) -> None:
    limiter, may_end = Limiter(total, "scrapes"), asyncio.Event()
    admitted = list[str]()

    async def scrape(address: str) -> None:
        async with limiter.slot(address, PATIENCE_SECONDS):
            admitted.append(address)
            await may_end.wait()

    crowd = [asyncio.create_task(scrape(f"2001:db8::{number}")) for number in range(40)]
    await until(lambda: len(admitted) == of_one)
    honest = asyncio.create_task(scrape("2001:db8:0:1::1"))
    await until(lambda: len(admitted) == total)
    assert admitted[-1] == "2001:db8:0:1::1"
    may_end.set()
    await asyncio.gather(honest, *crowd)


async def test_a_client_that_sends_nothing_is_disconnected(backend: FakeBackend) -> None:
    limits = {"REQUEST_TIMEOUT_SECONDS": 0.1, "SWEEP_INTERVAL_SECONDS": 0.1}
    async with (
        served(backend, **limits) as (addresses, _),
        connected(addresses[0]) as (reader, _writer),
    ):
        with suppress(ConnectionError):  # a reset
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""


async def test_a_bug_in_the_server_ends_it_with_the_error(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = mock.AsyncMock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(guard.Connections, "abort_slow_clients", bug)
    with pytest.raises(ZeroDivisionError):
        async with served(backend):
            pass


async def test_a_cancelled_request_takes_no_slot() -> None:
    limiter = Limiter(1, "scrapes")

    async def scrape(seconds: float) -> None:
        async with limiter.slot("192.0.2.1", seconds):
            pass

    async with limiter.slot("192.0.2.2"):
        with pytest.raises(web.HTTPServiceUnavailable):
            await scrape(0.01)
        left = asyncio.create_task(scrape(PATIENCE_SECONDS))
        await asyncio.sleep(0)
        left.cancel()
        admitted = asyncio.create_task(scrape(PATIENCE_SECONDS))
        await asyncio.sleep(0)
    admitted.cancel()
    await asyncio.gather(left, admitted, return_exceptions=True)
    await scrape(0.0)


async def test_a_failing_collection_is_a_line_of_text(
    backend: FakeBackend, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    backend.error = RuntimeError("secret detail")
    client = await make_client()

    answer = await client.get("/metrics")

    assert answer.status == 500
    assert await answer.text() == "500 Internal Server Error: see the exporter's log\n"
    assert "secret detail" in caplog.text


async def test_the_path_can_be_moved(make_client: MakeClient) -> None:
    client = await make_client(web_telemetry_path="/gpu/metrics")

    assert (await client.get("/gpu/metrics")).status == 200
    for path in ("/metrics", "/%2e%2e/%2e%2e/etc/passwd", "/gpu/metrics/"):
        missing = await client.get(path)
        assert missing.status == 404
        assert await missing.text() == "404 Not Found: try / or /gpu/metrics\n"


async def test_health(backend: FakeBackend, make_client: MakeClient) -> None:
    backend.ready = False
    client = await make_client()

    assert (await client.get("/-/healthy")).status == 200
    answer = await client.get("/-/ready")
    assert answer.status == 503
    assert "first collection" in await answer.text()

    backend.ready = True
    assert (await client.get("/-/ready")).status == 200


async def test_every_response_has_the_security_headers(make_client: MakeClient) -> None:
    client = await make_client()

    for path in ("/", "/metrics", "/nothing", "/metrics?collect[]=x"):
        answer = await client.get(path)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Server"] == "mps-exporter"


async def test_a_connection_that_is_reset_before_its_request_is_handled_costs_nothing(
    backend: FakeBackend,
) -> None:
    made = guard.Connection.__init__
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    counted = mock.patch.object(guard.Connection, "__init__", autospec=True, side_effect=made)
    with counted as handled:
        async with served(backend) as ((address,), _):
            host, _, port = address.rpartition(":")
            for _ in range(200):
                with socket.create_connection((host, int(port))) as client:
                    client.sendall(request)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            async with connected(address) as (reader, writer):
                writer.write(request)
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert handled.call_count == len(backend.collections) == len(backend.renderings) == 1


async def test_a_request_of_a_closing_connection_is_not_handled() -> None:
    request, handler = mock.Mock(), mock.AsyncMock()
    request.transport.is_closing.return_value = True
    with pytest.raises(ConnectionResetError):
        await guard.track_request(request, handler)
    assert not handler.await_count

"""The endpoint that jumps to a chapter of the demo."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mps_exporter.web.app import create_app
from mps_exporter.web.options import WebOptions
from tests.unit.web.conftest import Client, MakeClient
from tests.unit.web.fakes import FakeBackend

PATH = "/api/v1/demo/chapters/wait"


@pytest.fixture
def jumps() -> list[str]:
    return []


@pytest.fixture
async def demo(backend: FakeBackend, jumps: list[str]) -> AsyncIterator[Client]:
    async def jump(name: str) -> bool:
        jumps.append(name)
        return name == "wait"

    app = create_app(backend, WebOptions(), jump=jump)
    client: TestClient[web.Request, web.Application] = TestClient(TestServer(app))
    await client.start_server()
    yield client
    await client.close()


async def test_the_next_status_is_a_new_one(demo: Client, backend: FakeBackend) -> None:
    await demo.get("/api/v1/status")
    before = len(backend.collections)
    await demo.get("/api/v1/status")
    assert len(backend.collections) == before
    await demo.post(PATH)
    await demo.get("/api/v1/status")
    assert len(backend.collections) == before + 1


async def test_an_unknown_chapter_is_not_found(demo: Client) -> None:
    answer = await demo.post("/api/v1/demo/chapters/intermission")
    assert answer.status == 404
    assert "no such chapter" in await answer.text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 204),
        ({"Origin": "http://HOST", "Sec-Fetch-Site": "same-origin"}, 204),
        ({"Origin": "https://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_only_programs_and_the_own_page_can_jump(
    demo: Client, jumps: list[str], headers: dict[str, str], status: int
) -> None:
    host = f"{demo.host}:{demo.port}"
    sent = {name: value.replace("HOST", host) for name, value in headers.items()}
    assert (await demo.post(PATH, headers=sent)).status == status
    assert (await demo.get(PATH)).status == 405
    assert jumps == (["wait"] if status == 204 else [])


async def test_a_live_host_has_no_chapters(make_client: MakeClient) -> None:
    assert (await (await make_client()).post(PATH)).status == 404

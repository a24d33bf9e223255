"""The endpoint that jumps to a chapter of the demo."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mps_exporter.web.app import create_app
from mps_exporter.web.policy import WebOptions
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


async def test_a_chapter_is_jumped_to(demo: Client, jumps: list[str]) -> None:
    assert (await demo.post(PATH)).status == 204
    assert jumps == ["wait"]


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
    "headers",
    [
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_pages_of_other_sites_cannot_jump(
    demo: Client, jumps: list[str], headers: dict[str, str]
) -> None:
    assert (await demo.post(PATH, headers=headers)).status == 403
    assert jumps == []


async def test_the_own_page_can_jump(demo: Client, jumps: list[str]) -> None:
    origin = f"http://{demo.host}:{demo.port}"
    headers = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
    assert (await demo.post(PATH, headers=headers)).status == 204
    assert jumps == ["wait"]


async def test_reading_jumps_nowhere(demo: Client, jumps: list[str]) -> None:
    assert (await demo.get(PATH)).status == 405
    assert jumps == []


async def test_a_live_host_has_no_chapters(make_client: MakeClient) -> None:
    assert (await (await make_client()).post(PATH)).status == 404

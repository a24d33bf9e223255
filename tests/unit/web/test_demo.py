"""The endpoint that jumps to a chapter of the demo."""

import pytest

from tests.unit.web.conftest import MakeClient
from tests.unit.web.fakes import FakeBackend

PATH = "/api/v1/demo/chapters/wait"


async def test_the_next_status_is_a_new_one(make_client: MakeClient, backend: FakeBackend) -> None:
    demo = await make_client()
    await demo.get("/api/v1/status")
    before = len(backend.collections)
    await demo.get("/api/v1/status")
    assert len(backend.collections) == before
    await demo.post(PATH)
    await demo.get("/api/v1/status")
    assert len(backend.collections) == before + 1


async def test_an_unknown_chapter_is_not_found(make_client: MakeClient) -> None:
    answer = await (await make_client()).post("/api/v1/demo/chapters/intermission")
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
    make_client: MakeClient, backend: FakeBackend, headers: dict[str, str], status: int
) -> None:
    demo = await make_client()
    host = f"{demo.host}:{demo.port}"
    sent = {name: value.replace("HOST", host) for name, value in headers.items()}
    assert (await demo.post(PATH, headers=sent)).status == status
    assert (await demo.get(PATH)).status == 405
    assert backend.jumps == (["wait"] if status == 204 else [])

"""The endpoint that jumps to a chapter of the demo."""

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


async def test_only_a_post_jumps(make_client: MakeClient, backend: FakeBackend) -> None:
    demo = await make_client()
    assert (await demo.get(PATH)).status == 405
    assert backend.jumps == []
    assert (await demo.post(PATH)).status == 204
    assert backend.jumps == ["wait"]

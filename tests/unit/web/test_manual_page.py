import re

import pytest

from mps_exporter import manual_search
from mps_exporter.web.status_api import make_status
from mps_exporter.web.status_page import render_page
from testing import snapshots as hosts
from tests.unit.web.conftest import MakeClient


async def test_each_page_is_served_and_its_links_are(make_client: MakeClient) -> None:
    client = await make_client()
    index = await (await client.get("/docs/")).text()
    assert set(re.findall(r'href="([\w-]+)"', index)) == manual_search.pages().keys()
    for name in manual_search.pages():
        answer = await client.get(f"/docs/{name}")
        page = await answer.text()
        assert answer.status == 200
        assert "<table>" in page or "<p>" in page
        for href in re.findall(r'href="([\w-]+)["#]', page):
            assert href in manual_search.pages(), name


@pytest.mark.parametrize("name", ["nothing", "..%2f..%2fREADME", "MpsGhostServer.md", "README"])
async def test_nothing_else_is_served(make_client: MakeClient, name: str) -> None:
    client = await make_client()
    assert (await client.get(f"/docs/{name}")).status == 404


def test_the_status_page_links_to_the_served_manual() -> None:
    page = render_page(make_status(hosts.waiting()))
    assert 'href="docs/MpsUidWaitLong"' in page

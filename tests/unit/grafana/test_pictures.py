"""The fleet that a real Grafana is shown, and the report about its panels."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from grafana.pictures import hosts
from grafana.pictures.look import Sight, report
from testing import v3_host
from testing.player import Player


@pytest.fixture
def v3() -> Player:
    return Player(v3_host.recording())


async def test_many_replayed_hosts_are_behind_one_port(v3: Player) -> None:
    services = {name: hosts.service(name) for name in ("quiet", "fault@0.5")}
    app = hosts.app(services, v3)
    async with TestClient(TestServer(app)) as client:
        for name in services:
            page = await (await client.get(f"/{name}/metrics")).text()
            assert "\nmps_exporter_recording_info{" in page
        page = await (await client.get(f"/{hosts.MADE_UP}/metrics")).text()
        assert "\nmps_exporter_recording_info{" not in page
        assert page.count("\nmps_client_info{") == 8 * 48
        page = await (await client.get(f"/{hosts.V3}/metrics")).text()
        assert "\nmps_named_server_info{" in page
        assert (await client.get("/nobody/metrics")).status == 404


@pytest.mark.parametrize(
    ("sight", "fault"),
    [
        (Sight("b", "p", "", cut=False, blank=False, text="server in FAULT"), ""),
        (Sight("b", "p", "bad query", cut=False, blank=False, text=""), "error badge: bad query"),
        (Sight("b", "p", "", cut=True, blank=False, text=""), "title cut"),
        (Sight("b", "p", "", cut=False, blank=True, text="x"), "blank in the picture"),
    ],
)
def test_the_report_names_what_is_wrong_with_a_panel(sight: Sight, fault: str) -> None:
    assert list(sight.faults) == ([fault] if fault else [])
    (_,), faults = report([sight], ["x"])
    assert faults == [*([f"b / p: {fault}"] if fault else []), "console: x"]

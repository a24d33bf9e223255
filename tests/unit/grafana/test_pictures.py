"""What looks at dashboards in a real Grafana, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer

from grafana.boards import BOARDS
from grafana.pictures import __main__ as pictures
from grafana.pictures import hosts, server
from grafana.pictures.look import Shot, Sight, report, wrong
from testing import v3_host
from testing.player import RECORDINGS, Player


def test_without_a_grafana_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (None, str(tmp_path)):
        if value is None:
            monkeypatch.delenv("GRAFANA", raising=False)
        else:
            monkeypatch.setenv("GRAFANA", value)
        assert pictures.main([str(tmp_path / "pictures")]) == 2
        assert "GRAFANA=/usr/share/grafana" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "command"), [("grafana", ["server", "--homepath"]), ("grafana-server", ["--homepath"])]
)
def test_any_installation_will_do(tmp_path: Path, name: str, command: list[str]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / name).write_text("")
    (tmp_path / "bin" / name).chmod(0o755)
    found = server.program(str(tmp_path))
    assert found == [str(tmp_path / "bin" / name), *command, str(tmp_path)]


def test_it_is_provisioned_from_what_is_shipped(tmp_path: Path) -> None:
    target = server.provisioned(tmp_path, "http://127.0.0.1:1")
    (source,) = (target / "datasources").glob("*.yml")
    shipped = yaml.safe_load((server.PROVISIONING / "datasources" / source.name).read_text())
    changed = yaml.safe_load(source.read_text())
    assert changed["datasources"][0]["url"] == "http://127.0.0.1:1"
    assert changed["datasources"][0].keys() == shipped["datasources"][0].keys()
    (provider,) = (target / "dashboards").glob("*.yml")
    folder = Path(yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"])
    assert (folder / "mps-fleet.json").exists()


@pytest.fixture
def v3() -> Player:
    return Player(v3_host.recording())


async def test_many_replayed_hosts_are_behind_one_port(v3: Player) -> None:
    services = {name: hosts.service(name) for name in ("quiet", "fault@0.5")}
    async with TestClient(TestServer(hosts.app(services, v3))) as client:
        for name in services:
            page = await (await client.get(f"/{name}/metrics")).text()
            assert "\nmps_exporter_recording_info{" in page
        page = await (await client.get(f"/{hosts.MADE_UP}/metrics")).text()
        assert "\nmps_exporter_recording_info{" not in page
        assert page.count("\nmps_client_info{") == hosts.GPUS * hosts.CLIENTS_PER_GPU
        page = await (await client.get(f"/{hosts.V3}/metrics")).text()
        assert "\nmps_named_server_info{" in page
        assert (await client.get("/nobody/metrics")).status == 404


def test_recordings_of_the_fleet_are_there_and_one_is_dead() -> None:
    for recording in pictures.replays().values():
        assert (RECORDINGS / f"{recording.partition('@')[0]}.rec.gz").exists()
    assert len(pictures.replays()) >= 30
    assert pictures.DEAD not in pictures.replays()
    chosen = {shot.choices for shot in pictures.shots()}
    for host in (pictures.DEAD, pictures.SLOW, hosts.MADE_UP, "quiet:9400"):
        assert any(choices.endswith(f"var-instance={host}") for choices in chosen), host


def test_every_dashboard_is_looked_at_in_every_scenario() -> None:
    names = {shot.name for shot in pictures.shots()}
    for board in BOARDS:
        for scenario in pictures.SCENARIOS:
            name = board.uid if scenario == "fleet" else f"{board.uid}-{scenario}"
            assert (name in names) != (scenario == "fleet" and board.of_one_host), name
    assert {shot.name for shot in pictures.shots(scenarios=["dead"])} == {
        f"{board.uid}-dead" for board in BOARDS
    }
    assert set(pictures.IMAGES.values()) <= {*names, "also"}


def test_the_address_of_a_shot_has_its_choices_time_and_theme() -> None:
    shot = Shot("mps-host", "x", "var-instance=a:9400", "now-5m")
    url = shot.url("http://g", dark=False)
    assert url.startswith("http://g/d/mps-host?")
    assert url.endswith("&from=now-5m&to=now&refresh=&theme=light&var-instance=a:9400")


@pytest.mark.parametrize(
    ("sight", "fault"),
    [
        (Sight("b", "p", "", cut=False, canvas=True, text=""), ""),
        (Sight("b", "p", "", cut=False, canvas=False, text="0"), ""),
        (Sight("b", "p", "bad query", cut=False, canvas=True, text=""), "error badge: bad query"),
        (Sight("b", "p", "", cut=True, canvas=True, text=""), "title cut"),
        (
            Sight("b", "p", "", cut=False, canvas=True, text="", marks=41),
            "covered by 41 annotations",
        ),
        (Sight("b", "p", "", cut=False, canvas=True, text="", marks=40), ""),
        (Sight("b", "p", "", cut=False, canvas=False, text=""), "nothing drawn, no text"),
        (
            Sight("b", "p", "", cut=False, canvas=False, text="Data does not have a time field"),
            "reads as an error: Data does not have a time field",
        ),
    ],
)
def test_the_report_names_what_is_wrong_with_a_panel(sight: Sight, fault: str) -> None:
    assert list(sight.faults) == ([fault] if fault else [])
    (_, *faults) = report([sight], [])
    assert faults == ([f"  FAULT b / p: {fault}"] if fault else [])


def test_a_panel_that_shows_the_word_is_not_at_fault() -> None:
    healthy = Sight("b", "p", "", cut=False, canvas=True, text="server in FAULT")
    assert wrong(report([healthy], [])) == []
    assert wrong(report([healthy], ["x"])) == ["  FAULT console: x"]


def test_the_report_names_complaints_of_the_console() -> None:
    assert list(report([], ["exception: x"])) == ["  FAULT console: exception: x"]

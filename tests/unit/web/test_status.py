import json
from dataclasses import replace

import pytest

from mps_exporter.findings import ADVICE
from mps_exporter.snapshot import CollectorName, CollectorResult, Incident, Snapshot
from mps_exporter.web.status_api import make_status
from mps_exporter.web.status_api_fields import View
from mps_exporter.web.status_page import render_page
from testing import snapshots as hosts
from tests.unit.web.conftest import MakeClient
from tests.unit.web.fakes import FakeBackend, PageReader

NOW = hosts.NOW


def status_of(snapshot: Snapshot) -> View:
    return make_status(snapshot)


def headline(snapshot: Snapshot) -> tuple[str, str]:
    found = status_of(snapshot).headline
    return found.severity, found.text


def collected(source: CollectorName, *, success: bool) -> tuple[CollectorResult, ...]:
    return (CollectorResult(source, success=success, duration_seconds=1.0),)


NO_CONTROL = replace(hosts.daemon().logs[0], readable=False)
NO_SERVER = replace(hosts.daemon().logs[1], readable=False)
BOTH = hosts.daemon().logs


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (
            hosts.snapshot(collectors=collected("process", success=True)),
            "No MPS control daemon runs on this host.",
        ),
        (hosts.snapshot(), "No daemon was seen, but the processes are not searched."),
        (
            hosts.snapshot(
                collectors=collected("process", success=True), ignored_processes={2001: 1}
            ),
            "No daemon was seen, but not all processes of MPS's programs could be read.",
        ),
        (
            hosts.snapshot(hosts.daemon(hosts.server(hosts.client(1)), logs=(NO_CONTROL, BOTH[1]))),
            "1 client uses 1 GPU through 1 server; whether clients wait is not known: "
            "control.log is not readable.",
        ),
        (
            hosts.snapshot(hosts.daemon(hosts.server(), logs=(BOTH[0], NO_SERVER))),
            "MPS is up: 1 server without clients; faults and hung clients cannot be detected: "
            "server.log is not readable.",
        ),
        (
            hosts.snapshot(hosts.daemon(hosts.server(clients_connected=None))),
            "MPS is up: 1 server; how many clients are connected is not known.",
        ),
        (
            hosts.snapshot(hosts.daemon(servers_count=None)),
            "MPS is up; whether a server runs is not known.",
        ),
        (hosts.snapshot(hosts.daemon(state=None)), "Whether the daemon answers is not known."),
        (
            hosts.snapshot(
                hosts.daemon(hosts.server(hosts.client(1))),
                hosts.daemon(pipe_directory="/tmp/other", logs=()),
            ),
            "1 client uses 1 GPU through 1 server; whether clients wait at /tmp/other is not "
            "known: control.log is not readable; faults and hung clients at /tmp/other cannot be "
            "detected: server.log is not readable.",
        ),
        (
            hosts.snapshot(collectors=collected("process", success=False)),
            "No daemon was seen, but whether other daemons run is not known: the processes could "
            "not be read.",
        ),
        (
            replace(hosts.healthy(), collectors=collected("nvml", success=False)),
            "2 clients share 1 GPU through 1 server; GPU activity is not known: the GPUs "
            "could not be read.",
        ),
    ],
)
def test_the_headline_contains_what_is_unknown(snapshot: Snapshot, text: str) -> None:
    assert headline(snapshot) == ("info", text)


def test_the_page_claims_no_absence_without_evidence() -> None:
    hidden = hosts.client(
        9, limit_source="unknown", memory_limit_bytes={}, sm_limit={}, active_thread_ratio=None
    )
    none = hosts.server(clients_connected=None)
    snapshot = hosts.snapshot(
        hosts.daemon(hosts.server(hidden), none, logs=()),
        hosts.daemon(pipe_directory="/tmp/other", servers_count=None),
    )
    text = render_page(status_of(snapshot))

    claims = ("nobody", "no limit", "No events yet", "All is well", "0 clients", "No server runs")
    assert [claim for claim in claims if claim in text] == []
    for doubt in (
        "1.5 GiB, limit not known",
        "No event was seen, but not all logs can be read.",
        "clients not known",
        "Whether a server runs is not known.",
    ):
        assert doubt in text


def test_the_newest_incident_leads() -> None:
    crash = Incident(at=NOW - 200, kind="server_crashed", server_pid=1, uid=1001)
    refused = Incident(at=NOW - 2, kind="server_start_failed", uid=1002)
    happened = hosts.snapshot(hosts.daemon(incidents=(crash, refused)))
    assert [one.name for one in status_of(happened).findings] == [
        "server_start_failed",
        "server_crashed",
    ]
    assert "could not start" in headline(happened)[1]
    gone = hosts.daemon(state="absent", pid=None, incidents=(crash, refused))
    assert headline(hosts.snapshot(gone))[1].startswith("No MPS daemon runs")


@pytest.mark.parametrize(
    ("age", "leads"),
    [(10, "server_crashed"), (59, "server_crashed"), (61, "several_users_one_daemon")],
)
def test_a_crash_some_time_ago_does_not_hide_who_waits_now(age: int, leads: str) -> None:
    waiting = hosts.waiting(95)
    daemon, *others = waiting.daemons
    crash = Incident(at=NOW - age, kind="server_crashed", server_pid=1, uid=1001)
    both = replace(waiting, daemons=(replace(daemon, incidents=(crash,)), *others))
    names = [one.name for one in status_of(both).findings]
    assert names[0] == leads
    assert {"server_crashed", "several_users_one_daemon"} <= set(names)


@pytest.mark.parametrize(("age", "leads"), [(60, True), (600, False)])
def test_a_daemon_that_died_long_ago_does_not_hide_those_that_serve(age: int, leads: bool) -> None:
    died = Incident(at=NOW - age, kind="daemon_died")
    gone = replace(
        hosts.daemon(incidents=(died,)), pipe_directory="/gone", state="absent", servers=()
    )
    status = status_of(replace(hosts.healthy(), daemons=(*hosts.healthy().daemons, gone)))
    assert (status.headline.severity == "critical") == leads
    assert "No MPS daemon runs at /gone" in " ".join(
        [status.headline.text, *(one.text for one in status.findings)]
    )
    assert leads or "share" in status.headline.text


async def test_names_outlive_the_processes(
    backend: FakeBackend, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mps_exporter.limits_without_a_flag.STATUS_REUSE_SECONDS", 0)
    client = await make_client()
    backend.snapshot = hosts.healthy()
    await client.get("/")
    crash = Incident(at=NOW - 1, kind="server_crashed", server_pid=634, uid=1001)
    backend.snapshot = hosts.snapshot(hosts.daemon(incidents=(crash,)))

    assert "Alice&#39;s server 634 crashed" in await (await client.get("/")).text()


def test_every_incident_with_a_finding_is_shown() -> None:
    kinds = [name for name, one in ADVICE.items() if one.kind == "news"]
    happened = tuple(Incident(at=NOW - 1, kind=kind, uid=1) for kind in kinds)  # type: ignore[arg-type]
    status = status_of(hosts.snapshot(hosts.daemon(incidents=happened)))
    text = PageReader(render_page(status)).text

    assert {one.name for one in status.findings} == set(kinds)
    assert all(one.remedy and one.remedy in text for one in status.findings)


async def page(make_client: MakeClient) -> PageReader:
    answer = await (await make_client()).get("/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    return PageReader(await answer.text())


async def test_the_page_shows_who_uses_what(backend: FakeBackend, make_client: MakeClient) -> None:
    backend.snapshot = hosts.healthy()

    text = (await page(make_client)).text

    for words in (
        *("All is well", "GPU 0 NVIDIA H200", "99 %", "12 %", "30.0 GiB of 140 GiB", "195 W"),
        *("61 °C", "exclusive process", "1 process without MPS", "/tmp/nvidia-mps", "answers"),
        *("Alice's server", "2 of 48 contexts", "up 2 h 5 min", "train.py", "641", "for 4 min"),
        *("at most 33 of 132 SMs", "1.5 GiB of at most 2.0 GiB", "no SM limit"),
        *("1.5 GiB, no limit seen", "it does not fill this GPU"),
        "Clients of alice's server 634 at /tmp/nvidia-mps",
    ):
        assert words in text, words


async def test_without_nvml_the_daemons_are_there(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    unlimited = hosts.client(9, sm_limit={}, active_thread_ratio=None, memory_used_bytes={})
    backend.snapshot = replace(
        hosts.blind(), daemons=(hosts.daemon(hosts.server(hosts.client(8), unlimited)),)
    )

    text = (await page(make_client)).text

    assert "GPU not known" in text
    assert "at most 25 % of the SMs" in text
    assert "some SM limits not known" in text
    assert "no NVML library" in text


async def test_names_of_others_are_printable(backend: FakeBackend, make_client: MakeClient) -> None:
    backend.snapshot = hosts.nasty()
    client = await make_client()

    html = await (await client.get("/")).text()
    answer = await client.get("/api/v1/status")
    status = json.loads((await answer.read()).decode("ascii"))

    shown = "\\x1b[31m\\u202egpj.exe\N{REPLACEMENT CHARACTER}"
    for hidden in ("\x1b", "\u202e", "\udcff"):
        assert hidden not in html
    assert shown in PageReader(html).text
    program = status["daemons"][0]["servers"][0]["clients"][0]["program"]
    assert program == f"<script>alert(1)</script>\"'&\\n{shown}"
    assert answer.content_type == "application/json"


async def test_own_files(make_client: MakeClient) -> None:
    client = await make_client()

    for name, kind in (
        ("status.css", "text/css"),
        ("status.js", "text/javascript"),
        ("icon.svg", "image/svg+xml"),
    ):
        answer = await client.get(f"/static/{name}")
        assert answer.status == 200
        assert answer.content_type == kind
    for name in ("nothing", "..%2fapp.py", "%2e%2e/app.py", "", "../app.py"):
        assert (await client.get(f"/static/{name}")).status == 404


def test_gpus_that_were_read_before_count_while_nvml_fails() -> None:
    seen = replace(hosts.healthy(), collectors=collected("nvml", success=False))
    assert status_of(seen)["totals"]["gpus"] == len(seen.gpus) > 0
    assert status_of(replace(seen, gpus=()))["totals"]["gpus"] is None


def test_a_daemon_that_is_gone_hides_no_total() -> None:
    seen, gone = hosts.healthy(), hosts.daemon(state="absent", servers_count=None, logs=())
    both = replace(seen, daemons=(*seen.daemons, gone))
    assert status_of(both)["totals"] == status_of(seen)["totals"]


async def test_the_recording_of_an_incident(make_client: MakeClient, backend: FakeBackend) -> None:
    incident = Incident(1_795_000_000.25, "fault")
    backend.recordings[incident.at] = b"data"
    client = await make_client()
    answer = await client.get(f"/api/v1/incidents/{incident.id}/recording")
    assert (answer.status, await answer.read()) == (200, b"data")
    assert answer.headers["Content-Disposition"] == (
        "attachment; filename=incident-1795000000250-fault.rec.gz"
    )
    latest = await client.get("/api/v1/incidents/latest/recording")
    assert (latest.status, await latest.read()) == (200, b"data")
    for wrong in ("1795000000251-fault", "x-fault", "..%2F..%2Fetc%2Fpasswd"):
        answer = await client.get(f"/api/v1/incidents/{wrong}/recording")
        assert answer.status == 404


def test_the_page_links_recordings_of_incidents_since_the_start() -> None:
    incidents = (Incident(NOW - 9, "fault"), Incident(NOW - 8, "fault", counted=False))
    host = hosts.snapshot(hosts.daemon(incidents=incidents))
    page = render_page(status_of(host))
    assert page.count("/recording") == 1
    assert f"api/v1/incidents/{incidents[0].id}/recording" in page

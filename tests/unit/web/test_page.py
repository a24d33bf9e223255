"""What the page draws: numbers, lanes, lines, groups; and what it must not do."""

import re
from dataclasses import replace

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.visibility import unknowns
from mps_exporter.observations import LogState, Reading
from mps_exporter.snapshot import (
    CollectorResult,
    Incident,
    RecordingHeader,
    RecordingInfo,
    Snapshot,
    TimelineSpan,
    Wait,
)
from mps_exporter.web import status_page
from mps_exporter.web.status_api import History, make_status, to_json
from mps_exporter.web.status_api_fields import View
from testing import snapshots as hosts
from tests.unit.web.conftest import MakeClient
from tests.unit.web.fakes import ROOTS, FakeBackend, PageReader

NOW, UUID = hosts.NOW, hosts.UUID


def status_of(snapshot: Snapshot, history: History | None = None) -> View:
    return make_status(snapshot, host="node-7", history=history)


def page_of(snapshot: Snapshot) -> str:
    return status_page.render_page(status_of(snapshot))


def number(snapshot: Snapshot, label: str) -> tuple[str, str]:
    """Return the value and the note of a tile."""
    tile = rf"<dt>{label}</dt><dd>([^<]*?)(?: <span [^>]*>(.*?)</span>)?</dd>"
    found = re.search(tile, page_of(snapshot))
    assert found is not None
    return found[1], found[2] or ""


# ---------------------------------------------------------------------- numbers


def test_the_five_numbers() -> None:
    host = hosts.waiting(95)
    assert number(host, "GPUs") == ("1", "")
    assert number(host, "Clients") == ("2", "")
    assert number(host, "Waiting") == ("1", "longest 2 min")
    assert number(host, "SM activity") == ("12 %", "")
    assert number(hosts.healthy(), "Waiting") == ("0", "no client waits")
    nothing = hosts.snapshot()
    assert number(nothing, "Clients") == ("0", "no MPS daemon was seen")
    assert number(nothing, "Waiting") == ("0", "no MPS daemon was seen")


def test_a_partition_without_a_name_has_its_identifier() -> None:
    client = hosts.client(1, sm_partition="MPS-PART-1")
    assert "SM partition MPS-PART-1" in page_of(hosts.snapshot(hosts.daemon(hosts.server(client))))


def test_an_unknown_number_is_not_zero() -> None:
    blind = hosts.blind()
    assert number(blind, "GPUs")[0] == "not known"
    assert number(blind, "Waiting") == ("not known", "no readable log shows it")
    assert number(blind, "Incidents in 24 h") == ("not known", "not all logs can be read")
    assert number(blind, "SM activity")[0] == "not known"
    unknown = hosts.server(pid=9, clients_connected=None)
    host = hosts.snapshot(hosts.daemon(hosts.server(hosts.client(1)), unknown))
    assert number(host, "Clients")[0] == "1 or more"
    newer = hosts.daemon(protocol="3")
    assert number(hosts.snapshot(newer), "Waiting")[0] == "not known"
    assert unknowns(hosts.snapshot(newer)) == (
        "whether clients wait is not known: an MPS v3 daemon does not tell",
    )


# ---------------------------------------------------------------------- lanes


def test_a_lane_for_each_user_and_marks_where_something_broke() -> None:
    spans = (
        TimelineSpan("held", 1001, NOW - 900, NOW - 60),
        TimelineSpan("idle", 1001, NOW - 60, NOW - 59),
        TimelineSpan("waited", 1002, NOW - 300, NOW - 30, ongoing=True),
    )
    crash = Incident(at=NOW - 60, kind="server_crashed", uid=1001)
    made = hosts.daemon(
        hosts.server(), timeline=spans, timeline_since=NOW - 600, incidents=(crash,)
    )
    status = status_of(hosts.snapshot(made))
    waiter, holder = status_page.lanes(status, status.daemons[0])

    assert (waiter.user, holder.user) == ("user 1002", "alice")
    assert [(bar.kind, round(bar.x), round(bar.width)) for bar in holder.bars] == [
        ("held", 0, 900),
        ("idle", 900, 2),
        ("mark", 900, 4),
    ]
    assert [(bar.kind, round(bar.x), round(bar.width)) for bar in waiter.bars] == [
        ("waited", 500, 500)
    ]
    assert waiter.summary == "waited 5 min"
    assert holder.summary == "held 9 min · idle, others waited 1 s"


def test_the_time_before_the_exporter_started_is_marked_as_unknown() -> None:
    span = TimelineSpan("held", 1001, NOW - 30, NOW)
    known = hosts.daemon(hosts.server(), timeline=(span,), timeline_since=NOW - 30)
    assert 'class="unknown" width="500.0"' in page_of(hosts.snapshot(known))
    page = page_of(hosts.snapshot(hosts.daemon(timeline_since=NOW - 30)))
    assert "No user held the GPU in the last 60 s, as far as it was seen." in page


def test_ages_in_a_replay_are_recorded_time_at_any_speed() -> None:
    span = TimelineSpan("held", 1001, NOW - 300, NOW, ongoing=True)
    client = hosts.client(9, connected_at=NOW - 42)
    incident = Incident(NOW - 36, "fault")
    made = hosts.daemon(
        hosts.server(client), timeline=(span,), timeline_since=NOW - 300, incidents=(incident,)
    )
    host = hosts.snapshot(made)
    began = RecordingHeader("s", "m", "580", "2026-01-01", NOW - 600, "0", anonymised=False)
    for speed in (1.0, 3.0):
        page = page_of(replace(host, recording=RecordingInfo(began, speed, played_from=5000.0)))
        for words in ("36 s ago", "for 42 s", "connected for 5 min", "held 5 min"):
            assert words in page
        assert "This is a recording of another host" in page


# ---------------------------------------------------------------------- history


def at(seconds: float, busy: float | None = 0.5) -> Snapshot:
    readings = () if busy is None else (Reading("gpu_utilization", busy),)
    seen = replace(hosts.gpu().observation, readings=readings)
    return replace(hosts.healthy(), taken_at=NOW + seconds, gpus=(hosts.gpu(observation=seen),))


def history_of(*moments: tuple[float, float | None]) -> History:
    history = History()
    for seconds, busy in moments:
        history.add(at(seconds, busy))
    return history


def line(history: History, now: float) -> str:
    status = status_of(at(now), history)
    return status_page.sparkline(status.gpus[0].samples, "utilization_ratio", status)


def test_a_line_of_activity() -> None:
    assert line(history_of((0, 0.0), (10, 1.0)), 10) == "M590 19.0h1L600 1.0"


def test_a_missing_reading_is_a_gap() -> None:
    missing = history_of((0, 0.5), (10, 0.5), (20, None), (30, 0.5), (40, 0.5))
    assert line(missing, 40) == "M560 10.0h1L570 10.0M590 10.0h1L600 10.0"
    nobody = history_of((0, 0.5), (10, 0.5), (20, 0.5), (200, 0.5))
    assert line(nobody, 200) == "M400 10.0h1L410 10.0L420 10.0M600 10.0h1"
    assert line(history_of((0, None)), 0) == ""


def test_the_history_is_bounded() -> None:
    history = history_of(*((second / 2, 0.5) for second in range(2 * 900)))
    kept = history.samples(UUID, NOW + 900)
    assert len(kept) <= policy.MAX_HISTORY_SAMPLES
    assert kept[0].at >= NOW + 900 - policy.HISTORY_SECONDS
    for number in range(5):
        second = 1000 + number * (policy.HISTORY_SECONDS + 1)
        history.add(replace(at(second), gpus=(hosts.gpu(uuid=f"GPU-{number}"),)))
    assert history._samples.keys() == {"GPU-4"}


def test_a_restarted_replay_begins_a_new_history() -> None:
    history = history_of((0, 0.5), (10, 0.5), (-50, 0.5))
    assert [one.at for one in history.samples(UUID, NOW)] == [NOW - 50]
    assert status_of(at(0), history).totals.incidents_since == history.began_at == NOW - 50


def test_a_failed_source_shows_its_last_reading() -> None:
    history = history_of((0, 0.5))
    failed = CollectorResult("nvml", success=False, duration_seconds=5.0, error="late")
    status = status_of(replace(at(40), collectors=(failed,)), history)
    assert (status.sources[0].read_at, status.sources[0].error) == (NOW, "late")
    assert "failed, last read 40 s ago" in status_page.render_page(status)


def test_a_finding_without_a_time_is_dated_by_the_collections() -> None:
    history = History()
    hung = hosts.client(11, state="connecting", contexts={})
    ghost = hosts.snapshot(hosts.daemon(hosts.server(hung, ghost=True)))
    assert "<p>If the daemon does not answer 5 s later:</p>" in page_of(ghost)
    history.add(ghost)
    ghost = replace(ghost, taken_at=NOW + 20)
    history.add(ghost)
    assert status_of(ghost, history).headline.first_seen == NOW
    history.add(replace(hosts.healthy(), taken_at=NOW + 30))
    assert status_of(ghost, history).headline.first_seen is None


# ---------------------------------------------------------------------- groups


def test_clients_are_grouped_by_user_and_program() -> None:
    status = status_of(hosts.full())
    found = status_page.groups(status, status.gpus[0])
    assert [(len(one.clients), one.program, one.user, one.limit, one.memory) for one in found] == [
        (42, "train.py", "user1001", "no SM limit", "764 MiB each"),
        (6, "serve.py", "user1001", "no SM limit", "764 MiB each"),
    ]


def test_a_client_is_shown_without_a_readable_gpu() -> None:
    client = hosts.client(7, command="lonely", contexts={}, memory_used_bytes={})
    host = hosts.snapshot(hosts.daemon(hosts.server(client)), gpus=())
    assert host.daemons[0].gpu_uuids
    assert "lonely" in page_of(host)


def test_limits_are_never_added_up() -> None:
    assert "4800" not in page_of(hosts.full())
    two = (hosts.client(1, sm_limit={UUID: 13}), hosts.client(2, sm_limit={UUID: 66}))
    status = status_of(hosts.snapshot(hosts.daemon(hosts.server(*two))))
    (found,) = status_page.groups(status, status.gpus[0])
    assert (found.limit, found.sm_ratios) == ("at most 13 to 66 of 132 SMs", (13 / 132, 0.5))


def test_a_client_in_trouble_comes_first() -> None:
    torn = hosts.client(9, command="odd", state="torn_down", state_since=NOW - 5)
    many = (hosts.client(pid) for pid in range(1, 5))
    status = status_of(hosts.snapshot(hosts.daemon(hosts.server(*many, torn))))
    first = status_page.groups(status, status.gpus[0])[0]
    assert (first.program, first.alarm) == ("odd", True)
    assert first.state == "1 torn down by a fatal GPU error"


def test_everything_beyond_the_first_few_is_folded() -> None:
    many = tuple(hosts.client(pid, command=f"program-{pid}") for pid in range(1, 48))
    waits = tuple(Wait(pid, 1002, NOW - 5, 1001) for pid in range(100, 140))
    page = page_of(hosts.snapshot(hosts.daemon(hosts.server(*many), waits=waits)))
    assert "43 more programs, 43 clients" in page
    assert "36 more clients in the queue" in page


# ---------------------------------------------------------------------- hostile names


EVIL = "\"'><img src=x onerror=alert(1)></title></script><script>alert(2)</script>{{ 7*7 }}"


def evil_hosts() -> dict[str, Snapshot]:
    def client(name: str) -> Snapshot:
        return hosts.snapshot(hosts.daemon(hosts.server(hosts.client(641, **{name: EVIL}))))

    def server(name: str) -> Snapshot:
        return hosts.snapshot(hosts.daemon(hosts.server(hosts.client(641), **{name: EVIL})))

    def daemon(name: str) -> Snapshot:
        made = hosts.daemon(hosts.server(hosts.client(641)), **{name: EVIL}, state="absent", uid=1)
        return hosts.snapshot(made)

    def gpu(**changes: object) -> Snapshot:
        return replace(hosts.healthy(), gpus=(hosts.gpu(**changes),))

    seen = hosts.gpu().observation
    incident = Incident(at=NOW - 1, kind="server_start_failed", uid=1, detail=EVIL)
    failed = CollectorResult("nvml", success=False, duration_seconds=0.1, error=EVIL)
    log = LogState("/tmp/nvidia-mps", "control", f"/l/{EVIL}", readable=False, error=EVIL)
    names = ("command", "user", "container_id", "pod_uid", "slurm_job_id", "systemd_unit")
    return {
        **{f"client.{name}": client(name) for name in names},
        **{f"server.{name}": server(name) for name in ("user", "state")},
        **{f"daemon.{name}": daemon(name) for name in ("pipe_directory", "log_directory", "user")},
        "gpu.name": gpu(observation=replace(seen, name=EVIL)),
        "gpu.compute_mode": gpu(observation=replace(seen, compute_mode=EVIL)),
        "gpu.served_by": gpu(served_by=(EVIL,), index=EVIL),
        "incident": hosts.snapshot(hosts.daemon(incidents=(incident,))),
        "error": replace(hosts.healthy(), collectors=(failed,)),
        "log": hosts.snapshot(hosts.daemon(logs=(log,))),
        "versions": replace(hosts.healthy(), driver_version=EVIL, cuda_version=EVIL),
    }


@pytest.mark.parametrize("place", evil_hosts())
def test_markup_in_a_name_stays_text(place: str) -> None:
    snapshot = evil_hosts()[place]
    status = make_status(snapshot, host=EVIL)
    page = status_page.render_page(status)
    reader = PageReader(page)

    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "style"]
    assert "{{ 7*7 }}" in page  # of the host's name: not evaluated
    urls = [value or "" for name, value in reader.attributes if name in ("href", "src")]
    own = ("https://github.com/mps-exporter/", "docs/", "static/", "api/", "-/", "metrics")
    assert all(url.startswith(own) for url in urls)
    to_json(status)


# ---------------------------------------------------------------------- over HTTP


async def test_the_title_is_the_host_not_the_host_header(
    backend: FakeBackend, make_client: MakeClient
) -> None:
    backend.snapshot, backend.host = hosts.healthy(), "node-7"
    client = await make_client()
    page = await (await client.get("/", headers={"Host": "evil.example"})).text()

    assert "<title>MPS on node-7</title>" in page
    assert "evil.example" not in page


async def test_an_incident_makes_the_last_status_stale(
    backend: FakeBackend, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mps_exporter.limits_without_a_flag.STATUS_REUSE_SECONDS", 3600.0)
    backend.snapshot = hosts.healthy()
    client = await make_client()
    assert "All is well" in await (await client.get("/")).text()
    backend.snapshot = hosts.crashed()
    assert "All is well" in await (await client.get("/")).text()
    backend.publish(ROOTS, Incident(at=NOW, kind="server_crashed", uid=1001))

    assert "crashed; 2 clients were lost" in await (await client.get("/")).text()

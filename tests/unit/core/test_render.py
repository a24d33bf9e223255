import asyncio
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mps_exporter.metrics import CATALOGUE, Build, ClientSeries, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, encode
from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.metrics.metric_types import Family
from mps_exporter.mps.incidents_and_counters import Counters
from mps_exporter.observations import ContainerName, DaemonFacts
from mps_exporter.snapshot import (
    Client,
    CollectorResult,
    ControlDaemon,
    ControlState,
    Partitioning,
    RecordingHeader,
    RecordingInfo,
    Server,
    Snapshot,
    Wait,
)
from testing import snapshots as hosts
from testing import v3_host
from testing.golden import GOLDEN
from testing.player import Player
from tools import generate_docs

BUILD = Build("1.0", "abc", "3.11")
LEVELS: tuple[ClientSeries, ...] = ("full", "summary", "off")
HEADER = RecordingHeader("a test", "a host", "580.3", "then", 0.0, "1.0", anonymised=True)


def daemon_at(path: str, state: ControlState | None = "answering", **more: Any) -> ControlDaemon:
    return ControlDaemon(path, "/l", state, DaemonFacts(path, "/l"), **more)


def families(snapshot: Snapshot) -> dict[str, Family]:
    return {family.spec.name: family for family in render(snapshot, BUILD)}


def test_an_empty_snapshot_has_only_the_build_info() -> None:
    found = families(Snapshot(taken_at=1.0))
    assert set(found) == {"mps_exporter_build_info"}


def test_a_summary_of_clients_leaves_their_details_out() -> None:
    client = hosts.client(30, state="connecting", state_since=1.0, priority=1)
    daemon = daemon_at("/p", servers=(Server(20, clients=(client, replace(client, pid=31))),))
    full, summary, off = (
        {
            one.spec.name: one.samples
            for one in render(Snapshot(9.0, daemons=(daemon,)), BUILD, clients=level)
        }
        for level in LEVELS
    )
    assert {one.removeprefix("mps_client_") for one in full.keys() - summary.keys()} == {
        *("start_time_seconds", "memory_limit_bytes", "sm_limit", "priority")
    }
    dropped = "mps_client_dropped_series"
    assert [one[dropped][0][1] for one in (full, summary, off)] == [0, 0, 2]
    assert [one for one in off if one.startswith("mps_client_")] == [dropped]


def test_a_replay_has_timestamps_of_the_viewer_s_clock() -> None:
    server = Server(20, start_time_seconds=100.0, clients=(Client(30, 20, connected_at=110.0),))
    snapshot = Snapshot(
        taken_at=120.0,
        daemons=(daemon_at("/p", servers=(server,)),),
        recording=RecordingInfo(HEADER, 2.0),
    )
    shifted = {f.spec.name: f for f in render(snapshot, BUILD, wall=lambda moment: moment + 1000)}
    assert shifted["mps_server_start_time_seconds"].samples[0][1] == 1100.0
    assert shifted["mps_client_start_time_seconds"].samples[0][1] == 1110.0


def test_clients_that_share_pid_0_have_no_series() -> None:
    numberless = tuple(Client(0, 20, active_thread_ratio=ratio) for ratio in (0.1, 0.2))
    one = Server(20, clients=(*numberless, Client(30, 20, active_thread_ratio=0.3)))
    alone = Server(21, clients=(Client(0, 21, active_thread_ratio=0.4),))
    daemon = daemon_at("/p", servers=(one, alone), dropped_clients=5)
    found = families(Snapshot(taken_at=1.0, daemons=(daemon,)))
    assert dict(found["mps_client_active_thread_ratio"].samples) == {
        ("/p", "20", "30"): 0.3,
        ("/p", "21", "0"): 0.4,
    }
    assert len(found["mps_client_info"].samples) == 2
    assert found["mps_client_dropped_series"].samples == ((("/p",), 7),)


def test_daemons_with_the_same_long_beginning_of_a_path_are_distinguished() -> None:
    names = ["/" + "x" * 300 + end for end in "ab"]
    server = Server(20, clients=(Client(30, 20),))
    daemons = tuple(daemon_at(name, servers=(server,)) for name in names)
    found = families(Snapshot(taken_at=1.0, daemons=daemons))
    shown = [labels[0] for labels, _ in found["mps_control_up"].samples]
    assert len(set(shown)) == 2
    assert {(one[:183], len(one)) for one in shown} == {(names[0][:183], 200)}
    assert [labels[0] for labels, _ in found["mps_client_info"].samples] == shown


def test_the_first_of_two_things_with_the_same_labels_counts() -> None:
    clients = (Client(30, 20, connected_at=5.0), Client(30, 20, connected_at=7.0))
    daemon = daemon_at("/p", servers=(Server(20, clients=clients),))
    found = families(Snapshot(taken_at=9.0, daemons=(daemon,)))
    assert found["mps_client_start_time_seconds"].samples == ((("/p", "20", "30"), 5.0),)


@given(st.text(max_size=300))
def test_no_program_name_breaks_the_page(name: str) -> None:
    client = Client(30, 20, command=name, user=name)
    server = Server(20, clients=(client,))
    snapshot = Snapshot(
        taken_at=1.0,
        daemons=(daemon_at("/p", servers=(server,)),),
        collectors=(CollectorResult("nvml", success=True, duration_seconds=0.1),),
    )
    page = encode(render(snapshot, BUILD), (), TEXT_0_0_4).decode()
    parsed = {family.name: family for family in text_string_to_metric_families(page)}
    (sample,) = parsed["mps_client_info"].samples
    assert set(sample.labels) == set(CATALOGUE["mps_client_info"].labels)
    assert sample.labels["command"].isprintable()
    assert len(sample.labels["command"]) <= 200
    if name.isprintable() and len(name) <= 200:
        assert sample.labels["command"] == name


def test_the_reference_pages_are_up_to_date() -> None:
    assert dict(generate_docs.stale()) == {}, "run: python -m tools.generate_docs"


# ---------------------------------------------------------- all metrics

D, U = "/run/mps", "GPU-a"
G = ("0", U)

SERVER = Server(20, pinned_memory_limit_bytes={U: 6}, clients=(Client(30, 20, priority=1),))
DAEMON = daemon_at(
    D,
    default_pinned_memory_limit_bytes={U: 11},
    servers=(SERVER,),
    partitioning=Partitioning("3", not_understood={("device_list", "row"): 24}),
)
SNAPSHOT = Snapshot(
    taken_at=200.0,
    gpu_indexes={U: "0"},
    daemons=(DAEMON,),
    collectors=(CollectorResult("nvml", success=False, duration_seconds=0.125),),
    recording=RecordingInfo(HEADER, 2.0),
    containers=(ContainerName("containerd://c0ffee", "research", "train-0", "main"),),
    ignored_processes={1004: 21},
)
SHOWN = {
    "mps_control_default_pinned_memory_limit_bytes": {(D, *G): 11},
    "mps_server_pinned_memory_limit_bytes": {(D, "20", *G): 6},
    "mps_container_info": {("containerd://c0ffee", "research", "train-0", "main"): 1},
    "mps_client_priority": {(D, "20", "30"): 1},
    "mps_control_reply_not_understood": {(D, "device_list", "row"): 24},
    "mps_scrape_collector_duration_seconds": {("nvml",): 0.125},
    "mps_exporter_ignored_processes": {("1004",): 21},
    "mps_exporter_recording_info": {("a test", "a host", "580.3", "then", "2"): 1},
}


def test_metrics_that_no_recording_has() -> None:
    found = families(SNAPSHOT)
    assert {name: dict(found[name].samples) for name in SHOWN} == SHOWN


def test_each_metric_is_tested_here_or_by_a_golden_text_or_as_a_reading() -> None:
    recorded = {
        name
        for path in GOLDEN.glob("*.txt")
        for name in re.findall(r"^metric (mps_\w+)", path.read_text(), re.MULTILINE)
    }
    readings = {spec.name for spec in BY_QUANTITY.values()}
    assert SHOWN.keys() == CATALOGUE.keys() - recorded - readings


def lengthened(value: Any) -> Any:
    """Return a value with long texts."""
    if isinstance(value, str):
        return value + "x" * 300
    if isinstance(value, tuple | frozenset):
        return type(value)(map(lengthened, value))
    if isinstance(value, dict):
        return {lengthened(key): lengthened(one) for key, one in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{one.name: lengthened(getattr(value, one.name)) for one in fields(value)}
    )


def test_no_label_is_long() -> None:
    whole = asyncio.run(Player(v3_host.recording()).to_end()).snapshot
    for snapshot in (whole, SNAPSHOT):
        found = render(
            replace(lengthened(snapshot), collectors=()), Build("1.0", "a" * 300, "3.11")
        )
        lengths = {
            len(value) for family in found for labels, _ in family.samples for value in labels
        }
        assert max(lengths) == 200


def test_faults_of_a_gpu_remain_after_the_daemon_has_stopped_serving_it() -> None:
    counted = Counters()
    counted.increment("mps_server_faults_total", uuid="GPU-gone")
    daemon = daemon_at(D, None, counters=counted.snapshot(), gpu_uuids=(U,))
    found = families(Snapshot(1.0, daemons=(daemon,), gpu_indexes={U: "0"}))
    assert dict(found["mps_server_faults_total"].samples) == {
        (D, "", ""): 0,
        (D, *G): 0,
        (D, "", "GPU-gone"): 1,
    }


def test_unknown_users_come_first() -> None:
    counted = Counters()
    counted.increment("mps_uid_waits_abandoned_total", uid=None)
    waits = (Wait(5, 1003, 7.0, 1001), Wait(6, 1002, 8.0, 1001))
    daemon = daemon_at(D, None, counters=counted.snapshot(), waits=waits)
    found = families(Snapshot(1.0, daemons=(daemon,)))
    assert found["mps_uid_waiting_clients"].samples == (
        ((D, ""), 0),
        ((D, "1002"), 1),
        ((D, "1003"), 1),
    )

"""Every value that others published of an MPS v3 daemon is shown, and no other."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.commands.doctor_report import Diagnosis, diagnosis_lines
from mps_exporter.diagnostics import findings
from mps_exporter.merge import merge
from mps_exporter.mps.protocol_v3 import (
    CLIENTS,
    DEVICES,
    NAMESPACES,
    PARTITIONS,
    READ_ONLY_V3,
    SERVERS,
    anonymised,
)
from mps_exporter.observations import (
    CgroupMemory,
    GpuProcess,
    LogChunk,
    LogsObservation,
    LogState,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Client, ControlDaemon, Snapshot
from mps_exporter.sources.recording import Recording, RecordingWriter, read_recording
from mps_exporter.web import status_page
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_findings import make_status
from testing import fake_mps_v3 as published
from testing.player import Metrics, Player
from testing.v3_host import (
    EVAL,
    GPU,
    LARGE,
    PIPE,
    SERVER,
    START,
    TRAIN,
    facts,
    gpu,
    process,
    processes,
    recording,
)

GIB = 1 << 30


def played(made: Recording) -> Metrics:
    return asyncio.run(Player(made).to_end())


def shown(**changes: str) -> Metrics:
    """The metrics of the manual's host with some replies changed."""
    names = {
        "servers": SERVERS,
        "namespaces": NAMESPACES,
        "clients": CLIENTS,
        "partitions": PARTITIONS,
        "devices": DEVICES,
    }
    replies = {**published.MANUAL, **{names[name]: text for name, text in changes.items()}}
    return played(recording(replies))


def daemon_of(metrics: Metrics) -> ControlDaemon:
    (daemon,) = metrics.snapshot.daemons
    return daemon


def clients(metrics: Metrics) -> dict[int, Client]:
    return {one.pid: one for server in daemon_of(metrics).servers for one in server.clients}


def with_environment(**environments: dict[str, str]) -> dict[int, ProcessFacts]:
    found = processes()
    for name, environment in environments.items():
        pid = {"train": TRAIN, "evaluate": EVAL}[name]
        found[pid] = replace(found[pid], mps_environment=environment)
    return found


def test_every_value_of_the_manual_s_examples_is_a_metric() -> None:
    metrics = played(recording())

    def labels(name: str, **wanted: object) -> dict[str, str]:
        ((found, _),) = metrics.all(name, **wanted)
        return found

    assert metrics.value("mps_control_up", daemon=PIPE) == 1
    assert labels("mps_control_info")["protocol"] == "3"
    assert labels("mps_named_server_info") == {
        "daemon": PIPE,
        "server_name": "training",
        "server": "48201",
        "uid": "1000",
        "status": "Ready",
        "pipe_directory": "/run/nvidia-mps/training",
        "allowed_devices": "GPU-abcd-1234",
        "context_ids": "",
    }
    assert metrics.value("mps_server_state", server=SERVER, mps_server_state="Ready") == 1
    assert metrics.value("mps_server_clients", server=SERVER) == 2
    assert metrics.value("mps_control_servers") == 1
    high = {"server_name": "training", "namespace": "high_priority"}
    assert metrics.value("mps_namespace_active_thread_ratio", **high) == 0.5
    assert metrics.value("mps_namespace_pinned_memory_limit_bytes", **high) == 4 * GIB
    assert metrics.value("mps_namespace_limited", limit="active_threads", **high) == 1
    assert metrics.value("mps_namespace_clients", **high) == 1
    assert metrics.value("mps_namespace_client_priority", **high) == 0
    default = {"server_name": "training", "namespace": "default"}
    assert metrics.value("mps_namespace_limited", limit="active_threads", **default) == 0
    assert metrics.value("mps_namespace_active_thread_ratio", **default) is None
    assert metrics.value("mps_namespace_pinned_memory_limit_bytes", **default) == 8 * GIB
    assert labels("mps_client_namespace_info", pid=EVAL)["namespace"] == "high_priority"
    assert labels("mps_client_namespace_info", pid=TRAIN)["namespace"] == "default"
    partition = {"server_name": "training", "gpu": "0", "uuid": GPU, "partition": "large"}
    assert labels("mps_sm_partition_info", **partition)["partition_id"] == LARGE.partition("/")[2]
    assert metrics.value("mps_sm_partition_sms", **partition) == 34
    assert metrics.value("mps_sm_partition_chunks", **partition) == 4
    assert metrics.value("mps_sm_partition_clients", **partition) == 1
    assert metrics.value("mps_sm_partition_unallocated_sms", uuid=GPU) == 8
    assert metrics.value("mps_sm_partition_unallocated_chunks", uuid=GPU) == 1
    assert labels("mps_client_sm_partition_info")["partition"] == "large"
    assert metrics.value("mps_server_device_sms", uuid=GPU) == 188
    assert metrics.value("mps_server_device_chunks", uuid=GPU) == 23
    for feature in ("memacct", "context-share"):
        assert labels("mps_control_feature_info", feature=feature)["enabled"] == "true"
    assert metrics.all("mps_control_reply_not_understood") == []
    assert metrics.value("mps_gpu_served", uuid=GPU, daemon=PIPE) == 1


def test_the_captured_namespaces_and_clients() -> None:
    vllm = "GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d"
    metrics = shown(
        servers=f"{published.SERVER_HEADER}\nsrv,0,700,Ready,/run/nvidia-mps/srv,{vllm},-\n",
        namespaces=published.NAMESPACES_CSV.replace("shared", "srv"),
        clients=f"{published.CLIENT_HEADER}\n{published.CLIENTS_CAPTURE}",
    )
    ratios = {
        found["namespace"]: value
        for found, value in metrics.all("mps_namespace_active_thread_ratio")
    }
    assert ratios == {"small": 0.3, "large": 0.7, "default": 0.5}
    assert metrics.value("mps_namespace_pinned_memory_limit_bytes", namespace="large") == 56 * GIB
    assert metrics.value("mps_namespace_clients", namespace="default") == 2
    assert set(clients(metrics)) == {3167082, 3165259}
    for client in clients(metrics).values():
        assert (client.command, client.gpu_uuids) == ("VLLM::EngineCore", (vllm,))


@pytest.mark.parametrize(
    ("own", "ratio"),
    [
        ({}, 0.5),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}, 0.1),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80"}, 0.5),
    ],
)
def test_the_effective_share_is_the_lower_one(own: dict[str, str], ratio: float) -> None:
    metrics = played(recording(found=with_environment(evaluate=own)))
    assert metrics.value("mps_client_active_thread_ratio", pid=EVAL) == ratio


def test_a_namespace_without_limits_allows_the_whole_gpu() -> None:
    metrics = played(recording(found=with_environment(train={}, evaluate={})))
    assert metrics.value("mps_client_active_thread_ratio", pid=TRAIN) == 1.0
    assert metrics.value("mps_client_sm_limit", pid=TRAIN, uuid=GPU) == 188
    # The limits of its server hold for the namespace default, which the client is in.
    assert metrics.value("mps_client_memory_limit_bytes", pid=TRAIN, uuid=GPU) == 8 * GIB


def test_of_a_client_in_an_unknown_namespace_no_limit_is_known() -> None:
    metrics = shown(clients="51087,training,0,gone,python\n")
    assert metrics.value("mps_client_active_thread_ratio", pid=EVAL) is None
    assert metrics.value("mps_client_memory_limit_bytes", pid=EVAL) is None


def test_an_entry_for_a_gpu_that_is_not_there_voids_the_namespace_s_memory_limit() -> None:
    own = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=4G"}
    metrics = played(recording(found=with_environment(evaluate=own)))
    assert metrics.value("mps_client_memory_limit_bytes", pid=EVAL) is None
    lowered = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}
    metrics = played(recording(found=with_environment(evaluate=lowered)))
    assert metrics.value("mps_client_memory_limit_bytes", pid=EVAL, uuid=GPU) == 2 * GIB


def test_a_client_in_a_partition_has_its_sms() -> None:
    metrics = played(recording())
    assert metrics.value("mps_client_sm_limit", pid=TRAIN, uuid=GPU) == 34
    assert metrics.value("mps_client_active_thread_ratio", pid=TRAIN) is None


OTHER = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    ("partition", "partitions", "fault"),
    [
        (LARGE, None, ""),
        (LARGE.replace(GPU, "GPU-74d43ed3"), None, ""),
        (f"{GPU}/Zz", None, "unknown"),
        (
            LARGE,
            published.csv_of(published.PARTITIONS_TABLE).replace("training", "other"),
            "other_server",
        ),
        (LARGE.replace(GPU, OTHER), None, "other_gpu"),
    ],
)
def test_a_client_in_a_partition_that_was_not_meant_for_it(
    partition: str, partitions: str | None, fault: str
) -> None:
    replies = dict(published.MANUAL)
    if partitions is not None:
        replies[PARTITIONS] = partitions
    found = with_environment(train={"CUDA_MPS_SM_PARTITION": partition})
    metrics = played(recording(replies, found))
    ((labels, _),) = metrics.all("mps_client_sm_partition_info", pid=TRAIN)
    assert labels["fault"] == fault


def test_partitions_without_the_right_to_read_an_environment() -> None:
    found = processes()
    found[EVAL] = replace(found[EVAL], mps_environment=None)
    metrics = played(recording(found=found))
    assert metrics.value("mps_sm_partition_clients") is None
    assert metrics.value("mps_sm_partition_sms") == 34


def test_a_server_that_is_configured_only_has_no_process() -> None:
    row = "idle,1000,0,Stopped,/run/nvidia-mps/idle,-,-\n"
    metrics = shown(servers=published.MANUAL[SERVERS] + row)
    assert metrics.value("mps_named_server_info", server_name="idle", server="") == 1
    assert metrics.value("mps_control_servers") == 1


def test_several_servers_at_once() -> None:
    metrics = shown(
        servers=published.MANUAL[SERVERS]
        + "serving,1001,48300,Ready,/run/nvidia-mps/serving,-,-\n",
        clients="51023,training,0,default,a\n51087,serving,0,default,b\n",
    )
    assert metrics.value("mps_control_servers") == 2
    assert metrics.value("mps_server_clients", server=48300) == 1
    assert metrics.value("mps_server_info", server=48300, uid=1001) == 1


def test_what_is_not_understood_is_counted() -> None:
    metrics = shown(
        clients=published.CLIENTS_TABLE, namespaces="name,server,colour\na,training,red\n"
    )
    assert metrics.value("mps_control_up") == 1
    assert metrics.value("mps_control_reply_not_understood", reply="client_list", part="row")
    assert (
        metrics.value("mps_control_reply_not_understood", reply="namespace_list", part="column")
        == 1
    )


def test_nothing_is_counted_in_a_list_of_which_rows_were_left_out() -> None:
    metrics = shown(clients=published.MANUAL[CLIENTS].replace("51087", "510..."))
    assert metrics.value("mps_client_info", pid=TRAIN) == 1
    for name in ("mps_server_clients", "mps_namespace_clients", "mps_sm_partition_clients"):
        assert metrics.value(name) is None, name
    assert "0 clients" not in "\n".join(diagnosis_lines(Diagnosis(metrics.snapshot)))
    metrics = shown(clients=published.MANUAL[CLIENTS].replace("high_priority", "HIGH"))
    assert metrics.value("mps_server_clients") == 2
    assert metrics.value("mps_namespace_clients") is None
    row = "idle,1000,48...,Ready,/run/nvidia-mps/idle,-,-\n"
    assert shown(servers=published.MANUAL[SERVERS] + row).value("mps_control_servers") is None


@pytest.mark.parametrize("rest", [f"training,{GPU},-,23,188,-,unallocated,-\n", ""])
def test_how_many_sms_a_client_has_in_a_partition_that_is_gone_is_not_known(rest: str) -> None:
    replies = dict(published.MANUAL)
    header = replies[PARTITIONS].splitlines()[0]
    replies[PARTITIONS] = f"{header}\n{rest}"
    metrics = played(recording(replies))
    ((labels, _),) = metrics.all("mps_client_sm_partition_info", pid=TRAIN)
    assert labels["fault"] == "unknown"
    for name in ("mps_client_active_thread_ratio", "mps_client_sm_limit"):
        assert metrics.value(name, pid=TRAIN) is None
    del replies[PARTITIONS]
    metrics = played(recording(replies))
    ((labels, _),) = metrics.all("mps_client_sm_partition_info", pid=TRAIN)
    assert labels["fault"] == ""
    assert metrics.value("mps_client_sm_limit", pid=TRAIN) is None


def test_what_two_names_of_a_gpu_say_of_one_partition_is_not_believed() -> None:
    text = published.MANUAL[PARTITIONS]
    other = text.splitlines()[1].replace(GPU, "0").replace(",34,", ",36,")
    metrics = shown(partitions=f"{text}{other}\n")
    assert metrics.value("mps_sm_partition_sms") is None
    assert metrics.value("mps_sm_partition_unallocated_sms") == 8
    assert metrics.value("mps_control_reply_not_understood", part="row") == 2


def test_an_empty_list_of_servers_says_that_none_runs_and_nothing_says_nothing() -> None:
    assert shown(servers=f"{published.SERVER_HEADER}\n").value("mps_control_servers") == 0
    assert shown(servers="").value("mps_control_servers") is None


def test_a_daemon_in_its_own_pid_namespace_numbers_processes_otherwise() -> None:
    def inside(pid: int, inner: int, name: str) -> ProcessFacts:
        return replace(process(pid, name), namespace_pids=(pid, inner), pid_namespace=77)

    found = {
        9001: inside(9001, EVAL, "python"),
        9002: inside(9002, SERVER, "nvidia-cuda-mps-server"),
    }
    control = inside(9000, 5, "nvidia-cuda-mps-control")
    metrics = played(recording(found=found, daemon=facts(process=control, servers=())))
    assert metrics.value("mps_server_clients", server=9002) == 2
    assert metrics.value("mps_client_namespace_info", pid=9001, namespace="high_priority") == 1


def test_clients_that_cannot_be_told_apart_have_no_series() -> None:
    server = replace(
        process(9002, "nvidia-cuda-mps-server"), namespace_pids=(9002, SERVER), pid_namespace=77
    )
    control = replace(
        process(9000, "nvidia-cuda-mps-control"), namespace_pids=(9000, 5), pid_namespace=77
    )
    daemon = facts(process=control, servers=())
    metrics = played(recording(found={9002: server}, daemon=daemon))
    assert metrics.value("mps_client_dropped_series") == 2
    assert metrics.all("mps_client_namespace_info") == []
    assert metrics.value("mps_namespace_clients", namespace="default") == 1


_texts = st.sampled_from(
    [
        *published.MANUAL.values(),
        published.CLIENTS_TABLE,
        published.PARTITIONS_TABLE,
        published.CLIENTS_CAPTURE,
        "",
        "Segmentation fault",
    ]
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(READ_ONLY_V3)), _texts | st.text(), max_size=6))
def test_no_reply_of_any_shape_makes_a_collection_fail(replies: dict[str, Any]) -> None:
    metrics = played(recording({**published.MANUAL, **replies}))
    failed = [one for one in metrics.snapshot.collectors if not one.success]
    assert [one.name for one in failed if one.name != "logs"] in ([], ["control"])
    pids = {str(client.pid) for client in clients(metrics).values()}
    text = "".join([*published.MANUAL.values(), *replies.values()])
    assert all(pid in text for pid in pids)


# ------------------------------------------------------------------------------ for people


def page_of(snapshot: Snapshot) -> str:
    return status_page.render_page(make_status(snapshot, WebOptions(host="node-7")), WebOptions())


VALUES = (
    "training",
    "UID 1000",
    "process 48201",
    "Ready",
    "/run/nvidia-mps/training",
    "GPU-abcd-1234",
    "training/high_priority",
    "50 % of the SMs",
    "4.0 GiB",
    "no SM limit",
    "8.0 GiB",
    "1 client",
    "large",
    "34 SMs",
    "4 chunks",
    "created",
    "8 SMs, 1 chunk",
    "188 SMs, 23 chunks",
    "memacct on (default)",
    "context-share on (default)",
)


def test_the_doctor_shows_every_value() -> None:
    text = "\n".join(diagnosis_lines(Diagnosis(played(recording()).snapshot)))
    assert [value for value in VALUES if value not in text] == []
    assert "client 51023  lovelace  python, on GPU 0, namespace default, SM partition large" in text
    assert "up to 10 %, on GPU 0, namespace high_priority" in text


def test_the_page_shows_every_value() -> None:
    snapshot = played(recording()).snapshot
    html = page_of(snapshot)
    assert [value for value in VALUES if value not in html] == []


def test_hostile_names_are_escaped_on_the_page() -> None:
    replies = {
        **published.MANUAL,
        CLIENTS: "51087,training,0,high_priority,<script>alert(1)</script>\n",
        DEVICES: published.MANUAL[DEVICES].replace("NVIDIA RTX PRO 6000", "<img src=x>"),
    }
    metrics = played(recording(replies, found={}))
    html = page_of(metrics.snapshot)
    assert "<script>alert" not in html
    assert "<img src" not in html
    assert "&lt;img src=x&gt;" in html


# ------------------------------------------------------------------------------ recordings

CONTROL_LINES = """\
[2026-11-21 08:00:00.000 Control 48100] Starting control daemon using socket /run/nvidia-mps/control
[2026-11-21 08:00:00.100 Control 48100] Adding server 'training' [multiuser enabled]
[2026-11-21 08:00:00.200 Control 48100] Cmd:namespace create high_priority --server=training
[2026-11-21 08:00:00.300 Control 48100] Namespace 'high_priority' created
"""

SECRETS = (
    "training",
    "high_priority",
    "serving",
    "large",
    "python",
    "train.py",
    "eval.py",
    "lovelace",
)
LOGS = LogsObservation(
    START,
    (
        LogChunk(START, PIPE, "control", CONTROL_LINES.encode(), history=True),
        LogChunk(
            START,
            PIPE,
            "server",
            b"[2026-11-21 08:00:01.000 Other 48201] Startup\n",
            server_name="training",
        ),
    ),
    (
        LogState(PIPE, "control", "/var/log/nvidia-mps/control.log", readable=True),
        LogState(PIPE, "server", "/var/log/nvidia-mps/training/server.log", readable=True),
    ),
)


def recorded(made: Recording, path: Path, *, anonymise: bool) -> str:
    """The text of a file with these observations."""
    writer = RecordingWriter(path, replace(made.header, anonymised=anonymise))
    for observation in made.observations:
        writer.add(observation)
    writer.close()
    return gzip.decompress(path.read_bytes()).decode("utf-8")


@pytest.fixture
def named_clients() -> Recording:
    found = processes()
    found[EVAL] = replace(
        found[EVAL],
        mps_environment={
            "CUDA_MPS_PIPE_DIRECTORY": f"{PIPE}/training/high_priority",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
        },
    )
    return recording(found=found, more=(LOGS,))


def test_a_recording_of_a_v3_host_replays_what_was_seen(
    named_clients: Recording, tmp_path: Path
) -> None:
    recorded(named_clients, tmp_path / "v3.rec.gz", anonymise=False)
    live, replayed = played(named_clients), played(read_recording(tmp_path / "v3.rec.gz"))
    assert replayed.snapshot.daemons == live.snapshot.daemons


def test_an_anonymised_recording_of_a_v3_host_has_no_name_that_a_user_chose(
    named_clients: Recording, tmp_path: Path
) -> None:
    text = recorded(named_clients, tmp_path / "v3.rec.gz", anonymise=True)
    assert [secret for secret in SECRETS if secret in text] == []
    assert GPU not in text


def test_it_gives_the_same_numbers_all_the_same(named_clients: Recording, tmp_path: Path) -> None:
    recorded(named_clients, tmp_path / "v3.rec.gz", anonymise=True)
    live, replayed = played(named_clients), played(read_recording(tmp_path / "v3.rec.gz"))
    for name in (
        "mps_namespace_active_thread_ratio",
        "mps_namespace_pinned_memory_limit_bytes",
        "mps_namespace_clients",
        "mps_client_active_thread_ratio",
        "mps_sm_partition_sms",
        "mps_sm_partition_clients",
        "mps_server_clients",
        "mps_server_device_sms",
    ):
        assert live.value(name) is not None
        assert replayed.value(name) == live.value(name)
    ((client, _),) = replayed.all("mps_client_namespace_info", pid=EVAL)
    assert (client["server_name"], client["namespace"]) == ("server_1", "namespace_1")
    environment = clients(replayed)[EVAL]
    assert environment.active_thread_ratio == 0.1


@pytest.mark.parametrize("query", sorted(READ_ONLY_V3))
@given(text=_texts | st.text())
def test_no_reply_keeps_a_recording_from_being_anonymised(query: str, text: str) -> None:
    found = anonymised(query, text, PIPE, lambda kind, _: f"{kind}_1")
    rows = [line for line in text.split("\n") if line.strip()]
    assert found.count("\n") == len(rows)


# ------------------------------------------------------------------------------ memory partitions

GROUP = "/kubepods.slice/kubepods-pod0123.slice/" + "x" * 200
MEMORY = (
    CgroupMemory("/user.slice/user-1000.slice", "00000000:02:00.0", 512 << 20, 4 << 30, 8 << 30),
    CgroupMemory(GROUP, "00000000:02:00.0", 1, 0, hard_unlimited=True),
    CgroupMemory("/unknown", "00000000:99:00.0", 1),
)


def test_gpu_memory_of_control_groups_is_shown_with_who_is_in_them() -> None:
    made = recording()
    seen, *rest = made.observations
    assert isinstance(seen, ProcfsObservation)
    metrics = played(replace(made, observations=(replace(seen, cgroup_memory=MEMORY), *rest)))
    of_user = {"cgroup": "/user.slice/user-1000.slice", "uuid": GPU, "gpu": "0"}
    assert metrics.value("mps_cgroup_memory_used_bytes", **of_user) == 512 << 20
    assert metrics.value("mps_cgroup_memory_soft_limit_bytes", **of_user) == 4 * GIB
    assert metrics.value("mps_cgroup_memory_hard_limit_bytes", **of_user) == 8 * GIB
    assert metrics.value("mps_cgroup_memory_limited", **of_user) == 1
    ((labels, _),) = metrics.all("mps_client_cgroup_info", pid=TRAIN)
    assert labels["cgroup"] == "/user.slice/user-1000.slice"
    ((info, _),) = metrics.all("mps_cgroup_info", cgroup=labels["cgroup"])
    assert info["systemd_unit"] == "user-1000.slice"
    long = [found["cgroup"] for found, _ in metrics.all("mps_cgroup_memory_limited")]
    assert max(map(len, long)) == 200
    assert metrics.value("mps_cgroup_info", cgroup="/unknown") is None
    text = "512 MiB used, soft limit 4.0 GiB, hard limit 8.0 GiB"
    assert text in "\n".join(diagnosis_lines(Diagnosis(metrics.snapshot)))
    assert text in page_of(metrics.snapshot)


def test_who_looks_in_a_namespace_s_directory_looks_at_a_daemon_s() -> None:
    stray = replace(
        process(777, "python"),
        mps_environment={"CUDA_MPS_PIPE_DIRECTORY": f"{PIPE}/training/high_priority"},
    )
    listed = replace(gpu(), processes=(*(gpu().processes or ()), GpuProcess(777, "compute")))
    made = recording(found={**processes(), 777: stray})
    nvml = NvmlObservation(START, Outcome.OK, gpus=(listed,))
    made = replace(made, observations=(made.observations[0], nvml, *made.observations[2:]))
    names = {one.advice.name for one in findings(played(made).snapshot)}
    assert "daemon_not_reached" in names
    assert "pipe_directory_mismatch" not in names


def test_without_an_address_of_a_gpu_or_without_processes_no_group_is_shown() -> None:
    nameless = replace(gpu(), pci_bus_id=None)
    seen = ProcfsObservation(START, cgroup_memory=MEMORY)
    nvml = NvmlObservation(START, Outcome.OK, gpus=(nameless,))
    assert merge(taken_at=START, gpus=nvml, processes=seen, daemons=()).cgroup_memory == {}
    assert merge(taken_at=START, gpus=nvml, processes=None, daemons=()).cgroup_memory == {}

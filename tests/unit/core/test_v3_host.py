"""Every value that others published of an MPS v3 daemon is shown, and no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.findings import findings
from mps_exporter.merge import merge
from mps_exporter.mps.protocol_v3 import PARTITIONS, READ_ONLY_V3
from mps_exporter.observations import (
    CgroupMemory,
    GpuProcess,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources.recording import Recording
from testing import fake_mps_v3 as published
from testing.player import Metrics, Player
from testing.v3_host import (
    EVAL,
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


def played(made: Recording) -> Metrics:
    return asyncio.run(Player(made).to_end())


def test_partitions_without_the_right_to_read_an_environment() -> None:
    found = processes()
    found[EVAL] = replace(found[EVAL], mps_environment=None)
    metrics = played(recording(found=found))
    assert metrics.value("mps_sm_partition_clients") is None
    assert metrics.value("mps_sm_partition_sms") == 34


def test_how_many_sms_a_client_has_in_a_partition_is_not_known_without_the_list() -> None:
    replies = {query: text for query, text in published.MANUAL.items() if query != PARTITIONS}
    metrics = played(recording(replies))
    ((labels, _),) = metrics.all("mps_client_sm_partition_info", pid=TRAIN)
    assert labels["fault"] == ""
    assert metrics.value("mps_client_sm_limit", pid=TRAIN) is None


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
    (daemon,) = metrics.snapshot.daemons
    pids = {str(client.pid) for server in daemon.servers for client in server.clients}
    text = "".join([*published.MANUAL.values(), *replies.values()])
    assert all(pid in text for pid in pids)


# ------------------------------------------------------------------------------ memory partitions

GROUP = "/kubepods.slice/kubepods-pod0123.slice/" + "x" * 200
MEMORY = (
    CgroupMemory("/user.slice/user-1000.slice", "00000000:02:00.0", 512 << 20, 4 << 30, 8 << 30),
    CgroupMemory(GROUP, "00000000:02:00.0", 1, 0, hard_unlimited=True),
    CgroupMemory("/unknown", "00000000:99:00.0", 1),
)


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

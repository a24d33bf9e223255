"""A snapshot with all fields: metrics that no recording has.

Each field has a different value, so that exchanged fields are noticed.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from mps_exporter.metrics import CATALOGUE, Build, render
from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.mps.record import Counters
from mps_exporter.observations import (
    CgroupMemory,
    ContainerName,
    DaemonFacts,
    GpuObservation,
    LogState,
)
from mps_exporter.snapshot import (
    Client,
    CollectorResult,
    ControlDaemon,
    Feature,
    Gpu,
    KernelLog,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    RecordingInfo,
    Server,
    ServerDevice,
    SmPartition,
    Snapshot,
    Wait,
)
from testing.golden import GOLDEN, SYNTHETIC

D, U = "/run/mps", "GPU-a"

CLIENT = Client(
    30,
    20,
    1001,
    "ann",
    "train",
    "c0ffee",
    "pod-1",
    "77",
    "job.service",
    4026531836,
    "client",
    connected_at=103.0,
    contexts={U: 2, "GPU-b": 1},  # the SM limit on the second GPU is unknown
    memory_used_bytes={U: 3},
    memory_limit_bytes={U: 4},
    active_thread_ratio=0.5,
    sm_limit={U: 66},
    priority=1,
    state="creating_context",
    state_since=104.0,
    environment_readable=True,
    server_name="training",
    namespace="batch",
    sm_partition="Kp8",
    sm_partition_name="large",
    sm_partition_fault="other_gpu",
    cgroup="/system.slice/job.service",
)
PARTITIONING = Partitioning(
    "3",
    servers=(NamedServer("training", 1001, 20, "Ready", "/p/t", ("GPU-x", "GPU-y"), "5"),),
    namespaces=(
        Namespace("batch", "training", "Ready", "/p/t/b", 0.25, 22, frozenset(), 1),
        Namespace("open", "training", unlimited=frozenset({"active_threads"})),
    ),
    clients=(NamespaceClient(30, "training", "batch"),),
    partitions=(
        SmPartition(U, "training", "Kp8", "large", 4, 34, False, "created", True),
        SmPartition(U, "training", chunks=1, sms=8, status="unallocated"),
    ),
    devices=(ServerDevice(U, "training", 3, "02:00.0", "RTX", 188, 23, "none"),),
    features=(Feature("memacct", False, True, "memory", "all"),),
    not_understood={("device_list", "row"): 24},
)
SERVER = Server(
    20,
    1001,
    "ann",
    102.0,
    "ACTIVE",
    False,
    1,
    {U: 5},
    {U: 48},
    0.75,
    {U: 6},
    {U: 7},
    clients=(CLIENT,),
)
DAEMON = ControlDaemon(
    D,
    "/var/log/mps",
    "answering",
    10,
    0,
    "root",
    101.0,
    "580.1",
    "2",
    True,
    "0,1",
    query_duration_seconds=0.25,
    query_failures={"timeout": 8},
    queries=9,
    default_active_thread_ratio=1.0,
    default_pinned_memory_limit_bytes={U: 11},
    default_client_priority=0,
    servers_count=1,
    servers=(SERVER,),
    waits=(Wait(40, 1002, 105.0, 1001), Wait(41, 1002, 106.0, 1001, dead=True)),
    handover_backoff_seconds=12.8,
    gpu_uuids=(U,),
    logs=(
        LogState(D, "control", "/var/log/mps/control.log", True, 13),
        LogState(D, "server", "/var/log/mps/server.log", False, 14),
    ),
    dropped_clients=15,
    clients_by_partition={"Kp8": 1},
    partitioning=PARTITIONING,
    facts=DaemonFacts(D, "/var/log/mps", owner_uid=1003, limited=True),
)
GPU = Gpu(
    GpuObservation(
        0,
        U,
        "GPU-parent",
        "1/0",
        "NVIDIA H200",
        "0000:3b:00.0",
        "Hopper",
        (9, 0),
        "96.00",
        "1234",
        132,
        "exclusive_process",
    ),
    "0",
    U,
    {"mps_client": 1, "direct": 2},
    served_by=(D,),
    stranded_clients=16,
    sm_committed_ratio=0.6,
    client_memory_committed_bytes=17,
)
SNAPSHOT = Snapshot(
    taken_at=200.0,
    driver_version="580.2",
    cuda_version="13.0",
    gpus=(GPU,),
    gpu_indexes={U: "0"},
    daemons=(DAEMON,),
    collectors=(CollectorResult("nvml", False, 0.125, timed_out=True),),
    unreadable_environments=18,
    kernel_log=KernelLog(readable=True),
    unknown_readings=19,
    recording=RecordingInfo("a test", "a host", "580.3", "then", 2.0),
    containers=(ContainerName("containerd://c0ffee", "research", "train-0", "main"),),
    ignored_processes={1004: 21},
    cgroup_memory={"/system.slice/job.service": {U: CgroupMemory("", "", 25, 26, 27)}},
)

DS, DSP, G = (D, "20"), (D, "20", "30"), ("0", U)
C = "/system.slice/job.service"
N, P = (D, "training", "batch"), (D, "training", *G, "large")


SHOWN = {
    "mps_control_default_pinned_memory_limit_bytes": {(D, *G): 11},
    "mps_server_pinned_memory_limit_bytes": {(*DS, *G): 6},
    "mps_container_info": {("containerd://c0ffee", "research", "train-0", "main"): 1},
    "mps_client_priority": {DSP: 1},
    "mps_named_server_info": {
        (D, "training", "20", "1001", "Ready", "/p/t", "GPU-x,GPU-y", "5"): 1
    },
    "mps_namespace_info": {(*N, "Ready", "/p/t/b"): 1, (D, "training", "open", "", ""): 1},
    "mps_namespace_limited": {
        (*N, "active_threads"): 1,
        (*N, "pinned_memory"): 1,
        (D, "training", "open", "active_threads"): 0,
    },
    "mps_namespace_active_thread_ratio": {N: 0.25},
    "mps_namespace_pinned_memory_limit_bytes": {N: 22},
    "mps_namespace_client_priority": {N: 1},
    "mps_namespace_clients": {N: 1, (D, "training", "open"): 0},
    "mps_client_namespace_info": {(*DSP, "", "", "training", "batch"): 1},
    "mps_sm_partition_info": {(*P, "Kp8", "created", "false"): 1},
    "mps_sm_partition_sms": {P: 34},
    "mps_sm_partition_chunks": {P: 4},
    "mps_sm_partition_clients": {P: 1},
    "mps_sm_partition_in_use": {P: 1},
    "mps_sm_partition_unallocated_sms": {(D, "training", *G): 8},
    "mps_sm_partition_unallocated_chunks": {(D, "training", *G): 1},
    "mps_client_sm_partition_info": {(*DSP, "large", "other_gpu"): 1},
    "mps_server_device_info": {(D, "training", *G, "3", "02:00.0", "RTX", "none"): 1},
    "mps_server_device_sms": {(D, "training", *G): 188},
    "mps_server_device_chunks": {(D, "training", *G): 23},
    "mps_control_feature_info": {(D, "memacct", "false", "true", "memory", "all"): 1},
    "mps_control_reply_not_understood": {(D, "device_list", "row"): 24},
    "mps_cgroup_info": {(C, "", "", "", "job.service"): 1},
    "mps_cgroup_memory_used_bytes": {(C, *G): 25},
    "mps_cgroup_memory_soft_limit_bytes": {(C, *G): 26},
    "mps_cgroup_memory_hard_limit_bytes": {(C, *G): 27},
    "mps_cgroup_memory_limited": {(C, *G): 1},
    "mps_client_cgroup_info": {(*DSP, C): 1},
    "mps_scrape_collector_duration_seconds": {("nvml",): 0.125},
    "mps_exporter_ignored_processes": {("1004",): 21},
    "mps_exporter_recording_info": {("a test", "a host", "580.3", "then", "2"): 1},
}


def test_metrics_that_no_recording_has() -> None:
    families = {one.spec.name: one for one in render(SNAPSHOT, Build("1.0", "abc", "3.11"))}
    assert {name: dict(families[name].samples) for name in SHOWN} == SHOWN
    advice = dict(families["mps_advice"].samples)
    assert advice[("queued_client_dead", "warning", D, "", "")] == 1
    assert advice[("stranded_client", "warning", "", "0", U)] == 1


def test_each_metric_is_tested_here_or_by_a_golden_text_or_as_a_reading() -> None:
    recorded = {
        name
        for path in GOLDEN.glob("*.txt")
        if path.stem not in SYNTHETIC
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
    snapshot = replace(lengthened(SNAPSHOT), collectors=())
    found = render(snapshot, Build("1.0", "a" * 300, "3.11"))
    lengths = {len(value) for family in found for labels, _ in family.samples for value in labels}
    assert max(lengths) == 200


def test_an_unknown_setting_of_a_daemon_is_an_empty_label() -> None:
    daemon = ControlDaemon(D, "/l", None, pid=10)
    (family,) = [
        family
        for family in render(Snapshot(1.0, daemons=(daemon,)), Build("", "", ""))
        if family.spec.name == "mps_control_info"
    ]
    assert dict(family.samples) == {(D, "10", "", "", "/l", "", "", "", ""): 1}


def test_faults_of_a_gpu_remain_after_the_daemon_has_stopped_serving_it() -> None:
    counted = Counters()
    counted.increment("mps_server_faults_total", uuid="GPU-gone")
    daemon = ControlDaemon(D, "/l", None, counters=counted.snapshot(), gpu_uuids=(U,))
    found = {
        family.spec.name: dict(family.samples)
        for family in render(
            Snapshot(1.0, daemons=(daemon,), gpu_indexes={U: "0"}), Build("", "", "")
        )
    }
    assert found["mps_server_faults_total"] == {(D, "", ""): 0, (D, *G): 0, (D, "", "GPU-gone"): 1}


def test_unknown_users_come_first() -> None:
    counted = Counters()
    counted.increment("mps_uid_waits_abandoned_total", uid=None)
    waits = (Wait(5, 1003, 7.0, 1001), Wait(6, 1002, 8.0, 1001))
    daemon = ControlDaemon(D, "/l", None, counters=counted.snapshot(), waits=waits)
    (family,) = [
        family
        for family in render(Snapshot(1.0, daemons=(daemon,)), Build("", "", ""))
        if family.spec.name == "mps_uid_waiting_clients"
    ]
    assert family.samples == (((D, ""), 0), ((D, "1002"), 1), ((D, "1003"), 1))

"""Named servers, their clients and partitions, joined with the GPUs and processes of the host."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.merge import DaemonInputs, merge
from mps_exporter.mps.server_queries import ServerAnswers
from mps_exporter.observations import (
    DaemonFacts,
    GpuObservation,
    GpuProcess,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    ServerDevice,
    SmPartition,
)

GIB = 1 << 30
A, B, C = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-cccc3333-0000"
TRAINING = NamedServer("training", 1000, 40, "Ready")
SERVING = NamedServer("serving", None, 41, "Ready")
DEVICES = (
    ServerDevice(A, "training", 0),
    ServerDevice(B, "serving", 0),
    ServerDevice(B, "", 1),  # the daemon's own list
)


def process(pid: int, name: str = "python", **environment: str) -> ProcessFacts:
    return ProcessFacts(pid, 5.0, 1000, "ann", name, "S", mps_environment=environment)


def merged(
    partitioning: Partitioning,
    *processes: ProcessFacts,
    listed: tuple[GpuProcess, ...] = (),
    **facts: Any,
) -> ControlDaemon:
    gpus = tuple(
        GpuObservation(index, uuid, sm_count=100, processes=listed if uuid == A else ())
        for index, uuid in enumerate((A, B))
    )
    daemon = DaemonFacts("/mps", "/log", process=ProcessFacts(10, 1.0), **facts)
    (found,) = merge(
        taken_at=9.0,
        gpus=NvmlObservation(9.0, Outcome.OK, gpus=gpus),
        processes=ProcfsObservation(9.0, processes={one.pid: one for one in processes}),
        daemons=[DaemonInputs(daemon, answers=ServerAnswers(partitioning=partitioning))],
    ).daemons
    return found


def partitioning(*more: Any, without: type | None = None) -> Partitioning:
    """The lists of these rows, and of the two servers and their GPUs if there are no others."""
    rows = [*more]
    for kind, usual in ((NamedServer, (TRAINING, SERVING)), (ServerDevice, DEVICES)):
        if kind is not without and not any(isinstance(row, kind) for row in rows):
            rows += usual
    kinds = dict.fromkeys(map(type, rows))
    return Partitioning("3", {kind: tuple(r for r in rows if type(r) is kind) for kind in kinds})


def clients(daemon: ControlDaemon) -> dict[int, Client]:
    return {one.pid: one for server in daemon.servers for one in server.clients}


def test_values_without_a_list_are_unknown() -> None:
    found = merged(partitioning(without=NamedServer))
    assert (found.servers, found.servers_count) == ((), None)
    (server,) = merged(partitioning(TRAINING), process(40)).servers
    assert (server.clients_connected, server.confirmed) == (None, False)
    assert found.gpu_uuids == (A, B)
    assert merged(partitioning(without=ServerDevice)).gpu_uuids == ()


def test_a_daemon_serves_the_gpus_that_its_servers_may_use() -> None:
    allowed = NamedServer("training", 1000, 40, allowed_devices=(B, "GPU-elsewhere"))
    assert merged(partitioning(allowed, without=ServerDevice)).gpu_uuids == (B,)


@pytest.mark.parametrize(
    ("server", "device", "uuids"),
    [
        ("training", "0", (A,)),
        ("serving", "0", (B,)),
        ("training", "1", (B,)),
        ("training", "7", ()),
        ("training", B, (B,)),
        ("training", "GPU-bbbb2222", (B,)),
        ("training", "GPU-", ()),  # of both
        ("training", "GPU-cccc3333", ("GPU-cccc3333",)),
    ],
)
def test_a_gpu_is_found_by_its_ordinal_or_its_uuid(
    server: str, device: str, uuids: tuple[str, ...]
) -> None:
    found = merged(
        partitioning(
            NamespaceClient(51, server, devices=(device,)), SmPartition(device, server, "created")
        )
    )
    assert clients(found)[51].gpu_uuids == uuids
    (partition,) = found.partitioning.rows(SmPartition)
    assert partition.device == (uuids[0] if uuids else device)


NAMESPACES = (
    Namespace("default", "serving", active_thread_ratio=0.25, pinned_memory_limit_bytes=GIB),
    Namespace("default", "training", active_thread_ratio=0.5, pinned_memory_limit_bytes=2 * GIB),
    Namespace("free", "training", active_thread_ratio=math.inf),
)


def limited(namespace: str | None, devices: Any = DEVICES, **environment: str) -> Client:
    listed = NamespaceClient(51, "training", namespace, ("0",), "train")
    found = partitioning(listed, *NAMESPACES, *devices, without=None if devices else ServerDevice)
    return clients(merged(found, process(51, **environment)))[51]


def test_a_client_has_the_limits_of_its_own_server_s_namespace() -> None:
    one = limited("default")
    assert (one.active_thread_ratio, one.memory_limit_bytes) == (0.5, {A: 2 * GIB})
    assert (one.server_name, one.namespace, one.command) == ("training", "default", "python")
    assert (one.contexts, one.gpu_uuids) == ({}, (A,))


def test_without_a_limit_of_the_namespace_all_sms_are_left() -> None:
    one = limited("free")
    assert (one.active_thread_ratio, one.sm_limit, one.memory_limit_bytes) == (1.0, {A: 100}, {})
    own = limited("free", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10")
    assert own.active_thread_ratio == 0.1
    own = limited("default", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="80")
    assert own.active_thread_ratio == 0.5


@pytest.mark.parametrize("namespace", ["gone", None])
def test_an_unknown_namespace_makes_the_limits_unknown(namespace: str | None) -> None:
    one = limited(namespace, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")
    assert (one.active_thread_ratio, one.memory_limit_bytes) == (None, {})


@pytest.mark.parametrize(
    ("devices", "text", "limits", "ignored"),
    [
        (DEVICES, "0=1G", {A: GIB}, False),
        (DEVICES, "1=1G", {A: 2 * GIB}, False),
        (DEVICES, "7=1G", {}, True),
        (DEVICES, f"{A}=1G", {A: GIB}, False),
        # An ordinal is ambiguous if the daemon's GPUs or their order are unknown.
        ((ServerDevice(A, "training"),), "0=1G", {}, False),
        ((ServerDevice(A, "training"),), "7=1G", {}, False),
        ((), "0=1G", {}, False),
    ],
)
def test_a_client_s_own_memory_limit_counts_in_its_server_s_list(
    devices: tuple[ServerDevice, ...], text: str, limits: dict[str, int], ignored: bool
) -> None:
    one = limited("default", devices, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=text)
    found = (one.memory_limit_bytes, one.memory_limit_ignored is not None)
    assert found == (limits, ignored)


# ------------------------------------------------------------------------------ SM partitions


def in_partition(
    variable: str,
    *devices: str,
    partition: SmPartition | None = None,
    listed: tuple[GpuProcess, ...] = (),
    **more: Any,
) -> Client:
    client = NamespaceClient(51, "training", "default", devices)
    carved = partition or SmPartition(A, "training", "created", "Kp8A", "large", sms=34)
    found = replace(partitioning(client, *NAMESPACES, carved), **more)
    return clients(merged(found, process(51, CUDA_MPS_SM_PARTITION=variable), listed=listed))[51]


@pytest.mark.parametrize(
    ("column", "cells", "limit"),
    [
        ("lendable_sms", ("8", "-"), {}),
        ("borrow", ("false", "-"), {A: 34}),
        ("weight", ("2",), {A: 34}),
    ],
)
def test_a_client_that_may_borrow_has_no_limit(
    column: str, cells: tuple[str, ...], limit: dict[str, int]
) -> None:
    """The columns of a driver that lends SMs are not published: their names decide."""
    unknown = {("sm_partition_list", column): cells}
    assert in_partition(f"{A}/Kp8A", "0", unknown_columns=unknown).sm_limit == limit


@pytest.mark.parametrize("variable", ["", A, f"{A}/"])
def test_a_variable_that_names_no_partition_changes_nothing(variable: str) -> None:
    one = in_partition(variable, "0")
    assert (one.sm_partition, one.active_thread_ratio) == (None, 0.5)


@pytest.mark.parametrize(
    ("devices", "carved", "variable", "fault"),
    [
        (("0",), SmPartition(A, "training", "created", "Kp8A"), f"{A}/Zz", "unknown"),
        (("0",), SmPartition(A, "serving", "created", "Kp8A"), f"{A}/Kp8A", "other_server"),
        (("0",), SmPartition(A, "", "created", "Kp8A"), f"{A}/Kp8A", None),
        (("0",), SmPartition(A, "training", "created", "Kp8A"), "GPU-aaaa/Kp8A", None),
        (("0",), SmPartition("GPU-aaaa", "training", "created", "Kp8A"), f"{A}/Kp8A", None),
        (("0",), SmPartition(A, "training", "created", "Kp8A"), f"{B}/Kp8A", "other_gpu"),
        (("1",), SmPartition(A, "training", "created", "Kp8A"), f"{A}/Kp8A", "other_gpu"),
        # Its GPUs are unknown; NVML does not show C.
        ((), SmPartition(A, "training", "created", "Kp8A"), f"{A}/Kp8A", None),
        (("0",), SmPartition(C, "training", "created", "Kp8A"), f"{C}/Kp8A", None),
    ],
)
def test_a_partition_that_was_not_meant_for_the_client(
    devices: tuple[str, ...], carved: SmPartition, variable: str, fault: str | None
) -> None:
    one = in_partition(variable, *devices, partition=replace(carved, sms=34))
    assert (one.sm_partition_fault, one.active_thread_ratio) == (fault, None)
    # The SMs in a partition that was not meant for it are unknown.
    assert list(one.sm_limit.values()) == ([34] if fault is None else [])


def test_a_client_that_has_memory_on_a_gpu_uses_it() -> None:
    on_b = SmPartition(B, "training", "created", "Kp8A", sms=34)
    listed = (GpuProcess(51, "compute", GIB),)
    one = in_partition(f"{B}/Kp8A", partition=on_b, listed=listed)
    assert one.sm_partition_fault == "other_gpu"

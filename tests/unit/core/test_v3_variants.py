"""Lists of an MPS v3 daemon that are not as published: what is not understood is left out.

The host is made up: two servers, four namespaces, five clients, two GPUs, and a MIG device. The
last part has the host whose values others published.
"""

import asyncio
import csv
import gzip
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.commands.doctor_report_and_status import Diagnosis, diagnosis_lines
from mps_exporter.findings import findings
from mps_exporter.merge import merge
from mps_exporter.mps.protocol_v3 import (
    ACCOUNTING,
    CLIENTS,
    DEVICES,
    FEATURES,
    NAMESPACES,
    PARTITIONS,
    READ_ONLY_V3,
    SERVERS,
    anonymised,
    parse_lists,
)
from mps_exporter.mps.protocol_v3 import REPLIES as LIST_NAMES
from mps_exporter.observations import (
    ControlObservation,
    Exchange,
    GpuProcess,
    LogChunk,
    LogsObservation,
    LogState,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import NamespaceClient, Setting
from mps_exporter.sources.recording import Recording, RecordingWriter
from mps_exporter.web import status_page
from mps_exporter.web.status_api import make_status
from testing import fake_mps_v3 as published
from testing.player import Metrics, Player
from testing.v3_host import (
    EVAL,
    MEMORY,
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

A, B, MIG = (
    "GPU-5be1c0de-1111-4aaa-8bbb-0123456789ab",
    "GPU-90210abc-2222-4ccc-8ddd-fedcba987654",
    "MIG-0badcafe-3333-4eee-8fff-001122334455",
)
OPAL, ONYX = 2411007, 3090155
REPLIES: Mapping[str, str] = {
    SERVERS: f"""\
name,uid,pid,status,pipe-directory,allowed-devices,context-ids
opal,4294967294,{OPAL},Ready,/mnt/mps/opal,{A},-
onyx,20044,{ONYX},Ready,/mnt/mps/onyx,"{B},{MIG}",-
""",
    NAMESPACES: """\
name,server,server-status,pinned-memory-limit,active-thread-percentage,client-priority,pipe-directory
default,opal,Ready,unlimited,unlimited,0,/mnt/mps/opal/default
gold,opal,Ready,1023G,12.50,1,/mnt/mps/opal/gold
default,onyx,Ready,-,-,0,/mnt/mps/onyx/default
iron_2,onyx,Ready,16G,100.00,0,/mnt/mps/onyx/iron_2
""",
    CLIENTS: f"""\
PID,SERVER,DEVICE,MAWS NS,CMD
3141001,opal,0,opal/default (0),julia
3141002,opal,{A},opal/gold (1),python -m serve
3141003,opal,{A},gold,"matlab, batch"
4000111,onyx,{B},onyx/iron_2 (1),a.out
4000112,onyx,{MIG},onyx/iron_2 (1),b.out
""",
    PARTITIONS: f"""\
SERVER,DEVICE,NAME,CHUNKS,SM-COUNT,INCLUDE-REMAINDER,STATUS,VISIBLE-UUID
opal,{A},wide,6,48,false,created,Zz9BBBBBBBBBBBBBBBB
opal,{A},later,2,16,false,configured,-
opal,{A},-,8,68,-,unallocated,-
""",
    DEVICES: f"""\
Ordinal,Server,PCI ID,Device UUID,Name,Total SMs,Total Chunks,Attributes
0,opal,0000:41:00.0,{A},NVIDIA H200,132,16,-
0,onyx,0000:c1:00.0,{B},NVIDIA H200,132,16,-
""",
    FEATURES: "FEATURE,STATE,MODULE,COVERS\nmemacct,disabled,memacct,-\n",
    ACCOUNTING: "KEY,VALUE\naudit_log,true\n",
}
GOLD = ("opal", "gold")
TRUTH: Mapping[str, Any] = {
    "servers": 2,
    "clients": {OPAL: 3, ONYX: 2},
    "pids": {3141001, 3141002, 3141003, 4000111, 4000112},
    "namespaces": {("opal", "default"): 1, GOLD: 2, ("onyx", "default"): 0, ("onyx", "iron_2"): 2},
    "gold": (0.125, 1023 << 30),
    "partitions": {"wide": 0},
    "sms": {"wide": 48, "later": 16, "": 68},
    "devices": {A: 132, B: 132},
    "features": {"memacct": "false"},
    "settings": (Setting("audit_log", "true"),),
    "left out": {},
}
NO_COUNTS: Mapping[str, Any] = {"clients": {}, "namespaces": {}, "partitions": {}}
"""Unknown values if a row of the list of clients was omitted."""
NO_SERVERS: Mapping[str, Any] = {"servers": None, "clients": {}, "pids": set(), "partitions": {}}
NO_CLIENTS = {**NO_COUNTS, "pids": set()}
UNKNOWN: Mapping[str, Mapping[str, Any]] = {
    SERVERS: NO_SERVERS,
    NAMESPACES: {"namespaces": {}, "gold": (None, None)},
    CLIENTS: NO_CLIENTS,
    PARTITIONS: {"partitions": {}, "sms": {}},
    DEVICES: {"devices": {}},
    FEATURES: {"features": {}},
    ACCOUNTING: {"settings": ()},
}
"""Unknown values without a list."""
NAMES = dict(zip(REPLIES, LIST_NAMES, strict=False))
RUNNING = tuple(process(pid, "nvidia-cuda-mps-server") for pid in (OPAL, ONYX))
LISTS = pytest.mark.parametrize("query", REPLIES)


def host(**more: Any) -> Recording:
    """The host; its clients' environments can be read and name no partition."""
    found = {pid: process(pid, "python") for pid in TRUTH["pids"]}
    found |= {one.pid: one for one in RUNNING}
    return recording(
        **{"replies": REPLIES, "found": found, "daemon": facts(servers=RUNNING), **more}
    )


def seen(metrics: Metrics) -> dict[str, Any]:
    def by(name: str, *labels: str) -> dict[Any, Any]:
        found = {tuple(one[label] for label in labels): value for one, value in metrics.all(name)}
        return found if len(labels) > 1 else {key[0]: value for key, value in found.items()}

    gold = {"server_name": "opal", "namespace": "gold"}
    unallocated = metrics.value("mps_sm_partition_unallocated_sms")
    return {
        "servers": metrics.value("mps_control_servers"),
        "clients": {int(pid): n for pid, n in by("mps_server_clients", "server").items()},
        "pids": {int(pid) for pid in by("mps_client_namespace_info", "pid")},
        "namespaces": by("mps_namespace_clients", "server_name", "namespace"),
        "gold": (
            metrics.value("mps_namespace_active_thread_ratio", **gold),
            metrics.value("mps_namespace_pinned_memory_limit_bytes", **gold),
        ),
        "partitions": by("mps_sm_partition_clients", "partition"),
        "sms": by("mps_sm_partition_sms", "partition")
        | ({} if unallocated is None else {"": unallocated}),
        "devices": by("mps_server_device_sms", "uuid"),
        "features": {
            one["feature"]: one["enabled"] for one, _ in metrics.all("mps_control_feature_info")
        },
        "settings": metrics.snapshot.daemons[0].partitioning.rows(Setting),
        "left out": by("mps_control_reply_not_understood", "reply", "part"),
    }


def texts(metrics: Metrics) -> tuple[str, str]:
    """The doctor's and the page's."""
    status = make_status(metrics.snapshot, host="node-9")
    doctor = "\n".join(diagnosis_lines(Diagnosis(metrics.snapshot)))
    return doctor, status_page.render_page(status)


def with_reply(query: str, text: str) -> Metrics:
    return asyncio.run(Player(host(replies={**REPLIES, query: text})).to_end())


def check(query: str, text: str, *left_out: tuple[str, int], **but: Any) -> None:
    """Check that this reply changes only the values in `but`."""
    counted = {(NAMES[query], part): count for part, count in left_out}
    assert seen(with_reply(query, text)) == {**TRUTH, **but, "left out": counted}


def moved(text: str, order: Callable[[list[str]], list[str]]) -> str:
    """The table with its columns in another order; cells with commas are quoted."""
    rows = list(csv.reader(text.splitlines()))
    csv.writer(file := io.StringIO(), lineterminator="\n").writerows(map(order, rows))
    return file.getvalue()


def test_the_truth() -> None:
    metrics = with_reply(SERVERS, REPLIES[SERVERS])
    assert seen(metrics) == TRUTH
    assert metrics.value("mps_control_info", protocol="3") == 1
    assert metrics.value("mps_gpu_served", daemon=PIPE) is None  # that GPU is another host's
    doctor, page = texts(metrics)
    for text in (doctor, page):
        assert "up to 12.5 % of the SMs" in text
        assert "16 SMs, 2 chunks, configured" in text
        assert "configured, " not in text  # of a partition without an ID no clients are known


@LISTS
def test_the_form_of_a_list_does_not_matter(query: str) -> None:
    text = REPLIES[query]
    check(query, text.replace("\n", "\r\n"))
    check(query, text.replace("\n", "\n\n"))
    check(query, text.replace("\n", " \n  "))
    check(query, moved(text, lambda row: row[::-1]))
    check(query, moved(text, lambda row: row[2:] + row[:2]))
    check(query, moved(text, lambda row: [row[0], f"x-{row[0]}", *row[1:]]), ("column", 1))
    check(query, re.sub(r',(?=[^ "])', ", ", text.replace('"matlab, batch"', "matlab")))


@LISTS
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: f"\ufeff{text}",
        lambda text: f"Warning: persistence mode is off\n{text}",
        lambda text: f"Warning: slow, very slow\nname,server,\n{text}",
        lambda text: text.partition("\n")[2],
        lambda text: "Segmentation fault\n",
        lambda text: text.splitlines()[0],
    ],
    ids=["BOM", "one line before", "two before", "no header", "no table", "only half a header"],
)
def test_without_its_header_in_the_first_line_a_list_is_unknown(
    query: str, spoil: Callable[[str], str]
) -> None:
    order = lambda row: row[1:] + row[:1]  # noqa: E731 - two lines are enough
    for text in (REPLIES[query], moved(REPLIES[query], order)):
        check(query, spoil(text), ("reply", 1), **UNKNOWN[query])
    twice = moved(REPLIES[query], lambda row: [*row, row[0]])
    check(query, twice, ("reply", 1), **UNKNOWN[query])


@LISTS
def test_an_empty_list_is_none_and_no_reply_is_unknown(query: str) -> None:
    check(query, "", **UNKNOWN[query])
    none: Mapping[str, Mapping[str, Any]] = {
        SERVERS: {**NO_SERVERS, "servers": 0, "partitions": {"wide": 0}},
        CLIENTS: {**NO_CLIENTS, "clients": {OPAL: 0, ONYX: 0}, "partitions": {"wide": 0}}
        | {"namespaces": dict.fromkeys(TRUTH["namespaces"], 0)},
    }
    check(query, REPLIES[query].splitlines()[0] + "\n", **none.get(query, UNKNOWN[query]))


@pytest.mark.parametrize(
    ("command", "understood"),
    [
        *(("x...y", False), ("\x1b[2Jx", False), ("left\u202eright", False), ("a\rb", False)),
        *(('"never closed', True), ('"closed" and more', True), ('"a"b,"c', True)),
        *(("f(1, 2, 3)", True), ('sh -c "a, b"', True), ('"quoted ""x"", y"', True), ("-", True)),
        *(("PID,SERVER,DEVICE,MAWS NS,CMD", True), ("3141003,onyx,0,gold,x", True)),
        *(("x" * 4_000, True), ("x" * 140_000, False), ("usage: x [options]", True)),
        *(("unknown command", True), ("Cannot find MPS control daemon process", True)),
        *(("Insufficient privileges", True), ("default", True), ("two\nlines", False)),
        ('"two\nlines"', False),
    ],
)
def test_no_command_removes_anything_but_itself(command: str, understood: bool) -> None:
    metrics = with_reply(CLIENTS, REPLIES[CLIENTS].replace("python -m serve", command))
    found = seen(metrics)
    assert bool(found.pop("left out")) is not understood
    assert found == {key: value for key, value in TRUTH.items() if key != "left out"}


def test_a_client_in_an_unknown_namespace_makes_those_of_its_server_unknown() -> None:
    known = {key: value for key, value in TRUTH["namespaces"].items() if key[0] == "onyx"}
    for name in ("GOLD", "opal/GOLD (1)", "go...", "g\x00ld"):
        text = REPLIES[CLIENTS].replace("opal/gold (1)", name)
        check(CLIENTS, text, ("value", 1), namespaces=known)


def test_rows_that_contradict_each_other_are_left_out() -> None:
    text = REPLIES[CLIENTS] + "3141002,onyx,0,default,python\n" * 2
    check(CLIENTS, text, ("row", 3), **NO_COUNTS, pids=TRUTH["pids"] - {3141002})
    text = REPLIES[NAMESPACES] + "gold,opal,Ready,1G,50,1,/mnt/mps/opal/gold\n"
    namespaces = {key: value for key, value in TRUTH["namespaces"].items() if key != GOLD}
    check(NAMESPACES, text, ("row", 2), gold=(None, None), namespaces=namespaces)


def test_long_lists() -> None:
    more = "".join(f"{3_200_000 + n},onyx,0,default,x --key=1\n" for n in range(1500))
    metrics = with_reply(CLIENTS, REPLIES[CLIENTS] + more)
    found, (daemon,) = seen(metrics), metrics.snapshot.daemons
    assert len(daemon.partitioning.rows(NamespaceClient)) == 1024
    assert {one.command for one in daemon.servers[1].clients} == {"python", "x"}  # no arguments
    assert found["left out"] == {("client_list", "row"): 5 + 1500 - 1024}
    assert (found["clients"], found["namespaces"]) == ({}, {})
    more = "".join(f"n{n},opal,Ready,-,-,0,/x\n" for n in range(600))
    namespaces = TRUTH["namespaces"] | {("opal", f"n{n}"): 0 for n in range(600)}
    check(NAMESPACES, REPLIES[NAMESPACES] + more, namespaces=namespaces)


def test_servers_as_they_may_be() -> None:
    text = REPLIES[SERVERS]
    check(SERVERS, text.replace("Ready", "Draining_2 soon"))
    check(SERVERS, text + "spare,0,0,Stopped,/mnt/mps/spare,-,-\n")
    check(SERVERS, text.replace(f'"{B},{MIG}"', f"{B},{MIG}"))
    check(SERVERS, text.replace(f"{B},", f"{B};"), ("value", 1))
    check(SERVERS, text.replace("/mnt/mps/opal", "/mnt/a...b/opal"), ("value", 1))
    bad = "odd,0,48...,Ready,/mnt/mps/odd,-,-\n"
    check(SERVERS, text + bad, ("row", 1), servers=None, partitions={})
    check(SERVERS, text + "name,0,0,Stopped,-,-,-\nserver,0,0,Stopped,-,-,-\n")


# ------------------------------------------------------------------------------ no answer


def after(made: Recording, seconds: float) -> Metrics:
    made = replace(made, ended_at=START + 100.0)
    return asyncio.run(Player(made).to(START + seconds))


def test_a_daemon_that_is_gone_has_no_servers() -> None:
    gone = facts(process=None, servers=(), lock_holder_pid=None)
    assert after(host(daemon=gone, found={}), 1.0).value("mps_control_servers") == 0


# ------------------------------------------------------------------------------ recordings


CONTROL_LINES = b"""\
[2026-11-21 08:00:00.100 Control 48100] Adding server 'opal' [multiuser enabled]
[2026-11-21 08:00:00.200 Control 48100] Cmd:namespace create gold --server=opal
[2026-11-21 08:00:00.300 Control 48100] Namespace 'gold' created
"""
SERVER_LINE = b"[2026-11-21 08:00:01.000 Other 48201] Startup\n"
LOGS = LogsObservation(
    START,
    (
        LogChunk(START, PIPE, "control", CONTROL_LINES, history=True),
        LogChunk(START, PIPE, "server", SERVER_LINE, server_name="opal"),
    ),
    (
        LogState(PIPE, "control", f"{PIPE}/log/opal/control.log", readable=True),
        LogState(PIPE, "server", f"{PIPE}/log/opal/server.log", readable=True),
    ),
)


def test_no_name_that_a_user_chose_is_in_an_anonymised_recording(tmp_path: Path) -> None:
    client = process(3141002, "python", CUDA_MPS_PIPE_DIRECTORY="/mnt/mps/opal/gold")
    replies = {**REPLIES, SERVERS: f"{REPLIES[SERVERS]}odd,opal\n"}
    made = host(more=(LOGS,), found={3141002: client}, replies=replies)
    writer = RecordingWriter(tmp_path / "a.rec.gz", replace(made.header, anonymised=True))
    for observation in made.observations:
        writer.add(observation)
    writer.close()
    text = gzip.decompress((tmp_path / "a.rec.gz").read_bytes()).decode()
    servers, namespaces, partitions = ("opal", "onyx"), ("gold", "iron_2"), ("wide", "later")
    programs = ("julia", "matlab", "-m serve", "python")
    for name in (*servers, *namespaces, *partitions, *programs, "lovelace", A, B):
        assert name not in text, name
    server, _ = re.findall("/mnt/mps/(name_[0-9a-f]+)/(name_[0-9a-f]+)", text)[0]
    assert f"{PIPE}/log/{server}/control.log" in text


_odd = st.sampled_from(
    ["...", '"', "\n", "\n\n", "x,y\n", "7,opal\n", "\x1b", ",", "default", "onyx/"]
)


@given(st.sampled_from(sorted(REPLIES)), st.data())
def test_an_anonymised_reply_is_understood_as_the_reply_itself(
    query: str, data: st.DataObject
) -> None:
    text = REPLIES[query]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(_odd) + text[at:]
    names: dict[str, str] = {}

    def rename(kind: str, name: str) -> str:
        return name if kind == "path" else f"{kind}_{names.setdefault(name, str(len(names)))}"

    def read(reply: str) -> tuple[object, ...]:
        exchange = Exchange((query,), Outcome.OK, reply, return_code=0)
        found = parse_lists(ControlObservation(1.0, PIPE, "probe", Outcome.OK, (exchange,)))
        return {kind: len(rows) for kind, rows in found.lists.items()}, found.not_understood

    assert read(anonymised(query, text, rename)) == read(text)


# ------------------------------------------------------------------------------ the published host


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


def inside(pid: int, inner: int, name: str) -> ProcessFacts:
    """A process in the PID namespace of a daemon that has its own."""
    return replace(process(pid, name), namespace_pids=(pid, inner), pid_namespace=77)


def test_a_daemon_in_its_own_pid_namespace_numbers_processes_otherwise() -> None:
    found = {
        9001: inside(9001, EVAL, "python"),
        9002: inside(9002, SERVER, "nvidia-cuda-mps-server"),
    }
    control = inside(9000, 5, "nvidia-cuda-mps-control")
    metrics = played(recording(found=found, daemon=facts(process=control, servers=())))
    assert metrics.value("mps_server_clients", server=9002) == 2
    assert metrics.value("mps_client_namespace_info", pid=9001, namespace="high_priority") == 1
    assert metrics.value("mps_client_info", pid=0, uid="") == 1


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

"""Hosts in trouble, made by hand."""

from dataclasses import replace
from typing import Any

from mps_exporter.observations import DaemonFacts, GpuObservation, LogState, ProcessView, Reading
from mps_exporter.snapshot import (
    COLLECTORS,
    Client,
    CollectorName,
    CollectorResult,
    ControlDaemon,
    Gpu,
    Incident,
    RecordingHeader,
    RecordingInfo,
    Server,
    Snapshot,
    TimelineSpan,
    Wait,
)
from mps_exporter.sources.nvml.pynvml_api import Code
from mps_exporter.sources.nvml.session import REMEDIES

NOW = 1_795_000_000.0
UUID = "GPU-00000001-0000-4000-8000-000000000001"
GIB = 2**30
NASTY = "<script>alert(1)</script>\"'&\n\x1b[31m\u202egpj.exe\udcff"
"""Markup, quotes, a line end, an escape, a turn of direction, a byte that was no UTF-8."""
HEADER = RecordingHeader(NASTY, NASTY, "580", "2026-11-21", 0.0, "", anonymised=True)


def gpu(**changes: object) -> Gpu:
    observation = GpuObservation(
        index=0,
        uuid=UUID,
        name="NVIDIA H200",
        sm_count=132,
        compute_mode="exclusive_process",
        readings=(
            Reading("gpu_utilization", 0.99),
            Reading("sm_activity", 0.12),
            Reading("memory_used", 30.0 * GIB),
            Reading("memory_total", 140.0 * GIB),
            Reading("power", 195.4),
            Reading("temperature", 61.0, (("sensor", "gpu"),)),
        ),
    )
    made = Gpu(
        observation=observation,
        index="0",
        uuid=UUID,
        processes_by_kind={"mps_client": 2, "mps_server": 1, "direct": 1, "graphics": 0},
        served_by=("/tmp/nvidia-mps",),
        sm_committed_ratio=0.5,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def client(pid: int, **changes: object) -> Client:
    made = Client(
        pid=pid,
        server_pid=634,
        uid=1001,
        user="alice",
        command="train.py",
        limit_source="client",
        connected_at=NOW - 245,
        contexts={UUID: 1},
        memory_used_bytes={UUID: 3 * GIB // 2},
        memory_limit_bytes={UUID: 2 * GIB},
        active_thread_ratio=0.25,
        sm_limit={UUID: 33},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def server(*clients: Client, **changes: object) -> Server:
    made = Server(
        pid=634,
        uid=1001,
        user="alice",
        start_time_seconds=NOW - 7500,
        state="ACTIVE",
        ghost=False,
        clients_connected=len(clients),
        contexts={UUID: len(clients)},
        contexts_limit={UUID: 48},
        active_thread_ratio=1.0,
        clients=clients,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def daemon(*servers: Server, **changes: object) -> ControlDaemon:
    made = ControlDaemon(
        pipe_directory="/tmp/nvidia-mps",
        log_directory="/var/log/nvidia-mps",
        state="answering",
        facts=DaemonFacts("/tmp/nvidia-mps", "/var/log/nvidia-mps"),
        pid=600,
        uid=0,
        user="root",
        start_time_seconds=NOW - 90_000,
        binary_version="13000",
        servers_count=len(servers),
        servers=servers,
        gpu_uuids=(UUID,),
        logs=(
            LogState("/tmp/nvidia-mps", "control", "/l/control.log", readable=True),
            LogState("/tmp/nvidia-mps", "server", "/l/server.log", readable=True),
        ),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def snapshot(*daemons: ControlDaemon, **changes: object) -> Snapshot:
    servers = [server for daemon in daemons for server in daemon.servers]
    users: list[Server | Client] = [*servers]
    users += [client for server in servers for client in server.clients]
    made = Snapshot(
        taken_at=NOW,
        user_names={one.uid: one.user for one in users if one.uid is not None and one.user},
        driver_version="580.159.04",
        cuda_version="13.0",
        gpus=(gpu(),),
        daemons=daemons,
        collectors=(CollectorResult("nvml", success=True, duration_seconds=0.01),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def healthy() -> Snapshot:
    two = (client(641), client(642, command="serve", sm_limit={UUID: 132}, memory_limit_bytes={}))
    return snapshot(daemon(server(*two)))


def waiting(seconds: float = 240.0) -> Snapshot:
    wait = Wait(pid=700, uid=1002, since=NOW - seconds, behind_uid=1001)
    other = client(800, uid=1002, user="bob")
    elsewhere = daemon(server(other, pid=801, uid=1002, user="bob"), pipe_directory="/tmp/other")
    return snapshot(daemon(server(client(641)), waits=(wait,)), elsewhere)


def crashed() -> Snapshot:
    crash = Incident(at=NOW - 40, kind="server_crashed", server_pid=634, uid=1001, pids=(641, 642))
    other = server(pid=650, uid=1001)
    return snapshot(
        daemon(other, incidents=(Incident(at=NOW - 90_000, kind="daemon_started"), crash))
    )


def fault() -> Snapshot:
    failed = Incident(
        at=NOW - 3, kind="fault", server_pid=634, uid=1001, pids=(642,), blamed_pid=641
    )
    return snapshot(daemon(server(client(642), state="FAULT"), incidents=(failed,)))


def nasty() -> Snapshot:
    victim = client(641, command=NASTY, user=NASTY, container_id=NASTY, systemd_unit=NASTY)
    return snapshot(
        daemon(
            server(victim, user=NASTY, state=NASTY),
            pipe_directory=f"/tmp/{NASTY}",
            waits=(Wait(pid=1, uid=1001, since=NOW - 5, behind_uid=1001),),
            incidents=(
                Incident(at=NOW - 9, kind="server_start_failed", uid=1001, detail=NASTY, count=40),
            ),
            logs=(LogState("/tmp/x", "control", f"/log/{NASTY}", readable=False, error=NASTY),),
        ),
        recording=RecordingInfo(HEADER),
    )


def full(gpus: int = 8, clients: int = 48) -> Snapshot:
    """A host with two daemons, all its GPUs taken; a client of another user waits."""
    uuids = [f"GPU-{index:08d}-0000-4000-8000-000000000001" for index in range(gpus)]
    cards = tuple(
        gpu(
            observation=replace(gpu().observation, index=index, uuid=uuid),
            index=str(index),
            uuid=uuid,
            processes_by_kind={"mps_client": clients, "mps_server": 1},
        )
        for index, uuid in enumerate(uuids)
    )
    daemons = []
    for number, served in enumerate((uuids[: gpus // 2], uuids[gpus // 2 :])):
        uid = 1001 + number
        programs = ("train.py", "serve.py")
        found = tuple(
            client(
                10_000 * (number + 1) + 100 * index + one,
                uid=uid,
                user=f"user{uid}",
                server_pid=5000 + number,
                command=programs[one % 8 == 7],
                contexts={uuid: 1},
                memory_used_bytes={uuid: 764 * 2**20},
                memory_limit_bytes={},
                active_thread_ratio=1.0,
                sm_limit={uuid: 132},
            )
            for index, uuid in enumerate(served)
            for one in range(clients)
        )
        server_ = server(
            *found,
            pid=5000 + number,
            uid=uid,
            user=f"user{uid}",
            contexts=dict.fromkeys(served, clients),
            contexts_limit=dict.fromkeys(served, 48),
        )
        waits = (Wait(pid=777, uid=1003, since=NOW - 95, behind_uid=uid),) if number else ()
        spans = [TimelineSpan("held", uid, NOW - 600, NOW, ongoing=True)]
        if waits:
            spans.append(TimelineSpan("waited", 1003, NOW - 95, NOW, ongoing=True))
        daemons.append(
            daemon(
                server_,
                pipe_directory=f"/run/mps/{number}",
                gpu_uuids=tuple(served),
                waits=waits,
                timeline=tuple(spans),
                timeline_since=NOW - 600,
            )
        )
    return snapshot(*daemons, gpus=cards)


def without_gpu() -> Snapshot:
    """A host without a driver, and without MPS."""
    failed = CollectorResult(
        "nvml", success=False, duration_seconds=0.001, error=REMEDIES[Code.LIBRARY_NOT_FOUND]
    )
    names: tuple[CollectorName, ...] = ("process", "logs", "control")
    others = (CollectorResult(name, success=True, duration_seconds=0.002) for name in names)
    return Snapshot(taken_at=NOW, collectors=(failed, *others))


def logs_unreadable() -> Snapshot:
    """Clients share a GPU, and neither log can be read."""
    logs = tuple(
        replace(log, path=f"/var/log/mps/{log.log}.log", readable=False, error="Permission denied")
        for log in daemon().logs
    )
    found = tuple(CollectorResult(name, success=True, duration_seconds=0.01) for name in COLLECTORS)
    one = server(client(641, state=None), client(642, state=None))
    return snapshot(daemon(one, logs=logs), collectors=found)


def blind() -> Snapshot:
    """The same without NVML and without the right to read environments."""
    failed = CollectorResult("nvml", success=False, duration_seconds=0.1, error="no NVML library")
    return replace(logs_unreadable(), gpus=(), collectors=(failed,), unreadable_environments=3)


def process_using(pipe_directory: str, pid: int = 77, **more: Any) -> ProcessView:
    """A living process of user 1001 whose environment names a daemon's directory."""
    known = {
        "uid": 1001,
        "state": "S",
        "command": "x",
        "pipe_directory": pipe_directory,
        "names_directory": True,
        "daemon_directory": pipe_directory,
    }
    return ProcessView(pid, **{**known, **more})

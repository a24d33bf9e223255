"""Hosts in trouble, made by hand."""

from __future__ import annotations

from dataclasses import replace

from mps_exporter.observations import GpuObservation, LogState, Reading
from mps_exporter.snapshot import (
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    Incident,
    RecordingInfo,
    Server,
    Snapshot,
    Wait,
)

NOW = 1_795_000_000.0
UUID = "GPU-00000001-0000-4000-8000-000000000001"
GIB = 2**30
NASTY = "<script>alert(1)</script>\"'&\n\x1b[31m\u202egpj.exe\udcff"
"""Markup, quotes, a line end, an escape, a turn of direction, a byte that was no UTF-8."""


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
    made = Snapshot(
        taken_at=NOW,
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
        recording=RecordingInfo(NASTY, NASTY, "580", "2026-11-21T11:34:57+00:00"),
    )


def blind() -> Snapshot:
    return snapshot(
        daemon(
            logs=(
                LogState(
                    "/tmp/nvidia-mps", "control", "/var/log/nvidia-mps/control.log",
                    readable=False, error="Permission denied",
                ),
            )
        ),
        gpus=(),
        collectors=(
            CollectorResult("nvml", success=False, duration_seconds=0.1, error="no NVML library"),
        ),
        unreadable_environments=3,
    )  # fmt: skip

"""A host for each finding: a synthetic snapshot, or a moment of a recording of a real host.

Each synthetic host also raises the alert of its finding: tests/integration/test_alerts_promtool.py.
"""

from dataclasses import replace
from typing import Any

from mps_exporter.observations import (
    DaemonFacts,
    GpuObservation,
    KernelObservation,
    LogState,
    ProcessFacts,
    Reading,
)
from mps_exporter.snapshot import (
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    Incident,
    Partitioning,
    PossibleUnfinishedWork,
    Server,
    Snapshot,
)
from mps_exporter.sources.control_tool import start_error_text

PIPE = "/tmp/nvidia-mps"
DAEMON = ProcessFacts(10, 1.0, 0, "root", "nvidia-cuda-mps-control", "S", 1, (10,))


def daemon(state: Any = "answering", **more: Any) -> ControlDaemon:
    facts = DaemonFacts(PIPE, "/l", process=DAEMON)
    return ControlDaemon(PIPE, "/l", state, **{"pid": 10, "facts": facts, **more})


def host(*daemons: ControlDaemon, at: float = 1.0, **more: Any) -> Snapshot:
    return Snapshot(at, daemons=daemons, **more)


def gpu(
    *direct: ProcessFacts, served: bool = True, stranded: int | None = None, **more: Any
) -> Gpu:
    fit = {"compute_mode": "exclusive_process", "compute_capability": (9, 0)}
    return Gpu(
        GpuObservation(0, "GPU-a", **{**fit, **more}),
        "0",
        "GPU-a",
        direct_pids=tuple(one.pid for one in direct),
        direct_processes=direct,
        processes_by_kind={"direct": len(direct)},
        served_by=(PIPE,) if served else (),
        stranded_clients=stranded,
    )


def process(pid: int, *inner: int, **environment: str) -> ProcessFacts:
    return ProcessFacts(
        pid, 1.0, 1001, "ann", "train", "S", 1, (pid, *inner), mps_environment=environment
    )


def client(**more: Any) -> ControlDaemon:
    return daemon(servers=(Server(20, state="ACTIVE", clients=(Client(30, 20, **more),)),))


UNSHARED = Server(
    20, state="ACTIVE", shares_by_file=True, clients=(Client(30, 20, own_shared_memory=True),)
)


def job(*ratios: float, **more: Any) -> ControlDaemon:
    """Clients of one Slurm job, under a daemon that gives each half of the GPU."""
    clients = tuple(
        Client(
            30 + number,
            20,
            slurm_job_id="7",
            active_thread_ratio=ratio,
            contexts={"GPU-a": 1},
            **more,
        )
        for number, ratio in enumerate(ratios)
    )
    server = Server(20, state="ACTIVE", clients=clients)
    return daemon(servers=(server,), default_active_thread_ratio=0.5)


OVER: dict[str, Any] = {
    "client_memory_committed_bytes": 20 << 30,
    "observation": GpuObservation(0, "GPU-a", readings=(Reading("memory_total", 16 << 30),)),
}
UNREADABLE = LogState(PIPE, "control", "/l/control.log", readable=False, error="no permission")
LARGE = LogState(PIPE, "control", "/l/control.log", readable=True, size_bytes=3 << 30)
IDLE_SMS = (Reading("gpu_utilization", 0.99), Reading("sm_activity", 0.13))
BLIND = CollectorResult("nvml", success=False, duration_seconds=0.1, error="no library")
NO_TOOL = start_error_text("nvidia-cuda-mps-control", FileNotFoundError())
REFUSED = "get_server_list and 1 more: Cannot send command to MPS control daemon process"
QUIT = Incident(at=0.5, kind="daemon_quit")
GONE = DaemonFacts(PIPE, "/l")
GUESSED = DaemonFacts(PIPE, "/l", process=DAEMON, directories_assumed=True)

LEFT = PossibleUnfinishedWork(30, 1001, ended_at=5.0, seconds=0.195)

SYNTHETIC = {
    "server_in_fault": host(daemon(servers=(Server(20, state="FAULT"),))),
    "possible_unfinished_work": host(
        daemon(servers=(Server(20, state="ACTIVE", possible_unfinished_work=LEFT),)), at=9.0
    ),
    "percentage_ignored": host(client(percentage_ignored="lots")),
    "memory_limit_ignored": host(client(memory_limit_ignored="9=1G")),
    "sm_partition_mismatch": host(
        replace(
            client(sm_partition="Kp8AAA", sm_partition_fault="other_server"),
            partitioning=Partitioning("3"),
        )
    ),
    "replies_not_understood": host(
        daemon(partitioning=Partitioning("3", not_understood={("client_list", "row"): 2}))
    ),
    "shared_memory_not_mapped": host(daemon(servers=(UNSHARED,))),
    "joined_by_default_directory": host(client(joined_by="mount")),
    "limiter_under_mps": host(client(limiter="HAMi-core")),
    "limit_looser_than_default": host(
        replace(client(active_thread_ratio=1.0), default_active_thread_ratio=0.5)
    ),
    "share_exceeded": host(job(0.5, 0.5)),
    "memory_overcommitted": Snapshot(1.0, gpus=(replace(gpu(), **OVER),)),
    "environment_unreadable": host(client(environment_readable=False)),
    "kernel_log_unreadable": host(daemon(), kernel_log=KernelObservation(1.0, False, "no right")),
    "processes_ignored": Snapshot(1.0, ignored_processes={2001: 5}),
    "logs_unreadable": host(daemon(logs=(UNREADABLE,))),
    "log_large": host(daemon(logs=(LARGE,))),
    "tool_missing": host(daemon(state=None, error=NO_TOOL)),
    "daemon_outside_host_pid_namespace": host(
        daemon(
            facts=DaemonFacts(
                PIPE, "/l", process=ProcessFacts(10, 1.0, 0, "root", "c", "S", 1, (10, 1))
            )
        )
    ),
    "daemon_absent": host(daemon(state="absent", pid=None, facts=GONE)),
    "daemon_quit": host(daemon(state="absent", pid=None, facts=GONE, incidents=(QUIT,))),
    "daemon_refuses": host(daemon(state="refused", incidents=(QUIT,))),
    "daemon_state_unknown": host(daemon(state=None, error=REFUSED)),
    "daemon_draining": host(daemon(state="draining")),
    "server_starting_long": host(
        daemon(servers=(Server(20, state="INITIALIZING", start_time_seconds=1.0),)), at=20.0
    ),
    "gpu_lost": Snapshot(1.0, gpus=(gpu(served=False, lost=True, readings=(Reading("up", 0),)),)),
    "source_unreadable": Snapshot(1.0, collectors=(BLIND,)),
    "directories_assumed": host(daemon(facts=GUESSED)),
    "clients_not_shown": host(daemon(dropped_clients=7)),
    "gpu_memory_not_reported": host(gpus=(gpu(name="GB10", readings=IDLE_SMS),)),
    "exclusive_without_daemon": host(gpus=(gpu(served=False),)),
    "gpu_shared_by_daemons": host(
        daemon(),
        replace(daemon(), pipe_directory="/second"),
        gpus=(replace(gpu(), served_by=(PIPE, "/second")),),
    ),
    "not_exclusive_mode": host(daemon(), gpus=(gpu(compute_mode="default"),)),
    "stranded_client": Snapshot(1.0, gpus=(gpu(stranded=1),)),
    "unfit_gpu": Snapshot(1.0, gpus=(gpu(compute_capability=(6, 1)),)),
    "mps_would_help": Snapshot(
        1.0,
        gpus=(
            gpu(process(1), process(2), served=False, readings=IDLE_SMS, compute_mode="default"),
        ),
    ),
    "process_bypasses_mps": host(daemon(), gpus=(gpu(process(1)),)),
    "pipe_directory_mismatch": host(
        daemon(), gpus=(gpu(process(1, CUDA_MPS_PIPE_DIRECTORY="/else")),)
    ),
    "daemon_not_reached": host(daemon(), gpus=(gpu(process(1, 7, CUDA_MPS_PIPE_DIRECTORY=PIPE)),)),
}

RECORDED = {
    "ghost_server": ("wait-abandoned-sigkill", "12s"),
    "daemon_unresponsive": ("wait-abandoned-sigkill", "12s"),
    "queued_client_dead": ("wait-abandoned-sigkill", "4s"),
    "several_users_one_daemon": ("three-users", "2s"),
    "server_in_fault": ("fault-held", "6s"),
    "client_stuck": ("fault-held", "6s"),
    "stranded_client": ("stranded", "2s"),
    "logs_unreadable": ("foreground", "4s"),
    "daemon_outside_host_pid_namespace": ("own-pid-namespace", "4s"),
    "daemon_not_reached": ("containers", "12s"),
    "mps_would_help": ("training-10-direct", "10s"),
    "daemon_missing": ("served-after-death", "2400ms"),
    "limit_idles_gpu": ("percentages", "18700ms"),
}

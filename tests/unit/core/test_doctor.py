"""The findings, from recordings of real incidents and from hosts made up for the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from exporter.advice import ADVICE, findings
from exporter.cli import main
from exporter.doctor import exit_status, report
from exporter.model import (
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    Incident,
    PossibleUnfinishedWork,
    Server,
    Snapshot,
)
from exporter.observations import (
    DaemonFacts,
    GpuObservation,
    LogState,
    ProcessFacts,
    Reading,
)
from exporter.sources.mps_control import cannot_run
from tests.support.player import RECORDINGS

PIPE = "/tmp/nvidia-mps"
DAEMON = ProcessFacts(10, 1.0, 0, "root", "nvidia-cuda-mps-control", "S", 1, (10,))


def daemon(**more: object) -> ControlDaemon:
    values: dict[str, object] = {
        "pid": 10, "facts": DaemonFacts(PIPE, "/l", process=DAEMON), **more,
    }  # fmt: skip
    return ControlDaemon(PIPE, "/l", values.pop("state", "answering"), **values)  # type: ignore[arg-type]


def gpu(*direct: ProcessFacts, served: bool = True, **more: object) -> Gpu:
    values: dict[str, object] = {"compute_mode": "exclusive_process",
                                 "compute_capability": (9, 0), **more}  # fmt: skip
    stranded = values.pop("stranded", None)
    return Gpu(
        GpuObservation(0, "GPU-a", **values),  # type: ignore[arg-type]
        "0", "GPU-a",
        direct_pids=tuple(one.pid for one in direct),
        direct_processes=direct,
        served_by=(PIPE,) if served else (),
        stranded_clients=stranded,  # type: ignore[arg-type]
    )  # fmt: skip


def names(snapshot: Snapshot) -> list[str]:
    return [finding.advice.name for finding in findings(snapshot)]


def process(pid: int, *inner: int, **environment: str) -> ProcessFacts:
    return ProcessFacts(pid, 1.0, 1001, "ann", "train", "S", 1, (pid, *inner),
                        mps_environment=environment)  # fmt: skip


def client(**more: object) -> ControlDaemon:
    return daemon(servers=(Server(20, state="ACTIVE", clients=(Client(30, 20, **more),)),))  # type: ignore[arg-type]


UNREADABLE = LogState(PIPE, "control", "/l/control.log", readable=False, error="no permission")
LARGE = LogState(PIPE, "control", "/l/control.log", readable=True, size_bytes=3 << 30)
IDLE_SMS = (Reading("mps_gpu_utilization_ratio", 0.99), Reading("mps_gpu_sm_active_ratio", 0.13))
BLIND = CollectorResult("nvml", success=False, duration_seconds=0.1, error="no library")
NO_TOOL = cannot_run("nvidia-cuda-mps-control", FileNotFoundError())
QUIT = Incident(at=0.5, kind="daemon_quit")
NOWHERE = LogState(PIPE, "control", "", readable=False, error="nothing tells")
GUESSED = DaemonFacts(PIPE, "/l", process=DAEMON, directories_assumed=True)
PLACELESS = DaemonFacts(PIPE, "", process=DAEMON, log_directory_assumed=True)

LEFT = PossibleUnfinishedWork(30, 1001, ended_at=5.0, seconds=0.195)

MADE_UP = {
    "server_in_fault": Snapshot(1.0, daemons=(daemon(servers=(Server(20, state="FAULT"),)),)),
    "possible_unfinished_work": Snapshot(
        9.0, daemons=(daemon(servers=(Server(20, state="ACTIVE", possible_unfinished_work=LEFT),)),)
    ),
    "percentage_ignored": Snapshot(1.0, daemons=(client(percentage_ignored="lots"),)),
    "memory_limit_ignored": Snapshot(1.0, daemons=(client(memory_limit_ignored="9=1G"),)),
    "environment_unreadable": Snapshot(1.0, daemons=(client(environment_readable=False),)),
    "logs_unreadable": Snapshot(1.0, daemons=(daemon(logs=(UNREADABLE,)),)),
    "log_large": Snapshot(1.0, daemons=(daemon(logs=(LARGE,)),)),
    "tool_missing": Snapshot(1.0, daemons=(daemon(state=None, error=NO_TOOL),)),
    "daemon_outside_host_pid_namespace": Snapshot(
        1.0,
        daemons=(
            daemon(facts=DaemonFacts(PIPE, "/l", process=ProcessFacts(10, 1.0, 0, "root", "c", "S",
                                                                      1, (10, 1)))),
        ),
    ),
    "daemon_absent": Snapshot(1.0, daemons=(daemon(state="absent", pid=None, facts=None),)),
    "daemon_quit": Snapshot(
        1.0, daemons=(daemon(state="absent", pid=None, facts=None, incidents=(QUIT,)),)
    ),
    "daemon_refuses": Snapshot(1.0, daemons=(daemon(state="refused"),)),
    "daemon_draining": Snapshot(1.0, daemons=(daemon(state="draining"),)),
    "server_starting_long": Snapshot(
        20.0,
        daemons=(daemon(servers=(Server(20, state="INITIALIZING", start_time_seconds=1.0),)),),
    ),
    "gpu_lost": Snapshot(1.0, gpus=(gpu(served=False, lost=True),)),
    "source_unreadable": Snapshot(1.0, collectors=(BLIND,)),
    "directories_assumed": Snapshot(1.0, daemons=(daemon(facts=GUESSED),)),
    "clients_not_shown": Snapshot(1.0, daemons=(daemon(dropped_clients=7),)),
    "not_exclusive_mode": Snapshot(1.0, gpus=(gpu(compute_mode="default"),)),
    "stranded_client": Snapshot(1.0, gpus=(gpu(stranded=1),)),
    "unfit_gpu": Snapshot(1.0, gpus=(gpu(compute_capability=(6, 1)),)),
    "mps_would_help": Snapshot(
        1.0, gpus=(gpu(process(1), process(2), served=False, readings=IDLE_SMS),)
    ),
    "process_bypasses_mps": Snapshot(1.0, gpus=(gpu(process(1)),), daemons=(daemon(),)),
    "pipe_directory_mismatch": Snapshot(
        1.0, gpus=(gpu(process(1, CUDA_MPS_PIPE_DIRECTORY="/else")),), daemons=(daemon(),)
    ),
    "daemon_not_reached": Snapshot(
        1.0, gpus=(gpu(process(1, 7, CUDA_MPS_PIPE_DIRECTORY=PIPE)),), daemons=(daemon(),)
    ),
}  # fmt: skip

RECORDED = {
    "ghost_server": ("wait-abandoned-sigkill", "12s"),
    "daemon_unresponsive": ("wait-abandoned-sigkill", "12s"),
    "queued_client_dead": ("wait-abandoned-sigkill", "4s"),
    "several_users_one_daemon": ("three-users", "2s"),
    "server_in_fault": ("fault-held", "6s"),
    "stranded_client": ("stranded", "2s"),
    "logs_unreadable": ("foreground", "4s"),
    "daemon_outside_host_pid_namespace": ("own-pid-namespace", "4s"),
    "daemon_not_reached": ("containers", "12s"),
    "mps_would_help": ("training-10-direct", "10s"),
}


@pytest.mark.parametrize(("name", "snapshot"), MADE_UP.items())
def test_each_trouble_is_named_and_nothing_else(name: str, snapshot: Snapshot) -> None:
    assert names(snapshot) == [name]
    (finding,) = findings(snapshot)
    text = "\n".join(report(snapshot))
    assert finding.evidence in text
    assert finding.advice.why in text
    assert finding.remedy in text
    want = {"critical": 2, "warning": 1, "info": 0}[finding.advice.severity]
    assert exit_status(snapshot) == want


@pytest.mark.parametrize(("name", "where"), RECORDED.items())
def test_the_doctor_finds_it_on_a_real_host(
    name: str, where: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    recording, at = where
    status = main(
        ["doctor", "--json", "--recording", str(RECORDINGS / f"{recording}.rec.gz"), "--at", at]
    )
    said = json.loads(capsys.readouterr().out)
    assert name in {finding["name"] for finding in said["findings"]}
    assert said["exit_status"] == status


def test_every_advice_is_tested() -> None:
    of_the_page = {name for name, advice in ADVICE.items() if advice.kind == "news"}
    of_the_page.add("web_configuration_unusable")
    assert MADE_UP.keys() | RECORDED.keys() == ADVICE.keys() - of_the_page


def test_a_daemon_whose_logs_are_nowhere() -> None:
    snapshot = Snapshot(1.0, daemons=(daemon(facts=PLACELESS, logs=(NOWHERE,)),))
    (finding,) = findings(snapshot)
    assert finding.advice.name == "logs_unreadable"
    assert finding.evidence.startswith(f"Nothing tells where the daemon {PIPE} has its logs")
    assert "--mps.log-directory" in finding.remedy


def test_a_missing_tool_is_told_once() -> None:
    failed = CollectorResult("control", success=False, duration_seconds=0.1, error=NO_TOOL)
    asked = f"get_server_list and 1 more: {NO_TOOL}"
    snapshot = Snapshot(1.0, daemons=(daemon(state=None, error=asked),), collectors=(failed,))
    (finding,) = findings(snapshot)
    assert finding.advice.name == "tool_missing"
    assert finding.evidence.startswith("The control tool nvidia-cuda-mps-control is not there:")


def test_rights_that_lack_for_other_processes_than_clients() -> None:
    assert names(Snapshot(1.0, unreadable_environments=2)) == ["environment_unreadable"]
    clients = client(environment_readable=False)
    assert names(Snapshot(1.0, daemons=(clients,), unreadable_environments=2)) == [
        "environment_unreadable"
    ]


def test_many_processes_of_one_kind_are_one_finding() -> None:
    crowd = gpu(*(process(pid) for pid in range(1, 9)))
    (finding,) = findings(Snapshot(1.0, gpus=(crowd,), daemons=(daemon(),)))
    assert finding.evidence.count("process ") == 5
    assert finding.evidence.endswith("; and 3 more.")


def test_names_of_others_do_nothing_to_the_terminal() -> None:
    rude = "\x1b[2Jtrain\u202e"
    running = client(command=rude, user=rude, percentage_ignored=rude)
    beside = gpu(replace(process(9), name=rude, user=rude))
    text = "\n".join(report(Snapshot(1.0, daemons=(running,), gpus=(beside,))))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_healthy_host_gets_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(RECORDINGS / "one-client.rec.gz")
    assert main(["doctor", "--recording", recording, "--at", "4s"]) == 0
    text = capsys.readouterr().out
    assert "Findings: 1 info" in text  # the compute mode of the laboratory's machine
    assert "client" in text


def test_what_could_not_be_seen_is_a_warning() -> None:
    snapshot = Snapshot(1.0, collectors=(BLIND,))
    assert exit_status(snapshot) == 1
    assert "no library" in "\n".join(report(snapshot))

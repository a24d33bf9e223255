"""Checks of one process: what they may not say, and the facts in /proc on which they rest.

Their texts are in tests/golden/doctor-pid.txt.
"""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from mps_exporter.cli import main
from mps_exporter.commands.doctor import selected_pids
from mps_exporter.findings import findings, trace_findings
from mps_exporter.findings.doctor_pid import Check, check_process, conclusion, pids_of
from mps_exporter.flags import Settings
from mps_exporter.observations import (
    ClosedFolder,
    ContainerName,
    DaemonFacts,
    Leftovers,
    OpenFiles,
    ProcessFacts,
    ProcessView,
)
from mps_exporter.snapshot import Snapshot, Wait
from mps_exporter.sources import process_view
from mps_exporter.sources.process_view import view_process
from testing import snapshots as hosts
from testing.fake_host import idle_process
from testing.fake_proc import FakeProc
from testing.player import RECORDINGS, snapshot_at
from testing.snapshots import process_using


@pytest.fixture(name="snapshot")
def percentages() -> Snapshot:
    return snapshot_at("percentages", 0.9)


def answer(snapshot: Snapshot, pid: int, view: ProcessView | None = None) -> Check:
    return conclusion(check_process(pid, snapshot, findings(snapshot), view))


def test_a_process_without_files_in_proc_is_gone_only_where_proc_is_there(tmp_path: Path) -> None:
    pid = 2**22 + 1  # above the kernel's maximum
    view = view_process(pid, (), str(tmp_path))
    assert (view.present, view.state) == (True, "")
    assert not view_process(pid, ()).present


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ('export CUDA_MPS_PIPE_DIRECTORY="/p"', True),
        ("CUDA_MPS_PIPE_DIRECTORY=/p # MPS", True),
        ("CUDA_MPS_PIPE_DIRECTORY=/p/q", False),
        ("XCUDA_MPS_PIPE_DIRECTORY=/p", False),
    ],
)
def test_the_profile_of_the_host(tmp_path: Path, line: str, sets: bool) -> None:
    (tmp_path / "profile.d").mkdir()
    file = tmp_path / "profile.d" / "a.sh"
    file.write_text(f"PATH=/bin\n{line}\n")
    found = process_view.profile_with("CUDA_MPS_PIPE_DIRECTORY", "/p", tmp_path)
    assert found == (str(file) if sets else "")


def test_a_server_without_a_free_descriptor_refuses_newcomers_only(snapshot: Snapshot) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    files = (OpenFiles(daemon.servers[0].pid, daemon.pipe_directory, 72, 70),)
    found = tuple(trace_findings(Leftovers(open_files=files)))
    view = process_using(daemon.pipe_directory)
    refused = conclusion(check_process(77, snapshot, found, view))
    assert ("has 70 of at most 72 files open" in refused.text, refused.command) == (True, "")
    client = replace(view, pid=1797)
    assert conclusion(check_process(1797, snapshot, found, client)).outcome == "ok"


@pytest.mark.parametrize(
    ("limited", "owner", "directory", "offered"),
    [
        (False, 0, "/a/mps", True),
        (True, 0, "/a/mps", False),
        (False, 1002, "/a/mps", False),
        (False, 0, "/home/of/someone/link", False),
    ],
)
def test_only_a_folder_of_the_daemons_own_user_is_to_be_opened(
    limited: bool, owner: int, directory: str, offered: bool, snapshot: Snapshot
) -> None:
    facts = DaemonFacts("/a/mps", "/l", owner_uid=0, limited=limited)
    daemon = replace(snapshot.daemons[0], pipe_directory="/a/mps", facts=facts)
    view = process_using(
        directory,
        daemon_directory=None,
        path_error="/a is closed to user 1001 (mode 0700)",
        closed_folder=ClosedFolder("/a", "", owner),
    )
    found = answer(replace(snapshot, daemons=(daemon,)), 77, view)
    assert found.command == ("chmod a+x /a" if offered else "")


def test_processes_of_a_user() -> None:
    snapshot = snapshot_at("wait-served", 0.6)
    assert pids_of(snapshot, uid=1002, job=None) == [705]
    assert 694 in pids_of(snapshot, uid=1001, job=None)


@pytest.mark.parametrize(("directory", "may"), [(None, True), ("/other", False)])
def test_a_process_may_wait_at_each_daemon_if_its_directory_is_unknown(
    directory: str | None, may: bool
) -> None:
    host, view = hosts.snapshot(hosts.daemon(protocol="3")), process_using("", daemon_directory="")
    checks = check_process(77, host, (), replace(view, pipe_directory=directory))
    assert any("whether it waits is not known" in one.text for one in checks) is may


def test_a_dead_process_has_a_queue_entry() -> None:
    wait = Wait(pid=77, uid=1002, since=hosts.NOW - 9, behind_uid=1001, dead=True)
    host = hosts.snapshot(hosts.daemon(hosts.server(), waits=(wait,)))
    checks = check_process(77, host, (), ProcessView(77, present=False))
    assert any("still has a queue entry" in one.text for one in checks)


def test_a_stopped_process_without_a_daemon_is_stopped() -> None:
    found = answer(hosts.snapshot(), 77, ProcessView(77, state="T"))
    assert ("stopped (state T)" in found.text, found.command) == (True, "kill -CONT 77")


def test_processes_of_a_job_are_its_clients() -> None:
    ours, other = (hosts.client(pid, slurm_job_id=job) for pid, job in ((30, "77"), (31, "78")))
    seen = hosts.snapshot(hosts.daemon(hosts.server(ours, other)))
    assert pids_of(seen, uid=None, job="77") == [30]


TRAINING = ContainerName("containerd://6", "team-a", "training", "main", (705, 1))


@pytest.mark.parametrize(
    ("job", "pids"),
    [("training", [705]), ("team-a/training", [705]), ("train", []), ("team-b/training", [])],
)
def test_a_pod_that_waits_by_its_name(job: str, pids: list[int]) -> None:
    snapshot = replace(snapshot_at("wait-served", 0.6), containers=(TRAINING,))
    assert pids_of(snapshot, uid=None, job=job) == pids


def test_a_job_that_waits(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.add(705, cgroup="0::/system.slice/slurmstepd.scope/job_17/step_0\n")
    settings = Settings(doctor_job="17", path_procfs=str(tmp_path))
    assert selected_pids(settings, snapshot_at("wait-served", 0.6)) == [705]


def viewed(*daemons: DaemonFacts, **environment: str) -> ProcessView:
    """The view of a process with this environment."""
    with idle_process(**environment) as pid:
        return view_process(pid, daemons)


def test_a_control_socket_that_is_closed_to_the_user(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "control"))
        for mode, closed in ((0o600, "0600"), (0o666, ""), (0o602, "")):
            (tmp_path / "control").chmod(mode)
            for user, expected in ((os.geteuid() + 1, closed), (0, "")):
                found = process_view._User(user, frozenset())
                assert process_view._closed_socket(str(tmp_path), found) == expected


def test_the_view_of_a_real_process(tmp_path: Path) -> None:
    pipe = tmp_path / "real" / "pipe"
    pipe.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    directory = f"{tmp_path}/link/pipe"
    daemon = DaemonFacts(str(pipe), "", process=ProcessFacts(os.getpid(), 0.0))
    own = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_LAUNCH_BLOCKING": "1"}
    view = viewed(DaemonFacts("/elsewhere", ""), daemon, **own)
    assert view.present
    assert view.uid == os.geteuid()
    assert (view.pipe_directory, view.names_directory) == (directory, True)
    assert (view.path_error, view.daemon_directory) == (None, str(pipe))
    assert view.own_proc is None, "it has no PID namespace of its own"
    assert view.mps_environment == {"CUDA_MPS_PIPE_DIRECTORY": directory}
    assert not view.leftover
    assert view.debug_variables == ("CUDA_LAUNCH_BLOCKING",)


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("{0}/none/x", "{0}/none is not there"),
        ("{0}/file/x", "{0}/file is not a directory"),
        ("{0}/loop/x", "{0}/loop is a loop of links"),
        ("{0}/a/../none", "{0}/none is not there"),
    ],
)
def test_why_a_directory_cannot_be_used(tmp_path: Path, directory: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    view = viewed(CUDA_MPS_PIPE_DIRECTORY=directory.format(tmp_path))
    assert view.path_error == why.format(tmp_path)


def test_what_a_daemon_left_and_a_library_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("445\n")
    (tmp_path / "control_lock").touch()
    here = str(tmp_path / "nvidia-cuda-mps-control.pid")
    view = viewed(
        CUDA_MPS_PIPE_DIRECTORY=str(tmp_path),
        CUDA_INJECTION64_PATH=f"{tmp_path}/none.so",
        NVTX_INJECTION64_PATH=here,
        CUDA_INJECTION32_PATH="on-the-search-path.so",
    )
    assert view.leftover
    assert view.missing_libraries == ("CUDA_INJECTION64_PATH",)
    assert len(view.debug_variables) == 3


@pytest.mark.parametrize(
    ("seen", "own"),
    [
        ("1 (x) S 0 " + "1 " * 17 + "4711 0", True),
        ("1 (init) S 0 " + "1 " * 17 + "2 0", False),
        (None, False),
    ],
)
def test_a_process_that_sees_the_proc_of_another_namespace(
    tmp_path: Path, seen: str | None, own: bool
) -> None:
    base = tmp_path / "proc" / "11"
    there = base / "root" / "proc"
    there.mkdir(parents=True)
    (base / "stat").write_text("11 (x) S 1 " + "1 " * 17 + "4711 0")
    (base / "status").write_text("Uid:\t0\t0\t0\t0\nNSpid:\t11\t7\n")
    assert view_process(11, [], str(tmp_path / "proc")).own_proc is None, "no procfs is there"
    (there / "1").mkdir()
    if seen is not None:
        (there / "7").mkdir()
        (there / "7" / "stat").write_text(seen)
    (base / "task" / "11").mkdir(parents=True)
    (base / "task" / "11" / "children").write_text(f"12 {os.getpid()} 13 ")
    found = view_process(11, [], str(tmp_path / "proc"))
    assert (found.own_proc, found.children) == (own, (12, 13))


def doctor(*words: str) -> int:
    return main(["doctor", *words])


def test_doctor_reports_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    recording = f"--recording={RECORDINGS}/wait-served.rec.gz"
    assert doctor("--pid", "705", recording, "--at", "700ms") == 1
    text = capsys.readouterr().out
    assert text.startswith("Process 705: User 1002 has waited")
    assert "Ask user 1001 when process 694 will be done" in text
    assert doctor("--user", "1002", recording, "--at", "700ms", "--json") == 1
    (process,) = json.loads(capsys.readouterr().out)["processes"]
    assert (process["pid"], process["outcome"]) == (705, "problem")
    assert process["page"].startswith("https://")
    assert process["page"].endswith("/docs/symptoms/a-program-hangs-in-cuinit.md")


def test_a_job_without_processes_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor("--job", "77", f"--recording={RECORDINGS}/quiet.rec.gz") == 3
    text = capfd.readouterr().err
    assert "no process of pod or job '77' was seen at this time of the recording" in text
    assert "proves nothing about MPS" in text


@pytest.mark.parametrize(
    ("below", "protocol", "found"),
    [
        ("training/batch", "3", True),
        ("training", "3", True),
        ("", "3", True),
        ("training/batch", None, False),
        ("training/batch/deeper", "3", False),
    ],
)
def test_a_namespace_s_directory_is_its_daemon_s(
    tmp_path: Path, below: str, protocol: Literal["3"] | None, found: bool
) -> None:
    pipe = tmp_path / "pipe"
    (pipe / below).mkdir(parents=True)
    daemon = DaemonFacts(str(pipe), "", protocol=protocol)
    view = viewed(daemon, CUDA_MPS_PIPE_DIRECTORY=str(pipe / below))
    assert (view.daemon_directory == str(pipe)) is found


@pytest.mark.parametrize(
    ("changes", "command"),
    [({"closed_socket": "0600"}, "chmod a+w {}/control"), ({"state": "T"}, "kill -CONT 1797")],
)
def test_no_command_of_root_where_an_ordinary_user_chooses(
    changes: dict[str, Any], command: str, snapshot: Snapshot
) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    view = replace(process_using(daemon.pipe_directory, 1797), **changes)
    found = answer(snapshot, 1797, view)
    assert found.command == command.format(daemon.pipe_directory)
    users = replace(daemon, facts=replace(daemon.facts, limited=True))
    assert answer(replace(snapshot, daemons=(users,)), 1797, view).command == ""

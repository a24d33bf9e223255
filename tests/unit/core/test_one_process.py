"""Checks of one process: on recordings of real hosts, and with synthetic files in /proc."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from mps_exporter.cli import main
from mps_exporter.commands import doctor_report
from mps_exporter.commands.doctor import selected_pids
from mps_exporter.findings import findings, trace_findings
from mps_exporter.findings.daemons_and_servers import HANGS, several_users_one_daemon
from mps_exporter.findings.finding import HostFacts, clients_of
from mps_exporter.findings.limits import NO_EFFECT
from mps_exporter.findings.one_process import Check, check_process, conclusion, pids_of
from mps_exporter.flags import Settings
from mps_exporter.humanize import UserNames
from mps_exporter.observations import (
    ClosedFolder,
    ContainerName,
    DaemonFacts,
    Leftovers,
    OpenFiles,
    ProcessFacts,
    ProcessView,
)
from mps_exporter.snapshot import CollectorResult, Snapshot
from mps_exporter.sources import process_view
from mps_exporter.sources.process_view import view_process
from testing.fake_host import idle_process
from testing.fake_proc import FakeProc
from testing.player import RECORDINGS, snapshot_at
from testing.snapshots import process_using

CUDA = "cuda-error-"
LOST = "all-programs-died-at-once"
TOO_MANY = f"{CUDA}808-809-mps-max-clients-reached"
PAGES = Path(__file__).parents[3] / "docs" / "symptoms"


@pytest.fixture(name="snapshot")
def percentages() -> Snapshot:
    return snapshot_at("percentages", 0.9)


def newcomer(snapshot: Snapshot, **environment: str) -> ProcessView:
    """A process that uses the host's daemon, and has made no context."""
    daemon = next(one for one in snapshot.daemons if one.state != "absent")
    return process_using(daemon.pipe_directory, mps_environment=environment)


def answer(snapshot: Snapshot, pid: int, view: ProcessView | None = None) -> Check:
    return conclusion(check_process(pid, snapshot, findings(snapshot), view))


@pytest.mark.parametrize(
    ("recording", "seconds", "pid", "words", "page"),
    [
        ("wait-served", 0.6, 705, "behind user 1001", "a-program-hangs-in-cuinit"),
        ("deaf-server", 9.1, 6421, "6429 was started for clients that had died", HANGS),
        ("deaf-with-clients", 30.0, 77, "accepts no client since it was sent a dead one", HANGS),
        ("fault-held", 2.9, 1168, "a fatal GPU error on", f"{CUDA}700-illegal-address-under-mps"),
        ("fault-held", 2.9, 1201, "process 1201 was refused", f"{CUDA}807-mps-server-not-ready"),
        ("ending-jobs", 54.1, 2172, "Process 2192 left GPU work unfinished", LOST),
        ("ending-jobs", 54.1, 2192, "(proved by the kernel log); 3 clients were", LOST),
        ("ending-jobs", 4.8, 1663, "was terminated through", f"{CUDA}810-mps-client-terminated"),
        ("server-killed", 2.9, 744, "crashed; 2 clients were lost", f"{CUDA}806-mps-rpc-failure"),
        ("memory-ordinals", 0.6, 3989, "with '1=1G'", NO_EFFECT),
        ("containers", 11.0, 976, "is used without MPS by process 976", NO_EFFECT),
        ("draining", 1.7, 1073, "was asked to quit", "quit-does-not-return"),
        ("stopped", 5.8, 948, "does not answer", HANGS),
        ("context-limit", 12.0, 77, "has 48 of at most 48 contexts on GPU 0", TOO_MANY),
    ],
)
def test_the_conclusion_on_a_real_host(
    recording: str, seconds: float, pid: int, words: str, page: str
) -> None:
    snapshot = snapshot_at(recording, seconds)
    view = newcomer(snapshot) if pid == 77 else None
    found = answer(snapshot, pid, view)
    outcome = "warning" if recording in ("draining", "stopped") else "problem"
    assert (found.outcome, found.page) == (outcome, page)
    assert words in found.text
    assert ("kill -9 6429" in found.command) == (pid == 6421)
    assert (PAGES / f"{page}.md").exists()


def test_a_process_is_ok_only_if_its_proc_files_were_read(snapshot: Snapshot) -> None:
    assert answer(snapshot, 1797).outcome == "unknown"
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    view = process_using(daemon.pipe_directory, 1797)
    assert answer(snapshot, 1797, view).outcome == "ok"
    (server,) = daemon.servers
    clients = tuple(replace(one, environment_readable=False) for one in server.clients)
    blind = replace(daemon, servers=(replace(server, clients=clients),))
    found = answer(replace(snapshot, daemons=(blind,)), 1797, view)
    assert found.text.startswith("Nothing wrong was seen, but the environment of process 1797")


def test_nothing_is_said_of_a_process_that_procfs_does_not_show(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    pid = 2**22 + 1  # above the kernel's maximum
    view = view_process(pid, (), str(tmp_path))
    found = answer(snapshot, pid, view)
    assert (found.name, found.outcome) == ("connection", "unknown")
    assert "in /proc cannot be read" in found.text
    assert answer(snapshot, pid, view_process(pid, ())).text == f"No process {pid} is there."
    texts = [one.text for one in check_process(pid, snapshot, (), view)]
    assert not [text for text in texts if " is no client" in text or "only its user" in text]


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({"state": "Z", "parent_pid": 9}, "warning", "(process 9) has not reaped it"),
        ({"closed_socket": "0600"}, "problem", "may not connect to /"),
        ({"state": "D"}, "warning", "inside the kernel"),
        ({"present": False}, "warning", "No process 1797 is there"),
        ({"pipe_directory": "/" + "p" * 100}, "problem", "has 109 bytes"),
        ({"path_error": "/a is closed to user 1001 (mode 0700)"}, "problem", "/a is closed"),
        (
            {"debug_variables": ("A_PATH", "B"), "missing_libraries": ("A_PATH",)},
            "warning",
            "has A_PATH, which names a file that is not there",
        ),
        ({"debug_variables": ("CUDA_INJECTION64_PATH",)}, "warning", "CUDA_INJECTION64_PATH"),
        ({"oom_kills": 2}, "warning", "ended 2 processes"),
        ({"pipe_directory": None}, "unknown", "environment of the process cannot be read"),
    ],
)
def test_facts_of_the_process_itself(
    changes: dict[str, object], outcome: str, words: str, snapshot: Snapshot
) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    view = process_using(daemon.pipe_directory, 1797)
    found = answer(snapshot, 1797, replace(view, **changes))  # type: ignore[arg-type]
    assert (found.outcome, words in found.text) == (outcome, True), found
    assert " " in (found.command or " "), "no name of a page"


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, "(CUDA_MPS_PIPE_DIRECTORY)"),
        ({"profile": "/etc/profile.d/a.sh"}, "PIPE_DIRECTORY, which /etc/profile.d/a.sh sets)"),
        ({"names_directory": False, "default_mounted": True}, "which is mounted for it)"),
        ({"names_directory": False}, "(the default)"),
    ],
)
def test_why_a_process_uses_a_directory(
    changes: dict[str, object], source: str, snapshot: Snapshot
) -> None:
    view = replace(newcomer(snapshot), **changes)  # type: ignore[arg-type]
    texts = [one.text for one in check_process(77, snapshot, (), view) if one.name == "directory"]
    assert [source in text for text in texts] == [True]
    contained = replace(view, pipe_directory="/tmp/none", daemon_directory=None, hidden="all")
    answers = [one.outcome for one in check_process(77, snapshot, (), contained)]
    assert answers[-2:] == ["unknown", "unknown"]  # the daemon, and whether it waits


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


@pytest.mark.parametrize(
    ("has_context", "outcome", "words"),
    [
        (False, "ok", "No control daemon runs: it does not wait for MPS."),
        (True, "warning", "No control daemon serves its pipe directory: it runs without MPS"),
    ],
)
def test_a_host_without_a_daemon_explains_no_hang(
    has_context: bool, outcome: str, words: str, snapshot: Snapshot
) -> None:
    view = process_using("/tmp/nvidia-mps", names_directory=False, daemon_directory=None)
    gpus = (replace(snapshot.gpus[0], direct_pids=(77,) if has_context else ()),)
    checks = check_process(77, replace(snapshot, daemons=(), gpus=gpus), (), view)
    (found,) = [one for one in checks if one.name == "daemon"]
    assert (found.outcome, words in found.text) == (outcome, True)
    assert (found.command, "administrator" in found.remedy) == ("", has_context)
    assert conclusion(checks).name == "connection"
    left = check_process(77, replace(snapshot, daemons=()), (), replace(view, leftover=True))
    assert "and is gone" in str(left), "it is not a host without MPS"


def test_a_process_whose_directory_no_daemon_serves(snapshot: Snapshot) -> None:
    view = process_using("/srv/m p", daemon_directory=None)
    absent = replace(snapshot.daemons[0], state="absent", servers=())
    gone = answer(replace(snapshot, daemons=(absent,)), 77, process_using(absent.pipe_directory))
    assert (gone.outcome, "is gone" in gone.text) == ("problem", True)
    found = answer(snapshot, 77, view)
    assert found.outcome == "problem"
    assert "No control daemon serves its pipe directory: it would run without" in found.text
    daemon = snapshot.daemons[0].pipe_directory
    assert found.command == f"export CUDA_MPS_PIPE_DIRECTORY={daemon}"
    left = answer(snapshot, 77, replace(view, leftover=True))
    assert "A daemon has run at its pipe directory, and is gone" in left.text
    assert left.command == "", "root must not start a daemon where an ordinary user wants it"
    roots = answer(snapshot, 77, replace(view, leftover=True, uid=0))
    assert roots.command == "CUDA_MPS_PIPE_DIRECTORY='/srv/m p' nvidia-cuda-mps-control -d"
    hidden = answer(snapshot, 77, replace(view, pipe_directory=daemon))
    assert (hidden.command, hidden.remedy.partition(" into")[0]) == (
        "",
        "Mount the host's directory",
    )


@pytest.mark.parametrize(
    ("protocol", "read", "outcome", "words"),
    [
        ("2", True, "warning", "waits for none"),
        ("2", False, "unknown", "control.log is not readable"),
        ("3", True, "unknown", "an MPS v3 daemon does not tell"),
    ],
)
def test_whether_a_newcomer_waits(
    protocol: str, read: bool, outcome: str, words: str, snapshot: Snapshot
) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    logs = tuple(replace(log, readable=read) for log in daemon.logs)
    changed = replace(daemon, protocol=protocol, logs=logs)
    found = answer(replace(snapshot, daemons=(changed,)), 77, newcomer(snapshot))
    assert (found.outcome, words in found.text) == (outcome, True), found
    assert (doctor_report.checks_exit_status({77: [found]}) == 3) == (outcome == "unknown")
    assert ("root may read closed logs" in found.remedy) == (not read)
    unknown = replace(daemon.facts, log_directory_assumed=True)
    hidden = answer(
        replace(snapshot, daemons=(replace(changed, facts=unknown),)), 77, newcomer(snapshot)
    )
    assert ("Name the log directory" in hidden.remedy) == (not read)


@pytest.mark.parametrize(("waits", "words"), [(True, "1002 has waited"), (False, "no PID of this")])
def test_a_waiter_at_a_daemon_in_a_container(waits: bool, words: str) -> None:
    """Its log numbers no process as this host does."""
    snapshot = snapshot_at("wait-served", 0.6)
    (daemon,) = snapshot.daemons
    inner = DaemonFacts(
        daemon.pipe_directory, "/l", process=ProcessFacts(9, 0.0, namespace_pids=(9, 1))
    )
    queue = tuple(replace(wait, pid=0) for wait in daemon.waits if waits)
    view = replace(newcomer(snapshot), uid=1002)
    changed = replace(daemon, facts=inner, waits=queue)
    assert words in answer(replace(snapshot, daemons=(changed,)), 705, view).text


@pytest.mark.parametrize(
    ("by_file", "own", "fails"), [(True, "0:9", True), (True, "0:2", False), (False, "0:9", False)]
)
def test_a_newcomer_that_cannot_map_its_servers_memory(
    by_file: bool, own: str, fails: bool, snapshot: Snapshot
) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    process = ProcessFacts(9, 0.0, shared_memory="0:2")
    servers = tuple(replace(one, shares_by_file=by_file) for one in daemon.servers)
    changed = replace(daemon, servers=servers, facts=replace(daemon.facts, process=process))
    view = replace(newcomer(snapshot), shared_memory=own)
    found = answer(replace(snapshot, daemons=(changed,)), 77, view)
    assert ("has a named memory region" in found.text) == fails
    assert ("--ipc=host" in found.remedy) == fails


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({"limiter": "HAMi-core"}, "warning", "HAMi-core"),
        ({"state": "connecting", "contexts": {}}, "unknown", "called cuInit only"),
    ],
)
def test_a_client_that_may_be_well(
    changes: dict[str, Any], outcome: str, words: str, snapshot: Snapshot
) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    (server,) = daemon.servers
    (one,) = [replace(one, state_since=1.0) for one in server.clients if one.pid == 1797]
    changed = replace(daemon, servers=(replace(server, clients=(replace(one, **changes),)),))
    view = process_using(daemon.pipe_directory, 1797)
    found = answer(replace(snapshot, daemons=(changed,)), 1797, view)
    assert (found.outcome, words in found.text) == (outcome, True)


def test_a_process_that_has_lost_its_server_and_its_daemon() -> None:
    snapshot = snapshot_at("stranded", 0.9, 2.0)
    (pid,) = snapshot.gpus[0].stranded_pids or ()
    view = replace(newcomer(snapshot), pid=pid, daemon_directory=None)
    for daemons in (snapshot.daemons, ()):
        found = answer(replace(snapshot, daemons=daemons), pid, view)
        assert "1 process on GPU 0 lost the MPS server" in found.text
        assert (found.command, found.page) == (f"kill {pid}", "cuda-error-806-mps-rpc-failure")


def test_a_server_without_a_free_descriptor_refuses_newcomers_only(snapshot: Snapshot) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    files = (OpenFiles(daemon.servers[0].pid, daemon.pipe_directory, 72, 70),)
    found = tuple(trace_findings(Leftovers(open_files=files)))
    view = newcomer(snapshot)
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
    view = replace(
        newcomer(snapshot),
        pipe_directory=directory,
        daemon_directory=None,
        path_error="/a is closed to user 1001 (mode 0700)",
        closed_folder=ClosedFolder("/a", "", owner),
    )
    found = answer(replace(snapshot, daemons=(daemon,)), 77, view)
    assert found.command == ("chmod a+x /a" if offered else "")


@pytest.mark.parametrize(
    ("visible", "named"),
    [("", False), ("1", False), ("-1", False), ("GPU-f", False), ("0", True), ("MIG-7", None)],
)
def test_visible_devices_that_name_no_gpu_of_the_daemon(
    visible: str, named: bool | None, snapshot: Snapshot
) -> None:
    view = newcomer(snapshot, CUDA_VISIBLE_DEVICES=visible)
    found = answer(snapshot, 77, view)
    assert (found.page == "invalid-cuda-visible-devices") == (named is False)
    works = answer(snapshot, 1797, replace(view, pid=1797))
    assert works.outcome == "ok", "it has a context: it has set the variable itself"


def test_a_limit_that_leaves_no_room_for_a_context(snapshot: Snapshot) -> None:
    small = newcomer(snapshot, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=100M,1=4G")
    found = answer(snapshot, 77, small)
    assert (found.outcome, "allows 100 MiB" in found.text) == ("problem", True)
    enough = newcomer(snapshot, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")
    assert "no client of a daemon" in answer(snapshot, 77, enough).text
    client = answer(snapshot, 1797, replace(small, pid=1797))
    assert client.outcome == "ok", "it has its context"
    share = newcomer(snapshot, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="1")
    assert "error 46" not in str(check_process(77, snapshot, (), share)), "Hopper gives 8 SMs"


def test_an_ordinary_users_daemon_serves_only_that_user(snapshot: Snapshot) -> None:
    daemons = tuple(replace(daemon, uid=1001) for daemon in snapshot.daemons)
    snapshot = replace(snapshot, daemons=daemons)
    view = process_using(daemons[0].pipe_directory, uid=1002)
    assert "gets error 805" in answer(snapshot, 77, view).text


def test_processes_of_a_user() -> None:
    snapshot = snapshot_at("wait-served", 0.6)
    assert pids_of(snapshot, uid=1002, job=None) == [705]
    assert 694 in pids_of(snapshot, uid=1001, job=None)


TRAINING = ContainerName("containerd://6", "team-a", "training", "main", (705, 1))


@pytest.mark.parametrize(
    ("job", "pids"),
    [("training", [705]), ("team-a/training", [705]), ("train", []), ("team-b/training", [])],
)
def test_a_pod_that_waits_by_its_name(job: str, pids: list[int]) -> None:
    snapshot = replace(snapshot_at("wait-served", 0.6), containers=(TRAINING,))
    assert pids_of(snapshot, uid=None, job=job) == pids


def test_a_finding_names_the_pod_of_a_process() -> None:
    snapshot = snapshot_at("wait-served", 0.6)
    holder = replace(TRAINING, pod="holder", pids=(694,))
    (found,) = several_users_one_daemon.found(
        HostFacts(replace(snapshot, containers=(TRAINING, holder)), UserNames(snapshot))
    )
    assert "Do not kill process 705 (pod team-a/training): " in found.remedy
    assert "when process 694 (pod team-a/holder) will be done" in found.remedy
    clients = [one for daemon in snapshot.daemons for one in clients_of(daemon)]
    host = HostFacts(replace(snapshot, containers=(holder,)), UserNames(snapshot))
    (shown,) = [host.client(one) for one in clients if one.pid == 694]
    assert shown.endswith(" of user 1001, pod team-a/holder)")


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


def test_doctor_names_who_may_run_a_command_and_who_is_in_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ghost = f"--recording={RECORDINGS}/wait-abandoned-sigkill.rec.gz"
    assert doctor("--pid", "871", ghost, "--at", "12s") == 1
    text = capsys.readouterr().out
    assert "-9 863  (root, or the user of this server; else ask your administrator)\n" in text
    assert text.count("-9 863") == 1, "a remedy is told once"
    assert "Do not kill process 871" in text
    assert doctor("--user", "1002", f"--recording={RECORDINGS}/tour.rec.gz", "--at", "40s") == 1
    assert "when processes 597, 598, 599 and 600 will be done" in capsys.readouterr().out
    for user in ("1002", "1003"):
        assert doctor("--user", user, f"--recording={RECORDINGS}/three-users.rec.gz", "--at=3s")
        assert ("1 other user came before" in capsys.readouterr().out) == (user == "1003")
    assert doctor("--user", "1002", f"--recording={RECORDINGS}/deaf-server.rec.gz", "--at=20s") == 1
    assert "When it is served is not known: a process died" in capsys.readouterr().out


def test_a_failed_reading_of_the_gpus_has_its_reason(snapshot: Snapshot) -> None:
    failed = CollectorResult("nvml", False, 0.1, error="libnvidia-ml.so.1 was not found")
    host = replace(snapshot, gpus=(), collectors=(failed,))
    found = answer(host, 77, process_using(host.daemons[0].pipe_directory, children=(78, 79)))
    assert found.remedy.startswith("It has started processes 78 and 79: try --pid with these.")
    assert "no GPU was read (libnvidia-ml.so.1 was not found)" in found.text
    assert found.outcome == "unknown"


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


def test_the_socket_of_root_s_daemon_is_opened_by_a_command(snapshot: Snapshot) -> None:
    (daemon,) = [one for one in snapshot.daemons if one.servers]
    assert daemon.facts is not None
    view = replace(process_using(daemon.pipe_directory, 1797), closed_socket="0600")
    found = answer(snapshot, 1797, view)
    assert found.command == f"chmod a+w {daemon.pipe_directory}/control"
    users = replace(daemon, facts=replace(daemon.facts, limited=True))
    assert answer(replace(snapshot, daemons=(users,)), 1797, view).command == ""

"""Findings of recorded incidents and of synthetic hosts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.commands.doctor_report import (
    CHECKS,
    HEALTHY,
    Diagnosis,
    diagnosis_as_json,
    diagnosis_exit_status,
    diagnosis_lines,
    status_of_check,
)
from mps_exporter.findings import ADVICE, findings, recent_incidents
from mps_exporter.findings.daemons_and_servers import start_daemon
from mps_exporter.metrics import Build, render
from mps_exporter.observations import DaemonFacts, GpuObservation, LogState, ProcessFacts, Reading
from mps_exporter.snapshot import (
    Client,
    ClientState,
    ControlDaemon,
    Gpu,
    Handover,
    Incident,
    Server,
    Snapshot,
)
from mps_exporter.web.status_api import make_status
from testing.finding_hosts import (
    DAEMON,
    IDLE_SMS,
    LARGE,
    OVER,
    PIPE,
    QUIT,
    RECORDED,
    SYNTHETIC,
    client,
    daemon,
    gpu,
    host,
    job,
    process,
)
from testing.player import snapshot_at


def names(snapshot: Snapshot) -> list[str]:
    return [finding.advice.name for finding in findings(snapshot)]


def evidence(snapshot: Snapshot, name: str) -> str:
    return " ".join(one.evidence for one in findings(snapshot) if one.advice.name == name)


@pytest.mark.parametrize(("name", "snapshot"), SYNTHETIC.items())
def test_a_host_has_exactly_its_finding(name: str, snapshot: Snapshot) -> None:
    assert names(snapshot) == [name]
    (finding,) = findings(snapshot)
    text = "\n".join(diagnosis_lines(Diagnosis(snapshot)))
    assert finding.evidence in text
    assert finding.advice.why in text
    assert finding.remedy in text
    assert all(one.run_as.startswith(("root", "any user", "the user")) for one in finding.actions)
    want = {"critical": 2, "warning": 1, "info": 0}[finding.advice.severity]
    assert diagnosis_exit_status(Diagnosis(snapshot)) == want


def test_every_finding_has_a_host() -> None:
    of_the_page = {name for name, advice in ADVICE.items() if advice.kind in ("news", "trace")}
    of_the_page.add("web_configuration_unusable")
    hosts = SYNTHETIC.keys() | RECORDED.keys()
    assert hosts == ADVICE.keys() - of_the_page, "each has a host in testing/finding_hosts.py"


@pytest.mark.parametrize(
    ("state", "seconds", "stuck"),
    [
        ("connecting", 1000.0, False),
        ("creating_context", 29.0, False),
        ("creating_context", 31.0, True),
        ("active", 1000.0, False),
        ("torn_down", 1.0, True),
    ],
)
def test_a_client_without_a_usable_context_is_stuck(
    state: ClientState, seconds: float, stuck: bool
) -> None:
    seen = host(client(state=state, state_since=1000.0 - seconds), at=1000.0)
    found = findings(seen)
    assert [one.advice.name for one in found] == (["client_stuck"] if stuck else [])
    if stuck:
        assert "process 30" in found[0].evidence
        ended = [one.command for one in found[0].actions if one.heals]
        assert ended == (["kill 30"] if state == "torn_down" else [])


def test_in_a_fault_only_affected_clients_must_end() -> None:
    clients = (Client(30, 20, state="torn_down", state_since=1.0), Client(31, 20, state="active"))
    server = Server(20, state="FAULT", clients_connected=2, clients=clients)
    snapshot = host(daemon(servers=(server,)), at=9.0)
    (fault, _) = findings(snapshot)
    assert "31" not in fault.remedy
    assert [one.command for one in fault.actions] == ["kill 30"]
    unknown = replace(server, clients=clients[1:])
    snapshot = host(daemon(servers=(unknown,)), at=9.0)
    (fault,) = findings(snapshot)
    assert (fault.actions, "31" in fault.remedy) == ((), False)
    assert "Ask their users" in fault.remedy


READ = tuple(LogState(PIPE, log, f"/l/{log}.log", readable=True) for log in ("control", "server"))
GROUP = f"/sys/fs/cgroup/system.slice/docker-{'0a' * 32}.scope"


def stuck(
    control: dict[str, str] | None = None,
    of_server: dict[str, str] | None = None,
    *,
    ghost: bool = False,
    logs: tuple[LogState, ...] = READ,
) -> tuple[str, list[str]]:
    """Remedy and commands for a daemon that does not answer, whose client 30 works."""
    server = ProcessFacts(952, 2.0, 1001, "ann", "nvidia-cuda-mps-server", "S", 10)
    stopped = daemon(
        state="unresponsive",
        facts=DaemonFacts(
            PIPE,
            "/l",
            process=replace(DAEMON, **(control or {})),  # type: ignore[arg-type]
            servers=(replace(server, **(of_server or {})),),  # type: ignore[arg-type]
        ),
        servers=(
            Server(
                952,
                state="ACTIVE",
                ghost=ghost,
                clients_connected=1,
                clients=() if ghost else (Client(30, 952, state="active"),),
            ),
        ),
        logs=logs,
        handover=Handover(0.5, 40, 1002),
    )
    snapshot = host(stopped)
    found = {one.advice.name: one for one in findings(snapshot)}["daemon_unresponsive"]
    return found.remedy, [one.command for one in found.actions]


SHOWN = "ps -o pid,user,stat,etime,args -p 10,952"


@pytest.mark.parametrize(
    ("seen", "words", "commands"),
    [
        ({"control": {"state": "T"}}, "Continue process 10", ["kill -CONT 10"]),
        ({"of_server": {"state": "T"}}, "Continue process 952", ["kill -CONT 952"]),
        ({"of_server": {"state": "t", "tracer": "77 (gdb)"}}, "Let process 77 (gdb) continue", []),
        ({"control": {"frozen_group": GROUP}}, "Thaw that group", ["docker unpause 0a0a0a0a0a0a"]),
        (
            {"of_server": {"frozen_group": "/sys/fs/cgroup/a b"}},
            "Thaw that group",
            ["echo 0 > '/sys/fs/cgroup/a b/cgroup.freeze'"],
        ),
        (
            {"ghost": True},
            "End server 952 (with SIGKILL",
            ["ps -o args= -p 952 | grep nvidia-cuda-mps-server && kill -9 952"],
        ),
        ({}, "The last resort is a restart of the daemon: its 1 client will be lost", [SHOWN]),
        ({"logs": ()}, "may also be draining", [SHOWN]),
    ],
)
def test_what_frees_a_daemon_ends_nothing_that_may_be_healthy(
    seen: dict[str, Any], words: str, commands: list[str]
) -> None:
    remedy, offered = stuck(**seen)
    assert words in remedy
    assert ("draining" in remedy) == ("logs" in seen)
    assert offered == commands
    assert not re.search(r"(?i)(end|kill)[^.]*\b(10|30|40)\b", remedy)


def test_only_confirmed_processes_are_in_commands() -> None:
    """A log can name any PID; it is in a command only when /proc shows that it is what it says."""
    clients = [
        Client(30, 20, state="torn_down", state_since=0.5),
        Client(31, 20, state="torn_down", state_since=0.5, confirmed=False),
        Client(1, 20, state="torn_down", state_since=0.5),
        Client(2, 20, state="torn_down", state_since=0.5),
    ]
    snapshot = host(daemon(servers=(Server(20, state="FAULT", clients=(*clients,)),)))
    found = findings(snapshot)
    copied = {action.command for one in found for action in one.actions}
    assert {command for command in copied if "kill" in command} == {"kill 30"}
    assert {one.advice.name for one in found} == {"server_in_fault", "client_stuck"}
    for pid, seen in ((1, True), (952, False)):
        ghost = Server(pid, state="ACTIVE", ghost=True, confirmed=seen)
        snapshot = host(daemon(servers=(ghost,)))
        (one,) = findings(snapshot)
        assert str(pid) not in one.remedy.replace("510", "")
        assert not one.actions
    hung = (*(replace(one, state="connecting") for one in clients),)
    snapshot = host(daemon(servers=(Server(20, state="ACTIVE", ghost=True, clients=hung),)))
    (one,) = findings(snapshot)
    shown = "run, if the daemon does not answer 5 s later:   kill 30\n"
    assert shown in "\n".join(diagnosis_lines(Diagnosis(snapshot)))
    assert [(action.condition, action.command) for action in one.actions] == [
        ("", "ps -o args= -p 20 | grep nvidia-cuda-mps-server && kill -9 20"),
        ("if the daemon does not answer 5 s later", "kill 30"),
    ]
    works = Server(20, state="ACTIVE", ghost=True, clients=(replace(hung[0], contexts={"": 1}),))
    (one,) = findings(host(daemon(servers=(works,))))
    assert (one.actions, "Wait for the end of process 30" in one.remedy) == ((), True)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/var/log/mps/control.log", "truncate -s 0 /var/log/mps/control.log"),
        ("/a/log$(touch PWNED); x #/b", "truncate -s 0 '/a/log$(touch PWNED); x #/b'"),
        ("/a/it's", "truncate -s 0 '/a/it'\"'\"'s'"),
        ("/a/\x1b[2J\n", None),
    ],
)
def test_a_path_in_a_command_is_quoted(path: str, command: str | None) -> None:
    log = LogState("/mps", "control", path, readable=True, size_bytes=2 << 30)
    larger = replace(log, log="server", path="/l/server.log", size_bytes=3 << 30)
    one, other = findings(host(daemon(logs=(log, larger))))
    assert [each.command for each in one.actions] == ([command] if command else [])
    assert [each.command for each in other.actions] == ["truncate -s 0 /l/server.log"]


def test_a_users_log_is_emptied_as_that_user() -> None:
    """Root would truncate what a link leads to."""
    facts = DaemonFacts("/mps", "/a", owner_uid=2001, configured=True)
    snapshot = host(daemon(logs=(LARGE,), facts=facts))
    (offered,) = findings(snapshot)[0].actions
    assert offered.command == "sudo -u '#2001' truncate -s 0 /l/control.log"


HURTS = re.compile(r"DIRECTORY=/|truncate -s|chmod|kill (-|\d)|rm -r|echo 0|terminate_client \d")


@pytest.mark.parametrize("name", sorted({*SYNTHETIC, *RECORDED}))
def test_no_command_for_an_ordinary_users_daemon_changes_anything(name: str) -> None:
    """Each path and each PID of such a daemon is its user's choice: the one gate stops them all."""
    if name in RECORDED:
        recording, at = RECORDED[name]
        seconds = float(at[:-2]) / 1000 if at.endswith("ms") else float(at[:-1])
        snapshot = snapshot_at(recording, seconds)
    else:
        snapshot = SYNTHETIC[name]
    limited = tuple(
        replace(one, facts=replace(one.facts, limited=True, owner_uid=2001))
        for one in snapshot.daemons
    )
    assert name in names(snapshot)
    snapshot = replace(snapshot, daemons=limited)
    for one in findings(snapshot):
        if one.daemon:
            assert one.severity != "critical"
            assert not HURTS.search(one.remedy), one.remedy
        for offered in one.actions:
            assert not HURTS.search(offered.command) or not limited or one.uuid, offered
            if one.daemon:
                assert offered.command.startswith("sudo -u '#2001' ")


def test_every_output_has_one_severity_and_a_users_daemon_is_never_critical() -> None:
    """Any user can break that user's daemon: the node is not drained for it."""
    facts = DaemonFacts(PIPE, "/l", owner_uid=2001, limited=True)
    for limited, severity, status in ((True, "warning", 0), (False, "critical", 1)):
        gone = daemon(state="absent", pid=None, facts=replace(facts, limited=limited))
        died = replace(gone, incidents=(Incident(at=0.5, kind="daemon_died"),))
        snapshot = host(died)
        page = make_status(snapshot)
        (family,) = (
            one for one in render(snapshot, Build("", "", "")) if one.spec.name == "mps_advice"
        )
        seen: set[str] = {one.severity for one in page.findings}
        assert page.headline.severity == ("info" if limited else "critical")
        assert {one.ordinary_user for one in page.findings} == {limited}
        seen |= {values[1] for values, _ in family.samples}
        seen |= {one.severity for one in page.incidents}
        seen |= {one["severity"] for one in json.loads(report(snapshot))["findings"]}
        assert seen == {severity}
        assert diagnosis_exit_status(Diagnosis(snapshot)) == 2 * status
        for name in ("critical", "daemon_absent"):
            assert status_of_check(snapshot, name)[0] == status


def test_a_daemon_is_started_as_its_last_process_was() -> None:
    process = ProcessFacts(5, 1.0, mps_environment={"CUDA_VISIBLE_DEVICES": "1;x"})
    process = replace(process, cgroup="0::/system.slice/m.service")
    last = DaemonFacts(PIPE, "/l", process=process, multiuser=True)
    gone = daemon(state="absent", pid=None, last=last)
    unit, own = (one.command for one in start_daemon(gone))
    assert unit == "systemctl start m.service"
    assert own.endswith(" CUDA_VISIBLE_DEVICES='1;x' nvidia-cuda-mps-control -d -multiuser-server")
    (one,) = start_daemon(replace(gone, last=replace(last, limited=True)))
    assert one.command.endswith("_DIRECTORY=/l nvidia-cuda-mps-control -d")


@pytest.mark.parametrize("state", ["absent", "unresponsive", "refused", None])
def test_the_verdict_on_the_node_does_not_depend_on_a_users_daemon(state: Any) -> None:
    """Neither a finding nor an unknown fact about that daemon changes anything for the node."""
    users = DaemonFacts("/tmp/alice", "/l", owner_uid=2001, limited=True)
    # It claims a fault, and to serve the GPU that a process uses without MPS.
    theirs = replace(
        daemon(state=state, facts=users),
        pipe_directory=users.pipe_directory,
        servers=(Server(pid=15, uid=2001, state="FAULT"),),
        servers_count=None,
    )
    for own in (daemon(), daemon(state="absent", pid=None)):
        card = gpu(process(9))
        card = replace(card, served_by=())
        alone = host(own, gpus=(card,))
        beside = host(own, theirs, gpus=(replace(card, served_by=(users.pipe_directory,)),))
        assert beside.daemons[1].facts.limited
        for name in CHECKS:
            assert status_of_check(beside, name) == status_of_check(alone, name)
        status = diagnosis_exit_status(Diagnosis(alone))
        assert diagnosis_exit_status(Diagnosis(beside)) == status
        pages = [make_status(one).headline for one in (alone, beside)]
        assert pages[0].text == pages[1].text
        found = [one for one in findings(beside) if one.limited]
        assert found or state is None
        lines = "\n".join(diagnosis_lines(Diagnosis(beside)))
        assert ("Daemons of ordinary users" in lines) == bool(found)


def report(snapshot: Snapshot) -> str:
    return diagnosis_as_json(Diagnosis(snapshot, recent_incidents(snapshot)))


def test_the_report_names_the_latest_recording_of_an_incident() -> None:
    seen = Diagnosis(host(), recording=Path("/var/lib/x/incident-fault.rec.gz"))
    assert "incident: /var/lib/x/incident-fault.rec.gz\n" in "\n".join(diagnosis_lines(seen))
    assert json.loads(diagnosis_as_json(seen))["recording"] == str(seen.recording)


def test_a_users_own_daemon_is_not_recommended_to_others() -> None:
    facts = DaemonFacts(PIPE, "/l", owner_uid=2001, limited=True)
    others, own = process(1), replace(process(2), uid=2001)
    snapshot = host(daemon(facts=facts), gpus=(gpu(others, own, compute_mode="default"),))
    (finding,) = findings(snapshot)
    assert ("process 2 " in finding.evidence, "process 1 " in finding.evidence) == (True, False)
    assert finding.actions == ()


CLAIMED = GpuObservation(0, "GPU-a", compute_mode="default", readings=IDLE_SMS)


@pytest.mark.parametrize(
    ("card", "node"),
    [
        # Two processes of another user take turns, and one has a directory of a daemon.
        (
            gpu(process(1, CUDA_MPS_PIPE_DIRECTORY="/tmp/alice"), process(2), served=False),
            ["daemon_missing", "mps_would_help"],
        ),
        # The same, with a daemon of root.
        (
            gpu(process(1, CUDA_MPS_PIPE_DIRECTORY="/tmp/alice"), process(2)),
            ["process_bypasses_mps", "pipe_directory_mismatch", "not_exclusive_mode"],
        ),
    ],
)
def test_no_claim_of_an_ordinary_users_daemon_changes_what_is_found_of_others(
    card: Gpu, node: list[str]
) -> None:
    facts = DaemonFacts("/tmp/alice", "/l", owner_uid=2001, limited=True)
    theirs = replace(daemon(facts=facts), pipe_directory="/tmp/alice")
    card = replace(card, observation=CLAIMED)
    claimed = replace(card, served_by=(*card.served_by, "/tmp/alice"))
    own = daemon() if card.served_by else daemon(state="absent", pid=None, incidents=(QUIT,))
    alone, beside = host(own, gpus=(card,)), host(own, theirs, gpus=(claimed,))
    about_gpu = [one for one in findings(beside) if one.uuid]
    assert about_gpu == [one for one in findings(alone) if one.uuid]
    assert [one.advice.name for one in about_gpu] == node
    for name in CHECKS:
        assert status_of_check(beside, name) == status_of_check(alone, name)


def test_the_sums_of_ordinary_users_clients_are_no_verdict_about_the_node() -> None:
    """Nor is root to set a mode that keeps out all others for a GPU that such a daemon claims."""
    facts = DaemonFacts(PIPE, "/l", owner_uid=2001, limited=True)
    card = replace(gpu(), **OVER, sm_committed_ratio=3.0)
    card = replace(card, observation=replace(card.observation, compute_mode="default"))
    snapshot = host(daemon(facts=facts), gpus=(card,))
    found = [one for one in findings(snapshot) if one.uuid]
    assert [(one.advice.name, one.limited) for one in found] == [("memory_overcommitted", True)]
    assert status_of_check(snapshot, "memory_overcommitted")[0] == HEALTHY


def test_names_from_users_cannot_control_the_terminal() -> None:
    rude = "\x1b[2Jtrain\u202e"
    running = client(command=rude, user=rude, percentage_ignored=rude)
    neighbour = gpu(replace(process(9), name=rude, user=rude))
    text = "\n".join(diagnosis_lines(Diagnosis(host(running, gpus=(neighbour,)))))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_host_with_unknown_facts_is_not_reported_healthy() -> None:
    """Without findings, too: for example, a daemon that was not queried."""
    logs = tuple(replace(LARGE, log=log, size_bytes=1) for log in ("control", "server"))
    seen = daemon(logs=logs, servers_count=0)
    assert list(diagnosis_lines(Diagnosis(host(seen))))[-1] == "Nothing is wrong here."
    unasked = host(replace(seen, state=None))
    assert list(diagnosis_lines(Diagnosis(unasked)))[-1] == (
        "Nothing wrong was seen, but whether the daemon answers is not known."
    )


GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "default", "looser"),
    [
        ({"active_thread_ratio": 1.0}, {"default_active_thread_ratio": 0.5}, "100 % of the SMs"),
        ({"active_thread_ratio": 0.5}, {"default_active_thread_ratio": 0.5}, None),
        ({"active_thread_ratio": 0.25}, {"default_active_thread_ratio": 0.5}, None),
        ({}, {"default_active_thread_ratio": 0.5}, None),
        ({"limit_source": "server"}, {}, "any amount of GPU memory, where the default is 4.0 GiB"),
        (
            {"limit_source": "server", "memory_limit_bytes": {"GPU-a": 8 * GIB}},
            {},
            "8.0 GiB of GPU memory",
        ),
        ({"limit_source": "server", "memory_limit_bytes": {"GPU-a": 4 * GIB}}, {}, None),
        ({"limit_source": "unknown"}, {}, None),
        ({"limit_source": "server", "contexts": {"GPU-b": 1}}, {}, None),
    ],
)
def test_a_limit_that_is_looser_than_the_default(
    own: dict[str, Any], default: dict[str, Any], looser: str | None
) -> None:
    default = {"default_pinned_memory_limit_bytes": {"GPU-a": 4 * GIB}, **default}
    one = replace(client(**{"contexts": {"GPU-a": 1}, **own}), **default)
    assert (looser or "") in evidence(host(one), "limit_looser_than_default")
    assert bool(evidence(host(one), "limit_looser_than_default")) == (looser is not None)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (job(0.5, 0.5), "Slurm job 7 has 2 processes, which may together use 100 % of the SMs"),
        (job(0.25, 0.25), None),
        (job(0.5), None),
        (
            replace(
                job(0.2, 0.2, memory_limit_bytes={"GPU-a": 3 * GIB}),
                default_pinned_memory_limit_bytes={"GPU-a": 4 * GIB},
            ),
            "use 6.0 GiB of GPU memory, where the default is 4.0 GiB for one",
        ),
        (replace(job(1.0, 1.0), default_active_thread_ratio=1.0), None),
    ],
)
def test_a_job_with_more_than_one_share(of: ControlDaemon, words: str | None) -> None:
    assert (words or "") in evidence(host(of), "share_exceeded")
    assert bool(evidence(host(of), "share_exceeded")) == (words is not None)


@pytest.mark.parametrize(
    ("allowed", "activity", "expected"),
    [(0.25, 0.24, True), (0.25, 0.1, False), (0.9, 0.89, False), (None, 0.2, False)],
)
def test_limits_that_leave_a_gpu_idle(
    allowed: float | None, activity: float, expected: bool
) -> None:
    one = replace(gpu(readings=(Reading("sm_activity", activity),)), sm_committed_ratio=allowed)
    assert (names(Snapshot(1.0, gpus=(one,))) == ["limit_idles_gpu"]) == expected
    beside = replace(one, direct_pids=(9,))
    assert "limit_idles_gpu" not in names(Snapshot(1.0, gpus=(beside,)))

"""What the doctor may not say or offer; its texts are in tests/golden/doctor-host.txt."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.commands.doctor_report_and_status import (
    CHECKS,
    HEALTHY,
    Diagnosis,
    diagnosis_as_json,
    diagnosis_exit_status,
    diagnosis_lines,
    status_of_check,
)
from mps_exporter.findings import ADVICE, findings, recent_incidents
from mps_exporter.findings.limits import partitioning_lines
from mps_exporter.metrics import Build, render
from mps_exporter.observations import CgroupMemory, DaemonFacts, GpuObservation, LogState
from mps_exporter.snapshot import Client, Gpu, Incident, Server, Snapshot, Wait
from mps_exporter.web.status_api import make_status
from testing import snapshots
from testing.each import each
from testing.finding_hosts import (
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
    process,
)
from testing.host_examples import hung
from testing.player import snapshot_at


def names(snapshot: Snapshot) -> list[str]:
    return [finding.advice.name for finding in findings(snapshot)]


@pytest.mark.parametrize(("name", "snapshot"), SYNTHETIC.items())
def test_a_host_has_exactly_its_finding(name: str, snapshot: Snapshot) -> None:
    assert names(snapshot) == [name]
    (finding,) = findings(snapshot)
    assert all(one.run_as.startswith(("root", "any user", "the user")) for one in finding.actions)
    want = {"critical": 2, "warning": 1, "info": 0}[finding.advice.severity]
    assert diagnosis_exit_status(Diagnosis(snapshot)) == want


def test_every_finding_has_a_host() -> None:
    of_the_page = {name for name, advice in ADVICE.items() if advice.kind in ("news", "trace")}
    of_the_page.add("web_configuration_unusable")
    hosts = SYNTHETIC.keys() | RECORDED.keys()
    assert hosts == ADVICE.keys() - of_the_page, "each has a host in testing/finding_hosts.py"


@each([*hung()])
def test_what_frees_a_daemon_ends_nothing_that_may_be_healthy(hang: tuple[str, Snapshot]) -> None:
    (found,) = (one for one in findings(hang[1]) if one.advice.name == "daemon_unresponsive")
    for text in (found.remedy, *(action.command for action in found.actions)):
        assert not re.search(r"(?i)(end|kill )[^.-]*\b(10|30|40)\b", text)


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


def test_a_wait_behind_an_unknown_user_is_behind_another_users_server() -> None:
    wait = Wait(pid=77, uid=1002, since=snapshots.NOW - 9, behind_uid=None)
    assert "waited 9 s behind another user's server" in report(
        snapshots.snapshot(snapshots.daemon(waits=(wait,)))
    )


def test_a_long_control_group_is_named_whole() -> None:
    path = "/kubepods.slice" + "/x" * 150
    its = snapshots.daemon(snapshots.server(snapshots.client(1, cgroup=path)))
    memory = {path: {snapshots.UUID: CgroupMemory(path, "", used_bytes=2)}}
    (line,) = partitioning_lines(its, replace(snapshots.snapshot(its), cgroup_memory=memory))
    assert f"of {path} on" in line


def test_the_report_names_the_latest_recording_of_an_incident() -> None:
    seen = Diagnosis(host(), recording=Path("/var/lib/x/incident-fault.rec.gz"))
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


GIB = 1 << 30

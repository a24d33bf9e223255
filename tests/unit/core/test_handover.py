"""A daemon that waits for the client that it sent to a server that has ended: from its real log."""

from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.findings import findings
from mps_exporter.findings.doctor_pid import Check, check_process, conclusion
from mps_exporter.findings.finding import Finding
from mps_exporter.merge import DaemonInputs, merge
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    LogState,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Handover, Snapshot
from testing.mps_logs import PIPE, Logs, start
from testing.snapshots import process_using

HUNG = b"""\
[2026-11-22 11:39:34.626 Control  1813] Starting new server 1813 for user 1002
[2026-11-22 11:39:34.628 Control  1763] Accepting connection...
[2026-11-22 11:39:34.789 Control  1763] NEW SERVER 1813: Ready
[2026-11-22 11:39:34.806 Control  1763] Accepting connection...
[2026-11-22 11:39:34.806 Control  1763] NEW CLIENT 1798 from user 1002: Server already exists
[2026-11-22 11:39:39.537 Control  1763] Accepting connection...
[2026-11-22 11:39:39.537 Control  1763] Unable to accept connection
[2026-11-22 11:39:39.537 Control  1763] Accepting connection...
[2026-11-22 11:39:39.537 Control  1763] Unable to accept connection
[2026-11-22 11:39:39.600 Control  1763] Accepting connection...
[2026-11-22 11:39:39.600 Control  1763] User did not send valid credentials
[2026-11-22 11:39:39.601 Control  1763] Accepting connection...
[2026-11-22 11:39:39.601 Control  1763] NEW CLIENT 1835 from user 1002: Server already exists
"""
"""Server 1813 was ended with kill -9 just before the last client came; control.log of an H200."""

FREED = b"""\
[2026-11-22 11:39:42.531 Control  1763] Accepting connection...
[2026-11-22 11:39:42.531 Control  1763] Unable to accept connection
[2026-11-22 11:39:42.531 Control  1763] Server 1813 exited with status 0
"""
"""What it wrote as soon as process 1835 had been ended."""

SENT_AT = 1795347579.601
CONTROL = ProcessFacts(1763, SENT_AT - 8.5, 0, "root", "nvidia-cuda-mps-control", "S", 1, (1763,))
SERVER = ProcessFacts(1813, SENT_AT - 5.0, 1002, None, "nvidia-cuda-mps-server", "Z", 1763)
CLIENT = ProcessFacts(1835, SENT_AT - 0.1, 1002, None, "python3", "S", 1812)
READABLE = LogState(PIPE, "control", "/l/control.log", readable=True)


def host(
    log: bytes = HUNG,
    *,
    hung: bool = True,
    client: ProcessFacts | None = CLIENT,
    server: ProcessFacts | None = SERVER,
    control: ProcessFacts = CONTROL,
    readable: bool = True,
    server_log: bytes = b"",
    owner: int | None = None,
) -> Snapshot:
    """A host whose daemon has written this, and does not answer."""
    tracker = start(Logs(log, server_log), readable=("control", "server"))
    now = SENT_AT + 2.0
    there = [one for one in (client, server, control) if one is not None]
    facts = DaemonFacts(
        PIPE,
        "/l",
        process=control,
        # The list of children is some seconds old: its server ran then.
        servers=(replace(server, state="S"),) if server is not None else (),
        lock_tested=True,
        lock_holder_pid=control.pid,
        owner_uid=owner,
        limited=owner is not None,
    )
    asked = Outcome.TIMEOUT if hung else Outcome.OK
    inputs = DaemonInputs(
        facts,
        ControlObservation(now, PIPE, "probe", asked),
        state=tracker.state,
        logs=(replace(READABLE, readable=readable),),
        hung=hung,
    )
    processes = ProcfsObservation(now, processes={one.pid: one for one in there})
    return merge(taken_at=now, gpus=None, processes=processes, daemons=[inputs])


def unresponsive(snapshot: Snapshot) -> Finding:
    (found,) = [one for one in findings(snapshot) if one.advice.name == "daemon_unresponsive"]
    return found


def asked_about(pid: int, snapshot: Snapshot, *, viewed: bool = True) -> Check:
    view = process_using(PIPE, pid, uid=1002) if viewed else None
    return conclusion(check_process(pid, snapshot, findings(snapshot), view))


def test_the_client_is_named_and_not_the_daemon() -> None:
    snapshot = host()
    (daemon,) = snapshot.daemons
    assert daemon.handover == Handover(SENT_AT, 1835, 1002, server_pid=1813)
    found = unresponsive(snapshot)
    assert "waits for process 1835, which it sent to server 1813, and that has" in found.evidence
    assert found.remedy.startswith("End process 1835, which has lost its server")
    assert [one.command for one in found.actions] == ["kill 1835"]


@pytest.mark.parametrize(("pid", "viewed"), [(1835, True), (1835, False), (1900, True)])
def test_doctor_reports_it_for_any_hanging_process(pid: int, viewed: bool) -> None:
    answer = asked_about(pid, host(), viewed=viewed)
    assert (answer.outcome, answer.command) == ("problem", "kill 1835")
    assert answer.page == "every-cuda-program-hangs-and-the-control-tool-too"


def test_an_ordinary_users_log_names_no_process_of_another_user() -> None:
    assert host(owner=1002).daemons[0].handover is not None
    forged = host(owner=1003)
    assert forged.daemons[0].handover is None
    assert "kill 1835" not in str(check_process(1835, forged, findings(forged), None))


def test_the_finding_ends_once_the_daemon_resumes() -> None:
    for snapshot in (host(HUNG + FREED), host(hung=False)):
        (daemon,) = snapshot.daemons
        assert daemon.handover is None
        assert not any("1835" in one.remedy for one in findings(snapshot))


def test_a_client_of_a_running_server_is_not_to_be_ended() -> None:
    running = host(server=replace(SERVER, state="S"))
    found = unresponsive(running)
    assert "waits for process" not in found.evidence
    assert not [one for one in found.actions if one.heals]
    assert asked_about(1835, running).command == ""
    snapshot = host(server=None)
    assert "waits for process" not in unresponsive(snapshot).evidence
    assert asked_about(1835, snapshot).command == ""


@pytest.mark.parametrize(
    "seen",
    [
        {"client": None},
        {"client": replace(CLIENT, state="Z")},
        {"client": replace(CLIENT, uid=1003)},
        {"client": replace(CLIENT, start_time_seconds=SENT_AT + 60.0)},
        {"control": replace(CONTROL, namespace_pids=(1763, 1))},
        {"readable": False},
    ],
    ids=["gone", "ended", "another user's", "younger than the line", "other PIDs", "no log"],
)
def test_another_process_is_not_to_be_ended(seen: dict[str, Any]) -> None:
    found = unresponsive(host(**seen))
    assert "1835" not in found.evidence + found.remedy


def test_init_is_never_to_be_ended() -> None:
    log = HUNG.replace(b"CLIENT 1835", b"CLIENT 1")
    assert "process 1," not in unresponsive(host(log, client=replace(CLIENT, pid=1))).remedy


TAKEN = b"""\
[2026-11-22 11:39:39.702 Server  1813] Received new client request for {PID: 1835, Context ID: 0}
[2026-11-22 11:39:39.702 Server  1813] Client {PID: 1835, Context ID: 1} connected
[2026-11-22 11:39:39.702 Server  1813] Status of client {PID: 1835, Context ID: 1} is ACTIVE
"""


def test_a_client_that_its_server_took_is_not_to_be_ended() -> None:
    """The daemon hangs for another reason, and the client may work."""
    running = replace(SERVER, state="S")
    assert host(server=running).daemons[0].handover is not None
    assert host(server=running, server_log=TAKEN).daemons[0].handover is None
    assert "1835" not in unresponsive(host(server=running, server_log=TAKEN)).remedy

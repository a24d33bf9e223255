"""doctor --before-kill: the programs that the end of a process would take down.

Its texts are in tests/golden/doctor-before-kill.txt.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from mps_exporter.commands import doctor
from mps_exporter.commands.doctor_report_and_status import status_of_ends
from mps_exporter.findings.before_kill import before_kill, neighbour_counts
from mps_exporter.flags import Settings
from mps_exporter.snapshot import Wait
from testing.fake_proc import FakeProc
from testing.process_examples import BUSY, CLIENTS, SHARED
from testing.snapshots import NOW, client, daemon, server, snapshot


def test_neighbours_share_server_and_gpu_and_still_work() -> None:
    assert neighbour_counts(BUSY, server(*CLIENTS)) == {"clients": 1, "users": 1}
    advice = before_kill(11, SHARED)
    assert advice.in_danger
    assert advice.neighbours == (12,)
    assert json.loads(status_of_ends([advice], as_json=True, many=False)[1])["neighbours"] == [12]


async def test_an_ordinary_users_daemon_says_nothing_about_processes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Her daemon stands first, names root's clients and a stranger, and its log is unreadable."""
    listed = client(11, confirmed=False), client(98, confirmed=False)
    hers = daemon(server(*listed, client(97, uid=2001), pid=99, confirmed=False))
    waits = Wait(12, 2001, NOW - 10, 1001), Wait(96, 2001, NOW - 10, 1001)
    facts = replace(hers.facts, owner_uid=2001, limited=True)
    hers = replace(hers, facts=facts, pipe_directory="/tmp/alice", waits=waits, logs=())
    host = replace(SHARED, daemons=(hers, *SHARED.daemons))
    for pid in (11, 12, 13, 634):
        assert before_kill(pid, host) == before_kill(pid, SHARED)
    for pid in (96, 97, 98, 99):
        assert not before_kill(pid, host, 1001).in_danger
    assert "of /tmp/alice" in before_kill(96, host, 2001).text[0]
    assert before_kill(97, host, 2001).in_danger
    assert "could not be read: not known" in before_kill(95, host, 2001).text[0]
    proc = FakeProc(tmp_path)
    monkeypatch.setattr(doctor, "collect_twice", AsyncMock(return_value=SHARED))
    launcher = Settings(doctor_before_kill=(94,), path_procfs=str(tmp_path))
    assert not await doctor.diagnose(launcher)
    (threads := proc.add(94) / "task" / "94").mkdir(parents=True)
    for children in ("93", "11", "11 12"):
        (threads / "children").write_text(f"{children} ")
        harmless = children == "93"
        assert await doctor.diagnose(launcher) != harmless
        capsys.readouterr()
        assert await doctor.diagnose(replace(launcher, doctor_json=True)) != harmless
        printed = json.loads(capsys.readouterr().out)
        assert (printed["pid"], printed["in_danger"]) == (94, not harmless)
        named = [str(one["pid"]) for one in printed["children"]]
        assert named == ([] if harmless else children.split())
    monkeypatch.setattr(doctor, "collect_twice", AsyncMock(return_value=host))
    for uid, status in ((1001, 0), (2001, 1)):
        proc.add(95, uid=uid)
        settings = Settings(doctor_before_kill=(13, 95), path_procfs=str(tmp_path))
        assert await doctor.diagnose(settings) == status
        capsys.readouterr()
        await doctor.diagnose(replace(settings, doctor_json=True))
        assert len(json.loads(capsys.readouterr().out)) == 2 - status


def test_no_command_for_a_process_that_is_not_confirmed_or_has_another_number() -> None:
    for one in (client(11, confirmed=False), client(1)):
        host = snapshot(daemon(server(one, client(12))))
        advice = before_kill(one.pid, host)
        assert advice.in_danger
        assert not advice.actions


def test_no_text_of_a_stranger_is_part_of_a_command() -> None:
    words = "$(id)';\n\x1b[31m"
    listed = client(11, command=words, user=words), client(12, uid=1002, command=words)
    host = snapshot(replace(daemon(server(*listed)), pipe_directory="/tmp/a b$(id)"))
    tool = "CUDA_MPS_PIPE_DIRECTORY='/tmp/a b$(id)' timeout 5 nvidia-cuda-mps-control"
    advice = before_kill(11, host)
    expected = [f"echo terminate_client 634 11 | {tool}", "kill 11"]
    assert [one.command for one in advice.actions] == expected
    assert "\x1b" not in status_of_ends([advice], as_json=False, many=False)[1]
    unprintable = replace(host, daemons=(replace(host.daemons[0], pipe_directory=words),))
    assert not before_kill(11, unprintable).actions

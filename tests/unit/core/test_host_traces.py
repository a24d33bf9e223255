"""What the doctor finds on a host: leftovers, on a made-up /proc and root, and used ports."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.cli import main
from mps_exporter.commands.doctor import port_lines
from mps_exporter.commands.doctor_report_and_status import Diagnosis, diagnosis_exit_status
from mps_exporter.observations import DaemonFacts, Leftovers, MpsDirectory, OpenFiles, ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Snapshot
from mps_exporter.sources import process_view
from mps_exporter.sources.process_view import find_directories, find_leftovers
from testing.fake_host import held_lock

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"


def process(
    procfs: Path, pid: int, program: str, *, parent: int = 1, state: str = "S", opens: str = ""
) -> None:
    base = procfs / str(pid)
    (base / "fd").mkdir(parents=True)
    (base / "comm").write_text(f"{program[:15]}\n")
    (base / "stat").write_text(f"{pid} ({program[:15]}) {state} {parent} " + "1 " * 20)
    (base / "status").write_text("Uid:\t1001\t1001\t1001\t1001\n")
    (base / "cmdline").write_text("" if state == "Z" else f"/usr/bin/{program}\0-d\0")
    if opens:
        (base / "fd" / "7").symlink_to(opens)


def test_zombies_orphans_and_who_holds_the_driver(tmp_path: Path) -> None:
    process(tmp_path, 10, CONTROL, opens="/dev/nvidiactl")
    process(tmp_path, 11, SERVER, parent=10, opens="/dev/nvidia0")
    process(tmp_path, 12, SERVER, parent=10, state="Z")
    process(tmp_path, 13, SERVER, parent=1)
    process(tmp_path, 14, "train", opens="/dev/null")
    process(tmp_path, 15, "mps-exporter", opens="/dev/nvidiactl")
    (tmp_path / "self").symlink_to("15")
    (tmp_path / "20").mkdir()  # gone by now
    found = find_leftovers((), str(tmp_path))
    assert [one.pid for one in found.zombies] == [12]
    assert [(one.pid, one.uid) for one in found.orphans] == [(13, 1001)]
    assert [(one.pid, one.name) for one in found.holders] == [(10, CONTROL), (11, SERVER)]
    (tmp_path / "self").unlink()  # another PID namespace's procfs
    assert len(find_leftovers((), str(tmp_path)).holders) == 3


def test_how_many_files_a_server_has_open(tmp_path: Path) -> None:
    process(tmp_path, 11, SERVER, opens="/dev/nvidia0")
    (tmp_path / "11" / "limits").write_text("Max open files            72          4096    files\n")
    servers = (ProcessFacts(11, 1.0), ProcessFacts(12, 1.0))
    daemon = DaemonFacts("/mps", "/l", process=ProcessFacts(10, 1.0), servers=servers)
    assert process_view.open_files([daemon], str(tmp_path)) == (OpenFiles(11, "/mps", 72, 1),)
    (tmp_path / "11" / "fd" / "7").unlink()
    (tmp_path / "11" / "fd").rmdir()  # not readable
    assert process_view.open_files([daemon], str(tmp_path)) == (OpenFiles(11, "/mps", 72),)


UNIT = "[Service]\nEnvironment=CUDA_MPS_PIPE_DIRECTORY={0}\nExecStart=/usr/bin/{1} -d\n"


def test_directories_that_are_left_or_promised(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "nvidia-mps").mkdir(parents=True)
    (tmp_path / "tmp" / "nvidia-mps" / "nvidia-cuda-mps-control.pid").write_text("7\n")
    (tmp_path / "tmp" / "nvidia-mps" / "control_lock").touch()
    plugin = tmp_path / "run" / "nvidia" / "mps" / "nvidia.com" / "gpu" / "pipe"
    claim = tmp_path / "var/lib/kubelet/plugins/gpu.nvidia.com/mps/7f-1/pipe"
    units = tmp_path / "etc" / "systemd" / "system" / "multi-user.target.wants"
    for folder in (plugin, claim, units):
        folder.mkdir(parents=True)
    (units / "mps.service").write_text(UNIT.format("/srv/mps", CONTROL))
    (units / "other.service").write_text("[Service]\nExecStart=/usr/bin/other\n")
    uid = os.geteuid()
    left = MpsDirectory("/tmp/nvidia-mps", uid)
    of_plugin = MpsDirectory(
        "/run/nvidia/mps/nvidia.com/gpu/pipe", uid, "NVIDIA's device plugin for Kubernetes"
    )
    of_claim = MpsDirectory(
        "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/7f-1/pipe",
        uid,
        "NVIDIA's DRA driver for Kubernetes",
    )
    of_unit = MpsDirectory("/srv/mps", uid, "the enabled unit mps.service")
    found = find_directories((), str(tmp_path))
    assert found == (left, of_plugin, of_claim, of_unit)
    running = [
        DaemonFacts("/srv/mps", "", process=ProcessFacts(9, 0.0)),
        DaemonFacts(str(plugin), "", process=ProcessFacts(10, 0.0)),  # by another name
        DaemonFacts("/tmp/nvidia-mps", ""),  # configured, and not running
        # In a mount namespace of an ordinary user.
        DaemonFacts(of_claim.path, "", "/none", process=ProcessFacts(11, 0.0), limited=True),
    ]
    found = find_directories(running, str(tmp_path))
    assert found == (left, of_claim)
    # A daemon that is not visible from here, in another PID namespace, holds its lock all the same.
    with held_lock(tmp_path / "tmp" / "nvidia-mps"):
        found = find_directories((), str(tmp_path))
    assert left not in found


@pytest.mark.parametrize(
    ("left", "status"),
    [
        (ProcessFacts(13, 0.0, uid=0), 1),
        (ProcessFacts(13, 0.0, uid=2001), 0),
        (ProcessFacts(13, 0.0, uid=None), 0),
        (ProcessFacts(13, 0.0, uid=0, namespace_pids=(13, 2)), 0),  # of a container's root
        (ProcessFacts(13, 0.0, uid=2001, parent_pid=10), 1),  # root's daemon did not reap it
        (ProcessFacts(13, 0.0, uid=2001, parent_pid=50), 0),
        (ProcessFacts(13, 0.0, uid=1001), 1),  # of the exporter's user, who runs a daemon
    ],
)
@pytest.mark.parametrize("kind", ["zombies", "orphans"])
def test_what_an_ordinary_user_left_is_no_verdict_about_the_node(
    kind: str, left: ProcessFacts, status: int
) -> None:
    """Any user can give a process the name of an MPS server, and not reap it."""
    daemons = [
        ControlDaemon(f"/{pid}", "/l", "answering", facts=facts, pid=pid)
        for pid, uid in ((10, 0), (11, 1001), (50, 2001))
        for process in [ProcessFacts(pid, 0.0, uid)]
        for facts in [DaemonFacts(f"/{pid}", "/l", process=process, limited=uid == 2001)]
    ]
    one: Any = {kind: (left,)}
    traces = Leftovers(**one)
    seen = Diagnosis(Snapshot(1.0, daemons=tuple(daemons)), traces=traces)
    found = [each for each in seen.found if each.advice.kind == "trace"]
    assert [each.limited for each in found] == [status == 0]
    assert diagnosis_exit_status(seen) == status
    both: Any = {kind: (left, ProcessFacts(14, 0.0, uid=0))}
    assert diagnosis_exit_status(Diagnosis(seen.snapshot, traces=Leftovers(**both))) == 1


def test_a_path_that_is_too_long_is_why_no_daemon_runs_there() -> None:
    set_up = "NVIDIA's device plugin for Kubernetes"
    fits, long = "/p" * 43 + "x", "/q" * 44
    traces = Leftovers(directories=(MpsDirectory(fits, 0, set_up), MpsDirectory(long, 0, set_up)))
    found = Diagnosis(Snapshot(1.0), traces=traces).found
    short, other = (each for each in found if each.advice.kind == "trace")
    assert "No daemon can run there" not in short.evidence
    assert "kubectl" in short.remedy
    assert f"{long} (" in other.evidence
    assert fits not in other.evidence
    assert "has 88 bytes, of at most 87." in other.evidence
    assert other.remedy.startswith("Set a shorter CUDA_MPS_PIPE_DIRECTORY")


def test_the_doctor_looks_around_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    left = (MpsDirectory("/srv/mps", 0, "the enabled unit mps.service"),)
    monkeypatch.setattr(process_view, "find_directories", lambda *_: left)
    (tmp_path / "stat").write_text("btime 1795248000\n")
    assert main(["doctor", "--json", f"--path.procfs={tmp_path}"]) == 1
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert "daemon_promised" in names


@pytest.mark.parametrize(
    ("page", "owner"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n# HELP DCGM_FI_DEV_SM_CLOCK MHz\n", "dcgm-exporter"),
        (b"HTTP/1.0 200 OK\r\n\r\n# HELP mps_exporter_build_info x\n", "mps-exporter"),
        (b"SSH-2.0-x\r\n", "not known"),
    ],
)
def test_the_owner_of_a_port_is_known_by_its_metrics(page: bytes, owner: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reply() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(page)

        threading.Thread(target=reply).start()
        assert port_lines([port]) == ["", f"Ports: {port} {owner}"]
    assert port_lines([port]) == [], "free ports are left out"

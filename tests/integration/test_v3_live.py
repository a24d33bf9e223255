"""A made-up MPS v3 host through the live sources: /proc, the tool as a process, files of logs."""

from dataclasses import replace
from pathlib import Path

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.sources.live_host import LiveHost
from testing import fake_mps_v3 as published
from testing.fake_host import install_tool, set_daemon
from testing.fake_proc import FakeProc
from testing.player import Metrics
from testing.v3_host import DAEMON, EVAL, LARGE, SERVER, TRAIN
from testing.waiting import PATIENCE_SECONDS

CONTROL = "/usr/bin/nvidia-cuda-mps-control"
LINE = "[2026-11-21 08:00:00.000 {} {}] {}\n"


async def test_everything_of_a_v3_host_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "DEFAULT_PIPE_DIRECTORIES", ())
    pipe, logs, groups = tmp_path / "pipe", tmp_path / "logs", tmp_path / "groups"
    set_daemon(pipe, v3=published.MANUAL)
    (logs / "training").mkdir(parents=True)
    (logs / "control.log").write_text(LINE.format("Control", DAEMON, "Adding server 'training'"))
    (logs / "training" / "server.log").write_text(LINE.format("Other", SERVER, "Startup"))
    group = groups / "user.slice"
    group.mkdir(parents=True)
    (groups / "dmem.capacity").write_text("nvidia/00000000:02:00.0/vidmem 102641958912\n")
    (group / "dmem.max").write_text("nvidia/00000000:02:00.0/vidmem 8589934592\n")
    proc = FakeProc(tmp_path / "proc")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    proc.add(DAEMON, argv=[CONTROL, "-d", "-p", "3"], environ=variables)
    proc.add(SERVER, argv=["nvidia-cuda-mps-server"], parent=DAEMON)
    for pid, own in (
        (TRAIN, {"CUDA_MPS_SM_PARTITION": LARGE}),
        (EVAL, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}),
    ):
        proc.add(pid, argv=["python"], environ=own, cgroup="0::/user.slice\n")
    settings = replace(
        Settings(),
        collector_nvml=False,
        path_procfs=str(proc.root),
        path_cgroupfs=str(groups),
        mps_control_binary=str(install_tool(tmp_path)),
    )
    host = LiveHost(settings)
    try:
        snapshot = await Collector(host, settings).collect()
        processes = await host.identify([TRAIN, EVAL], PATIENCE_SECONDS)
    finally:
        await host.close()
    metrics = Metrics(snapshot)
    assert [one for one in snapshot.collectors if not one.success] == []
    assert metrics.value("mps_control_up") == 1
    assert metrics.value("mps_server_clients", server=SERVER) == 2
    assert metrics.value("mps_client_active_thread_ratio", pid=EVAL) == 0.1
    assert metrics.value("mps_sm_partition_clients", partition="large") == 1
    assert metrics.value("mps_control_log_readable", log="server") == 1
    assert metrics.value("mps_control_log_lines_total", log="server") is not None
    assert metrics.value("mps_control_queries_total") == 7
    (memory,) = processes.cgroup_memory
    assert (memory.path, memory.hard_limit_bytes) == ("/user.slice", 8 << 30)

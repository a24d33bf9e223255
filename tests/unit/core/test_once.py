"""Short runs: the checks, and the file for node_exporter."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from mps_exporter.cli import main
from mps_exporter.commands.doctor import write_atomically
from mps_exporter.commands.doctor_report_and_status import (
    CHECKS,
    HEALTHY,
    UNHEALTHY,
    UNKNOWN,
    status_of_check,
)
from mps_exporter.findings import ADVICE
from mps_exporter.snapshot import Snapshot
from testing.player import RECORDINGS, snapshot_at

ROOT = Path(__file__).parents[3]
SAMPLE = re.compile(r"^(\w+)(\{.*\})? \S+$")


def blind(snapshot: Snapshot, source: str) -> Snapshot:
    """Return the snapshot with a source that could not be read."""
    return replace(
        snapshot,
        collectors=tuple(
            replace(one, success=False, error="no answer") if one.name == source else one
            for one in snapshot.collectors
        ),
    )


# ------------------------------------------------------------------------------ the checks


def test_a_check_reports_whether_a_finding_is_present() -> None:
    ghost = snapshot_at("wedge-times", 8)
    status, line = status_of_check(ghost, "ghost_server")
    assert status == UNHEALTHY
    assert line.startswith("ghost_server: User 1002's server 6811")
    assert status_of_check(ghost, "critical")[0] == UNHEALTHY
    quiet = snapshot_at("quiet", 30)
    assert status_of_check(quiet, "ghost_server") == (HEALTHY, "ghost_server: no")
    assert status_of_check(quiet, "critical") == (HEALTHY, "critical: no")


@pytest.mark.parametrize("source", ["nvml", "control", "logs", "process"])
def test_an_unreadable_source_neither_sets_nor_clears_a_check(source: str) -> None:
    healthy = blind(snapshot_at("quiet", 30), source)
    assert status_of_check(healthy, "ghost_server")[0] == UNKNOWN
    assert status_of_check(healthy, "critical")[0] == UNKNOWN
    troubled = blind(snapshot_at("wedge-times", 8), source)
    assert status_of_check(troubled, "ghost_server")[0] == UNHEALTHY


def test_a_check_of_gpus_needs_the_driver_only() -> None:
    healthy = snapshot_at("quiet", 30)
    assert status_of_check(blind(healthy, "logs"), "gpu_lost")[0] == HEALTHY
    assert status_of_check(blind(healthy, "nvml"), "gpu_lost")[0] == UNKNOWN
    assert status_of_check(blind(healthy, "control"), "unfit_gpu")[0] == UNKNOWN


def test_unreadable_logs_are_unknown() -> None:
    healthy = snapshot_at("quiet", 30)
    (daemon,) = healthy.daemons
    logs = tuple(replace(log, readable=False) for log in daemon.logs)
    snapshot = replace(healthy, daemons=(replace(daemon, logs=logs),))
    assert status_of_check(snapshot, "ghost_server")[0] == UNKNOWN


def test_a_check_is_one_short_line() -> None:
    for snapshot in (snapshot_at("wedge-times", 8), snapshot_at("doctor", 20)):
        daemon = replace(snapshot.daemons[0], pipe_directory=f"/tmp/{'x' * 200}\n")
        hostile = replace(snapshot, daemons=(daemon, *snapshot.daemons[1:]))
        for one, name in product((hostile, blind(hostile, "logs")), CHECKS):
            _, line = status_of_check(one, name)
            assert len(line) <= 120, name
            assert line.isprintable(), name


def test_checks_on_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    at_the_ghost = [f"--recording={RECORDINGS / 'wedge-times.rec.gz'}", "--at=8s"]
    assert main(["doctor", "--check", "ghost_server", *at_the_ghost]) == 1
    assert len(capfd.readouterr().out.splitlines()) == 1
    assert main(["doctor", "--check", "gpu_lost", *at_the_ghost]) == 0
    assert main(["doctor", "--check", "gpu_lots"]) == 3
    assert "no finding 'gpu_lots'" in capfd.readouterr().err
    assert main(["doctor", "--check", "MpsGhostServer", *at_the_ghost]) == 1
    assert "ghost_server" in capfd.readouterr().out
    assert main(["doctor", "--check", "gpu_lost", "--json"]) == 3
    assert main(["doctor", "--check", "gpu_lost", "--pid=1"]) == 3


def test_node_problem_detector_is_configured_with_checks_that_exist() -> None:
    path = ROOT / "deploy" / "node-problem-detector" / "mps-exporter.json"
    document = json.loads(path.read_text())
    conditions = {one["type"] for one in document["conditions"]}
    assert {rule["condition"] for rule in document["rules"]} == conditions
    for rule in document["rules"]:
        command, flag, name, timeout = rule["args"]
        assert (command, flag) == ("doctor", "--check")
        assert ADVICE[name].severity == "critical"
        # The check must say "not known" before it is killed for taking too long.
        assert timeout == "--collector.timeout=8s"
        assert rule["timeout"] == "12s"
    checked = {rule["args"][2] for rule in document["rules"]}
    critical = {name for name, advice in ADVICE.items() if advice.severity == "critical"}
    assert checked == critical.intersection(CHECKS)
    assert document["pluginConfig"]["max_output_length"] >= 120


# ------------------------------------------------------------------------------- the file


def test_the_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "mps.prom"
    write_atomically(path, b"old\n")
    with path.open() as reader:
        write_atomically(path, b"new\n")
        assert reader.read() == "old\n"
    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["mps.prom"]


def test_the_metrics_of_a_single_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mps.prom"
    host = ["--no-collector.nvml", f"--path.procfs={tmp_path}", f"--mps.pipe-directory={tmp_path}"]
    assert main([f"--textfile={path}", *host]) == 0
    assert main(["--once", *host]) == 0
    printed = capfd.readouterr().out
    written = path.read_text()
    assert "mps_scrape_collector_success" in written
    assert "process_cpu" not in written
    assert not re.search(r"^# TYPE \w+ (counter|histogram)", written, re.MULTILINE)
    samples = [line for line in written.splitlines() if not line.startswith("#")]
    assert samples
    assert all(SAMPLE.match(line) for line in samples)  # without time stamps
    assert {line.split("{")[0].split()[0] for line in samples} == {
        line.split("{")[0].split()[0] for line in printed.splitlines() if line[0] != "#"
    }


def test_a_failed_write_is_reported_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mps.prom").mkdir()
    flags = ["--no-collector.nvml", "--no-mps.discovery", f"--mps.pipe-directory={tmp_path}/mps"]
    for name in ("mps.prom", "nowhere/mps.prom"):
        assert main([f"--textfile={tmp_path}/{name}", *flags]) == 1
        assert "cannot write" in capfd.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["mps.prom"]

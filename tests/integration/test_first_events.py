"""increase() of a counter, as anybody writes it, sees the first event of each cause.

Recordings of real hosts are played; what Prometheus gets is the exporter's own page at successive
moments. A counter that begins at 0 is not extrapolated, so the results are exact.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from mps_exporter.metrics import Build, SparseSeries, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, Encoder
from testing.player import RECORDINGS, Player
from testing.prometheus_programs import program

LOSSES = 'mps_client_losses_total{cause="%s"}'
REJECTIONS = 'mps_client_rejections_total{cause="%s"}'
EXITS = 'mps_server_exits_total{cause="%s"}'
EVENTS: dict[tuple[str, float], dict[str, int]] = {
    ("tour", 5): {
        LOSSES % "unattributed_fault": 4,
        LOSSES % "server_crashed": 3,
        EXITS % "crashed": 1,
        "mps_server_faults_total": 1,
        "mps_uid_wait_seconds_count": 1,
    },
    ("ending-jobs", 2): {LOSSES % "unfinished_work": 3, "mps_client_unfinished_exits_total": 1},
    ("overrun", 0.5): {LOSSES % "own_fault": 1, LOSSES % "neighbour_fault": 1},
    ("terminate-client", 0.5): {LOSSES % "terminated": 1},
    ("daemon-killed", 0.5): {LOSSES % "daemon_died": 1, EXITS % "daemon_died": 1},
    ("context-limit", 0.5): {REJECTIONS % "context_limit": 4},
    ("fault-held", 0.5): {REJECTIONS % "server_not_ready": 1},
    ("wait-abandoned-sigkill", 0.5): {EXITS % "ghost_ended": 1, "mps_uid_waits_abandoned_total": 1},
}
"""Recording, seconds between two of its pages -> counter -> events in the recording."""


async def pages(recording: str, step: float) -> list[dict[str, str]]:
    """Series -> value, from page to page."""
    player = Player(RECORDINGS / f"{recording}.rec.gz")
    began, shown, encoder = player.recording.header.started_at, SparseSeries(), Encoder()
    found = []
    for number in range(int(player.recording.duration_seconds / step) + 1):
        snapshot = (await player.to(began + number * step)).snapshot
        families = shown.shown(render(snapshot, Build("test", "", "")))
        text = encoder.encode(families, (), TEXT_0_0_4).decode()
        found.append(dict(re.findall(r"^(mps_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)))
    return found


@pytest.mark.parametrize(("recording", "step"), EVENTS, ids=str)
async def test_an_increase_is_the_number_of_events(
    recording: str, step: float, tmp_path: Path
) -> None:
    events = EVENTS[recording, step]
    names = {counter.partition("{")[0] for counter in events}
    played = await pages(recording, step)
    series: defaultdict[str, list[str]] = defaultdict(lambda: ["_"] * len(played))
    for number, page in enumerate(played):
        for name, value in page.items():
            if name.partition("{")[0] in names:
                series[name][number] = value
    test: dict[str, Any] = {
        "interval": f"{step * 1000:g}ms",
        "input_series": [{"series": name, "values": " ".join(series[name])} for name in series],
        "promql_expr_test": [
            {
                "expr": f"sum(increase({counter}[5m]))",
                "eval_time": f"{(len(played) - 1) * step * 1000:g}ms",
                "exp_samples": [{"labels": "{}", "value": count}],
            }
            for counter, count in events.items()
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": test["interval"], "tests": [test]}))
    subprocess.run((program("promtool"), "test", "rules", file), check=True)

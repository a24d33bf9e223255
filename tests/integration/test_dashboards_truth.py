"""What the boards state of a moment is what the status API states of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mps_exporter.web.policy import WebOptions
from mps_exporter.web.status_api import make_status, to_json
from testing.dashboards import targets
from testing.player import RECORDINGS, Metrics, Player
from testing.prometheus_server import SCRAPE_SECONDS, Scraped, Window, backfilled, scrapes_of

NAMES = [
    "quiet",
    "tour",
    "three-users",
    "wait-served",
    "starved",
    "stopped",
    "fault-held",
    "fault",
    "limits",
    "context-limit",
    "server-killed",
    "daemon-killed",
    "crash-loop",
    "draining",
    "multi-user",
    "two-gpus-one-daemon",
    "training-10-direct",
]
MOMENTS = 4
STATES = {"unresponsive": 16, "absent": 14, "refused": 8, "draining": 4, "answering": 1}
NOBODY = {"No wait is known."}
"""What a table shows instead of a user."""
Stage = tuple[Scraped, float]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    began = float(round(time.time()) - 3600)
    hosts = [asyncio.run(scrapes_of(name, began)) for name in NAMES]
    with backfilled(tmp_path_factory.mktemp("truth"), hosts) as server:
        yield server, began


def _worst(status: dict[str, Any], *, lost: bool) -> int:
    """The worst state of a host, without alerts, as HOST_STATES in grafana/style.py number it."""
    found = [0, 9 * lost]
    for daemon in status["daemons"]:
        servers, waits = daemon["servers"], daemon["waits"]
        found += [
            STATES[daemon["state"]],
            15 * any(server["ghost"] for server in servers),
            12 * any(server["state"] == "FAULT" for server in servers),
            11 * any(wait["dead"] for wait in waits),
            7 * bool(waits),
        ]
    return max(found)


def _truths(metrics: Metrics) -> dict[tuple[str, str], Any]:
    """(board, panel) -> the users, or the number, that the API names."""
    status = json.loads(to_json(make_status(metrics.snapshot, WebOptions())))
    servers = [server for daemon in status["daemons"] for server in daemon["servers"]]
    waits = [wait for daemon in status["daemons"] for wait in daemon["waits"]]
    waiters = {str(wait["uid"]) for wait in waits}
    lost = metrics.value("mps_client_losses_total") or 0
    worst = _worst(status, lost=lost > 0)
    return {
        ("mps-sharing", "Holder"): {str(one["uid"]) for each in servers for one in each["clients"]},
        ("mps-sharing", "Waiters"): waiters,
        ("mps-fleet", "Users waiting now"): waiters,
        ("mps-fleet", "Waiting"): sum(not wait["dead"] for wait in waits),
        ("mps-fleet", "Bad daemons"): sum(one["state"] != "answering" for one in status["daemons"]),
        ("mps-fleet", "Clients lost"): lost,
        ("mps-incidents", "Clients lost"): lost,
        ("mps-incidents", "Crashes"): metrics.value("mps_server_exits_total", cause="crashed") or 0,
        ("mps-host", "State"): worst,
        ("mps-fleet", "Hosts, worst first"): worst,
    }


@pytest.mark.parametrize("name", NAMES)
async def test_boards_state_what_the_api_states(stage: Stage, name: str) -> None:
    prometheus, began = stage
    player = Player(RECORDINGS / f"{name}.rec.gz")
    scrapes = int(player.recording.duration_seconds / SCRAPE_SECONDS - 0.01)
    # With the intervals of the scrapes, because they decide when an exit is seen.
    played = [
        _truths(await player.to(player.recording.header.started_at + step * SCRAPE_SECONDS))
        for step in range(scrapes + 1)
    ]
    wrong = []
    for number in range(1, MOMENTS + 1):
        step = scrapes * number // MOMENTS
        at = step * SCRAPE_SECONDS
        # Nothing marks the end of a series here: it is shown for two more scrapes.
        earlier, truths = played[step - 2], played[step]
        for (board, panel), truth in truths.items():
            target = next(
                one
                for one in targets()
                if (one.dashboard, one.panel, one.ref) == (board, panel, "A")
            )
            found = prometheus.at_end(target, Window(began - 1, began + at), instance=name)
            if isinstance(truth, set):
                users = {labels["uid"] for labels, _ in found if "uid" in labels} - NOBODY
                is_right = truth <= users <= truth | earlier[board, panel]
            else:
                is_right = sum(value for _, (value,) in found) == truth
            if not is_right:
                wrong.append(f"{board} / {panel} at {at:g} s: {found}, not {truth}")
    assert wrong == []

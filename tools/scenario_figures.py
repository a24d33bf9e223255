"""Writes the figures of docs/scenarios.md from the recordings.

Run it as ``python -m tools.scenario_figures``.

Each table of that page stands between two marks, ``<!-- figures: NAME -->`` and ``<!-- end -->``,
and is made by the function of that name. With --check nothing is written, and the exit status is 1
when a table is not what the recordings say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mps_exporter import humanize
from mps_exporter.user_names import UserNames
from testing.player import RECORDINGS, Metrics, Player

PAGE = Path(__file__).parents[1] / "docs" / "scenarios.md"
MARK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
STEP_SECONDS = 0.5

Rows = Iterable[Sequence[str]]
FIGURES: dict[str, Callable[[], Awaitable[str]]] = {}


def figures(function: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[str]]:
    """Put a table on the list under its function's name."""
    FIGURES[function.__name__.replace("_", "-")] = function
    return function


def table(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def facts(name: str) -> dict[str, Any]:
    """What the laboratory noted beside the recording."""
    found: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text("utf-8"))["facts"]
    return found


async def end_of(name: str) -> tuple[Player, Metrics]:
    """A recording played to its end."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    return player, await player.to_end()


def seconds(value: float | None) -> str:
    """A duration, or that it is not known."""
    return "not known" if value is None else f"{value:.1f} s"


def uid_of(labels: dict[str, str]) -> str:
    """A user, as the page calls one."""
    return humanize.user_name(int(labels["uid"]), None)


async def timeline(*names: str) -> str:
    """What the page lists under "What happened", with the moment."""
    parts = []
    for name in names:
        player, metrics = await end_of(name)
        (daemon,) = metrics.snapshot.daemons
        who = UserNames(metrics.snapshot)
        began = player.recording.header.started_at
        parts.append(
            table(
                (f"second of `{name}`", "what the exporter reports"),
                (
                    (f"{one.at - began:.2f}", humanize.describe_incident(one, who))
                    for one in sorted(daemon.incidents, key=lambda one: one.at)
                ),
            )
        )
    return "\n".join(parts)


@figures
async def demo() -> str:
    """What the demo goes through."""
    return await timeline("tour")


# ------------------------------------------------------------------------- sharing one GPU


async def _highest(name: str) -> dict[str, float]:
    """The highest reading of each, over a recording."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    moment = player.recording.header.started_at
    highest: dict[str, float] = {}
    while moment < player.recording.ended_at:
        moment += STEP_SECONDS
        metrics = await player.to(moment)
        for metric in ("utilization_ratio", "sm_active_ratio", "power_watts"):
            value = metrics.value(f"mps_gpu_{metric}")
            if value is not None:
                highest[metric] = max(value, highest.get(metric, 0.0))
    return highest


@figures
async def training() -> str:
    """Trainings at once, with and without MPS."""
    rows = []
    for count in (1, 5, 10):
        for kind, mps in (("direct", "without"), ("mps", "with")):
            name = f"training-{count}-{kind}"
            slowest = facts(name)["slowest_seconds"]
            high = await _highest(name)
            rows.append(
                (
                    str(count),
                    mps,
                    seconds(slowest),
                    f"{60 * count / slowest:.0f}",
                    humanize.percent(high["utilization_ratio"]),
                    humanize.percent(high["sm_active_ratio"]),
                    f"{high['power_watts']:.0f} W",
                )
            )
    return table(
        (
            "trainings at once",
            "MPS",
            "the slowest took",
            "trainings a minute",
            "highest utilization",
            "highest SM activity",
            "highest power",
        ),
        rows,
    )


@figures
async def streams() -> str:
    """One process with many streams against many processes."""
    return table(
        ("on the GPU", "kernels a second", "share of the time busy", "SM activity"),
        (
            (
                name,
                f"{one['kernels_per_second']:.0f}",
                humanize.percent(one["busy_share"]),
                humanize.percent(one["sm_active_share"]),
            )
            for name, one in facts("streams").items()
        ),
    )


@figures
async def percentages() -> str:
    """A small job beside a big one."""
    return table(
        (
            "the small job",
            "its SMs",
            "its kernels a second",
            "the big job's kernels a second",
            "SM activity",
        ),
        (
            (
                name,
                f"{one['small_sm_limit']:.0f}",
                f"{one['small_kernels_per_second']:.0f}",
                f"{one['big_kernels_per_second']:.0f}" if one["big_kernels_per_second"] else "-",
                humanize.percent(one["sm_active_share"]),
            )
            for name, one in facts("percentages").items()
        ),
    )


@figures
async def data_parallel() -> str:
    """Training over two GPUs, with others; the recorded names say "beside"."""
    return table(
        ("training over two GPUs", "took"),
        (
            (name.replace("beside", "next to"), f"{one['seconds']:.2f} s")
            for name, one in facts("data-parallel").items()
        ),
    )


@figures
async def containers() -> str:
    """Clients in namespaces of their own."""
    rows = []
    for name, one in facts("containers").items():
        (said,) = one["said"]
        error = f"fails with `{said['name']}`" if said["event"] == "error" else "computes"
        direct = f"{one['direct_processes']:.0f}"
        rows.append(
            (
                name,
                error,
                f"{one['clients']:.0f}",
                direct,
                ", ".join(f"`{found}`" for found in one["findings"]),
            )
        )
    return table(
        (
            "namespaces of the container",
            "the process",
            "clients seen",
            "processes without MPS",
            "findings on the spot",
        ),
        rows,
    )


@figures
async def daemons() -> str:
    """Three daemons at once, one of them in a container."""
    player = Player(RECORDINGS / "three-daemons.rec.gz")
    moment = player.recording.header.started_at + 10.0
    metrics = await player.to(moment)
    rows = []
    for daemon in metrics.snapshot.daemons:
        inside = metrics.value(
            "mps_advice", advice="daemon_outside_host_pid_namespace", daemon=daemon.pipe_directory
        )
        for server in daemon.servers:
            for client in server.clients:
                gpus = metrics.all("mps_client_contexts", pid=client.pid)
                rows.append(
                    (
                        f"`{daemon.pipe_directory}`",
                        "separate" if inside else "the host's",
                        str(server.pid),
                        f"{client.pid} of user {server.uid}",
                        ", ".join(sorted(labels["gpu"] for labels, _ in gpus)),
                    )
                )
    return table(("daemon", "PID namespace", "server", "client", "GPU"), rows)


@figures
async def limits() -> str:
    """What each client may use."""
    player = Player(RECORDINGS / "limits.rec.gz")
    metrics = await player.to(player.recording.header.started_at + 8)
    clients = [
        client
        for daemon in metrics.snapshot.daemons
        for server in daemon.servers
        for client in server.clients
    ]
    rows = []
    for client in sorted(clients, key=lambda one: one.pid):
        limit = next(iter(client.memory_limit_bytes.values()), None)
        ratio = client.active_thread_ratio
        rows.append(
            (
                str(client.pid),
                "not known" if ratio is None else humanize.percent(ratio),
                ", ".join(str(sms) for sms in client.sm_limit.values()),
                "none" if limit is None else humanize.memory(limit),
                ", ".join(humanize.memory(used) for used in client.memory_used_bytes.values()),
            )
        )
    return table(
        ("client", "active threads", "SMs it may use", "memory limit", "memory it uses"), rows
    )


# ------------------------------------------------------------------------------- waiting


@figures
async def waits() -> str:
    """Who waited, and for how long."""
    rows = []
    for name in ("wait-served", "three-users", "starved"):
        _, metrics = await end_of(name)
        (daemon,) = metrics.snapshot.daemons
        rows += [
            (f"`{name}`", humanize.user_name(one.uid, None), seconds(one.seconds))
            for one in daemon.incidents
            if one.kind == "wait_served"
        ]
    return table(("recording", "who waited", "for"), rows)


@figures
async def handovers() -> str:
    """What taking turns costs."""
    rows = []
    for name in ("wait-served", "three-users", "starved"):
        _, metrics = await end_of(name)
        count = metrics.value("mps_uid_handovers_total") or 0
        idle = metrics.value("mps_uid_handover_idle_seconds_total")
        held = sum(
            value
            for _, value in metrics.all("mps_uid_holding_seconds_total")
            if isinstance(value, int | float)
        )
        overtakes = metrics.value("mps_uid_overtakes_total") or 0
        rows.append(
            (
                f"`{name}`",
                f"{count:.0f}",
                seconds(idle),
                seconds(held),
                f"{overtakes:.0f}",
            )
        )
    return table(
        ("recording", "hand-overs", "GPU idle for them", "GPU in use", "clients that overtook"),
        rows,
    )


# ------------------------------------------------------------------------------- dying


@figures
async def crash() -> str:
    """A server that is killed."""
    return await timeline("server-killed")


@figures
async def fault() -> str:
    """A client with an illegal access."""
    return await timeline("fault", "fault-held")


@figures
async def losses() -> str:
    """Who was lost, by cause."""
    rows = []
    for name in ("server-killed", "fault", "fault-held"):
        _, metrics = await end_of(name)
        rows += [
            (f"`{name}`", labels["cause"], uid_of(labels), f"{value:.0f}")
            for labels, value in metrics.all("mps_client_losses_total")
            if isinstance(value, int | float) and value
        ]
    return table(("recording", "cause", "whose", "clients lost"), rows)


@figures
async def ghost() -> str:
    """A process that dies in the queue."""
    return await timeline("wait-abandoned-sigkill")


@figures
async def stranded() -> str:
    """A process that outlives its server, step by step."""
    player = Player(RECORDINGS / "stranded.rec.gz")
    began = moment = player.recording.header.started_at
    rows: list[tuple[str, ...]] = []
    while moment < player.recording.ended_at:
        moment += STEP_SECONDS
        metrics = await player.to(moment)
        used = metrics.value("mps_gpu_memory_used_bytes")
        row = (
            f"{metrics.value('mps_gpu_processes', kind='mps_server') or 0:.0f}",
            f"{metrics.value('mps_server_clients') or 0:.0f}",
            f"{metrics.value('mps_gpu_stranded_clients') or 0:.0f}",
            "not known" if used is None else humanize.memory(used),
        )
        if not rows or rows[-1][1:] != row:
            rows.append((f"{moment - began:.1f}", *row))
    return table(("second", "servers", "clients", "stranded processes", "GPU memory used"), rows)


# ------------------------------------------------------------------------------- the page


async def fill(text: str) -> str:
    """The page with every table made anew."""
    made = {}
    for _, name, _ in MARK.findall(text):
        made[name] = await FIGURES[name]()
    return MARK.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", text)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text("utf-8")
    filled = asyncio.run(fill(text))
    if check:
        if filled != text:
            sys.stderr.write("docs/scenarios.md: run python -m tools.scenario_figures\n")
        return int(filled != text)
    PAGE.write_text(filled, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a scrape with real clients, also of nvitop-exporter if this Python has it."""

import asyncio
import importlib.util
import sys
from dataclasses import asdict

from bench.http import compare, installed
from tests.hardware.lab import Lab
from tests.hardware.scenarios import scenario

OURS = "mps-exporter"
NVITOP = "nvitop-exporter"
NVITOP_MODULE = "nvitop_exporter.cli"
ROUNDS = 30

MAX_CPU_PERCENT = 2.0
MAX_RSS_MEBIBYTES = 75


def exporters() -> dict[str, tuple[str, ...]]:
    """Return the commands of the exporters that are installed here, less their ports."""
    python = sys.executable
    listen = "--web.listen-address=127.0.0.1:"
    commands: dict[str, tuple[str, ...]] = {OURS: (python, "-m", "mps_exporter", listen)}
    if importlib.util.find_spec("nvitop_exporter") is not None:
        nvitop = ("nvitop_exporter", "--bind-address=127.0.0.1", "--port=")
        commands[NVITOP] = (python, "-m", *nvitop)
    return commands


async def _measure(lab: Lab, clients: int, most: float) -> None:
    """Measure all exporters with clients; `most`: maximum multiple of nvitop-exporter's cost."""
    daemon = lab.daemon()
    worker = lab.client("spin", 150, blocks=8)
    crowd = [lab.client("idle", 150, mebibytes=8) for _ in range(clients - 1)]
    await lab.ready(worker, *crowd, seconds=40)
    commands = exporters()
    modules = ["mps_exporter.commands.serve", "mps_exporter.web.server"]
    modules += [NVITOP_MODULE] if NVITOP in commands else []
    costs = await asyncio.to_thread(compare, commands, ROUNDS, installed(*modules))
    for cost in costs:
        lab.facts[cost.name] = {**asdict(cost), "median_ms": cost.median_ms, "p95_ms": cost.p95_ms}
        print(f"    {cost.name}: {lab.facts[cost.name]}")
    by_name = {cost.name: cost for cost in costs}
    ours = by_name[OURS]
    _at_most(lab, "CPU at 1 s scrapes, % of a core", ours.cpu_percent, MAX_CPU_PERCENT)
    _at_most(lab, "resident memory, MiB", ours.rss_megabytes, MAX_RSS_MEBIBYTES)
    if NVITOP in by_name:
        ratio = ours.median_ms / by_name[NVITOP].median_ms
        _at_most(lab, f"a scrape / that of {NVITOP}", ratio, most)
    seen = (await lab.look()).value("mps_server_clients")
    lab.equal("clients on the page", seen, clients)
    await lab.end(worker, *crowd)
    daemon.quit()


def _at_most(lab: Lab, name: str, got: float, most: float) -> None:
    lab.note(name, ok=got <= most, wanted=f"<= {most:g}", got=f"{got:.2f}")


@scenario("one client: what a scrape over HTTP costs, beside other exporters")
async def cost_one(lab: Lab) -> None:
    await _measure(lab, 1, 2.2)


@scenario("forty clients: what a scrape over HTTP costs, beside other exporters")
async def cost_forty(lab: Lab) -> None:
    await _measure(lab, 40, 1.0)

"""What the exporter costs on a small host of real processes: one GPU, one daemon, a few clients.

    python -m bench.small [--clients N] [--others N] [--rounds N] [NAME=TREE ...]

On a host of its own (namespaces: run it as root) it starts a control daemon's stand-in with its
server, so many clients and processes that have nothing to do with MPS, and measures each version
of this program (TREE: a checkout of it; without one, this checkout) with bench.http: all in one run
and in turns. /proc, the logs, the locks and the descriptors of processes are the kernel's; NVML's
answers are recorded and come at once, so ratios of versions are the result, not times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from testing.own_host import TOOL, OwnHost, own_host
from testing.ports import free_port

ROOT = Path(__file__).parents[1]
STAGE = "/run/stage"
CLIENTS_UID = 1001
FIRST_CHANGE_SECONDS = 10
"""So long after the exporters' start the logs change: from then on they rely on what the kernel
tells of them, as on a real host after the first line."""
CLIENT_BYTES = 1 << 30
SERVER_BYTES = 70 << 20


def furnish(host: OwnHost, clients: int, others: int) -> None:
    """Start everything but the exporters."""
    host.start("ip", "link", "set", "lo", "up").wait()
    daemon = host.daemon()
    pids = [host.client(daemon, CLIENTS_UID) for _ in range(clients)]
    host.start("sh", "-c", f"for _ in $(seq {others}); do sleep 3600 & done; wait")
    host.start("sh", "-c", f"sleep {FIRST_CHANGE_SECONDS}; exec touch {daemon.logs}/*.log")
    rows = [(pid, CLIENT_BYTES) for pid in pids]
    lists = {"Compute": [*rows, (daemon.server, SERVER_BYTES)], "MPSCompute": rows, "Graphics": []}
    stage = host.outside(STAGE)
    stage.mkdir()
    stage.joinpath("nvml.json").write_text(json.dumps([lists]))


def command(name: str, tree: Path) -> str:
    """How bench.http starts this version."""
    port = free_port()
    words = [
        "env",
        f"PYTHONPATH={tree}/exporter:{tree}",
        f"PYTHONPYCACHEPREFIX=/run/compiled-{name}",
        sys.executable,
        "-m",
        "bench.stage",
        STAGE,
        "serve",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--mps.control-binary={TOOL}",
    ]
    # The first start compiles the modules, which leaves memory behind.
    compiled = shlex.join([*words[:4], "-c", "import bench.stage, mps_exporter.commands.serve"])
    return f"{name}=sh -c {shlex.quote(f'{compiled}; exec {shlex.join(words)}')}=http://127.0.0.1:{port}/metrics"


def measure(trees: Sequence[tuple[str, Path]], chosen: argparse.Namespace) -> str:
    """Run it; gives bench.http's table."""
    with own_host() as host:
        furnish(host, chosen.clients, chosen.others)
        process = host.start(
            sys.executable,
            "-m",
            "bench.http",
            f"--rounds={chosen.rounds}",
            f"--base={trees[0][0]}",
            *(command(name, tree) for name, tree in trees),
            environment={"PYTHONPATH": f"{ROOT}/exporter:{ROOT}"},
        )
        assert process.stdout is not None
        return process.stdout.read().decode()


def _tree(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise ValueError(text)
    return name, Path(path).resolve()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trees", nargs="*", type=_tree, metavar="NAME=TREE")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--others", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    print(measure(chosen.trees or [("this", ROOT)], chosen), end="")


if __name__ == "__main__":
    main()

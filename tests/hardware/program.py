"""Scenarios that run the whole program, as a user does, beside real clients."""

from __future__ import annotations

import asyncio
import ctypes.util
import gzip
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mps_exporter.mps.server_queries import SETTLING_SECONDS
from tests.hardware.lab import Daemon, Lab
from tests.hardware.scenarios import scenario

PORT = 9477
URL = f"http://127.0.0.1:{PORT}/metrics"
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
QUERY = (
    "index,uuid,name,utilization.gpu,utilization.memory,memory.total,memory.used,memory.free,"
    "temperature.gpu,power.draw,clocks.sm,clocks.mem"
)


@contextmanager
def exporter_program(
    *flags: str, before: tuple[str, ...] = (), **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run mps-exporter, and end it."""
    process = subprocess.Popen(
        [
            *before,
            sys.executable,
            "-m",
            "mps_exporter",
            f"--web.listen-address=127.0.0.1:{PORT}",
            *flags,
        ],
        env={**os.environ, **environment},
    )
    try:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            try:
                scrape(timeout=3)
                break
            except OSError:
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(15)


def scrape(timeout: float = 10) -> str:
    """One page, in text form."""
    request = urllib.request.Request(URL, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - our own address
        page = answer.read()
        return (gzip.decompress(page) if answer.headers["Content-Encoding"] else page).decode()


def value(page: str, name: str, **labels: object) -> float | None:
    """The sum of the samples that match; None where there are none."""
    found = []
    for line in page.splitlines():
        match = SAMPLE.match(line)
        if match and match[1] == name:
            words = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if {key: str(label) for key, label in labels.items()}.items() <= words.items():
                found.append(float(match[3]))
    return sum(found) if found else None


def _expect(lab: Lab, page: str, name: str, wanted: float | None, **labels: object) -> None:
    got = value(page, name, **labels)
    lab.note(f"{name}{labels}", ok=got == wanted, wanted=wanted, got=got)


@scenario("the exporter as an ordinary user: everything but the clients' own limits")
async def ordinary_user(lab: Lab) -> None:
    daemon = lab.daemon()
    d = daemon.label
    client = lab.client("spin", 14, daemon=daemon, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25")
    await lab.ready(client)
    user = ("setpriv", "--reuid=1001", "--regid=1001", "--clear-groups")
    with exporter_program("--mps.min-query-interval=0s", before=user):
        await asyncio.sleep(2)
        page = await asyncio.to_thread(scrape)
    _expect(lab, page, "mps_control_up", 1, daemon=d)
    _expect(lab, page, "mps_server_clients", 1, daemon=d)
    _expect(lab, page, "mps_client_info", 1, daemon=d, pid=client.pid, limit_source="unknown")
    _expect(lab, page, "mps_client_sm_limit", None, daemon=d)
    _expect(lab, page, "mps_client_active_thread_ratio", None, daemon=d)
    _expect(lab, page, "mps_client_contexts", 1, daemon=d, pid=client.pid)
    memory = value(page, "mps_client_memory_used_bytes", daemon=d, pid=client.pid)
    lab.note("memory of the client", ok=bool(memory), wanted="> 0", got=memory)
    unreadable = value(page, "mps_exporter_unreadable_environments")
    lab.note("unreadable environments", ok=bool(unreadable), wanted=">= 1", got=unreadable)
    (lab.out / "ordinary-user.prom").write_text(page)
    client.kill()
    await lab.left(client)
    daemon.quit()


@scenario("the NVML library is missing: MPS metrics carry the daemon's own UUIDs")
async def without_nvml(lab: Lab) -> None:
    daemon = lab.daemon()
    d = daemon.label
    client = lab.client("spin", 14, daemon=daemon)
    await lab.ready(client)
    uuid = (await lab.look()).snapshot.gpus[0].uuid
    library = _nvml_path()
    hide = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind /dev/null {library} && exec "$@"',
        "sh",
    )
    with exporter_program("--mps.min-query-interval=0s", before=hide):
        await asyncio.sleep(2)
        page = await asyncio.to_thread(scrape)
    _expect(lab, page, "mps_scrape_collector_success", 0, collector="nvml")
    _expect(lab, page, "mps_control_up", 1, daemon=d)
    _expect(lab, page, "mps_server_client_contexts", 1, daemon=d, uuid=uuid, gpu="0")
    _expect(lab, page, "mps_client_contexts", 1, daemon=d, uuid=uuid, pid=client.pid)
    _expect(lab, page, "mps_gpu_info", None)
    client.kill()
    await lab.left(client)
    daemon.quit()


def _nvml_path() -> Path:
    name = ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1"
    maps = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import ctypes; ctypes.CDLL({name!r}); print(open('/proc/self/maps').read())",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return Path(next(line.split()[-1] for line in maps.splitlines() if "nvidia-ml" in line))


@scenario("forty clients: what a scrape costs, beside nvidia-smi")
async def forty_clients(lab: Lab) -> None:
    daemon = lab.daemon()
    worker = lab.client("spin", 75, daemon=daemon, blocks=8)
    crowd = [lab.client("idle", 80, daemon=daemon, mebibytes=8) for _ in range(40)]
    await lab.ready(worker, *crowd, seconds=40)
    smi = _timed(
        lambda: subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"],
            check=True,
            capture_output=True,
        ),
        9,
    )
    with exporter_program("--mps.min-query-interval=0s"):
        fresh = _timed(scrape, 15)
        page = scrape()
    with exporter_program() as process:
        scrape()
        before, began = _cpu(process.pid), time.monotonic()
        durations = []
        for _ in range(20):
            start = time.monotonic()
            scrape()
            durations.append(time.monotonic() - start)
            await asyncio.sleep(max(0, 1 - (time.monotonic() - start)))
        cpu = (_cpu(process.pid) - before) / (time.monotonic() - began)
        rss = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1])  # type: ignore[index]
        lines = daemon.lines("control")
        await asyncio.sleep(0)
        lab.facts["control_lines_so_far"] = lines
    figures = {
        "nvidia_smi_query_gpu_seconds": smi,
        "fresh_scrape_seconds": fresh,
        "scrape_each_second_seconds": statistics.median(durations),
        "cpu_share_of_a_core_at_1s_scrapes": cpu,
        "resident_kib": rss,
        "page_bytes": len(page),
        "clients": value(page, "mps_server_clients"),
    }
    lab.facts.update(figures)
    for name, figure in figures.items():
        print(f"    {name}: {figure}")
    lab.note("forty-one clients", ok=figures["clients"] == 41, wanted=41, got=figures["clients"])
    lab.note(
        "a fresh scrape is quicker than nvidia-smi --query-gpu",
        ok=fresh < smi,
        wanted=f"< {smi:.4f}",
        got=f"{fresh:.4f}",
    )
    lab.note("share of a core at 1 s scrapes", ok=cpu < 0.02, wanted="< 0.02", got=f"{cpu:.4f}")
    worker.kill()
    for client in crowd:
        client.kill()
    await lab.left(worker, *crowd)
    daemon.quit()


def _timed(work: object, times: int) -> float:
    durations = []
    for _ in range(times):
        began = time.monotonic()
        work()  # type: ignore[operator]
        durations.append(time.monotonic() - began)
    return statistics.median(durations)


def _cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    return ticks / os.sysconf("SC_CLK_TCK")


OLD = "OLD_EXPORTER"
"""Variable with the exporter/ directory of the tree to compare with."""
CADENCES: dict[str, tuple[tuple[str, ...], int, float]] = {
    "default": ((), 20, 1.0),
    "every scrape": (("--mps.min-query-interval=0s",), 10, 0.2),
}
"""Flags, scrapes, and seconds between two of them: 20 s are less than the 25 s for which an answer
stands by default, and with no interval each scrape asks. So either has a number that does not
depend on how fast the machine is."""


def _of(exporter: Path | None) -> dict[str, str]:
    """The environment in which Python finds this exporter; None: the one that runs."""
    if exporter is None:
        return {}
    paths = [str(exporter.resolve()), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _where(exporter: Path | None) -> str:
    """The directory that Python imports it from."""
    code = "import mps_exporter, os; print(os.path.dirname(mps_exporter.__path__[0]))"
    words, environment = [sys.executable, "-c", code], {**os.environ, **_of(exporter)}
    return subprocess.check_output(words, env=environment, text=True).strip()


async def _asked(
    daemon: Daemon, exporter: Path | None, flags: tuple[str, ...], scrapes: int, seconds: float
) -> tuple[Counter[str], str]:
    """What an exporter leaves in control.log while it is scraped: commands, "lines"; a page."""
    path = daemon.log / "control.log"
    before = path.stat().st_size
    page = ""
    with exporter_program(*flags, before=(), **_of(exporter)):
        began = time.monotonic()
        for number in range(scrapes):
            await asyncio.sleep(max(0.0, began + number * seconds - time.monotonic()))
            page = await asyncio.to_thread(scrape)
    written = path.read_bytes()[before:].decode(errors="replace").splitlines()
    commands = (line.partition("Cmd:")[2].strip() for line in written if "Cmd:" in line)
    return Counter([*commands, *["lines"] * len(written)]), page


@scenario("an older exporter and this one ask a daemon the same, and as often")
async def same_queries(lab: Lab) -> None:
    if OLD not in os.environ:
        lab.facts[OLD] = "not set: nothing to compare with"
        print(f"    {OLD} is not set: nothing to compare with")
        return
    trees: dict[str, Path | None] = {"old": Path(os.environ[OLD]), "new": None}
    old = _where(trees["old"])
    lab.note("old tree", ok=old == str(Path(os.environ[OLD]).resolve()), wanted="its own", got=old)
    daemon = lab.daemon()
    client = lab.client("spin", 70, daemon=daemon)
    await lab.ready(client)
    await asyncio.sleep(2 * SETTLING_SECONDS)  # a younger server is not asked
    for name, (flags, scrapes, seconds) in CADENCES.items():
        asked, pages = dict[str, Counter[str]](), dict[str, str]()
        for which, exporter in trees.items():
            asked[which], pages[which] = await _asked(daemon, exporter, flags, scrapes, seconds)
            lab.facts[f"{name}, {which}"] = dict(sorted(asked[which].items()))
            seen = value(pages[which], "mps_server_clients", daemon=daemon.label)
            lab.note(f"{name}, {which}: clients", ok=seen == 1, wanted=1, got=seen)
            (lab.out / f"same-queries-{which}.prom").write_text(pages[which])
        lab.note(
            f"{name}: queries and lines",
            ok=asked["new"] == asked["old"],
            wanted=dict(sorted(asked["old"].items())),
            got=dict(sorted(asked["new"].items())),
        )
    client.kill()
    await lab.left(client)
    daemon.quit()

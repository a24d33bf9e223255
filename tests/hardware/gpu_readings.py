"""Compare what the exporter says of a GPU with what is known of it, on real hardware.

Run from the repository's root on a host with an NVIDIA GPU, CUDA's nvcc, PyTorch and nvidia-ml-py:

    python3 tests/hardware/gpu_readings.py --out DIR

It puts known loads on the first GPU (nobody else should use it), reads the exporter's values beside
nvidia-smi's in the same seconds, checks counters against the loads' own accounts, counts what each
call costs, and provokes one Xid 31. Takes about three minutes. Exits non-zero when something is
wrong; DIR gets report.txt, results.json and raw.json (every call's raw answer).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from exporter.observations import GpuObservation  # noqa: E402
from exporter.sources.nvml import Nvml, NvmlOptions  # noqa: E402
from exporter.sources.nvml.binding import Binding  # noqa: E402
from exporter.sources.nvml.integrals import COUNTER_32  # noqa: E402
from exporter.sources.nvml.library import Library, NvmlError  # noqa: E402
from exporter.sources.nvml.meters import GPM_PCIE  # noqa: E402
from exporter.sources.nvml.readings import ALL_LINKS  # noqa: E402

TICK_SECONDS = 5.0
MATMUL = """
import json, sys, time, torch
n = 8192
a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    a @ b
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
begin, count = time.monotonic(), 0
while time.monotonic() - begin < float(sys.argv[1]):
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    count += 20
took = time.monotonic() - begin
print(json.dumps({"flops": 2 * n**3 * count, "wall_seconds": took,
                  "flops_per_second": 2 * n**3 * count / took}), flush=True)
"""

# nvidia-smi's name -> our metric with its labels, factor to our unit, allowed difference as a
# share of the value and in our unit. None: shown, not judged.
COMPARED: tuple[tuple[str, str, float, float | None, float], ...] = (
    ("utilization.gpu", "mps_gpu_utilization_ratio", 0.01, 0.0, 0.05),
    ("utilization.memory", "mps_gpu_memory_copy_utilization_ratio", 0.01, 0.0, 0.05),
    ("utilization.encoder", "mps_gpu_engine_utilization_ratio{encoder}", 0.01, 0.0, 0.01),
    ("utilization.decoder", "mps_gpu_engine_utilization_ratio{decoder}", 0.01, 0.0, 0.01),
    ("utilization.jpeg", "mps_gpu_engine_utilization_ratio{jpeg}", 0.01, 0.0, 0.01),
    ("utilization.ofa", "mps_gpu_engine_utilization_ratio{ofa}", 0.01, 0.0, 0.01),
    ("memory.total", "mps_gpu_memory_total_bytes", 1048576, 0.0, 1048576),
    ("memory.used", "mps_gpu_memory_used_bytes", 1048576, 0.0, 1048576),
    ("memory.free", "mps_gpu_memory_free_bytes", 1048576, 0.0, 1048576),
    ("memory.reserved", "mps_gpu_memory_reserved_bytes", 1048576, 0.0, 1048576),
    ("power.draw", "mps_gpu_power_watts", 1, 0.05, 5.0),
    ("power.limit", "mps_gpu_power_limit_watts{requested}", 1, 0.0, 0.01),
    ("enforced.power.limit", "mps_gpu_power_limit_watts{enforced}", 1, 0.0, 0.01),
    ("power.default_limit", "mps_gpu_power_limit_watts{default}", 1, 0.0, 0.01),
    ("power.min_limit", "mps_gpu_power_limit_watts{min}", 1, 0.0, 0.01),
    ("power.max_limit", "mps_gpu_power_limit_watts{max}", 1, 0.0, 0.01),
    ("temperature.gpu", "mps_gpu_temperature_celsius{gpu}", 1, 0.0, 2.0),
    ("temperature.memory", "mps_gpu_temperature_celsius{memory}", 1, 0.0, 2.0),
    ("clocks.current.graphics", "mps_gpu_clock_hertz{graphics}", 1e6, 0.05, 0),
    ("clocks.current.sm", "mps_gpu_clock_hertz{sm}", 1e6, 0.05, 0),
    ("clocks.current.memory", "mps_gpu_clock_hertz{memory}", 1e6, 0.05, 0),
    ("clocks.current.video", "mps_gpu_clock_hertz{video}", 1e6, 0.05, 0),
    ("clocks.max.graphics", "mps_gpu_clock_max_hertz{graphics}", 1e6, 0.0, 0),
    ("clocks.max.sm", "mps_gpu_clock_max_hertz{sm}", 1e6, 0.0, 0),
    ("clocks.max.memory", "mps_gpu_clock_max_hertz{memory}", 1e6, 0.0, 0),
    ("pcie.link.gen.current", "mps_gpu_pcie_link_generation{current}", 1, None, 0),
    ("pcie.link.gen.max", "mps_gpu_pcie_link_generation{max}", 1, 0.0, 0),
    ("pcie.link.width.current", "mps_gpu_pcie_link_width{current}", 1, 0.0, 0),
    ("pcie.link.width.max", "mps_gpu_pcie_link_width{max}", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.dram",
     "mps_gpu_ecc_errors_total{corrected,volatile,dram}", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.sram",
     "mps_gpu_ecc_errors_total{corrected,volatile,sram}", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.dram",
     "mps_gpu_ecc_errors_total{uncorrected,aggregate,dram}", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.sram",
     "mps_gpu_ecc_errors_total{uncorrected,aggregate,sram}", 1, 0.0, 0),
    ("clocks_event_reasons_counters.sw_power_cap",
     "mps_gpu_clock_event_seconds_total{sw_power_cap}", 1e-6, 0.02, 0.5),
    ("clocks_event_reasons_counters.sw_thermal_slowdown",
     "mps_gpu_clock_event_seconds_total{sw_thermal_slowdown}", 1e-6, 0.02, 0.5),
    ("clocks_event_reasons_counters.hw_thermal_slowdown",
     "mps_gpu_clock_event_seconds_total{hw_thermal_slowdown}", 1e-6, 0.02, 0.5),
)  # fmt: skip


def key(metric: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Name a reading as in COMPARED: metric{value,value}."""
    return f"{metric}{{{','.join(value for _, value in labels)}}}" if labels else metric


def values(gpu: GpuObservation) -> dict[str, float]:
    """All readings of an observation by name."""
    return {key(one.metric, one.labels): one.value for one in gpu.readings}


class Report:
    """What was found: text for people, numbers for machines, and whether all is well."""

    def __init__(self, out: Path) -> None:
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []
        self._out = out
        self._lines: list[str] = []

    def say(self, text: str = "") -> None:
        """A line of the report."""
        print(text, flush=True)
        self._lines.append(text)

    def check(self, name: str, good: bool, found: object) -> None:
        """Something that must be so."""
        self.say(f"{'ok  ' if good else 'FAIL'} {name}: {found}")
        self.results.setdefault("checks", []).append([name, bool(good), str(found)])
        if not good:
            self.failures.append(name)

    def near(self, name: str, found: float, expected: float, share: float) -> None:
        """A number that must be near another."""
        difference = found / expected - 1 if expected else float("inf")
        text = f"{found:.6g}, expected {expected:.6g}, {difference:+.2%} (allowed {share:.0%})"
        self.check(name, abs(difference) <= share, text)

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """A part that may break without taking the others along."""
        self.say(f"\n== {title}")
        begin = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the other parts are still worth running
            self.say(traceback.format_exc())
            self.check(f"{title}: ran", False, repr(error))
        self.say(f"({time.monotonic() - begin:.1f} s)")
        self.save()

    def save(self) -> None:
        """Write what there is."""
        (self._out / "report.txt").write_text("\n".join(self._lines) + "\n")
        (self._out / "results.json").write_text(json.dumps(self.results, indent=1, default=str))


class Load:
    """One of the known loads, running."""

    def __init__(self, command: list[str], *, waits: bool = False) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        if waits:
            assert self._process.stdout is not None
            assert self._process.stdout.readline().strip() == "ready"

    def go(self) -> None:
        """Let a load that waits begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def account(self) -> dict[str, Any]:
        """Wait for the end; what the load says it did."""
        text, _ = self._process.communicate(timeout=120)
        account: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return account


class Timed:
    """A library that notes how long each call took, and what it answered first."""

    def __init__(self, library: Binding) -> None:
        self._library = library
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            called, key_ = self._names(name, arguments)
            begin = time.perf_counter()
            try:
                answer = method(*arguments)
            except NvmlError as error:
                self.answers.setdefault(key_, {"code": error.code})
                raise
            finally:
                self.seconds[called].append(time.perf_counter() - begin)
            self.answers.setdefault(key_, plain(answer))
            return answer

        return timed

    @staticmethod
    def _names(method: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
        shown = [str(one) for one in arguments if isinstance(one, int | str)]
        if method in {"number", "numbers", "text", "system_number", "system_text"}:
            return shown[0], f"{shown[0]}({', '.join(shown[1:])})"
        if method == "fields":
            fields = arguments[1]
            return f"fields x{len(fields)}", f"fields {[list(one) for one in fields]}"
        return f"{method} {shown[0]}" if method == "processes" else method, (
            f"{method}({', '.join(shown)})"
        )


def plain(answer: Any) -> Any:
    """Something that JSON can hold."""
    if isinstance(answer, list | tuple):
        return [plain(one) for one in answer]
    if isinstance(answer, dict):
        return {str(name): plain(value) for name, value in answer.items()}
    if isinstance(answer, int | float | str | bool) or answer is None:
        return answer
    slots = getattr(type(answer), "__slots__", None)
    return {name: plain(getattr(answer, name)) for name in slots} if slots else repr(answer)


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi says, or why it did not."""
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout or done.stderr


def smi_values() -> dict[str, float]:
    """The compared fields of the first GPU, each asked for only if this nvidia-smi knows it."""
    known = [name for name in SMI_FIELDS if name not in UNKNOWN_TO_SMI]
    line = nvidia_smi("--query-gpu=" + ",".join(known), "--format=csv,noheader,nounits", "-i", "0")
    found = {}
    for name, word in zip(known, line.strip().split(","), strict=False):
        try:
            found[name] = float(word)
        except ValueError:
            continue
    return found


SMI_FIELDS = [row[0] for row in COMPARED]
UNKNOWN_TO_SMI: set[str] = set()


def compare(report: Report, load: str, source: Nvml) -> dict[str, float]:
    """Our values beside nvidia-smi's; ours from just before and just after, the nearer counts."""
    source.observe()
    time.sleep(1.0)
    before = values(source.observe().gpus[0])
    smi = smi_values()
    after = values(source.observe().gpus[0])
    report.say(f"{'nvidia-smi':52}{'smi':>14}{'ours before':>14}{'after':>14}{'diff':>12}")
    for field, metric, factor, share, slack in COMPARED:
        if field not in smi:
            if metric in after:
                report.say(f"{field:52}{'-':>14}{before.get(metric, 0):>14.6g}")
            continue
        theirs = smi[field] * factor
        ours = [one[metric] for one in (before, after) if metric in one]
        if not ours:
            report.check(f"{load}: {metric} is there, as nvidia-smi has it", False, theirs)
            continue
        nearest = min(ours, key=lambda value: abs(value - theirs))
        low, high = min(ours), max(ours)
        good = share is None or low <= theirs <= high
        good = good or abs(nearest - theirs) <= slack + (share or 0.0) * abs(theirs) + 1e-9
        report.say(
            f"{field:52}{theirs:>14.6g}{ours[0]:>14.6g}{ours[-1]:>14.6g}{nearest - theirs:>12.4g}"
            f"{'' if good else '  <-- FAIL'}"
        )
        if not good:
            report.failures.append(f"{load}: {field}")
    extra = {name: value for name, value in after.items() if "active_ratio" in name}
    extra["occupancy"] = after.get("mps_gpu_sm_occupancy_ratio", float("nan"))
    report.say("GPM: " + ", ".join(f"{name}={value:.4f}" for name, value in extra.items()))
    report.results[f"{load} ours"] = after
    report.results[f"{load} smi"] = smi
    return after


class Scraper(threading.Thread):
    """A Prometheus of its own: an instance of the source, scraped at a fixed interval."""

    def __init__(self, interval: float, tick: float | None, seconds: float) -> None:
        super().__init__(daemon=True)
        self.interval, self.tick, self.seconds = interval, tick, seconds
        self.seen: list[tuple[float, dict[str, float]]] = []
        self._source = Nvml(options=NvmlOptions(xid_events=False))

    def run(self) -> None:
        """Scrape at 0, interval, 2 x interval ... and at the end; tick in between."""
        begin = time.monotonic()
        scrapes = [n * self.interval for n in range(int(self.seconds / self.interval) + 1)]
        due = [(at, True) for at in {*scrapes, self.seconds}]
        if self.tick:
            ticks = int(self.seconds / self.tick)
            due += [(n * self.tick + 0.3, False) for n in range(ticks)]
        for at, scrape in sorted(due):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            if scrape:
                self.seen.append((at, values(self._source.observe().gpus[0])))
            else:
                self._source.tick()
        self._source.close()

    def increase(self, metric: str) -> float:
        """From the first scrape to the last; a counter not there yet was 0."""
        return self.seen[-1][1].get(metric, 0.0) - self.seen[0][1].get(metric, 0.0)


def integrals(report: Report, load: str) -> None:
    """Busy and active seconds of a load of known length, by scrape intervals."""
    seconds = 63.0
    scrapers = [Scraper(i, TICK_SECONDS, seconds) for i in (1.0, 7.0, 30.0)]
    without_ticks = Scraper(30.0, None, seconds)
    for one in (*scrapers, without_ticks):
        one.start()
    time.sleep(3.0)
    account = Load([load, "pulse", "1320", "300", "200", "55"]).account()
    for one in (*scrapers, without_ticks):
        one.join()
    report.say(f"load: {account}")
    busy = float(account["busy_seconds"])
    counters = ("busy", "graphics_active", "sm_active")
    for one in (*scrapers, without_ticks):
        ticked = "" if one.tick else ", no ticks"
        for counter in counters:
            found = one.increase(f"mps_gpu_{counter}_seconds_total")
            name = f"{counter} seconds, scraped every {one.interval:g} s{ticked}"
            if one.tick:
                report.near(name, found, busy, 0.02)
            else:
                report.say(f"     {name}: {found:.3f}")
        holes = {
            name: one.increase(f"mps_gpu_unobserved_seconds_total{{{name}}}")
            for name in ("busy", "active")
        }
        report.say(f"     unobserved, scraped every {one.interval:g} s{ticked}: {holes}")
        report.results[f"integral {one.interval:g}{ticked}"] = {
            "increase": {c: one.increase(f"mps_gpu_{c}_seconds_total") for c in counters},
            "unobserved": holes,
            "account": account,
        }


def sample_buffer(report: Report, library: Binding) -> None:
    """How long the driver's buffer of utilization samples is."""
    device = library.device(0)
    samples = library.samples(device, 1, 0)
    times = [at for at, _ in samples]
    steps = sorted({after - before for before, after in pairwise(times)})
    median = statistics.median(b - a for a, b in pairwise(times)) / 1e6
    length = (times[-1] - times[0]) / 1e6
    age = time.time() - times[-1] / 1e6
    report.say(
        f"{len(samples)} samples over {length:.2f} s, median step {median:.4f} s, "
        f"steps {steps[0]}..{steps[-1]} us, newest {age:.3f} s old"
    )
    report.results["sample buffer"] = {"samples": samples, "length": length, "median": median}
    report.check("the buffer outlasts a tick", length > TICK_SECONDS, f"{length:.2f} s")


def pcie(report: Report, load: str, source: Nvml, library: Binding) -> None:
    """PCIe bytes against copies of known size; the raw 32-bit counters and GPM beside."""
    device = library.device(0)
    stop = threading.Event()
    raw: list[tuple[float, int, int]] = []

    def watch() -> None:
        while not stop.is_set():
            sent, received = library.fields(device, [(197, 0), (198, 0)])
            raw.append((time.monotonic(), int(sent.value), int(received.value)))
            time.sleep(0.005)

    time.sleep(0.6)
    before = values(source.observe().gpus[0])
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    gpm = gpm_rates(library, 1.0)
    running = Load([load, "copy", "150"])
    rates = [gpm_rates(library, 1.0) for _ in range(5)]
    source.tick()
    account = running.account()
    time.sleep(1.0)
    stop.set()
    watcher.join()
    time.sleep(0.6)
    after = values(source.observe().gpus[0])
    bytes_each = float(account["bytes"])
    report.say(f"load: {account}")
    report.say(f"GPM MiB/s idle {gpm}, during {rates}")
    gap = max(b[0] - a[0] for a, b in pairwise(raw))
    for place, direction in ((2, "receive"), (1, "transmit")):
        steps = [(b[place] - a[place]) % COUNTER_32 for a, b in pairwise(raw)]
        report.say(
            f"raw counter {direction}: {sum(steps):.6g} in {len(raw)} looks, longest gap "
            f"{gap * 1e3:.1f} ms, largest step {max(steps)}"
        )
        report.results[f"pcie raw {direction}"] = sum(steps)
        metric = f"mps_gpu_pcie_{direction}_bytes_total"
        found = after.get(metric, 0.0) - before.get(metric, 0.0)
        ratio = found / bytes_each
        report.check(
            f"{metric} over {bytes_each:.4g} copied (protocol comes on top)",
            1.0 <= ratio <= 1.3,
            f"{found:.6g}, {ratio:.4f} times",
        )
    report.results["pcie"] = {"account": account, "gpm": rates, "raw": raw[::20]}


def gpm_rates(library: Binding, seconds: float) -> dict[str, float]:
    """PCIe rates over an interval of its own."""
    device = library.device(0)
    first, second = library.gpm_allocate(), library.gpm_allocate()
    library.gpm_take(device, first, None)
    time.sleep(seconds)
    library.gpm_take(device, second, None)
    found = library.gpm_metrics(first, second, list(GPM_PCIE.values()))
    library.gpm_free(first)
    library.gpm_free(second)
    return {name: round(found.get(metric, -1.0), 1) for name, metric in GPM_PCIE.items()}


def costs(report: Report) -> dict[str, Any]:
    """What a collection costs, and what each call in it; the first answers as they are."""
    timed = Timed(Binding())
    source = Nvml(cast("Library", timed))
    totals = []
    for _ in range(12):
        begin = time.perf_counter()
        source.observe()
        totals.append(time.perf_counter() - begin)
        time.sleep(1.05)
    ticks = []
    for _ in range(3):
        time.sleep(0.6)
        begin = time.perf_counter()
        source.tick()
        ticks.append(time.perf_counter() - begin)
    source.close()
    first, later = totals[0], totals[1:]
    rows = sorted(timed.seconds.items(), key=lambda item: -statistics.median(item[1]))
    report.say(f"{'call':52}{'times':>7}{'median us':>12}{'max us':>12}")
    for name, seconds in rows:
        middle, most = statistics.median(seconds) * 1e6, max(seconds) * 1e6
        report.say(f"{name:52}{len(seconds):>7}{middle:>12.1f}{most:>12.1f}")
    middle = statistics.median(later) * 1e3
    report.say(
        f"collection: first {first * 1e3:.2f} ms, later median {middle:.2f} ms, max "
        f"{max(later) * 1e3:.2f} ms; tick {statistics.median(ticks) * 1e3:.2f} ms"
    )
    report.check("a collection of one GPU costs at most 8 ms", middle <= 8.0, f"{middle:.2f} ms")
    report.results["costs"] = {
        "calls": {name: statistics.median(seconds) for name, seconds in rows},
        "collections": totals,
        "ticks": ticks,
    }
    return timed.answers


def all_fields(library: Binding) -> dict[str, Any]:
    """Every field id by itself, with its cost; links by scope too."""
    device = library.device(0)
    found: dict[str, Any] = {}
    links = (38, 45, 52, 59, 91, *range(138, 142), *range(160, 169), *range(200, 216), 289, 290)
    scopes = {(field, 0) for field in range(1, 308)}
    scopes |= {(field, scope) for field in links for scope in (0, 1, 17, ALL_LINKS)}
    for field, scope in sorted(scopes):
        begin = time.perf_counter()
        try:
            answer = plain(library.fields(device, [(field, scope)])[0])
        except NvmlError as error:
            answer = {"code": error.code, "whole": True}
        took = time.perf_counter() - begin
        found[f"{field}:{scope}"] = {**answer, "us": round(took * 1e6, 1)}
    return found


def all_gpm(library: Binding) -> dict[str, float]:
    """Every GPM metric over one second."""
    device = library.device(0)
    if not library.gpm_supported(device):
        return {}
    first, second = library.gpm_allocate(), library.gpm_allocate()
    library.gpm_take(device, first, None)
    time.sleep(1.0)
    library.gpm_take(device, second, None)
    found = {}
    for metric in range(1, 334):
        try:
            answer = library.gpm_metrics(first, second, [metric])
        except NvmlError as error:
            answer = {metric: -float(error.code)}
        found.update({str(name): value for name, value in answer.items()})
    library.gpm_free(first)
    library.gpm_free(second)
    return found


def fault(report: Report, load: str, source: Nvml) -> None:
    """One illegal read must be one Xid 31."""
    name = "mps_gpu_xid_errors_total{31}"
    before = values(source.observe().gpus[0])
    account = Load([load, "fault"]).account()
    begin, took = time.monotonic(), None
    while time.monotonic() - begin < 5.0:
        after = values(source.observe().gpus[0])
        if took is None and after.get(name, 0) > before.get(name, 0):
            took = time.monotonic() - begin
        time.sleep(0.1)
    after = values(source.observe().gpus[0])
    changed = {n: (before.get(n, 0), v) for n, v in after.items() if "xid" in n and v}
    report.say(f"load: {account}; Xids now: {changed}; counted after {took} s")
    report.check("Xid 31 counted once", after.get(name, 0) - before.get(name, 0) == 1, changed)
    age = time.time() - after.get("mps_gpu_last_xid_timestamp_seconds{31}", 0)
    report.check("its time is now", age < 10, f"{age:.1f} s ago")


def build(out: Path, capability: tuple[int, int]) -> str:
    """Compile the loads for this GPU."""
    program = out / "gpu_load"
    source = Path(__file__).with_name("gpu_load.cu")
    target = f"-arch=sm_{capability[0]}{capability[1]}"
    subprocess.run(["nvcc", "-O2", target, "-o", str(program), str(source)], check=True)
    return str(program)


def peak_bandwidth(library: Binding, gpu: dict[str, float]) -> float:
    """Bytes per second that the memory could move, from its clock and its bus."""
    width = library.number("nvmlDeviceGetMemoryBusWidth", library.device(0))
    return gpu["mps_gpu_clock_hertz{memory}"] * 2 * width / 8


def loads(report: Report, load: str, source: Nvml, library: Binding) -> None:
    """The comparison with nvidia-smi, load by load."""
    sms = source.observe().gpus[0].sm_count or 0
    matmul = Load([sys.executable, "-c", MATMUL, "7"], waits=True)
    time.sleep(2.0)
    with report.section("idle, one process with a context"):
        idle = compare(report, "idle", source)
        report.check("idle: no utilization", idle["mps_gpu_utilization_ratio"] < 0.02, idle[
            "mps_gpu_utilization_ratio"])  # fmt: skip
    with report.section("tensor cores: bfloat16 products of 8192 x 8192"):
        matmul.go()
        time.sleep(2.0)
        tensor = compare(report, "tensor", source)
        account = matmul.account()
        per_cycle = 4096 * sms
        share = account["flops_per_second"] / (per_cycle * tensor["mps_gpu_clock_hertz{sm}"])
        found = tensor.get("mps_gpu_tensor_active_ratio", 0.0)
        report.say(f"load: {account}; {share:.3f} of the dense peak at this clock")
        report.check("tensor cores as busy as the FLOPs say", abs(found - share) < 0.1, found)
    with report.section("memory-bound: a copy kernel"):
        running = Load([load, "memory", "7"])
        time.sleep(4.0)
        memory = compare(report, "memory", source)
        account = running.account()
        share = account["bytes_per_second"] / peak_bandwidth(library, memory)
        found = memory.get("mps_gpu_dram_active_ratio", 0.0)
        report.say(f"load: {account}; {share:.3f} of the peak at this clock")
        report.check("DRAM as busy as the bytes say", abs(found - share) < 0.1, found)
    for blocks in (1, 20):
        with report.section(f"{blocks} blocks on {sms} SMs"):
            running = Load([load, "pulse", str(blocks), "500", "0", "6"])
            time.sleep(3.0)
            seen = compare(report, f"{blocks} blocks", source)
            account = running.account()
            found = seen.get("mps_gpu_sm_active_ratio", 0.0)
            report.say(f"load: {account}")
            report.check(
                f"{blocks} blocks: SM activity", abs(found - blocks / sms) < 0.01,
                f"{found:.4f}, expected {blocks / sms:.4f}",
            )  # fmt: skip
            utilization = seen["mps_gpu_utilization_ratio"]
            report.check(f"{blocks} blocks: utilization", utilization > 0.95, utilization)


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out)
    raw: dict[str, Any] = {}
    known = nvidia_smi("--help-query-gpu")
    UNKNOWN_TO_SMI.update(name for name in SMI_FIELDS if f'"{name}"' not in known)
    library = Binding()
    library.init()
    source = Nvml()
    first = source.observe()
    program = build(Path("/tmp"), first.gpus[0].compute_capability or (9, 0))
    report.say(f"{first.driver_version}, CUDA {first.cuda_version}, {first.gpus[0].name}")
    raw["identity"] = plain(first.gpus[0])
    with report.section("cost of a collection, idle"):
        raw["answers"] = costs(report)
        raw["utilization samples"] = library.samples(library.device(0), 1, 0)
    with report.section("the driver's sample buffer"):
        sample_buffer(report, library)
    loads(report, program, source, library)
    with report.section("PCIe"):
        pcie(report, program, source, library)
    with report.section("counters over a known load"):
        integrals(report, program)
    with report.section("raw answers under load, cost of a collection under load"):
        running = Load([program, "memory", "25"])
        time.sleep(2.0)
        raw["fields"] = all_fields(library)
        raw["gpm"] = all_gpm(library)
        raw["answers under load"] = costs(report)
        report.say(str(running.account()))
    with report.section("an illegal address"):
        fault(report, program, source)
    raw["nvidia-smi -q"] = nvidia_smi("-q")
    (out / "raw.json").write_text(json.dumps(raw, indent=1, default=str))
    source.close()
    report.say(f"\nfailed: {report.failures or 'nothing'}")
    report.save()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

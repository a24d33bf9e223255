"""Compare what the exporter says of a GPU with what is known of it, on real hardware.

Run from the repository's root on a host with an NVIDIA GPU, CUDA's nvcc, PyTorch and nvidia-ml-py:

    python3 tests/hardware/gpu_readings.py --out DIR

It puts known loads on the first GPU (nobody else should use it), reads the exporter's values beside
nvidia-smi's in the same seconds, checks counters against the loads' own accounts, counts what each
call costs, and provokes one Xid 31. Takes about 160 s. Exits non-zero when something is
wrong; DIR gets report.txt, results.json, raw.json (every call's raw answer, written first) and,
should NVML end the process, fault.txt with where every thread was.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pynvml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mps_exporter.observations import GpuObservation  # noqa: E402
from mps_exporter.sources.nvml import TICK_SECONDS, Clock, NvmlOptions, NvmlSession  # noqa: E402
from mps_exporter.sources.nvml.accumulators import GPM_PCIE  # noqa: E402
from mps_exporter.sources.nvml.device import BUSY_SAMPLE_SECONDS  # noqa: E402
from mps_exporter.sources.nvml.integrals import COUNTER_32  # noqa: E402
from mps_exporter.sources.nvml.pynvml_api import (  # noqa: E402
    Device,
    NvmlApi,
    NvmlError,
    ProcessKind,
)
from mps_exporter.sources.nvml.readings import ALL_LINKS  # noqa: E402
from mps_exporter.sources.nvml.xid import XID_CRITICAL_ERROR  # noqa: E402

PACKAGE = "nvidia-ml-py"
PROCESS_KINDS: tuple[ProcessKind, ...] = ("Compute", "MPSCompute", "Graphics")

MATMUL = """
import json, sys, time, torch
n = 8192
for make in (torch.randn, torch.zeros):
    a = make(n, n, device="cuda", dtype=torch.bfloat16)
    b = make(n, n, device="cuda", dtype=torch.bfloat16)
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
"""Products of random numbers run into the power limit; products of zeros draw little power, so that
the clock is higher. The FLOPs done in an active cycle must be the same."""

# nvidia-smi's name -> our quantity with its labels, factor to our unit, allowed difference as a
# share of the value and in our unit. None: shown, not judged.
COMPARED: tuple[tuple[str, str, float, float | None, float], ...] = (
    ("utilization.gpu", "gpu_utilization", 0.01, 0.0, 0.05),
    ("utilization.memory", "memory_utilization", 0.01, 0.0, 0.05),
    ("utilization.encoder", "engine_utilization{encoder}", 0.01, 0.0, 0.01),
    ("utilization.decoder", "engine_utilization{decoder}", 0.01, 0.0, 0.01),
    ("utilization.jpeg", "engine_utilization{jpeg}", 0.01, 0.0, 0.01),
    ("utilization.ofa", "engine_utilization{ofa}", 0.01, 0.0, 0.01),
    ("memory.total", "memory_total", 1048576, 0.0, 1048576),
    ("memory.used", "memory_used", 1048576, 0.0, 1048576),
    ("memory.free", "memory_free", 1048576, 0.0, 1048576),
    ("memory.reserved", "memory_reserved", 1048576, 0.0, 1048576),
    ("power.draw", "power", 1, 0.05, 5.0),
    ("power.limit", "power_limit{requested}", 1, 0.0, 0.01),
    ("enforced.power.limit", "power_limit{enforced}", 1, 0.0, 0.01),
    ("power.default_limit", "power_limit{default}", 1, 0.0, 0.01),
    ("power.min_limit", "power_limit{min}", 1, 0.0, 0.01),
    ("power.max_limit", "power_limit{max}", 1, 0.0, 0.01),
    ("temperature.gpu", "temperature{gpu}", 1, 0.0, 2.0),
    ("temperature.memory", "temperature{memory}", 1, 0.0, 2.0),
    ("clocks.current.graphics", "clock{graphics}", 1e6, 0.05, 0),
    ("clocks.current.sm", "clock{sm}", 1e6, 0.05, 0),
    ("clocks.current.memory", "clock{memory}", 1e6, 0.05, 0),
    ("clocks.current.video", "clock{video}", 1e6, 0.05, 0),
    ("clocks.max.graphics", "clock_max{graphics}", 1e6, 0.0, 0),
    ("clocks.max.sm", "clock_max{sm}", 1e6, 0.0, 0),
    ("clocks.max.memory", "clock_max{memory}", 1e6, 0.0, 0),
    ("pcie.link.gen.current", "pcie_link_generation{current}", 1, None, 0),
    ("pcie.link.gen.max", "pcie_link_generation{max}", 1, 0.0, 0),
    ("pcie.link.width.current", "pcie_link_width{current}", 1, 0.0, 0),
    ("pcie.link.width.max", "pcie_link_width{max}", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.dram", "ecc_errors{corrected,volatile,dram}", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.sram", "ecc_errors{corrected,volatile,sram}", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.dram", "ecc_errors{uncorrected,aggregate,dram}", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.sram", "ecc_errors{uncorrected,aggregate,sram}", 1, 0.0, 0),
    (
        "clocks_event_reasons_counters.sw_power_cap",
        "clock_event_time{sw_power_cap}",
        1e-6,
        0.02,
        0.5,
    ),
    (
        "clocks_event_reasons_counters.sw_thermal_slowdown",
        "clock_event_time{sw_thermal_slowdown}",
        1e-6,
        0.02,
        0.5,
    ),
    (
        "clocks_event_reasons_counters.hw_thermal_slowdown",
        "clock_event_time{hw_thermal_slowdown}",
        1e-6,
        0.02,
        0.5,
    ),
)


def key(quantity: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Name a reading as in COMPARED: quantity{value,value}."""
    return f"{quantity}{{{','.join(value for _, value in labels)}}}" if labels else quantity


def values(gpu: GpuObservation) -> dict[str, float]:
    """All readings of an observation by name."""
    return {key(one.quantity, one.labels): one.value for one in gpu.readings}


class Report:
    """What was found: text for people, numbers for machines, and whether all is well."""

    def __init__(self, out: Path) -> None:
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []
        self._out = out
        self._text = (out / "report.txt").open("w", buffering=1)

    def say(self, text: str = "") -> None:
        """A line of the report, on disk at once."""
        print(text, flush=True)
        self._text.write(f"{text}\n")

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
        self.results["failures"] = self.failures
        (self._out / "results.json").write_text(json.dumps(self.results, indent=1, default=str))


class Load:
    """One of the known loads, running."""

    def __init__(self, command: list[str], *, waits: bool = False) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        if waits:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until a load that waits has made its preparations."""
        assert self.line() == "ready"

    def line(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go(self) -> None:
        """Let a load that waits begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Wait for the end of one that has said all that it had to say."""
        self._process.communicate(timeout=120)

    def account(self) -> dict[str, Any]:
        """Wait for the end; what the load says it did."""
        text, _ = self._process.communicate(timeout=120)
        account: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return account


class Timed:
    """A library that notes how long each call took, and what it answered first."""

    def __init__(self, library: NvmlApi) -> None:
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
        if method in {"number", "numbers", "text", "call"}:
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


def compare(report: Report, load: str, source: NvmlSession) -> dict[str, float]:
    """Our values beside nvidia-smi's; ours from just before and just after, the nearer counts."""
    source.observe()
    time.sleep(1.0)
    before = values(source.observe().gpus[0])
    smi = smi_values()
    after = values(source.observe().gpus[0])
    report.say(f"{'nvidia-smi':52}{'smi':>14}{'ours before':>14}{'after':>14}{'diff':>12}")
    for field, quantity, factor, share, slack in COMPARED:
        if field not in smi:
            if quantity in after:
                report.say(f"{field:52}{'-':>14}{before.get(quantity, 0):>14.6g}")
            continue
        expected = smi[field] * factor
        ours = [one[quantity] for one in (before, after) if quantity in one]
        if not ours:
            report.check(f"{load}: {quantity} is there, as nvidia-smi has it", False, expected)
            continue
        nearest = min(ours, key=lambda value: abs(value - expected))
        low, high = min(ours), max(ours)
        good = share is None or low <= expected <= high
        good = good or abs(nearest - expected) <= slack + (share or 0.0) * abs(expected) + 1e-9
        report.say(
            f"{field:52}{expected:>14.6g}{ours[0]:>14.6g}{ours[-1]:>14.6g}"
            f"{nearest - expected:>12.4g}"
            f"{'' if good else '  <-- FAIL'}"
        )
        if not good:
            report.failures.append(f"{load}: {field}")
    extra = {name: value for name, value in after.items() if name.endswith("_activity")}
    extra["occupancy"] = after.get("sm_occupancy", float("nan"))
    report.say("GPM: " + ", ".join(f"{name}={value:.4f}" for name, value in extra.items()))
    report.results[f"{load} ours"] = after
    report.results[f"{load} smi"] = smi
    return after


COUNTERS = ("busy", "graphics_active", "sm_active")


def scrape(interval: float, seconds: float, begin: float, *, ticks: bool) -> dict[str, Any]:
    """Be an exporter of its own that is scraped at 0, interval, 2 x interval ... and at the end."""
    source = NvmlSession(options=NvmlOptions(xid_events=False))
    source.observe()
    due = {(n * interval, True) for n in range(int(seconds / interval) + 1)} | {(seconds, True)}
    if ticks:
        due |= {(n * TICK_SECONDS + 0.37, False) for n in range(int(seconds / TICK_SECONDS))}
    seen: list[dict[str, float]] = []
    for at, is_scrape in sorted(due):
        time.sleep(max(0.0, begin + at - time.monotonic()))
        if is_scrape:
            seen.append(values(source.observe().gpus[0]))
        else:
            source.tick()
    source.close()

    def increase(quantity: str) -> float:
        """A counter not there yet was 0."""
        return seen[-1].get(quantity, 0.0) - seen[0].get(quantity, 0.0)

    return {
        "increase": {one: increase(f"{one}_time") for one in COUNTERS},
        "unobserved": {one: increase(f"unobserved_time{{{one}}}") for one in ("busy", "active")},
        "joules": increase("energy"),
        "mean watts": statistics.fmean(one["power"] for one in seen),
        "scrapes": len(seen),
    }


def integrals(report: Report, load: str, meanwhile: Callable[[], None]) -> None:
    """Busy and active seconds of a load of known length, by scrape intervals."""
    seconds = 63.0
    begin = time.monotonic() + 3.0
    running = {}
    for interval, ticks in ((1.0, True), (7.0, True), (30.0, True), (30.0, False)):
        name = f"every {interval:g} s{'' if ticks else ', no ticks'}"
        command = [sys.executable, __file__, "--scrape", str(interval)]
        command += ["--seconds", str(seconds), "--begin", str(begin)]
        running[name] = Load([*command, *([] if ticks else ["--no-ticks"])])
    time.sleep(6.0)
    pulses = Load([load, "pulse", "1320", "300", "200", "55"])
    meanwhile()
    account = pulses.account()
    report.say(f"load: {account}")
    for name, scraper in running.items():
        found = scraper.account()
        report.results[f"integral, scraped {name}"] = {**found, "account": account}
        for counter in COUNTERS:
            words = f"{counter} seconds, scraped {name}"
            if "no ticks" in name:
                report.say(f"     {words}: {found['increase'][counter]:.3f}")
            else:
                report.near(words, found["increase"][counter], account["busy_seconds"], 0.02)
        report.say(
            f"     scraped {name}: {found['scrapes']} scrapes, unobserved {found['unobserved']}, "
            f"{found['joules']:.0f} J, mean power {found['mean watts']:.1f} W"
        )


def sample_buffer(report: Report, library: NvmlApi) -> None:
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
    enough = length > 2 * BUSY_SAMPLE_SECONDS
    report.check("the buffer outlasts two looks at it", enough, f"{length:.2f} s")


def pcie(report: Report, load: str, source: NvmlSession, library: NvmlApi) -> None:
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
    rates = []
    for _ in range(5):
        source.tick()
        rates.append(gpm_rates(library, 1.0))
    ticking = threading.Thread(target=tick_until, args=(source, stop), daemon=True)
    ticking.start()
    account = running.account()
    time.sleep(1.0)
    stop.set()
    watcher.join()
    ticking.join()
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
        quantity = f"pcie_{direction}_bytes"
        found = after.get(quantity, 0.0) - before.get(quantity, 0.0)
        ratio = found / bytes_each
        report.near(f"{quantity} as the raw counter, looked at every 5 ms", found, sum(steps), 0.05)
        report.check(
            f"{quantity} over {bytes_each:.4g} copied (protocol comes on top)",
            1.0 <= ratio <= 1.3,
            f"{found:.6g}, {ratio:.4f} times",
        )
    report.results["pcie"] = {"account": account, "gpm": rates, "raw": raw[::20]}


def tick_until(source: NvmlSession, stop: threading.Event) -> None:
    """What the service does between collections."""
    while not stop.wait(TICK_SECONDS):
        source.tick()


def gpm_rates(library: NvmlApi, seconds: float) -> dict[str, float]:
    """PCIe rates over an interval of its own."""
    device = library.device(0)
    first, second = library.call("nvmlGpmSampleAlloc"), library.call("nvmlGpmSampleAlloc")
    library.gpm_take(device, first, None)
    time.sleep(seconds)
    library.gpm_take(device, second, None)
    found = library.gpm_metrics(first, second, list(GPM_PCIE.values()))
    library.call("nvmlGpmSampleFree", first)
    library.call("nvmlGpmSampleFree", second)
    return {name: round(found.get(metric, -1.0), 1) for name, metric in GPM_PCIE.items()}


def costs(report: Report, where: str) -> dict[str, Any]:
    """What a collection costs as the service runs it, and what each call; the first answers."""
    timed = Timed(NvmlApi())
    late = 0.0
    clock = Clock(time.time, lambda: time.monotonic() + late)
    source = NvmlSession(cast("NvmlApi", timed), clock, NvmlOptions(xid_events=False))

    def took(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    found: dict[str, list[float]] = {"the first": [took(source.observe)]}
    found["a tick"] = [took(source.tick)]
    found["a collection"] = []
    for _ in range(13):
        time.sleep(0.45)
        found["a tick"].append(took(source.tick))
        time.sleep(0.55)  # longer than the meters' shortest look: they all work
        found["a collection"].append(took(source.observe))
    for words, seconds in (("10 s", 10.0), ("a minute", 61.0), ("an hour", 3601.0)):
        late += seconds
        found[f"a collection after {words} without ticks"] = [took(source.observe)]
        late += seconds
        found[f"a tick after {words} without ticks"] = [took(source.tick)]
    source.close()
    rows = sorted(timed.seconds.items(), key=lambda item: -statistics.median(item[1]))
    report.say(f"{'call':52}{'times':>7}{'median us':>12}{'max us':>12}")
    for name, each in rows:
        middle, most = statistics.median(each) * 1e6, max(each) * 1e6
        report.say(f"{name:52}{len(each):>7}{middle:>12.1f}{most:>12.1f}")
    for name, each in found.items():
        report.say(f"{name:52}{len(each):>7}{statistics.median(each):>9.2f} ms{max(each):>9.2f} ms")
    middle = statistics.median(found["a collection"])
    report.check(
        f"{where}: a collection of one GPU costs at most 8 ms",
        middle <= 8.0,
        f"median {middle:.2f} ms, max {max(found['a collection']):.2f} ms",
    )
    report.results[f"costs, {where}"] = {
        "calls": {name: [statistics.median(each), max(each), len(each)] for name, each in rows},
        "milliseconds": found,
    }
    return timed.answers


def event_waits(report: Report, library: NvmlApi) -> None:
    """How long waiting for events, and letting go of them, really takes: a bound for closing."""
    found = {}
    for timeout in (0, 50, 200, 500, 1000):
        begin = time.perf_counter()
        events = library.call("nvmlEventSetCreate")
        library.call("nvmlDeviceRegisterEvents", library.device(0), XID_CRITICAL_ERROR, events)
        made = time.perf_counter()
        library.wait_event(events, timeout)
        waited = time.perf_counter()
        library.call("nvmlEventSetFree", events)
        freed = time.perf_counter()
        found[timeout] = [made - begin, waited - made, freed - waited]
        report.say(
            f"event set made in {(made - begin) * 1e3:.1f} ms, waited {timeout} ms: "
            f"{(waited - made) * 1e3:.1f} ms, freed in {(freed - waited) * 1e3:.1f} ms"
        )
    report.results["event waits"] = found
    begin = time.perf_counter()
    source = NvmlSession()
    source.observe()
    opened = time.perf_counter()
    source.close()
    report.say(f"opened in {opened - begin:.2f} s, closed in {time.perf_counter() - opened:.2f} s")
    report.check("closing is quick", time.perf_counter() - opened < 3.0, "")


def all_fields(library: NvmlApi) -> dict[str, Any]:
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


def all_gpm(library: NvmlApi) -> dict[str, float]:
    """Every GPM metric over one second."""
    device = library.device(0)
    if not library.call("nvmlGpmQueryDeviceSupport", device).isSupportedDevice:
        return {}
    first, second = library.call("nvmlGpmSampleAlloc"), library.call("nvmlGpmSampleAlloc")
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
    library.call("nvmlGpmSampleFree", first)
    library.call("nvmlGpmSampleFree", second)
    return found


def fault(report: Report, load: str, source: NvmlSession) -> None:
    """One illegal read must be one Xid 31."""
    name = "xid_errors{31}"
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
    age = time.time() - after.get("last_xid_at{31}", 0)
    report.check("its time is now", age < 10, f"{age:.1f} s ago")


def build(out: Path, capability: tuple[int, int]) -> str:
    """Compile the loads for this GPU."""
    program = out / "gpu_load"
    source = Path(__file__).with_name("gpu_load.cu")
    target = f"-arch=sm_{capability[0]}{capability[1]}"
    subprocess.run(["nvcc", "-O2", target, "-o", str(program), str(source)], check=True)
    return str(program)


def peak_bandwidth(library: NvmlApi, gpu: dict[str, float]) -> float:
    """Bytes per second that the memory could move, from its clock and its bus."""
    width = library.number("nvmlDeviceGetMemoryBusWidth", library.device(0))
    return gpu["clock{memory}"] * 2 * width / 8


class MeanClock(threading.Thread):
    """The mean SM clock while it runs: under a power limit it changes all the time."""

    def __init__(self, library: NvmlApi) -> None:
        super().__init__(daemon=True)
        self._library, self._end = library, threading.Event()
        self._seen: list[int] = []
        self.start()

    def run(self) -> None:
        """Look a hundred times a second."""
        device = self._library.device(0)
        while not self._end.wait(0.01):
            self._seen.append(self._library.number("nvmlDeviceGetClockInfo", device, 1))

    def hertz(self) -> float:
        """Stop, and give the mean."""
        self._end.set()
        self.join()
        return statistics.fmean(self._seen) * 1e6


def tensor_cores(
    report: Report, name: str, matmul: Load, source: NvmlSession, library: NvmlApi, sms: int
) -> float:
    """Tensor activity against the FLOPs done: at most 4096 of them a cycle and SM."""
    clock = MeanClock(library)
    matmul.go()
    time.sleep(2.0)
    seen = compare(report, name, source)
    account = json.loads(matmul.line())
    hertz = clock.hertz()
    share = account["flops_per_second"] / (4096 * sms * hertz)
    found = seen.get("tensor_activity", 0.0)
    report.say(f"load: {account}; mean clock {hertz / 1e6:.0f} MHz")
    text = f"{found:.4f}; the FLOPs are {share:.4f} of the dense peak at the mean clock"
    # A cycle counts as active also when the pipe works at less than its full width.
    report.check(f"{name}: at least as active as the FLOPs say", share <= found <= 1, text)
    report.results[f"{name} account"] = {**account, "hertz": hertz, "share": share}
    return float(share / found) if found else 0.0


def loads(report: Report, load: str, source: NvmlSession, library: NvmlApi) -> None:
    """The comparison with nvidia-smi, load by load."""
    sms = source.observe().gpus[0].sm_count or 0
    matmul = Load([sys.executable, "-c", MATMUL, "7"], waits=True)
    time.sleep(2.0)
    with report.section("idle, one process with a context"):
        idle = compare(report, "idle", source)
        report.check(
            "idle: no utilization", idle["gpu_utilization"] < 0.02, idle["gpu_utilization"]
        )
    with report.section(
        "tensor cores: bfloat16 products of random 8192 x 8192, at the power limit"
    ):
        limited = tensor_cores(report, "tensor", matmul, source, library, sms)
    matmul.wait_until_ready()
    with report.section("tensor cores: the same of zeros, at a higher clock"):
        free = tensor_cores(report, "tensor zeros", matmul, source, library, sms)
        report.near("FLOPs an active cycle, against those at the power limit", free, limited, 0.02)
    matmul.end()
    with report.section("memory-bound: a copy kernel"):
        running = Load([load, "memory", "7"])
        time.sleep(4.0)
        memory = compare(report, "memory", source)
        account = running.account()
        share = account["bytes_per_second"] / peak_bandwidth(library, memory)
        found = memory.get("dram_activity", 0.0)
        report.say(f"load: {account}; {share:.3f} of the peak at this clock")
        report.check("DRAM as busy as the bytes say", abs(found - share) < 0.1, found)
    for blocks in (1, 20):
        with report.section(f"{blocks} blocks on {sms} SMs"):
            running = Load([load, "pulse", str(blocks), "500", "0", "6"])
            time.sleep(3.0)
            seen = compare(report, f"{blocks} blocks", source)
            account = running.account()
            found = seen.get("sm_activity", 0.0)
            report.say(f"load: {account}")
            report.check(
                f"{blocks} blocks: SM activity",
                abs(found - blocks / sms) < 0.01,
                f"{found:.4f}, expected {blocks / sms:.4f}",
            )
            utilization = seen["gpu_utilization"]
            report.check(f"{blocks} blocks: utilization", utilization > 0.95, utilization)


def raw_answers(library: NvmlApi) -> dict[str, Any]:
    """What this driver answers to everything that it may be asked."""
    device = library.device(0)
    lists = {kind: plain(library.processes(device, kind)) for kind in PROCESS_KINDS}
    return {
        "fields": all_fields(library),
        "gpm": all_gpm(library),
        "utilization samples": library.samples(device, 1, 0),
        "utilization samples as pynvml reads them": pynvml_samples(device),
        "processes": lists,
    }


def pynvml_samples(device: Device) -> list[list[float]]:
    """The same buffer by pynvml's own function."""
    _, samples = pynvml.nvmlDeviceGetSamples(device, 1, 0)
    return [[one.timeStamp, one.sampleValue.uiVal] for one in samples]


class Parts:
    """All there is to do, by name, in this order."""

    def __init__(self, report: Report, out: Path) -> None:
        self._report, self._out = report, out
        self._raw: dict[str, Any] = {
            "machine": platform.platform(),
            "pynvml": metadata.version(PACKAGE),
        }
        known = nvidia_smi("--help-query-gpu")
        UNKNOWN_TO_SMI.update(name for name in SMI_FIELDS if f'"{name}"' not in known)
        self._library = NvmlApi()
        self._library.init()
        timed = Timed(self._library)
        options = NvmlOptions(xid_events=False, serials=True)
        once = NvmlSession(cast("NvmlApi", timed), options=options)
        first = once.observe()
        once.close()
        gpu = first.gpus[0]
        self._raw["identity"], self._raw["answers"] = plain(gpu), timed.answers
        self._write_raw()
        self._source = NvmlSession()
        self._program = build(Path("/tmp"), gpu.compute_capability or (9, 0))
        report.say(f"{first.driver_version}, CUDA {first.cuda_version}, {gpu.name}")

    def run(self, chosen: Sequence[str]) -> None:
        """Run these."""
        for name in chosen:
            with self._report.section(name):
                getattr(self, name)()
        self._source.close()
        self._library.call("nvmlShutdown")

    def raw(self) -> None:
        """First, for it is what tests are made of."""
        self._raw["idle"] = raw_answers(self._library)
        self._raw["nvidia-smi -q"] = nvidia_smi("-q")
        self._write_raw()

    def events(self) -> None:
        """Before somebody else waits for events: NVML lets one wait at a time."""
        event_waits(self._report, self._library)

    def costs(self) -> None:
        """Idle, which is dearer than under load."""
        costs(self._report, "idle")
        sample_buffer(self._report, self._library)

    def loads(self) -> None:
        """Our values beside nvidia-smi's and the loads' own accounts."""
        loads(self._report, self._program, self._source, self._library)

    def pcie(self) -> None:
        """Bytes copied."""
        pcie(self._report, self._program, self._source, self._library)

    def integrals(self) -> None:
        """Seconds of work done; meanwhile, costs under load."""
        integrals(self._report, self._program, self._under_load)

    def fault(self) -> None:
        """An illegal address."""
        fault(self._report, self._program, self._source)

    def _under_load(self) -> None:
        self._raw["under load"] = raw_answers(self._library)
        self._write_raw()
        costs(self._report, "under load")

    def _write_raw(self) -> None:
        (self._out / "raw.json").write_text(json.dumps(self._raw, indent=1, default=str))


PARTS = ("raw", "events", "costs", "loads", "pcie", "integrals", "fault")


def main() -> int:
    """Run all parts, or be one of the scrapers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-readings"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--scrape", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--no-ticks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scrape:
        faulthandler.enable()
        ticks = not options.no_ticks
        print(json.dumps(scrape(options.scrape, options.seconds, options.begin, ticks=ticks)))
        return 0
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with (out / "fault.txt").open("w") as file:
        faulthandler.enable(file)
        report = Report(out)
        Parts(report, out).run(options.only)
        report.say(f"\nfailed: {report.failures or 'nothing'}")
        report.save()
        faulthandler.disable()
    (out / "fault.txt").unlink()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

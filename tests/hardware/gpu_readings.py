"""Compare readings of a GPU with nvidia-smi's: python3 -m tests.hardware.gpu_readings --out DIR.

The first GPU is idle, then under a load of known size, then has an Xid 31; no other program should
use it. DIR gets raw.json: the replies of all calls, of which testing/nvml_h200.json was made.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import NvmlApi, NvmlError
from testing.commands import output_of
from testing.nvml_host import values
from tests.hardware.lab import build

FAILURES: list[str] = []


def check(name: str, good: bool, found: object) -> None:
    print(f"{'ok  ' if good else 'FAIL'} {name}: {found}")
    if not good:
        FAILURES.append(name)


# nvidia-smi's name -> our quantity with its labels, factor to our unit, allowed difference as a
# share of the value and in our unit. None: shown, not judged.
COMPARED: tuple[tuple[str, str, float, float | None, float], ...] = (
    ("utilization.gpu", "gpu_utilization", 0.01, 0.0, 0.05),
    ("utilization.memory", "memory_utilization", 0.01, 0.0, 0.05),
    ("utilization.encoder", "engine_utilization,encoder", 0.01, 0.0, 0.01),
    ("utilization.decoder", "engine_utilization,decoder", 0.01, 0.0, 0.01),
    ("utilization.jpeg", "engine_utilization,jpeg", 0.01, 0.0, 0.01),
    ("utilization.ofa", "engine_utilization,ofa", 0.01, 0.0, 0.01),
    ("memory.total", "memory_total", 1048576, 0.0, 1048576),
    ("memory.used", "memory_used", 1048576, 0.0, 1048576),
    ("memory.free", "memory_free", 1048576, 0.0, 1048576),
    ("memory.reserved", "memory_reserved", 1048576, 0.0, 1048576),
    ("power.draw", "power", 1, 0.05, 5.0),
    ("power.limit", "power_limit,requested", 1, 0.0, 0.01),
    ("enforced.power.limit", "power_limit,enforced", 1, 0.0, 0.01),
    ("power.default_limit", "power_limit,default", 1, 0.0, 0.01),
    ("power.min_limit", "power_limit,min", 1, 0.0, 0.01),
    ("power.max_limit", "power_limit,max", 1, 0.0, 0.01),
    ("temperature.gpu", "temperature,gpu", 1, 0.0, 2.0),
    ("temperature.memory", "temperature,memory", 1, 0.0, 2.0),
    ("clocks.current.graphics", "clock,graphics", 1e6, 0.05, 0),
    ("clocks.current.sm", "clock,sm", 1e6, 0.05, 0),
    ("clocks.current.memory", "clock,memory", 1e6, 0.05, 0),
    ("clocks.current.video", "clock,video", 1e6, 0.05, 0),
    ("clocks.max.graphics", "clock_max,graphics", 1e6, 0.0, 0),
    ("clocks.max.sm", "clock_max,sm", 1e6, 0.0, 0),
    ("clocks.max.memory", "clock_max,memory", 1e6, 0.0, 0),
    ("pcie.link.gen.current", "pcie_link_generation,current", 1, None, 0),
    ("pcie.link.gen.max", "pcie_link_generation,max", 1, 0.0, 0),
    ("pcie.link.width.current", "pcie_link_width,current", 1, 0.0, 0),
    ("pcie.link.width.max", "pcie_link_width,max", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.dram", "ecc_errors,corrected,volatile,dram", 1, 0.0, 0),
    ("ecc.errors.corrected.volatile.sram", "ecc_errors,corrected,volatile,sram", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.dram", "ecc_errors,uncorrected,aggregate,dram", 1, 0.0, 0),
    ("ecc.errors.uncorrected.aggregate.sram", "ecc_errors,uncorrected,aggregate,sram", 1, 0.0, 0),
    *(
        (f"clocks_event_reasons_counters.{name}", f"clock_event_time,{name}", 1e-6, 0.02, 0.5)
        for name in ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown")
    ),
)


class Answers:
    """A library that notes the first answer of each call."""

    def __init__(self, library: NvmlApi) -> None:
        self._library = library
        self.found: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._library, name)

        def noted(*arguments: Any) -> Any:
            key = self._name(name, arguments)
            try:
                answer = method(*arguments)
            except NvmlError as error:
                self.found.setdefault(key, {"code": error.code})
                raise
            self.found.setdefault(key, plain(answer))
            return answer

        return noted

    @staticmethod
    def _name(method: str, arguments: tuple[Any, ...]) -> str:
        shown = [str(one) for one in arguments if isinstance(one, int | str)]
        if method in {"number", "numbers", "text", "call"}:
            return f"{shown[0]}({', '.join(shown[1:])})"
        if method == "fields":
            return f"fields {[list(one) for one in arguments[1]]}"
        return f"{method}({', '.join(shown)})"


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
    """The output of nvidia-smi, or its error."""
    done = output_of("nvidia-smi", *arguments, timeout=60)
    return done.stdout or done.stderr


def smi_values() -> dict[str, float]:
    """The compared fields of the first GPU that this nvidia-smi knows."""
    help_text = nvidia_smi("--help-query-gpu")
    known = [name for name, *_ in COMPARED if f'"{name}"' in help_text]
    line = nvidia_smi(f"--query-gpu={','.join(known)}", "--format=csv,noheader,nounits", "-i", "0")
    found = {}
    for name, word in zip(known, line.strip().split(","), strict=False):
        try:
            found[name] = float(word)
        except ValueError:  # [N/A]
            continue
    return found


def compare(load: str, source: NvmlSession) -> dict[str, float]:
    """Compare with nvidia-smi; of the readings just before and just after, the nearer counts."""
    source.observe()
    time.sleep(1.0)
    before = values(source.observe().gpus[0])
    smi = smi_values()
    after = values(source.observe().gpus[0])
    print(f"\n== {load}")
    for field, quantity, factor, share, slack in COMPARED:
        if field not in smi:
            continue
        expected = smi[field] * factor
        ours = [one[quantity] for one in (before, after) if quantity in one]
        if not ours:
            check(f"{load}: {quantity}", False, f"missing, nvidia-smi has {expected}")
            continue
        off = min(abs(value - expected) for value in ours)
        good = share is None or min(ours) <= expected <= max(ours)
        good = good or off <= slack + (share or 0.0) * abs(expected) + 1e-9
        check(f"{load}: {field}", good, f"{ours}, nvidia-smi: {expected:.6g}")
    return after


def pulses(load: str, source: NvmlSession) -> None:
    """Check that blocks on SMs, one on each, make this share of the SMs active."""
    sms = source.observe().gpus[0].sm_count or 1
    for blocks in (1, 20):
        with subprocess.Popen(
            [load, "pulse", str(blocks), "500", "0", "6"], stdout=subprocess.DEVNULL
        ):
            time.sleep(3.0)
            seen = compare(f"{blocks} blocks on {sms} SMs", source)
        found = seen.get("sm_activity", 0.0)
        check(f"{blocks} blocks: SM activity", abs(found - blocks / sms) < 0.01, found)
        check(f"{blocks} blocks: utilization", seen["gpu_utilization"] > 0.95, "")


def fault(load: str, source: NvmlSession) -> None:
    """Check that one illegal read is one Xid 31."""
    name = "xid_errors,31"
    before = values(source.observe().gpus[0])
    subprocess.run([load, "fault"], check=False, capture_output=True)
    time.sleep(5.0)
    after = values(source.observe().gpus[0])
    check("Xid 31 counted once", after.get(name, 0) - before.get(name, 0) == 1, after.get(name))
    check("its time is now", time.time() - after.get("last_xid_at,31", 0) < 10, "")


def raw_answers() -> dict[str, Any]:
    """Take one observation, and give every raw answer."""
    answers = Answers(NvmlApi())
    session = NvmlSession(cast("NvmlApi", answers), serials=True)
    identity = plain(session.observe().gpus[0])
    session.close()
    return {"identity": identity, "answers": answers.found, "nvidia-smi -q": nvidia_smi("-q")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-readings"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "raw.json").write_text(json.dumps(raw_answers(), indent=1, default=str))
    source = NvmlSession()
    idle = compare("idle", source)
    check("idle: no utilization", idle["gpu_utilization"] < 0.02, idle["gpu_utilization"])
    major, minor = source.observe().gpus[0].compute_capability or (9, 0)
    load = str(build(out, "gpu_load", f"sm_{major}{minor}"))
    pulses(load, source)
    fault(load, source)
    source.close()
    print(f"\nfailed: {FAILURES or 'nothing'}")
    return int(bool(FAILURES))


if __name__ == "__main__":
    sys.exit(main())

"""Which NVML calls end the process when two threads make them at the same time?

    python3 tests/hardware/nvml_threads.py --out DIR

The exporter lets one call in at a time; this shows what that guards against. Each kind of call is
made by four threads for some seconds without that lock, in a process of its own, and last the
exporter's whole reading with the lock, which must survive. With driver 580.159.04 on an H200, GPM
ends the process, and nothing else does. About 35 s. Needs nothing but the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mps_exporter.sources.nvml import NvmlOptions, NvmlSession
from mps_exporter.sources.nvml import pynvml_api as binding_module
from mps_exporter.sources.nvml.accumulators import GPM_ALL
from mps_exporter.sources.nvml.pynvml_api import Device, NvmlApi, NvmlError

THREADS = 4
SECONDS = 2.5


def samples(library: NvmlApi, device: Device) -> None:
    """The buffer of utilization samples."""
    library.samples(device, 1, 0)


def fields(library: NvmlApi, device: Device) -> None:
    """A batch of field values."""
    library.fields(device, [(82, 0), (74, 0), (197, 0), (198, 0)])


def gpm(library: NvmlApi, device: Device) -> None:
    """Two samples of this thread's own, and what they tell."""
    first, second = library.call("nvmlGpmSampleAlloc"), library.call("nvmlGpmSampleAlloc")
    library.gpm_take(device, first, None)
    time.sleep(0.11)
    library.gpm_take(device, second, None)
    library.gpm_metrics(first, second, GPM_ALL)
    library.call("nvmlGpmSampleFree", first)
    library.call("nvmlGpmSampleFree", second)


def session(library: NvmlApi, device: Device) -> None:
    """Initialize once more, and shut down once more."""
    library.init()
    library.number("nvmlDeviceGetTemperature", device, 0)
    library.call("nvmlShutdown")


def plain_values(library: NvmlApi, device: Device) -> None:
    """Simple numbers, and the process lists."""
    library.number("nvmlDeviceGetPowerUsage", device)
    library.number("nvmlDeviceGetTotalEnergyConsumption", device)
    library.memory(device)
    library.processes(device, "Compute")


def whole(_library: NvmlApi, _device: Device) -> None:
    """A whole exporter: open, read twice, close."""
    source = NvmlSession(options=NvmlOptions(xid_events=False))
    source.observe()
    time.sleep(0.55)
    source.observe()
    source.close()


Suspect = Callable[[NvmlApi, Device], None]
SUSPECTS: dict[str, tuple[Suspect, ...]] = {
    "plain": (plain_values,),
    "samples": (samples,),
    "fields": (fields,),
    "gpm": (gpm,),
    "session": (session,),
    "samples, gpm, fields": (samples, gpm, fields),
    "session, gpm": (session, gpm),
    "whole": (whole,),
    "whole, locked": (whole,),
}


def be(name: str) -> None:
    """Make the calls of one entry, as a process of its own."""
    faulthandler.enable()
    if "locked" not in name:
        binding_module.LOCK = contextlib.nullcontext()  # type: ignore[assignment]
    library = NvmlApi()
    library.init()
    device = library.device(0)
    end = time.monotonic() + SECONDS
    counts = [0] * THREADS
    errors: set[str] = set()

    def work(number: int) -> None:
        suspects = SUSPECTS[name]
        while time.monotonic() < end:
            try:
                suspects[number % len(suspects)](library, device)
            except NvmlError as error:
                errors.add(str(error))
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.call("nvmlShutdown")
    print(json.dumps({"calls": counts, "errors": sorted(errors)}))


def main() -> int:
    """Run all, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("nvml-threads"))
    parser.add_argument("--be", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    survived = {}
    with (options.out / "threads.txt").open("w", buffering=1) as report:
        for name in SUSPECTS:
            command = [sys.executable, __file__, "--be", name]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=20, check=False
                )
                ended, output = done.returncode, f"{done.stdout}{done.stderr}"
            except subprocess.TimeoutExpired as late:
                ended, output = 124, f"did not end: {late}"
            survived[name] = ended == 0
            text = f"== {name}: exit status {ended}\n{output}"
            print(text, flush=True)
            report.write(f"{text}\n")
    return 0 if survived["whole, locked"] else 1


if __name__ == "__main__":
    sys.exit(main())

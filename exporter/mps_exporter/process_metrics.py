"""process_* metrics about the exporter itself, as every Prometheus client has them."""

from __future__ import annotations

import math
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from mps_exporter.metrics.spec import Family, MetricSpec

_VIRTUAL = MetricSpec("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.")
_RESIDENT = MetricSpec("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
_START = MetricSpec(
    "process_start_time_seconds",
    "gauge",
    "Start time of the process since unix epoch in seconds.",
)
_CPU = MetricSpec(
    "process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."
)
_OPEN = MetricSpec("process_open_fds", "gauge", "Number of open file descriptors.")
_MOST = MetricSpec("process_max_fds", "gauge", "Maximum number of open file descriptors.")


class ProcessMetrics:
    """Reads them. What cannot be read is left out."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._booted_at: float | None = None
        with suppress(OSError):
            found = re.search(rb"^btime (\d+)$", Path("/proc/stat").read_bytes(), re.MULTILINE)
            self._booted_at = None if found is None else float(found[1])

    def families(self) -> list[Family]:
        """Give them, with their values of now."""
        values = list[tuple[MetricSpec, float]]()
        with suppress(OSError):
            # From the state on (field 3): the name before it may have spaces and parentheses.
            fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
            values.append((_VIRTUAL, int(fields[20])))
            values.append((_RESIDENT, int(fields[21]) * self._page_bytes))
            if self._booted_at is not None:
                values.append((_START, self._booted_at + int(fields[19]) / self._ticks))
            values.append((_CPU, (int(fields[11]) + int(fields[12])) / self._ticks))
        with suppress(OSError):
            with os.scandir("/proc/self/fd") as entries:
                values.append((_OPEN, sum(1 for _ in entries)))
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            values.append((_MOST, math.inf if most == resource.RLIM_INFINITY else most))
        return [Family(spec, (((), value),)) for spec, value in values]

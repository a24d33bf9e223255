"""The three process lists of a device, without their traps.

* An MPS client shows in the compute list and in the MPS list. With a server on two GPUs, the MPS
  list of one GPU may also hold clients of the other, with 0 bytes: what the compute list does not
  have is not on this GPU.
* An MPS server is an ordinary compute process here; distinguishing it from others needs /proc.
* Memory may be "not available" (all bits set); that is None, not 16 EiB.
* A list that could not be read is not an empty one: without the MPS list every client would look
  like a process beside MPS. Which lists are missing is said beside the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mps_exporter.observations import GpuProcess, ProcessList
from mps_exporter.sources.nvml.api import Device, ListedProcess, NvmlApi, ProcessKind
from mps_exporter.sources.nvml.query_cache import QueryCache

NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
"""What NVML writes where it does not know the memory."""

CALLS: dict[ProcessList, ProcessKind] = {
    "compute": "Compute",
    "mps": "MPSCompute",
    "graphics": "Graphics",
}


class Listed(NamedTuple):
    """What the lists gave."""

    processes: tuple[GpuProcess, ...] | None
    """None when no list could be read."""
    unread: tuple[ProcessList, ...] = ()
    """The lists that are missing where others are there."""


def read_processes(api: NvmlApi, device: Device, queries: QueryCache, now: float) -> Listed:
    """All three lists after one another, and which of them are missing."""

    def ask(kind: ProcessKind) -> list[ListedProcess] | None:
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        return queries.get(name, lambda: api.processes(device, kind), now)

    lists = {kind: rows for kind, call in CALLS.items() if (rows := ask(call)) is not None}
    if not lists:
        return Listed(None)
    if "mps" in lists:
        here = {row.pid for row in lists["compute"]} if "compute" in lists else None
        lists["mps"] = [row for row in lists["mps"] if _is_here(row, here)]
    found = tuple(record for kind, rows in lists.items() for record in _records(kind, rows))
    return Listed(found, tuple(kind for kind in CALLS if kind not in lists))


def _is_here(row: ListedProcess, here: set[int] | None) -> bool:
    return row.used_memory != 0 if here is None else row.pid in here


def _records(kind: ProcessList, rows: list[ListedProcess]) -> Iterator[GpuProcess]:
    for row in rows:
        memory = None if row.used_memory == NOT_AVAILABLE else row.used_memory
        yield GpuProcess(row.pid, kind, memory)

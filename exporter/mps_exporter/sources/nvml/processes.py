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

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from mps_exporter.observations import CgroupMemory, GpuProcess, ProcessList
from mps_exporter.sources.nvml.pynvml_api import (
    Device,
    ListedProcess,
    NvmlApi,
    NvmlError,
    ProcessKind,
)
from mps_exporter.sources.nvml.query_cache import QueryCache
from mps_exporter.sources.nvml.readings import SLOW

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


class ProcessReader:
    """Reads the lists of one device.

    Each takes the driver about a millisecond where there are 40 clients. What a process is to MPS
    does not change while it lives, so the MPS list is read again when other processes are in the
    compute list, and after SLOW seconds; with it the graphics list, which has nothing of MPS.
    """

    def __init__(self, api: NvmlApi, device: Device, queries: QueryCache) -> None:
        self._api = api
        self._device = device
        self._queries = queries
        self._pids: frozenset[int] | None = None
        """Those of the compute list when the others were read; None: all were not."""
        self._others: dict[ProcessList, list[ListedProcess]] = {}
        self._good_until = 0.0

    def read(self, now: float) -> Listed:
        """All three lists, and which of them are missing."""
        compute = self._ask("compute", now)
        if compute is None or self._pids != _pids(compute) or now >= self._good_until:
            self._read_others(compute, now)
        lists = dict(self._others)
        if compute is not None:
            lists = {"compute": compute, **lists}
        if not lists:
            return Listed(None)
        if "mps" in lists:
            here = None if compute is None else {row.pid: row for row in compute}
            lists["mps"] = _here(lists["mps"], here)
        found = tuple(record for kind, rows in lists.items() for record in _records(kind, rows))
        return Listed(found, tuple(kind for kind in CALLS if kind not in lists))

    def refresh(self, now: float, ahead: float) -> None:
        """Read the lists that are rarely read, if they are too old in so many seconds."""
        if self._pids is not None and now + ahead >= self._good_until:
            self._read_others(self._ask("compute", now), now)

    def _read_others(self, compute: list[ListedProcess] | None, now: float) -> None:
        others = ((kind, self._ask(kind, now)) for kind in CALLS if kind != "compute")
        self._others = {kind: rows for kind, rows in others if rows is not None}
        complete = compute is not None and len(self._others) == len(CALLS) - 1
        self._pids = _pids(compute) if compute is not None and complete else None
        self._good_until = now + SLOW

    def _ask(self, kind: ProcessList, now: float) -> list[ListedProcess] | None:
        call = CALLS[kind]
        name = f"nvmlDeviceGet{call}RunningProcesses"
        return self._queries.get(name, lambda: self._api.processes(self._device, call), now)


def _pids(rows: list[ListedProcess]) -> frozenset[int]:
    return frozenset(row.pid for row in rows)


def _here(
    rows: list[ListedProcess], compute: Mapping[int, ListedProcess] | None
) -> list[ListedProcess]:
    """Those of the MPS list that are on this GPU, with the memory that the compute list says."""
    if compute is None:
        return [row for row in rows if row.used_memory != 0]
    return [compute[row.pid] for row in rows if row.pid in compute]


def _records(kind: ProcessList, rows: list[ListedProcess]) -> Iterator[GpuProcess]:
    for row in rows:
        memory = None if row.used_memory == NOT_AVAILABLE else row.used_memory
        yield GpuProcess(row.pid, kind, memory)


FUNCTION = "nvmlDeviceGetMemoryLimits_v1"

MAX_GROUPS = 128
"""Each is a call for each GPU."""


def read_cgroup_memory(
    api: NvmlApi, devices: Iterable[Device], root: str, paths: Iterable[str]
) -> Iterator[CgroupMemory]:
    """Give the memory of these control groups on each GPU, where there is any, or a limit.

    Args:
        api: NVML, open.
        devices: GPUs, none of which is divided.
        root: Where cgroup version 2 is mounted.
        paths: Control groups, below it.
    """
    groups = tuple(islice(paths, MAX_GROUPS))
    for device in devices:
        for path in groups:
            with suppress(NvmlError):  # the group is gone, or the driver does not account it
                limits = api.memory_limits(device, f"{root}{path}")
                if limits.used or limits.soft or limits.hard is not None:
                    yield CgroupMemory(
                        path=path,
                        pci_bus_id=api.text("nvmlDeviceGetPciInfo", device).lower(),
                        used_bytes=limits.used,
                        soft_limit_bytes=limits.soft,
                        hard_limit_bytes=limits.hard,
                        hard_unlimited=limits.hard is None,
                    )

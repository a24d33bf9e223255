"""GPU memory of control groups, as the driver keeps it where the kernel's dmem controller does not.

NVIDIA's manual, release 615 (mpsv3-memory-partitioning): without the controller the driver does its
own accounting, which only NVML tells; reading it needs no rights, and MIG is not supported. Not
tried on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from mps_exporter.observations import CgroupMemory
from mps_exporter.sources.nvml.pynvml_api import Device, NvmlApi, NvmlError

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

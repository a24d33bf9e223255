"""GPU memory of control groups: the files of the kernel's dmem controller (Linux 6.14 and later).

    dmem.current    nvidia/00000000:02:00.0/vidmem 536870912
    dmem.min        nvidia/00000000:02:00.0/vidmem 4294967296      the soft limit
    dmem.max        nvidia/00000000:02:00.0/vidmem max             the hard limit: none

(NVIDIA's manual, release 615, and ai-dynamo's guide; not tried on hardware.) A limit may be on a
group itself or on one above it, and a group without these files has those of the nearest above.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from mps_exporter.mps.cgroups import parse_dmem, unified_path, with_parents
from mps_exporter.observations import CgroupMemory

CGROUPS = "/sys/fs/cgroup"

MAX_GROUPS = 1024
MAX_DEPTH = 32
_MAX_BYTES = 1 << 16

_Values = dict[str, int | None]


class MemoryPartitions:
    """The groups of a mount of cgroup version 2. May block.

    Args:
        root: Where it is mounted, in this program's cgroup namespace.
    """

    def __init__(self, root: str = CGROUPS) -> None:
        self._root = root

    def read(self, cgroups: Iterable[str | None]) -> tuple[CgroupMemory, ...]:
        """Give the memory of these groups (texts of /proc/PID/cgroup), and of limited ones above.

        Nothing on a host whose driver does not use the controller: one look at a file.
        """
        if not self._lines("/", "dmem.capacity"):
            return ()
        paths = {path for text in cgroups if (path := unified_path(text)) is not None}
        groups: dict[str, tuple[CgroupMemory, ...]] = {}
        kept: dict[str, None] = {}
        for path in sorted(paths):
            nearest = True
            for level in _levels(path):
                if level not in groups and len(groups) < MAX_GROUPS:
                    groups[level] = tuple(self._group(level))
                found = groups.get(level, ())
                # Above the group itself only limits are of interest.
                if found and (nearest or any(one.limited for one in found)):
                    kept[level] = None
                nearest &= not found
        return tuple(one for level in kept for one in groups[level])

    def _group(self, path: str) -> Iterator[CgroupMemory]:
        used, soft, hard = (
            self._lines(path, name) for name in ("dmem.current", "dmem.min", "dmem.max")
        )
        for pci in sorted({*used, *soft, *hard}):
            yield CgroupMemory(
                path=path,
                pci_bus_id=pci,
                used_bytes=used.get(pci),
                soft_limit_bytes=soft.get(pci),
                hard_limit_bytes=hard.get(pci),
                hard_unlimited=pci in hard and hard[pci] is None,
            )

    def _lines(self, path: str, name: str) -> _Values:
        with suppress(OSError):
            file = os.open(f"{self._root}{path}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return parse_dmem(os.read(file, _MAX_BYTES).decode("utf-8", "replace"))
            finally:
                os.close(file)
        return {}


def _levels(path: str) -> Iterator[str]:
    """Give a group and those above it, but for the root, which has no limits."""
    yield from (one for one in islice(with_parents(path), MAX_DEPTH) if one != "/")

"""What control groups tell: GPU memory, who keeps a process from running, names of containers.

Files of the kernel's dmem controller (Linux 6.14 and later; NVIDIA's manual, release 615; not tried
on hardware), of which a limit may be on a group itself or on one above it:

    dmem.current    nvidia/00000000:02:00.0/vidmem 536870912
    dmem.min        nvidia/00000000:02:00.0/vidmem 4294967296      the soft limit
    dmem.max        nvidia/00000000:02:00.0/vidmem max             the hard limit: none
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from mps_exporter.mps.cgroups import parse_dmem, unified_path, with_parents
from mps_exporter.observations import CgroupMemory, ContainerName

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


_TRACER = re.compile(rb"^TracerPid:\s*([1-9]\d*)$", re.MULTILINE)
_MAX_STATE_BYTES = 1 << 14


def tracer_of(pid: int, state: str, procfs: str) -> str:
    """Give PID and program of the debugger that has stopped a process; "": none is seen."""
    found = _TRACER.search(_read(f"{procfs}/{pid}/status")) if state == "t" else None
    if found is None:
        return ""
    tracer = int(found[1])
    return f"{tracer} ({_read(f'{procfs}/{tracer}/comm').decode('utf-8', 'replace').strip()})"


def frozen_group(cgroup: str | None, root: str = CGROUPS) -> str:
    """Give the folder of the frozen control group that a process is in; "": none is seen.

    Args:
        cgroup: The text of /proc/PID/cgroup.
        root: Where version 2 is mounted, in this program's cgroup namespace.
    """
    path = unified_path(cgroup)
    if not path or b"frozen 1" not in _read(f"{root}{path}/cgroup.events").splitlines():
        return ""
    groups = (f"{root}{one}" for one in with_parents(path))
    return next((one for one in groups if _read(f"{one}/cgroup.freeze").strip() == b"1"), "")


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _MAX_STATE_BYTES)
        finally:
            os.close(file)
    except OSError:
        return b""


MAX_LINKS = 20_000
"""A node has 110 pods by default; links of ended containers stay until their pods are removed."""

_LINK = re.compile(
    r"(?P<pod>[a-z0-9][a-z0-9.-]{0,252})_(?P<namespace>[a-z0-9-]{1,63})_"
    r"(?P<container>[a-z0-9-]{1,63})-(?P<id>[0-9a-f]{64})\.log"
)


class ContainerLogs:
    """The folder of links, listed again when it has changed. May block.

    Args:
        folder: /var/log/containers of the host.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._changed: int | None = None
        self._names: dict[str, tuple[str, str, str]] = {}

    def names(self, container_ids: Iterable[str]) -> tuple[ContainerName, ...]:
        """Name those of the containers ("containerd://<id>") that the kubelet has a link for."""
        self._list()
        if not self._names:
            return ()
        return tuple(
            ContainerName(container_id, *found)
            for container_id in sorted(set(container_ids))
            if (found := self._names.get(container_id.rpartition("/")[2])) is not None
        )

    def _list(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - see processes.py
            if changed == self._changed:
                return
            with os.scandir(self._folder) as entries:
                links = [entry.name for entry, _ in zip(entries, range(MAX_LINKS), strict=False)]
        except OSError:
            self._changed, self._names = None, {}
            return
        self._changed = changed
        self._names = {
            link["id"]: (link["namespace"], link["pod"], link["container"])
            for link in map(_LINK.fullmatch, links)
            if link is not None
        }

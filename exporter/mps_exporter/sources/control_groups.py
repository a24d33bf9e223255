"""Control groups: GPU memory, the freezer, and the names of containers.

Files of the kernel's dmem controller (Linux 6.14 and later; NVIDIA's manual, release 615; not tried
on hardware). The limit of a group may be in the files of a group above it:

    dmem.current    nvidia/00000000:02:00.0/vidmem 536870912
    dmem.min        nvidia/00000000:02:00.0/vidmem 4294967296      the soft limit
    dmem.max        nvidia/00000000:02:00.0/vidmem max             the hard limit: none
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.cgroups import parse_dmem, unified_path, with_parents
from mps_exporter.observations import CgroupMemory, ContainerName

CGROUPS = "/sys/fs/cgroup"

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_TRACER = re.compile(rb"^TracerPid:\s*([1-9]\d*)$", re.MULTILINE)
_LINK = re.compile(
    r"(?P<pod>[a-z0-9][a-z0-9.-]{0,252})_(?P<namespace>[a-z0-9-]{1,63})_"
    r"(?P<container>[a-z0-9-]{1,63})-(?P<id>[0-9a-f]{64})\.log"
)


def memory_partitions(root: str, cgroups: Iterable[str | None]) -> tuple[CgroupMemory, ...]:
    """Return GPU memory of each group or the nearest above, and of groups above with a limit.

    On a host whose driver does not use the dmem controller, one file is read and nothing returned.
    `cgroups` are texts of /proc/PID/cgroup; `root` is where version 2 is mounted.
    """
    if not _dmem(root, "dmem.capacity"):
        return ()
    paths = {path for text in cgroups if (path := unified_path(text)) is not None}
    groups: dict[str, tuple[CgroupMemory, ...]] = {}
    kept: dict[str, None] = {}
    for path in sorted(paths):
        nearest = True
        # The root group has no limits.
        levels = (level for level in with_parents(path) if level != "/")
        for level in islice(levels, policy.MAX_CGROUP_DEPTH):
            if level not in groups and len(groups) < policy.MAX_CGROUPS:
                groups[level] = tuple(_group_memory(root, level))
            found = groups.get(level, ())
            if found and (nearest or any(one.limited for one in found)):
                kept[level] = None
            nearest &= not found
    return tuple(one for level in kept for one in groups[level])


def _group_memory(root: str, path: str) -> Iterator[CgroupMemory]:
    used, soft, hard = (
        _dmem(f"{root}{path}", name) for name in ("dmem.current", "dmem.min", "dmem.max")
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


def _dmem(directory: str, name: str) -> dict[str, int | None]:
    return parse_dmem(_read(f"{directory}/{name}").decode("utf-8", "replace"))


def tracer_of(pid: int, state: str, procfs: str) -> str:
    """Return PID and program of the debugger that has stopped a process; "" if none is seen."""
    found = _TRACER.search(_read(f"{procfs}/{pid}/status")) if state == "t" else None
    if found is None:
        return ""
    tracer = int(found[1])
    return f"{tracer} ({_read(f'{procfs}/{tracer}/comm').decode('utf-8', 'replace').strip()})"


def frozen_group(cgroup: str | None, root: str = CGROUPS) -> str:
    """Return the directory of the frozen control group of a process; "" if none is seen."""
    if b"frozen 1" not in group_file(cgroup, "cgroup.events", root).splitlines():
        return ""
    groups = (f"{root}{one}" for one in with_parents(unified_path(cgroup) or ""))
    return next((one for one in groups if _read(f"{one}/cgroup.freeze").strip() == b"1"), "")


def oom_kills(cgroup: str | None, root: str = CGROUPS) -> int | None:
    """Return how many of a group's processes the host's OOM killer ended; None if unknown."""
    found = _OOM_KILLS.search(group_file(cgroup, "memory.events", root))
    return int(found[1]) if found else None


def group_file(cgroup: str | None, name: str, root: str = CGROUPS) -> bytes:
    """Read a file of a process's control group (version 2); empty if it cannot be read."""
    path = unified_path(cgroup)
    return b"" if path is None else _read(f"{root}{path}/{name}")


def _read(path: str) -> bytes:
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.read(file, policy.MAX_CGROUP_FILE_BYTES)
        finally:
            os.close(file)
    return b""


def container_names(folder: str, ids: Mapping[str, Sequence[int]]) -> tuple[ContainerName, ...]:
    """Return the names of containers ("containerd://<id>" -> PIDs) that the kubelet links to."""
    wanted = {container_id.rpartition("/")[2]: container_id for container_id in ids}
    if not wanted:
        return ()
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, policy.MAX_CONTAINER_LINKS)]
    except OSError:
        return ()
    links = (_LINK.fullmatch(name) for name in names)
    found = [
        ContainerName(one, link["namespace"], link["pod"], link["container"], tuple(ids[one]))
        for link in links
        if link is not None and (one := wanted.get(link["id"])) is not None
    ]
    return tuple(sorted(found, key=lambda one: one.container_id))

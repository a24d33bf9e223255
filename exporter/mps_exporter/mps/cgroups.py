"""Whose process is it? Container, pod, job and unit, read from the paths of its control groups.

No runtime, kubelet or scheduler is queried: the names are in /proc/PID/cgroup, in version 1
("4:memory:/docker/<id>", a line for each hierarchy) and in version 2 ("0::/system.slice/…").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attribution:
    """What a process belongs to, according to its control groups."""

    container_id: str | None = None
    """As kube-state-metrics writes it: "containerd://…", "docker://…", "cri-o://…", "podman://…".
    The identifier is sure; where only it stands in a pod's path (the cgroupfs driver), containerd
    is taken for the runtime."""
    pod_uid: str | None = None
    """Of a static pod: the hash of its manifest, which is what its path carries."""
    slurm_job_id: str | None = None
    systemd_unit: str | None = None
    """The innermost service; without one the innermost scope, else a user's slice. Scopes that are
    containers, and the services of container runtimes, say nothing more and are left out."""


_ID = r"(?P<id>[0-9a-f]{64})"
_RUNTIMES = {
    "docker": "docker",
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
    "libpod": "podman",
    "libpod-payload": "podman",
}
_WORDS = "|".join(_RUNTIMES)
# docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>, kubepods-….slice:cri-containerd:<id>
_NAMED = re.compile(rf"(?:.*\.slice:)?(?P<runtime>{_WORDS})[-:]{_ID}(?:\.scope)?")
_BARE = re.compile(_ID)

_POD = re.compile(
    r"(?:.*-)?pod(?P<uid>[0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?:\.slice)?(?::.*)?"
)
_JOB = re.compile(r"job_(?P<job>\d+)")
_SLURM = re.compile(r"slurm(_.+)?|(.+_)?slurmstepd\.scope")

_UNIT = re.compile(r".+\.(?:service|scope)")
_USER_SLICE = re.compile(r"user-\d+\.slice")
_RUNTIME_SERVICES = frozenset(
    {"containerd.service", "crio.service", "docker.service", "kubelet.service", "podman.service"}
)
_CONTAINER_SCOPE = re.compile(r"(?:libpod|crio)-conmon-.*")


def unified_path(cgroup: str | None) -> str | None:
    """Return the path in the version 2 hierarchy, "0::/…"; None: none, or not below our own root.

    The kernel writes paths outside the reader's cgroup namespace with "..".
    """
    for line in (cgroup or "").split("\n"):
        if line.startswith("0::/"):
            path = line.removeprefix("0::")
            return None if ".." in path.split("/") or "\0" in path else path
    return None


_REGION = re.compile(r"nvidia/([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])/vidmem")
_BYTES = re.compile(r"[0-9]{1,19}")


def parse_dmem(text: str) -> dict[str, int | None]:
    """Read a dmem file: PCI address -> bytes, None for "max"; other regions and lines left out."""
    found: dict[str, int | None] = {}
    for line in text.split("\n"):
        name, _, value = line.partition(" ")
        region = _REGION.fullmatch(name)
        if region is not None and value == "max":
            found[region[1].lower()] = None
        elif region is not None and _BYTES.fullmatch(value):
            found[region[1].lower()] = int(value)
    return found


def with_parents(path: str) -> Iterator[str]:
    """Give the path of a control group, and those of the groups above it, the root's ("/") last.

    (Not by pathlib, which interns each part: see sources/processes.py.)
    """
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]
    yield "/"


@lru_cache(maxsize=2048)
def parse_cgroup(cgroup: str | None) -> Attribution:
    """Read the text of /proc/PID/cgroup; never raises, whatever it holds.

    Results are kept: clients stay where they are from one collection to the next, and reading the
    paths of 384 clients anew was a tenth of a collection's CPU.
    """
    paths = list(_paths(cgroup or ""))
    return Attribution(
        container_id=_first(paths, _container),
        pod_uid=_first(paths, _pod),
        slurm_job_id=_first(paths, _slurm),
        systemd_unit=_first(paths, _unit),
    )


def _paths(cgroup: str) -> Iterator[list[str]]:
    """Return the components of each distinct path: version 2 first, then systemd's hierarchy."""
    lines = [line.split(":", 2) for line in cgroup.split("\n")]
    hierarchies = [(parts[1], parts[2]) for parts in lines if len(parts) == 3]
    hierarchies.sort(key=lambda item: (item[0] != "", item[0] != "name=systemd"))
    for path in dict.fromkeys(path for _, path in hierarchies):
        yield [part for part in path.split("/") if part]


def _first(paths: list[list[str]], read: Callable[[list[str]], T | None]) -> T | None:
    return next((found for path in paths if (found := read(path)) is not None), None)


def _container(path: list[str]) -> str | None:
    """Find the innermost container: nested runtimes (kind, Docker in Docker) show several."""
    for depth in range(len(path) - 1, -1, -1):
        if named := _NAMED.fullmatch(path[depth]):
            return f"{_RUNTIMES[named['runtime']]}://{named['id']}"
        if _BARE.fullmatch(path[depth]):
            return f"{_runtime_of_bare(path[:depth])}://{path[depth]}"
    return None


def _runtime_of_bare(above: list[str]) -> str:
    parent = above[-1] if above else ""
    if parent in {"k8s.io", "default"} or _pod(above) is not None:
        return "containerd"
    return "docker"


def _pod(path: list[str]) -> str | None:
    if not any("kubepods" in part for part in path):
        return None
    for part in reversed(path):
        if found := _POD.fullmatch(part):
            return found["uid"].replace("_", "-")
    return None


def _slurm(path: list[str]) -> str | None:
    for depth, part in enumerate(path):
        job = _JOB.fullmatch(part)
        if job and any(_SLURM.fullmatch(above) for above in path[:depth]):
            return job["job"]
    return None


def _unit(path: list[str]) -> str | None:
    units = [part for part in path if _UNIT.fullmatch(part) and not _is_of_a_runtime(part)]
    services = [unit for unit in units if unit.endswith(".service")]
    slices = [part for part in path if _USER_SLICE.fullmatch(part)]
    for kind in (services, units, slices):
        if kind:
            return kind[-1]
    return None


def _is_of_a_runtime(unit: str) -> bool:
    return (
        unit in _RUNTIME_SERVICES
        or _CONTAINER_SCOPE.fullmatch(unit) is not None
        or _NAMED.fullmatch(unit) is not None
    )

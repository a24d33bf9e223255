"""Container, pod, job and unit of a process, by the paths of its control groups.

No runtime, kubelet or scheduler is queried: the names are in /proc/PID/cgroup, in version 1
("4:memory:/docker/<id>", a line for each hierarchy) and in version 2 ("0::/system.slice/…").
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Attribution:
    """Owner of a process, according to its control groups."""

    container_id: str | None = None
    """ID in the format of kube-state-metrics: "containerd://…", "docker://…", "cri-o://…",
    "podman://…". A pod's path without a runtime (the cgroupfs driver) is assumed to be
    containerd's."""
    pod_uid: str | None = None  # The pod's UID; a static pod's is its manifest's hash.
    slurm_job_id: str | None = None
    systemd_unit: str | None = None
    """The innermost service, else the innermost scope, else a user's slice. Scopes of containers
    and services of container runtimes are skipped."""


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
_USER_MANAGER = re.compile(r"user@\d+\.service")
_USER_SLICE = re.compile(r"user-\d+\.slice")
_OF_RUNTIME = re.compile(
    r"(?:containerd|crio|docker|kubelet|podman)\.service|(?:libpod|crio)-conmon-.*"
    rf"|{_NAMED.pattern}"
)


def unified_path(cgroup: str | None) -> str | None:
    """Return the version 2 path; None if absent, with a NUL, or outside the namespace ("..")."""
    for line in (cgroup or "").split("\n"):
        if line.startswith("0::/"):
            path = line.removeprefix("0::")
            return None if ".." in path.split("/") or "\0" in path else path
    return None


_REGION_BYTES = re.compile(
    r"nvidia/([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])/vidmem (max|[0-9]{1,19})"
)


def parse_dmem(text: str) -> dict[str, int | None]:
    """Parse a dmem file: PCI address -> bytes, None for "max". Other regions are skipped."""
    found = filter(None, map(_REGION_BYTES.fullmatch, text.split("\n")))
    return {line[1].lower(): None if line[2] == "max" else int(line[2]) for line in found}


def with_parents(path: str) -> Iterator[str]:
    """Yield the path of a control group and of the groups above it, the root ("/") last."""
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]
    yield "/"


@lru_cache(maxsize=2048)
def parse_cgroup(cgroup: str | None) -> Attribution:
    """Parse the text of /proc/PID/cgroup. Never raises. Cached: clients rarely move."""
    paths = list(_paths(cgroup or ""))

    def first(read: Callable[[list[str]], str | None]) -> str | None:
        return next((found for path in paths if (found := read(path)) is not None), None)

    return Attribution(first(_container), first(_pod), first(_slurm), first(_unit))


def _paths(cgroup: str) -> Iterator[list[str]]:
    """Yield each path's components up to the first delegated group: users name groups below.

    Version 2 comes first, then systemd's hierarchy.
    """
    lines = [line.split(":", 2) for line in cgroup.split("\n")]
    hierarchies = [(parts[1], parts[2]) for parts in lines if len(parts) == 3]
    hierarchies.sort(key=lambda item: (item[0] != "", item[0] != "name=systemd"))
    for path in dict.fromkeys(path for _, path in hierarchies):
        parts = [part for part in path.split("/") if part]
        ends = (depth for depth, part in enumerate(parts, 1) if _is_delegated(part))
        yield parts[: next(ends, None)]


def _is_delegated(part: str) -> bool:
    return any(one.fullmatch(part) for one in (_USER_MANAGER, _NAMED, _BARE))


def _container(path: list[str]) -> str | None:
    """Return the container: with nested runtimes (kind, Docker in Docker) the outermost."""
    if not path:
        return None
    if named := _NAMED.fullmatch(path[-1]):
        return f"{_RUNTIMES[named['runtime']]}://{named['id']}"
    if _BARE.fullmatch(path[-1]):
        of_containerd = {"k8s.io", "default"}.intersection(path[-2:-1]) or _pod(path[:-1])
        return f"{'containerd' if of_containerd else 'docker'}://{path[-1]}"
    return None


def _pod(path: list[str]) -> str | None:
    if not any("kubepods" in part for part in path):
        return None
    for part in reversed(path):
        if found := _POD.fullmatch(part):
            return found["uid"].replace("_", "-")
    return None


def _slurm(path: list[str]) -> str | None:
    """Return the job below slurmd's group. Other units do not count: users name their groups."""
    for depth, part in enumerate(path):
        if _SLURM.fullmatch(part):
            jobs = (job["job"] for below in path[depth:] if (job := _JOB.fullmatch(below)))
            return next(jobs, None)
        if _UNIT.fullmatch(part):
            break
    return None


def _unit(path: list[str]) -> str | None:
    units = [part for part in path if _UNIT.fullmatch(part) and not _OF_RUNTIME.fullmatch(part)]
    services = [unit for unit in units if unit.endswith(".service")]
    slices = [part for part in path if _USER_SLICE.fullmatch(part)]
    return next((kind[-1] for kind in (services, units, slices) if kind), None)

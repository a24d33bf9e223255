"""What processes set for themselves, and what it means."""

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

PERCENTAGES: Mapping[str, float | None] = {
    "1": 0.01,
    "10": 0.1,
    "25%": 0.25,
    "50,5": 0.5,
    "0x32": 0.5,
    " 70": 0.7,
    "100": 1.0,
    "0": None,
    "-5": None,
    "150": None,
    "half": None,
}
"""Percentage -> share of the SMs; None: CUDA ignores it (measured)."""
MEMORY: Mapping[str, int | None] = {
    "0=2G": 2 << 30,
    "0=300M": 300 << 20,
    "0=3g,0=1G": 1 << 30,
    "0=1T": 1 << 20,
    "9=1G": None,
    "0=1G,GPU-9=1G": None,
}
"""Limit -> bytes on the first GPU that the process sees; None: CUDA ignores it (measured)."""
_ID, _DOCKER = "5f" * 32, "6a" * 32
_POD = "0a1b2c3d-1111-2222-3333-0123456789ab"
_IN_POD = f"kubepods-pod{_POD.replace('-', '_')}.slice/cri-containerd-{_ID}.scope"


class Place(NamedTuple):
    """A control group, and the labels of its processes."""

    cgroup: str = "0::/\n"
    labels: Mapping[str, str] = {}

    def holds_only(self, pid: int) -> bool:
        return self.path.endswith(f"0{pid:x}.scope")

    @property
    def path(self) -> str:
        return self.cgroup.partition("0::")[2].strip()


PLACES = (
    Place(
        "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n",
        {"slurm_job_id": "4711", "systemd_unit": "slurmstepd.scope"},
    ),
    Place(
        f"0::/kubepods.slice/{_IN_POD}\n", {"pod_uid": _POD, "container_id": f"containerd://{_ID}"}
    ),
    Place("0::/user.slice/user-1001.slice/session-3.scope\n", {"systemd_unit": "session-3.scope"}),
    Place(
        f"4:memory:/docker/{_DOCKER}\n1:name=systemd:/docker/{_DOCKER}\n",
        {"container_id": f"docker://{_DOCKER}"},
    ),
    Place("0::/system.slice/train.service\n", {"systemd_unit": "train.service"}),
)


KUBELET_LINK = f"train-0_ml_main-{_ID}.log"
CONTAINER = {
    "container_id": f"containerd://{_ID}",
    "pod_namespace": "ml",
    "pod_name": "train-0",
    "container_name": "main",
}
MEMORY_OF_GROUPS: tuple[Mapping[str, int | None], ...] = (
    {"current": 5 << 30, "min": 1 << 30, "max": 8 << 30},
    {"current": 3 << 30, "min": 0, "max": None},
)
"""Use, guarantee, and limit on each GPU, of the first control groups of PLACES."""


class Settings(NamedTuple):
    """What a process was started with."""

    percentage: str | None = None
    memory: str | None = None
    low_priority: bool = False
    limiter: bool = False
    connections: str | None = None
    place: Place = Place()

    @property
    def ratio(self) -> float | None:
        """Its own share of the SMs; None: no limit."""
        return PERCENTAGES.get(self.percentage or "")

    @property
    def bytes(self) -> int | None:
        """Its own limit on the first GPU that it sees; None: no limit."""
        return MEMORY.get(self.memory or "")

    @property
    def environment(self) -> dict[str, str]:
        values = {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": self.percentage,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": self.memory,
            "CUDA_DEVICE_MAX_CONNECTIONS": self.connections,
            "CUDA_MPS_CLIENT_PRIORITY": "1" if self.low_priority else None,
        }
        return {name: value for name, value in values.items() if value is not None}


NOTHING_SET = Settings()


def _container(pid: int) -> Place:
    """Return the control group of a container with one process."""
    number = f"{pid:064x}"
    return Place(
        f"0::/system.slice/docker-{number}.scope\n", {"container_id": f"docker://{number}"}
    )


def choose(random: Random, pid: int) -> Settings:
    chosen = Settings(
        random.choice((None, None, *PERCENTAGES)),
        random.choice((None, None, None, *MEMORY)),
        random.random() < 0.2,
        random.random() < 0.1,
        place=random.choice((Place(), *PLACES)),
    )
    if random.random() < 0.1:
        chosen = chosen._replace(connections=random.choice(("2", "8", "many")))
    return chosen._replace(place=_container(pid)) if random.random() < 0.3 else chosen

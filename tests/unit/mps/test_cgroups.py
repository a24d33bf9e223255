from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.cgroups import Attribution, parse_cgroup, with_parents

A = "d7dfb4a21fe1703a8537e60d5af248af729315d187b24a538102d14874c8117d"
B = "5eed917563583925ffdbd40a64efb2aaffe58638e57add8becaf460fe74f5b1c"
POD = "a5c1f8d5-1919-434d-add7-4afaafdaef89"
POD_ = POD.replace("-", "_")
USER = "/user.slice/user-1000.slice/user@1000.service"

DOCKER, CONTAINERD, PODMAN = (f"{name}://{A}" for name in ("docker", "containerd", "podman"))


def unit(name: str) -> Attribution:
    return Attribution(systemd_unit=name)


# The simulator has more of them: testing/world/settings.py.
EXAMPLES = {
    "docker, v2": (f"0::/system.slice/docker-{A}.scope\n", Attribution(DOCKER)),
    "docker, rootless: its user names the group": (
        f"0::{USER}/user.slice/docker-{A}.scope\n",
        unit("user@1000.service"),
    ),
    "kubernetes, static pod": (
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-"
        f"pod187bff14cccb94f179e943eacce55bb3.slice/cri-containerd-{A}.scope",
        Attribution(CONTAINERD, pod_uid="187bff14cccb94f179e943eacce55bb3"),
    ),
    "kubernetes, cri-o": (
        "12:cpuset:/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{POD_}.slice/crio-{B}.scope\n11:files:/\n",
        Attribution(f"cri-o://{B}", POD),
    ),
    "kubernetes, cgroupfs": (
        f"4:memory:/kubepods/burstable/pod{POD}/{A}\n",
        Attribution(CONTAINERD, POD),
    ),
    "kubernetes, drivers that disagree": (
        f"11:devices:/system.slice/containerd.service/kubepods-pod{POD_}.slice:cri-containerd:{A}",
        Attribution(CONTAINERD, POD),
    ),
    "kind: a node that is a container": (
        f"0::/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods.slice/"
        "kubelet-kubepods-besteffort.slice/"
        f"kubelet-kubepods-besteffort-pod{POD_}.slice/cri-containerd-{A}.scope\n",
        Attribution(f"docker://{B}"),
    ),
    "seen from a neighbour's cgroup namespace": (
        f"0::/../../kubepods-burstable-pod{POD_}.slice/cri-containerd-{A}.scope\n",
        Attribution(CONTAINERD, POD),
    ),
    "podman": (f"0::/machine.slice/libpod-{A}.scope/container\n", Attribution(PODMAN)),
    "a job that a user names": (f"0::{USER}/slurm/uid_0/job_4242\n", unit("user@1000.service")),
    "a pod that a user names": (f"0::{USER}/kubepods/pod{POD}/{A}\n", unit("user@1000.service")),
    "a service and a job that a container names": (
        f"0::/system.slice/docker-{A}.scope/slurm/job_4242/sshd.service\n",
        Attribution(DOCKER),
    ),
    "a job that a unit names": (
        "0::/system.slice/alice.service/slurm/job_4242\n",
        unit("alice.service"),
    ),
    "a job, seen from a neighbour's cgroup namespace": (
        "0::/../slurmstepd.scope/job_7/step_0/user/task_0\n",
        Attribution(slurm_job_id="7", systemd_unit="slurmstepd.scope"),
    ),
    "podman under a service": (
        f"0::/system.slice/training.service/libpod-payload-{A}\n",
        Attribution(PODMAN, systemd_unit="training.service"),
    ),
    "podman's monitor is not in the container": (
        f"0::/machine.slice/libpod-conmon-{A}.scope\n",
        Attribution(),
    ),
    "slurm, v1": (
        "10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0\n"
        "1:name=systemd:/system.slice/slurmd.service\n",
        Attribution(slurm_job_id="280678", systemd_unit="slurmd.service"),
    ),
    "a directory called job_5 is no slurm job": ("0::/work/job_5/step_1\n", Attribution()),
    "an instance of a template, escaped": (
        "0::/system.slice/system-jupyter.slice/jupyter@a\\x2db.service\n",
        unit("jupyter@a\\x2db.service"),
    ),
    "a user's service": (f"0::{USER}/app.slice/notebook.service\n", unit("user@1000.service")),
    "only a user's slice": (
        "1:name=systemd:/user.slice/user-1000.slice\n",
        unit("user-1000.slice"),
    ),
    "the root": ("0::/\n", Attribution()),
    "not readable": (None, Attribution()),
    "a short identifier is none": ("0::/docker/abc123\n", Attribution()),
    "a pod elsewhere is none": (f"0::/backup/pod{POD}\n", Attribution()),
}


@pytest.mark.parametrize(("cgroup", "expected"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_examples(cgroup: str | None, expected: Attribution) -> None:
    assert parse_cgroup(cgroup) == expected


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    parse_cgroup(text)


@given(st.lists(st.sampled_from(["kubepods", "job_7", "slurm", "a.service", f"pod{POD}", A, ".."])))
def test_the_hierarchy_s_number_and_its_controllers_do_not_matter(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    assert parse_cgroup(f"0::{path}") == parse_cgroup(f"4:memory,cpu:{path}\n7:pids:/\n")


_PART = st.text(st.characters(exclude_characters="/\0\n"), min_size=1).filter(
    lambda part: part not in {".", ".."}
)


@given(st.lists(_PART, max_size=6))
def test_the_groups_above_a_group(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    there = PurePosixPath(path)
    assert list(with_parents(path)) == [str(there), *map(str, there.parents)]

"""Names of containers from the kubelet's links."""

from __future__ import annotations

from pathlib import Path

from mps_exporter.metrics.render import Build, render
from mps_exporter.observations import ContainerName, ProcfsObservation
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.control_groups import container_names
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.recording import Anonymiser
from testing.fake_proc import FakeProc

ID, OTHER = "6" * 64, "7" * 64


def link(folder: Path, name: str) -> None:
    """As the kubelet makes it: to a log that is not mounted here."""
    (folder / name).symlink_to(f"/var/log/pods/nowhere/{name}")


def test_a_container_is_named_by_its_link(tmp_path: Path) -> None:
    link(tmp_path, f"anna-notebook-0_research_jupyter-lab-{ID}.log")
    named = ContainerName(f"containerd://{ID}", "research", "anna-notebook-0", "jupyter-lab")
    assert container_names(str(tmp_path), [f"containerd://{ID}", f"containerd://{OTHER}"]) == (
        named,
    )
    assert container_names(str(tmp_path), [f"cri-o://{ID}"])[0].container_id == f"cri-o://{ID}", (
        "as it was asked"
    )
    assert container_names(str(tmp_path), []) == ()


def test_new_containers_are_found_and_removed_ones_forgotten(tmp_path: Path) -> None:
    assert container_names(str(tmp_path), [f"docker://{ID}"]) == ()
    name = f"a.b_n_c-{ID}.log"
    link(tmp_path, name)
    assert [one.pod for one in container_names(str(tmp_path), [f"docker://{ID}"])] == ["a.b"]
    (tmp_path / name).unlink()
    assert container_names(str(tmp_path), [f"docker://{ID}"]) == ()


def test_what_is_no_link_of_the_kubelet_is_left_out(tmp_path: Path) -> None:
    for name in (
        f"{ID}.log",
        f"a_b-{ID}.log",
        f"a_b_c-{ID[:-1]}.log",
        f"A_b_c-{ID}.log",
        f"a_b_c-{ID}.log.gz",
        f'a"_b_c-{ID}.log',
    ):
        link(tmp_path, name)
    assert container_names(str(tmp_path), [f"containerd://{ID}"]) == ()


def test_without_the_folder_there_are_no_names(tmp_path: Path) -> None:
    folder = tmp_path / "containers"
    assert container_names(str(folder), [f"containerd://{ID}"]) == ()
    folder.mkdir()
    link(folder, f"a_b_c-{ID}.log")
    assert [one.pod for one in container_names(str(folder), [f"containerd://{ID}"])] == ["a"]
    (folder / f"a_b_c-{ID}.log").unlink()
    folder.rmdir()
    assert container_names(str(folder), [f"containerd://{ID}"]) == ()


def test_the_containers_of_processes_are_looked_up(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    uid = "d52bd3cb_df62_4cb5_b293_7009055bcaff"
    proc.add(
        4711,
        argv=["python"],
        cgroup=f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{ID}.scope\n",
    )
    proc.add(4712, argv=["python"])
    folder = tmp_path / "containers"
    folder.mkdir()
    link(folder, f"train_batch_worker-{ID}.log")
    link(folder, f"other_batch_worker-{OTHER}.log")
    found = DaemonDiscovery(str(proc.root), container_logs=str(folder)).observe([4711, 4712])
    assert found.containers == (ContainerName(f"containerd://{ID}", "batch", "train", "worker"),)


NAMED = ContainerName(f"containerd://{ID}", "batch", "train", "worker")


def test_a_name_is_a_metric() -> None:
    families = render(Snapshot(taken_at=0.0, containers=(NAMED,)), Build("0", "", "3"))
    (family,) = [one for one in families if one.spec.name == "mps_container_info"]
    assert family.spec.labels == ("container_id", "pod_namespace", "pod_name", "container_name")
    ((values, value, *_),) = family.samples
    assert (tuple(values), value) == ((f"containerd://{ID}", "batch", "train", "worker"), 1.0)


def test_an_anonymised_recording_names_no_pod() -> None:
    observation = Anonymiser().observation(ProcfsObservation(at=0.0, containers=(NAMED,)))
    assert isinstance(observation, ProcfsObservation)
    assert observation.containers == ()

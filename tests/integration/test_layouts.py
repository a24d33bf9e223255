"""Five control daemons in the five common layouts on one host, and the real exporter.

The host is made of namespaces, the daemons are stand-ins, and everything else is real: processes,
locks, mounts, and the exporter with its own command line.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from testing.own_host import Daemon, in_container, own_host
from testing.page import Page

CLAIM = "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/claim-7f3a"

CHROOT = """
root=/run/driver-root
mkdir -p $root /run/nvidia/mps && mount -t tmpfs tmpfs $root || exit
for path in /*; do
  if [ -L "$path" ]; then
    cp -P "$path" $root
  elif [ -d "$path" ]; then
    mkdir $root"$path" && mount --rbind "$path" $root"$path" || exit
  fi
done
mkdir -p $root/mps && mount --bind /run/nvidia/mps $root/mps && exec chroot $root "$@"
"""
"""The device plugin's layout: the driver's root with /mps in it, which is /run/nvidia/mps."""


@dataclass
class Field:
    """Five daemons by layout, each with a client."""

    daemons: dict[str, Daemon]
    clients: dict[str, int]

    def names(self, metrics: Page) -> dict[str, str]:
        """Return layout -> the label of its daemon in these metrics."""
        pids = {str(daemon.pid): layout for layout, daemon in self.daemons.items()}
        return {
            pids[sample.labels["pid"]]: sample.labels["daemon"]
            for sample in metrics["mps_control_info"]
        }


@pytest.fixture(scope="module")
def seen() -> Iterator[tuple[Field, Page]]:
    """A scrape of five healthy daemons."""
    with own_host() as host:
        box = ["unshare", "--pid", "--fork", "--mount", "--mount-proc"]
        plugin = ["unshare", "--mount", "sh", "-c", CHROOT, "sh"]
        mounts = {"/tmp/nvidia-mps": f"{CLAIM}/pipe", "/var/log/nvidia-mps": f"{CLAIM}/log"}
        in_plugin = ("/mps/nvidia.com/gpu/pipe", "/mps/nvidia.com/gpu/log")
        daemons = {
            "plain": host.daemon(),
            "slurm": host.daemon("/tmp/nvidia-mps_0", "/tmp/nvidia-log_0"),
            "plugin": host.daemon(*in_plugin, inside=plugin),
            "claim": host.daemon(inside=in_container(mounts)),
            "boxed": host.daemon("/tmp/boxed-mps", "/tmp/boxed-log", inside=box, own_pids=True),
        }
        clients = {
            layout: host.client(
                daemon, 1002, environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
            )
            for percent, (layout, daemon) in zip((10, 20, 30, 40, 50), daemons.items(), strict=True)
        }
        host.serve()
        yield Field(daemons, clients), host.scrape()


def test_all_five_are_found_and_answer(seen: tuple[Field, Page]) -> None:
    field, metrics = seen
    names = field.names(metrics)
    assert names.keys() == field.daemons.keys()
    assert len(set(names.values())) == 5
    own_names = {
        "plain": "/tmp/nvidia-mps",
        "slurm": "/tmp/nvidia-mps_0",
        "plugin": "/mps/nvidia.com/gpu/pipe",
        "boxed": "/tmp/boxed-mps",
    }
    assert own_names.items() <= names.items()
    # The claim's daemon has the name of the plain one; its own directory tells them apart.
    assert names["claim"].endswith("/tmp/nvidia-mps")
    for name in names.values():
        assert metrics.value("mps_control_up", daemon=name) == 1
        assert metrics.value("mps_control_state", daemon=name, mps_control_state="answering") == 1
        assert metrics.value("mps_control_servers", daemon=name) == 1
        assert metrics.value("mps_control_log_readable", daemon=name, log="control") == 1
        assert metrics.value("mps_control_log_readable", daemon=name, log="server") == 1


def test_each_has_its_own_client_with_its_own_limit(seen: tuple[Field, Page]) -> None:
    field, metrics = seen
    names = field.names(metrics)
    expected = {"plain": 0.1, "slurm": 0.2, "plugin": 0.3, "claim": 0.4}
    for layout, ratio in expected.items():
        pid = str(field.clients[layout])
        labels = metrics.labels("mps_client_info", pid=pid)
        assert labels["daemon"] == names[layout]
        assert (labels["uid"], labels["command"]) == ("1002", "train")
        assert labels["limit_source"] == "client"
        assert metrics.value("mps_client_active_thread_ratio", pid=pid) == pytest.approx(ratio)
    # Its daemon reports every client as PID 0: the process is unknown.
    other_processes = [
        sample.labels
        for sample in metrics["mps_client_info"]
        if sample.labels["daemon"] == names["boxed"]
    ]
    assert [labels["pid"] for labels in other_processes] == ["0"]

"""Limits that are ignored, looser than the daemon's defaults, or held several times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_daemon
from mps_exporter.snapshot import Client, ControlDaemon

_ROUNDING = 0.005
"""Shares that differ by less are the same: thirds are written as 33."""

NO_EFFECT = "a-limit-has-no-effect"


def _all_clients(daemon: ControlDaemon) -> list[Client]:
    return [client for server in daemon.servers for client in server.clients]


class Excess(NamedTuple):
    """More than the daemon gives to one process by default."""

    of: str
    """SMs (as a share of all) or GPU memory (in bytes)."""
    own: float | None
    """None: all there is."""
    default: float

    @property
    def text(self) -> str:
        """Both values, for a sentence."""
        default = self._value(self.default)
        return f"{self._value(self.own)} of {self.of}, where the default is {default}"

    def _value(self, value: float | None) -> str:
        if value is None:
            return "any amount"
        if self.of == _SMS:
            return humanize.percent(min(value, 1.0), exact=True)
        return humanize.memory(int(value))


_SMS, _MEMORY = "the SMs", "GPU memory"


@of_daemon(
    "warning",
    "A client has more than its daemon allows by default",
    "A running client keeps the limits that its server had when it connected. One that started "
    "before its daemon was configured has none, without a message.",
    page=NO_EFFECT,
)
def limit_looser_than_default(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    those = [
        f"{host.client(one)} may use {excess.text}"
        for one in _all_clients(daemon)
        if (excess := looser(one, daemon)) is not None
    ]
    if those:
        yield Case(
            f"{humanize.capitalize(humanize.join_some(those))}.",
            "Restart it, if the default is meant for it. A server that was started before "
            "keeps its own limits for new clients, too, until all of its clients have exited. "
            "Configure a daemon before programs can start.",
        )


def looser(client: Client, daemon: ControlDaemon) -> Excess | None:
    """What a client has more of than one that starts under the defaults of now."""
    share, ratio = daemon.default_active_thread_ratio, client.active_thread_ratio
    if share is not None and ratio is not None and ratio > share + _ROUNDING:
        return Excess(_SMS, ratio, share)
    if client.limit_source == "unknown":
        return None
    for uuid, limit in daemon.default_pinned_memory_limit_bytes.items():
        own = client.memory_limit_bytes.get(uuid)
        if uuid in client.contexts and (own is None or own > limit):
            return Excess(_MEMORY, own, limit)
    return None


@of_daemon(
    "warning",
    "An active thread percentage is ignored",
    "CUDA silently ignores a CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that is 0, negative, above 100 "
    "or not a number: the process may use all SMs.",
    page=NO_EFFECT,
)
def percentage_ignored(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    ignored = [(one, one.percentage_ignored) for one in _all_clients(daemon)]
    if those := _with_values(host, ignored):
        yield Case(
            f"CUDA ignores the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of {those}.",
            "Set a number above 0 and up to 100, and restart the process.",
        )


@of_daemon(
    "warning",
    "A memory limit is ignored",
    "One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names no GPU that the process sees; CUDA "
    "then silently ignores all of them. An ordinal counts in the process's own "
    "CUDA_VISIBLE_DEVICES, not among the GPUs of the host.",
    page=NO_EFFECT,
)
def memory_limit_ignored(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    ignored = [(one, one.memory_limit_ignored) for one in _all_clients(daemon)]
    if those := _with_values(host, ignored):
        yield Case(
            f"CUDA ignores the CUDA_MPS_PINNED_DEVICE_MEM_LIMIT of {those}.",
            "Name GPUs by UUID (nvidia-smi -L), and only those that the process sees: its "
            "CUDA_VISIBLE_DEVICES. Then restart the process.",
        )


def _with_values(host: HostFacts, ignored: Sequence[tuple[Client, str | None]]) -> str:
    return humanize.join_some(
        [
            f"{host.client(one)} with {humanize.printable(repr(value))}"
            for one, value in ignored
            if value is not None
        ]
    )


_PARTITION_FAULTS = {
    "unknown": "which its daemon does not have, or no longer",
    "other_server": "which belongs to another server",
    "other_gpu": "which is on another GPU than the process",
}


@of_daemon(
    "warning",
    "A client is in an SM partition that was not meant for it",
    "A process chooses its SM partition itself (CUDA_MPS_SM_PARTITION), and MPS does not check "
    "the choice: it takes SMs from the clients of that partition, or fails as it starts.",
    page="cuda-error-invalid-resource-configuration",
)
def sm_partition_mismatch(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    stray = [
        f"{host.client(one)} names {humanize.printable(one.sm_partition or '', 60)}, "
        + _PARTITION_FAULTS.get(one.sm_partition_fault, "")
        for one in (_all_clients(daemon) if daemon.partitioning is not None else ())
        if one.sm_partition_fault is not None
    ]
    if stray:
        yield Case(
            f"{humanize.count(len(stray), 'client')} with a wrong CUDA_MPS_SM_PARTITION: "
            f"{humanize.join_some(stray)}.",
            "Start the process with the ID that the daemon lists for the partition that was "
            "meant: nvidia-cuda-mps-control sm-partition list --all (MPS v3) or echo lspart | "
            "nvidia-cuda-mps-control.",
        )


@of_daemon(
    "info",
    "A job or pod may use more than one share",
    "MPS limits each process. Several processes of one job or pod have that much each.",
    page="one-pod-or-job-gets-more-than-its-share",
)
def share_exceeded(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    those = list(_exceeding(daemon))
    if those:
        yield Case(
            f"{humanize.capitalize(humanize.join_some(those))}.",
            "Divide the limits by the number of processes, in the environment of the job "
            "(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT).",
        )


def _exceeding(daemon: ControlDaemon) -> Iterator[str]:
    """The jobs and pods whose processes may together use more than one process may."""
    groups: dict[tuple[str, str], list[Client]] = {}
    for client in _all_clients(daemon):
        if client.slurm_job_id is not None:
            groups.setdefault(("Slurm job", client.slurm_job_id), []).append(client)
        elif client.pod_uid is not None:
            groups.setdefault(("pod", client.pod_uid), []).append(client)
    for (kind, name), members in groups.items():
        for uuid in sorted({uuid for one in members for uuid in one.contexts}):
            here = [one for one in members if uuid in one.contexts]
            if (excess := _above_share(daemon, here, uuid)) is not None:
                yield (
                    f"{kind} {humanize.printable(name)} has {len(here)} processes, which may "
                    f"together use {excess.text} for one process"
                )
                break


def _above_share(daemon: ControlDaemon, here: Sequence[Client], uuid: str) -> Excess | None:
    share = daemon.default_active_thread_ratio
    ratios = [one.active_thread_ratio for one in here if one.active_thread_ratio is not None]
    if share is not None and share < 1 and sum(ratios) > share + _ROUNDING and len(ratios) > 1:
        return Excess(_SMS, sum(ratios), share)
    limit = daemon.default_pinned_memory_limit_bytes.get(uuid)
    limits = [one.memory_limit_bytes[uuid] for one in here if uuid in one.memory_limit_bytes]
    if limit is not None and sum(limits) > limit and len(limits) > 1:
        return Excess(_MEMORY, sum(limits), limit)
    return None

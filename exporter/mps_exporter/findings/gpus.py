"""What is not as it should be on a GPU: its mode, its limits, its age, and what MPS would gain."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_gpu
from mps_exporter.findings.safe_commands import Action
from mps_exporter.snapshot import Gpu

VOLTA = (7, 0)
"""The first compute capability of today's MPS."""

IDLE_SM_ACTIVITY = 0.3
BUSY_UTILIZATION = 0.9
MOST_ALLOWED = 0.75
"""Limits that add up to more leave little idle."""
USED_UP = 0.9
"""Of what the limits allow, so much active counts as all of it: the limits are what holds."""


@of_gpu(
    "info",
    "A GPU with MPS admits other processes",
    "In exclusive-process mode only the MPS server may use the GPU, so nothing can bypass MPS "
    "by accident.",
    alert="MpsNotExclusiveMode",
)
def not_exclusive_mode(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    if gpu.served_by and gpu.observation.compute_mode == "default":
        command = f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS"
        effect = "only MPS may use the GPU then"
        action = Action(command, "root, while the GPU is idle", effect)
        yield Case(
            f"The compute mode of GPU {gpu.index} is default.",
            f"While the GPU is idle, run {command} (not if two daemons share it).",
            [action] if gpu.index.isdecimal() else (),
        )


@of_gpu(
    "info",
    "MPS would help here",
    "Several processes take turns on a GPU whose SMs are mostly idle: with MPS they would run "
    "at the same time.",
    alert="MpsWouldHelp",
    page="no-speed-up-with-mps",
)
def mps_would_help(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    utilization, activity = gpu.reading("gpu_utilization"), gpu.reading("sm_activity")
    if gpu.served_by or len(gpu.direct_pids) < 2 or utilization is None or activity is None:
        return
    if utilization > BUSY_UTILIZATION and activity < IDLE_SM_ACTIVITY:
        yield Case(
            f"{len(gpu.direct_pids)} processes take turns on GPU {gpu.index}: its utilization "
            f"is {humanize.percent(utilization)}, but only {humanize.percent(activity)} of its "
            "SMs are active.",
            "Start a control daemon (nvidia-cuda-mps-control -d), restart the processes with "
            "its environment, and compare: what it gains depends on the programs.",
        )


@of_gpu(
    "info",
    "Limits leave a GPU partly idle",
    "An active thread percentage is a cap, also while no other program needs the SMs. Here the "
    "clients use all that their limits allow, and the rest of the GPU is idle.",
    page="a-percentage-slows-programs-down-while-the-gpu-is-idle",
)
def limit_idles_gpu(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    allowed, activity = gpu.sm_committed_ratio, gpu.reading("sm_activity")
    if not gpu.served_by or gpu.direct_pids or not allowed or activity is None:
        return
    if allowed <= MOST_ALLOWED and activity >= USED_UP * allowed:
        yield Case(
            f"{humanize.percent(activity)} of the SMs of GPU {gpu.index} are active: as many "
            f"as the limits of its clients allow together ({humanize.percent(allowed)}).",
            "Raise the percentages: they reserve nothing, and clients share what is there. "
            "Measure the programs with and without.",
        )


@of_gpu(
    "info",
    "Memory limits add up to more than the GPU has",
    "A memory limit reserves nothing: an allocation below its limit fails when the others have "
    "taken the memory.",
    page="one-pod-or-job-gets-more-than-its-share",
)
def memory_overcommitted(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    committed, total = gpu.client_memory_committed_bytes, gpu.reading("memory_total")
    if committed is not None and total is not None and committed > total:
        yield Case(
            f"The memory limits of the clients on GPU {gpu.index} add up to "
            f"{humanize.memory(committed)}; it has {humanize.memory(total)}.",
            "Lower the limits, unless it is known that the programs do not need all of it at once.",
        )


@of_gpu(
    "info",
    "A GPU is too old for current MPS",
    "Before Volta clients share one address space, have no limits, and a fault of one ends "
    "all of them.",
)
def unfit_gpu(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    if gpu.served_by and (gpu.observation.compute_capability or VOLTA) < VOLTA:
        model = humanize.printable(gpu.observation.name or "its model")
        text = f"GPU {gpu.index} ({model}) is older than Volta."
        yield Case(text, "Use a Volta or later GPU.")

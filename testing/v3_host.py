"""A recording of a synthetic host with an MPS v3 daemon, whose replies are those of fake_mps_v3."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mps_exporter.mps.protocol_v3 import V2_PARTITIONS
from mps_exporter.mps.tool_commands import PROBE
from mps_exporter.observations import (
    CgroupMemory,
    ControlObservation,
    DaemonFacts,
    Exchange,
    GpuObservation,
    GpuProcess,
    NvmlObservation,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import RecordingHeader
from mps_exporter.sources.child_process import ChildRights, ProcessResult
from mps_exporter.sources.control_tool import ControlTool
from mps_exporter.sources.recording import Recording
from testing import fake_mps_v3 as published
from testing.fake_mps_control import V3_USAGE

PIPE = "/run/nvidia-mps"
GPU = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
DAEMON, SERVER, TRAIN, EVAL = 48100, 48201, 51023, 51087
START = 1_795_000_000.0
LARGE = f"{GPU}/Kp8AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def process(pid: int, name: str, **environment: str) -> ProcessFacts:
    """A process of user 1000."""
    return ProcessFacts(
        pid,
        START - 60,
        uid=1000,
        user="lovelace",
        name=name,
        state="S",
        namespace_pids=(pid,),
        cgroup="0::/user.slice/user-1000.slice\n",
        mps_environment=environment,
    )


def facts(**more: Any) -> DaemonFacts:
    """The daemon, started with -p 3."""
    control = process(DAEMON, "nvidia-cuda-mps-control")
    server = process(SERVER, "nvidia-cuda-mps-server")
    found: dict[str, Any] = {
        "protocol": "3",
        "process": control,
        "servers": (server,),
        "owner_uid": 1000,
        "lock_holder_pid": DAEMON,
        "lock_tested": True,
        **more,
    }
    return DaemonFacts(PIPE, "/var/log/nvidia-mps", **found)


def processes() -> dict[int, ProcessFacts]:
    found = [
        process(SERVER, "nvidia-cuda-mps-server"),
        process(TRAIN, "python", CUDA_MPS_SM_PARTITION=LARGE),
        process(EVAL, "python", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10"),
    ]
    return {one.pid: one for one in found}


def gpu() -> GpuObservation:
    """Its GPU, with the SMs that the manual's host has."""
    return GpuObservation(
        0,
        GPU,
        name="NVIDIA RTX PRO 6000",
        pci_bus_id="00000000:02:00.0",
        compute_capability=(12, 0),
        sm_count=188,
        compute_mode="default",
        processes=(
            GpuProcess(SERVER, "compute", 100 << 20),
            *(
                GpuProcess(pid, kind, 1 << 30)
                for pid in (TRAIN, EVAL)
                for kind in ("compute", "mps")
            ),
        ),
    )


def asked(
    replies: Mapping[str, str], daemon: DaemonFacts, at: float = START
) -> tuple[ControlObservation, ControlObservation]:
    """Return a probe and a reconciliation by the control tool, of a daemon with these replies."""

    async def run(
        argv: Sequence[str],
        stdin: bytes,
        environment: Mapping[str, str],
        timeout_seconds: float,
        rights: ChildRights,
    ) -> ProcessResult:
        del stdin, environment, timeout_seconds, rights
        text = replies.get(" ".join(argv[1:]))
        if text is None:
            return ProcessResult(1, stderr=V3_USAGE.encode())
        return ProcessResult(0, text.encode("utf-8", "surrogateescape"))

    async def ask() -> tuple[ControlObservation, ControlObservation]:
        tool = ControlTool("tool", 2.0, 5.0, run=run, now=lambda: at)
        return await tool.probe(daemon, 10.0), await tool.reconcile(daemon, (), 10.0)

    with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
        return thread.submit(asyncio.run, ask()).result()


GROUP = "/user.slice/user-1000.slice"
MEMORY = (
    CgroupMemory(
        GROUP,
        published.DMEM_GPU,
        published.DMEM_USED,
        published.DMEM_SOFT_LIMIT,
        published.DMEM_HARD_LIMIT,
    ),
)
"""The manual's limits, on the group of the clients."""


def recording(
    replies: Mapping[str, str] = published.MANUAL,
    found: Mapping[int, ProcessFacts] | None = None,
    daemon: DaemonFacts | None = None,
    more: Sequence[Observation] = (),
) -> Recording:
    """Return a recording of one collection of that host."""
    daemon = facts() if daemon is None else daemon
    known = processes() if found is None else found
    header = RecordingHeader("made up", "", "615.71", "2026-11-22", START, "", anonymised=False)
    observations: list[Observation] = [
        ProcfsObservation(START, (daemon,), dict(known), cgroup_memory=MEMORY),
        NvmlObservation(START, Outcome.OK, driver_version="615.71.09", gpus=(gpu(),)),
        *asked(replies, daemon),
        *more,
    ]
    return Recording(header, tuple(observations), START + 1.0)


def v2_host(reply: str) -> Recording:
    """A v2 daemon with static partitioning and this reply to lspart; unreadable environments."""
    made = recording(found={}, daemon=facts(protocol=None, static_partitioning=True))
    exchanges = (
        Exchange(PROBE, Outcome.OK, f"{SERVER}\n100.0\n", return_code=0),
        Exchange((V2_PARTITIONS,), Outcome.OK, reply, return_code=0),
    )
    probe = ControlObservation(START, PIPE, "probe", Outcome.OK, exchanges)
    return replace(made, observations=(*made.observations[:2], probe))

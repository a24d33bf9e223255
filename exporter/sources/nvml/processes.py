"""The three process lists of a device, without their traps.

* An MPS client shows in the compute list and in the MPS list. With a server on two GPUs, the MPS
  list of one GPU may also hold clients of the other, with 0 bytes: what the compute list does not
  have is not on this GPU.
* An MPS server is an ordinary compute process here; telling it from others needs /proc.
* Memory may be "not available" (all bits set); that is None, not 16 EiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from exporter.observations import GpuProcess
from exporter.sources.nvml.answers import Answers
from exporter.sources.nvml.library import Device, Library, ListedProcess, ProcessKind

NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
"""What NVML writes where it does not know the memory."""

RecordKind = Literal["compute", "mps", "graphics"]


def read_processes(
    library: Library, device: Device, answers: Answers
) -> tuple[GpuProcess, ...] | None:
    """All three lists after one another; None when no list could be read."""

    def ask(kind: ProcessKind) -> list[ListedProcess] | None:
        return answers.ask(
            f"nvmlDeviceGet{kind}RunningProcesses", lambda: library.processes(device, kind)
        )

    compute, mps, graphics = ask("Compute"), ask("MPSCompute"), ask("Graphics")
    if compute is None and mps is None and graphics is None:
        return None
    if mps is not None:
        here = None if compute is None else {row.pid for row in compute}
        mps = [row for row in mps if _is_here(row, here)]
    lists: tuple[tuple[RecordKind, list[ListedProcess] | None], ...] = (
        ("compute", compute),
        ("mps", mps),
        ("graphics", graphics),
    )
    return tuple(record for kind, rows in lists for record in _records(kind, rows or []))


def _is_here(row: ListedProcess, here: set[int] | None) -> bool:
    return row.used_memory != 0 if here is None else row.pid in here


def _records(kind: RecordKind, rows: list[ListedProcess]) -> Iterator[GpuProcess]:
    for row in rows:
        memory = None if row.used_memory == NOT_AVAILABLE else row.used_memory
        yield GpuProcess(row.pid, kind, memory)

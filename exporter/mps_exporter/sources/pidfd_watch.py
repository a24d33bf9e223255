"""Notices the end of processes when it happens, by a file descriptor that the kernel gives of each.

pidfd_open(2) needs no rights and exists since Linux 5.3. A descriptor stays with its process, also
when the number is given to another one, and becomes readable when the process ends. Processes for
which there is none (an older kernel, a seccomp filter, more processes than MAX_DESCRIPTORS, a
procfs of another PID namespace) are left to the caller, who must look at them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mps_exporter.observations import ProcfsObservation
from mps_exporter.sources.processes import shows_own_pids

MAX_DESCRIPTORS = 128
"""At most so many processes have a descriptor: a daemon has one, its server, and the clients in its
queue. It is an eighth of the usual limit for a whole program, 1024."""


class ProcessWatch:
    """Watches processes by descriptor, in the running event loop.

    Args:
        open_process: PID -> descriptor; None where the kernel or the procfs has none.
        now: Unix time.
    """

    def __init__(
        self, open_process: Callable[[int], int] | None, *, now: Callable[[], float] = time.time
    ) -> None:
        self._open = open_process
        self._now = now
        self._most = MAX_DESCRIPTORS
        self._descriptors: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._left: set[int] = set()
        self._news: dict[int, float] = {}

    def watch_only(self, pids: Iterable[int]) -> tuple[set[int], set[int]]:
        """Watch these processes and no others; the first ones count if there are too many.

        Returns:
            Those that are watched from now on, and those that have no descriptor.
        """
        wanted = dict.fromkeys(pid for pid in pids if pid > 0)
        for pid in self._descriptors.keys() - wanted:
            self._close(pid)
        self._ended = {pid: at for pid, at in self._ended.items() if pid in wanted}
        self._left &= wanted.keys()
        new = set()
        for pid in wanted:
            if pid in self._descriptors or pid in self._ended or pid in self._left:
                continue
            if self._add(pid):
                new.add(pid)
        return new, set(self._left)

    def ended(self) -> dict[int, float]:
        """Give those that ended since the last call, and when (Unix time)."""
        changes, self._news = self._news, {}
        return changes

    def close(self) -> None:
        for pid in list(self._descriptors):
            self._close(pid)

    def _add(self, pid: int) -> bool:
        if self._open is None or len(self._descriptors) >= self._most:
            self._left.add(pid)
            return False
        try:
            descriptor = self._open(pid)
        except ProcessLookupError:
            self._end(pid)
            return True
        except OSError:
            self._left.add(pid)
            return False
        self._descriptors[pid] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._readable, pid)
        return True

    def _readable(self, pid: int) -> None:
        self._close(pid)
        self._end(pid)

    def _end(self, pid: int) -> None:
        self._ended[pid] = self._news[pid] = self._now()

    def _close(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def opener(procfs: str) -> Callable[[int], int] | None:
    """Give pidfd_open where it exists and the procfs numbers processes as it does."""
    return getattr(os, "pidfd_open", None) if shows_own_pids(procfs) else None


def at_each_end(
    observation: ProcfsObservation, ended: Mapping[int, float]
) -> list[ProcfsObservation]:
    """Give what is known of each moment at which a process ended, and the observation itself."""
    moments = sorted({at for at in ended.values() if at < observation.at})
    return [*(_as_of(observation, at, ended) for at in moments), observation]


def _as_of(
    observation: ProcfsObservation, at: float, ended: Mapping[int, float]
) -> ProcfsObservation:
    """Leave out what was not so yet, and what may not have been."""
    return replace(
        observation,
        at=at,
        processes={
            pid: facts for pid, facts in observation.processes.items() if ended.get(pid, at) <= at
        },
        gone=tuple(pid for pid in observation.gone if pid in ended and ended[pid] <= at),
    )

"""Evidence for the cause of a GPU fault: the kernel log, and the address ranges of clients.

Reading /dev/kmsg needs CAP_SYSLOG where kernel.dmesg_restrict is 1; a container needs the device.
The format is documented in the kernel's Documentation/ABI/testing/dev-kmsg. Each read returns one
record:

    4,1216,8412345678,-;NVRM: Xid (PCI:0000:00:06): 31, pid=1486, name=train.py, channel ...

priority and facility, sequence number, microseconds since the boot, flags; then the text.
"""

from __future__ import annotations

import errno
import os
import re
import select
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import cast

from mps_exporter.observations import AddressRanges, KernelLine, KernelObservation
from mps_exporter.sources import policy
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.processes import parse_status

MAX_RECORD_BYTES = 8192
"""Size of the buffer for one record (or for the beginning of /proc/PID/status)."""

MIN_RANGE_BYTES = 2 << 20
"""Size of the range that each context reserves; guard pages of threads are smaller."""

_KERNEL_FACILITY = 0
_RECORD = re.compile(rb"(\d+),\d+,(\d+),[^;]*;(NVRM: Xid [^\n]*)")
_NAME = re.compile(r"(?<=, name=)(?:.*(?=, (?:channel|Ch) )|.*)")
_RESERVED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ---p ", re.MULTILINE)


def parse_record(record: bytes) -> tuple[float, str] | None:
    """Return when the kernel wrote an Xid line (seconds since the boot) and the line.

    Return None for other records. A program can write into the kernel log, but with a facility
    other than the kernel's.
    """
    found = _RECORD.match(record)
    if found is None or int(found[1]) >> 3 != _KERNEL_FACILITY:
        return None
    return int(found[2]) / 1e6, _NAME.sub("-", found[3].decode("utf-8", "replace"), count=1)


class KernelLogReader:
    """Reads Xid lines on a thread of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: SimpleQueue[KernelLine] = SimpleQueue()
        self._closed = threading.Event()
        self.error = ""
        """Reason for which the kernel log is not read, for a person."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.error = f"{path} cannot be opened: {error.strerror}"
            return
        try:
            threading.Thread(target=self._follow, name="kernel-log", daemon=True).start()
        except RuntimeError as error:  # no thread is left
            os.close(self._file)
            self.error = f"{path} cannot be read: {error}"

    def new_lines(self) -> tuple[KernelLine, ...]:
        found = []
        with suppress(Empty):
            while True:
                found.append(self._lines.get_nowait())
        return tuple(found)

    def close(self) -> None:
        self._closed.set()

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        history = True
        try:
            while not self._closed.is_set():
                record = self._read()
                if record is not None:
                    self._add(record, history=history)
                    continue
                history = False
                poll.poll(1000 * policy.KERNEL_LOG_POLL_TIMEOUT_SECONDS)
        except OSError as error:
            self.error = f"{self._path} cannot be read: {error.strerror}"
        finally:
            os.close(self._file)

    def _read(self) -> bytes | None:
        while True:
            try:
                record = os.read(self._file, MAX_RECORD_BYTES)
            except BlockingIOError:
                return None
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            if not record:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            return record

    def _add(self, record: bytes, *, history: bool) -> None:
        found = parse_record(record)
        if found is None or self._lines.qsize() >= policy.MAX_KERNEL_LINES:
            return
        # The kernel's clock is not adjusted: after weeks it differs from the host's by seconds.
        age = time.monotonic() - found[0] if history else 0.0
        if age <= policy.MAX_KERNEL_HISTORY_SECONDS:
            self._lines.put(KernelLine(time.time() - max(0.0, age), found[1]))


class ClientMemory:
    """Reads the address ranges that processes reserved, without waiting for a hanging read."""

    def __init__(self, procfs: str) -> None:
        self._procfs = procfs
        self._calls = BlockingCalls[AddressRanges | None]()
        self._requested: dict[int, int | None] = {}
        self._spent: dict[int, int] = defaultdict(int)
        """Size of the maps that were read of each user's processes since `_spent_since`."""
        self._spent_since = float("-inf")

    def request(self, clients: Mapping[int, int | None]) -> None:
        """Begin to read the ranges of these processes; see Host.read_kernel()."""
        now = time.monotonic()
        if now - self._spent_since >= policy.USER_MAPS_INTERVAL_SECONDS:
            self._spent.clear()
            self._spent_since = now
        self._requested |= clients
        # A process in progress is named again: its result may have arrived since results().
        self._calls.start(
            {
                pid: (uid, partial(self._read, pid, uid))
                for pid, uid in islice(self._requested.items(), policy.MAX_MAPPED_PROCESSES)
            }
        )

    @property
    def busy(self) -> bool:
        return bool(self._requested)

    def results(self) -> tuple[AddressRanges, ...]:
        found = self._calls.results(self._requested)
        for pid in (*found, *self._calls.errors):
            self._requested.pop(cast("int", pid), None)
        return tuple(one for one in found.values() if one is not None and one.ranges)

    def _read(self, pid: int, uid: int | None) -> AddressRanges | None:
        with open(f"{self._procfs}/{pid}/status", "rb") as file:  # noqa: PTH123
            owner = parse_status(file.read(MAX_RECORD_BYTES)).uid
        if owner is None or (uid is not None and owner != uid):
            return None
        if owner != 0 and self._spent[owner] >= policy.MAX_USER_MAPS_BYTES:
            return None
        at = time.time()
        with open(f"{self._procfs}/{pid}/maps", "rb") as file:  # noqa: PTH123
            maps = file.read(policy.MAX_MAPS_BYTES)
        self._spent[owner] += len(maps)
        return AddressRanges(at, pid, owner, reserved_ranges(maps))


def reserved_ranges(maps: bytes) -> tuple[tuple[int, int], ...]:
    """Return the ranges without access in /proc/PID/maps, the smallest ones first."""
    found = [(int(first, 16), int(last, 16)) for first, last in _RESERVED.findall(maps)]
    large = [one for one in found if one[1] - one[0] >= MIN_RANGE_BYTES]
    return tuple(sorted(large, key=lambda one: one[1] - one[0])[: policy.MAX_RANGES_PER_PROCESS])


class KernelEvidence:
    """The kernel log and the memory of clients."""

    def __init__(self, path: str, procfs: str) -> None:
        self._log = KernelLogReader(path)
        self._memory = ClientMemory(procfs)

    def read(self, clients: Mapping[int, int | None]) -> KernelObservation:
        lines, ranges = self._log.new_lines(), self._memory.results()
        if clients or self._memory.busy:
            self._memory.request(clients)
        error = self._log.error
        return KernelObservation(time.time(), not error, error, lines, ranges)

    def close(self) -> None:
        self._log.close()

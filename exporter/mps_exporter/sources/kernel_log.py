"""What shows who caused a GPU fault: the kernel log, and the address ranges of clients.

Reading /dev/kmsg needs CAP_SYSLOG where kernel.dmesg_restrict is 1; a container needs the device.
The format is the kernel's Documentation/ABI/testing/dev-kmsg: one record for each read,

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
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.processes import parse_status

HISTORY_SECONDS = 600.0
"""Maximum age of a line that was in the kernel log before the exporter started."""

MAX_RECORD_BYTES = 8192
WAKE_MS = 1000
"""How often the thread looks whether it is to end."""
MAX_QUEUED_LINES = 1024

MAX_MAPS_BYTES = 1 << 20
"""Maximum size of /proc/PID/maps that is read; 500 mappings of PyTorch take 60 KB."""
MAX_RANGES = 512
"""Maximum number of ranges that are kept for a process, the smallest ones."""
MIN_RANGE_BYTES = 2 << 20
"""Size of the range that each context reserves; guard pages of threads are smaller."""
MAX_PROCESSES_PER_CALL = 64
USER_BYTES = 16 << 20
USER_BYTES_SECONDS = 60.0
"""Maximum size of all maps that are read of one ordinary user's processes in this time."""

_KERNEL_FACILITY = 0
_RECORD = re.compile(rb"(\d+),\d+,(\d+),[^;]*;(NVRM: Xid [^\n]*)")
_NAME = re.compile(r"(?<=, name=)(?:.*(?=, (?:channel|Ch) )|.*)")
_RESERVED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ---p ", re.MULTILINE)


def parse_record(record: bytes) -> tuple[float, str] | None:
    """Return when the kernel wrote an Xid line (seconds since the boot) and the line.

    Returns:
        None for any other record. A program can write into the kernel log, but not as the kernel.
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
        """Why the kernel log is not being read, for a person."""
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
        """Return the lines since the last call."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._lines.get_nowait())
        return tuple(found)

    def close(self) -> None:
        """Let the thread end."""
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
                poll.poll(WAKE_MS)
        except OSError as error:
            self.error = f"{self._path} cannot be read: {error.strerror}"
        finally:
            os.close(self._file)

    def _read(self) -> bytes | None:
        """Read a record; None: there is none now."""
        while True:
            try:
                record = os.read(self._file, MAX_RECORD_BYTES)
            except BlockingIOError:
                return None
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next one follows
            if not record:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            return record

    def _add(self, record: bytes, *, history: bool) -> None:
        found = parse_record(record)
        if found is None or self._lines.qsize() >= MAX_QUEUED_LINES:
            return
        # The kernel's clock is not adjusted: after weeks it differs from ours by seconds.
        age = time.monotonic() - found[0] if history else 0.0
        if age <= HISTORY_SECONDS:
            self._lines.put(KernelLine(time.time() - max(0.0, age), found[1]))


class ClientMemory:
    """Reads which address ranges processes reserved, without waiting for one that hangs."""

    def __init__(self, procfs: str) -> None:
        self._procfs = procfs
        self._calls = BlockingCalls[AddressRanges | None]()
        self._asked: dict[int, int | None] = {}
        self._spent: dict[int, int] = defaultdict(int)
        """Bytes that were read of each user's processes since `_spent_since`."""
        self._spent_since = float("-inf")

    def request(self, clients: Mapping[int, int | None]) -> None:
        """Begin to read the ranges of these processes; see Host.read_kernel()."""
        now = time.monotonic()
        if now - self._spent_since >= USER_BYTES_SECONDS:
            self._spent.clear()
            self._spent_since = now
        self._asked |= clients
        # What is under way is named again: its answer may have come since answers().
        self._calls.start(
            {
                pid: (uid, partial(self._read, pid, uid))
                for pid, uid in islice(self._asked.items(), MAX_PROCESSES_PER_CALL)
            }
        )

    @property
    def busy(self) -> bool:
        """Whether processes wait for being read."""
        return bool(self._asked)

    def answers(self) -> tuple[AddressRanges, ...]:
        """Return what has been read by now."""
        found = self._calls.results(self._asked)
        for pid in (*found, *self._calls.errors):
            self._asked.pop(cast("int", pid), None)
        return tuple(one for one in found.values() if one is not None and one.ranges)

    def _read(self, pid: int, uid: int | None) -> AddressRanges | None:
        with open(f"{self._procfs}/{pid}/status", "rb") as file:  # noqa: PTH123
            owner = parse_status(file.read(MAX_RECORD_BYTES)).uid
        if owner is None or (uid is not None and owner != uid):
            return None
        if owner != 0 and self._spent[owner] >= USER_BYTES:
            return None
        at = time.time()
        with open(f"{self._procfs}/{pid}/maps", "rb") as file:  # noqa: PTH123
            maps = file.read(MAX_MAPS_BYTES)
        self._spent[owner] += len(maps)
        return AddressRanges(at, pid, owner, reserved_ranges(maps))


def reserved_ranges(maps: bytes) -> tuple[tuple[int, int], ...]:
    """Return the ranges without access in /proc/PID/maps, the smallest ones first."""
    found = [(int(first, 16), int(last, 16)) for first, last in _RESERVED.findall(maps)]
    large = [one for one in found if one[1] - one[0] >= MIN_RANGE_BYTES]
    return tuple(sorted(large, key=lambda one: one[1] - one[0])[:MAX_RANGES])


class KernelEvidence:
    """Both of them."""

    def __init__(self, path: str, procfs: str) -> None:
        self._log = KernelLogReader(path)
        self._memory = ClientMemory(procfs)

    def read(self, clients: Mapping[int, int | None]) -> KernelObservation:
        """See Host.read_kernel()."""
        lines, ranges = self._log.new_lines(), self._memory.answers()
        if clients or self._memory.busy:
            self._memory.request(clients)
        error = self._log.error
        return KernelObservation(time.time(), not error, error, lines, ranges)

    def close(self) -> None:
        self._log.close()

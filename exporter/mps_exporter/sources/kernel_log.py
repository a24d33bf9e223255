"""Evidence for the cause of a GPU fault: the kernel log, and the address ranges of clients.

Reading /dev/kmsg needs CAP_SYSLOG where kernel.dmesg_restrict is 1; a container needs the device.
The format is documented in the kernel's Documentation/ABI/testing/dev-kmsg. Each read returns one
record:

    4,1216,8412345678,-;NVRM: Xid (PCI:0000:00:06): 31, pid=1486, name=train.py, channel ...

priority and facility, sequence number, microseconds since the boot, flags; then the text.
"""

import errno
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import AddressRanges, KernelLine, KernelObservation
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.fairness import UserTokenBuckets
from mps_exporter.sources.processes import Account, Processes, parse_status

MAX_RECORD_BYTES = 8192  # Buffer for one record (or the beginning of /proc/PID/status).

MIN_RANGE_BYTES = 2 << 20  # Minimum range of a context; threads' guard pages are smaller.

_KERNEL_FACILITY = 0
_RECORD = re.compile(rb"(\d+),\d+,(\d+),[^;]*;(NVRM: Xid [^\n]*)")
_NAME = re.compile(r"(?<=, name=)(?:.*(?=, (?:channel|Ch) )|.*)")
_RESERVED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ---p ", re.MULTILINE)


def parse_record(record: bytes) -> tuple[float, str] | None:
    """Return an Xid line's time (seconds since the boot), and the line without program name.

    Return None for other records. A program can write into the kernel log, but not with the
    kernel's facility.
    """
    found = _RECORD.match(record)
    if found is None or int(found[1]) >> 3 != _KERNEL_FACILITY:
        return None
    return int(found[2]) / 1e6, _NAME.sub("-", found[3].decode("utf-8", "replace"), count=1)


class KernelEvidence:
    """The kernel log, and clients' address ranges; never waits."""

    def __init__(self, path: str, procfs: str) -> None:
        self._path, self._procfs = path, procfs
        self._file: int | None = None
        self._history = True  # The next record may be older than this object.
        self._error = ""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._error = f"{path} cannot be opened: {error.strerror}"
        self._calls = BlockingCalls[AddressRanges | None]()
        self._processes = Processes(procfs)
        self.requested: dict[Hashable, tuple[Account, Callable[[], AddressRanges | None]]] = {}
        """PID -> the user of the process, and the function that reads its ranges."""
        self._budget = UserTokenBuckets(
            policy.MAX_USER_MAPS_BYTES, policy.USER_MAPS_BYTES_PER_SECOND
        )

    def read(self, clients: Mapping[int, int | None]) -> KernelObservation:
        """Return what is new, and begin to read the ranges of clients; see Host.read_kernel()."""
        lines = tuple(self._new_lines())
        found = self._calls.results(self.requested)
        for pid in (*found, *self._calls.errors):
            self.requested.pop(pid, None)
        waiting = Counter(owner for owner, _ in self.requested.values())
        for pid, uid in clients.items():
            owner = self._processes.account(pid)
            if owner is None or waiting[owner] < policy.MAX_MAPS_WAITING_PER_USER:
                waiting[owner] += 1
                self.requested[pid] = owner, partial(self._read_ranges, pid, uid)
        self._calls.start(self.requested)
        ranges = tuple(one for one in found.values() if one is not None and one.ranges)
        return KernelObservation(time.time(), not self._error, self._error, lines, ranges)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _new_lines(self) -> Iterator[KernelLine]:
        """Yield the new Xid lines, up to the last record or a maximum number of records."""
        for _ in range(policy.MAX_KERNEL_RECORDS):
            if self._file is None:
                return
            try:
                record = os.read(self._file, MAX_RECORD_BYTES)
            except BlockingIOError:
                self._history = False
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError as error:
                return self._end(error.strerror or str(error))
            if not record:
                return self._end(os.strerror(errno.ENODATA))
            if (found := parse_record(record)) is None:
                continue
            # The kernel's clock is not adjusted: after weeks it differs from the host's by seconds.
            age = max(0.0, time.monotonic() - found[0]) if self._history else 0.0
            if age <= policy.MAX_KERNEL_HISTORY_SECONDS:
                yield KernelLine(time.time() - age, found[1])

    def _end(self, reason: str) -> None:
        self._error = f"{self._path} cannot be read: {reason}"
        self.close()

    def _read_ranges(self, pid: int, uid: int | None) -> AddressRanges | None:
        with open(f"{self._procfs}/{pid}/status", "rb") as file:  # noqa: PTH123
            owner = parse_status(file.read(MAX_RECORD_BYTES)).uid
        if owner is None or (uid is not None and owner != uid):
            return None
        at = time.time()
        if owner and self._budget.available(owner, at) <= 0.0:
            return None
        with open(f"{self._procfs}/{pid}/maps", "rb") as file:  # noqa: PTH123
            maps = file.read(policy.MAX_MAPS_BYTES)
        if owner:
            self._budget.consume(owner, len(maps), at)
        return AddressRanges(at, pid, owner, reserved_ranges(maps))


def reserved_ranges(maps: bytes) -> tuple[tuple[int, int], ...]:
    """Return the large ranges without access in /proc/PID/maps, the smallest first."""
    found = [(int(first, 16), int(last, 16)) for first, last in _RESERVED.findall(maps)]
    large = [one for one in found if one[1] - one[0] >= MIN_RANGE_BYTES]
    return tuple(sorted(large, key=lambda one: one[1] - one[0])[: policy.MAX_RANGES_PER_PROCESS])

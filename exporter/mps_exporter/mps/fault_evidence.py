"""Who caused a GPU fault: the address in the kernel log proves it.

The kernel's line of a fault, driver 580.159.04 on H200 and H100:

    NVRM: Xid (PCI:0000:00:06): 31, pid=1486, name=w, channel 0x0000000e, intr 00000000. MMU Fault:
    ENGINE GRAPHICS GPC5 GPCCLIENT_GCC faulted @ 0x7f66_07754000. Fault is of type FAULT_PDE
    ACCESS_TYPE_VIRT_READ

Its PID proves nothing (right in 7 of 79 faults by a client's own pointer, in 3 of 87 by work that a
client left behind), nor does the client that MPS names (15 of 79 and 0 of 87). Two things do:

* The address. Each context reserves a part of its process's address space without access, and work
  that is left behind faults there (67 of 67). Addresses are random: they name the process, but for
  processes that were forked from one parent.
* The unit. Work that is left behind faults in GCC (87 of 87), a client's own pointer in T1 (75 of
  79; the other 4 were jumps to a wild address, which is in no client's memory).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mps_exporter.observations import AddressRanges, KernelLine

SAME_FAULT_SECONDS = 0.5
"""Maximum distance between the lines of one fault in server.log and the kernel log; 0.1 s was
measured."""

SAME_LINES_SECONDS = 0.15
"""Maximum distance between lines of the kernel log about one fault: 0.12 s with five contexts."""

LATE_SECONDS = 2.0
"""Maximum time from a client's end to a fault by its work while others use the GPU; see
client_endings for the times that were measured."""

FIRST_RANDOM_ADDRESS = 1 << 46
"""Addresses of mappings are random from here on (x86-64 and arm64); the CUDA driver reserves some
fixed ranges below, which differ in size from process to process."""

KEPT_SECONDS = 600.0
"""How long the ranges of a client are kept after its end."""

MAX_PROCESSES = 1024

_XID = re.compile(r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F:]+)(?:\.\d)?\): \d+, ")
# A process chooses the name in the line: what counts is the end of the line, which is longer.
_MMU_FAULT = re.compile(
    r"MMU Fault: ENGINE [\w ]*?GPCCLIENT_(?P<unit>[A-Z0-9]+)\w* "
    r"faulted @ 0x(?P<high>[0-9a-f]+)_(?P<low>[0-9a-f]{8})\. "
    r"Fault is of type \w+ ACCESS_TYPE_\w+\s*$"
)


class KernelFault(NamedTuple):
    """A fatal GPU fault in the kernel log."""

    at: float
    gpu: str
    """UUID; "": not known."""
    unit: str
    """The part of the GPU that met the fault: GCC, T1, ..."""
    address: int


def parse_fault(line: KernelLine, gpus: Mapping[str, str]) -> KernelFault | None:
    """Return the fault of an Xid line; None: it has no address.

    Args:
        line: The line.
        gpus: PCI address as in pci_address() -> UUID.
    """
    xid, fault = _XID.match(line.text), _MMU_FAULT.search(line.text)
    if xid is None or fault is None:
        return None
    gpu = gpus.get(pci_address(xid["pci"]), "")
    return KernelFault(line.at, gpu, fault["unit"], int(fault["high"] + fault["low"], 16))


def pci_address(bus_id: str) -> str:
    """Return domain, bus and device, which the kernel log and NVML write differently."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


@dataclass(slots=True, eq=False)
class Owner:
    """A client, and the address ranges that are its own."""

    pid: int
    uid: int | None
    read_at: float
    ranges: tuple[tuple[int, int], ...]
    ending_since: float | None = None
    """When its first context ended, by server.log."""
    ended_at: float | None = None
    """When its process left the server: it ended, or runs another program (exec)."""
    counted: bool = False
    """It is counted as a client that left work behind."""


class Verdict(NamedTuple):
    """What the kernel log proves about a fault."""

    cause: Literal["unfinished_work", "own_fault", "unknown"] = "unknown"
    owners: tuple[Owner, ...] = ()
    """The clients that caused it."""
    running: bool = False
    """It was a pointer of a client that was running: no client that had ended caused it."""


class FaultEvidence:
    """The faults in the kernel log, and the memory of one daemon's clients."""

    def __init__(self) -> None:
        self.readable = False
        """Whether the kernel log is being read."""
        self.faults: Sequence[KernelFault] = ()
        """The last faults in the kernel log, of all daemons."""
        self._owners: list[Owner] = []
        self._clients: dict[int, float | None] = {}
        """Clients that the logs name -> when they ended."""

    def add_ranges(self, found: AddressRanges) -> None:
        """Keep the ranges of a client, instead of those that it had before."""
        self._owners = [
            one
            for one in self._owners
            if (found.at - one.ended_at <= KEPT_SECONDS if one.ended_at else one.pid != found.pid)
        ]
        self._owners.append(Owner(found.pid, found.uid, found.at, found.ranges))
        del self._owners[:-MAX_PROCESSES]

    def client_active(self, pid: int) -> None:
        """A context of a client is ACTIVE."""
        self._clients[pid] = None
        if len(self._clients) > MAX_PROCESSES:
            ended = (one for one, at in self._clients.items() if at is not None)
            del self._clients[next(ended, pid)]

    def client_ending(self, pid: int, at: float) -> None:
        """A context of a client ended."""
        for owner in self._present(pid, at):
            owner.ending_since = owner.ending_since or at

    def client_continues(self, pid: int, at: float) -> None:
        """A client opened another context: it does not end."""
        for owner in self._present(pid, at):
            owner.ending_since = None

    def client_ended(self, pid: int, at: float) -> None:
        """A client left the server."""
        if pid in self._clients:
            del self._clients[pid]  # the last to end is the last to be forgotten
            self._clients[pid] = at
        for owner in self._present(pid, at):
            owner.ending_since, owner.ended_at = owner.ending_since or at, at

    def _present(self, pid: int, at: float) -> list[Owner]:
        return [
            one
            for one in self._owners
            if one.pid == pid and one.ended_at is None and one.read_at <= at
        ]

    def shows_running_client(self, at: float, gpus: Collection[str]) -> bool:
        """Whether a fault was a running client's, whose memory may have grown since it was read."""
        return any(fault.unit == "T1" for fault in self._near(at, gpus))

    def judge(self, at: float, gpus: Collection[str]) -> Verdict:
        """Return what is proved by now about a fault at this moment on these GPUs.

        The nearest line in the kernel log counts, and those that came with it: several clients may
        have left work.
        """
        near = self._near(at, gpus)
        near = [one for one in near if abs(one.at - near[0].at) <= SAME_LINES_SECONDS]
        proved = [verdict for fault in near if (verdict := self._judge(fault, at)) is not None]
        causes = {one.cause for one in proved}
        if len(causes) != 1:
            return Verdict(running=bool(near) and all(fault.unit == "T1" for fault in near))
        owners = {owner.pid: owner for one in proved for owner in one.owners}
        return proved[0]._replace(owners=tuple(owners.values()))

    def _near(self, at: float, gpus: Collection[str]) -> list[KernelFault]:
        near = [
            fault
            for fault in self.faults
            if abs(fault.at - at) <= SAME_FAULT_SECONDS and same_gpu((fault.gpu,), gpus)
        ]
        return sorted(near, key=lambda fault: abs(fault.at - at))

    def _judge(self, fault: KernelFault, at: float) -> Verdict | None:
        owner = self._owner(fault.address)
        if owner is None:
            return None
        since, ended_at = owner.ending_since, owner.ended_at
        if fault.unit == "GCC" and ended_at and since and since <= at:
            if self._unread(lambda ended: ended is not None and abs(ended - at) <= LATE_SECONDS):
                return None
            return Verdict("unfinished_work", (owner,))
        if fault.unit == "T1" and (ended_at is None or ended_at >= at - SAME_FAULT_SECONDS):
            if self._unread(lambda ended: ended is None):
                return None
            return Verdict("own_fault", (owner,), running=True)
        return None

    def _unread(self, matters: Callable[[float | None], bool]) -> bool:
        """Whether the memory of a client that matters is not known.

        Processes that were forked from one parent have the same addresses, and could not be told
        apart.
        """
        read = {owner.pid for owner in self._owners}
        return any(pid not in read and matters(ended) for pid, ended in self._clients.items())

    def _owner(self, address: int) -> Owner | None:
        """Return the client whose memory holds an address.

        Of 81 large ranges 2 held another client's address by chance: the smallest range is right.
        Ranges below FIRST_RANDOM_ADDRESS are in each process, and name no process.
        """
        held = [
            (last - first, owner)
            for owner in self._owners
            for first, last in owner.ranges
            if FIRST_RANDOM_ADDRESS <= first <= address < last and owner.pid in self._clients
        ]
        smallest = min((size for size, _ in held), default=0)
        owners = {owner.pid: owner for size, owner in held if size == smallest}
        return next(iter(owners.values())) if len(owners) == 1 else None


def same_gpu(some: Iterable[str], others: Collection[str]) -> bool:
    """Whether they may have a GPU in common. Nothing, "" and a MIG instance may be any GPU."""
    known, other = set(some), set(others)
    if not known or not other or not all(uuid.startswith("GPU-") for uuid in known | other):
        return True
    return not known.isdisjoint(other)

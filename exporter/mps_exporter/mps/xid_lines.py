"""The client that caused a GPU fault: the address in the kernel log proves it.

The kernel's line of a fault, driver 580.159.04 on H200 and H100:

    NVRM: Xid (PCI:0000:00:06): 31, pid=1486, name=w, channel 0x0000000e, intr 00000000. MMU Fault:
    ENGINE GRAPHICS GPC5 GPCCLIENT_GCC faulted @ 0x7f66_07754000. Fault is of type FAULT_PDE
    ACCESS_TYPE_VIRT_READ

Its PID proves nothing (right in 7 of 79 faults by a client's own pointer, in 3 of 87 by work that a
client left behind), nor does the client that MPS names (15 of 79 and 0 of 87). Two facts do:

* The address. Each context reserves a part of its process's address space without access, and work
  that is left behind faults there (67 of 67). Addresses are random, so they identify the process,
  except for processes that were forked from one parent.
* The unit. Work that is left behind faults in GCC (87 of 87), a client's own pointer in T1 (75 of
  79; the other 4 were jumps to a wild address, which is in no client's memory).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import AddressRanges, KernelLine

FIRST_RANDOM_ADDRESS = 1 << 46
"""First random address of a mapping (x86-64 and arm64). Below, the CUDA driver reserves some fixed
ranges, which differ in size from process to process."""

_XID = re.compile(r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F:]+)(?:\.\d)?\): \d+, ")
# A process chooses its name in the line: only the end, longer than a name, is trusted.
_MMU_FAULT = re.compile(
    r"MMU Fault: ENGINE [\w ]*?GPCCLIENT_(?P<unit>[A-Z0-9]+)\w* "
    r"faulted @ 0x(?P<high>[0-9a-f]+)_(?P<low>[0-9a-f]{8})\. "
    r"Fault is of type \w+ ACCESS_TYPE_\w+\s*$"
)


class KernelFault(NamedTuple):
    """A fatal GPU fault in the kernel log."""

    at: float
    gpu: str  # UUID, "" if unknown.
    unit: str  # Part of the GPU that met the fault: GCC, T1, ...
    address: int


def parse_fault(line: KernelLine, gpus: Mapping[str, str]) -> KernelFault | None:
    """Return the fault of an Xid line, None if the line has no address.

    `gpus` maps PCI addresses, as pci_address() returns them, to UUIDs.
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
class Process:
    """A client that the logs name, or a process whose address ranges were read."""

    pid: int
    uid: int | None = None
    read_at: float = 0.0
    ranges: tuple[tuple[int, int], ...] = ()
    ending_since: float | None = None  # Time at which its first context ended (server.log).
    ended_at: float | None = None  # Time at which it left the server, by its exit or an exec.
    counted: bool = False  # Whether it is counted as a client that left work.


class Verdict(NamedTuple):
    """What the kernel log proves about a fault."""

    cause: Literal["unfinished_work", "own_fault", "unknown"] = "unknown"
    owners: tuple[Process, ...] = ()  # The clients that caused it.
    running: bool = False  # A pointer of a running client caused it: no client that had ended did.


class FaultEvidence:
    """The faults in the kernel log, and the address ranges of processes."""

    def __init__(self) -> None:
        self.readable = False  # Whether the kernel log is being read.
        self.faults: Sequence[KernelFault] = ()  # Last faults in the kernel log, of all daemons.
        self._owners: list[Process] = []
        self._clients: dict[int, Process] = {}  # Clients that the logs name.

    def add_ranges(self, found: AddressRanges) -> None:
        """Add the ranges of a process, maybe of another daemon; they replace its earlier ranges.

        Users choose the ranges: ranges of running clients are dropped last.
        """
        oldest = found.at - policy.RANGES_LIFETIME_SECONDS
        self._owners = [
            owner
            for owner in self._owners
            if (owner.ended_at >= oldest if owner.ended_at else owner.pid != found.pid)
        ]
        self._owners.append(Process(found.pid, found.uid, found.at, found.ranges))
        while (
            len(self._owners) > policy.MAX_EVIDENCE_PROCESSES
            or sum(len(owner.ranges) for owner in self._owners) > policy.MAX_EVIDENCE_RANGES
        ):
            least = min(self._owners, key=lambda one: (one.pid in self._clients, not one.ended_at))
            self._owners.remove(least)

    def client_active(self, pid: int) -> None:
        self._clients[pid] = Process(pid)
        if len(self._clients) > policy.MAX_EVIDENCE_PROCESSES:
            ended = (pid for pid, client in self._clients.items() if client.ended_at is not None)
            del self._clients[next(ended, pid)]

    def client_ending(self, pid: int, at: float) -> None:
        for one in self._of(pid, at):
            one.ending_since = one.ending_since or at

    def client_continues(self, pid: int, at: float) -> None:
        """Record that a client opened another context, so it does not end."""
        for one in self._of(pid, at):
            one.ending_since = one.ended_at = None

    def client_ended(self, pid: int, at: float) -> None:
        if pid in self._clients:  # the last client to end is the last to be dropped
            self._clients[pid] = self._clients.pop(pid)
        ended = self._of(pid, at)
        for one in ended:  # its memory may have been read after its context had ended
            one.ending_since, one.ended_at = one.ending_since or ended[0].ending_since or at, at

    def _of(self, pid: int, at: float) -> list[Process]:
        """Return the client in the logs, and the running process whose address ranges are known."""
        named = [self._clients[pid]] if pid in self._clients else []
        return named + [
            owner
            for owner in self._owners
            if owner.pid == pid and owner.ended_at is None and owner.read_at <= at
        ]

    def shows_running_client(self, at: float, gpus: Collection[str]) -> bool:
        """Return whether a running client caused a fault at this time on these GPUs."""
        return any(fault.unit == "T1" for fault in self._near(at, gpus))

    def judge(self, at: float, gpus: Collection[str]) -> Verdict:
        """Return what is proved by now about a fault at this time on these GPUs.

        The nearest line in the kernel log counts, with the lines about the same fault: several
        clients may have left work.
        """
        near = self._near(at, gpus)
        near = [fault for fault in near if abs(fault.at - near[0].at) <= policy.SAME_LINES_SECONDS]
        proved = [verdict for fault in near if (verdict := self._judge(fault, at)) is not None]
        if len({verdict.cause for verdict in proved}) != 1:
            return Verdict(running=bool(near) and all(fault.unit == "T1" for fault in near))
        owners = {owner.pid: owner for verdict in proved for owner in verdict.owners}
        return proved[0]._replace(owners=tuple(owners.values()))

    def _near(self, at: float, gpus: Collection[str]) -> list[KernelFault]:
        near = [
            fault
            for fault in self.faults
            if abs(fault.at - at) <= policy.SAME_FAULT_SECONDS and same_gpu((fault.gpu,), gpus)
        ]
        return sorted(near, key=lambda fault: abs(fault.at - at))

    def _judge(self, fault: KernelFault, at: float) -> Verdict | None:
        owner = self._owner(fault.address)
        if owner is None:
            return None
        since, ended_at = owner.ending_since, owner.ended_at
        if fault.unit == "GCC" and ended_at and since and since <= at:
            late = policy.LATE_FAULT_SECONDS
            first, last = min(ended_at, at) - late, at + late

            def may_have_left_work(client: Process) -> bool:
                if client.ended_at is None:  # the line about its end may follow
                    return client.ending_since is not None and client.ending_since <= at
                return first <= client.ended_at <= last

            if self._unread(may_have_left_work):
                return None
            return Verdict("unfinished_work", (owner,))
        running_at = at - policy.SAME_FAULT_SECONDS
        if fault.unit == "T1" and (ended_at is None or ended_at >= running_at):
            if self._unread(lambda one: one.ended_at is None or one.ended_at >= running_at):
                return None
            return Verdict("own_fault", (owner,), running=True)
        return None

    def _unread(self, matters: Callable[[Process], bool]) -> bool:
        """Return whether the memory of a client, selected by its end, is unknown.

        Processes that were forked from one parent have the same addresses, so they are
        distinguished only if the memory of all of them is known.
        """
        read = {owner.pid for owner in self._owners}
        return any(pid not in read and matters(client) for pid, client in self._clients.items())

    def _owner(self, address: int) -> Process | None:
        """Return the client whose memory has an address; None if unclear.

        2 of 81 large ranges contained another client's address by chance: the smallest
        range is right. Ranges below FIRST_RANDOM_ADDRESS exist in every process: none counts.
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
    """Return whether two sets may have a common GPU. No UUID, "" and MIG instances match any."""
    known, other = set(some), set(others)
    if not known or not other or not all(uuid.startswith("GPU-") for uuid in known | other):
        return True
    return not known.isdisjoint(other)

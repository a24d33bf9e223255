"""Fatal GPU errors of one server, and the ends of its clients that may explain them.

A client that ends without waiting for its kernels leaves them to the server. With other clients on
the GPU the server meets a fatal error about 0.16 s later. Without other clients, the next client
meets it: its first call fails with error 46. Times prove nothing (see xid_lines), so they only
list what is possible (driver 580.159.04, H200):

    52.688 ... with status 806, assuming client {PID: 477, Context ID: 1} exit    its context ends
    52.851 Client {PID: 472, Context: 1} encountered a fatal GPU error.           472 is innocent
    52.883 ... with status 806, assuming client {PID: 477, Context ID: 0} exit    its process ends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.incidents_and_counters import Moment
from mps_exporter.mps.waits import NEVER
from mps_exporter.mps.xid_lines import Verdict, same_gpu
from mps_exporter.snapshot import (
    EndedBefore,
    FaultProof,
    Incident,
    IncidentKind,
    PossibleUnfinishedWork,
)

if TYPE_CHECKING:
    from mps_exporter.mps.servers import TrackedServer


@dataclass(slots=True, eq=False)
class Ending:
    """A client that ends: first its contexts, then its process."""

    pid: int  # 0 if the daemon does not see the client's PID namespace.
    uid: int | None
    gpus: list[str] = field(default_factory=list)  # GPU of each context that ended, or "".
    at: float = 0.0  # Time at which its last context ended.
    ended: bool = False
    excused: bool = False  # An operator terminated it, or a fault had taken it down.


class ClientEndings:
    """Clients of one server that ended recently or are ending."""

    def __init__(self, server: TrackedServer) -> None:
        self._server = server
        self._clients = server.clients
        self._evidence = server.daemon.evidence
        self._endings: deque[Ending] = deque(maxlen=policy.MAX_RECENT)
        self._possible: list[PossibleUnfinishedWork] = []
        """Work that the last client on a GPU may have left there."""

    def context_ends(self, pid: int, context: int, when: Moment) -> None:
        """Record that a client has closed a context's connection, usually because it ends."""
        while self._endings and self._endings[0].at < when.at - policy.MAX_END_AGE_SECONDS:
            self._endings.popleft()
        client = self._clients.find(pid, context)
        ending = self._ending(pid) if pid else None
        if ending is None:
            ending = Ending(pid, self._server.uid if client is None else client.uid)
            self._endings.append(ending)
        if client is not None:
            ending.excused |= client.terminating or client.lost
        ending.at = when.at
        ending.gpus.append(self._clients.gpu_of(pid, context))
        self._evidence.client_ending(pid, when.at)

    def client_continues(self, pid: int, at: float) -> None:
        """Record that a client opens another context, so it does not end."""
        ending = self._ending(pid) if pid else None
        if ending is not None:
            self._endings.remove(ending)
        self._evidence.client_continues(pid, at)

    def process_ends(self, pid: int, when: Moment, undecided: Iterable[Fault]) -> None:
        """Record that a client has closed its last connection."""
        self._evidence.client_ended(pid, when.at)
        ending = self._ending(pid)
        if ending is None:
            return
        ending.ended = True
        least, most = policy.UNFINISHED_END_SECONDS
        seconds = when.at - ending.at
        # Faults of other GPUs do not count: exporters decide them at different times.
        in_fault = any(f.at >= ending.at and same_gpu(ending.gpus, f.uuids) for f in undecided)
        if in_fault or ending.excused or not least <= seconds <= most or self._has_company(ending):
            return
        self.forget(ending.gpus)
        gpus = tuple(sorted({gpu for gpu in ending.gpus if gpu}))
        left = PossibleUnfinishedWork(pid, ending.uid, when.at, round(seconds, 3), gpus)
        self._possible = [*self._possible, left][-policy.MAX_GPUS :]

    def _ending(self, pid: int) -> Ending | None:
        """Return a client's end if it is in progress; for PID 0, the oldest end."""
        return next((one for one in self._endings if one.pid == pid and not one.ended), None)

    def _has_company(self, ending: Ending) -> bool:
        """Return whether other clients use its GPUs, or ended there at about that time."""
        others = (
            client.contexts.values()
            for client in self._clients
            if client.contexts and (client.pid != ending.pid or ending.pid == 0)
        )
        ended = (
            other.gpus if other.pid else ()  # a client with PID 0 may have ended on any GPU
            for other in self._endings
            if other is not ending and other.at >= ending.at - policy.END_TO_FAULT_SECONDS[1]
        )
        return any(same_gpu(ending.gpus, list(gpus)) for gpus in (*others, *ended))

    def before(self, at: float, gpus: Collection[str]) -> tuple[EndedBefore, ...]:
        """Return the clients whose unfinished work may have caused a fault, judged by time."""
        least, most = policy.END_TO_FAULT_SECONDS
        return tuple(
            EndedBefore(ending.pid, round(at - ending.at, 3))
            for ending in self._endings
            if not ending.excused
            and least <= at - ending.at <= most
            and same_gpu(ending.gpus[-1:], gpus)
        )

    def forget(self, gpus: Collection[str], by: float = NEVER) -> None:
        """Forget work left on these GPUs: a fault has ended it, or a later client used the GPU."""
        found = self._possible
        self._possible = [o for o in found if o.ended_at > by or not same_gpu(o.gpu_uuids, gpus)]

    @property
    def possible_unfinished_work(self) -> PossibleUnfinishedWork | None:
        """The oldest work that may have been left; None without any."""
        return self._possible[0] if self._possible else None


@dataclass(slots=True, eq=False)
class Fault:
    """A fatal GPU error."""

    when: Moment  # Its time; counted if after the exporter's start.
    blamed: set[tuple[int, int]] = field(default_factory=set)  # Blamed clients: PID, context.
    victims: list[int] = field(default_factory=list)
    """Client processes that were lost, including the responsible client, in the log's order."""
    devices: set[int] = field(default_factory=set)
    open_devices: set[int] = field(default_factory=set)  # Devices that are not reset yet.
    hit: set[int] = field(default_factory=set)  # Devices of the blamed contexts.
    uuids: list[str] = field(default_factory=list)
    """GPUs that it hit, for which it is counted; "" if the log does not show the GPU."""
    handled: bool = False
    listed: bool = False
    verdict: Verdict | None = None  # None until the cause is decided.
    losses: list[tuple[int, int | None]] = field(default_factory=list)
    """(PID, user) of victims that are not counted yet."""
    memory_requested: bool = False
    recovered: Moment | None = None

    @property
    def at(self) -> float:
        return self.when.at

    def count_losses(self) -> None:
        if self.verdict is None:
            return
        responsible = {owner.pid for owner in self.verdict.owners}
        for pid, uid in self.losses:
            cause: str = self.verdict.cause
            if cause == "unknown":
                cause = "unattributed_fault"
            elif cause == "own_fault" and pid not in responsible:
                cause = "neighbour_fault"
            self.when.count_loss(uid, cause)
        self.losses.clear()

    def count_gpu(self, uuid: str) -> None:
        self.uuids.append(uuid)
        self.when.increment("mps_server_faults_total", uuid=uuid)

    def add_device(self, device: int) -> None:
        if device not in self.devices and len(self.devices) < policy.MAX_GPUS:
            self.devices.add(device)
            self.open_devices.add(device)


class ServerFaults:
    """The faults of one server."""

    def __init__(self, server: TrackedServer) -> None:
        self._server = server
        self._clients = server.clients
        self._gpus = server.daemon.gpus
        self._evidence = server.daemon.evidence
        self.endings = ClientEndings(server)
        self._open: list[Fault] = []  # Faults whose devices are not reset yet.
        self._current: Fault | None = None  # The fault that the log is reporting.
        self._list: Literal["devices", "clients", ""] = ""  # Meaning of the next bare numbers.
        self._undecided: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def process_ends(self, pid: int, when: Moment) -> None:
        self.endings.process_ends(pid, when, self._undecided)
        for fault in list(self._undecided):
            self._decide(fault)

    def request_memory(self) -> bool:
        """Return whether a running client has just caused a fault: True once for each fault."""
        found = [
            fault
            for fault in self._undecided
            if not fault.memory_requested
            and self._evidence.shows_running_client(fault.at, fault.uuids)
        ]
        for fault in found:
            fault.memory_requested = True
        return bool(found)

    def blame(self, pid: int, context: int, when: Moment) -> None:
        """Record the client that MPS names: it met the error, and need not have caused it."""
        current = self._current
        new = current is None or (
            current.handled and pid not in {blamed for blamed, _ in current.blamed}
        )
        fault = self._reported(when, new=new)
        if len(fault.blamed) < policy.MAX_CONTEXTS:
            fault.blamed.add((pid, context))
        if pid:
            self._add_victim(fault, pid)

    def handle(self, when: Moment) -> None:
        current = self._current
        new = current is None or (current.handled and current.listed)
        self._reported(when, new=new).handled = True

    def tear_down(self, pid: int, context: int, device: int, when: Moment) -> None:
        fault = self._reported(when)
        if pid:
            self._add_victim(fault, pid)
        if gpu := pid and self._clients.gpu_of(pid, context):
            self._gpus.add_ordinal(device, gpu, when.at)
        fault.add_device(device)
        if (pid, context) in fault.blamed and device not in fault.hit:
            fault.hit.add(device)
            if pid:  # clients with PID 0 cannot be distinguished, so the GPU is unknown
                fault.count_gpu(self._uuid_of(device))

    def tear_down_process(self, pid: int, _context: int, when: Moment) -> None:
        fault = self._reported(when)
        if pid:
            self._add_victim(fault, pid)

    def list_devices(self, when: Moment) -> None:
        self._reported(when).listed = True
        self._list = "devices"

    def list_clients(self, when: Moment) -> None:
        fault = self._reported(when)
        fault.listed = True
        self._count_unnamed_gpu(fault)
        self._list = "clients"

    def add_number(self, number: int) -> bool:
        """Apply a bare number. Return whether it belongs to a list."""
        if self._current is None or not self._list:
            return False
        if self._list == "devices":
            self._current.add_device(number)
        else:
            self._add_victim(self._current, number)
        return True

    def close_device(self, device: int, when: Moment) -> None:
        """Record a destroyed context of the server; the last device of a fault ends the fault."""
        self.close_report()
        for fault in list(self._open):
            fault.open_devices.discard(device)
            if fault.open_devices:
                continue
            self._open.remove(fault)
            when.observe("mps_server_fault_recovery_seconds", when.at - fault.at)
            fault.recovered = when
            if fault.verdict is not None:  # else reported after the fault itself
                self._report_recovery(fault, when)

    def close_report(self) -> None:
        fault, self._current, self._list = self._current, None, ""
        if fault is not None:
            self._count_unnamed_gpu(fault)
            self._decide(fault)

    def _reported(self, when: Moment, *, new: bool = False) -> Fault:
        """Return the fault that a line is about; a new fault if the line begins a report."""
        if self._current is not None and not new:
            return self._current
        if self._open and not new:
            return self._open[-1]  # a late line of its report
        self.close_report()
        fault = Fault(when)
        self._undecided.append(fault)
        self._current = fault
        self._open.append(fault)
        del self._open[: -policy.MAX_RECENT]
        when.counters.set_latest("mps_server_last_fault_timestamp_seconds", fault.at)
        return fault

    def _add_victim(self, fault: Fault, pid: int) -> None:
        if (pid and pid in fault.victims) or len(fault.victims) >= policy.MAX_CONTEXTS:
            return
        fault.victims.append(pid)
        hit = {self._uuid_of(one) for one in fault.devices}
        there = (one for one in self._clients if not hit.isdisjoint(one.contexts.values()))
        unnamed = (one for one in there if not one.pid and not one.lost)
        client = self._clients.get(pid) if pid else next(unnamed, None)
        if client is None or not pid:
            fault.losses.append((pid, self._server.uid))
        elif not client.lost:
            fault.losses.append((pid, client.uid))
        fault.count_losses()
        if client is not None:
            client.lost, client.torn_down_at = True, fault.at

    def _count_unnamed_gpu(self, fault: Fault) -> None:
        """Count a fault that no GPU has been counted for, now that all its devices are known."""
        if not fault.uuids:
            devices = fault.hit or fault.devices
            fault.count_gpu(self._uuid_of(*devices) if len(devices) == 1 else "")

    def _uuid_of(self, device: int) -> str:
        return self._gpus.uuid_of(device, self._server.devices)

    def next_timer(self) -> float:
        due = NEVER
        if self._current is not None:
            due = min(due, self._current.at + policy.SAME_FAULT_SECONDS)
        if self._undecided:
            due = min(due, self._undecided[0].at + policy.FAULT_DECISION_SECONDS)
        return due

    def run_timers(self, at: float = NEVER) -> None:
        """Close the report and decide the causes that are due; all of them if the server exited."""
        if self._current is not None and self._current.at + policy.SAME_FAULT_SECONDS <= at:
            self.close_report()
        for fault in list(self._undecided):
            if fault.at + policy.FAULT_DECISION_SECONDS <= at:
                self._decide(fault, final=True)

    def _decide(self, fault: Fault, *, final: bool = False) -> None:
        """Decide a fault's cause and count its victims, once the cause is proved or cannot be."""
        if fault is self._current:
            return  # the log's report is not complete
        verdict = self._evidence.judge(fault.at, fault.uuids)
        if verdict.cause == "unknown" and self._evidence.readable and not final:
            return
        self._undecided.remove(fault)
        fault.verdict = verdict
        fault.count_losses()
        if verdict.cause == "unfinished_work":
            for owner in verdict.owners:
                if not owner.counted:
                    owner.counted = True
                    fault.when.increment("mps_client_unfinished_exits_total", uid=owner.uid)
        self._report(fault, verdict)
        self.endings.forget(fault.uuids, fault.at)
        if fault.recovered is not None:
            self._report_recovery(fault, fault.recovered)

    def _report(self, fault: Fault, verdict: Verdict) -> None:
        proof: FaultProof = "unknown" if self._evidence.readable else "unread"
        ended_before: tuple[EndedBefore, ...] = ()
        if verdict.owners:
            proof = "address"
        elif verdict.running:
            proof = "unit"
        else:
            ended_before = self.endings.before(fault.at, fault.uuids)
        self._add_incident(
            fault,
            fault.when,
            "unfinished_work" if verdict.cause == "unfinished_work" else "fault",
            pids=tuple(fault.victims),
            blamed_pid=min((pid for pid, _ in fault.blamed), default=None),
            caused_by_pids=tuple(owner.pid for owner in verdict.owners),
            proof=proof,
            ended_before=ended_before,
        )

    def _report_recovery(self, fault: Fault, when: Moment) -> None:
        self._add_incident(fault, when, "fault_recovered", seconds=when.at - fault.at)

    def _add_incident(self, fault: Fault, when: Moment, kind: IncidentKind, **more: Any) -> None:
        uuids, server = tuple(filter(None, fault.uuids)), self._server
        when.add_incident(Incident(when.at, kind, server.pid, server.uid, gpu_uuids=uuids, **more))

"""Fatal GPU errors of one server: what its log says of each, who was lost, and who caused it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mps_exporter.mps.client_endings import ClientEndings
from mps_exporter.mps.clients import MAX_CONTEXTS, ServerClients, ServerInfo
from mps_exporter.mps.fault_evidence import FaultEvidence, Verdict
from mps_exporter.mps.record import MAX_GPUS, GpuNames, Moment
from mps_exporter.snapshot import FaultProof

REPORT_SECONDS = 0.5
"""All lines about one fault are written at once."""

DECISION_SECONDS = 1.5
"""Maximum time from a fault to its line in the kernel log and to the end of the client that left
the work: ends of 0.5 s were measured, and of 1.4 s where 48 clients left together."""

MAX_FAULTS = 64


_LOSS_CAUSES = {
    "unfinished_work": "unfinished_work",
    "own_fault": "own_fault",
    "unknown": "unattributed_fault",
}


@dataclass(slots=True, eq=False)
class Fault:
    """A fatal GPU error."""

    at: float
    counted: bool
    """It came after the exporter's start."""
    blamed: set[int] = field(default_factory=set)
    victims: list[int] = field(default_factory=list)
    """Client processes that were lost, the culprit too, in the order of the log."""
    devices: set[int] = field(default_factory=set)
    open_devices: set[int] = field(default_factory=set)
    """Devices whose context is not destroyed yet."""
    contexts: set[tuple[int, int]] = field(default_factory=set)
    """(PID, context) of the clients that the log blames."""
    hit: set[int] = field(default_factory=set)
    """Devices of those contexts; others may be reset with them."""
    uuids: list[str] = field(default_factory=list)
    """GPUs that it hit, for which it is counted; "" where the log does not say."""
    handled: bool = False
    listed: bool = False
    closed: bool = False
    """The log says no more of it."""
    verdict: Verdict | None = None
    """None: who caused it is not decided yet."""
    losses: list[tuple[int, int | None]] = field(default_factory=list)
    """(PID, user) of victims that are not counted yet."""
    memory_requested: bool = False
    recovered_at: float | None = None

    def count_loss(self, pid: int, uid: int | None, when: Moment) -> None:
        """Count a victim, as soon as it is decided who caused the fault."""
        self.losses.append((pid, uid))
        self.count_losses(when)

    def count_losses(self, when: Moment) -> None:
        if self.verdict is None:
            return
        culprits = {owner.pid for owner in self.verdict.owners}
        for pid, uid in self.losses:
            cause = _LOSS_CAUSES[self.verdict.cause]
            if cause == "own_fault" and pid not in culprits:
                cause = "neighbour_fault"
            when._replace(at=self.at, counted=self.counted).count_loss(uid, cause)
        self.losses.clear()

    def count_gpu(self, uuid: str, when: Moment) -> None:
        """Count the fault for a GPU that it hit."""
        self.uuids.append(uuid)
        when.increment("mps_server_faults_total", uuid=uuid)

    def add_device(self, device: int) -> None:
        """A device is reset."""
        if device not in self.devices and len(self.devices) < MAX_GPUS:
            self.devices.add(device)
            self.open_devices.add(device)


class ServerFaults:
    """The faults of one server."""

    def __init__(
        self, server: ServerInfo, clients: ServerClients, gpus: GpuNames, evidence: FaultEvidence
    ) -> None:
        self._server = server
        self._clients = clients
        self._gpus = gpus
        self._evidence = evidence
        self.endings = ClientEndings(server, clients, evidence)
        self._open: list[Fault] = []
        """Those whose devices are not reset yet."""
        self._current: Fault | None = None
        """The fault that the log is reporting."""
        self._list: Literal["devices", "clients"] | None = None
        """What the bare numbers that follow are."""
        self._undecided: list[Fault] = []

    def __bool__(self) -> bool:
        """Whether a fault is being handled."""
        return bool(self._open)

    def process_ends(self, pid: int, when: Moment) -> None:
        """A client has closed its last connection: its process ends."""
        self.endings.process_ends(pid, when, in_fault=bool(self._undecided))
        for fault in list(self._undecided):
            self._decide(fault, when)

    def request_memory(self) -> bool:
        """Whether a running client has just caused a fault; returns True once for each fault."""
        found = [
            fault
            for fault in self._undecided
            if not fault.memory_requested
            and self._evidence.shows_running_client(fault.at, fault.uuids)
        ]
        for fault in found:
            fault.memory_requested = True
        return bool(found)

    # ------------------------------------------------------------------ the log's report

    def blame(self, pid: int, context: int, when: Moment) -> None:
        """The log names a client that met the error."""
        current = self._current
        new = current is None or (current.handled and pid not in current.blamed)
        fault = self._reported(when, new=new)
        fault.blamed.add(pid)
        if len(fault.contexts) < MAX_CONTEXTS:
            fault.contexts.add((pid, context))
        if pid:
            self._add_victim(fault, pid, when)

    def handle(self, when: Moment) -> None:
        """The server handles the error."""
        current = self._current
        new = current is None or (current.handled and current.listed)
        self._reported(when, new=new).handled = True

    def tear_down(self, pid: int, context: int, device: int | None, when: Moment) -> None:
        """A context is lost."""
        fault = self._reported(when)
        if pid:
            self._add_victim(fault, pid, when)
        if device is None:
            return
        gpu = self._clients.gpu_of(pid, context)
        if gpu:
            self._gpus.add_ordinal(device, gpu)
        fault.add_device(device)
        if (pid, context) in fault.contexts and device not in fault.hit:
            fault.hit.add(device)
            if pid:  # clients with PID 0 cannot be distinguished: which of them it was is not known
                fault.count_gpu(self._uuid_of(device), when)

    def begin_list(self, of: Literal["devices", "clients"], when: Moment) -> None:
        """A list of bare numbers follows."""
        fault = self._reported(when)
        fault.listed = True
        if of == "clients":
            self._count_unnamed_gpu(fault, when)
        self._list = of

    def add_number(self, number: int, when: Moment) -> bool:
        """A bare number follows. Returns whether it belongs to a list."""
        if self._current is None or self._list is None:
            return False
        if self._list == "devices":
            self._current.add_device(number)
        else:
            self._add_victim(self._current, number, when)
        return True

    def close_device(self, device: int, when: Moment) -> None:
        """A context of the server was destroyed: a fault on that device is over."""
        self.close_report(when)
        for fault in list(self._open):
            fault.open_devices.discard(device)
            if fault.open_devices:
                continue
            self._open.remove(fault)
            when.observe("mps_server_fault_recovery_seconds", when.at - fault.at)
            if fault.verdict is None:
                fault.recovered_at = when.at  # reported after the fault itself
            else:
                self._report_recovery(fault, when.at, when)

    def close_report(self, when: Moment) -> None:
        """The log says no more of a fault."""
        fault, self._current, self._list = self._current, None, None
        if fault is None:
            return
        self._count_unnamed_gpu(fault, when)
        fault.closed = True
        self._decide(fault, when)

    def _reported(self, when: Moment, *, new: bool = False) -> Fault:
        """Return the fault that a line is about; a new one if this line begins one."""
        if self._current is not None and not new:
            return self._current
        if self._open and not new:
            return self._open[-1]  # a late line of its report
        self.close_report(when)
        fault = Fault(when.at, when.counted)
        self._undecided.append(fault)
        self._current = fault
        self._open.append(fault)
        del self._open[:-MAX_FAULTS]
        when.counters.set_latest("mps_server_last_fault_timestamp_seconds", fault.at)
        return fault

    def _add_victim(self, fault: Fault, pid: int, when: Moment) -> None:
        if (pid and pid in fault.victims) or len(fault.victims) >= MAX_CONTEXTS:
            return
        fault.victims.append(pid)
        if pid:
            client = self._clients.get(pid)
        else:
            client = next((one for one in self._clients if not one.pid and not one.lost), None)
        if client is None or not pid:
            fault.count_loss(pid, self._server.uid, when)
        elif not client.lost:
            fault.count_loss(pid, client.uid, when)
        if client is not None:
            client.lost, client.torn_down_at = True, fault.at

    def _count_unnamed_gpu(self, fault: Fault, when: Moment) -> None:
        """All devices of a fault are known: if no client is blamed, the only one was hit."""
        if not fault.uuids:
            devices = fault.hit or fault.devices
            fault.count_gpu(self._uuid_of(*devices) if len(devices) == 1 else "", when)

    def _uuid_of(self, device: int) -> str:
        return self._gpus.uuid_of(device, self._server.devices)

    # ------------------------------------------------------------------ who caused it

    def next_timer(self) -> float:
        """Return when run_timers() has something to do."""
        due = self.endings.next_timer()
        if self._current is not None:
            due = min(due, self._current.at + REPORT_SECONDS)
        return min(due, self._undecided[0].at + DECISION_SECONDS) if self._undecided else due

    def run_timers(self, when: Moment) -> None:
        """Close the report, decide the causes and clear the suspicions that are due."""
        if self._current is not None and self._current.at + REPORT_SECONDS <= when.at:
            self.close_report(when)
        for fault in list(self._undecided):
            if fault.at + DECISION_SECONDS <= when.at:
                self._decide(fault, when, final=True)
        self.endings.run_timers(when.at)

    def decide_all(self, when: Moment) -> None:
        """The server is gone: its log brings no more evidence."""
        self.close_report(when)
        for fault in list(self._undecided):
            self._decide(fault, when, final=True)

    def _decide(self, fault: Fault, when: Moment, *, final: bool = False) -> None:
        """Decide who caused a fault, and count its victims, once it is proved or too late."""
        if not fault.closed:
            return
        verdict = self._evidence.judge(fault.at, fault.uuids)
        if verdict.cause == "unknown" and self._evidence.readable and not final:
            return
        self._undecided.remove(fault)
        when = when._replace(counted=fault.counted)
        fault.verdict = verdict
        fault.count_losses(when)
        if verdict.cause == "unfinished_work":
            for owner in verdict.owners:
                if not owner.counted:
                    owner.counted = True
                    when.increment("mps_client_unfinished_exits_total", uid=owner.uid)
        self._report(fault, verdict, when)
        self.endings.forget(fault.uuids)
        if fault.recovered_at is not None:
            self._report_recovery(fault, fault.recovered_at, when)

    def _report(self, fault: Fault, verdict: Verdict, when: Moment) -> None:
        left_work = verdict.cause == "unfinished_work"
        proof: FaultProof = "unknown" if self._evidence.readable else "unread"
        if verdict.running:
            proof = "unit"
        when.add_incident(
            "unfinished_work" if left_work else "fault",
            at=fault.at,
            server_pid=self._server.pid,
            uid=self._server.uid,
            pids=fault.victims,
            blamed_pid=min(fault.blamed, default=None),
            caused_by_pids=[owner.pid for owner in verdict.owners],
            proof="address" if verdict.owners else proof,
            ended_before=()
            if verdict.owners or verdict.running
            else self.endings.before(fault.at, fault.uuids),
            gpu_uuids=fault.uuids,
        )

    def _report_recovery(self, fault: Fault, at: float, when: Moment) -> None:
        when.add_incident(
            "fault_recovered",
            at=at,
            server_pid=self._server.pid,
            uid=self._server.uid,
            gpu_uuids=fault.uuids,
            seconds=at - fault.at,
        )

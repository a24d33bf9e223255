"""The ends of one server's clients: what may explain a fault, and what the next client may meet.

A client that ends without waiting for its kernels leaves them to the server. With other clients on
the GPU the server meets a fatal error about 0.16 s later. Without, the next client meets it: its
first call fails with error 46. Times prove nothing (see fault_evidence), so they only list what is
possible (driver 580.159.04, H200):

    52.688 ... with status 806, assuming client {PID: 477, Context ID: 1} exit    its context ends
    52.851 Client {PID: 472, Context: 1} encountered a fatal GPU error.           472 is innocent
    52.883 ... with status 806, assuming client {PID: 477, Context ID: 0} exit    its process ends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from mps_exporter.mps.clients import ServerClients, ServerInfo
from mps_exporter.mps.fault_evidence import FaultEvidence, same_gpu
from mps_exporter.mps.record import MAX_GPUS, Moment
from mps_exporter.snapshot import EndedBefore, PossibleUnfinishedWork

END_TO_FAULT_SECONDS = (0.1, 0.3)
"""From the end of a context to a fault by the work that it left: 0.122 to 0.257 s were measured."""

LONG_END_SECONDS = (0.12, 0.8)
"""From the end of the context to the end of the process, of the only client on a GPU that left work
there: 0.146 to 0.487 s; without such work 0.012 to 0.093 s. A longer end is that of a program that
destroyed its context and continued."""

NEWCOMER_SECONDS = 1.0
"""From the moment at which the next context is ACTIVE to the fault: 0.172 to 0.697 s."""

KEPT_SECONDS = 5.0
"""Time after which an end explains no fault; the longest end took 1.4 s."""

MAX_ENDINGS = 256
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Ending:
    """A client that ends: first its contexts, then its process."""

    pid: int
    """0 where the daemon cannot see the client's PID namespace."""
    uid: int | None
    contexts: list[tuple[float, str]] = field(default_factory=list)
    """When each of its contexts ended, and the UUID of its GPU, "" if unknown."""
    ended: bool = False
    excused: bool = False
    """An operator terminated it, or a fault had taken it down."""

    @property
    def gpus(self) -> list[str]:
        return [gpu for _, gpu in self.contexts]

    @property
    def at(self) -> float:
        """When its last context ended."""
        return self.contexts[-1][0]


class ClientEndings:
    """Clients of one server that ended a moment ago or are ending."""

    def __init__(self, server: ServerInfo, clients: ServerClients, evidence: FaultEvidence) -> None:
        self._server = server
        self._clients = clients
        self._evidence = evidence
        self._endings: deque[Ending] = deque(maxlen=MAX_ENDINGS)
        self._possible: list[tuple[PossibleUnfinishedWork, float]] = []
        """What the last client on a GPU may have left, and until when it is awaited."""

    def context_ends(self, pid: int, context: int, when: Moment) -> None:
        """A client has closed the connection of a context, most often because it ends."""
        while self._endings and self._endings[0].at < when.at - KEPT_SECONDS:
            self._endings.popleft()
        client = self._clients.find(pid, context)
        ending = self._ending(pid) if pid else None
        if ending is None:
            ending = Ending(pid, self._server.uid if client is None else client.uid)
            self._endings.append(ending)
        if client is not None:
            ending.excused |= client.terminating or client.lost
        ending.contexts.append(
            (when.at, "" if client is None else client.contexts.get(context, ""))
        )
        self._evidence.client_ending(pid, when.at)

    def client_continues(self, pid: int, at: float) -> None:
        """A client opens another context: it does not end."""
        ending = self._ending(pid) if pid else None
        if ending is not None:
            self._endings.remove(ending)
        self._evidence.client_continues(pid, at)

    def process_ends(self, pid: int, when: Moment, *, in_fault: bool) -> None:
        """A client has closed its last connection."""
        self._evidence.client_ended(pid, when.at)
        ending = self._ending(pid)
        if ending is None:
            return
        ending.ended = True
        least, most = LONG_END_SECONDS
        seconds = when.at - ending.at
        if in_fault or ending.excused or not least <= seconds <= most or self._has_company(ending):
            return
        self.forget(ending.gpus)
        gpus = tuple(sorted({gpu for gpu in ending.gpus if gpu}))
        left = PossibleUnfinishedWork(pid, ending.uid, when.at, round(seconds, 3), gpus)
        self._possible = [*self._possible, (left, NEVER)][-MAX_GPUS:]

    def _ending(self, pid: int) -> Ending | None:
        """Return the end of a client that is in progress; of those with PID 0, the oldest."""
        return next((one for one in self._endings if one.pid == pid and not one.ended), None)

    def _has_company(self, ending: Ending) -> bool:
        """Whether other clients use its GPUs, or ended at the same time."""
        others = (
            [*client.contexts.values()]
            for client in self._clients
            if client.contexts and (client.pid != ending.pid or ending.pid == 0)
        )
        ended = (
            one.gpus
            for one in self._endings
            if one is not ending and one.at >= ending.at - END_TO_FAULT_SECONDS[1]
        )
        return any(same_gpu(ending.gpus, gpus) for gpus in (*others, *ended))

    def before(self, at: float, gpus: Collection[str]) -> tuple[EndedBefore, ...]:
        """Return the clients whose end is at a distance from a fault at which work met it."""
        least, most = END_TO_FAULT_SECONDS
        found = [
            EndedBefore(one.pid, round(at - closed_at, 3))
            for one in self._endings
            if not one.excused
            for closed_at, gpu in one.contexts[-1:]
            if least <= at - closed_at <= most and same_gpu((gpu,), gpus)
        ]
        return tuple(found)

    def context_ready(self, gpu: str, when: Moment) -> None:
        """A context can be used: what was left on its GPU is met soon."""
        self._possible = [
            (
                left,
                min(until, when.at + NEWCOMER_SECONDS)
                if same_gpu(left.gpu_uuids, (gpu,))
                else until,
            )
            for left, until in self._possible
        ]

    def forget(self, gpus: Collection[str]) -> None:
        """What was left on these GPUs, if anything, is gone with a fault."""
        self._possible = [one for one in self._possible if not same_gpu(one[0].gpu_uuids, gpus)]

    def next_timer(self) -> float:
        """Return when run_timers() has something to do."""
        return min((until for _, until in self._possible), default=NEVER)

    def run_timers(self, at: float) -> None:
        """Where a new client has run without a fault, nothing had been left."""
        self._possible = [one for one in self._possible if one[1] > at]

    @property
    def possible_unfinished_work(self) -> PossibleUnfinishedWork | None:
        """Work that the last client on a GPU may have left there."""
        return self._possible[0][0] if self._possible else None

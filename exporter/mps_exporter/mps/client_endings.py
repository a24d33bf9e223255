"""The ends of one server's clients, which may explain a fault: see unfinished_work."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from mps_exporter.mps import unfinished_work as rule
from mps_exporter.mps.clients import ServerClients
from mps_exporter.mps.gpu_names import MAX_GPUS
from mps_exporter.mps.moment import Moment
from mps_exporter.mps.server_info import ServerInfo
from mps_exporter.mps.unfinished_work import MAX_ENDINGS, QUEUED_END_SECONDS, Ending, Last
from mps_exporter.snapshot import PossibleUnfinishedWork

NEVER = float("inf")


class ClientEndings:
    """Clients that ended a moment ago or are ending."""

    def __init__(self, server: ServerInfo, clients: ServerClients) -> None:
        self._server = server
        self._clients = clients
        self._endings: deque[Ending] = deque(maxlen=MAX_ENDINGS)
        self._last: list[Last] = []
        """For each GPU, the clients that may have left work that nothing has met yet."""

    def get(self, pid: int) -> Ending | None:
        """Return the end of a client that is in progress; of those with PID 0, the oldest."""
        return next((one for one in self._endings if one.pid == pid and one.ended_at is None), None)

    def context_ends(self, pid: int, context: int, when: Moment) -> None:
        """A client has closed the connection of a context, most often because it ends."""
        at, endings = when.at, self._endings
        while endings and (endings[0].closed_at() or at) < at - QUEUED_END_SECONDS:
            endings.popleft()
        client = self._clients.find(pid, context)
        ending = None if pid == 0 else self.get(pid)
        if ending is None:
            ending = Ending(pid, self._server.uid if client is None else client.uid)
            endings.append(ending)
        if client is not None:
            ending.excused |= client.terminating or client.lost
        ending.contexts.append((at, "" if client is None else client.contexts.get(context, "")))

    def client_continues(self, pid: int) -> None:
        """A client opens another context: it does not end."""
        ending = self.get(pid) if pid else None
        if ending is not None:
            self._endings.remove(ending)

    def complete(self, ending: Ending) -> None:
        """The process of a client has ended, and its end explains no fault that came before."""
        others = [
            list(client.contexts.values())
            for client in self._clients
            if client.contexts and (client.pid != ending.pid or ending.pid == 0)
        ]
        last = rule.last_on_gpu(ending, self._endings, others, self._last)
        self._last = last[-MAX_GPUS:]

    def context_ready(self, gpu: str, when: Moment) -> None:
        """A context can be used: the first one after unfinished work meets it."""
        for last in self._last:
            if last.newcomer_at is None and last.was_on((gpu,)):
                last.newcomer_at = when.at

    def before(self, at: float) -> tuple[tuple[Ending, ...], tuple[Last, ...]]:
        """Return the ends, and the last clients on a GPU, that may explain a fault."""
        return tuple(self._endings), tuple(last for last in self._last if last.may_have_hit(at))

    def failed_start(self, at: float, victims: Iterable[int]) -> bool | None:
        """Return whether all victims of a fault failed in their first call: see the rule."""
        return rule.failed_start(at, victims, self._endings)

    def clear(self, met: Collection[Last]) -> None:
        """What they left, if anything, is gone with a fault."""
        self._last = [last for last in self._last if last not in met]

    def next_timer(self) -> float:
        """Return when run_timers() has something to do."""
        return min([last.resolved_at for last in self._last]) if self._last else NEVER

    def run_timers(self, at: float) -> None:
        """Where a new client has run without a fault, nothing had been left."""
        self._last = [last for last in self._last if last.resolved_at > at]

    @property
    def possible_unfinished_work(self) -> PossibleUnfinishedWork | None:
        """Work that the last client on a GPU may have left there."""
        left = next((last.endings[0] for last in self._last if last.suspicious), None)
        if left is None or left.ended_at is None:
            return None
        return PossibleUnfinishedWork(
            pid=left.pid,
            uid=left.uid,
            ended_at=left.ended_at,
            seconds=round(left.seconds(left.ended_at), 3),
            gpu_uuids=tuple(sorted({gpu for _, gpu in left.contexts if gpu})),
        )

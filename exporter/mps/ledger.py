"""The ledger of one daemon: events in, who waits, who crashed and who was lost out.

    lines --apply--> books <--observe-- /proc: who is gone
                       ^---reconcile--- the control tool: who is there
                     view --> LedgerView

It reads no file and knows no clock: every moment comes from a line's stamp, so a log that is
replayed gives the same numbers as one that is followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from exporter.model import (
    ClientSession,
    ClientState,
    Incident,
    LedgerView,
    PossibleUnfinishedWork,
    ServerSession,
    Wait,
)
from exporter.mps import deaths
from exporter.mps.adoption import reconcile
from exporter.mps.books import Books
from exporter.mps.control_reader import ControlReader
from exporter.mps.control_text import ServerReply
from exporter.mps.sequence import Entry
from exporter.mps.server_reader import ServerReader
from exporter.mps.serving import Client, Server
from exporter.mps.unfinished_work import Last
from exporter.observations import DaemonFacts, LogName, ProcessFacts


class Ledger:
    """What the logs of one daemon say."""

    def __init__(self, pipe_directory: str) -> None:
        self.pipe_directory = pipe_directory
        self._books = Books()
        self._control = ControlReader(self._books)
        self._server = ServerReader(self._books)
        self._found = False
        """The daemon's process has been seen."""

    def readable(self, log: LogName, readable: bool) -> None:
        """Say whether a log can be followed: what it would tell must then be told by others."""
        self._books.readable[log] = readable

    def count_from(self, at: float) -> None:
        """Say when the exporter began to look: running totals begin there. Only once."""
        books = self._books
        if books.counting_from_ms is None:
            books.counting_from_ms = round(at * 1000.0)

    def apply(self, entry: Entry) -> None:
        """Take in a line. Those that are not counted rebuild the state only."""
        books = self._books
        tally = books.tally
        counted = tally.counting = entry.counted
        log = entry.log
        if counted:
            tally.lines[log] += 1
        books.readable[log] = True
        # Daemons that write both streams into one file are told apart by the component.
        if entry.component == "Control" or (not entry.component and log == "control"):
            self._control.read(entry)
        else:
            self._server.read(entry)

    def settle(self, until: float) -> None:
        """Say that everything that happened before this moment has been applied."""
        books = self._books
        books.settle(until)
        deaths.believe(books, until)

    def observe(
        self,
        now: float,
        facts: DaemonFacts,
        processes: Mapping[int, ProcessFacts],
        asked: Collection[int],
    ) -> None:
        """Take in what /proc shows.

        Args:
            now: When it was looked at.
            facts: The daemon.
            processes: Those of the processes asked for that are there, by the host's PID.
            asked: Which were asked for; pids() says which are of interest.
        """
        started_at = self._books.daemon.started_at
        alive, daemon = deaths.liveness(facts, processes, frozenset(asked), started_at)
        if facts.process is not None:
            self._found = True
        elif self._found:
            daemon = False  # a process that was there is not any more
        self.witness(now, alive, daemon=daemon)

    def witness(self, now: float, alive: deaths.Alive, *, daemon: bool | None = None) -> None:
        """Take in who is alive.

        Args:
            now: When it was looked at.
            alive: (PID as the log prints it, a moment at which it was alive) -> still there?
                None where that cannot be told, as for a daemon in another PID namespace.
            daemon: Whether the control daemon's process is there; None: unknown.
        """
        deaths.notice(self._books, now, alive, daemon)
        if not any(self._books.readable.values()):
            self.settle(now)

    def disown(self, server_pid: int) -> None:
        """A server that was known from its own words only is another daemon's."""
        server = self._books.servers.get(server_pid)
        if server is not None and server.adopted:
            del self._books.servers[server_pid]

    def nobody_there(self, at: float) -> None:
        """Take in that no process of the daemon is seen, and its socket answers nobody."""
        self.witness(at, lambda _pid, _at: None, daemon=False)

    def reconcile(
        self, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
    ) -> None:
        """Take in what the control tool said just now: fill in what the log does not explain.

        Args:
            at: When it was asked.
            listed: The servers that the daemon named; None: it did not say.
            replies: What each of its servers said.
        """
        reconcile(self._books, at, listed, replies)

    @property
    def silent_since(self) -> float | None:
        """When the daemon began something that it normally goes on with at once, and did not."""
        daemon = self._books.daemon
        if daemon.quit_requested_at is not None or daemon.ended_at is not None:
            return None
        return daemon.sent_at if daemon.silent_since is None else daemon.silent_since

    def incidents_since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Give the incidents after the first `seen` ones, and how many there have been by now."""
        return self._books.incidents.since(seen)

    def pids(self) -> frozenset[int]:
        """Processes whose life or death matters: queued, serving, and connected ones."""
        books = self._books
        pids = {entry.pid for entry in books.queue}
        for server in books.servers.values():
            pids.add(server.pid)
            pids.update(client.pid for client in server.clients.values())
            if not server.ever_connected:
                pids.update(server.started_for)
        return frozenset(pid for pid in pids if pid)

    def watched(self) -> list[int]:
        """Processes whose end must be seen when it happens: no line of a log tells of it.

        Servers, those for whom one was made and who have not come yet, and the queue.
        """
        books = self._books
        pids = list(books.servers)
        for server in books.servers.values():
            if not server.ever_connected:
                pids += [pid for pid, dead in server.started_for.items() if not dead]
        pids += [entry.pid for entry in books.queue if not entry.dead]
        return pids

    def view(self, now: float, *, clients: bool = True) -> LedgerView:
        """Give all that is known, or all but the clients by name. Changes nothing.

        Running totals are as of the last settle(): up to then every line has been read, so they
        never have to go back.
        """
        books = self._books
        daemon = books.daemon
        waits = tuple(
            Wait(entry.pid, entry.uid, entry.since, entry.behind_uid, entry.dead)
            for entry in books.queue
            if entry.behind_another
        )
        waits += tuple(
            Wait(client.pid, client.wait.uid, client.wait.since, server.uid)
            for server in books.servers.values()
            if server.ghost
            for client in server.clients.values()
            if client.wait is not None
        )
        pressing = bool(waits) or daemon.quit_requested_at is not None
        quit_in_order = daemon.ended_at is not None and not daemon.died
        return LedgerView(
            at=now,
            daemon_started_at=None if quit_in_order else daemon.started_at,
            daemon_ended_at=daemon.ended_at,
            daemon_died=daemon.died,
            binary_version=daemon.binary_version,
            quit_requested_at=daemon.quit_requested_at,
            servers=tuple(
                _server_session(server, clients=clients) for server in books.servers.values()
            ),
            waits=waits,
            configured_at=daemon.configured_at,
            daemon_served_at=daemon.served_at,
            handover_backoff_seconds=daemon.backoff_seconds if pressing else None,
            devices=dict(books.ordinals) or _only_device(books),
            counters=books.tally.snapshot(),
            incidents=books.incidents.snapshot(),
        )


def _only_device(books: Books) -> dict[int, str]:
    """Where one GPU is named and servers use device 0 only, they are the same."""
    ordinals = {device for server in books.servers.values() for device in server.devices}
    return {0: next(iter(books.uuids))} if len(books.uuids) == 1 and ordinals == {0} else {}


def _server_session(server: Server, *, clients: bool) -> ServerSession:
    faults = [fault.at for fault in server.faults]
    state = "FAULT" if faults else "ACTIVE"
    if server.ready_at is None and not server.ever_connected:
        state = "INITIALIZING"
    return ServerSession(
        pid=server.pid,
        uid=server.uid,
        started_at=server.started_at,
        ready_at=server.ready_at,
        state=server.said_state or state,
        fault_since=min(faults, default=None),
        active_thread_ratio=server.thread_ratio,
        pinned_memory_limit_bytes=dict(server.memory_limits),
        devices=dict(server.devices),
        client_limit=server.client_limit,
        ghost=server.ghost and server.missing_since is None,
        clients=tuple(
            _client_session(server, client) for client in server.clients.values() if clients
        ),
        clients_count=server.client_count,
        adopted=server.adopted,
        possible_unfinished_work=_possible_unfinished_work(server.last),
    )


def _possible_unfinished_work(lasts: Iterable[Last]) -> PossibleUnfinishedWork | None:
    left = next((last.endings[0] for last in lasts if last.suspicious), None)
    if left is None or left.ended_at is None:
        return None
    return PossibleUnfinishedWork(
        pid=left.pid,
        uid=left.uid,
        ended_at=left.ended_at,
        seconds=round(left.seconds(left.ended_at), 3),
        gpu_uuids=tuple(sorted({gpu for _, gpu in left.contexts if gpu})),
    )


def _client_session(server: Server, client: Client) -> ClientSession:
    contexts: dict[str, int] = {}
    for uuid in client.contexts.values():
        contexts[uuid] = contexts.get(uuid, 0) + 1
    state, since = _client_state(client)
    return ClientSession(
        pid=client.pid,
        server_pid=server.pid,
        uid=client.uid,
        connected_at=client.connected_at,
        state=state,
        state_since=since,
        contexts=contexts,
        active_thread_ratio=client.thread_ratio,
        pinned_memory_limit_bytes=client.memory_limits,
    )


def _client_state(client: Client) -> tuple[ClientState | None, float | None]:
    """What a client is doing, and since when; None where no line of server.log tells."""
    if client.torn_down_at is not None:
        return "torn_down", client.torn_down_at
    if client.creating:
        return "creating_context", min(client.creating.values())
    if client.by_word and not client.contexts:
        return None, None
    if client.had_context:
        return "active", client.active_since
    return (None, None) if client.adopted else ("connecting", client.connected_at)

"""server.log: what the servers say, as entries in the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.mps import log_events as e
from exporter.mps.books import Books
from exporter.mps.sequence import Entry
from exporter.mps.serving import MAX_CONTEXTS, Server

REFUSAL_SECONDS = 1.0
"""The lines about one refused newcomer are written in one go."""

_CAUSES = {807: "server_not_ready", 808: "context_limit", 809: "context_limit"}
"""CUDA errors with which a newcomer is refused."""

_Handler = Callable[[Server, Any, Entry], None]


class ServerReader:
    """Reads server.log; a server is named by the PID in the prefix."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._invalid: dict[int, float] = {}
        self._handlers: dict[type[e.Event], _Handler] = {
            e.ServerProcess: self._process,
            e.ServerOpen: self._open,
            e.ServerExiting: self._exiting,
            e.ServerOwner: self._owner,
            e.ThreadLimit: self._thread_limit,
            e.MemoryLimit: self._memory_limit,
            e.DeviceOpened: self._device_opened,
            e.DeviceClosed: self._device_closed,
            e.ConnectionRequested: self._connection_requested,
            e.ClientConnected: self._client_connected,
            e.DeviceAssociated: self._device_associated,
            e.ClientStatus: self._client_status,
            e.ConnectionLost: self._connection_lost,
            e.ContextLeft: self._context_left,
            e.ClientLeft: self._client_left,
            e.TerminationRequested: self._termination_requested,
            e.TerminationDone: self._termination_done,
            e.LimitReached: self._limit_reached,
            e.TeardownRefusal: self._teardown_refusal,
            e.AcceptFailed: self._accept_failed,
            e.CredentialsMissing: self._credentials_missing,
            e.FaultBlamed: self._fault_blamed,
            e.FaultHandling: self._fault_handling,
            e.FaultTeardown: self._fault_teardown,
            e.FaultList: self._fault_list,
            e.Number: self._number,
        }

    def read(self, entry: Entry) -> None:
        """Enter one line into the books."""
        event = entry.event
        self._books.server_heard_at = entry.at
        self._books.daemon.sent_at = None
        kind = type(event)
        if kind is e.InvalidDevice:
            self._invalid_device(entry)
            return
        handler = self._handlers.get(kind)
        if handler is None:
            if kind is e.Unrecognized and self._books.tally.counting:
                self._books.tally.unrecognized["server"] += 1
            return
        server = self._server(entry, kind)
        if server is not None:
            handler(server, event, entry)

    def _server(self, entry: Entry, kind: type[e.Event]) -> Server | None:
        """The server that writes; one whose start is not in the log is taken as it is."""
        books = self._books
        server = books.servers.get(entry.pid)
        if server is None:
            if kind is e.Number or (kind is not e.ServerProcess and entry.pid in books.ended):
                return None
            server = books.start_server(entry.pid, None, entry.at, adopted=True)
        server.has_log = True
        return server

    # ------------------------------------------------------------------ life

    def _process(self, server: Server, _event: e.ServerProcess, entry: Entry) -> None:
        books = self._books
        if books.readable["control"]:
            return
        # Nobody else tells: a daemon has one server at a time, so the others are gone.
        for other in [other for other in books.servers.values() if other is not server]:
            cause, detail = books.exit_cause(other, 0, entry.at)
            books.end_server(other, entry.at, cause, detail)

    def _open(self, server: Server, _event: e.ServerOpen, entry: Entry) -> None:
        books = self._books
        if server.ready_at is None and not books.readable["control"]:
            books.tally.by_user(books.tally.server_starts, server.uid)
            books.tally.observe(books.tally.server_startup, entry.at - server.started_at)
            books.server_ready(server, entry.at)

    def _exiting(self, server: Server, _event: e.ServerExiting, entry: Entry) -> None:
        server.exiting = True
        if not self._books.readable["control"]:
            self._books.end_server(server, entry.at, "requested")

    def _owner(self, server: Server, event: e.ServerOwner, _entry: Entry) -> None:
        if server.uid is None:
            server.uid = event.uid

    def _thread_limit(self, server: Server, event: e.ThreadLimit, _entry: Entry) -> None:
        if server.thread_ratio is None:  # said once, when it starts
            for client in server.clients.values():
                client.thread_ratio = event.ratio
        server.thread_ratio = event.ratio

    def _memory_limit(self, server: Server, event: e.MemoryLimit, _entry: Entry) -> None:
        if event.device in server.memory_limits or len(server.memory_limits) < 64:
            server.memory_limits = {**server.memory_limits, event.device: event.limit_bytes}

    def _device_opened(self, server: Server, event: e.DeviceOpened, _entry: Entry) -> None:
        if event.device in server.devices or len(server.devices) < 64:
            server.devices[event.device] = event.name

    def _device_closed(self, server: Server, event: e.DeviceClosed, entry: Entry) -> None:
        self._books.device_closed(server, event.device, entry.at)

    def _credentials_missing(
        self, server: Server, _event: e.CredentialsMissing, entry: Entry
    ) -> None:
        server.complained = True
        self._books.ghost(server, entry.at)

    # ------------------------------------------------------------------ clients

    def _connection_requested(
        self, server: Server, event: e.ConnectionRequested, _entry: Entry
    ) -> None:
        if event.named:
            server.named = True
        elif server.named is None:
            server.named = False
            self._books.connect_all(server)

    def _client_connected(self, server: Server, event: e.ClientConnected, entry: Entry) -> None:
        server.named = True
        if event.context == 0:
            self._books.connect(server, event.pid, entry.at)
        else:
            self._books.open_context(server, event.pid, event.context, entry.at)

    def _device_associated(self, server: Server, event: e.DeviceAssociated, _entry: Entry) -> None:
        self._books.gpu(event.uuid, event.name)
        if server.associating:
            key, context = server.associating.popleft()
            client = server.clients.get(key)
            if client is not None and context in client.contexts:
                client.contexts[context] = event.uuid
                server.associated = (key, context)

    def _client_status(self, server: Server, event: e.ClientStatus, entry: Entry) -> None:
        """The line says whose the GPU named just before it is: put right what order made wrong."""
        if event.active:
            self._books.context_active(server, event.pid, event.context, entry.at)
        guessed, server.associated = server.associated, None
        if event.active:
            self._books.context_ready(server, event.pid, event.context, entry.at)
        if not event.active or guessed is None or event.pid == 0:
            return
        meant = (event.pid, event.context)
        mine = server.clients.get(event.pid)
        theirs = server.clients.get(guessed[0])
        if guessed == meant or mine is None or theirs is None:
            return
        if mine.contexts.get(event.context) == "":
            mine.contexts[event.context] = theirs.contexts.get(guessed[1], "")
            if guessed[1] in theirs.contexts:
                theirs.contexts[guessed[1]] = ""
                server.associating.appendleft(guessed)
            if meant in server.associating:
                server.associating.remove(meant)

    def _connection_lost(self, server: Server, event: e.ConnectionLost, entry: Entry) -> None:
        if event.context:
            self._books.context_ends(server, event.pid, event.context, entry.at)
        else:
            self._books.process_ends(server, event.pid, entry.at)

    def _context_left(self, server: Server, event: e.ContextLeft, entry: Entry) -> None:
        if event.pid is not None and event.context is not None:
            self._books.close_context(server, event.pid, event.context, entry.at)

    def _client_left(self, server: Server, event: e.ClientLeft, entry: Entry) -> None:
        if event.pid is None:
            self._books.leave_unnamed(server, entry.at)
        else:
            self._books.leave(server, event.pid, entry.at)

    def _termination_requested(
        self, server: Server, event: e.TerminationRequested, _entry: Entry
    ) -> None:
        server.terminating_pid = event.pid
        found = server.find(event.pid)
        if found is not None:
            found[1].terminating = True

    def _termination_done(self, server: Server, _event: e.TerminationDone, entry: Entry) -> None:
        pid, server.terminating_pid = server.terminating_pid, None
        found = None if pid is None else server.find(pid)
        if found is not None:
            self._books.lose(found[1], "terminated", entry.at)

    # ------------------------------------------------------------------ refusals

    def _refuse(self, server: Server, cause: str, pid: int | None, entry: Entry) -> None:
        uid = server.uid
        self._books.reject(uid, cause, () if pid is None else (pid,), entry.at)
        server.refusals.append(entry.at)

    def _limit_reached(self, server: Server, event: e.LimitReached, entry: Entry) -> None:
        server.client_limit = event.limit
        self._refuse(server, "context_limit", None, entry)

    def _teardown_refusal(self, server: Server, event: e.TeardownRefusal, entry: Entry) -> None:
        self._refuse(server, "server_not_ready", event.pid, entry)
        self._books.refused(server, event.pid, event.context, entry.at)

    def _accept_failed(self, server: Server, event: e.AcceptFailed, entry: Entry) -> None:
        refusals = server.refusals
        while refusals and entry.at - refusals[0] > REFUSAL_SECONDS:
            refusals.popleft()
        cause = _CAUSES.get(event.status)
        if refusals:
            refusals.popleft()  # counted by its first line
        elif cause is not None:
            self._refuse(server, cause, event.pid, entry)
            refusals.pop()
        self._books.refused(server, event.pid, event.context, entry.at)

    def _invalid_device(self, entry: Entry) -> None:
        """Up to three lines, written by the client itself, are one refusal."""
        books = self._books
        known = self._invalid.get(entry.pid)
        if known is not None and entry.at - known <= REFUSAL_SECONDS:
            return
        if len(self._invalid) >= 64:
            self._invalid.clear()
        self._invalid[entry.pid] = entry.at
        server = books.current()
        uid = None if server is None else server.uid
        books.reject(uid, "invalid_device", (entry.pid,), entry.at)

    # ------------------------------------------------------------------ faults

    def _fault_blamed(self, server: Server, event: e.FaultBlamed, entry: Entry) -> None:
        block = server.block
        begins = block is None or (block.handled and event.pid not in block.blamed)
        fault = self._books.fault_block(server, entry.at, begins=begins)
        fault.blamed.add(event.pid)
        if len(fault.contexts) < MAX_CONTEXTS:
            fault.contexts.add((event.pid, event.context))
        if event.pid:
            self._books.fault_victim(server, fault, event.pid)

    def _fault_handling(self, server: Server, _event: e.FaultHandling, entry: Entry) -> None:
        block = server.block
        begins = block is None or (block.handled and block.listed)
        self._books.fault_block(server, entry.at, begins=begins).handled = True

    def _fault_teardown(self, server: Server, event: e.FaultTeardown, entry: Entry) -> None:
        fault = self._books.fault_block(server, entry.at, begins=False)
        if event.pid:
            self._books.fault_victim(server, fault, event.pid)
        if event.device is None:
            return
        found = server.find(event.pid, event.context)
        uuid = "" if found is None else found[1].contexts.get(event.context, "")
        if uuid:
            self._books.ordinal(event.device, uuid)
        self._books.fault_device(fault, event.device)
        if (event.pid, event.context) in fault.contexts:
            self._books.fault_hit(server, fault, event.pid, event.device)

    def _fault_list(self, server: Server, event: e.FaultList, entry: Entry) -> None:
        fault = self._books.fault_block(server, entry.at, begins=False)
        fault.listed = True
        if event.of == "clients":
            self._books.fault_listed(server, fault)
        server.listing = event.of

    def _number(self, server: Server, event: e.Number, _entry: Entry) -> None:
        if server.block is None or server.listing is None:
            if self._books.tally.counting:
                self._books.tally.unrecognized["server"] += 1
        elif server.listing == "devices":
            self._books.fault_device(server.block, event.value)
        else:
            self._books.fault_victim(server, server.block, event.value)

"""server.log: what the servers say, as entries in the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mps_exporter.mps import log_events as e
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.servers import MAX_CONTEXTS, TrackedServer
from mps_exporter.mps.state import DaemonState

REFUSAL_SECONDS = 1.0
"""The lines about one refused newcomer are written in one go."""

_CAUSES = {807: "server_not_ready", 808: "context_limit", 809: "context_limit"}
"""CUDA errors with which a newcomer is refused."""

_Handler = Callable[[TrackedServer, Any, LogEntry], None]


class ServerLogReader:
    """Reads server.log; a server is named by the PID in the prefix."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._invalid_device_at: dict[int, float] = {}
        self._handlers: dict[type[e.LogEvent], _Handler] = {
            e.ServerProcess: self._process,
            e.ServerOpen: self._open,
            e.ServerExiting: self._exiting,
            e.ServerOwner: self._owner,
            e.ThreadLimitSet: self._thread_limit,
            e.MemoryLimitSet: self._memory_limit,
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

    def apply(self, entry: LogEntry) -> None:
        """Enter one line into the books."""
        event = entry.event
        self._state.server_heard_at = entry.at
        self._state.daemon.sent_at = None
        kind = type(event)
        if kind is e.InvalidDevice:
            self._invalid_device(entry)
            return
        handler = self._handlers.get(kind)
        if handler is None:
            if kind is e.Unrecognized:
                self._count_unrecognized()
            return
        server = self._server(entry, kind)
        if server is not None:
            handler(server, event, entry)

    def _count_unrecognized(self) -> None:
        self._state.counters.increment("mps_control_log_unrecognized_lines_total", log="server")

    def _server(self, entry: LogEntry, kind: type[e.LogEvent]) -> TrackedServer | None:
        """The server that writes; one whose start is not in the log is taken as it is."""
        state = self._state
        server = state.servers.get(entry.pid)
        if server is None:
            if kind is e.Number or (kind is not e.ServerProcess and entry.pid in state.ended_pids):
                return None
            server = state.start_server(entry.pid, None, entry.at, adopted=True)
        server.has_log = True
        return server

    # ------------------------------------------------------------------ life

    def _process(self, server: TrackedServer, _event: e.ServerProcess, entry: LogEntry) -> None:
        state = self._state
        if state.readable["control"]:
            return
        # Nobody else tells: a daemon has one server at a time, so the others are gone.
        for other in [other for other in state.servers.values() if other is not server]:
            cause, detail = state.exit_cause(other, None, entry.at)
            state.end_server(other, entry.at, cause, detail)

    def _open(self, server: TrackedServer, _event: e.ServerOpen, entry: LogEntry) -> None:
        state = self._state
        if server.ready_at is None and not state.readable["control"]:
            state.counters.increment("mps_server_starts_total", uid=server.uid)
            state.counters.observe("mps_server_startup_seconds", entry.at - server.started_at)
            state.server_ready(server, entry.at)

    def _exiting(self, server: TrackedServer, _event: e.ServerExiting, entry: LogEntry) -> None:
        server.exiting = True
        if not self._state.readable["control"]:
            self._state.end_server(server, entry.at, "requested")

    def _owner(self, server: TrackedServer, event: e.ServerOwner, _entry: LogEntry) -> None:
        if server.uid is None:
            server.uid = event.uid

    def _thread_limit(
        self, server: TrackedServer, event: e.ThreadLimitSet, _entry: LogEntry
    ) -> None:
        if server.thread_ratio is None:  # said once, when it starts
            for client in server.clients.values():
                client.thread_ratio = event.ratio
        server.thread_ratio = event.ratio

    def _memory_limit(
        self, server: TrackedServer, event: e.MemoryLimitSet, _entry: LogEntry
    ) -> None:
        if event.device in server.memory_limits or len(server.memory_limits) < 64:
            server.memory_limits = {**server.memory_limits, event.device: event.limit_bytes}

    def _device_opened(
        self, server: TrackedServer, event: e.DeviceOpened, _entry: LogEntry
    ) -> None:
        if event.device in server.devices or len(server.devices) < 64:
            server.devices[event.device] = event.name

    def _device_closed(self, server: TrackedServer, event: e.DeviceClosed, entry: LogEntry) -> None:
        self._state.device_closed(server, event.device, entry.at)

    def _credentials_missing(
        self, server: TrackedServer, _event: e.CredentialsMissing, entry: LogEntry
    ) -> None:
        server.credentials_missing = True
        self._state.ghost(server, entry.at)

    # ------------------------------------------------------------------ clients

    def _connection_requested(
        self, server: TrackedServer, event: e.ConnectionRequested, _entry: LogEntry
    ) -> None:
        if event.named:
            server.logs_pids = True
        elif server.logs_pids is None:
            server.logs_pids = False
            self._state.connect_admitted(server)

    def _client_connected(
        self, server: TrackedServer, event: e.ClientConnected, entry: LogEntry
    ) -> None:
        server.logs_pids = True
        if event.context == 0:
            self._state.connect(server, event.pid, entry.at)
        else:
            self._state.open_context(server, event.pid, event.context, entry.at)

    def _device_associated(
        self, server: TrackedServer, event: e.DeviceAssociated, _entry: LogEntry
    ) -> None:
        self._state.learn_gpu(event.uuid, event.name)
        if server.unassociated_contexts:
            key, context = server.unassociated_contexts.popleft()
            client = server.clients.get(key)
            if client is not None and context in client.contexts:
                client.contexts[context] = event.uuid
                server.last_associated = (key, context)

    def _client_status(self, server: TrackedServer, event: e.ClientStatus, entry: LogEntry) -> None:
        """The line says whose the GPU named just before it is: put right what order made wrong."""
        if event.active:
            self._state.context_active(server, event.pid, event.context, entry.at)
        guessed, server.last_associated = server.last_associated, None
        if event.active:
            self._state.context_ready(server, event.pid, event.context, entry.at)
        if not event.active or guessed is None or event.pid == 0:
            return
        meant = (event.pid, event.context)
        own = server.clients.get(event.pid)
        theirs = server.clients.get(guessed[0])
        if guessed == meant or own is None or theirs is None:
            return
        if own.contexts.get(event.context) == "":
            own.contexts[event.context] = theirs.contexts.get(guessed[1], "")
            if guessed[1] in theirs.contexts:
                theirs.contexts[guessed[1]] = ""
                server.unassociated_contexts.appendleft(guessed)
            if meant in server.unassociated_contexts:
                server.unassociated_contexts.remove(meant)

    def _connection_lost(
        self, server: TrackedServer, event: e.ConnectionLost, entry: LogEntry
    ) -> None:
        if event.context:
            self._state.context_ends(server, event.pid, event.context, entry.at)
        else:
            self._state.process_ends(server, event.pid, entry.at)

    def _context_left(self, server: TrackedServer, event: e.ContextLeft, entry: LogEntry) -> None:
        if event.pid is not None and event.context is not None:
            self._state.close_context(server, event.pid, event.context, entry.at)

    def _client_left(self, server: TrackedServer, event: e.ClientLeft, entry: LogEntry) -> None:
        if event.pid is None:
            self._state.disconnect_unnamed(server, entry.at)
        else:
            self._state.disconnect(server, event.pid, entry.at)

    def _termination_requested(
        self, server: TrackedServer, event: e.TerminationRequested, _entry: LogEntry
    ) -> None:
        server.terminating_pid = event.pid
        found = server.find_client(event.pid)
        if found is not None:
            found[1].terminating = True

    def _termination_done(
        self, server: TrackedServer, _event: e.TerminationDone, entry: LogEntry
    ) -> None:
        pid, server.terminating_pid = server.terminating_pid, None
        found = None if pid is None else server.find_client(pid)
        if found is not None:
            self._state.count_loss(found[1], "terminated", entry.at)

    # ------------------------------------------------------------------ refusals

    def _refuse(self, server: TrackedServer, cause: str, pid: int | None, entry: LogEntry) -> None:
        uid = server.uid
        self._state.count_rejection(uid, cause, () if pid is None else (pid,), entry.at)
        server.counted_refusals.append(entry.at)

    def _limit_reached(self, server: TrackedServer, event: e.LimitReached, entry: LogEntry) -> None:
        server.client_limit = event.limit
        self._refuse(server, "context_limit", None, entry)

    def _teardown_refusal(
        self, server: TrackedServer, event: e.TeardownRefusal, entry: LogEntry
    ) -> None:
        self._refuse(server, "server_not_ready", event.pid, entry)
        self._state.client_rejected(server, event.pid, event.context, entry.at)

    def _accept_failed(self, server: TrackedServer, event: e.AcceptFailed, entry: LogEntry) -> None:
        refusals = server.counted_refusals
        while refusals and entry.at - refusals[0] > REFUSAL_SECONDS:
            refusals.popleft()
        cause = _CAUSES.get(event.status)
        if refusals:
            refusals.popleft()  # counted by its first line
        elif cause is not None:
            self._refuse(server, cause, event.pid, entry)
            refusals.pop()
        self._state.client_rejected(server, event.pid, event.context, entry.at)

    def _invalid_device(self, entry: LogEntry) -> None:
        """Up to three lines, written by the client itself, are one refusal."""
        state = self._state
        known = self._invalid_device_at.get(entry.pid)
        if known is not None and entry.at - known <= REFUSAL_SECONDS:
            return
        if len(self._invalid_device_at) >= 64:
            self._invalid_device_at.clear()
        self._invalid_device_at[entry.pid] = entry.at
        server = state.latest_server()
        uid = None if server is None else server.uid
        state.count_rejection(uid, "invalid_device", (entry.pid,), entry.at)

    # ------------------------------------------------------------------ faults

    def _fault_blamed(self, server: TrackedServer, event: e.FaultBlamed, entry: LogEntry) -> None:
        block = server.current_fault
        begins = block is None or (block.handled and event.pid not in block.blamed)
        fault = self._state.fault_of_line(server, entry.at, begins=begins)
        fault.blamed.add(event.pid)
        if len(fault.contexts) < MAX_CONTEXTS:
            fault.contexts.add((event.pid, event.context))
        if event.pid:
            self._state.add_fault_victim(server, fault, event.pid)

    def _fault_handling(
        self, server: TrackedServer, _event: e.FaultHandling, entry: LogEntry
    ) -> None:
        block = server.current_fault
        begins = block is None or (block.handled and block.listed)
        self._state.fault_of_line(server, entry.at, begins=begins).handled = True

    def _fault_teardown(
        self, server: TrackedServer, event: e.FaultTeardown, entry: LogEntry
    ) -> None:
        fault = self._state.fault_of_line(server, entry.at, begins=False)
        if event.pid:
            self._state.add_fault_victim(server, fault, event.pid)
        if event.device is None:
            return
        found = server.find_client(event.pid, event.context)
        uuid = "" if found is None else found[1].contexts.get(event.context, "")
        if uuid:
            self._state.learn_ordinal(event.device, uuid)
        self._state.add_fault_device(fault, event.device)
        if (event.pid, event.context) in fault.contexts:
            self._state.fault_hit(server, fault, event.pid, event.device)

    def _fault_list(self, server: TrackedServer, event: e.FaultList, entry: LogEntry) -> None:
        fault = self._state.fault_of_line(server, entry.at, begins=False)
        fault.listed = True
        if event.of == "clients":
            self._state.fault_listed(server, fault)
        server.listing = event.of

    def _number(self, server: TrackedServer, event: e.Number, _entry: LogEntry) -> None:
        if server.current_fault is None or server.listing is None:
            self._count_unrecognized()
        elif server.listing == "devices":
            self._state.add_fault_device(server.current_fault, event.value)
        else:
            self._state.add_fault_victim(server, server.current_fault, event.value)

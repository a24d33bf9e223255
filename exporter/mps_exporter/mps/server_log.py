"""Applies the events of server.log to the state."""

from __future__ import annotations

from mps_exporter.mps import log_events as e
from mps_exporter.mps.faults import ServerFaults
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.record import Moment
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState

INVALID_DEVICE_SECONDS = 1.0
"""The lines of one client about its invalid device are written at once."""

MAX_INVALID_DEVICE = 64


class ServerLogReader:
    """Reads server.log; the PID in the prefix is that of the server."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._invalid_device_at: dict[int, float] = {}

    def apply(self, entry: LogEntry, when: Moment) -> None:
        state, event = self._state, entry.event
        state.server_log_at = when.at
        state.daemon.sent_at = None
        match event:
            case e.InvalidDevice():
                self._invalid_device(entry.pid, when)
            case e.ServerFailed():
                failed = state.servers.get(entry.pid)
                if failed is not None and failed.failed_to_start:
                    failed.failure = event.reason or failed.failure
            case e.Unrecognized():
                _count_unrecognized(when)
            case e.Number():
                server = state.servers.get(entry.pid)
                if server is not None and not server.faults.add_number(event.value, when):
                    _count_unrecognized(when)
            case e.ServerEvent() | e.ClientEvent() | e.RefusalEvent() | e.FaultEvent():
                server = self._server(entry)
                if server is not None:
                    self._apply_to(server, event, when)

    def _apply_to(self, server: TrackedServer, event: e.LogEvent, when: Moment) -> None:
        match event:
            case e.ClientEvent():
                _client_event(server, event, when)
            case e.ServerEvent():
                self._server_event(server, event, when)
            case e.FaultEvent():
                _fault_event(server.faults, event, when)
            case e.RefusalEvent():
                _refusal_event(server, event, when)

    def _server(self, entry: LogEntry) -> TrackedServer | None:
        """Return the server that writes; one whose start is not in the log is adopted.

        Returns:
            None if it has ended, and this line is late.
        """
        servers = self._state.servers
        server = servers.get(entry.pid)
        if server is None:
            if servers.has_ended(entry.pid) and not isinstance(entry.event, e.ServerProcess):
                return None
            server = servers.adopt(entry.pid, entry.at)
        server.has_log = True
        return server

    def _server_event(self, server: TrackedServer, event: e.ServerEvent, when: Moment) -> None:
        match event:
            case e.ServerProcess():
                self._server_started(server, when)
            case e.ServerFinishing():
                server.finishing = True
            case e.ServerOpen():
                self._server_open(server, when)
            case e.ServerExiting():
                server.exiting = True
                if not self._state.readable["control"]:
                    self._state.end_server(server, when, "requested")
            case e.DeviceClosed():
                server.faults.close_device(event.device, when)
            case e.CredentialsMissing():
                server.credentials_missing(when)
            case _:
                _server_property(server, event)

    def _server_started(self, server: TrackedServer, when: Moment) -> None:
        """Without control.log: a daemon has one server at a time, so the others are gone."""
        state = self._state
        if not state.readable["control"]:
            for other in state.servers:
                if other is not server and not other.only_seen_after(when.at):
                    state.server_exited(other, when)

    def _server_open(self, server: TrackedServer, when: Moment) -> None:
        state = self._state
        if server.ready_at is None and not state.readable["control"]:
            when.increment("mps_server_starts_total", uid=server.uid)
            when.observe("mps_server_startup_seconds", when.at - server.started_at)
            state.server_ready(server, when)

    def _invalid_device(self, pid: int, when: Moment) -> None:
        """Up to three lines, written by the client itself, are one refusal."""
        known = self._invalid_device_at.get(pid)
        if known is not None and when.at - known <= INVALID_DEVICE_SECONDS:
            return
        if len(self._invalid_device_at) >= MAX_INVALID_DEVICE:
            self._invalid_device_at.clear()
        self._invalid_device_at[pid] = when.at
        server = self._state.servers.latest()
        when.count_rejection(None if server is None else server.uid, "invalid_device", (pid,))


def _server_property(server: TrackedServer, event: e.ServerEvent) -> None:
    match event:
        case e.ServerOwner():
            server.uid = event.uid if server.uid is None else server.uid
        case e.ThreadLimitSet():
            server.set_thread_ratio(event.ratio)
        case e.MemoryLimitSet():
            server.set_memory_limit(event.device, event.limit_bytes)
        case e.DeviceOpened():
            server.add_device(event.device, event.name)
        case e.DeviceAssociated():
            server.gpus.add_gpu(event.uuid)
            server.clients.associations.associate(event.uuid)


def _client_event(server: TrackedServer, event: e.ClientEvent, when: Moment) -> None:
    clients = server.clients
    match event:
        case e.ClientStatus():
            if event.active:
                server.context_active(event.pid, event.context, when)
            clients.associations.confirm(event.pid, event.context, active=event.active)
        case e.ClientConnected(context=0):
            server.logs_pids = True
            clients.connect(event.pid, when)
        case e.ClientConnected():
            server.logs_pids = True
            server.open_context(event.pid, event.context, when)
        case e.ConnectionLost(context=0):
            server.faults.process_ends(event.pid, when)
        case e.ConnectionLost():
            server.faults.endings.context_ends(event.pid, event.context, when)
        case e.ConnectionRequested():
            if event.named:
                server.logs_pids = True
            elif server.logs_pids is None:
                server.logs_pids = False
                clients.connect_admitted(when)
        case _:
            _client_end(server, event, when)


def _client_end(server: TrackedServer, event: e.ClientEvent, when: Moment) -> None:
    clients = server.clients
    match event:
        case e.ContextLeft(pid=int(pid), context=int(context)):
            server.evidence.client_ending(pid, when.at)
            clients.close_context(pid, context, when)
        case e.ClientLeft(pid=None):
            clients.disconnect_unnamed(when)
        case e.ClientLeft(pid=int(pid)):
            server.evidence.client_ended(pid, when.at)
            clients.disconnect(pid, when)
        case e.TerminationRequested():
            clients.request_termination(event.pid)
        case e.TerminationDone():
            clients.terminated(when)


def _refusal_event(server: TrackedServer, event: e.RefusalEvent, when: Moment) -> None:
    match event:
        case e.LimitReached():
            server.client_limit = event.limit
            pid = server.clients.sole_newcomer()
            server.clients.admissions.count_refusal(server.uid, "context_limit", when, pid)
        case e.TeardownRefusal():
            server.clients.admissions.count_refusal(server.uid, "server_not_ready", when, event.pid)
            server.clients.refuse(event.pid, event.context, when)
        case e.AcceptFailed():
            server.clients.admissions.count_status(server.uid, event.pid, event.status, when)
            server.clients.refuse(event.pid, event.context, when)


def _fault_event(faults: ServerFaults, event: e.FaultEvent, when: Moment) -> None:
    match event:
        case e.FaultBlamed():
            faults.blame(event.pid, event.context, when)
        case e.FaultHandling():
            faults.handle(when)
        case e.FaultTeardown():
            faults.tear_down(event.pid, event.context, event.device, when)
        case e.FaultList():
            faults.begin_list(event.of, when)


def _count_unrecognized(when: Moment) -> None:
    when.increment("mps_control_log_unrecognized_lines_total", log="server")

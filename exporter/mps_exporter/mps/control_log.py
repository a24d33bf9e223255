"""Applies the events of control.log to the state."""

from __future__ import annotations

import re

from mps_exporter.mps import log_events as e
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.record import Moment
from mps_exporter.mps.state import DaemonState
from mps_exporter.snapshot import Handover

# A row of device_query's reply, with commas or in columns:
# 0,0000:00.06.00,GPU-0040f96d-e33d-4da3-a236-53dd3e33c9a2,NVIDIA H200,N/A
_DEVICE_ROW = re.compile(
    r"(\d{1,4})(?:,[^,]{0,32},| +\S{1,32} +)((?:GPU|MIG)-[0-9a-fA-F-]{36})\b", re.ASCII
)
_SET_PERCENTAGE = re.compile(r"set_active_thread_percentage +(\d{1,7}) +\S+", re.ASCII)
_PERCENTAGE = re.compile(r"\d{1,3}(?:\.\d{1,6})?", re.ASCII)
_TERMINATE = re.compile(r"terminate_client +(\d{1,7}) +(\d{1,7})", re.ASCII)

_REPLIES = (e.Continuation, e.Unrecognized, e.Number)
_SERVING = (e.ClientArrived, e.ServerReady, e.ServerExited, e.ShutdownDeclined)


class ControlLogReader:
    """Reads control.log.

    A command's reply is between the command and the next line of the daemon's own: such lines are
    no events, whatever their text.
    """

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._command = ""
        self._replying = False

    def apply(self, entry: LogEntry, when: Moment) -> None:
        event = entry.event
        self._note_silence(event, when.at)
        if isinstance(event, _REPLIES):
            self._reply(event, when)
            return
        self._replying &= isinstance(event, e.UiRefused)
        match event:
            case e.ToolEvent():
                self._tool_event(event, when)
            case e.Noise():
                pass
            case e.ClientArrived(queued=True):
                self._state.client_queued(event.pid, event.uid, when)
            case e.ClientArrived():
                self._state.client_sent(event.pid, event.uid, when)
                self._state.daemon.handover = Handover(when.at, event.pid, event.uid)
            case e.DaemonStarting():
                self._state.daemon_started(entry.pid, when)
            case e.BinaryVersion():
                self._state.daemon.binary_version = event.version
            case e.DaemonExited():
                self._state.daemon_exited(when)
            case e.CredentialsMissing():
                self._state.daemon.missing_credentials.append(when.at)
            case _:
                self._server_event(event, when)

    def _note_silence(self, event: e.LogEvent, at: float) -> None:
        """Note what the daemon must follow with another line: a stuck one writes none.

        A queued client is followed by a server's start or by a shutdown attempt, and that by its
        outcome; a client that is sent to a server, by the server's lines about it. (Measured on
        driver 580: 0.1 s at most.)
        """
        state, daemon = self._state, self._state.daemon
        daemon.silent_since = daemon.sent_at = daemon.handover = None
        match event:
            case e.ClientArrived(queued=True) | e.ShutdownTried():
                daemon.silent_since = at
            case e.ClientArrived() if state.readable["server"] and (state.server_log_at or 0) < at:
                daemon.sent_at = at
        if isinstance(event, _SERVING):
            daemon.served_at = at

    # ------------------------------------------------------------------ the control tool

    def _tool_event(self, event: e.ToolEvent, when: Moment) -> None:
        daemon = self._state.daemon
        lines = 1
        match event:
            case e.UiOpened():
                lines = 2  # "Accepting connection..." before it is the tool's, too
            case e.UiCommand():
                self._command = event.text.strip()
                self._replying = True
                if self._is_quit():
                    daemon.quit_requested_at = when.at
                elif self._command.startswith("set_"):
                    daemon.configured_at = when.at
            case e.UiRefused():
                if self._is_quit():
                    daemon.quit_requested_at = None
                self._command = ""
        when.increment("mps_control_log_query_lines_total", lines)

    def _is_quit(self) -> bool:
        return self._command.partition(" ")[0] == "quit"

    def _reply(self, event: e.Continuation | e.Unrecognized | e.Number, when: Moment) -> None:
        if self._replying:
            when.increment("mps_control_log_query_lines_total")
            if isinstance(event, e.Number):
                self._read_reply(str(event.value), when)
            elif isinstance(event, e.Unrecognized):
                self._read_reply(event.text, when)
        elif not isinstance(event, e.Continuation):
            when.increment("mps_control_log_unrecognized_lines_total", log="control")

    def _read_reply(self, text: str, when: Moment) -> None:
        """Apply what no line of server.log shows."""
        state = self._state
        row = _DEVICE_ROW.match(text)
        if row is not None and self._command.startswith("device_query"):
            state.gpus.add_ordinal(int(row[1]), row[2])
            return
        setting = _SET_PERCENTAGE.fullmatch(self._command)
        if setting is not None and _PERCENTAGE.fullmatch(text):
            server = state.servers.get(int(setting[1]))
            if server is not None:
                server.thread_ratio = float(text) / 100.0
            return
        ending = _TERMINATE.fullmatch(self._command)
        if ending is not None and text == "0" and not state.readable["server"]:
            server = state.servers.get(int(ending[1]))
            client = None if server is None else server.clients.get(int(ending[2]))
            if client is not None:
                client.count_termination(when)

    # ------------------------------------------------------------------ servers

    def _server_event(self, event: e.LogEvent, when: Moment) -> None:
        state, servers = self._state, self._state.servers
        match event:
            case e.ServerStarting():
                servers.start(event.pid, event.uid, when)
                when.increment("mps_server_starts_total", uid=event.uid)
            case e.ServerReady():
                server = servers.get(event.pid) or servers.adopt(event.pid, when.at)
                state.server_ready(server, when)
            case e.ServerExited():
                self._server_exited(event, when)
            case e.ServerForbidden():
                state.server_forbidden(event.uid, event.reason, when)
            case e.ShutdownTried():
                state.daemon.logs_shutdown_requests = True
                if (tried := servers.get(event.pid)) is not None:
                    tried.shutdown_requested(when.at)
            case e.ShutdownDeclined():
                if (declined := servers.get(event.pid)) is not None:
                    declined.shutdown_requested(None)
            case e.ShutdownRetry():
                state.daemon.backoff_seconds = event.milliseconds / 1000.0

    def _server_exited(self, event: e.ServerExited, when: Moment) -> None:
        servers = self._state.servers
        server = servers.get(event.pid) or servers.restore_vanished(event.pid)
        if server is None:
            if servers.has_ended(event.pid):
                return
            server = servers.adopt(event.pid, when.at)
        self._state.server_exited(server, when, event.status)

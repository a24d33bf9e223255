"""control.log: what the daemon says, as entries in the books."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mps_exporter.mps import log_events as e
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.state import DaemonState

# A row of device_query's reply, with commas or in columns:
# 0,0000:00.06.00,GPU-0040f96d-e33d-4da3-a236-53dd3e33c9a2,NVIDIA H200,N/A
_DEVICE_ROW = re.compile(
    r"(\d{1,4})(?:,[^,]{0,32},| +\S{1,32} +)((?:GPU|MIG)-[0-9a-fA-F-]{36})\b", re.ASCII
)
_SET_PERCENTAGE = re.compile(r"set_active_thread_percentage +(\d{1,7}) +\S+", re.ASCII)
_PERCENTAGE = re.compile(r"\d{1,3}(?:\.\d{1,6})?", re.ASCII)
_TERMINATE = re.compile(r"terminate_client +(\d{1,7}) +(\d{1,7})", re.ASCII)


_SERVING = (e.ClientArrived, e.ServerReady, e.ServerExited, e.ShutdownDeclined)


class ControlLogReader:
    """Reads control.log.

    A command's reply stands between the command and the next line that is the daemon's own: such
    lines are nobody's events, whatever they look like.
    """

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._command = ""
        self._replying = False
        self._handlers: dict[type[e.LogEvent], Callable[[Any, LogEntry], None]] = {
            e.Continuation: self._reply,
            e.Unrecognized: self._reply,
            e.Number: self._reply,
            e.UiOpened: self._ui_opened,
            e.UiCommand: self._ui_command,
            e.UiClosed: self._ui_closed,
            e.UiRefused: self._ui_refused,
            e.DaemonStarting: self._daemon_starting,
            e.BinaryVersion: self._binary_version,
            e.DaemonExited: self._daemon_exited,
            e.CredentialsMissing: self._credentials_missing,
            e.ClientArrived: self._client_arrived,
            e.ServerStarting: self._server_starting,
            e.ServerReady: self._server_ready,
            e.ServerExited: self._server_exited,
            e.ServerForbidden: self._server_forbidden,
            e.ShutdownTried: self._shutdown_tried,
            e.ShutdownDeclined: self._shutdown_declined,
            e.ShutdownRetry: self._shutdown_retry,
        }

    def apply(self, entry: LogEntry) -> None:
        """Enter one line into the books."""
        event = entry.event
        self._note_silence(event, entry.at)
        handler = self._handlers.get(type(event))
        if handler is None:
            self._replying = False
        else:
            handler(event, entry)

    def _note_silence(self, event: e.LogEvent, at: float) -> None:
        """Note what the daemon must go on with: a stuck one writes no further line.

        A queued client is followed by a server's start or by a shutdown attempt, and that by its
        outcome; a client that is sent to a server, by what the server says of it. (Measured on
        driver 580: 0.1 s at most.)
        """
        state, daemon = self._state, self._state.daemon
        queued = isinstance(event, e.ClientArrived) and event.queued
        daemon.silent_since = at if queued or isinstance(event, e.ShutdownTried) else None
        told = not state.readable["server"] or (state.server_heard_at or 0.0) >= at
        sent = isinstance(event, e.ClientArrived) and not queued and not told
        daemon.sent_at = at if sent else None
        if isinstance(event, _SERVING):
            daemon.served_at = at

    # ------------------------------------------------------------------ the control tool

    def _count_query(self, lines: int = 1) -> None:
        self._state.counters.increment("mps_control_log_query_lines_total", lines)

    def _ui_opened(self, _event: e.UiOpened, _entry: LogEntry) -> None:
        self._replying = False
        self._count_query(2)  # "Accepting connection..." before it is the tool's, too

    def _ui_command(self, event: e.UiCommand, entry: LogEntry) -> None:
        self._count_query()
        self._command = event.text.strip()
        self._replying = True
        if self._command.partition(" ")[0] == "quit":
            self._state.daemon.quit_requested_at = entry.at
        elif self._command.startswith("set_"):
            self._state.daemon.configured_at = entry.at

    def _ui_closed(self, _event: e.UiClosed, _entry: LogEntry) -> None:
        self._count_query()
        self._replying = False

    def _ui_refused(self, _event: e.UiRefused, _entry: LogEntry) -> None:
        self._count_query()
        if self._command.partition(" ")[0] == "quit":
            self._state.daemon.quit_requested_at = None
        self._command = ""

    def _reply(self, event: e.LogEvent, entry: LogEntry) -> None:
        if not self._replying:
            if not isinstance(event, e.Continuation):
                self._state.counters.increment(
                    "mps_control_log_unrecognized_lines_total", log="control"
                )
            return
        self._count_query()
        if isinstance(event, e.Number):
            self._read_reply(str(event.value), entry)
        elif isinstance(event, e.Unrecognized):
            self._read_reply(event.text, entry)

    def _read_reply(self, text: str, entry: LogEntry) -> None:
        """Learn from a reply what no line of server.log tells."""
        state = self._state
        row = _DEVICE_ROW.match(text)
        if row is not None and self._command.startswith("device_query"):
            state.learn_ordinal(int(row[1]), row[2])
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
                state.count_loss(client, "terminated", entry.at)

    # ------------------------------------------------------------------ the daemon

    def _daemon_starting(self, _event: e.DaemonStarting, entry: LogEntry) -> None:
        self._replying = False
        self._state.daemon_started(entry.pid, entry.at)

    def _binary_version(self, event: e.BinaryVersion, _entry: LogEntry) -> None:
        self._replying = False
        self._state.daemon.binary_version = event.version

    def _daemon_exited(self, _event: e.DaemonExited, entry: LogEntry) -> None:
        self._replying = False
        self._state.daemon_exited(entry.at)

    def _credentials_missing(self, _event: e.CredentialsMissing, entry: LogEntry) -> None:
        self._replying = False
        self._state.advance_to(entry.at)
        self._state.daemon.missing_credentials.append(entry.at)

    # ------------------------------------------------------------------ clients

    def _client_arrived(self, event: e.ClientArrived, entry: LogEntry) -> None:
        self._replying = False
        state, pid, uid, at = self._state, event.pid, event.uid, entry.at
        state.advance_to(at)
        server = state.latest_server(uid)
        if event.queued:
            self._match_missing_credentials()
            state.client_queued(pid, uid, at)
            return
        if server is None:
            return
        if pid == 0:
            # The first connection of a process is the one that credentials were missing for.
            if self._match_missing_credentials():
                state.count_overtake(uid)
                state.admit(server, pid, uid, at)
            return
        if pid in server.admitted_at:
            state.reconnected(server, pid)
            return
        self._match_missing_credentials()
        if state.was_just_rejected(server, pid, at):
            return
        waited = state.queue.pop_client(pid, uid)
        if waited is None:
            state.count_overtake(uid)
        state.admit(server, pid, uid, at, waited)

    def _match_missing_credentials(self) -> bool:
        missing_credentials = self._state.daemon.missing_credentials
        if missing_credentials:
            missing_credentials.popleft()
            return True
        return False

    # ------------------------------------------------------------------ servers

    def _server_starting(self, event: e.ServerStarting, entry: LogEntry) -> None:
        self._replying = False
        state = self._state
        state.start_server(event.pid, event.uid, entry.at)
        state.counters.increment("mps_server_starts_total", uid=event.uid)

    def _server_ready(self, event: e.ServerReady, entry: LogEntry) -> None:
        self._replying = False
        server = self._state.servers.get(event.pid)
        if server is None:
            server = self._state.start_server(event.pid, None, entry.at, adopted=True)
        self._state.server_ready(server, entry.at)

    def _server_exited(self, event: e.ServerExited, entry: LogEntry) -> None:
        self._replying = False
        state = self._state
        server = state.servers.get(event.pid) or state.restore_vanished(event.pid)
        if server is None:
            if event.pid in state.ended_pids:
                return
            server = state.start_server(event.pid, None, entry.at, adopted=True)
        cause, evidence = state.exit_cause(server, event.status, entry.at)
        state.end_server(server, entry.at, cause, evidence)

    def _server_forbidden(self, event: e.ServerForbidden, entry: LogEntry) -> None:
        self._replying = False
        self._state.server_forbidden(event.uid, entry.at)

    def _shutdown_tried(self, event: e.ShutdownTried, entry: LogEntry) -> None:
        self._replying = False
        self._state.daemon.logs_shutdown_requests = True
        server = self._state.servers.get(event.pid)
        if server is not None:
            server.shutdown_requested_at, server.shutdown_declined = entry.at, False

    def _shutdown_declined(self, event: e.ShutdownDeclined, _entry: LogEntry) -> None:
        self._replying = False
        server = self._state.servers.get(event.pid)
        if server is not None:
            server.shutdown_declined = True

    def _shutdown_retry(self, event: e.ShutdownRetry, _entry: LogEntry) -> None:
        self._replying = False
        self._state.daemon.backoff_seconds = event.milliseconds / 1000.0

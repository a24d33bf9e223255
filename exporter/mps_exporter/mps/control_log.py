"""control.log: the wording of each line, and its effect on the state of the daemon.

The wording has changed at least twice. "580" was seen on that driver, "550" stands for 535 to 550,
"T4" for a log of 2021, "R340" for the first release, "615" for published lines of MPS v3.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mps_exporter.mps.log_lines import KNOWN, Shapes
from mps_exporter.mps.record import Moment
from mps_exporter.mps.state import DaemonState
from mps_exporter.snapshot import Handover

if TYPE_CHECKING:
    from mps_exporter.mps.log_merger import LogEntry

CONTROL_LINES = Shapes(
    # 580
    (KNOWN, r"Accepting connection\.\.\."),
    ("ui_opened", r"NEW UI"),
    ("ui_closed", r"UI closed"),
    # 580: Insufficient privileges for UID 1001. Control deamon settings can only be modified by ...
    ("ui_refused", r"Insufficient privileges .*"),
    ("credentials_missing", r"User did not send valid credentials"),
    ("client_sent", r"NEW CLIENT <pid> from user <uid>: Server already exists"),
    (
        "client_queued",
        r"NEW CLIENT <pid> from user <uid>: Server is not ready, push client to pending list",
    ),
    ("server_starting", r"Starting new server <pid> for user <uid>"),
    ("server_ready", r"NEW SERVER <pid>: Ready"),
    ("server_exited", r"Server <pid> exited with status <status>"),
    ("shutdown_tried", r"Try shutting down server <pid>, backoff is (?:enabled|disabled)"),
    # 580: Server 634 has 2 active worker threads. Server will not shutdown.
    (
        "shutdown_declined",
        r"Server <pid> has \d+ active worker threads\. Server will not shutdown\.",
    ),
    ("shutdown_retry", r"Control will try shutting down server \d+ again in at most <num>ms"),
    # 580: Failed to start server using uid 0, error: Operation not permitted
    ("server_forbidden", r"Failed to start server using uid <uid>, error: <text>"),
    # 550
    (KNOWN, r"Server encountered a fatal exception\. Shutting down\.?"),
    # 580; T4, R340: Start
    ("daemon_starting", r"Starting control daemon using socket .*"),
    ("daemon_starting", r"Start"),
    # 580: CUDA MPS Control binary version: 13000
    ("binary_version", r"CUDA MPS Control binary version: <version>"),
    # 580: Exit with status 0; R340: Exit
    ("daemon_exited", r"Exit with status -?\d{1,10}"),
    ("daemon_exited", r"Exit"),
    # 580: To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=/tmp/mps
    (KNOWN, r"To connect CUDA applications to this daemon, .*"),
    # 580: a caller gave up while the daemon was stuck
    (KNOWN, r"Unable to accept connection"),
    # 615, published by ai-dynamo: Adding server 'shared' [multiuser enabled]
    (KNOWN, r"Adding server '[a-z0-9_]{1,64}'(?: \[multiuser enabled\])?"),
    # 615, published by kai-scheduler
    (KNOWN, r"\[memacct\] failed to register client pid \d+"),
    (KNOWN, r"Failed to initialize MPS control daemon\.?"),
    # R340
    (KNOWN, r"Unable to read new connection type information"),
)

# A row of device_query's reply, with commas or in columns:
# 0,0000:00.06.00,GPU-0040f96d-e33d-4da3-a236-53dd3e33c9a2,NVIDIA H200,N/A
_DEVICE_ROW = re.compile(
    r"(\d{1,4})(?:,[^,]{0,32},| +\S{1,32} +)((?:GPU|MIG)-[0-9a-fA-F-]{36})\b", re.ASCII
)
_SET_PERCENTAGE = re.compile(r"set_active_thread_percentage +(\d{1,7}) +\S+", re.ASCII)
_PERCENTAGE = re.compile(r"\d{1,3}(?:\.\d{1,6})?", re.ASCII)
_TERMINATE = re.compile(r"terminate_client +(\d{1,7}) +(\d{1,7})", re.ASCII)


class ControlLogReader:
    """Applies the lines of control.log.

    A command's reply is between the command and the next line of the daemon's own: such lines are
    no events, whatever their text. What must be followed by another line within 0.1 s (driver 580)
    is noted as silence: a stuck daemon writes none.
    """

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._command = ""
        self._replying = False

    def apply(self, entry: LogEntry, when: Moment) -> None:
        daemon = self._state.daemon
        daemon.silent_since = daemon.sent_at = daemon.handover = None
        name, values = entry.event
        if name in ("continuation", "unrecognized", "number"):
            self._reply(name, values, when)
            return
        self._replying &= name == "ui_refused"
        if name == "daemon_starting":
            self._state.daemon_started(entry.pid, when)
        elif name != KNOWN:
            getattr(self, name)(when, *values)

    # ------------------------------------------------------------------ the control tool

    def ui_opened(self, when: Moment) -> None:
        """A control tool connected; "Accepting connection..." before this line is its line, too."""
        when.increment("mps_control_log_query_lines_total", 2)

    def ui_command(self, when: Moment, command: str) -> None:
        """A control tool sent a command; the lines after this line are the reply."""
        self._command = command.strip()
        self._replying = True
        if self._is_quit():
            self._state.daemon.quit_requested_at = when.at
        elif self._command.startswith("set_"):
            self._state.daemon.configured_at = when.at
        when.increment("mps_control_log_query_lines_total")

    def ui_refused(self, when: Moment) -> None:
        """The command before this line was refused."""
        if self._is_quit():
            self._state.daemon.quit_requested_at = None
        self._command = ""
        when.increment("mps_control_log_query_lines_total")

    def ui_closed(self, when: Moment) -> None:
        """A control tool disconnected."""
        when.increment("mps_control_log_query_lines_total")

    def _is_quit(self) -> bool:
        return self._command.partition(" ")[0] == "quit"

    def _reply(self, name: str, values: tuple[int | float | str, ...], when: Moment) -> None:
        if self._replying:
            when.increment("mps_control_log_query_lines_total")
            if values:
                self._read_reply(str(values[0]), when)
        elif name != "continuation":
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

    # ------------------------------------------------------------------ daemon and clients

    def binary_version(self, _when: Moment, version: str) -> None:
        """Drivers from CUDA 13.0 on write the daemon's version."""
        self._state.daemon.binary_version = version

    def daemon_exited(self, when: Moment) -> None:
        """The daemon exits in order. No line is written when it is killed."""
        self._state.daemon_exited(when)

    def credentials_missing(self, when: Moment) -> None:
        """A caller's first connection carried no credentials.

        Every healthy client causes this line just before its first NEW CLIENT; it is a refusal only
        when no NEW CLIENT follows.
        """
        self._state.daemon.missing_credentials.append(when.at)

    def client_queued(self, when: Moment, pid: int, uid: int) -> None:
        """No server is ready for this user: the client waits."""
        self._state.daemon.silent_since = self._state.daemon.served_at = when.at
        self._state.client_queued(pid, uid, when)

    def client_sent(self, when: Moment, pid: int, uid: int) -> None:
        """A connection is sent to the server: for the process, and again for each context.

        The PID is 0 where the daemon cannot see the client's PID namespace, the user is 0 where one
        server serves all users.
        """
        state, daemon = self._state, self._state.daemon
        daemon.served_at = when.at
        if state.readable["server"] and (state.server_log_at or 0) < when.at:
            daemon.sent_at = when.at
        state.client_sent(pid, uid, when)
        daemon.handover = Handover(when.at, pid, uid)

    # ------------------------------------------------------------------ servers

    def server_starting(self, when: Moment, pid: int, uid: int) -> None:
        """The daemon started a server process."""
        self._state.servers.start(pid, uid, when)
        when.increment("mps_server_starts_total", uid=uid)

    def server_ready(self, when: Moment, pid: int) -> None:
        """A server accepts clients; the queued clients of its user are sent to it."""
        self._state.daemon.served_at = when.at
        servers = self._state.servers
        self._state.server_ready(servers.get(pid) or servers.adopt(pid, when.at), when)

    def server_exited(self, when: Moment, pid: int, status: int) -> None:
        """A server process ended. The status is no evidence: 0 is also written after SIGKILL."""
        self._state.daemon.served_at = when.at
        servers = self._state.servers
        server = servers.get(pid) or servers.restore_vanished(pid)
        if server is None:
            if servers.has_ended(pid):
                return
            server = servers.adopt(pid, when.at)
        self._state.server_exited(server, when, status)

    def server_forbidden(self, when: Moment, uid: int, reason: str) -> None:
        """The daemon may not start a server for this user; it tries six times."""
        self._state.server_forbidden(uid, reason, when)

    def shutdown_tried(self, when: Moment, pid: int) -> None:
        """The daemon asks a server to end, for another user's client or for its own end."""
        self._state.daemon.silent_since = when.at
        self._state.daemon.logs_shutdown_requests = True
        if (server := self._state.servers.get(pid)) is not None:
            server.shutdown_requested(when.at)

    def shutdown_declined(self, when: Moment, pid: int) -> None:
        """The server has clients."""
        self._state.daemon.served_at = when.at
        if (server := self._state.servers.get(pid)) is not None:
            server.shutdown_requested(None)

    def shutdown_retry(self, _when: Moment, milliseconds: int) -> None:
        """The daemon's back-off before it asks the server again."""
        self._state.daemon.backoff_seconds = milliseconds / 1000.0

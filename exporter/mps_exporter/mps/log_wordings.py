r"""The wording of each line of control.log and server.log, and the method that applies it.

    [2026-11-21 08:55:42.578 Control   630] NEW CLIENT 632 from user 1001: Server already exists

A row is a method, as a path from the reader of the log, and a wording: a regular expression without
capturing groups. Its placeholders are the method's arguments, before the time. The wording has
changed at least twice. "580" was seen on that driver, "550" means 535 to 550, "2022" a log of that
year, "T4" a log of 2021, "R340" the first release, "615" published lines of MPS v3. On 550 and
before, lines of server.log do not name clients.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.incidents_and_counters import BoundedDict, Moment
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.observations import LogName

MESSAGE = "<message>"  # Constant value of a row that stands for the message itself.
KNOWN = "known"  # Event of a known line that changes nothing.

UNRECOGNIZED = "unrecognized"  # Event of a line of unknown wording: a reply or a new message.

LINES_LOST = "lines_lost"
"""Event, not of a line, with the number of lost bytes: lines may be missing before the next."""

NUMBER = "number"  # Event of a bare number: a reply to a query, or an item of a list in server.log.


class Event(NamedTuple):
    """The meaning of a line."""

    name: str  # Path of the method that applies it, or one of the constants of this module.
    values: tuple[int | float | str, ...] = ()


CONTINUATION = Event("continuation")  # A line without a prefix: it belongs to the record before it.


class LogEntry(NamedTuple):
    """An event, with the time, the log and the process of its line."""

    at: float  # Unix time in seconds.
    log: LogName
    pid: int  # PID of the writer, as the daemon numbers processes.
    component: str
    event: Event
    counted: bool  # False if written before the exporter's start: no counter counts it.


def _uid(text: str) -> int:
    """Return a UID (printed from 2^31 on as negative by some); ValueError if out of range."""
    uid = int(text)
    if not -(2**31) <= uid < 2**32:
        raise ValueError(text)
    return uid % 2**32


def _gpu_uuid(text: str) -> str:
    """Return a UUID written with "0x" as GPU-…, any other text unchanged."""
    digits = text.replace("0x", "").replace("-", "")
    if not text.startswith("0x") or len(digits) != 32:
        return text
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


_VALUES: dict[str, tuple[str, Callable[[str], int | float | str]]] = {
    "pid": (r"\d{1,7}", int),
    "num": (r"\d{1,10}", int),
    "status": (r"-?\d{1,10}", int),
    "uid": (r"-?\d{1,10}", _uid),
    "hex": (r"[0-9a-f]{1,16}", lambda text: int(text, 16)),
    "percent": (r"\d{1,3}(?:\.\d{1,9})?", lambda text: float(text) / 100.0),
    "text": (r".*", lambda text: text.removesuffix(".")[: policy.MAX_QUOTED_MESSAGE]),
    "version": (r"[\w.-]{1,32}", str),
    "uuid": (r"[0-9A-Za-z/-]{1,96}", _gpu_uuid),
}
# {PID: 632, Context ID: 1} on 580, {PID: 991, Context: 1} there in one line, {11661, 1} in 2022
_WHO = r"\{(?:PID: )?<pid>, (?:Context(?: ID)?: )?<num>\}"
_PLACEHOLDER = re.compile(r"<(\w+)>")


class _Shape(NamedTuple):
    pattern: re.Pattern[str]
    name: str
    values: tuple[Callable[[str], int | float | str], ...]
    constants: tuple[str | int, ...]


class Shapes:
    """The compiled rows of one log, by the first word of a message."""

    def __init__(self, *rows: tuple[str, str] | tuple[str, str, str | int]) -> None:
        """Compile rows of (method or KNOWN, wording, constant value after the others)."""
        self._by_first_word: dict[str, list[_Shape]] = {}
        self.rows = rows
        for name, wording, *constants in rows:
            whole = wording.replace("<who>", _WHO)
            kinds = _PLACEHOLDER.findall(whole)
            pattern = _PLACEHOLDER.sub(lambda found: f"({_VALUES[found[1]][0]})", whole)
            values = tuple(_VALUES[kind][1] for kind in kinds)
            compiled = re.compile(pattern, re.ASCII | re.IGNORECASE)
            first = wording.partition(" ")[0].replace("\\", "").lower()
            shapes = self._by_first_word.setdefault(first, [])
            shapes.append(_Shape(compiled, name, values, tuple(constants)))

    def event(self, message: str) -> Event | None:
        """Return the event of a message, None if no row applies."""
        for shape in self._by_first_word.get(message.lower().partition(" ")[0], ()):
            found = shape.pattern.fullmatch(message)
            if found is not None:
                try:
                    values = [
                        convert(text)
                        for convert, text in zip(shape.values, found.groups(), strict=True)
                    ]
                except ValueError:
                    return None  # a number that is out of range
                shown = message.removesuffix(".")[: policy.MAX_QUOTED_MESSAGE]
                constants = [shown if value == MESSAGE else value for value in shape.constants]
                return Event(shape.name, (*values, *constants))
        return None


CONTROL_LINES = Shapes(
    # 580
    (KNOWN, r"Accepting connection\.\.\."),
    ("ui_opened", r"NEW UI"),
    ("ui_closed", r"UI closed"),
    # 580: Insufficient privileges for UID 1001. Control deamon settings can only be modified by ...
    ("ui_refused", r"Insufficient privileges .*"),
    ("state.credentials_missing", r"User did not send valid credentials"),
    ("state.client_sent", r"NEW CLIENT <pid> from user <uid>: Server already exists"),
    (
        "state.client_queued",
        r"NEW CLIENT <pid> from user <uid>: Server is not ready, push client to pending list",
    ),
    ("state.servers.start", r"Starting new server <pid> for user <uid>"),
    ("state.server_ready", r"NEW SERVER <pid>: Ready"),
    ("state.server_exited", r"Server <pid> exited with status <status>"),
    ("state.shutdown_tried", r"Try shutting down server <pid>, backoff is (?:enabled|disabled)"),
    # 580: Server 634 has 2 active worker threads. Server will not shutdown.
    (
        "state.shutdown_declined",
        r"Server <pid> has \d+ active worker threads\. Server will not shutdown\.",
    ),
    ("state.shutdown_retry", r"Control will try shutting down server \d+ again in at most <num>ms"),
    # 580: Failed to start server using uid 0, error: Operation not permitted
    ("state.server_forbidden", r"Failed to start server using uid <uid>, error: <text>"),
    # 550
    (KNOWN, r"Server encountered a fatal exception\. Shutting down\.?"),
    # 580; T4, R340: Start
    ("daemon_starting", r"Starting control daemon using socket .*"),
    ("daemon_starting", r"Start"),
    # 580: CUDA MPS Control binary version: 13000
    ("binary_version", r"CUDA MPS Control binary version: <version>"),
    # 580: Exit with status 0; R340: Exit
    ("state.daemon_exited", r"Exit with status -?\d{1,10}"),
    ("state.daemon_exited", r"Exit"),
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

    The lines between a command and the daemon's next own line are the command's reply, whatever
    their text. A line that another must follow within 0.1 s (driver 580) starts a silence.
    """

    def __init__(self, state: DaemonState) -> None:
        self.state = state
        self._pid = 0  # PID of the line's writer.
        self._command = ""
        self._replying = False

    def apply(self, entry: LogEntry, when: Moment) -> None:
        daemon = self.state.daemon
        daemon.silent_since = daemon.handover = None
        name, values = entry.event
        if name in (CONTINUATION.name, UNRECOGNIZED, NUMBER):
            self._reply(name, values, when)
            return
        self._replying &= name == "ui_refused"
        self._pid = entry.pid
        if name.startswith("ui_"):
            when.increment("mps_control_log_query_lines_total")
        if name != KNOWN:
            attrgetter(name)(self)(*values, when)

    def ui_opened(self, when: Moment) -> None:
        """Count the line "Accepting connection...", which precedes each NEW UI line."""
        when.increment("mps_control_log_query_lines_total")

    def ui_command(self, command: str, when: Moment) -> None:
        """Begin a control tool's command; the lines after this line are the reply."""
        self._command = command.strip()
        self._replying = True
        if self._is_quit():
            self.state.daemon.quit_requested_at = when.at
        elif self._command.startswith("set_"):
            self.state.daemon.configured_at = when.at

    def ui_refused(self, _when: Moment) -> None:
        if self._is_quit():
            self.state.daemon.quit_requested_at = None
        self._command = ""

    def ui_closed(self, _when: Moment) -> None:
        """Do nothing: the line is counted like all lines of a control tool."""

    def _is_quit(self) -> bool:
        return self._command.partition(" ")[0] == "quit"

    def _reply(self, name: str, values: tuple[int | float | str, ...], when: Moment) -> None:
        if self._replying:
            when.increment("mps_control_log_query_lines_total")
            if values:
                self._read_reply(str(values[0]), when)
        elif name != CONTINUATION.name:
            when.increment("mps_control_log_unrecognized_lines_total", log="control")

    def _read_reply(self, text: str, when: Moment) -> None:
        """Apply a reply in the log: a UUID, a percentage, or a termination."""
        state = self.state
        row = _DEVICE_ROW.match(text)
        if row is not None and self._command.startswith("device_query"):
            state.gpus.add_ordinal(int(row[1]), row[2], when.at)
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

    def daemon_starting(self, when: Moment) -> None:
        self.state.daemon_started(self._pid, when)

    def binary_version(self, version: str, _when: Moment) -> None:
        """Set the version that daemons log from CUDA 13.0 on."""
        self.state.daemon.binary_version = version


SERVER_LINES = Shapes(
    # The server itself. 580: Startup; T4, R340: Start
    ("server_process", r"Startup"),
    ("server_process", r"Start"),
    (KNOWN, r"Connecting to control daemon on socket: .*"),
    (KNOWN, r"MPS Server connecting to control daemon .*"),  # T4
    (KNOWN, r"Initializing server process"),
    # 580: Creating server context on device 0 (NVIDIA H200); T4: the same without a name
    ("server.add_device", r"Creating server context on device <num>(?: \(.{0,96}\))?"),
    ("server.faults.close_device", r"Destroy server context on device <num>(?: .*)?"),
    # 580: Created anonymous shared memory region mps.shm.1001.634 (user, server)
    ("server.set_owner", r"Created anonymous shared memory region mps\.shm\.<uid>\.\d+"),
    # 550: Created named shared memory region /cuda.shm.0.52.1
    ("server.share_by_file", r"Created named shared memory region .*"),
    (KNOWN, r"Created anonymous shared memory region .*"),
    (KNOWN, r"CUDA MPS Server for .*"),
    (KNOWN, r"Display Driver version: .*"),
    # 580; T4: activeThreadsPercentage set to 33.000000
    ("server.set_thread_ratio", r"Active Threads? Percentage set to <percent>"),
    ("server.set_thread_ratio", r"activeThreadsPercentage set to <percent>"),
    # 580: Device pinned memory limit for device 0 set to 0x300000000 bytes
    (
        "server.set_memory_limit",
        r"Device pinned memory limit for device <num> set to 0x<hex> bytes",
    ),
    (KNOWN, r"Server Priority set to .*"),
    # 580; T4: MPS Server is started
    ("server_open", r"Server has started"),
    ("server_open", r"MPS Server is started"),
    (KNOWN, r"Server has been notified to shutdown"),
    (KNOWN, r"Server was unable to shutdown due to .*"),
    ("server.finish", r"Waiting for current clients to finish"),
    ("server_exiting", r"Exiting"),
    (KNOWN, r"Received device query command\..*"),
    # 580, a second daemon that was refused: Using log directory: /tmp/mpslog
    (KNOWN, r"Using log directory: .*"),
    # Clients. 580: Received new client request for {PID: -1333654781, Context ID: 0}
    ("server.request_connection", r"Received new client request for \{.*\}"),
    ("server.request_unnamed_connection", r"Received new client request"),  # 550, T4
    # 580: a client process (context 0) or one of its contexts
    ("server.connect", r"Client <who> connected"),
    # 580, for client {PID: 440, Context ID: 1}; 550, T4
    (KNOWN, r"Creating worker thread(?: for client \{.*\})?"),
    (KNOWN, r"Worker created"),
    # 580: Device NVIDIA H200 (uuid GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893) is associated
    # T4: Device Tesla T4 (uuid 0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated
    ("server.associate_gpu", r"Device .{0,96} \(uuid <uuid>\) is associated"),
    # 580; 2022: status of client {11641, 1} is INACTIVE
    ("server.context_active", r"Status of client <who> is ACTIVE"),
    ("server.context_inactive", r"Status of client <who> is INACTIVE"),
    (
        "server.connection_lost",
        r"Server failed to rec\w+ command with status 806, assuming client <who> exit",
    ),
    (KNOWN, r"Server failed to rec\w+ command .*"),
    (KNOWN, r"Receive command failed, assuming client exit"),  # 550, T4
    # 580; after a trap: Client {...} exiting. Worker is in reset. Number of active ...
    (
        "server.clients.close_context",
        r"Client <who> exiting\.(?: Worker is in reset\.)? "
        r"Number of active client contexts is \d+\.?",
    ),
    ("server.clients.close_context", r"Client <who> exit"),  # 2022
    # T4
    (KNOWN, r"Client disconnected\. Number of active client contexts is \d+\.?"),
    ("server.clients.disconnect", r"Client process <pid> disconnected"),
    ("server.clients.disconnect_unnamed", r"Client process disconnected"),  # T4
    ("server.clients.request_termination", r"MPS server requesting client <who> to exit"),
    ("server.clients.terminated", r"Client termination succeeded\.?"),
    # Refusals
    (
        "server.limit_reached",
        r"Failed to accept new client\. Maximum number of clients \(<num>\) reached\.?",
    ),
    ("server.limit_reached", r"Failed to accept new client\. Reached maximum number of .*", 0),
    (
        "server.refuse_in_teardown",
        r"Server teardown in progress\. Refusing to accept new client <who>",
    ),
    ("server.accept_failed", r"Failed to accept client <who> with status <num>"),
    # 580, written by the client; the last line ends: ... less than 1 or consider using UUIDs.
    ("invalid_device", r"Invalid CUDA_VISIBLE_DEVICES\.?"),
    ("invalid_device", r"Client requested .* which is not a valid GPU ID .*"),
    ("invalid_device", r"Please set CUDA_VISIBLE_DEVICES .*"),
    # Faults. 580; the second one also 2022
    ("server.faults.blame", r"Client <who> encountered a fatal GPU error\.?"),
    ("server.faults.handle", r"Server is handling a fatal GPU error\.?"),
    ("server.faults.tear_down", r"Client <who> on device <num> to be torn down"),
    (
        "server.faults.tear_down_process",
        r"Client <who> on the error-trigg\w+ process \d+ to be torn down",
    ),
    # 580: All clients belonging to error trigging process 990 will be torn down (victims, too)
    (KNOWN, r"All clients belonging to error trigg.*"),
    # 580: The following devices will be reset: | 0; 2022: The following devices
    ("server.faults.list_devices", r"The following devices.*"),
    # 580: The following client process have a sticky error set: | 991
    # 2022: The following clients have a sticky error set:
    ("server.faults.list_clients", r"The following client.* sticky error set:?"),
    # Servers that cannot work. 580: started for a user whose client is gone
    ("server.credentials_missing", r"User did not send valid credentials"),
    # 550, component Legacy Server: Failed to start : invalid argument
    ("server_failed", r"Failed to start : .*", MESSAGE),
    ("server_failed", r"MPS Server failed to create/open SHM segment.*", MESSAGE),
    # MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.
    ("server_failed", r"MPS is only supported on .*", MESSAGE),
    ("server_failed", r"Server encountered a fatal exception\. Shutting down\.?", ""),
)


class ServerLogReader:
    """Applies the lines of server.log. The PID in the prefix is the server's, or a client's."""

    server: TrackedServer  # The server that wrote the line.

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._pid = 0  # PID of the line's writer.
        self._invalid_device_at: BoundedDict[int, float] = BoundedDict(policy.MAX_RECENT)

    def apply(self, entry: LogEntry, when: Moment) -> None:
        state, (name, values) = self._state, entry.event
        state.server_log_at = when.at
        self._pid = entry.pid
        if name == NUMBER:
            server = state.servers.get(entry.pid)
            if server is not None and not server.faults.add_number(int(values[0])):
                name = UNRECOGNIZED
        if name == UNRECOGNIZED:
            when.increment("mps_control_log_unrecognized_lines_total", log="server")
        elif name in ("invalid_device", "server_failed"):  # not written by a running server
            getattr(self, name)(*values, when)
        elif name not in (KNOWN, CONTINUATION.name, NUMBER) and self._find_server(name, when):
            attrgetter(name)(self)(*values, when)

    def _find_server(self, name: str, when: Moment) -> bool:
        """Find or adopt the server that wrote the line; False if it has ended: the line is late."""
        servers, pid = self._state.servers, self._pid
        server = servers.get(pid)
        if server is None:
            if servers.has_ended(pid) and name != "server_process":
                return False
            server = servers.adopt(pid, when.at)
        server.has_log = True
        if name == "server_process":
            server.has_all_lines, server.may_be_deaf = True, False
        self.server = server
        return True

    def server_process(self, when: Moment) -> None:
        """Apply a server's first line: without control.log it shows that older servers ended."""
        state = self._state
        if not state.readable["control"]:
            for other in state.servers:
                if other is not self.server and not other.only_seen_after(when.at):
                    state.judge_server_exit(other, when)

    def server_open(self, when: Moment) -> None:
        """Apply a server's start, which only this line shows without control.log."""
        if not self._state.readable["control"]:
            self._state.open_server(self.server, when)

    def server_exiting(self, when: Moment) -> None:
        """Record an orderly end; without control.log, the server ends with this line."""
        self.server.exiting = True
        if not self._state.readable["control"]:
            self._state.end_server(self.server, when, "requested")

    def server_failed(self, reason: str, _when: Moment) -> None:
        server = self._state.servers.get(self._pid)
        if server is not None and server.failed_to_start:
            server.failure = reason or server.failure

    def invalid_device(self, when: Moment) -> None:
        """Count, once for up to 3 lines, a client that selects a GPU its daemon lacks."""
        known = self._invalid_device_at.get(self._pid)
        if known is not None and when.at - known <= policy.REFUSAL_SECONDS:
            return
        self._invalid_device_at[self._pid] = when.at
        server = self._state.servers.latest()
        uid = None if server is None else server.uid
        when.count_rejection(uid, "invalid_device", (self._pid,))

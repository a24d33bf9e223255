r"""A line of control.log or server.log -> what it says.

    [2026-11-21 08:55:42.578 Control   630] NEW CLIENT 632 from user 1001: Server already exists
     stamp                   component pid  message

The stamp is local time without a zone. The component is one of Control, Server, Client, Other and
"Legacy Server". A line without such a prefix continues the record before it.

The wording has changed at least twice. Every shape below stands under an example: "580" was seen on
that driver, "550" stands for 535 to 550, "T4" for a log of 2021, "R340" for the first release.
Nothing here raises, whatever the bytes: unknown wording is Unrecognized.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from mps_exporter.mps import log_events as e

MAX_MESSAGE = 512
"""Characters. No known message is longer, apart from commands and replies."""

MAX_QUOTED = 120
"""Characters that are kept of a message that is not understood."""

MAX_SECONDS = 256
MAX_CACHED_MESSAGES = 4096
"""How many different seconds, and messages, are remembered."""

_SECOND = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.", re.ASCII)
_WRITER = re.compile(r" ([A-Z][A-Za-z]{0,15}(?: [A-Z][a-z]{1,15})?) +(\d{1,7})", re.ASCII)


class Line(NamedTuple):
    """A line with its prefix read."""

    stamp_ms: int | None
    """The stamp, as milliseconds since 1970 of a clock that shows the daemon's local time.
    None: the line has no prefix."""
    component: str
    pid: int
    """Who wrote it: the daemon, a server, a client."""
    event: e.LogEvent


# For those who search a log without parsing every line: the wording stands in this module only.

DAEMON_STARTING_LINE = re.compile(
    rb"^\[\d{4}-\d\d-\d\d [\d:.]{8,16} Control +\d+\] "
    rb"Start(?:ing control daemon using socket.*)?\r?$",
    re.MULTILINE,
)
"""A control daemon came up: e.DaemonStarting."""

DAEMON_ACTIVITY_LINE = re.compile(
    rb"^\[[^\]\n]{1,64} Control +\d+\] "
    rb"(?:Accepting connection|NEW UI|NEW CLIENT|NEW SERVER|Server \d+ exited)",
    re.MULTILINE,
)
"""The control daemon serves a client or a tool: its one thread is not stuck."""


SERVER_ADDED_LINE = re.compile(rb"(Adding server ')([a-z0-9_]{1,64})(')")
"""An MPS v3 daemon has a new server, by this name."""


def control_line_of(pid: int) -> re.Pattern[bytes]:
    """Return the pattern of the lines that the control daemon with this PID writes."""
    return re.compile(rb"^\[[^\]\n]* Control +%d\] " % pid, re.MULTILINE)


NOISE = e.Noise()
CONTINUATION = e.Continuation()
_UNPREFIXED = Line(None, "", 0, CONTINUATION)


def parse_line(line: str | bytes) -> Line:
    """Read one line, given without its line end.

    Few seconds and few messages make many lines, so both are looked at once and remembered.
    """
    text = line if isinstance(line, str) else line.decode("utf-8", "replace")
    second_ms = _seconds.get(text[:21])
    reply = _messages.get(text[24:])
    if second_ms is None or reply is None:
        second_ms = _second_ms(text[:21])
        reply = None if second_ms is None else _read_rest(text[24:])
        if second_ms is None or reply is None:
            return _UNPREFIXED
    fraction_ms = _FRACTIONS.get(text[21:24])
    if fraction_ms is None:
        return _UNPREFIXED
    return _new(Line, (second_ms + fraction_ms, *reply))


_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long
_FRACTIONS = {f"{number:03d}": number for number in range(1000)}
_seconds: dict[str, int] = {}
_writers: dict[str, tuple[str, int]] = {}
_messages: dict[str, tuple[str, int, e.LogEvent]] = {}


def _second_ms(text: str) -> int | None:
    """Read "[2026-11-21 08:55:42.", in milliseconds; None when there is no such time."""
    if not _SECOND.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text[1:20]).replace(tzinfo=UTC)
    except ValueError:
        return None
    if len(_seconds) >= MAX_SECONDS:
        _seconds.clear()
    return _seconds.setdefault(text, int(moment.timestamp()) * 1000)


def _parse_writer(text: str) -> tuple[str, int] | None:
    """Read " Control   630"."""
    found = _WRITER.fullmatch(text)
    if found is None:
        return None
    if len(_writers) >= MAX_SECONDS:
        _writers.clear()
    return _writers.setdefault(text, (found[1], int(found[2])))


def _read_rest(text: str) -> tuple[str, int, e.LogEvent] | None:
    """Read " Control   630] NEW UI": who says it, and what; None when it is not like that."""
    name, bracket, message = text.partition("]")
    writer = _writers.get(name) or _parse_writer(name)
    if writer is None or not bracket:
        return None
    component, pid = writer
    if len(message) > MAX_MESSAGE:
        return component, pid, _read_long(component, message.lstrip())
    if len(_messages) >= MAX_CACHED_MESSAGES:
        _messages.clear()
    event = read_message(message, control=component == "Control")
    return _messages.setdefault(text, (component, pid, event))


def _read_long(component: str, message: str) -> e.LogEvent:
    """Read a message that is too long to be anything but a command or a reply."""
    if component == "Control" and message.startswith("Cmd:"):
        return e.UiCommand(message[4 : 4 + MAX_QUOTED])
    return e.Unrecognized(message[:MAX_QUOTED])


def read_message(message: str, *, control: bool) -> e.LogEvent:
    """Read the message of a line.

    Args:
        message: What stands behind the prefix.
        control: Written by the control daemon (component Control).
    """
    message = message.strip()
    if control:
        if message.startswith("Cmd:"):
            return e.UiCommand(message[4 : 4 + MAX_QUOTED])
        shapes = _CONTROL
    else:
        if message[:1] in ("V", "M"):
            old = _OLD_PREFIX.match(message)
            message = message if old is None else message[old.end() :]
        shapes = _SERVER
    if message.isdigit() and message.isascii() and len(message) <= 10:
        return e.Number(int(message))
    lower = message.lower()
    for hint, shape, build in shapes.get(lower.partition(" ")[0], ()):
        found = shape.fullmatch(message) if hint in lower else None
        if found is not None:
            try:
                return build(found)
            except ValueError:
                break  # a number that cannot be what it stands for
    return e.Unrecognized(message[:MAX_QUOTED])


# Drivers before 535 begin many messages of a server with one of these.
_OLD_PREFIX = re.compile(r"Volta MPS Server: |Volta MPS: |MPS Server: ")

_Build = Callable[[re.Match[str]], e.LogEvent]
_Shapes = dict[str, list[tuple[str, re.Pattern[str], _Build]]]
"""First word -> (text that must be in it, shape, what it means), all in lower case."""


def _always(event: e.LogEvent) -> _Build:
    return lambda _: event


def _shapes(*rows: tuple[str, _Build | e.LogEvent]) -> _Shapes:
    """Compile message shapes and file them by their first word, which must be plain text."""
    shapes: _Shapes = {}
    for pattern, meaning in rows:
        build = _always(meaning) if isinstance(meaning, e.LogEvent) else meaning
        first = pattern.partition(" ")[0].replace("\\", "").lower()
        compiled = re.compile(
            pattern.replace("<pid>", r"(\d{1,7})")
            .replace("<num>", r"(\d{1,10})")
            .replace("<uid>", r"(-?\d{1,10})"),
            re.ASCII | re.IGNORECASE,
        )
        shapes.setdefault(first, []).append((_required_text(pattern), compiled, build))
    return shapes


def _required_text(pattern: str) -> str:
    """Return the longest plain text of a shape: searching for it is faster than matching."""
    plain = pattern
    while (
        inner := re.sub(r"\([^()]*\)[?*]?", "\n", plain.replace(r"\(", "\n").replace(r"\)", "\n"))
    ) != plain:
        plain = inner
    parts = re.split(r"<\w+>|\\.[+*]?|.[?*+]|\.|\[[^]]*\]|\n|[{}]", plain)
    return max(parts, key=len).lower()


def _uid(text: str) -> int:
    """Read a user's number; some print those from 2^31 on as negative ones."""
    uid = int(text)
    if not -(2**31) <= uid < 2**32:
        raise ValueError(text)
    return uid % 2**32


def _failed(found: re.Match[str]) -> e.ServerFailed:
    return e.ServerFailed(found[0].removesuffix(".")[:MAX_QUOTED])


_CONTROL = _shapes(
    # 580: Accepting connection...
    (r"Accepting connection\.\.\.", NOISE),
    # 580: NEW UI | Cmd:get_server_list | UI closed
    (r"NEW UI", e.UiOpened()),
    (r"UI closed", e.UiClosed()),
    # 580: Insufficient privileges for UID 1001. Control deamon settings can only be modified by ...
    (r"Insufficient privileges .*", e.UiRefused()),
    # 580: User did not send valid credentials
    (r"User did not send valid credentials", e.CredentialsMissing()),
    # 580: NEW CLIENT 632 from user 1001: Server already exists
    (
        r"NEW CLIENT <pid> from user <uid>: Server already exists",
        lambda m: e.ClientArrived(int(m[1]), _uid(m[2]), queued=False),
    ),
    # 580: NEW CLIENT 643 from user 1002: Server is not ready, push client to pending list
    (
        r"NEW CLIENT <pid> from user <uid>: Server is not ready, push client to pending list",
        lambda m: e.ClientArrived(int(m[1]), _uid(m[2]), queued=True),
    ),
    # 580: Starting new server 634 for user 1001
    (
        r"Starting new server <pid> for user <uid>",
        lambda m: e.ServerStarting(int(m[1]), _uid(m[2])),
    ),
    # 580: NEW SERVER 634: Ready
    (r"NEW SERVER <pid>: Ready", lambda m: e.ServerReady(int(m[1]))),
    # 580: Server 634 exited with status 0
    (
        r"Server <pid> exited with status (-?\d{1,10})",
        lambda m: e.ServerExited(int(m[1]), int(m[2])),
    ),
    # 580: Try shutting down server 634, backoff is enabled
    (
        r"Try shutting down server <pid>, backoff is (?:enabled|disabled)",
        lambda m: e.ShutdownTried(int(m[1])),
    ),
    # 580: Server 634 has 2 active worker threads. Server will not shutdown.
    (
        r"Server <pid> has <num> active worker threads\. Server will not shutdown\.",
        lambda m: e.ShutdownDeclined(int(m[1])),
    ),
    # 580: Control will try shutting down server 634 again in at most 400ms
    (
        r"Control will try shutting down server <pid> again in at most <num>ms",
        lambda m: e.ShutdownRetry(int(m[2])),
    ),
    # 580: Failed to start server using uid 0, error: Operation not permitted
    (
        r"Failed to start server using uid <uid>, error: (.*)",
        lambda m: e.ServerForbidden(_uid(m[1]), m[2][:MAX_QUOTED]),
    ),
    # 550: Server encountered a fatal exception. Shutting down
    (r"Server encountered a fatal exception\. Shutting down\.?", e.ServerFailed()),
    # 580: Starting control daemon using socket /tmp/mps/control; T4, R340: Start
    (r"Starting control daemon using socket .*", e.DaemonStarting()),
    (r"Start", e.DaemonStarting()),
    # 580: CUDA MPS Control binary version: 13000
    (r"CUDA MPS Control binary version: ([\w.-]{1,32})", lambda m: e.BinaryVersion(m[1])),
    # 580: Exit with status 0; R340: Exit
    (r"Exit with status -?\d{1,10}", e.DaemonExited()),
    (r"Exit", e.DaemonExited()),
    # 580: To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=/tmp/mps
    (r"To connect CUDA applications to this daemon, .*", NOISE),
    # 580: Unable to accept connection (a caller gave up while the daemon was stuck)
    (r"Unable to accept connection", NOISE),
    # 615, published by ai-dynamo: Adding server 'shared' [multiuser enabled]
    (r"Adding server '[a-z0-9_]{1,64}'(?: \[multiuser enabled\])?", NOISE),
    # 615, published by kai-scheduler: [memacct] failed to register client pid 0
    (r"\[memacct\] failed to register client pid <num>", NOISE),
    # 615, published by kai-scheduler: Failed to initialize MPS control daemon
    (r"Failed to initialize MPS control daemon\.?", NOISE),
    # R340: Unable to read new connection type information
    (r"Unable to read new connection type information", NOISE),
)

# {PID: 632, Context ID: 1} on 580, {PID: 991, Context: 1} there in one line, {11661, 1} in 2022
_WHO = r"\{(?:PID: )?<pid>, (?:Context(?: ID)?: )?<num>\}"


def _hex_uuid(text: str) -> str:
    """Write a GPU's UUID the usual way: GPU-afc3ccca-c336-5689-2ed8-f0e14233036f."""
    digits = text.replace("0x", "").replace("-", "")
    if not text.startswith("0x") or len(digits) != 32:
        return text
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


_SERVER = _shapes(
    # 580: Startup; T4, R340: Start
    (r"Startup", e.ServerProcess()),
    (r"Start", e.ServerProcess()),
    # 580: Connecting to control daemon on socket: /tmp/mps/control
    (r"Connecting to control daemon on socket: .*", NOISE),
    # T4: MPS Server connecting to control daemon on socket: /tmp/nvidia-mps/control
    (r"MPS Server connecting to control daemon .*", NOISE),
    # 580: Initializing server process
    (r"Initializing server process", NOISE),
    # 580: Creating server context on device 0 (NVIDIA H200); T4: the same without a name
    (
        r"Creating server context on device <num>(?: \((.{0,96})\))?",
        lambda m: e.DeviceOpened(int(m[1]), m[2] or ""),
    ),
    # 580: Destroy server context on device 0 (NVIDIA H200)
    (r"Destroy server context on device <num>(?: .*)?", lambda m: e.DeviceClosed(int(m[1]))),
    # 580: Created anonymous shared memory region mps.shm.1001.634 (user, server)
    (
        r"Created anonymous shared memory region mps\.shm\.<num>\.\d+",
        lambda m: e.ServerOwner(_uid(m[1])),
    ),
    # 550: Created named shared memory region /cuda.shm.0.52.1
    (r"Created (?:named|anonymous) shared memory region .*", NOISE),
    # 580: CUDA MPS Server for Linux/Unix. Binary version: 13000
    (r"CUDA MPS Server for .*", NOISE),
    # 580: Display Driver version: 580
    (r"Display Driver version: .*", NOISE),
    # 580: Active Threads Percentage set to 100.0
    (
        r"Active Threads? Percentage set to (\d{1,3}(?:\.\d{1,9})?)",
        lambda m: e.ThreadLimitSet(float(m[1]) / 100.0),
    ),
    # T4: activeThreadsPercentage set to 33.000000
    (
        r"activeThreadsPercentage set to (\d{1,3}(?:\.\d{1,9})?)",
        lambda m: e.ThreadLimitSet(float(m[1]) / 100.0),
    ),
    # 580: Device pinned memory limit for device 0 set to 0x300000000 bytes
    (
        r"Device pinned memory limit for device <num> set to 0x([0-9a-f]{1,16}) bytes",
        lambda m: e.MemoryLimitSet(int(m[1]), int(m[2], 16)),
    ),
    # 580: Server Priority set to 0
    (r"Server Priority set to .*", NOISE),
    # 580: Server has started; T4: MPS Server is started
    (r"Server has started", e.ServerOpen()),
    (r"MPS Server is started", e.ServerOpen()),
    # 580: Received new client request for {PID: -1333654781, Context ID: 0}
    (r"Received new client request for \{.*\}", e.ConnectionRequested(named=True)),
    # 550, T4: Received new client request
    (r"Received new client request", e.ConnectionRequested(named=False)),
    # 580: Client {PID: 440, Context ID: 1} connected
    (rf"Client {_WHO} connected", lambda m: e.ClientConnected(int(m[1]), int(m[2]))),
    # R340: New client 14781 connected
    (r"New client <pid> connected", lambda m: e.ClientConnected(int(m[1]), 0)),
    # 580: Creating worker thread for client {PID: 440, Context ID: 1}; 550: Creating worker thread
    (r"Creating worker thread(?: for client \{.*\})?", NOISE),
    # 550, T4: Worker created
    (r"Worker created", NOISE),
    # 580: Device NVIDIA H200 (uuid GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893) is associated
    # T4: Device Tesla T4 (uuid 0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated
    (
        r"Device .{0,96} \(uuid ([0-9A-Za-z/-]{1,96})\) is associated",
        lambda m: e.DeviceAssociated(_hex_uuid(m[1])),
    ),
    # 580: Status of client {PID: 440, Context ID: 1} is ACTIVE
    # 2022: status of client {11641, 1} is INACTIVE
    (
        rf"Status of client {_WHO} is (ACTIVE|INACTIVE)",
        lambda m: e.ClientStatus(int(m[1]), int(m[2]), active=m[3].upper() == "ACTIVE"),
    ),
    # 580: Server failed to recevie command with status 806, assuming client {...} exit
    (
        rf"Server failed to rec\w+ command with status 806, assuming client {_WHO} exit",
        lambda m: e.ConnectionLost(int(m[1]), int(m[2])),
    ),
    (r"Server failed to rec\w+ command .*", NOISE),
    # 550, T4: Receive command failed, assuming client exit
    (r"Receive command failed, assuming client exit", NOISE),
    # 580: Client {PID: 451, Context ID: 1} exiting. Number of active client contexts is 1.
    # 580, after a trap: Client {...} exiting. Worker is in reset. Number of active ...
    (
        rf"Client {_WHO} exiting\.(?: Worker is in reset\.)? "
        r"Number of active client contexts is <num>\.?",
        lambda m: e.ContextLeft(int(m[1]), int(m[2])),
    ),
    # 2022: Client {11641, 1} exit
    (rf"Client {_WHO} exit", lambda m: e.ContextLeft(int(m[1]), int(m[2]))),
    # T4: Client disconnected. Number of active client contexts is 2
    (
        r"Client disconnected\. Number of active client contexts is <num>\.?",
        e.ContextLeft(None, None),
    ),
    # 580: Client process 451 disconnected
    (r"Client process <pid> disconnected", lambda m: e.ClientLeft(int(m[1]))),
    # T4: Client process disconnected
    (r"Client process disconnected", e.ClientLeft(None)),
    # R340: Client 14777 disconnected
    (r"Client <pid> disconnected", lambda m: e.ClientLeft(int(m[1]))),
    # 580: Server has been notified to shutdown
    (r"Server has been notified to shutdown", NOISE),
    # 580: Server was unable to shutdown due to 2 active clients
    (r"Server was unable to shutdown due to .*", NOISE),
    # 580: Waiting for current clients to finish
    (r"Waiting for current clients to finish", e.ServerFinishing()),
    # 580: Exiting
    (r"Exiting", e.ServerExiting()),
    # 580: Received device query command. There are 1 devices
    (r"Received device query command\..*", NOISE),
    # 580: MPS server requesting client {PID: 1244, Context ID: 1} to exit
    (
        rf"MPS server requesting client {_WHO} to exit",
        lambda m: e.TerminationRequested(int(m[1])),
    ),
    # 580: Client termination succeeded.
    (r"Client termination succeeded\.?", e.TerminationDone()),
    # 580: Failed to accept new client. Maximum number of clients (48) reached.
    (
        r"Failed to accept new client\. Maximum number of clients \(<num>\) reached\.?",
        lambda m: e.LimitReached(int(m[1])),
    ),
    # 580: Server teardown in progress. Refusing to accept new client {PID: 591, Context ID: 0}
    (
        rf"Server teardown in progress\. Refusing to accept new client {_WHO}",
        lambda m: e.TeardownRefusal(int(m[1]), int(m[2])),
    ),
    # 580: Failed to accept client {PID: 591, Context ID: 0} with status 807
    (
        rf"Failed to accept client {_WHO} with status <num>",
        lambda m: e.AcceptFailed(int(m[1]), int(m[2]), int(m[3])),
    ),
    # 580, written by the client: Invalid CUDA_VISIBLE_DEVICES.
    (r"Invalid CUDA_VISIBLE_DEVICES\.?", e.InvalidDevice()),
    # 580: Client requested 7 which is not a valid GPU ID in the MPS visible set of devices
    (r"Client requested .* which is not a valid GPU ID .*", e.InvalidDevice()),
    # 580: Please set CUDA_VISIBLE_DEVICES with a GPU ID less than 1 or consider using UUIDs.
    (r"Please set CUDA_VISIBLE_DEVICES .*", e.InvalidDevice()),
    # 580: Client {PID: 991, Context: 1} encountered a fatal GPU error.
    (
        rf"Client {_WHO} encountered a fatal GPU error\.?",
        lambda m: e.FaultBlamed(int(m[1]), int(m[2])),
    ),
    # 580, 2022: Server is handling a fatal GPU error.
    (r"Server is handling a fatal GPU error\.?", e.FaultHandling()),
    # 580: Client {PID: 990, Context ID: 1} on device 0 to be torn down
    (
        rf"Client {_WHO} on device <num> to be torn down",
        lambda m: e.FaultTeardown(int(m[1]), int(m[2]), int(m[3])),
    ),
    # 580: Client {PID: 990, Context ID: 1} on the error-trigging process 990 to be torn down
    (
        rf"Client {_WHO} on the error-trigg\w+ process \d+ to be torn down",
        lambda m: e.FaultTeardown(int(m[1]), int(m[2]), None),
    ),
    # 580: All clients belonging to error trigging process 990 will be torn down (victims, too)
    (r"All clients belonging to error trigg.*", NOISE),
    # 580: The following devices will be reset: | 0; 2022: The following devices
    (r"The following devices.*", e.FaultList("devices")),
    # 580: The following client process have a sticky error set: | 991
    # 2022: The following clients have a sticky error set:
    (r"The following client.* sticky error set:?", e.FaultList("clients")),
    # A server started for a user whose client is gone (580)
    (r"User did not send valid credentials", e.CredentialsMissing()),
    # 550, component Legacy Server: Failed to start : invalid argument
    (r"Failed to start : .*", _failed),
    # R340: MPS server failed to start
    (r"MPS server failed to start\.?", e.ServerFailed()),
    # MPS Server failed to create/open SHM segment
    (r"MPS Server failed to create/open SHM segment.*", _failed),
    # MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.
    (r"MPS is only supported on .*", _failed),
    (r"Server encountered a fatal exception\. Shutting down\.?", e.ServerFailed()),
    # 580, a second daemon that was refused: Using log directory: /tmp/mpslog
    (r"Using log directory: .*", NOISE),
)

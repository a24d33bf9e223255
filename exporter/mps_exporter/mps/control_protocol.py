"""The commands of the control tool, and its replies.

Several commands share one run of the tool. Their replies come back in order and without anything
between them, and an empty reply leaves no trace:

    get_default_client_priority              0
    get_server_status 457                    ACTIVE
    get_active_thread_percentage 457         100.0
    get_device_pinned_mem_limit 457 0                        (nothing: no limit is set)
    get_default_active_thread_percentage     80.0
    get_default_device_pinned_mem_limit 0    10G
    get_client_list 457                      455
    get_device_client_list 457               [0] 00:00.0, NVIDIA H200
                                             455.1           (process.context)

So only replies that can be distinguished are adjacent, and between two that cannot there is
``get_default_active_thread_percentage``, which always answers with one line. Every run of the tool
asks something that has an answer: no output at all, with status 0, is what a collision with another
caller looks like. The texts are those of driver 580; the tool exits with 0 whatever it prints.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mps_exporter.mps.client_limits import parse_memory
from mps_exporter.mps.protocol_v3 import (
    READ_ONLY_V3,
    V2_PARTITIONS,
    V2_REFUSAL,
    V3_REFUSAL,
    has_header,
)
from mps_exporter.observations import ControlObservation, Exchange, Outcome

_SERVER = r"[1-9][0-9]{0,9}"
_DEVICE = r"[0-9]{1,4}"
READ_ONLY = (
    re.compile(r"get_server_list"),
    re.compile(r"get_default_active_thread_percentage"),
    re.compile(r"get_default_client_priority"),
    re.compile(rf"get_default_device_pinned_mem_limit {_DEVICE}"),
    re.compile(rf"get_server_status {_SERVER}"),
    re.compile(rf"get_active_thread_percentage {_SERVER}"),
    re.compile(rf"get_device_pinned_mem_limit {_SERVER} {_DEVICE}"),
    re.compile(rf"get_client_list {_SERVER}"),
    re.compile(rf"get_device_client_list {_SERVER}"),
    re.compile(rf"device_query {_SERVER} --csv"),
    re.compile(V2_PARTITIONS),
)
"""Every command that is ever sent on standard input. None of them changes anything."""

FENCE = "get_default_active_thread_percentage"
PROBE: tuple[str, ...] = ("get_server_list", FENCE)
"""Answered by the daemon alone, without a server's help. Without the fence an empty list of servers
and a collision would look the same."""

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket that the kernel takes; the daemon's is DIRECTORY/control."""

_QUOTED_CHARACTERS = 200


class ForbiddenCommandError(ValueError):
    """A command that is not on the list of those that only read."""


def stdin_text(commands: Iterable[str]) -> bytes:
    """Return the text for the tool's standard input: the only place where it is made.

    Raises:
        ForbiddenCommandError: A command is not one of READ_ONLY.
    """
    lines = list(commands)
    for command in lines:
        if not any(allowed.fullmatch(command) for allowed in READ_ONLY):
            raise ForbiddenCommandError(f"not a command that only reads: {command!r}")
    return "".join(f"{command}\n" for command in lines).encode("ascii")


def invocation(commands: Sequence[str]) -> tuple[tuple[str, ...], bytes, dict[str, str]]:
    """Return the tool's arguments, its standard input and its environment for some queries.

    A query of the newer interface is one run's arguments; there the tool follows the protocol of
    the daemon that runs, and the variable is for what it says without one.

    Raises:
        ForbiddenCommandError: A command is not one that only reads.
    """
    if len(commands) == 1 and commands[0] in READ_ONLY_V3:
        return tuple(commands[0].split(" ")), b"", {"CUDA_MPS_PROTOCOL_VERSION": "3"}
    return (), stdin_text(commands), {}


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A GPU as a daemon numbers it."""

    ordinal: int
    uuid: str
    name: str
    pci: str
    """As printed: not the real address in every case, so join by UUID."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """What the daemon said by itself."""

    server_pids: tuple[int, ...]
    """In the daemon's PID namespace."""
    default_active_thread_ratio: float
    """0-1, for servers that start from now on."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """What the daemon said of one server. None, or a missing device: it did not say."""

    server_pid: int
    """In the daemon's PID namespace."""
    state: str | None = None
    """INITIALIZING, ACTIVE or FAULT; whatever word a newer driver uses is passed through."""
    active_thread_ratio: float | None = None
    """0-1, for clients that connect from now on."""
    client_pids: tuple[int, ...] | None = None
    """One for each client; 0 for those in a PID namespace that the daemon does not see."""
    contexts: Mapping[int, Mapping[int, int]] | None = None
    """Device ordinal -> client PID -> contexts."""
    devices: tuple[ListedDevice, ...] | None = None
    pinned_memory_limit_bytes: Mapping[int, int] = field(default_factory=dict)
    """Device ordinal -> the limit set under that ordinal, rounded down to whole GiB from 1 GiB on
    (measured: 1536M is printed as "1G"). The server's log has the exact one."""
    default_pinned_memory_limit_bytes: Mapping[int, int] = field(default_factory=dict)
    """For servers that start from now on, rounded likewise."""
    default_active_thread_ratio: float | None = None
    default_client_priority: int | None = None
    """0 normal, 1 below normal; for clients that connect from now on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer in the text."""

    kind: Literal["server_not_found", "absent", "refused", "unparsable"]
    text: str
    """What the tool said, shortened."""
    server_pid: int | None = None


def server_commands(
    server_pid: int, devices: Sequence[int] = (), *, map_devices: bool
) -> tuple[str, ...]:
    """Return the queries about one server.

    Args:
        server_pid: The server, as the daemon numbers processes.
        devices: Ordinals of the devices whose memory limits are wanted.
        map_devices: Also ask which device is which: the answer never changes in a server's life.
    """
    return (
        "get_default_client_priority",
        f"get_server_status {server_pid}",
        f"get_active_thread_percentage {server_pid}",
        *limit_commands(server_pid, devices),
        f"get_client_list {server_pid}",
        f"get_device_client_list {server_pid}",
        *((f"device_query {server_pid} --csv",) if map_devices else ()),
    )


def limit_commands(server_pid: int, devices: Sequence[int]) -> tuple[str, ...]:
    """Return the queries about memory limits, a fence after every one but the last."""
    questions = [
        question
        for device in devices
        for question in (
            f"get_device_pinned_mem_limit {server_pid} {device}",
            f"get_default_device_pinned_mem_limit {device}",
        )
    ]
    fenced = [command for question in questions for command in (question, FENCE)]
    return tuple(fenced[:-1])


def parse_failure(exchange: Exchange) -> Failure | None:
    """Recognise the tool's own complaints; None: it brought the daemon's answer."""
    text = f"{exchange.stderr}\n{exchange.stdout}"
    for kind, phrases in _ERROR_PATTERNS:
        if any(phrase in text for phrase in phrases):
            return Failure(kind, shorten(text))
    if exchange.return_code not in (0, None):
        reply = shorten(text) or "nothing"
        return Failure("refused", f"exit status {exchange.return_code}, said {reply}")
    return None


CANNOT_SEND = "Cannot send command to MPS control daemon"
"""The reply to a caller that collides with another, and to all while the daemon drains."""

_ERROR_PATTERNS: tuple[tuple[Literal["absent", "refused"], tuple[str, ...]], ...] = (
    ("absent", ("Cannot find MPS control daemon process",)),
    (
        "refused",
        (
            "Cannot authenticate or connect to MPS control daemon",
            CANNOT_SEND,
            "Cannot access CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_MPS_PIPE_DIRECTORY must be set",
            "Insufficient privileges",
        ),
    ),
)


def shorten(text: str, limit: int = _QUOTED_CHARACTERS) -> str:
    """Make one line of it, at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parse_probe(exchange: Exchange) -> ProbeReply | Failure:
    """Read the answer to PROBE; never raises, whatever the text."""
    if (failure := parse_failure(exchange)) is not None:
        return failure
    reader = _LineReader(exchange.stdout)
    servers = reader.take_all(_PID)
    default = reader.take_match(_PERCENTAGE)
    if default is None or not reader.at_end:
        return _unparsable(exchange)
    return ProbeReply(tuple(int(pid[0]) for pid in servers), float(default[0]) / 100.0)


def parse_server(*exchanges: Exchange) -> ServerReply | Failure:
    """Read the answers to server_commands() and limit_commands() about one server.

    Never raises, whatever the text. The first failure stands for the whole.
    """
    server_pid = _server_of(exchanges[0].commands) if exchanges else None
    if server_pid is None:
        return Failure("unparsable", "nothing was asked about a server")
    builder = _ReplyBuilder(server_pid)
    for exchange in exchanges:
        failure = parse_failure(exchange) or _read_into(builder, exchange)
        if failure is not None:
            return replace(failure, server_pid=server_pid)
    return builder.reply()


def parse_reconciliation(observation: ControlObservation) -> tuple[ServerReply | Failure, ...]:
    """Read what each server said; servers that were not asked, or did not answer, are left out."""
    by_server: dict[int | None, list[Exchange]] = {}
    for exchange in observation.exchanges:
        if exchange.outcome not in (Outcome.TIMEOUT, Outcome.SKIPPED):
            by_server.setdefault(_server_of(exchange.commands), []).append(exchange)
    return tuple(parse_server(*exchanges) for exchanges in by_server.values())


def _server_of(commands: Sequence[str]) -> int | None:
    """Return the server that the commands are about."""
    for command in commands:
        words = command.split(" ")
        if len(words) > 1 and words[0] in _SERVER_VERBS and words[1].isdecimal():
            return int(words[1])
    return None


def _read_into(builder: _ReplyBuilder, exchange: Exchange) -> Failure | None:
    reader = _LineReader(exchange.stdout)
    for command in exchange.commands:
        if (gone := reader.take_match(_NOT_FOUND)) is not None:
            return Failure("server_not_found", gone[0])
        if reader.take_match(_UNKNOWN_COMMAND) is None and not _read_reply(
            command, reader, builder
        ):
            return _unparsable(exchange)
    # The daemon complains once for each command.
    if reader.take_match(_NOT_FOUND) is not None:
        return Failure("server_not_found", f"Server {builder.server_pid} not found")
    return None if reader.at_end else _unparsable(exchange)


def _unparsable(exchange: Exchange) -> Failure:
    return Failure("unparsable", shorten(_output_of(exchange)))


def _output_of(exchange: Exchange) -> str:
    return f"{exchange.stdout}\n{exchange.stderr}"


def failure_of(exchange: Exchange) -> Failure | None:
    """Judge one run of the tool, whatever it asked; None: the daemon answered."""
    commands = exchange.commands
    if commands == PROBE:
        reply = parse_probe(exchange)
        return reply if isinstance(reply, Failure) else None
    if commands == (V2_PARTITIONS,):
        # With no output at all it collided with another caller's.
        return parse_failure(exchange) or (None if exchange.stdout else _unparsable(exchange))
    if set(commands) <= READ_ONLY_V3:
        # How a list of nothing looks is not documented, so anything else is an answer. What a
        # program is called is no word of the tool.
        if all(has_header(query, exchange.stdout) for query in commands):
            exchange = replace(exchange, stdout="")
        foreign = V2_REFUSAL.search(_output_of(exchange))
        return (_unparsable(exchange) if foreign else None) or parse_failure(exchange)
    found = parse_server(exchange)
    return found if isinstance(found, Failure) and found.kind != "server_not_found" else None


def other_interface(exchange: Exchange) -> str | None:
    """Return the interface whose tool or daemon refuses a query like this; None: it is this one."""
    if exchange.outcome not in (Outcome.REFUSED, Outcome.UNPARSABLE):
        return None
    if set(exchange.commands) <= READ_ONLY_V3:
        return "2" if V2_REFUSAL.search(_output_of(exchange)) else None
    return "3" if V3_REFUSAL.search(_output_of(exchange)) else None


_PID = re.compile(r"[0-9]{1,10}")
_PRIORITY = re.compile(r"[01]")
_PERCENTAGE = re.compile(r"[0-9]{1,3}\.[0-9]{1,6}")
_STATE = re.compile(r"[A-Z][A-Z_]{2,40}")
_LIMIT = re.compile(r"[0-9]{1,15} ?[KMGT]i?B?", re.IGNORECASE)
_NO_LIMIT = re.compile(r"No .*limit set.*")
_LISTED_DEVICE = re.compile(r"\[([0-9]{1,4})\] .*")
_CONTEXT = re.compile(r"([0-9]{1,10})\.([0-9]{1,10})")
_DEVICE_ROW = re.compile(r"([0-9]{1,4}),([^,]*),([^,]*),(.*),([^,]*)")
_DEVICE_SECTION = re.compile(r"Default|Server ([0-9]{1,10})|Device Ordinal,.*")
_NOT_FOUND = re.compile(r"Server ([0-9]{1,10}) not found\.?")
_UNKNOWN_COMMAND = re.compile(r"Unknown command.*|Invalid command.*")


class _LineReader:
    """The lines of a reply, taken from the front. Empty lines say nothing and are dropped."""

    def __init__(self, text: str) -> None:
        self._lines = [line for raw in text.split("\n") if (line := raw.strip())]
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._lines)

    def take_match(self, shape: re.Pattern[str]) -> re.Match[str] | None:
        """Take the next line if it has this shape."""
        found = None if self.at_end else shape.fullmatch(self._lines[self._next])
        self._next += found is not None
        return found

    def take_all(self, shape: re.Pattern[str]) -> list[re.Match[str]]:
        """Take the lines that have this shape, up to the first that has not."""
        taken = []
        while (found := self.take_match(shape)) is not None:
            taken.append(found)
        return taken


@dataclass(slots=True)
class _ReplyBuilder:
    """A ServerReply in the making."""

    server_pid: int
    state: str | None = None
    ratio: float | None = None
    default_ratio: float | None = None
    default_priority: int | None = None
    clients: tuple[int, ...] | None = None
    contexts: dict[int, Counter[int]] | None = None
    devices: tuple[ListedDevice, ...] | None = None
    limits: dict[int, int] = field(default_factory=dict)
    default_limits: dict[int, int] = field(default_factory=dict)

    def reply(self) -> ServerReply:
        contexts = None
        if self.contexts is not None:
            contexts = {device: dict(count) for device, count in self.contexts.items()}
        return ServerReply(
            server_pid=self.server_pid,
            state=self.state,
            active_thread_ratio=self.ratio,
            client_pids=self.clients,
            contexts=contexts,
            devices=self.devices,
            pinned_memory_limit_bytes=self.limits,
            default_pinned_memory_limit_bytes=self.default_limits,
            default_active_thread_ratio=self.default_ratio,
            default_client_priority=self.default_priority,
        )


def _read_reply(command: str, reader: _LineReader, builder: _ReplyBuilder) -> bool:
    """Take one command's reply. False: the next line is nothing that it could answer."""
    verb, _, rest = command.partition(" ")
    read = _READERS.get(verb)
    return read is not None and read(reader, rest, builder)


def _read_state(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    if (state := reader.take_match(_STATE)) is not None:
        builder.state = state[0]
    return state is not None


def _read_ratio(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    if (percentage := reader.take_match(_PERCENTAGE)) is not None:
        builder.ratio = float(percentage[0]) / 100.0
    return percentage is not None


def _read_default_ratio(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    if (percentage := reader.take_match(_PERCENTAGE)) is not None:
        builder.default_ratio = float(percentage[0]) / 100.0
    return percentage is not None


def _read_default_priority(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    if (priority := reader.take_match(_PRIORITY)) is not None:
        builder.default_priority = int(priority[0])
    return priority is not None


def _read_limit(reader: _LineReader, rest: str, builder: _ReplyBuilder) -> bool:
    _take_limit(reader, int(rest.rpartition(" ")[2]), builder.limits)
    return True


def _read_default_limit(reader: _LineReader, rest: str, builder: _ReplyBuilder) -> bool:
    _take_limit(reader, int(rest), builder.default_limits)
    return True


def _take_limit(reader: _LineReader, device: int, limits: dict[int, int]) -> None:
    if reader.take_match(_NO_LIMIT) is not None:
        return
    text = reader.take_match(_LIMIT)
    limit = parse_memory(text[0]) if text else None
    if limit is not None:
        limits[device] = limit


def _read_clients(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    builder.clients = tuple(int(pid[0]) for pid in reader.take_all(_PID))
    return True


def _read_contexts(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    builder.contexts = {}
    while (device := reader.take_match(_LISTED_DEVICE)) is not None:
        pids = [int(context[1]) for context in reader.take_all(_CONTEXT)]
        builder.contexts.setdefault(int(device[1]), Counter()).update(pids)
    return True


def _read_devices(reader: _LineReader, _rest: str, builder: _ReplyBuilder) -> bool:
    """Keep the rows below "Server N"; those below "Default" are the daemon's, for later servers."""
    sections: dict[str, list[ListedDevice]] = {}
    rows: list[ListedDevice] = []
    while (heading := reader.take_match(_DEVICE_SECTION)) is not None:
        if not heading[0].startswith("Device Ordinal,"):
            rows = sections.setdefault(heading[0], [])
        for row in reader.take_all(_DEVICE_ROW):
            rows.append(ListedDevice(int(row[1]), uuid=row[3], name=row[4], pci=row[2]))
    found = sections.get(f"Server {builder.server_pid}") or sections.get("Default")
    builder.devices = tuple(found) if found else None
    return bool(sections)


_READERS: Mapping[str, Callable[[_LineReader, str, _ReplyBuilder], bool]] = {
    "get_server_status": _read_state,
    "get_active_thread_percentage": _read_ratio,
    "get_default_active_thread_percentage": _read_default_ratio,
    "get_default_client_priority": _read_default_priority,
    "get_device_pinned_mem_limit": _read_limit,
    "get_default_device_pinned_mem_limit": _read_default_limit,
    "get_client_list": _read_clients,
    "get_device_client_list": _read_contexts,
    "device_query": _read_devices,
}
_SERVER_VERBS = frozenset(verb for verb in _READERS if "_default_" not in verb)
"""Those whose first argument is a server."""


def control_socket_bytes(pipe_directory: str) -> int:
    """Give the length of the path of a daemon's socket; see SOCKET_PATH_BYTES."""
    return len(f"{pipe_directory}/control".encode("utf-8", "surrogateescape"))

"""The commands of the control tool, and its replies.

Several commands share one run of the tool. Their replies are printed in order, with nothing between
them, and an empty reply leaves no trace:

    get_default_client_priority              0
    get_server_status 457                    ACTIVE
    get_active_thread_percentage 457         100.0
    get_device_pinned_mem_limit 457 0                        (nothing: no limit is set)
    get_default_active_thread_percentage     80.0
    get_default_device_pinned_mem_limit 0    10G
    get_client_list 457                      455
    get_device_client_list 457               [0] 00:00.0, NVIDIA H200
                                             455.1           (process.context)

So only commands with distinguishable replies are adjacent; the others are separated by the fence
``get_default_active_thread_percentage``, whose reply is always one line. Every run contains a
command that always has a reply: no output with status 0 means a collision with another caller.
The texts are those of driver 580; the tool exits with 0 whatever it prints.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mps_exporter.limits_without_a_flag import MAX_QUOTED_OUTPUT
from mps_exporter.mps.client_limits import parse_memory
from mps_exporter.mps.protocol_v3 import (
    READ_ONLY_V3,
    V2_PARTITIONS,
    V2_REFUSAL,
    V3_REFUSAL,
    has_header,
)
from mps_exporter.observations import ControlObservation, Exchange, Outcome

FENCE = "get_default_active_thread_percentage"
PROBE: tuple[str, ...] = ("get_server_list", FENCE)
"""Commands that the daemon replies to without a server's help. Without the fence, an empty list of
servers and a collision would look the same."""

SOCKET_PATH_BYTES = 107  # Maximum length of a Unix socket's path in the kernel.
PIPE_DIRECTORY_BYTES = 87
"""Maximum length of a pipe directory's path: with 88 bytes a daemon ends with status 1 (measured).
Its second socket there is control_privileged."""


class ForbiddenCommandError(ValueError):
    """A command that is not in the list of read-only commands."""


def stdin_text(commands: Iterable[str]) -> bytes:
    """Return the text for the tool's standard input; refuse commands that do more than read."""
    lines = list(commands)
    for command in lines:
        if _known(command) is None:
            raise ForbiddenCommandError(f"not a command that only reads: {command!r}")
    return "".join(f"{command}\n" for command in lines).encode("ascii")


def invocation(commands: Sequence[str]) -> tuple[tuple[str, ...], bytes, dict[str, str]]:
    """Return the tool's arguments, standard input and added variables for queries.

    A v3 query is the arguments of one run. The variable selects the protocol if no daemon runs.
    """
    if len(commands) == 1 and commands[0] in READ_ONLY_V3:
        return tuple(commands[0].split(" ")), b"", {"CUDA_MPS_PROTOCOL_VERSION": "3"}
    return (), stdin_text(commands), {}


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """A daemon's reply to PROBE."""

    server_pids: tuple[int, ...]  # In the daemon's PID namespace.
    default_active_thread_ratio: float  # 0-1, for servers that start from now on.


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A daemon's replies about one server. None, or a missing device: unreported."""

    server_pid: int  # In the daemon's PID namespace.
    state: str | None = None  # INITIALIZING, ACTIVE, FAULT, or a newer driver's state.
    active_thread_ratio: float | None = None  # 0-1, for clients that connect from now on.
    client_pids: tuple[int, ...] | None = None  # 0: in an invisible PID namespace.
    contexts: Mapping[int, Mapping[int, int]] | None = None  # Device -> client PID -> contexts.
    devices: Mapping[int, str] | None = None
    """Device ordinal of the daemon -> GPU UUID. (The tool's PCI addresses are not always real.)"""
    pinned_memory_limit_bytes: Mapping[int, int] = field(default_factory=dict)
    """Device ordinal -> the limit set under that ordinal, rounded down to whole GiB from 1 GiB on
    (measured: 1536M is printed as "1G"). The server's log has the exact limit."""
    default_pinned_memory_limit_bytes: Mapping[int, int] = field(default_factory=dict)
    """For servers that start from now on, rounded likewise."""
    default_active_thread_ratio: float | None = None
    default_client_priority: int | None = None  # 0 normal, 1 below normal.


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a text has no usable reply."""

    kind: Literal["server_not_found", "absent", "refused", "unparsable"]
    text: str  # Output of the tool, shortened.


def server_commands(
    server_pid: int, devices: Sequence[int] = (), *, map_devices: bool
) -> tuple[str, ...]:
    """Return the queries about one server; `map_devices` adds its GPUs, which never change."""
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
    """Return the queries about memory limits, with a fence between any two."""
    fenced = [
        command
        for device in devices
        for command in (
            f"get_device_pinned_mem_limit {server_pid} {device}",
            FENCE,
            f"get_default_device_pinned_mem_limit {device}",
            FENCE,
        )
    ]
    return tuple(fenced[:-1])


def parse_failure(exchange: Exchange) -> Failure | None:
    """Return the failure that the tool's text or exit status shows; None without any."""
    text = f"{exchange.stderr}\n{exchange.stdout}"
    for kind, phrases in _ERROR_PATTERNS:
        if any(phrase in text for phrase in phrases):
            return Failure(kind, shorten(text))
    if exchange.return_code not in (0, None):
        reply = shorten(text) or "nothing"
        return Failure("refused", f"exit status {exchange.return_code}, said {reply}")
    return None


CANNOT_SEND = "Cannot send command to MPS control daemon"
"""The tool's error after a collision with another caller, and while the daemon drains."""

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


def shorten(text: str, limit: int = MAX_QUOTED_OUTPUT) -> str:
    """Return the text as one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parse_probe(exchange: Exchange) -> ProbeReply | Failure:
    """Parse the reply to PROBE; never raises, whatever the text."""
    if (failure := parse_failure(exchange)) is not None:
        return failure
    reader = _LineReader(exchange.stdout)
    servers = reader.take_all(_PID)
    default = reader.take_match(_PERCENTAGE)
    if default is None or not reader.at_end:
        return _unparsable(exchange)
    return ProbeReply(tuple(int(pid[0]) for pid in servers), _ratio(default[0]))


def parse_server(*exchanges: Exchange) -> ServerReply | Failure:
    """Parse the replies about one server, or return the first failure. Never raises."""
    server_pid = _server_of(exchanges[0].commands) if exchanges else None
    if server_pid is None:
        return Failure("unparsable", "nothing was asked about a server")
    fields: dict[str, Any] = {}
    for exchange in exchanges:
        failure = parse_failure(exchange) or _read_exchange(server_pid, exchange, fields)
        if failure is not None:
            return failure
    return ServerReply(server_pid, **fields)


def server_replies(observation: ControlObservation) -> list[ServerReply]:
    """Return the replies of a reconciliation; omit skipped and hung runs, and failures."""
    by_server: dict[int | None, list[Exchange]] = {}
    for exchange in observation.exchanges:
        if exchange.outcome not in (Outcome.TIMEOUT, Outcome.SKIPPED):
            by_server.setdefault(_server_of(exchange.commands), []).append(exchange)
    replies = (parse_server(*exchanges) for exchanges in by_server.values())
    return [reply for reply in replies if isinstance(reply, ServerReply)]


def _server_of(commands: Sequence[str]) -> int | None:
    for command in commands:
        known = _known(command)
        if known is not None and known.arguments.startswith(_SERVER):
            return int(command.split(" ")[1])
    return None


def _output_of(exchange: Exchange) -> str:
    return f"{exchange.stdout}\n{exchange.stderr}"


def _unparsable(exchange: Exchange) -> Failure:
    return Failure("unparsable", shorten(_output_of(exchange)))


def failure_of(exchange: Exchange) -> Failure | None:
    """Return why a run of the tool failed; None for a reply, or if its server is gone."""
    commands = exchange.commands
    if commands == PROBE:
        reply = parse_probe(exchange)
        return reply if isinstance(reply, Failure) else None
    if commands == (V2_PARTITIONS,):
        # No output at all means a collision with another caller's run.
        return parse_failure(exchange) or (None if exchange.stdout else _unparsable(exchange))
    if set(commands) <= READ_ONLY_V3:
        # The form of an empty list is not documented: any text except an error is a reply. Below
        # a list's header, names of programs are not searched for errors.
        if all(has_header(query, exchange.stdout) for query in commands):
            exchange = replace(exchange, stdout="")
        foreign = V2_REFUSAL.search(_output_of(exchange))
        return (_unparsable(exchange) if foreign else None) or parse_failure(exchange)
    found = parse_server(exchange)
    return found if isinstance(found, Failure) and found.kind != "server_not_found" else None


def other_interface(exchange: Exchange) -> str | None:
    """Return the other interface ("2" or "3") if the run's output shows that it was needed."""
    if exchange.outcome not in (Outcome.REFUSED, Outcome.UNPARSABLE):
        return None
    sent_v3 = set(exchange.commands) <= READ_ONLY_V3
    refusal, other = (V2_REFUSAL, "2") if sent_v3 else (V3_REFUSAL, "3")
    return other if refusal.search(_output_of(exchange)) else None


_PID = re.compile(r"[0-9]{1,10}")
_PRIORITY = re.compile(r"[01]")
_PERCENTAGE = re.compile(r"[0-9]{1,3}\.[0-9]{1,6}")
_STATE = re.compile(r"[A-Z][A-Z_]{2,40}")
_LIMIT = re.compile(r"[0-9]{1,15} ?[KMGT](?:iB)?", re.IGNORECASE)
_NO_LIMIT = re.compile(r"No .*limit set.*")
_LISTED_DEVICE = re.compile(r"\[([0-9]{1,4})\] .*")
_CONTEXT = re.compile(r"([0-9]{1,10})\.([0-9]{1,10})")
_DEVICE_ROW = re.compile(r"([0-9]{1,4}),[^,]*,([^,]*),.*,[^,]*")
_DEVICE_SECTION = re.compile(r"Default|Server ([0-9]{1,10})|Device Ordinal,.*")
_NOT_FOUND = re.compile(r"Server ([0-9]{1,10}) not found\.?")
_UNKNOWN_COMMAND = re.compile(r"Unknown command.*|Invalid command.*")


class _LineReader:
    """The lines of a reply, taken from the front. Empty lines are dropped."""

    def __init__(self, text: str) -> None:
        self._lines = [line for raw in text.split("\n") if (line := raw.strip())]
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._lines)

    def take_match(self, shape: re.Pattern[str]) -> re.Match[str] | None:
        found = None if self.at_end else shape.fullmatch(self._lines[self._next])
        self._next += found is not None
        return found

    def take_all(self, shape: re.Pattern[str]) -> list[re.Match[str]]:
        return list(iter(lambda: self.take_match(shape), None))


def _read_exchange(server_pid: int, exchange: Exchange, fields: dict[str, Any]) -> Failure | None:
    """Add the replies to `fields`; return a failure if a line is not a reply."""
    reader = _LineReader(exchange.stdout)
    for command in exchange.commands:
        if (gone := reader.take_match(_NOT_FOUND)) is not None:
            return Failure("server_not_found", gone[0])
        if reader.take_match(_UNKNOWN_COMMAND) is not None:
            continue
        known = _known(command)
        value = None if known is None else known.read(reader, command.split(" ")[1:])
        if known is None or value is None:
            return _unparsable(exchange)
        if isinstance(value, dict):
            value = {**fields.get(known.field, {}), **value}
        fields[known.field] = value
    # The daemon complains once for each command.
    if reader.take_match(_NOT_FOUND) is not None:
        return Failure("server_not_found", f"Server {server_pid} not found")
    return None if reader.at_end else _unparsable(exchange)


def _ratio(percentage: str) -> float:
    return float(percentage) / 100.0


_Reader = Callable[[_LineReader, Sequence[str]], Any]
"""Reads the reply to a command with these arguments; returns None for other lines."""


def _one_line(shape: re.Pattern[str], convert: Callable[[str], object]) -> _Reader:
    """Return the reader of a reply that is one line."""

    def read(reader: _LineReader, _arguments: Sequence[str]) -> object:
        line = reader.take_match(shape)
        return None if line is None else convert(line[0])

    return read


def _read_limit(reader: _LineReader, arguments: Sequence[str]) -> dict[int, int]:
    """Return device ordinal -> limit in bytes; empty without a limit."""
    found = None if reader.take_match(_NO_LIMIT) else reader.take_match(_LIMIT)
    limit = parse_memory(found[0]) if found else None
    return {} if limit is None else {int(arguments[-1]): limit}


def _read_contexts(reader: _LineReader, _arguments: Sequence[str]) -> dict[int, dict[int, int]]:
    """Return device ordinal -> client PID -> contexts."""
    contexts: dict[int, Counter[int]] = {}
    while (device := reader.take_match(_LISTED_DEVICE)) is not None:
        pids = (int(context[1]) for context in reader.take_all(_CONTEXT))
        contexts.setdefault(int(device[1]), Counter()).update(pids)
    return {device: dict(counts) for device, counts in contexts.items()}


def _read_devices(reader: _LineReader, arguments: Sequence[str]) -> dict[int, str] | None:
    """Return the section "Server N", else "Default" (for later servers): ordinal -> GPU UUID."""
    sections: dict[str, dict[int, str]] = {}
    rows: dict[int, str] = {}
    while (heading := reader.take_match(_DEVICE_SECTION)) is not None:
        if not heading[0].startswith("Device Ordinal,"):
            rows = sections.setdefault(heading[0], {})
        rows.update((int(row[1]), row[2]) for row in reader.take_all(_DEVICE_ROW))
    return sections.get(f"Server {arguments[0]}") or sections.get("Default")


class _Command(NamedTuple):
    arguments: str = ""  # Regular expression of the text after the command's name.
    field: str = ""  # Field of ServerReply.
    read: _Reader = lambda _reader, _arguments: None


_SERVER = r" [1-9][0-9]{0,9}"
_DEVICE = r" [0-9]{1,4}"
_COMMANDS: Mapping[str, _Command] = {
    "get_server_list": _Command(),
    FENCE: _Command("", "default_active_thread_ratio", _one_line(_PERCENTAGE, _ratio)),
    "get_default_client_priority": _Command(
        "", "default_client_priority", _one_line(_PRIORITY, int)
    ),
    "get_default_device_pinned_mem_limit": _Command(
        _DEVICE, "default_pinned_memory_limit_bytes", _read_limit
    ),
    "get_server_status": _Command(_SERVER, "state", _one_line(_STATE, str)),
    "get_active_thread_percentage": _Command(
        _SERVER, "active_thread_ratio", _one_line(_PERCENTAGE, _ratio)
    ),
    "get_device_pinned_mem_limit": _Command(
        _SERVER + _DEVICE, "pinned_memory_limit_bytes", _read_limit
    ),
    "get_client_list": _Command(
        _SERVER,
        "client_pids",
        lambda reader, _: tuple(int(pid[0]) for pid in reader.take_all(_PID)),
    ),
    "get_device_client_list": _Command(_SERVER, "contexts", _read_contexts),
    "device_query": _Command(rf"{_SERVER} --csv", "devices", _read_devices),
    V2_PARTITIONS: _Command(),
}
"""Every command that is ever sent on standard input. None of them changes anything."""


def _known(command: str) -> _Command | None:
    name, blank, arguments = command.partition(" ")
    known = _COMMANDS.get(name)
    return known if known and re.fullmatch(known.arguments, blank + arguments) else None


def path_bytes(path: str) -> int:
    return len(path.encode("utf-8", "surrogateescape"))

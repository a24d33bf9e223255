"""The control tool's interface since driver 615 (MPS v3), and the partitions of both interfaces.

A v3 daemon takes no command on the tool's standard input: a query is the tool's arguments, one for
each run. Every query here lists something, as CSV with a header: the header alone tells what the
columns are. (The tables that the tool prints by default cut long columns: PID 3165259 becomes
"316...".)

Nothing here was tried on hardware. The formats are those of NVIDIA's manual of release 615 and of
captures that others published; testing/fake_mps_v3.py has each with its source. So what is
not as described there is left out and counted, and no value is made up.

Names of programs are chosen by whoever runs them, and names of servers and namespaces by whoever
may create them: a cell that is not understood is left out, and its row only if the cell tells what
the row is about.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from mps_exporter.mps.client_limits import parse_memory
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from mps_exporter.snapshot import (
    Feature,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    ServerDevice,
    SmPartition,
)

T = TypeVar("T")

SERVERS = "server list --format=csv"
NAMESPACES = "namespace list --format=csv"
CLIENTS = "client list --all --format=csv"
PARTITIONS = "sm-partition list --all --format=csv"
DEVICES = "device list --format=csv"
FEATURES = "feature describe --format=csv"

V2_PARTITIONS = "lspart"
"""Of a v2 daemon that was started with -S; on standard input, as all commands of that interface."""

PROBE_V3 = (SERVERS, NAMESPACES)
"""What the daemon was configured with."""
DETAILS_V3 = (CLIENTS, PARTITIONS)
FIXED_V3 = (DEVICES, FEATURES)
"""These change with the servers at most."""

READ_ONLY_V3 = frozenset((*PROBE_V3, *DETAILS_V3, *FIXED_V3))
"""Every query that is ever given as arguments. None of them changes anything, and none has a flag
before its first word: -q is --ready-devices to one release of the tool, and --quit to another."""

MAX_ROWS = 1024
"""Of one list: more of them are not shown, and counted."""

MAX_MEMORY = 1 << 50
"""A limit beyond a pebibyte is none that a GPU has."""

MAX_PID = 1 << 22
"""The kernel's own limit."""

PARTITION_REPLIES: Mapping[str, str] = {"2": "lspart", "3": "sm_partition_list"}
"""Which reply tells the partitions, by protocol."""


def speaks_v3(text: str) -> bool:
    """Whether this is how a v3 daemon's tool refuses a command of the older interface."""
    return _V3_WORDS.search(text) is not None


def speaks_v2(text: str) -> bool:
    """Whether this is how a tool of the older interface takes the arguments of a v3 query."""
    return _V2_WORDS.search(text) is not None


# Columns of the newer interface's lists, and its usage line (NVIDIA's manual, release 615).
_V3_WORDS = re.compile(r"name, ?uid, ?pid, ?status|<module>|unknown module", re.IGNORECASE)
_V2_WORDS = re.compile(
    r"unknown command|invalid command|(?:unrecogni[sz]ed|invalid|unknown) (?:option|argument)"
    r"|\busage:",
    re.IGNORECASE,
)


# ------------------------------------------------------------------------------ what lists hold

Convert = Callable[[str], object]
"""Gives what a cell says; None: it is not understood."""


def _text(shape: str) -> Convert:
    pattern = re.compile(shape)
    return lambda cell: cell if pattern.fullmatch(cell) else None


def _whole_number(most: int, least: int = 0) -> Convert:
    digits = re.compile(r"0|[1-9][0-9]{0,9}")
    return lambda cell: int(cell) if digits.fullmatch(cell) and least <= int(cell) <= most else None


def _ratio_of_sms(cell: str) -> float | None:
    if cell == "unlimited":
        return math.inf
    ratio = float(cell.rstrip("%")) / 100.0 if _PERCENTAGE.fullmatch(cell) else 0.0
    return ratio if 0.0 < ratio <= 1.0 else None


def _limit_of_memory(cell: str) -> float | None:
    size = math.inf if cell == "unlimited" else parse_memory(cell) or 0
    return size if 0 < size <= MAX_MEMORY or size == math.inf else None  # what 0 means is not known


def _devices(cell: str) -> tuple[str, ...] | None:
    devices = tuple(one.strip() for one in cell.split(","))
    return devices if len(devices) <= 64 and all(map(_DEVICE, devices)) else None


def _namespace_name(cell: str) -> str | None:
    """Read "default" or "default (0)"."""
    found = re.fullmatch(rf"({_NAME_SHAPE})(?: \(\d+\))?", cell)
    return found[1] if found else None


_NAME_SHAPE = r"[a-z0-9_]{1,64}"
"""The daemon's own rule for names of servers and namespaces."""
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-zA-Z-]{2,64}")
_PERCENTAGE = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?%?")
_PARTITION_ID = re.compile(r"[0-9A-Za-z+/=_-]{1,256}")
_SMALL = re.compile(r"[0-9]{1,5}")
_NAME = _text(_NAME_SHAPE)
_DEVICE = _text(rf"{_UUID.pattern}|[0-9]{{1,4}}")
_AMOUNT = _whole_number(99_999)
_WORD = _text(r"[A-Za-z][A-Za-z0-9_ -]{0,39}")
_PATH = _text(r"/.{0,4095}")
_FEATURE = _text(r"[a-z0-9_-]{1,64}")
_SHORT = _text(r".{1,200}")
_NOTHING = frozenset({"", "-"})
"""Cells that say nothing, and are understood all the same."""
_CUT = "..."
"""What the tool prints instead of the rest of a text."""


class _Column(NamedTuple):
    field: str
    convert: Convert
    secret: str = ""
    """What kind of name its users chose; "path": such names are in it."""


class _List(NamedTuple):
    name: str
    """In metrics."""
    field: str
    """Of Partitioning."""
    make: Callable[..., object]
    required: frozenset[str]
    """Columns without which a row says nothing."""
    columns: Mapping[str, _Column]
    rest: str = ""
    """The column that may have commas in it."""


def _make_server(*, pid: int = 0, **fields: Any) -> NamedServer:
    return NamedServer(pid=pid or None, **fields)  # one that is configured only has no process


def _make_namespace(**fields: Any) -> Namespace:
    limits = {"active_threads": "active_thread_ratio", "pinned_memory": "pinned_memory_limit_bytes"}
    unlimited = frozenset(limit for limit, name in limits.items() if fields.get(name) == math.inf)
    known = {name: value for name, value in fields.items() if value != math.inf}
    return Namespace(**known, unlimited=unlimited)


def _make_feature(*, state: str, **fields: Any) -> Feature:
    default = state.endswith("(default)")
    return Feature(enabled=state.startswith("enabled"), default=default, **fields)


_LISTS: Mapping[str, _List] = {
    SERVERS: _List(
        "server_list",
        "servers",
        _make_server,
        frozenset({"name"}),
        {
            "name": _Column("name", _NAME, "server"),
            "uid": _Column("uid", _whole_number(2**32 - 2)),
            "pid": _Column("pid", _whole_number(MAX_PID)),
            "status": _Column("status", _WORD),
            "pipe-directory": _Column("pipe_directory", _PATH, "path"),
            "allowed-devices": _Column("allowed_devices", _devices),
            "context-ids": _Column("context_ids", _SHORT),
        },
        "allowed-devices",
    ),
    NAMESPACES: _List(
        "namespace_list",
        "namespaces",
        _make_namespace,
        frozenset({"name", "server"}),
        {
            "name": _Column("name", _NAME, "namespace"),
            "server": _Column("server_name", _NAME, "server"),
            "server-status": _Column("status", _WORD),
            "pinned-memory-limit": _Column("pinned_memory_limit_bytes", _limit_of_memory),
            "active-thread-percentage": _Column("active_thread_ratio", _ratio_of_sms),
            "client-priority": _Column("client_priority", _whole_number(1)),
            "pipe-directory": _Column("pipe_directory", _PATH, "path"),
        },
    ),
    CLIENTS: _List(
        "client_list",
        "clients",
        NamespaceClient,
        frozenset({"pid", "server"}),
        {
            "pid": _Column("pid", _whole_number(MAX_PID, 1)),
            "server": _Column("server_name", _NAME, "server"),
            "device": _Column("devices", _devices),
            "namespace": _Column("namespace", _namespace_name, "namespace"),
            "command": _Column("command", _text(".+"), "program"),
        },
        "command",
    ),
    PARTITIONS: _List(
        "sm_partition_list",
        "partitions",
        SmPartition,
        frozenset({"server", "device", "status"}),
        {
            "server": _Column("server_name", _NAME, "server"),
            "device": _Column("device", _DEVICE),
            "name": _Column("name", _NAME, "partition"),
            "chunks": _Column("chunks", _AMOUNT),
            "sm-count": _Column("sms", _AMOUNT),
            "include-remainder": _Column("include_remainder", {"true": True, "false": False}.get),
            "status": _Column("status", _WORD),
            "visible-uuid": _Column("partition_id", _text(_PARTITION_ID.pattern)),
        },
    ),
    DEVICES: _List(
        "device_list",
        "devices",
        ServerDevice,
        frozenset({"device-uuid"}),
        {
            "ordinal": _Column("ordinal", _whole_number(9999)),
            "server": _Column("server_name", _NAME, "server"),
            "pci-id": _Column("pci", _SHORT),
            "device-uuid": _Column("uuid", _text(_UUID.pattern)),
            "name": _Column("name", _SHORT),
            "total-sms": _Column("sms", _AMOUNT),
            "total-chunks": _Column("chunks", _AMOUNT),
            "attributes": _Column("attributes", _SHORT),
        },
        "attributes",
    ),
    FEATURES: _List(
        "feature_describe",
        "features",
        _make_feature,
        frozenset({"feature", "state"}),
        {
            "feature": _Column("name", _FEATURE),
            "state": _Column("state", _text(r"(?:enabled|disabled)(?: \(default\))?")),
            "module": _Column("module", _FEATURE),
            "covers": _Column("covers", _SHORT),
        },
        "covers",
    ),
}
"""The lists by query, with the manual's columns."""
_ALIASES = {"maws-ns": "namespace", "ns": "namespace", "cmd": "command"}
"""A header's words for columns that the manual calls otherwise (driver 615)."""

REPLIES = (*(one.name for one in _LISTS.values()), PARTITION_REPLIES["2"])
"""Names of the queries in metrics."""


# ------------------------------------------------------------------------------ tables

Row = Mapping[str, str]
"""Column -> its cell."""


def _split_lines(text: str) -> tuple[list[str], str]:
    """Give the lines that have an end, and the last one if it has none: it may be cut."""
    *lines, cut = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line], cut


def _is_whole(text: str) -> bool:
    return _CUT not in text and text.isprintable()


def _titles(query: str, line: str) -> tuple[str, ...] | None:
    """Give a list's columns; None: this is not its header, or does not tell them apart."""
    titles, columns = tuple(map(_title, _cells(line) or ())), _LISTS[query].columns
    clear = line.isprintable() and all(titles.count(one) == 1 for one in titles if one in columns)
    return titles if clear and _LISTS[query].required <= set(titles) else None


def _title(cell: str) -> str:
    name = re.sub(r"[ _]+", "-", cell.strip().lower())
    return _ALIASES.get(name, name)


def _cells(line: str) -> list[str] | None:
    """Take a line apart; None: it is no CSV. Line by line: a quote must not swallow other rows."""
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        return None


def has_header(query: str, text: str) -> bool:
    """Whether a reply is this list: below its header stand names that users chose."""
    lines, _ = _split_lines(text)
    return bool(lines) and _titles(query, lines[0]) is not None


def _row(query: str, titles: tuple[str, ...], line: str) -> Row | None:
    """Give each column its cell; None: it cannot be told which is whose."""
    rest, cells, last = _LISTS[query].rest, _cells(line), len(titles) - 1
    sure = cells is not None and len(cells) == len(titles)
    if cells is None and titles[last] == rest and line.count(",") >= last:
        # Whatever a command is, what stands before it can be read.
        cells = [re.sub(r'^"(.*)"$', r"\1", cell) for cell in line.split(",", last)[:last]]
        cells.append(_CUT)
    if cells is None or tuple(map(_title, cells)) == titles:
        return None
    if (excess := len(cells) - len(titles)) > 0 and rest in titles:
        at = titles.index(rest)
        parts = cells[at : at + excess + 1]
        if query == SERVERS and not all(_UUID.fullmatch(part.strip()) for part in parts):
            return None  # the cells behind it may have commas, too
        cells[at : at + excess + 1] = [",".join(parts)]
    if len(cells) != len(titles):
        return None
    row = {title: cell.strip() for title, cell in zip(titles, cells, strict=True)}
    # With one comma too many elsewhere, each cell behind it is another column's.
    sure = sure or all(_is_understood(query, row, one) for one in row if one != rest)
    return row if sure else None


def _meaning(query: str, row: Row, title: str) -> object:
    """Give what a cell says; None: it is not understood."""
    cell = row[title]
    if title == "namespace":
        cell = cell.removeprefix(f"{row.get('server')}/")
    return _LISTS[query].columns[title].convert(cell) if _is_whole(cell) else None


def _is_understood(query: str, row: Row, title: str) -> bool:
    known = title in _LISTS[query].columns
    return not known or row[title] in _NOTHING or _meaning(query, row, title) is not None


def _goes_on(query: str, titles: tuple[str, ...], line: str) -> bool:
    """Whether this is the rest of a command with a line end in it."""
    begins_row = line.lstrip('"')[:1].isdigit() or line.count(",") >= len(titles) - 1
    return (query, titles[0], titles[-1]) == (CLIENTS, "pid", "command") and not begins_row


def _read_list(query: str, text: str, counts: Counter[tuple[str, str]]) -> tuple[Any, ...] | None:
    """Read one reply. An empty one says nothing: not even that there is nothing."""
    lines, cut = _split_lines(text)
    if not lines and not cut:
        return None
    name, titles = _LISTS[query].name, _titles(query, lines[0]) if lines else None
    if titles is None:
        counts[name, "reply"] += 1
        return None
    counts[name, "column"] += len(set(titles) - _LISTS[query].columns.keys())
    # Reading 100,000 rows takes 3 s, for which everything else would wait.
    counts[name, "row"] += max(0, len(lines) - 1 - MAX_ROWS) + bool(cut)
    found: list[Any] = []
    for line in lines[1 : MAX_ROWS + 1]:
        if found and found[-1] is not None and _goes_on(query, titles, line):
            found[-1] = replace(found[-1], command=None)
            counts[name, "value"] += 1
            continue
        row = _row(query, titles, line)
        found.append(None if row is None else _read_row(query, row, counts))
        counts[name, "row"] += found[-1] is None
    rows, refused = (_clients if query == CLIENTS else unique)(one for one in found if one)
    counts[name, "row"] += refused
    return rows


def _read_row(query: str, row: Row, counts: Counter[tuple[str, str]]) -> object | None:
    """Read a row; None: it is not understood what it is about."""
    kind, fields, left_out = _LISTS[query], dict[str, object](), 0
    for title in row.keys() & kind.columns.keys():
        if row[title] in _NOTHING:
            continue
        value = _meaning(query, row, title)
        if value is not None:
            fields[kind.columns[title].field] = value
        elif title == "pid":  # whether that server has a process is not known
            return None
        else:
            left_out += 1
    if any(kind.columns[title].field not in fields for title in kind.required):
        return None
    counts[kind.name, "value"] += left_out
    return kind.make(**fields)


def parse_v3(observations: Iterable[ControlObservation]) -> Partitioning | None:
    """Read what a v3 daemon said; None: none of the queries is of this interface.

    Never raises, whatever the text. A list that was not asked for, or not answered, is None.
    """
    lists, counts, asked = dict[str, Any](), Counter[tuple[str, str]](), False
    for observation in observations:
        for exchange in observation.exchanges:
            (query,) = exchange.commands if len(exchange.commands) == 1 else ("",)
            if query not in READ_ONLY_V3:
                continue
            asked = True
            if exchange.outcome is Outcome.OK and exchange.error is None:
                lists[_LISTS[query].field] = _read_list(query, exchange.stdout, counts)
            elif exchange.outcome is Outcome.OK:
                counts[_LISTS[query].name, "reply"] += 1
    return Partitioning("3", not_understood=dict(+counts), **lists) if asked else None


def _clients(rows: Iterable[NamespaceClient]) -> tuple[tuple[NamespaceClient, ...], int]:
    """Put the rows of one process together: it has one for each GPU.

    Rows that contradict each other are refused: nothing tells which is true.

    Returns:
        The clients, and how many rows were left out.
    """
    found: dict[int, NamespaceClient | None] = {}
    refused = 0
    for row in rows:
        known = found.setdefault(row.pid, row)
        if known is None or known is row:
            refused += known is None
        elif (known.server_name, known.namespace) != (row.server_name, row.namespace):
            found[row.pid] = None
            refused += 2
        else:
            devices = tuple(dict.fromkeys((*known.devices, *row.devices)))
            found[row.pid] = replace(known, devices=devices)
    return tuple(one for one in found.values() if one is not None), refused


def unique(rows: Iterable[T]) -> tuple[tuple[T, ...], int]:
    """Leave out rows that are there twice; of those that contradict each other, none is believed.

    Returns:
        The rest, and how many were left out.
    """
    found: dict[object, T | None] = {}
    refused = 0
    for row in rows:
        identity = _row_identity(row)
        if identity not in found:
            found[identity] = row
            continue
        refused += 1 + (found[identity] not in (None, row))
        found[identity] = row if found[identity] == row else None
    return tuple(row for row in found.values() if row is not None), refused


def _row_identity(row: object) -> object:
    """What no two rows of a list have in common."""
    match row:
        case NamedServer() | Feature():
            return row.name
        case Namespace():
            return row.server_name, row.name
        case SmPartition():
            return row.server_name, row.device, row.partition_id or row.label, row.unallocated
        case ServerDevice():
            return row.server_name, row.uuid
    return row


def joined(first: Partitioning | None, second: Partitioning | None) -> Partitioning | None:
    """Put together what was asked at two times; of what both have, the first counts."""
    if first is None or second is None:
        return first
    return replace(
        first,
        clients=second.clients if first.clients is None else first.clients,
        partitions=second.partitions if first.partitions is None else first.partitions,
        devices=second.devices if first.devices is None else first.devices,
        features=second.features if first.features is None else first.features,
        not_understood={**second.not_understood, **first.not_understood},
    )


def parse_v2_partitions(observation: ControlObservation | None) -> Partitioning | None:
    """Read the reply to lspart, in the manual's form and in that of driver 610; None: no reply.

    GPU           Partition   free   used   free  used  clients
                              chunk  chunk  SM    SM
    GPU-74d43ed3  -           3      7      24    56    -           the GPU
    GPU-74d43ed3  Dx4AAA…     -      7      -     56    Yes         a partition of it

    In the other form an empty cell is blank, so that both rows have five words.
    """
    for exchange in observation.exchanges if observation is not None else ():
        if exchange.commands == (V2_PARTITIONS,) and exchange.outcome is Outcome.OK:
            return _read_v2_partitions(exchange)
    return None


def _read_v2_partitions(exchange: Exchange) -> Partitioning:
    name, counts, found = PARTITION_REPLIES["2"], Counter[tuple[str, str]](), list[SmPartition]()
    if exchange.error is not None or speaks_v2(exchange.stdout):
        counts[name, "reply"] += 1
        return Partitioning("2", not_understood=counts)
    lines, cut = _split_lines(exchange.stdout)
    if cut:
        counts[name, "row"] += 1
    for line in lines:
        words = line.split()
        if words[0] == "GPU" or set(words) <= {"chunk", "chunks", "SM"}:
            continue
        partition = _v2_partition(words) if _is_whole(line) else None
        if partition is None or len(found) >= MAX_ROWS:
            counts[name, "row"] += 1
        else:
            found.append(partition)
    # A run that collided with another caller's has no output at all, not even the heading.
    return Partitioning("2", partitions=tuple(found) or None, not_understood=counts)


def _v2_partition(words: Sequence[str]) -> SmPartition | None:
    """Read a row; for the GPU's own: what is in no partition."""
    if not _UUID.fullmatch(words[0]):
        return None
    device, cells = words[0], list(words[1:])
    if len(cells) == 4 and all(_SMALL.fullmatch(cell) for cell in cells):
        cells = ["-", *cells, "-"]
    elif len(cells) in (3, 4) and not _SMALL.fullmatch(cells[0]):
        cells = [cells[0], "-", cells[1], "-", cells[2], *(cells[3:] or ["-"])]
    if len(cells) != 6:
        return None
    partition_id, free_chunks, used_chunks, free_sms, used_sms, clients = cells
    if partition_id == "-":
        if not (_SMALL.fullmatch(free_chunks) and _SMALL.fullmatch(free_sms)):
            return None
        return SmPartition(device, chunks=int(free_chunks), sms=int(free_sms), status="unallocated")
    if not (
        _PARTITION_ID.fullmatch(partition_id)
        and _SMALL.fullmatch(used_chunks)
        and _SMALL.fullmatch(used_sms)
        and clients.lower() in _YES_NO
    ):
        return None
    return SmPartition(
        device,
        partition_id=partition_id,
        chunks=int(used_chunks),
        sms=int(used_sms),
        status="created",
        has_clients=_YES_NO[clients.lower()],
    )


_YES_NO: Mapping[str, bool | None] = {"yes": True, "no": False, "-": None}


# ------------------------------------------------------------------------------ without names

Rename = Callable[[str, str], str]
"""(kind of name, name) -> what stands for it, always the same; ("path", path) -> the same path
without names."""


def anonymised(query: str, text: str, rename: Rename) -> str:
    """Return a reply without the names that users chose; it is understood as the reply itself."""
    lines, cut = _split_lines(text)
    titles = _titles(query, lines[0]) if lines else None
    rows = [_row(query, titles, line) if titles else None for line in lines]
    columns, file = _LISTS[query].columns, io.StringIO()
    for row in rows:  # first of all the names: a path may have any of them
        for title in row or ():
            if title in columns and columns[title].secret in ("server", "namespace"):
                _renamed(query, row or {}, title, rename)
    writer = csv.writer(file, lineterminator="\n")
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if titles and number == 0:
            known = enumerate(titles)
            writer.writerow(one if one in columns else f"column_{at}" for at, one in known)
        elif row is not None:
            writer.writerow(_renamed(query, row, title, rename) for title in row)
        else:
            digit = "" if titles and _goes_on(query, titles, line) else "0 "
            writer.writerow([f"{digit}(withheld: {len(line)} characters)"])
    return file.getvalue() + (f"(withheld: {len(cut)} characters)" if cut else "")


def _renamed(query: str, row: Row, title: str, rename: Rename) -> str:
    """Give the cell as it may leave the host."""
    cell, column = row[title], _LISTS[query].columns.get(title)
    if cell in _NOTHING:
        return cell
    if column is None or not _is_understood(query, row, title):
        return "(withheld)" if column is None else _CUT
    server, name = "", cell
    if title == "namespace":
        server, _, name = cell.partition(" ")[0].rpartition("/")
    if column.secret and name != "default":
        name = rename(column.secret, name)
    return f"{rename('server', server)}/{name}" if server else name


def named_protocol(
    arguments: Sequence[str], environment: Mapping[str, str] | None
) -> Literal["2", "3"] | None:
    """Give the protocol that a daemon was started with; None: its arguments do not say it.

    "-p 3", "--protocol 3" or CUDA_MPS_PROTOCOL_VERSION=3, which wins over the arguments. Drivers
    before 615 know neither, and take no notice of the variable.
    """
    found = (environment or {}).get("CUDA_MPS_PROTOCOL_VERSION")
    if found is None:
        words = list(arguments[1:])
        for word, value in pairwise([*words, ""]):
            if word in ("-p", "--protocol"):
                found = value
            elif attached := re.fullmatch(r"(?:--protocol=|-p=?)(\d)", word):
                found = attached[1]
    return _PROTOCOLS.get(found or "")


_PROTOCOLS: Mapping[str, Literal["2", "3"]] = {"2": "2", "3": "3"}

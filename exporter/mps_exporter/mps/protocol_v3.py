"""The control tool's interface since driver 615 (MPS v3), and the partitions of both interfaces.

A v3 daemon takes no command on the tool's standard input: a query is the tool's arguments, one
query per run. Every query here returns a list as CSV, whose header names the columns. (The tables
that the tool prints by default cut long columns: PID 3165259 becomes "316...".)

None of this was tried on hardware. The formats are those of NVIDIA's manual of release 615 and of
captures that others published; testing/fake_mps_v3.py has each with its source. A cell that does
not match is omitted and counted, and so is its row if the row cannot be identified without it.
Users choose the names of programs, servers and namespaces.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from mps_exporter.mps.client_limits import parse_memory
from mps_exporter.mps.policy import MAX_LIST_ROWS
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
"""Query of a v2 daemon that was started with -S; sent on standard input like all v2 commands."""

PROBE_V3 = (SERVERS, NAMESPACES)
"""Lists of the daemon's configuration."""
DETAILS_V3 = (CLIENTS, PARTITIONS)
FIXED_V3 = (DEVICES, FEATURES)
"""Lists that change with the servers at most."""

READ_ONLY_V3 = frozenset((*PROBE_V3, *DETAILS_V3, *FIXED_V3))
"""Every query that is ever given as arguments. None of them changes anything, and none has a flag
before its first word: -q is --ready-devices to one release of the tool, and --quit to another."""


V3_REFUSAL = re.compile(r"name, ?uid, ?pid, ?status|<module>|unknown module", re.IGNORECASE)
"""How a v3 daemon's tool refuses a command of the v2 interface: with the columns of its lists, or
with its usage line (NVIDIA's manual, release 615)."""

V2_REFUSAL = re.compile(
    r"unknown command|invalid command|(?:unrecogni[sz]ed|invalid|unknown) (?:option|argument)"
    r"|\busage:",
    re.IGNORECASE,
)
"""How a v2 tool refuses the arguments of a v3 query."""


# ------------------------------------------------------------------------------ cells

Convert = Callable[[str], object]
"""Converter of a cell; returns None for a cell that does not match."""

_NAME_SHAPE = r"[a-z0-9_]{1,64}"
"""The daemon's own rule for names of servers and namespaces."""
_UUID = r"(?:GPU|MIG)-[0-9a-zA-Z-]{2,64}"
_UNQUOTED_UUIDS = re.compile(rf"{_UUID}(?:, ?{_UUID})+")
_PARTITION_ID = r"[0-9A-Za-z+/=_-]{1,256}"
_PERCENTAGE = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?%?")
_EMPTY = frozenset({"", "-"})
"""Cells without a value."""
_CUT = "..."
"""What the tool prints instead of the rest of a text."""


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
    # No GPU has a pebibyte. The meaning of 0 is unknown.
    return size if 0 < size <= 1 << 50 or size == math.inf else None


def _devices(cell: str) -> tuple[str, ...] | None:
    devices = tuple(device.strip() for device in cell.split(","))
    return devices if len(devices) <= 64 and all(map(_DEVICE, devices)) else None


def _namespace_name(cell: str) -> str | None:
    """Read "default" or "default (0)"."""
    found = re.fullmatch(rf"({_NAME_SHAPE})(?: \(\d+\))?", cell)
    return found[1] if found else None


_NAME = _text(_NAME_SHAPE)
_DEVICE = _text(rf"{_UUID}|[0-9]{{1,4}}")
_AMOUNT = _whole_number(99_999)
_WORD = _text(r"[A-Za-z][A-Za-z0-9_ -]{0,39}")
_PATH = _text(r"/.{0,4095}")
_FEATURE = _text(r"[a-z0-9_-]{1,64}")
_SHORT = _text(r".{1,200}")
_MAX_PID = 1 << 22  # the kernel's own limit


class _Column(NamedTuple):
    field: str
    convert: Convert
    secret: str = ""
    """Kind of the name in the cell, if users choose it; "path": the cell contains such names."""


class _List(NamedTuple):
    field: str
    """Field of Partitioning."""
    make: Callable[..., object]
    identity: Callable[[Any], Hashable]
    """Key of a row: no two rows of a list have the same one."""
    required: frozenset[str]
    """Columns that identify a row."""
    columns: Mapping[str, _Column]


def _make_namespace(**fields: Any) -> Namespace:
    limits = {"active_threads": "active_thread_ratio", "pinned_memory": "pinned_memory_limit_bytes"}
    unlimited = frozenset(limit for limit, name in limits.items() if fields.get(name) == math.inf)
    known = {name: value for name, value in fields.items() if value != math.inf}
    return Namespace(**known, unlimited=unlimited)


def _make_feature(*, state: str, **fields: Any) -> Feature:
    default = state.endswith("(default)")
    return Feature(enabled=state.startswith("enabled"), default=default, **fields)


def partition_identity(row: SmPartition) -> Hashable:
    """Return the key of a partition, or of the SMs of a GPU that are in no partition."""
    return row.server_name, row.device, row.partition_id or row.label, row.unallocated


_LISTS: Mapping[str, _List] = {
    SERVERS: _List(
        "servers",
        NamedServer,
        lambda row: row.name,
        frozenset({"name"}),
        {
            "name": _Column("name", _NAME, "server"),
            "uid": _Column("uid", _whole_number(2**32 - 2)),
            "pid": _Column("pid", _whole_number(_MAX_PID)),
            "status": _Column("status", _WORD),
            "pipe-directory": _Column("pipe_directory", _PATH, "path"),
            "allowed-devices": _Column("allowed_devices", _devices),
            "context-ids": _Column("context_ids", _SHORT),
        },
    ),
    NAMESPACES: _List(
        "namespaces",
        _make_namespace,
        lambda row: (row.server_name, row.name),
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
        "clients",
        NamespaceClient,
        lambda row: row.pid,
        frozenset({"pid", "server"}),
        {
            "pid": _Column("pid", _whole_number(_MAX_PID, 1)),
            "server": _Column("server_name", _NAME, "server"),
            "device": _Column("devices", _devices),
            "namespace": _Column("namespace", _namespace_name, "namespace"),
            "command": _Column("command", _text(".{1,4096}"), "program"),
        },
    ),
    PARTITIONS: _List(
        "partitions",
        SmPartition,
        partition_identity,
        frozenset({"server", "device", "status"}),
        {
            "server": _Column("server_name", _NAME, "server"),
            "device": _Column("device", _DEVICE),
            "name": _Column("name", _NAME, "partition"),
            "chunks": _Column("chunks", _AMOUNT),
            "sm-count": _Column("sms", _AMOUNT),
            "include-remainder": _Column("include_remainder", {"true": True, "false": False}.get),
            "status": _Column("status", _WORD),
            "visible-uuid": _Column("partition_id", _text(_PARTITION_ID)),
        },
    ),
    DEVICES: _List(
        "devices",
        ServerDevice,
        lambda row: (row.server_name, row.uuid),
        frozenset({"device-uuid"}),
        {
            "ordinal": _Column("ordinal", _whole_number(9999)),
            "server": _Column("server_name", _NAME, "server"),
            "pci-id": _Column("pci", _SHORT),
            "device-uuid": _Column("uuid", _text(_UUID)),
            "name": _Column("name", _SHORT),
            "total-sms": _Column("sms", _AMOUNT),
            "total-chunks": _Column("chunks", _AMOUNT),
            "attributes": _Column("attributes", _SHORT),
        },
    ),
    FEATURES: _List(
        "features",
        _make_feature,
        lambda row: row.name,
        frozenset({"feature", "state"}),
        {
            "feature": _Column("name", _FEATURE),
            "state": _Column("state", _text(r"(?:enabled|disabled)(?: \(default\))?")),
            "module": _Column("module", _FEATURE),
            "covers": _Column("covers", _SHORT),
        },
    ),
}
"""Lists by query, with the manual's columns."""

_FREE_TEXT = {"command", "attributes", "covers"}
"""Columns that may contain commas and quotes, readable if they are the last column."""
_ALIASES = {"maws-ns": "namespace", "ns": "namespace", "cmd": "command"}
"""Titles of columns that differ from the manual (driver 615)."""


def _reply_name(query: str) -> str:
    """Return the name of a query in metrics: "sm_partition_list"."""
    return "_".join(query.split()[:2]).replace("-", "_")


REPLIES = (*map(_reply_name, _LISTS), V2_PARTITIONS)
"""Names of the queries in metrics."""
PARTITION_REPLIES: Mapping[str, str] = {"2": V2_PARTITIONS, "3": _reply_name(PARTITIONS)}
"""Name of the query that returns the partitions, by protocol."""


Row = Mapping[str, str]
"""Column -> its cell."""


def _split_lines(text: str) -> tuple[list[str], str]:
    """Return the complete lines, and the last line if it has no end: it may be cut."""
    *lines, cut = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line], cut


def _is_whole(text: str) -> bool:
    return _CUT not in text and text.isprintable()


def _cells(line: str) -> list[str] | None:
    """Split a line; None if it is not CSV. An open quote must not swallow the next lines."""
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        return None


def _title(cell: str) -> str:
    name = re.sub(r"[ _]+", "-", cell.strip().lower())
    return _ALIASES.get(name, name)


def _titles(query: str, lines: Sequence[str]) -> tuple[str, ...] | None:
    """Return the columns of a list; None if the first line is not its header, or is ambiguous."""
    line, kind = lines[0] if lines else "", _LISTS[query]
    titles = tuple(map(_title, _cells(line) or ()))
    unique_titles = all(titles.count(title) == 1 for title in titles if title in kind.columns)
    clear = line.isprintable() and unique_titles
    return titles if clear and kind.required <= set(titles) else None


def has_header(query: str, text: str) -> bool:
    """Return whether a reply is this list. Below its header are names that users chose."""
    return _titles(query, _split_lines(text)[0]) is not None


def _row(query: str, titles: tuple[str, ...], line: str) -> Row | None:
    """Assign the cells to the columns; None if that is ambiguous."""
    if query == SERVERS and '"' not in line:
        line = _UNQUOTED_UUIDS.sub(r'"\g<0>"', line)
    cells = _cells(line) or []
    certain = len(cells) == len(titles)
    if not certain and titles[-1] in _FREE_TEXT:
        cells = line.split(",", len(titles) - 1)
    if len(cells) != len(titles) or tuple(map(_title, cells)) == titles:
        return None
    row = {title: cell.strip() for title, cell in zip(titles, cells, strict=True)}
    # An extra comma elsewhere would shift the cells behind it into other columns.
    certain = certain or all(_is_understood(query, row, title) for title in titles[:-1])
    return row if certain else None


def _cell_value(query: str, row: Row, title: str) -> object:
    cell = row[title]
    if title == "namespace":
        cell = cell.removeprefix(f"{row.get('server')}/")
    return _LISTS[query].columns[title].convert(cell) if _is_whole(cell) else None


def _is_understood(query: str, row: Row, title: str) -> bool:
    known = title in _LISTS[query].columns
    return not known or row[title] in _EMPTY or _cell_value(query, row, title) is not None


def _continues_command(query: str, titles: tuple[str, ...], line: str) -> bool:
    """Return whether this line is the rest of a command that contains a line end."""
    begins_row = line.lstrip('"')[:1].isdigit() or line.count(",") >= len(titles) - 1
    return (query, titles[0], titles[-1]) == (CLIENTS, "pid", "command") and not begins_row


# ------------------------------------------------------------------------------ replies


def parse_v3(observations: Iterable[ControlObservation]) -> Partitioning | None:
    """Parse the replies to v3 queries; None without any. Never raises.

    A list without a query or without a reply is None.
    """
    lists, counts, queried = dict[str, Any](), Counter[tuple[str, str]](), False
    for exchange in (one for observation in observations for one in observation.exchanges):
        (query,) = exchange.commands if len(exchange.commands) == 1 else ("",)
        if query not in READ_ONLY_V3:
            continue
        queried = True
        if exchange.outcome is Outcome.OK and exchange.error is None:
            lists[_LISTS[query].field] = _read_list(query, exchange.stdout, counts)
        elif exchange.outcome is Outcome.OK:
            counts[_reply_name(query), "reply"] += 1
    return Partitioning("3", not_understood=dict(+counts), **lists) if queried else None


def _read_list(query: str, text: str, counts: Counter[tuple[str, str]]) -> tuple[Any, ...] | None:
    """Parse one reply; None without a header. Adds the omitted parts to `counts`.

    An empty reply does not prove an empty list.
    """
    lines, cut = _split_lines(text)
    if not lines and not cut:
        return None
    name, kind, titles = _reply_name(query), _LISTS[query], _titles(query, lines)
    if titles is None:
        counts[name, "reply"] += 1
        return None
    counts[name, "column"] += len(set(titles) - kind.columns.keys())
    # Reading 100,000 rows would block the event loop for 3 s.
    counts[name, "row"] += max(0, len(lines) - 1 - MAX_LIST_ROWS) + bool(cut)
    found: list[Any] = []
    for line in lines[1 : MAX_LIST_ROWS + 1]:
        if found and found[-1] is not None and _continues_command(query, titles, line):
            found[-1] = replace(found[-1], command=None)
            counts[name, "value"] += 1
            continue
        row = _row(query, titles, line)
        found.append(None if row is None else _read_row(query, row, counts))
        counts[name, "row"] += found[-1] is None
    rows = [row for row in found if row is not None]
    kept, omitted = _merge_clients(rows) if query == CLIENTS else unique(rows, kind.identity)
    counts[name, "row"] += omitted
    return kept


def _read_row(query: str, row: Row, counts: Counter[tuple[str, str]]) -> object | None:
    """Convert a row; None if a cell that identifies it does not match."""
    kind, fields, omitted = _LISTS[query], dict[str, object](), 0
    for title in row.keys() & kind.columns.keys():
        if row[title] in _EMPTY:
            continue
        value = _cell_value(query, row, title)
        if value is not None:
            fields[kind.columns[title].field] = value
        elif title == "pid":  # unknown whether this server has a process
            return None
        else:
            omitted += 1
    if any(kind.columns[title].field not in fields for title in kind.required):
        return None
    counts[_reply_name(query), "value"] += omitted
    return kind.make(**fields)


def unique(rows: Iterable[T], identity: Callable[[T], Hashable]) -> tuple[tuple[T, ...], int]:
    """Return the rows without duplicates, and the number of omitted rows.

    Rows with one identity and different values contradict each other: all of them are omitted.
    """
    groups = _groups(rows, identity)
    kept = tuple(group[0] for group in groups if all(row == group[0] for row in group))
    return kept, sum(map(len, groups)) - len(kept)


def _groups(rows: Iterable[T], identity: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(identity(row), []).append(row)
    return list(groups.values())


def _merge_clients(rows: Iterable[NamespaceClient]) -> tuple[tuple[NamespaceClient, ...], int]:
    """Merge the rows of each process, one per GPU; return also the number of omitted rows."""
    kept, omitted = list[NamespaceClient](), 0
    for group in _groups(rows, lambda row: row.pid):
        if len({(row.server_name, row.namespace) for row in group}) == 1:
            devices = dict.fromkeys(device for row in group for device in row.devices)
            kept.append(replace(group[0], devices=tuple(devices)))
        else:
            omitted += len(group)
    return tuple(kept), omitted


def joined(first: Partitioning | None, second: Partitioning | None) -> Partitioning | None:
    """Combine the replies to two sets of queries; the first wins where both have a list."""
    if first is None or second is None:
        return first
    names = [kind.field for kind in _LISTS.values() if getattr(first, kind.field) is None]
    counts = {**second.not_understood, **first.not_understood}
    return replace(first, not_understood=counts, **{name: getattr(second, name) for name in names})


# ------------------------------------------------------------------------------ v2 partitions

_V2_HEADINGS = {"chunk", "chunks", "SM"}
_V2_UNALLOCATED = re.compile(
    rf"({_UUID}) (?:- )?([0-9]{{1,5}}) [0-9]{{1,5}} ([0-9]{{1,5}}) [0-9]{{1,5}}(?: -)?"
)
_V2_PARTITION = re.compile(
    rf"({_UUID}) (?!(?:-|[0-9]{{1,5}}) )({_PARTITION_ID})"
    r" (?:- )?([0-9]{1,5}) (?:- )?([0-9]{1,5})(?: (yes|no|-))?",
    re.IGNORECASE,
)


def parse_v2_partitions(observation: ControlObservation | None) -> Partitioning | None:
    """Parse the reply to lspart, in the manual's form and in that of driver 610; None: no reply.

    GPU           Partition   free   used   free  used  clients
                              chunk  chunk  SM    SM
    GPU-74d43ed3  -           3      7      24    56    -           the GPU
    GPU-74d43ed3  Dx4AAA…     -      7      -     56    Yes         a partition of it

    In the other form an empty cell is blank.
    """
    for exchange in observation.exchanges if observation is not None else ():
        if exchange.commands == (V2_PARTITIONS,) and exchange.outcome is Outcome.OK:
            return _read_v2_partitions(exchange)
    return None


def _read_v2_partitions(exchange: Exchange) -> Partitioning:
    if exchange.error is not None or V2_REFUSAL.search(exchange.stdout):
        return Partitioning("2", not_understood={(V2_PARTITIONS, "reply"): 1})
    lines, cut = _split_lines(exchange.stdout)
    found, omitted = list[SmPartition](), int(bool(cut))
    for words in map(str.split, lines):
        if words[0] == "GPU" or _V2_HEADINGS.issuperset(words):
            continue
        partition = _v2_partition(" ".join(words))
        if partition is None or len(found) >= MAX_LIST_ROWS:
            omitted += 1
        else:
            found.append(partition)
    counts = {(V2_PARTITIONS, "row"): omitted} if omitted else {}
    # A run that collided with another caller's has no output at all, not even the heading.
    return Partitioning("2", partitions=tuple(found) or None, not_understood=counts)


def _v2_partition(line: str) -> SmPartition | None:
    """Parse a partition's row, or a GPU's row, which has what is in no partition."""
    if (gpu := _V2_UNALLOCATED.fullmatch(line)) is not None:
        device, chunks, sms = gpu.groups()
        return SmPartition(device, chunks=int(chunks), sms=int(sms), status="unallocated")
    if (row := _V2_PARTITION.fullmatch(line)) is None:
        return None
    device, partition_id, chunks, sms, clients = row.groups("-")
    return SmPartition(
        device,
        partition_id=partition_id,
        chunks=int(chunks),
        sms=int(sms),
        status="created",
        has_clients={"yes": True, "no": False}.get(clients.lower()),
    )


# ------------------------------------------------------------------------------ without names

Rename = Callable[[str, str], str]
"""(kind of name, name) -> its replacement, always the same; ("path", path) -> the path without
names."""


def anonymised(query: str, text: str, rename: Rename) -> str:
    """Return a reply without the names that users chose; it parses like the original."""
    lines, cut = _split_lines(text)
    titles, columns = _titles(query, lines), _LISTS[query].columns
    rows = [_row(query, titles, line) if titles else None for line in lines]
    for named in filter(None, rows):  # names first: a path may contain any of them
        for title in named:
            if title in columns and columns[title].secret in ("server", "namespace"):
                _renamed(query, named, title, rename)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for line, row in zip(lines, rows, strict=True):
        if titles and line is lines[0]:
            writer.writerow(t if t in columns else f"column_{at}" for at, t in enumerate(titles))
        elif row is not None:
            writer.writerow(_renamed(query, row, title, rename) for title in row)
        else:
            digit = "" if titles and _continues_command(query, titles, line) else "0 "
            writer.writerow([f"{digit}(withheld: {len(line)} characters)"])
    return file.getvalue() + (f"(withheld: {len(cut)} characters)" if cut else "")


def _renamed(query: str, row: Row, title: str, rename: Rename) -> str:
    cell, column = row[title], _LISTS[query].columns.get(title)
    if cell in _EMPTY:
        return cell
    if column is None or not _is_understood(query, row, title):
        return "(withheld)" if column is None else _CUT
    server, name = "", cell
    if title == "namespace":
        server, _, name = cell.partition(" ")[0].rpartition("/")
    if column.secret and name != "default":
        name = rename(column.secret, name)
    return f"{rename('server', server)}/{name}" if server else name


_PROTOCOL_OPTION = re.compile(r"\0(?:--protocol[=\0]|-p=?\0?)([^\0]*)")


def named_protocol(
    arguments: Sequence[str], environment: Mapping[str, str] | None
) -> Literal["2", "3"] | None:
    """Return the protocol that a daemon was started with; None if its arguments name none.

    "-p 3", "--protocol 3" or CUDA_MPS_PROTOCOL_VERSION=3, which wins over the arguments. Drivers
    before 615 know neither, and ignore the variable.
    """
    named = (environment or {}).get("CUDA_MPS_PROTOCOL_VERSION")
    if named is None:
        options = _PROTOCOL_OPTION.findall("\0".join(["", *arguments[1:]]))
        named = options[-1] if options else ""
    return _PROTOCOLS.get(named)


_PROTOCOLS: Mapping[str, Literal["2", "3"]] = {"2": "2", "3": "3"}

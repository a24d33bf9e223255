"""The control tool's interface since driver 615 (MPS v3), and the partitions of both interfaces.

A v3 daemon takes no command on the tool's standard input: a query is the tool's arguments, one
query per run. Every query here returns a list as CSV, whose header names the columns. (The tables
that the tool prints by default cut long columns: PID 3165259 becomes "316...".)

None of this was tried on hardware. The formats are those of NVIDIA's manual of release 615 and of
captures that others published; testing/fake_mps_v3.py has each with its source. A cell that does
not match is omitted and counted, and so is its row if the row cannot be identified without it.
Users choose the names of programs, servers and namespaces.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import reduce
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from mps_exporter.limits_without_a_flag import MAX_LIST_ROWS
from mps_exporter.mps.client_limits import parse_memory
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from mps_exporter.snapshot import (
    Feature,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    ServerDevice,
    Setting,
    SmPartition,
)

SERVERS = "server list --format=csv"
NAMESPACES = "namespace list --format=csv"
CLIENTS = "client list --all --format=csv"
PARTITIONS = "sm-partition list --all --format=csv"
DEVICES = "device list --format=csv"
FEATURES = "feature describe --format=csv"
ACCOUNTING = "memacct describe --format=csv"  # Its columns' titles are not published.

V2_PARTITIONS = "lspart"  # Query of a v2 daemon that was started with -S.

PROBE_V3 = (SERVERS, NAMESPACES)  # Lists of the daemon's configuration.
DETAILS_V3 = (CLIENTS, PARTITIONS, DEVICES, FEATURES, ACCOUNTING)

READ_ONLY_V3 = frozenset((*PROBE_V3, *DETAILS_V3))
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

Convert = Callable[[str], object]  # Converter of a cell; None if the cell does not match.

_NAME = r"[a-z0-9_]{1,64}"  # The daemon's own rule for names of servers and namespaces.
_UUID = r"(?:GPU|MIG)-[0-9a-zA-Z-]{2,64}"
_UNQUOTED_UUIDS = re.compile(rf"{_UUID}(?:, ?{_UUID})+")
_PARTITION_ID = r"[0-9A-Za-z+/=_-]{1,256}"
_PERCENTAGE = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?%?")
_EMPTY = frozenset({"", "-"})  # Cells without a value.
_CUT = "..."  # What the tool prints instead of the rest of a text.


def _text(shape: str) -> Convert:
    pattern = re.compile(shape)
    return lambda cell: cell if pattern.fullmatch(cell) else None


def _whole_number(most: int) -> Convert:
    digits = re.compile(r"0|[1-9][0-9]{0,9}")
    return lambda cell: int(cell) if digits.fullmatch(cell) and int(cell) <= most else None


def _ratio_of_sms(cell: str) -> float | None:
    if cell == "unlimited":
        return math.inf
    ratio = float(cell.rstrip("%")) / 100.0 if _PERCENTAGE.fullmatch(cell) else 0.0
    return ratio if 0.0 < ratio <= 1.0 else None


def _limit_of_memory(cell: str) -> float | None:
    if cell == "unlimited":
        return math.inf
    size = parse_memory(cell) or 0
    # No GPU has a pebibyte. The meaning of 0 is unknown.
    return size if 0 < size <= 1 << 50 else None


_device = _text(rf"{_UUID}|[0-9]{{1,4}}")


def _devices(cell: str) -> tuple[str, ...] | None:
    devices = tuple(device.strip() for device in cell.split(","))
    return devices if len(devices) <= 64 and all(map(_device, devices)) else None


def _namespace(cell: str) -> str | None:
    """Return the name in "[server/]name[ (0)]"; None for other text."""
    found = re.fullmatch(rf"(?:{_NAME}/)?({_NAME})(?: \(\d+\))?", cell)
    return found[1] if found else None


def _value(field: str, cell: str) -> Any:
    """Return the value of a cell; None if it does not match."""
    return _CONVERTERS[field](cell) if _CUT not in cell and cell.isprintable() else None


# ------------------------------------------------------------------------------ lists

_FIELDS: Mapping[str, str] = {
    "active_thread_percentage": "active_thread_ratio",
    "cmd": "command",
    "device_uuid": "uuid",
    "maws_ns": "namespace",
    "ns": "namespace",
    "pci_id": "pci",
    "pinned_memory_limit": "pinned_memory_limit_bytes",
    "server": "server_name",
    "server_status": "status",
    "sm_count": "sms",
    "total_chunks": "chunks",
    "total_sms": "sms",
    "visible_uuid": "partition_id",
}
"""Title of a column -> field of the row, where they differ."""

_CONVERTERS: Mapping[str, Convert] = {
    **dict.fromkeys(("chunks", "ordinal", "sms"), _whole_number(99_999)),
    **dict.fromkeys(
        ("attributes", "context_ids", "covers", "model", "pci", "value"), _text(r".{1,200}")
    ),
    **dict.fromkeys(("name", "server_name"), _text(_NAME)),
    **dict.fromkeys(("feature", "key", "module"), _text(r"[a-z0-9_-]{1,64}")),
    **dict.fromkeys(("allowed_devices", "devices"), _devices),
    "active_thread_ratio": _ratio_of_sms,
    "client_priority": _whole_number(1),
    "command": _text(r".{1,4096}"),
    "device": _device,
    "has_clients": lambda cell: {"yes": True, "no": False}.get(cell.lower()),
    "include_remainder": {"true": True, "false": False}.get,
    "namespace": _namespace,
    "partition_id": _text(_PARTITION_ID),
    "pinned_memory_limit_bytes": _limit_of_memory,
    "pid": _whole_number(1 << 22),  # the kernel's own limit
    "pipe_directory": _text(r"/.{0,4095}"),
    "state": _text(r"(?:enabled|disabled)(?: \(default\))?"),
    "status": _text(r"[A-Za-z][A-Za-z0-9_ -]{0,39}"),
    "uid": _whole_number(2**32 - 2),
    "uuid": _text(_UUID),
}
"""Field of a row -> converter of its cell."""

_FREE_TEXT = {"command", "attributes", "covers"}
"""Fields that may contain commas and quotes, readable if they are the last column."""


class _List(NamedTuple):
    row: type[Any]
    identity: Callable[[Any], object]  # Key of a row, unique except for a client's rows.
    titles: Mapping[str, str] = _FIELDS

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(one.name for one in fields(self.row)) & _CONVERTERS.keys()

    @property
    def required(self) -> frozenset[str]:
        """Fields that identify a row and its meaning: those without a default."""
        return frozenset(one.name for one in fields(self.row) if one.default is MISSING)


_LISTS: Mapping[str, _List] = {
    SERVERS: _List(NamedServer, attrgetter("name")),
    NAMESPACES: _List(Namespace, attrgetter("server_name", "name")),
    CLIENTS: _List(NamespaceClient, attrgetter("pid"), {**_FIELDS, "device": "devices"}),
    PARTITIONS: _List(SmPartition, attrgetter("server_name", "device", "label", "unallocated")),
    DEVICES: _List(ServerDevice, attrgetter("server_name", "uuid"), {**_FIELDS, "name": "model"}),
    FEATURES: _List(Feature, attrgetter("feature")),
    ACCOUNTING: _List(Setting, attrgetter("key"), {"name": "key", "setting": "key"}),
}
"""Lists by query. The columns of a list are the fields of its class."""


def _reply_name(query: str) -> str:
    """Return the name of a query in metrics: "sm_partition_list"."""
    return "_".join(query.split()[:2]).replace("-", "_")


REPLIES = (*map(_reply_name, _LISTS), V2_PARTITIONS)  # Names of the queries in metrics.


def _split_lines(text: str) -> tuple[list[str], str]:
    """Return the nonempty complete lines, and the rest, which may be a cut line."""
    *lines, cut = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line], cut


def _cells(line: str) -> list[str]:
    """Return a line's cells; [] if not CSV. An open quote must not swallow the next lines."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error:
        return []


def _columns(query: str, lines: Sequence[str]) -> list[str] | None:
    """Return the field of each column of a list; for an unknown column, its title.

    None if the first line is not its header, or is ambiguous.
    """
    kind, header = _LISTS[query], lines[0] if lines else ""
    titles = [re.sub(r"[ _-]+", "_", cell.lower()) for cell in _cells(header)]
    columns = [kind.titles.get(title, title) for title in titles]
    known = [column for column in columns if column in kind.fields]
    clear = header.isprintable() and len(known) == len(set(known))
    return columns if clear and kind.required <= set(known) else None


def has_header(query: str, text: str) -> bool:
    """Return whether a reply has this list's header, below which users choose names."""
    return _columns(query, _split_lines(text)[0]) is not None


def _row(query: str, columns: Sequence[str], line: str) -> list[str] | None:
    """Return a line's cells; None if they do not match the columns."""
    if query == SERVERS and '"' not in line:
        line = _UNQUOTED_UUIDS.sub(r'"\g<0>"', line)
    cells, known = _cells(line), _LISTS[query].fields
    if len(cells) != len(columns) and columns[-1] in _FREE_TEXT:
        cells = [cell.strip() for cell in line.split(",", len(columns) - 1)]
        # An extra comma elsewhere would shift the cells behind it into other columns.
        for column, cell in zip(columns[:-1], cells, strict=False):
            if column in known and cell not in _EMPTY and _value(column, cell) is None:
                return None
    return cells if len(cells) == len(columns) else None


def _continues_command(query: str, columns: Sequence[str], line: str) -> bool:
    """Return whether this line may be the rest of a command with a line end."""
    begins_row = line.lstrip('"')[:1].isdigit() or line.count(",") >= len(columns) - 1
    return (query, columns[0], columns[-1]) == (CLIENTS, "pid", "command") and not begins_row


# ------------------------------------------------------------------------------ replies


def parse_lists(observation: ControlObservation) -> Partitioning:
    """Parse the replies to queries of lists. Never raises."""
    found = (
        _read_reply(exchange.commands[0], exchange)
        for exchange in observation.exchanges
        if len(exchange.commands) == 1 and exchange.commands[0] in (*_LISTS, V2_PARTITIONS)
    )
    return reduce(joined, found, Partitioning())


def joined(first: Partitioning, second: Partitioning) -> Partitioning:
    """Combine the replies to two sets of queries; the first wins where both have a list."""
    return replace(
        first,
        protocol=first.protocol or second.protocol,
        lists={**second.lists, **first.lists},
        unknown_columns={**second.unknown_columns, **first.unknown_columns},
        not_understood={**second.not_understood, **first.not_understood},
    )


def _read_reply(query: str, exchange: Exchange) -> Partitioning:
    protocol: Literal["2", "3"] = "2" if query == V2_PARTITIONS else "3"
    if exchange.outcome is not Outcome.OK:
        return Partitioning(protocol)
    refused = protocol == "2" and V2_REFUSAL.search(exchange.stdout)
    if exchange.error is not None or refused:
        return Partitioning(protocol, not_understood={(_reply_name(query), "reply"): 1})
    if protocol == "2":
        return _read_v2_partitions(exchange.stdout)
    return _read_list(query, exchange.stdout)


def _read_list(query: str, text: str) -> Partitioning:
    """Parse one list. An empty reply does not prove an empty list."""
    name, kind = _reply_name(query), _LISTS[query]
    lines, cut = _split_lines(text)
    if not lines and not cut:
        return Partitioning("3")
    if (columns := _columns(query, lines)) is None:
        return Partitioning("3", not_understood={(name, "reply"): 1})
    unknown = [column for column in columns if column not in kind.fields]
    # Reading 100,000 rows would block the event loop for 3 s.
    counts = Counter(column=len(unknown), row=max(0, len(lines) - 1 - MAX_LIST_ROWS) + bool(cut))
    rows: list[Mapping[str, str]] = []
    for line in lines[1 : MAX_LIST_ROWS + 1]:
        cells = _row(query, columns, line)
        if cells is not None and line != lines[0]:  # a header may be repeated
            rows.append(dict(zip(columns, cells, strict=True)))
        else:
            counts["value" if rows and _continues_command(query, columns, line) else "row"] += 1
    read = (one for row in rows for one in _read_row(kind, row, counts))
    kept = tuple(_unique(kind, read, counts))
    return Partitioning(
        "3",
        {kind.row: kept},
        {(name, column): tuple(dict.fromkeys(row[column] for row in rows)) for column in unknown},
        {(name, part): count for part, count in counts.items() if count},
    )


def _read_row(kind: _List, row: Mapping[str, str], counts: Counter[str]) -> Iterator[Any]:
    """Yield the converted row, unless a cell that identifies it does not match."""
    cells = {field: row[field] for field in kind.fields & row.keys() if row[field] not in _EMPTY}
    values = {field: _value(field, cell) for field, cell in cells.items()}
    known = {field: value for field, value in values.items() if value is not None}
    # With an invalid PID, it is unknown whether a server has a process. No client has PID 0.
    if all(map(known.get, kind.required)) and ("pid" in known or "pid" not in cells):
        counts["value"] += len(cells) - len(known)
        yield kind.row(**known)
    else:
        counts["row"] += 1


def _unique(kind: _List, rows: Iterable[Any], counts: Counter[str]) -> Iterator[Any]:
    """Yield one row of each identity. Rows that contradict each other are omitted and counted."""
    groups: dict[object, list[Any]] = {}
    for row in rows:
        groups.setdefault(kind.identity(row), []).append(row)
    for group in groups.values():
        if kind.row is NamespaceClient:  # one row for each of its GPUs
            devices = tuple(dict.fromkeys(device for row in group for device in row.devices))
            group[:] = [replace(row, devices=devices) for row in group]
        if all(row == group[0] for row in group):
            yield group[0]
        else:
            counts["row"] += len(group)


# ------------------------------------------------------------------------------ v2 partitions

_V2_HEADINGS = {"chunk", "chunks", "SM"}
_V2_ROWS: Mapping[str, re.Pattern[str]] = {
    "unallocated": re.compile(
        rf"(?P<device>{_UUID}) (?P<chunks>\d{{1,5}}) \d{{1,5}} (?P<sms>\d{{1,5}}) \d{{1,5}}",
        re.ASCII,
    ),
    "created": re.compile(
        rf"(?P<device>{_UUID}) (?!\d{{1,5}} )(?P<partition_id>{_PARTITION_ID})"
        r" (?P<chunks>\d{1,5}) (?P<sms>\d{1,5})(?: (?P<has_clients>(?i:yes|no)))?",
        re.ASCII,
    ),
}
"""Status -> pattern of a row without empty cells."""


def _read_v2_partitions(text: str) -> Partitioning:
    """Parse the reply to lspart, here in the manual's form.

    GPU           Partition   free   used   free  used  clients
                              chunk  chunk  SM    SM
    GPU-74d43ed3  -           3      7      24    56    -           the GPU
    GPU-74d43ed3  Dx4AAA…     -      7      -     56    Yes         a partition of it

    Driver 610 has a blank for "-".
    """
    lines, cut = _split_lines(text)
    # In both forms the same cells remain.
    rows = [[word for word in line.split() if word != "-"] for line in lines]
    rows = [row for row in rows if row[:1] != ["GPU"] and not _V2_HEADINGS.issuperset(row)]
    found = [one for row in rows[:MAX_LIST_ROWS] for one in _v2_partition(" ".join(row))]
    omitted = len(rows) - len(found) + bool(cut)
    # No partition found is not an empty list: a run that collided has no output.
    return Partitioning(
        "2",
        {SmPartition: tuple(found)} if found else {},
        not_understood={(V2_PARTITIONS, "row"): omitted} if omitted else {},
    )


def _v2_partition(line: str) -> Iterator[SmPartition]:
    """Yield a partition, or from the row of a GPU the part outside all partitions."""
    for status, shape in _V2_ROWS.items():
        if (row := shape.fullmatch(line)) is not None:
            cells = {field: _value(field, cell) for field, cell in row.groupdict("").items()}
            yield SmPartition(server_name="", status=status, **cells)


# ------------------------------------------------------------------------------ without names

Rename = Callable[[str, str], str]
"""(kind of name, name) -> its replacement, always the same. A kind is "name", "program", or "path"
for a text with names between slashes."""

_NAMES = {
    **dict.fromkeys(("name", "server_name"), "name"),
    **dict.fromkeys(("namespace", "pipe_directory"), "path"),
    "command": "program",
}
"""Field that contains names -> kind of the names."""


def anonymised(query: str, text: str, rename: Rename) -> str:
    """Return a reply without the names that users chose; it parses like the original."""
    lines, cut = _split_lines(text)
    columns, known = _columns(query, lines), _LISTS[query].fields
    if columns is None:
        return "(withheld)\n" if text.strip() else ""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(one if one in known else f"column_{at}" for at, one in enumerate(columns))
    for line in lines[1:]:
        cells = _row(query, columns, line)
        if cells is not None and line != lines[0]:
            row = zip(columns, cells, strict=True)
            writer.writerow(_without_names(one, cell, rename, one in known) for one, cell in row)
        else:
            rest = _continues_command(query, columns, line)
            writer.writerow(["(withheld)" if rest else "0 (withheld)"])
    return file.getvalue() + ("(withheld)" if cut else "")


def _without_names(field: str, cell: str, rename: Rename, known: bool) -> str:
    if cell in _EMPTY:
        return cell
    if not known:
        return "(withheld)"
    if _value(field, cell) is None:
        return _CUT
    name = cell.partition(" ")[0] if field == "namespace" else cell
    return rename(_NAMES[field], name) if field in _NAMES else cell


_PROTOCOL_OPTION = re.compile(r"\0(?:--protocol[=\0]|-p=?\0?)([^\0]*)")
_PROTOCOLS: Mapping[str, Literal["2", "3"]] = {"2": "2", "3": "3"}


def named_protocol(
    arguments: Sequence[str], environment: Mapping[str, str] | None
) -> Literal["2", "3"] | None:
    """Return the protocol that a daemon was started with; None if unknown.

    CUDA_MPS_PROTOCOL_VERSION wins over the arguments "-p 3" and "--protocol 3". Drivers before
    615 lack these options, and ignore the variable.
    """
    named = (environment or {}).get("CUDA_MPS_PROTOCOL_VERSION")
    if named is None:
        options = _PROTOCOL_OPTION.findall("\0".join(["", *arguments[1:]]))
        named = options[-1] if options else ""
    return _PROTOCOLS.get(named)

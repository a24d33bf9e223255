"""The control tool's interface since driver 615 (MPS v3), and the partitions of both interfaces.

A v3 daemon takes no command on the tool's standard input: a query is the tool's arguments, one for
each run. Every query here lists something. A list comes as CSV, with a header; without one the
columns are those of NVIDIA's manual, in its order. (The tables that the tool prints by default cut
long columns: PID 3165259 becomes "316...".)

Nothing here was tried on hardware. The formats are those of NVIDIA's manual of release 615 and of
captures that others published; testing/fake_mps_v3.py has each with its source. So what is
not as described there is left out and counted, and no value is made up.

Names of programs are chosen by whoever runs them, and names of servers and namespaces by whoever
may create them: a row that holds anything but printable characters is refused.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeVar

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

_NAMES = {
    SERVERS: "server_list",
    NAMESPACES: "namespace_list",
    CLIENTS: "client_list",
    PARTITIONS: "sm_partition_list",
    DEVICES: "device_list",
    FEATURES: "feature_describe",
    V2_PARTITIONS: "lspart",
}
REPLIES = tuple(_NAMES.values())
"""Names of the queries in metrics."""
PARTITION_REPLIES: Mapping[str, str] = {"2": _NAMES[V2_PARTITIONS], "3": _NAMES[PARTITIONS]}
"""Which of them tells the partitions, by protocol."""


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


def parse_v3(observations: Iterable[ControlObservation]) -> Partitioning | None:
    """Read what a v3 daemon said; None: none of the queries is of this interface.

    Never raises, whatever the text. A list that was not asked for, or not answered, is None.
    """
    builder, asked = _Builder(), False
    for observation in observations:
        for exchange in observation.exchanges:
            (query,) = exchange.commands if len(exchange.commands) == 1 else ("",)
            if query not in READ_ONLY_V3:
                continue
            asked = True
            if exchange.outcome is Outcome.OK and exchange.error is None:
                builder.read(query, exchange.stdout)
            elif exchange.outcome is Outcome.OK:
                builder.counts[_NAMES[query], "reply"] += 1
    return builder.build() if asked else None


Rename = Callable[[str, str], str]
"""(kind of name, name) -> what stands for it, always the same."""

_NAME_COLUMNS: Mapping[tuple[str, str], str] = {
    (SERVERS, "name"): "server",
    (NAMESPACES, "name"): "namespace",
    (NAMESPACES, "server"): "server",
    (CLIENTS, "server"): "server",
    (CLIENTS, "command"): "program",
    (PARTITIONS, "server"): "server",
    (PARTITIONS, "name"): "partition",
    (DEVICES, "server"): "server",
}
_KEPT = frozenset({"", "-", "default"})


def anonymised(query: str, text: str, pipe_directory: str, rename: Rename) -> str:
    """Return a reply without the names that users chose; rows that are refused are withheld."""
    lines, titles = [], _COLUMNS[query].names
    for number, line in enumerate(_stripped_lines(text)):
        cells = _cells(line) if _is_clean(line) else None
        header = () if cells is None else tuple(map(_column, cells))
        if number == 0 and _COLUMNS[query].required <= set(header):
            titles = header
            known = [
                cell if name in _COLUMNS[query].names else f"column_{at}"
                for at, (cell, name) in enumerate(zip(cells or (), header, strict=True))
            ]
            lines.append(_joined_cells(known))
        elif cells is None or (row := _row(query, titles, cells)) is None:
            lines.append(f"(withheld: {len(line)} characters)")
        else:
            lines.append(
                _joined_cells(
                    [
                        _renamed(query, title, row.cells[title], pipe_directory, rename)
                        for title in titles
                    ]
                )
            )
    return "".join(f"{line}\n" for line in lines)


def _joined_cells(cells: Sequence[str]) -> str:
    return ",".join('"' + cell.replace('"', '""') + '"' if "," in cell else cell for cell in cells)


def _renamed(query: str, column: str, text: str, pipe_directory: str, rename: Rename) -> str:
    if text in _KEPT:
        return text
    if kind := _NAME_COLUMNS.get((query, column)):
        return rename(kind, text)
    if column == "pipe-directory":
        return anonymised_path(text, pipe_directory, rename)
    if column == "namespace":
        found = _NAMESPACE.fullmatch(text)
        if found is None:
            return "(withheld)"
        server = f"{rename('server', found['server'])}/" if found["server"] else ""
        name = found["name"]
        return f"{server}{name if name in _KEPT else rename('namespace', name)}"
    return text if column in _COLUMNS[query].names else "(withheld)"


def anonymised_path(path: str, pipe_directory: str, rename: Rename) -> str:
    """Rename the server and the namespace in a path below a daemon's pipe directory."""
    inside = path.removeprefix(f"{pipe_directory}/")
    if inside == path:
        return path
    server, *rest = inside.split("/")
    parts = [rename("server", server)]
    parts += [one if one in _KEPT else rename("namespace", one) for one in rest]
    return "/".join((pipe_directory, *parts))


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
    name, counts, found = _NAMES[V2_PARTITIONS], Counter[tuple[str, str]](), list[SmPartition]()
    if exchange.error is not None or speaks_v2(exchange.stdout):
        counts[name, "reply"] += 1
        return Partitioning("2", not_understood=counts)
    for line in _stripped_lines(exchange.stdout):
        words = line.split()
        if not words or words[0] == "GPU" or set(words) <= _V2_HEADING:
            continue
        partition = _v2_partition(words) if _is_clean(line) else None
        if partition is None or len(found) >= MAX_ROWS:
            counts[name, "row"] += 1
        else:
            found.append(partition)
    # A run that collided with another caller's has no output at all, not even the heading.
    return Partitioning("2", partitions=tuple(found) or None, not_understood=counts)


_V2_HEADING = frozenset({"chunk", "chunks", "SM"})


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


def _stripped_lines(text: str) -> list[str]:
    return [line for raw in text.split("\n") if (line := raw.strip())]


def _is_clean(line: str) -> bool:
    """Whether a row is whole, as far as can be seen: what is cut ends in three dots."""
    return "..." not in line and line.isprintable()


_NAME = re.compile(r"[a-z0-9_]{1,64}")
"""The daemon's own rule for names of servers and namespaces."""
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-zA-Z-]{2,64}")
_DEVICE = re.compile(rf"{_UUID.pattern}|[0-9]{{1,4}}")
_SMALL = re.compile(r"[0-9]{1,5}")
_PID = re.compile(r"[1-9][0-9]{0,6}")
_UID = re.compile(r"[0-9]{1,10}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_ -]{0,39}")
_PATH = re.compile(r"/.{0,4095}")
_PARTITION_ID = re.compile(r"[0-9A-Za-z+/=_-]{1,256}")
_PERCENTAGE = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?%?")
_TEXT = re.compile(r".{1,200}")
_NAMESPACE = re.compile(r"(?:(?P<server>[a-z0-9_]{1,64})/)?(?P<name>[a-z0-9_]{1,64})(?: \(\d+\))?")
_STATE = re.compile(r"(?P<state>enabled|disabled)(?P<default> \(default\))?")
_NOTHING = frozenset({"", "-"})
"""Cells that say nothing, and are understood all the same."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a list has, in the manual's order."""

    names: tuple[str, ...]
    required: frozenset[str]
    """Without these a row says nothing."""
    rest: str = ""
    """The column that may have commas in it; it is the last one."""


_COLUMNS: Mapping[str, _Columns] = {
    SERVERS: _Columns(
        ("name", "uid", "pid", "status", "pipe-directory", "allowed-devices", "context-ids"),
        frozenset({"name"}),
    ),
    NAMESPACES: _Columns(
        (
            "name",
            "server",
            "server-status",
            "pinned-memory-limit",
            "active-thread-percentage",
            "client-priority",
            "pipe-directory",
        ),
        frozenset({"name", "server"}),
    ),
    CLIENTS: _Columns(
        ("pid", "server", "device", "namespace", "command"), frozenset({"pid", "server"}), "command"
    ),
    PARTITIONS: _Columns(
        (
            "server",
            "device",
            "name",
            "chunks",
            "sm-count",
            "include-remainder",
            "status",
            "visible-uuid",
        ),
        frozenset({"server", "device", "status"}),
    ),
    DEVICES: _Columns(
        (
            "ordinal",
            "server",
            "pci-id",
            "device-uuid",
            "name",
            "total-sms",
            "total-chunks",
            "attributes",
        ),
        frozenset({"device-uuid"}),
        "attributes",
    ),
    FEATURES: _Columns(
        ("feature", "state", "module", "covers"), frozenset({"feature", "state"}), "covers"
    ),
}
_ALIASES = {"maws-ns": "namespace", "ns": "namespace", "cmd": "command"}
"""A header's words for columns that the manual calls otherwise (driver 615)."""


def _column(title: str) -> str:
    name = re.sub(r"[ _]+", "-", title.strip().lower())
    return _ALIASES.get(name, name)


def _cells(line: str) -> list[str] | None:
    """Take a row apart; None: it is no CSV."""
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error:
        return None
    return [cell.strip() for cell in rows[0]] if len(rows) == 1 else None


@dataclass(slots=True)
class _Row:
    """A row of a list. What cannot be understood of it is counted once."""

    cells: Mapping[str, str]
    joined: bool = False
    """It had more cells than columns: its last ones were taken for one with commas in it."""
    spoilt: int = 0

    def take(self, column: str, shape: re.Pattern[str]) -> re.Match[str] | None:
        """Give what a cell says; None: nothing, or nothing that is understood."""
        text = self.cells.get(column, "")
        if text in _NOTHING:
            return None
        found = shape.fullmatch(text)
        self.spoilt += found is None
        return found

    def text(self, column: str, shape: re.Pattern[str]) -> str | None:
        """Give the cell, if it has this shape."""
        found = self.take(column, shape)
        return found[0] if found is not None else None

    def number(self, column: str, shape: re.Pattern[str], most: float = math.inf) -> int | None:
        """Give a number up to this one."""
        found = self.text(column, shape)
        if found is None or int(found) <= most:
            return None if found is None else int(found)
        self.spoilt += 1
        return None

    def name(self, column: str) -> str:
        """Give a name that must be there; empty: it is none, and the row says nothing."""
        return self.text(column, _NAME) or ""


@dataclass(slots=True)
class _Builder:
    """A Partitioning in the making."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    lists: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def read(self, query: str, text: str) -> None:
        """Read one reply. An empty one says nothing: not even that there is nothing."""
        name, lines = _NAMES[query], _stripped_lines(text)
        if not lines:
            return
        titles, begin = self._titles(query, lines[0])
        if titles is None:
            self.counts[name, "reply"] += 1
            return
        # Reading 100,000 rows takes 3 s, for which everything else would wait.
        excess = max(0, len(lines) - begin - MAX_ROWS)
        self.counts[name, "row"] += excess
        found = [self._read(query, titles, line) for line in lines[begin : begin + MAX_ROWS]]
        rows = tuple(one for one in found if one is not None)
        if query != CLIENTS:
            rows, refused = unique(rows)
            self.counts[name, "row"] += refused
        self.lists[query] = rows

    def _titles(self, query: str, line: str) -> tuple[tuple[str, ...] | None, int]:
        """Give a list's columns, and the line after the header.

        None: there is a header, and it does not tell what the columns are.
        """
        columns = _COLUMNS[query]
        header = tuple(map(_column, (_cells(line) or ()) if _is_clean(line) else ()))
        known = set(header) & set(columns.names)
        if len(known) < 2 and not columns.required <= known:
            return columns.names, 0
        if not columns.required <= known or any(header.count(title) > 1 for title in known):
            return None, 1
        self.counts[_NAMES[query], "column"] += len(set(header) - known)
        return header, 1

    def _read(self, query: str, titles: tuple[str, ...], line: str) -> object | None:
        """Read a row; None: it is refused, and counted."""
        cells = _cells(line) if _is_clean(line) else None
        row = None if cells is None else _row(query, titles, cells)
        found = None if row is None else _READERS[query](row)
        # With one comma too many in the midst of a row, each cell behind it is another column's.
        if row is None or found is None or (row.joined and row.spoilt):
            self.counts[_NAMES[query], "row"] += 1
            return None
        self.counts[_NAMES[query], "value"] += row.spoilt
        return found

    def build(self) -> Partitioning:
        """Give what was read."""

        def rows(query: str, kind: type[T]) -> tuple[T, ...] | None:
            found = self.lists.get(query)
            return None if found is None else tuple(one for one in found if isinstance(one, kind))

        clients = rows(CLIENTS, NamespaceClient)
        return Partitioning(
            "3",
            servers=rows(SERVERS, NamedServer),
            namespaces=rows(NAMESPACES, Namespace),
            clients=None if clients is None else self._clients(clients),
            partitions=rows(PARTITIONS, SmPartition),
            devices=rows(DEVICES, ServerDevice),
            features=rows(FEATURES, Feature),
            not_understood={key: count for key, count in self.counts.items() if count},
        )

    def _clients(self, rows: Iterable[NamespaceClient]) -> tuple[NamespaceClient, ...]:
        """Put the rows of one process together: it has one for each GPU.

        Rows that contradict each other are refused: nothing tells which is true.
        """
        found: dict[int, NamespaceClient | None] = {}
        for row in rows:
            known = found.setdefault(row.pid, row)
            if known is None or known is row:
                self.counts[_NAMES[CLIENTS], "row"] += known is None
            elif (known.server_name, known.namespace) != (row.server_name, row.namespace):
                found[row.pid] = None
                self.counts[_NAMES[CLIENTS], "row"] += 2
            else:
                devices = tuple(dict.fromkeys((*known.devices, *row.devices)))
                found[row.pid] = replace(known, devices=devices)
        return tuple(one for one in found.values() if one is not None)


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


def _row(query: str, titles: tuple[str, ...], cells: list[str]) -> _Row | None:
    """Give each column its cell; None: there are more or fewer cells than columns."""
    columns = _COLUMNS[query]
    excess = len(cells) - len(titles)
    if excess > 0 and titles[-1] == columns.rest:
        cells = [*cells[: len(titles) - 1], ",".join(cells[len(titles) - 1 :])]
    elif excess > 0:
        cells = _joined_devices(titles, cells, excess)
    if len(cells) != len(titles):
        return None
    return _Row(dict(zip(titles, cells, strict=True)), joined=excess > 0)


def _joined_devices(titles: tuple[str, ...], cells: list[str], excess: int) -> list[str]:
    """Join the list of a server's GPUs, which is not quoted: all of it must be UUIDs."""
    if "allowed-devices" not in titles:
        return cells
    first = titles.index("allowed-devices")
    last = first + excess
    if not all(_UUID.fullmatch(cell) for cell in cells[first : last + 1]):
        return cells
    return [*cells[:first], ",".join(cells[first : last + 1]), *cells[last + 1 :]]


def _parse_server(row: _Row) -> NamedServer | None:
    if not (name := row.name("name")):
        return None
    devices = row.text("allowed-devices", _DEVICES) or ""
    # A server that is configured only has no process. Of one whose PID is not understood it is not
    # known whether it has.
    pid = None if row.cells.get("pid") == "0" else row.number("pid", _PID, MAX_PID)
    if row.spoilt:
        return None
    return NamedServer(
        name=name,
        uid=row.number("uid", _UID, 2**32 - 2),
        pid=pid,
        status=row.text("status", _WORD),
        pipe_directory=row.text("pipe-directory", _PATH),
        allowed_devices=tuple(devices.split(",")) if devices else (),
        context_ids=row.text("context-ids", _TEXT),
    )


_DEVICES = re.compile(rf"(?:{_DEVICE.pattern})(?:,(?:{_DEVICE.pattern})){{0,63}}")


def _parse_namespace(row: _Row) -> Namespace | None:
    name, server_name = row.name("name"), row.name("server")
    if not (name and server_name):
        return None
    unlimited = set()
    ratio = memory = None
    if row.cells.get("active-thread-percentage") == "unlimited":
        unlimited.add("active_threads")
    elif (percentage := row.text("active-thread-percentage", _PERCENTAGE)) is not None:
        ratio = float(percentage.rstrip("%")) / 100.0
        if not 0.0 < ratio <= 1.0:
            ratio, row.spoilt = None, row.spoilt + 1
    if row.cells.get("pinned-memory-limit") == "unlimited":
        unlimited.add("pinned_memory")
    elif (text := row.text("pinned-memory-limit", _TEXT)) is not None:
        memory = parse_memory(text)
        if not 0 < (memory or 0) <= MAX_MEMORY:  # what 0 would mean is not known
            memory, row.spoilt = None, row.spoilt + 1
    return Namespace(
        name=name,
        server_name=server_name,
        status=row.text("server-status", _WORD),
        pipe_directory=row.text("pipe-directory", _PATH),
        active_thread_ratio=ratio,
        pinned_memory_limit_bytes=memory,
        unlimited=frozenset(unlimited),
        client_priority=row.number("client-priority", _SMALL, 1),
    )


def _parse_client(row: _Row) -> NamespaceClient | None:
    pid, server_name = row.number("pid", _PID, MAX_PID), row.name("server")
    if pid is None or not server_name:
        return None
    found = row.take("namespace", _NAMESPACE)
    namespace = found["name"] if found is not None else None
    if found is not None and found["server"] not in (None, server_name):
        namespace, row.spoilt = None, row.spoilt + 1
    device = row.text("device", _DEVICE)
    return NamespaceClient(
        pid=pid,
        server_name=server_name,
        namespace=namespace,
        devices=(device,) if device is not None else (),
        command=row.text("command", _COMMAND),
    )


_COMMAND = re.compile(r".+")


def _parse_partition(row: _Row) -> SmPartition | None:
    server_name, device = row.name("server"), row.text("device", _DEVICE)
    status = row.text("status", _WORD)
    if not server_name or device is None or status is None:
        return None
    remainder = row.text("include-remainder", _BOOLEAN)
    return SmPartition(
        device=device,
        server_name=server_name,
        partition_id=row.text("visible-uuid", _PARTITION_ID),
        name=row.name("name"),
        chunks=row.number("chunks", _SMALL),
        sms=row.number("sm-count", _SMALL),
        include_remainder=None if remainder is None else remainder == "true",
        status=status,
    )


_BOOLEAN = re.compile(r"true|false")


def _parse_device(row: _Row) -> ServerDevice | None:
    uuid = row.text("device-uuid", _UUID)
    if uuid is None:
        return None
    return ServerDevice(
        uuid=uuid,
        server_name=row.name("server"),
        ordinal=row.number("ordinal", _SMALL, 9999),
        pci=row.text("pci-id", _TEXT),
        name=row.text("name", _TEXT),
        sms=row.number("total-sms", _SMALL),
        chunks=row.number("total-chunks", _SMALL),
        attributes=row.text("attributes", _TEXT),
    )


def _parse_feature(row: _Row) -> Feature | None:
    name, state = row.text("feature", _FEATURE), row.take("state", _STATE)
    if name is None or state is None:
        return None
    return Feature(
        name=name,
        enabled=state["state"] == "enabled",
        default=state["default"] is not None,
        module=row.text("module", _FEATURE),
        covers=row.text("covers", _TEXT),
    )


_FEATURE = re.compile(r"[a-z0-9_-]{1,64}")

_READERS: Mapping[str, Callable[[_Row], object | None]] = {
    SERVERS: _parse_server,
    NAMESPACES: _parse_namespace,
    CLIENTS: _parse_client,
    PARTITIONS: _parse_partition,
    DEVICES: _parse_device,
    FEATURES: _parse_feature,
}


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

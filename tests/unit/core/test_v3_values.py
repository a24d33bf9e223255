"""Every value of the published captures, and where it appears.

A cell of a reply that is in none of the tables below fails the test, so that a new column cannot
be read without being shown.
"""

from __future__ import annotations

import asyncio
import csv
import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from grafana.boards.mps_host import BOARD
from grafana.panels import Panel
from mps_exporter import humanize
from mps_exporter.commands.doctor_report import Diagnosis, diagnosis_lines
from mps_exporter.mps.control_protocol import PROBE
from mps_exporter.mps.protocol_v3 import (
    CLIENTS,
    DEVICES,
    FEATURES,
    NAMESPACES,
    PARTITIONS,
    SERVERS,
    V2_PARTITIONS,
)
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from mps_exporter.sources.recording import Recording
from mps_exporter.web import status_page
from mps_exporter.web.policy import WebOptions
from mps_exporter.web.status_api import make_status
from testing import fake_mps_v3 as published
from testing.player import Metrics, Player
from testing.v3_host import GPU, GROUP, PIPE, SERVER, START, facts, recording

Row = Mapping[str, str]


class Shown(NamedTuple):
    """Where a column's values are shown."""

    metric: str
    label: str
    """Empty: the value is the metric's."""
    line: str
    """In a line of the doctor and of the page; {} stands for the value."""
    panel: str
    column: str


_SERVERS = "Servers of MPS v3 daemons"
_NAMESPACES = "Namespaces of MPS v3 servers"
_PARTITIONS = "SM partitions"
_CLIENTS = "Clients in namespaces and partitions"
_WHO = "Clients and their limits"
_GPUS = "GPUs of MPS v3 servers"
_FEATURES = "Features of MPS v3 daemons"
_GROUPS = "GPU memory of control groups"


def _columns(panel: str, metric: str, **columns: tuple[str, str, str]) -> dict[str, Shown]:
    return {
        name.replace("_", "-"): Shown(metric, label, line, panel, column)
        for name, (label, line, column) in columns.items()
    }


SHOWN: Mapping[str, Mapping[str, Shown]] = {
    SERVERS: _columns(
        _SERVERS,
        "mps_named_server_info",
        name=("server_name", "Server {}: ", "Server"),
        uid=("uid", "UID {}", "User"),
        pid=("server", "process {}", "PID"),
        status=("status", "{}", "Status"),
        pipe_directory=("pipe_directory", "{}", "Pipe directory"),
        allowed_devices=("allowed_devices", "GPUs {}", "GPUs"),
        context_ids=("context_ids", "contexts {}", "Contexts"),
    ),
    NAMESPACES: {
        **_columns(
            _NAMESPACES,
            "mps_namespace_info",
            name=("namespace", "/{}: ", "Namespace"),
            server=("server_name", "Namespace {}/", "Server"),
            server_status=("status", ": {},", "Server status"),
            pipe_directory=("pipe_directory", "{}", "Pipe directory"),
        ),
        "pinned-memory-limit": Shown(
            "mps_namespace_pinned_memory_limit_bytes",
            "",
            "up to {} on each GPU",
            _NAMESPACES,
            "Memory limit",
        ),
        "active-thread-percentage": Shown(
            "mps_namespace_active_thread_ratio", "", "up to {} of the SMs", _NAMESPACES, "SM share"
        ),
        "client-priority": Shown(
            "mps_namespace_client_priority", "", "priority {}", _NAMESPACES, "Priority"
        ),
    },
    CLIENTS: {
        **_columns(
            _CLIENTS,
            "mps_client_namespace_info",
            pid=("pid", "{}", "PID"),
            server=("server_name", "{}", "Named server"),
            namespace=("namespace", "namespace {}", "Namespace"),
        ),
        "device": Shown("mps_client_namespace_info", "gpu", "{}", _WHO, "GPU"),
        "command": Shown("mps_client_info", "command", "{}", _CLIENTS, "Program"),
    },
    PARTITIONS: {
        **_columns(
            _PARTITIONS,
            "mps_sm_partition_info",
            server=("server_name", "of server {} ", "Server"),
            device=("gpu", "on {}: ", "GPU"),
            name=("partition", "SM partition {} ", "Partition"),
            include_remainder=("include_remainder", "", "Remainder"),
            status=("status", "{}", "Status"),
            visible_uuid=("partition_id", "ID {}", "ID"),
        ),
        "chunks": Shown("mps_sm_partition_chunks", "", "{} chunk", _PARTITIONS, "Chunks"),
        "sm-count": Shown("mps_sm_partition_sms", "", "{} SMs", _PARTITIONS, "SMs"),
    },
    DEVICES: {
        **_columns(
            _GPUS,
            "mps_server_device_info",
            ordinal=("ordinal", "ordinal {}", "Ordinal"),
            server=("server_name", " of server {}: ", "Server"),
            pci_id=("pci_bus_id", "{}", "PCI"),
            device_uuid=("gpu", "{} of server ", "GPU"),
            name=("name", "{}", "Name"),
            attributes=("attributes", "{}", "Attributes"),
        ),
        "total-sms": Shown("mps_server_device_sms", "", "{} SMs", _GPUS, "SMs"),
        "total-chunks": Shown("mps_server_device_chunks", "", "{} chunks", _GPUS, "Chunks"),
    },
    FEATURES: _columns(
        _FEATURES,
        "mps_control_feature_info",
        feature=("feature", "{} on", "Feature"),
        state=("enabled", "{}", "Enabled"),
        module=("module", "{}", "Module"),
        covers=("covers", "covers {}", "Covers"),
    ),
}

NOT_FOR_PEOPLE = {
    (PARTITIONS, "include-remainder", "false"): "a partition that does not have them says nothing"
}
"""(query, column, value) -> why the doctor and the page do not have it; metrics and board do."""

NOT_SHOWN = {
    (CLIENTS, "command", "python train.py"): "the name that /proc gives the process is shown",
    (CLIENTS, "command", "python eval.py"): "the name that /proc gives the process is shown",
}
"""(query, column, value) -> why it is nowhere."""

KEYS: Mapping[str, Mapping[str, str]] = {
    SERVERS: {"name": "server_name"},
    NAMESPACES: {"name": "namespace", "server": "server_name"},
    CLIENTS: {"pid": "pid"},
    PARTITIONS: {"server": "server_name", "name": "partition"},
    DEVICES: {"ordinal": "ordinal", "server": "server_name"},
    FEATURES: {"feature": "feature"},
}
"""What tells the rows of a list apart, and the labels that do so in metrics of information."""

LINES: Mapping[str, str] = {
    SERVERS: "Server {name}: ",
    NAMESPACES: "Namespace {server}/{name}: ",
    CLIENTS: "client {pid}  ",
    PARTITIONS: "SM partition {name} of server {server} ",
    DEVICES: "ordinal {ordinal}",
    FEATURES: "Features: ",
}
"""Begin of the line of the doctor that has a row's values, or what only that line has."""

UNALLOCATED = "unallocated"
NOTHING = ("", "-")
TITLES = {"maws-ns": "namespace", "cmd": "command"}


def rows(text: str) -> Iterator[Row]:
    lines = csv.reader(text.splitlines())
    names = [title.lower().replace(" ", "-") for title in next(lines)]
    for cells in lines:
        yield {TITLES.get(name, name): cell for name, cell in zip(names, cells, strict=True)}


VLLM = "GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d"
MADE_UP_SERVERS = (
    f"{published.SERVER_HEADER}\n"
    f"srv,1000,{SERVER},Ready,{PIPE}/srv,{VLLM},-\n"
    f"shared,1001,{SERVER + 1},Ready,{PIPE}/shared,-,3 4\n"
)
"""Of the captures' servers only the names are published."""

HOSTS: Mapping[str, Mapping[str, str]] = {
    "the manual's": published.MANUAL,
    "the captures'": {
        **published.MANUAL,
        SERVERS: MADE_UP_SERVERS,
        NAMESPACES: published.NAMESPACES_CSV,
        CLIENTS: f"{published.CLIENT_HEADER}\n{published.CLIENTS_CAPTURE}",
        PARTITIONS: published.csv_of(published.PARTITIONS_TABLE_SHORT),
    },
}


@dataclass
class Views:
    """What there is to see of a host."""

    metrics: Metrics
    doctor: list[str]
    page: str

    @classmethod
    def of(cls, made: Recording) -> Views:
        metrics = asyncio.run(Player(made).to_end())
        status = make_status(metrics.snapshot, WebOptions(host="node-7"))
        page = html.unescape(status_page.render_page(status, WebOptions()))
        return cls(metrics, list(diagnosis_lines(Diagnosis(metrics.snapshot))), page)


def gpu_index(text: str) -> str:
    """The index of the GPU that a cell names: by ordinal, by UUID, by its beginning."""
    return "0" if text == "0" or GPU.startswith(text) else ""


def label_of(column: str, shown: Shown, cell: str) -> str:
    """What a label has for a cell."""
    if shown.label == "gpu":
        return gpu_index(cell)
    if column == "namespace":
        return cell.rpartition("/")[2].removesuffix(" (0)")
    if column == "state":
        return str(cell.startswith("enabled")).lower()
    return cell


def number_of(column: str, cell: str) -> float:
    """What a metric has for a cell."""
    if column == "pinned-memory-limit":
        return float(int(cell.removesuffix("G")) << 30)
    return float(cell) / 100 if column == "active-thread-percentage" else float(cell)


def text_of(column: str, shown: Shown, cell: str) -> str:
    """What a person reads for a cell."""
    if shown.label == "gpu":
        index = gpu_index(cell)
        return f"GPU {index}" if index else cell
    if column == "pinned-memory-limit":
        return humanize.memory(int(number_of(column, cell)))
    if column == "active-thread-percentage":
        return humanize.percent(number_of(column, cell))
    if column == "state":
        return "on (default)" if cell == "enabled (default)" else cell
    return label_of(column, shown, cell) if shown.label else cell


def columns_of(panel: Panel) -> dict[str, str]:
    """Visible column -> the label or "Value #A" that it shows."""
    hidden = {
        one["matcher"]["options"]
        for one in panel.overrides
        if any(each["id"] == "custom.hidden" and each["value"] for each in one["properties"])
    }
    (organized,) = (one["options"] for one in panel.transformations if one["id"] == "organize")
    return {
        name: source for source, name in organized["renameByName"].items() if name not in hidden
    }


def on_the_board(shown: Shown, metric: str) -> bool:
    """Whether a visible column of the panel shows this metric's label or value."""
    (panel,) = (one for row in BOARD.rows for one in row.panels if one.title == shown.panel)
    source = columns_of(panel).get(shown.column, "")
    if shown.label:
        return source == shown.label and any(
            metric in query.expr and shown.label in query.expr for query in panel.queries
        )
    letter = source.removeprefix("Value #")
    return len(letter) == 1 and metric in panel.queries["ABCDEFGHIJ".index(letter)].expr


def valued(views: Views, shown: Shown, **labels: str) -> float | None:
    """The sum of the samples that have these labels; one may be called "name"."""
    found = [
        value
        for sample, value in views.metrics.all(shown.metric)
        if labels.items() <= sample.items() and isinstance(value, float | int)
    ]
    return sum(found) if found else None


UNLIMITED = {
    "pinned-memory-limit": ("pinned_memory", "no memory limit", "Memory limited"),
    "active-thread-percentage": ("active_threads", "no SM limit", "SMs limited"),
}


def missing_of(views: Views, query: str, row: Row, column: str, cell: str) -> Iterator[str]:
    """Where a cell's value does not appear."""
    shown, text = SHOWN[query][column], ""
    keys = {label: row[name] for name, label in KEYS[query].items()}
    prefix = LINES[query].format_map(row)
    if cell == "unlimited":
        limit, text, named = UNLIMITED[column]
        shown = shown._replace(metric="mps_namespace_limited", column=named)
        found = valued(views, shown, limit=limit, **keys) == 0
    elif query == PARTITIONS and row["status"] == UNALLOCATED:
        kind = {"chunks": "chunks", "sm-count": "sms"}.get(column, "sms")
        shown = shown._replace(metric=f"mps_sm_partition_unallocated_{kind}")
        keys = {"server_name": row["server"]}
        prefix = "In no SM partition of server"
        labels = {} if not shown.label else {shown.label: label_of(column, shown, cell)}
        value = valued(views, shown, **{**keys, **labels})
        found = value == float(cell) if not shown.label else value is not None
    elif shown.label:
        keys = keys if shown.metric != "mps_client_info" else {"pid": row["pid"]}
        wanted = {**keys, shown.label: label_of(column, shown, cell)}
        found = valued(views, shown, **wanted) == 1
    else:
        keys = {label: value for label, value in keys.items() if label != "ordinal"}
        found = valued(views, shown, **keys) == number_of(column, cell)
    text = text or shown.line.format(text_of(column, shown, cell))
    where = f"{query}: {column} {cell!r}"
    if not found:
        yield f"{where}: no metric {shown.metric}"
    if not on_the_board(shown, shown.metric):
        yield f"{where}: not in {shown.panel}, {shown.column}"
    if (query, column, cell) in NOT_FOR_PEOPLE:
        return
    if query == CLIENTS:
        yield from missing_of_client(views, where, row, text)
        return
    line = next((one.strip() for one in views.doctor if prefix in one), "")
    if text not in line:
        yield f"{where}: not in the doctor's line {line!r}"
    if not line or line not in views.page:
        yield f"{where}: not on the page"


def missing_of_client(views: Views, where: str, row: Row, text: str) -> Iterator[str]:
    """A client's line stands below its server's and, on the page, its row in its GPU's card."""
    at = next(n for n, line in enumerate(views.doctor) if f"client {row['pid']}  " in line)
    server = next(line for line in reversed(views.doctor[:at]) if "    server " in line)
    of_server = f"({row['server']})" in server
    on_gpu = any(line.startswith(f"  {text.removeprefix('GPU ')}  ") for line in views.doctor)
    if not (text in views.doctor[at] or text in server or (text.startswith("GPU") and on_gpu)):
        yield f"{where}: not in the doctor's line {views.doctor[at]!r}"
    if not of_server:
        yield f"{where}: not below its server"
    on_page = text.replace("namespace ", f"namespace {row['server']}/")
    if on_page not in views.page:
        yield f"{where}: not on the page"


@pytest.mark.parametrize("name", HOSTS)
def test_every_value_appears(name: str) -> None:
    replies = HOSTS[name]
    views = Views.of(recording(replies, found={} if name != "the manual's" else None))
    missing, count = list[str](), 0
    for query, text in replies.items():
        for row in rows(text):
            for column, cell in row.items():
                said = (UNALLOCATED,) if query == PARTITIONS else ()
                if cell not in (*NOTHING, *said) and (query, column, cell) not in NOT_SHOWN:
                    count += 1
                    missing += missing_of(views, query, row, column, cell)
    assert missing == []
    assert count > 40
    assert views.metrics.all("mps_control_reply_not_understood") == []


def test_the_limits_of_a_control_group_appear() -> None:
    views = Views.of(recording())
    (text,) = [line.strip() for line in views.doctor if f"GPU memory of {GROUP} " in line]
    assert text in views.page
    given = dict(line.split(": ") for line in published.MEMORY_LIMITS_DOCS.splitlines())
    for name, metric, column in (
        ("current used", "mps_cgroup_memory_used_bytes", "Used"),
        ("soft limit", "mps_cgroup_memory_soft_limit_bytes", "Soft limit"),
        ("hard limit", "mps_cgroup_memory_hard_limit_bytes", "Hard limit"),
    ):
        size = int(given[name].removesuffix(" MiB")) << 20
        assert views.metrics.value(metric, cgroup=GROUP, uuid=GPU) == size
        assert humanize.memory(size) in text
        assert on_the_board(Shown(metric, "", "", _GROUPS, column), metric)


def v2_host(reply: str) -> Recording:
    """A v2 daemon that was started with -S, and whose clients' environments cannot be read."""
    made = recording(found={}, daemon=facts(protocol=None, static_partitioning=True))
    exchanges = (
        Exchange(PROBE, Outcome.OK, f"{SERVER}\n100.0\n", return_code=0),
        Exchange((V2_PARTITIONS,), Outcome.OK, reply, return_code=0),
    )
    probe = ControlObservation(START, PIPE, "probe", Outcome.OK, exchanges)
    return replace(made, observations=(*made.observations[:2], probe))


@pytest.mark.parametrize("reply", [published.LSPART_DOCS, published.LSPART_CAPTURE])
def test_every_value_of_lspart_appears(reply: str) -> None:
    views = Views.of(v2_host(reply))
    # What is used of a GPU is the sum of its partitions; dashes and blanks say nothing.
    for words in (line.split() for line in reply.splitlines() if line.startswith("GPU-")):
        device, *cells = words
        index = gpu_index(device)
        if cells[0].isdigit() or cells[0] == "-":
            chunks, sms = (cells[1], cells[3]) if len(cells) == 6 else (cells[0], cells[2])
            kind, labels = "unallocated_", {"gpu": index}
            (line,) = [one.strip() for one in views.doctor if "In no SM partition on " in one]
        else:
            partition = cells[0]
            chunks, sms = [cell for cell in cells[1:-1] if cell != "-"]
            kind, labels = "", {"gpu": index, "partition": partition}
            (line,) = [one.strip() for one in views.doctor if f"partition {partition} on " in one]
            assert cells[-1] == "Yes"
            assert views.metrics.value("mps_sm_partition_in_use", **labels) == 1
            assert "in use" in line
            shown = Shown("mps_sm_partition_in_use", "", "", _PARTITIONS, "In use")
            assert on_the_board(shown, shown.metric)
        assert f"on GPU {index}: " in line if index else f"on {device}: " in line
        for number, unit, column in ((sms, "sms", "SMs"), (chunks, "chunks", "Chunks")):
            metric = f"mps_sm_partition_{kind}{unit}"
            assert views.metrics.value(metric, **labels) == int(number)
            assert f"{number} {column.removesuffix('s').replace('C', 'c')}" in line
            assert on_the_board(Shown(metric, "", "", _PARTITIONS, column), metric)
        assert line in views.page

"""Metrics counted from the logs: the only declaration of each metric.

The catalogue of all metrics includes these declarations and adds the label of the daemon. At an
event: ``when.increment("mps_uid_overtakes_total", uid=1001)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from mps_exporter.mps.policy import WAIT_BOUNDS_SECONDS
from mps_exporter.observations import LogName
from mps_exporter.snapshot import EXIT_CAUSES, LOSS_CAUSES, REJECTION_CAUSES

CONTROL_LOG = "control.log"
SERVER_LOG = "server.log"
BOTH_LOGS = "control.log, server.log"


@dataclass(frozen=True, slots=True)
class LogMetric:
    """A metric of one daemon whose value comes from its logs."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    source: str
    help: str
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> all its values, each of which a counter exposes from 0 on; () for an open set. The
    daemon's label comes on top. A GPU is `uuid`; its index is added when it is exposed."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    note: str = ""
    """Further text for the documentation."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.values)

    @property
    def has_fixed_labels(self) -> bool:
        return all(self.values.values())

    @property
    def has_user(self) -> bool:
        """Whether each user has a value, which begins with the first line about the user."""
        return "uid" in self.values

    @property
    def in_milliseconds(self) -> bool:
        return self.kind == "counter" and self.name.endswith("_seconds_total")


def _log_metric(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    source: str,
    text: str,
    bounds: tuple[float, ...] = (),
    note: str = "",
    **values: tuple[str, ...],
) -> LogMetric:
    return LogMetric(name, kind, source, text, values, bounds, note)


_counter = partial(_log_metric, "counter")
_gauge = partial(_log_metric, "gauge")
_histogram = partial(_log_metric, "histogram")
_LOGS = get_args(LogName)

_ROWS = (
    _counter(
        "mps_control_starts_total",
        CONTROL_LOG,
        "Starts of a control daemon in this pipe directory.",
    ),
    _counter("mps_control_log_lines_total", BOTH_LOGS, "Log lines read.", log=_LOGS),
    _counter(
        "mps_control_log_unrecognized_lines_total",
        BOTH_LOGS,
        "Log lines that were not recognized: growth means that a driver has changed its wording.",
        log=_LOGS,
    ),
    _counter(
        "mps_control_log_query_lines_total",
        CONTROL_LOG,
        "Lines in control.log caused by control tool queries, including those of this exporter.",
    ),
    _counter(
        "mps_server_starts_total",
        CONTROL_LOG,
        "Servers started, by the user they were started for.",
        uid=(),
    ),
    _histogram(
        "mps_server_startup_seconds", CONTROL_LOG, "Time from a server's start until it is Ready."
    ),
    _counter(
        "mps_server_exits_total",
        BOTH_LOGS,
        "Server exits by cause. The exit status in the log is not evidence: requested means that "
        "the log shows an orderly exit. ghost_ended is a ghost server that exited without one, "
        "most often because an operator killed it; it is not a crash, since it served no client.",
        cause=EXIT_CAUSES,
    ),
    _gauge(
        "mps_server_last_exit_timestamp_seconds",
        BOTH_LOGS,
        "When a server last exited for this cause, as a Unix timestamp.",
        cause=EXIT_CAUSES,
    ),
    _counter(
        "mps_server_faults_total",
        SERVER_LOG,
        "Fatal GPU errors that servers handled, by the affected GPU: that of the client that MPS "
        "blames, or the only one that was reset (empty labels when the log does not identify it).",
        uuid=(),
    ),
    _gauge(
        "mps_server_last_fault_timestamp_seconds",
        SERVER_LOG,
        "When a server last handled a fatal GPU error, as a Unix timestamp.",
    ),
    _histogram(
        "mps_server_fault_recovery_seconds",
        SERVER_LOG,
        "Time from a fatal GPU error to the destruction of the server's context.",
    ),
    _counter(
        "mps_client_connections_total",
        SERVER_LOG,
        "Client processes that connected to a server.",
        uid=(),
    ),
    _counter(
        "mps_client_disconnections_total",
        SERVER_LOG,
        "Client processes that disconnected from a server, for any reason.",
        uid=(),
    ),
    _histogram(
        "mps_client_session_seconds",
        SERVER_LOG,
        "Time from connection to disconnection of clients that had at least one context; a client "
        "refused for the context limit has none.",
        uid=(),
    ),
    _counter(
        "mps_client_losses_total",
        BOTH_LOGS,
        "Clients lost, by cause: the blast radius of crashes, faults and kills. Of a fatal GPU "
        "error, own_fault is the client whose pointer caused it and neighbour_fault the others; "
        "unfinished_work: all victims of a client that ended with GPU work in flight. The kernel "
        "log proves both; without this proof the victims count as unattributed_fault.",
        uid=(),
        cause=LOSS_CAUSES,
    ),
    _gauge(
        "mps_client_last_loss_timestamp_seconds",
        BOTH_LOGS,
        "When a client was last lost, for any cause, as a Unix timestamp.",
    ),
    _counter(
        "mps_client_unfinished_exits_total",
        f"{SERVER_LOG}, /dev/kmsg",
        "Clients that ended with GPU work in flight and thereby caused a fatal GPU error, as the "
        "kernel log proves.",
        uid=(),
    ),
    _counter(
        "mps_client_rejections_total",
        BOTH_LOGS,
        "Clients that were refused, by cause.",
        uid=(),
        cause=REJECTION_CAUSES,
    ),
    _gauge(
        "mps_client_last_rejection_timestamp_seconds",
        BOTH_LOGS,
        "When a client was last refused, for any cause, as a Unix timestamp.",
    ),
    _histogram(
        "mps_uid_wait_seconds",
        CONTROL_LOG,
        "Waits behind another user's server that ended with service: the client got a context.",
        bounds=WAIT_BOUNDS_SECONDS,
        note="A wait ends when the user's server is ready, and is counted once the client has a "
        "context; where server.log cannot be read or does not name clients, once the daemon sends "
        "the client to its server.",
        uid=(),
    ),
    _counter(
        "mps_uid_waits_abandoned_total",
        f"{CONTROL_LOG}, /proc",
        "Waits that ended without service: the process exited, or never got a context.",
        uid=(),
    ),
    _counter(
        "mps_uid_overtakes_total",
        CONTROL_LOG,
        "Clients of this user admitted while clients of other users waited.",
        uid=(),
    ),
    _counter(
        "mps_uid_handovers_total",
        CONTROL_LOG,
        "Times a waiting user's server became ready after another user's.",
    ),
    _counter(
        "mps_uid_handover_idle_seconds_total",
        BOTH_LOGS,
        "Time in which a client waited and none was connected: the daemon's back-off.",
    ),
    _counter(
        "mps_uid_holding_seconds_total",
        BOTH_LOGS,
        "Time in which the user's server had at least one client.",
        uid=(),
    ),
)

LOG_METRICS: Mapping[str, LogMetric] = {row.name: row for row in _ROWS}
"""Metrics by name, in the order of the documentation."""

"""Metrics counted from the logs: the catalogue of metrics adds the label of the daemon.

At an event: ``when.increment("mps_uid_overtakes_total", uid=1001)``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import LogName
from mps_exporter.snapshot import EXIT_CAUSES, LOSS_CAUSES, REJECTION_CAUSES

CONTROL_LOG = "control.log"
SERVER_LOG = "server.log"
BOTH_LOGS = "control.log, server.log"


@dataclass(slots=True, eq=False)
class LogMetric:
    """A metric of one daemon whose value comes from its logs."""

    name: str
    source: str
    values: Mapping[str, tuple[str, ...]]
    """Label -> all its values, which counters expose from 0 on; () for an open set. The daemon's
    label is omitted. A GPU's label is `uuid`; the exposition adds the GPU's index."""
    bounds: tuple[float, ...] = ()  # Upper bounds of a histogram's buckets.
    help: str = ""

    def means(self, text: str) -> None:
        self.help = text

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.name.endswith("_total"):
            return "counter"
        return "gauge" if self.name.endswith("_timestamp_seconds") else "histogram"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.values)

    @property
    def has_fixed_labels(self) -> bool:
        return all(self.values.values())


LOG_METRICS: dict[str, LogMetric] = {}  # Metrics by name, in the order of the documentation.

_LOGS = get_args(LogName)


def _metric(
    name: str, source: str, bounds: tuple[float, ...] = (), **values: tuple[str, ...]
) -> LogMetric:
    metric = LOG_METRICS[name] = LogMetric(name, source, values, bounds)
    return metric


_metric("mps_control_starts_total", CONTROL_LOG).means(
    "Starts of a control daemon in this pipe directory."
)
_metric("mps_control_log_lines_total", BOTH_LOGS, log=_LOGS).means("Log lines read.")
_metric("mps_control_log_lost_bytes_total", BOTH_LOGS, log=_LOGS).means(
    "Bytes not read: the log was too long, grew too fast, or was truncated without a copy."
)
_metric("mps_control_log_unrecognized_lines_total", BOTH_LOGS, log=_LOGS).means(
    "Log lines that were not recognized: perhaps a new wording."
)
_metric("mps_control_log_query_lines_total", CONTROL_LOG).means(
    "Lines in control.log caused by queries, this exporter's included."
)
_metric("mps_server_starts_total", CONTROL_LOG, uid=()).means(
    "Servers started, by the user they were started for."
)
_metric("mps_server_startup_seconds", CONTROL_LOG).means(
    "Time from a server's start until it is Ready."
)
_metric("mps_server_exits_total", BOTH_LOGS, cause=EXIT_CAUSES).means(
    "Server exits by cause. requested: an orderly exit. ghost_ended: of a ghost server. The exit "
    "status that MPS logs proves nothing."
)
_metric("mps_server_last_exit_timestamp_seconds", BOTH_LOGS, cause=EXIT_CAUSES).means(
    "When a server last exited for this cause."
)
_metric("mps_server_faults_total", SERVER_LOG, uuid=()).means(
    "Fatal GPU errors, by the GPU of the client that MPS blames, or the only one that was reset."
)
_metric("mps_server_last_fault_timestamp_seconds", SERVER_LOG).means(
    "When a server last handled a fatal GPU error."
)
_metric("mps_server_fault_recovery_seconds", SERVER_LOG).means(
    "Time from a fatal GPU error to the destruction of the server's context."
)
_metric("mps_client_connections_total", SERVER_LOG, uid=()).means(
    "Client processes that connected to a server."
)
_metric("mps_client_disconnections_total", SERVER_LOG, uid=()).means(
    "Client processes that disconnected from a server."
)
_metric("mps_client_session_seconds", SERVER_LOG, uid=()).means(
    "Time from connection to disconnection, of clients that had a context."
)
_metric("mps_client_losses_total", BOTH_LOGS, uid=(), cause=LOSS_CAUSES).means(
    "Clients lost, by cause. Of a fatal GPU error, as the kernel log proves: own_fault is the "
    "client whose pointer caused it, neighbour_fault the others; unfinished_work: all victims of a "
    "client that ended with GPU work in flight. Without proof: unattributed_fault."
)
_metric("mps_client_last_loss_timestamp_seconds", BOTH_LOGS).means("When a client was last lost.")
_metric("mps_client_unfinished_exits_total", f"{SERVER_LOG}, /dev/kmsg", uid=()).means(
    "Ended clients whose work in flight caused a fatal GPU error, as the kernel log proves."
)
_metric("mps_client_rejections_total", BOTH_LOGS, uid=(), cause=REJECTION_CAUSES).means(
    "Clients that were refused, by cause."
)
_metric("mps_client_last_rejection_timestamp_seconds", BOTH_LOGS).means(
    "When a client was last refused."
)
_metric("mps_uid_wait_seconds", CONTROL_LOG, bounds=policy.WAIT_BOUNDS_SECONDS, uid=()).means(
    "Waits behind another user's server that ended with service: the client got a context."
)
_metric("mps_uid_waits_abandoned_total", f"{CONTROL_LOG}, /proc", uid=()).means(
    "Waits that ended without service: the process exited, or never got a context."
)
_metric("mps_uid_overtakes_total", CONTROL_LOG, uid=()).means(
    "Clients of this user admitted while clients of other users waited."
)
_metric("mps_uid_handovers_total", CONTROL_LOG).means(
    "Times a waiting user's server became ready after another user's."
)
_metric("mps_uid_handover_idle_seconds_total", BOTH_LOGS).means(
    "Time in which a client waited and none was connected."
)
_metric("mps_uid_holding_seconds_total", BOTH_LOGS, uid=()).means(
    "Time in which the user's server had at least one client."
)

"""Every metric about control daemons, servers, clients, waits and the exporter, once.

The GPUs' own metrics are in gpu_catalogue.py; catalogue.py joins both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from mps_exporter.diagnostics import ADVICE, Severity
from mps_exporter.metrics.spec import Kind, MetricSpec
from mps_exporter.mps.log_metrics import BOTH_LOGS, CONTROL_LOG, LOG_METRICS, SERVER_LOG
from mps_exporter.mps.protocol_v3 import REPLIES
from mps_exporter.observations import LogName
from mps_exporter.snapshot import (
    CLIENT_STATES,
    COLLECTORS,
    CONTROL_STATES,
    LIMIT_SOURCES,
    NAMESPACE_LIMITS,
    PARTITION_FAULTS,
    PROCESS_KINDS,
    QUERY_FAILURE_REASONS,
    REPLY_PARTS,
    SERVER_STATES,
)

_TOOL = "nvidia-cuda-mps-control"
_PROC = "/proc"


_STATES_SHOWN = tuple(state for state in CLIENT_STATES if state != "active")
"""Nearly all clients are active: that is shown by no series of its own."""

_STATES = {"mps_control_state": CONTROL_STATES, "mps_server_state": SERVER_STATES}

_OF_LOG = {"log": get_args(LogName)}
_OF_COLLECTOR = {"collector": COLLECTORS}

_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mps_control_info": {"multiuser": ("true", "false")},
    "mps_control_query_failures_total": {"reason": QUERY_FAILURE_REASONS},
    "mps_control_log_size_bytes": _OF_LOG,
    "mps_control_log_readable": _OF_LOG,
    "mps_client_info": {"limit_source": LIMIT_SOURCES},
    "mps_client_state": {"state": _STATES_SHOWN},
    "mps_client_state_since_timestamp_seconds": {"state": _STATES_SHOWN},
    "mps_namespace_limited": {"limit": NAMESPACE_LIMITS},
    "mps_client_sm_partition_info": {"fault": PARTITION_FAULTS},
    "mps_sm_partition_info": {"include_remainder": ("true", "false")},
    "mps_control_feature_info": {"enabled": ("true", "false"), "default": ("true", "false")},
    "mps_control_reply_not_understood": {"reply": REPLIES, "part": REPLY_PARTS},
    "mps_gpu_processes": {"kind": PROCESS_KINDS},
    "mps_advice": {
        "advice": tuple(one.name for one in ADVICE.values() if one.kind not in ("news", "trace")),
        "severity": get_args(Severity),
    },
    "mps_scrape_collector_duration_seconds": _OF_COLLECTOR,
    "mps_scrape_collector_success": _OF_COLLECTOR,
    "mps_scrape_collector_timeout": _OF_COLLECTOR,
}
"""Metric -> label -> all its values."""

_NOTES = {
    "mps_client_state": "Waiting: in the queue behind another user's server (`server` is empty). "
    "Connecting: connected, without a context yet; a program may stay in this state for long. "
    "Creating_context: a context is being created, and cannot be used yet. Torn_down: a fatal GPU "
    "error hit it, and it cannot use the GPU any more. Absent for active clients: those with a "
    "context. Absent, too, where server.log cannot be read or does not name clients (drivers "
    "before 580), and for several waiting clients that their daemon logs with PID 0.",
    "mps_uid_wait_seconds": "A wait ends when the user's server is ready, and is counted once the "
    "client has a context; where server.log cannot be read or does not name clients, once the "
    "daemon sends the client to its server.",
    "mps_gpu_processes": "A kind is absent while the process list that it comes from cannot be "
    "read: "
    "mps_client and direct need the MPS list, which old drivers lack. The MPS "
    "and graphics lists are read when other compute processes are there, and every 5 s.",
}


_D = ("daemon",)
_DS = ("daemon", "server")
_DSP = ("daemon", "server", "pid")
_G = ("gpu", "uuid")

_Row = tuple[str, Kind, tuple[str, ...], str, str]
"""Name, kind, labels, source, help."""


def _log_row(name: str) -> _Row:
    """Take the declaration of a metric that is counted from the logs."""
    metric = LOG_METRICS[name]
    labels = _G if metric.labels == ("uuid",) else metric.labels
    return name, metric.kind, (*_D, *labels), metric.source, metric.help


def _values_of(name: str) -> Mapping[str, tuple[str, ...]]:
    return LOG_METRICS[name].values if name in LOG_METRICS else _VALUES.get(name, {})


def _section(title: str, *rows: _Row | str) -> tuple[MetricSpec, ...]:
    """Rows, or names of metrics that mps/log_metrics.py declares, become specs of one section."""
    return tuple(
        MetricSpec(
            name=name,
            kind=kind,
            labels=labels,
            source=source,
            help=words,
            states=_STATES.get(name, ()),
            values=_values_of(name),
            note=_NOTES.get(name, ""),
            section=title,
        )
        for row in rows
        for name, kind, labels, source, words in (_log_row(row) if isinstance(row, str) else row,)
    )


CONTROL_DAEMON = _section(
    "Control daemon",
    (
        "mps_control_up",
        "gauge",
        _D,
        _TOOL,
        "1 when the control daemon answered its last probe within the deadline (after one retry).",
    ),
    (
        "mps_control_state",
        "stateset",
        _D,
        f"{_TOOL}, {_PROC}, {CONTROL_LOG}",
        "State of the control daemon. draining: it received quit and waits for its clients. "
        "unresponsive: it hangs. refused: it refuses queries. absent: it was configured or seen "
        "before, and is gone.",
    ),
    (
        "mps_control_info",
        "info",
        (
            *_D,
            "pid",
            "uid",
            "user",
            "log_directory",
            "binary_version",
            "protocol",
            "multiuser",
            "visible_devices",
        ),
        f"{_PROC}, {CONTROL_LOG}",
        "The control daemon's process and settings.",
    ),
    (
        "mps_control_unprivileged_info",
        "info",
        (*_D, "uid"),
        _PROC,
        "Daemons of ordinary users that are not configured. That user can forge their logs and "
        "answers; critical alerts about them carry the label daemon_uid.",
    ),
    (
        "mps_control_start_time_seconds",
        "gauge",
        _D,
        _PROC,
        "When the control daemon's process started, as a Unix timestamp.",
    ),
    "mps_control_starts_total",
    (
        "mps_control_query_duration_seconds",
        "gauge",
        _D,
        _TOOL,
        "Duration of the last round of queries to this daemon.",
    ),
    (
        "mps_control_queries_total",
        "counter",
        _D,
        _TOOL,
        "Runs of the control tool by this exporter.",
    ),
    (
        "mps_control_query_failures_total",
        "counter",
        (*_D, "reason"),
        _TOOL,
        "Runs of the control tool that failed, after one retry, by reason.",
    ),
    (
        "mps_control_default_active_thread_ratio",
        "gauge",
        _D,
        _TOOL,
        "Share of the SMs that servers started from now on allow each client, 0 to 1.",
    ),
    (
        "mps_control_default_pinned_memory_limit_bytes",
        "gauge",
        (*_D, *_G),
        _TOOL,
        "Device memory that servers started from now on allow each client.",
    ),
    (
        "mps_control_default_client_priority",
        "gauge",
        _D,
        _TOOL,
        "Priority of clients of servers started from now on: 0 normal, 1 below normal.",
    ),
    (
        "mps_control_servers",
        "gauge",
        _D,
        f"{_TOOL}, {CONTROL_LOG}",
        "Servers that this daemon currently runs.",
    ),
    (
        "mps_control_log_size_bytes",
        "gauge",
        (*_D, "log"),
        "stat",
        "Size of the daemon's log file; MPS does not rotate it.",
    ),
    "mps_control_log_lines_total",
    "mps_control_log_unrecognized_lines_total",
    "mps_control_log_query_lines_total",
    (
        "mps_control_log_readable",
        "gauge",
        (*_D, "log"),
        "open",
        "1 when the log can be followed; at 0 incidents cannot be detected.",
    ),
)

SERVERS = _section(
    "Servers",
    (
        "mps_server_info",
        "info",
        (*_DS, "uid", "user"),
        f"{_PROC}, {CONTROL_LOG}",
        "The server's process; uid and user are those it serves (0 for a multi-user server).",
    ),
    (
        "mps_server_state",
        "stateset",
        _DS,
        f"{BOTH_LOGS}, {_TOOL}",
        "The server's state as MPS reports it, including states unknown to this exporter.",
    ),
    (
        "mps_server_start_time_seconds",
        "gauge",
        _DS,
        f"{_PROC}, {CONTROL_LOG}",
        "When the server started, as a Unix timestamp.",
    ),
    (
        "mps_server_clients",
        "gauge",
        _DS,
        f"{SERVER_LOG}, {_TOOL}",
        "Client processes connected to the server.",
    ),
    (
        "mps_server_client_contexts",
        "gauge",
        (*_DS, *_G),
        f"{SERVER_LOG}, {_TOOL}",
        "CUDA contexts of clients on the GPU, as counted against the server's limit.",
    ),
    (
        "mps_server_client_contexts_limit",
        "gauge",
        (*_DS, *_G),
        "GPU architecture, driver, server.log",
        "How many client contexts the server admits on the GPU.",
    ),
    (
        "mps_server_active_thread_ratio",
        "gauge",
        _DS,
        f"{_TOOL}, {SERVER_LOG}",
        "Share of the SMs for clients that connect from now on, 0 to 1.",
    ),
    (
        "mps_server_pinned_memory_limit_bytes",
        "gauge",
        (*_DS, *_G),
        f"{_TOOL}, {SERVER_LOG}",
        "Device memory allowed to each client that connects from now on.",
    ),
    (
        "mps_server_memory_used_bytes",
        "gauge",
        (*_DS, *_G),
        "NVML",
        "Device memory of the server process itself.",
    ),
    (
        "mps_server_ghost",
        "gauge",
        _DS,
        f"{BOTH_LOGS}, {_PROC}",
        "1 when the server was started for a client that had died in the queue: it serves no "
        "client, and the daemon hangs on it until it is killed.",
    ),
    "mps_server_starts_total",
    "mps_server_startup_seconds",
    "mps_server_exits_total",
    "mps_server_last_exit_timestamp_seconds",
    "mps_server_faults_total",
    "mps_server_last_fault_timestamp_seconds",
    "mps_server_fault_recovery_seconds",
)

CLIENTS = _section(
    "Clients",
    (
        "mps_client_info",
        "info",
        (
            *_DSP,
            "uid",
            "user",
            "command",
            "container_id",
            "pod_uid",
            "slurm_job_id",
            "systemd_unit",
            "pid_namespace",
            "limit_source",
        ),
        f"{_PROC}, {CONTROL_LOG}",
        "The client's process and what it belongs to; command is the program's name only. "
        "limit_source: whether the client's or the server's SM share is the lower one; unknown "
        "where a limit cannot be determined.",
    ),
    (
        "mps_container_info",
        "info",
        ("container_id", "pod_namespace", "pod_name", "container_name"),
        "/var/log/containers",
        "What Kubernetes calls the container of a process on a GPU; container_id is that of "
        "mps_client_info. Absent where the kubelet's log directory is not mounted.",
    ),
    (
        "mps_client_start_time_seconds",
        "gauge",
        _DSP,
        SERVER_LOG,
        "When the client connected, as a Unix timestamp.",
    ),
    (
        "mps_client_state",
        "gauge",
        (*_DSP, "uid", "state"),
        BOTH_LOGS,
        "1 for the state that a client is in that is not active.",
    ),
    (
        "mps_client_state_since_timestamp_seconds",
        "gauge",
        (*_DSP, "uid", "state"),
        BOTH_LOGS,
        "When a client that is not active entered its state, as a Unix timestamp.",
    ),
    (
        "mps_client_contexts",
        "gauge",
        (*_DSP, *_G),
        f"{SERVER_LOG}, {_TOOL}",
        "CUDA contexts of the client on the GPU.",
    ),
    (
        "mps_client_memory_used_bytes",
        "gauge",
        (*_DSP, *_G),
        "NVML",
        "Device memory of the client on the GPU.",
    ),
    (
        "mps_client_memory_limit_bytes",
        "gauge",
        (*_DSP, *_G),
        f"{_PROC}/PID/environ, {_TOOL}",
        "Maximum device memory that MPS allows the client: the lower of its own limit and the "
        "server's. Absent where it has none, or where the GPU that it is for cannot be determined.",
    ),
    (
        "mps_client_active_thread_ratio",
        "gauge",
        _DSP,
        f"{_PROC}/PID/environ, {_TOOL}",
        "Maximum share of the SMs that MPS allows the client, 0 to 1: the lower of its own limit "
        "and the server's when it connected. Its own limit is that in its environment at exec. "
        "Absent where mps_client_sm_limit says it in SMs.",
    ),
    (
        "mps_client_sm_limit",
        "gauge",
        (*_DSP, *_G),
        "calculated, with the hardware's rounding",
        "Maximum number of SMs that the client's share allows on this GPU. A cap, not a "
        "reservation.",
    ),
    (
        "mps_client_priority",
        "gauge",
        _DSP,
        f"{_PROC}/PID/environ",
        "1 where the client requested a priority below normal; else absent.",
    ),
    "mps_client_connections_total",
    "mps_client_disconnections_total",
    "mps_client_session_seconds",
    "mps_client_losses_total",
    "mps_client_last_loss_timestamp_seconds",
    "mps_client_unfinished_exits_total",
    "mps_client_rejections_total",
    "mps_client_last_rejection_timestamp_seconds",
    (
        "mps_client_dropped_series",
        "gauge",
        _D,
        "this exporter",
        "Clients without separate metrics: those beyond --collector.clients.max, several that "
        "their daemon logs with PID 0, and all of them with --collector.clients=off.",
    ),
)

_SERVER_NAME = (*_D, "server_name")
_NAMESPACE = (*_SERVER_NAME, "namespace")
_PARTITION = (*_SERVER_NAME, *_G, "partition")
_OF_DAEMON = "control tool, driver 615 and later"
_DMEM, _OR_NVML = "/sys/fs/cgroup", "NVML (nvmlDeviceGetMemoryLimits)"

PARTITIONS = _section(
    "Named servers, namespaces and SM partitions",
    (
        "mps_named_server_info",
        "info",
        (
            *_SERVER_NAME,
            "server",
            "uid",
            "status",
            "pipe_directory",
            "allowed_devices",
            "context_ids",
        ),
        _OF_DAEMON,
        "A server of an MPS v3 daemon; server is its PID, empty while it has no process.",
    ),
    (
        "mps_namespace_info",
        "info",
        (*_NAMESPACE, "status", "pipe_directory"),
        _OF_DAEMON,
        "A namespace of a server; status is the server's.",
    ),
    (
        "mps_namespace_limited",
        "gauge",
        (*_NAMESPACE, "limit"),
        _OF_DAEMON,
        "1 when the namespace limits this for its clients, 0 when the daemon reports unlimited. "
        "Limits of a server hold for its namespace default only.",
    ),
    (
        "mps_namespace_active_thread_ratio",
        "gauge",
        _NAMESPACE,
        _OF_DAEMON,
        "Share of the SMs of each GPU that the namespace allows each client, 0 to 1.",
    ),
    (
        "mps_namespace_pinned_memory_limit_bytes",
        "gauge",
        _NAMESPACE,
        _OF_DAEMON,
        "Device memory that the namespace allows each client on each GPU.",
    ),
    (
        "mps_namespace_client_priority",
        "gauge",
        _NAMESPACE,
        _OF_DAEMON,
        "Priority of the namespace's clients: 0 normal, 1 below normal.",
    ),
    (
        "mps_namespace_clients",
        "gauge",
        _NAMESPACE,
        _OF_DAEMON,
        "Client processes in the namespace.",
    ),
    (
        "mps_client_namespace_info",
        "info",
        (*_DSP, *_G, "server_name", "namespace"),
        _OF_DAEMON,
        "The named server and the namespace that a client connected through, for each of its GPUs.",
    ),
    (
        "mps_sm_partition_info",
        "info",
        (*_PARTITION, "partition_id", "status", "include_remainder"),
        f"{_TOOL} (sm-partition list, lspart)",
        "A static SM partition. partition_id: what CUDA_MPS_SM_PARTITION names behind the slash; "
        "partition: its name, or its ID with a v2 daemon, where server_name is empty.",
    ),
    (
        "mps_sm_partition_sms",
        "gauge",
        _PARTITION,
        f"{_TOOL} (sm-partition list, lspart)",
        "SMs of the partition.",
    ),
    (
        "mps_sm_partition_chunks",
        "gauge",
        _PARTITION,
        f"{_TOOL} (sm-partition list, lspart)",
        "Chunks of the partition: the units in which the driver divides a GPU.",
    ),
    (
        "mps_sm_partition_clients",
        "gauge",
        _PARTITION,
        f"{_PROC}/PID/environ, {_TOOL}",
        "Clients that name this partition. Absent where the environment of a client cannot be "
        "read.",
    ),
    (
        "mps_sm_partition_in_use",
        "gauge",
        _PARTITION,
        f"{_TOOL} (lspart)",
        "1 when the v2 daemon reports clients of the partition, 0 when it reports none.",
    ),
    (
        "mps_sm_partition_unallocated_sms",
        "gauge",
        (*_SERVER_NAME, *_G),
        f"{_TOOL} (sm-partition list, lspart)",
        "SMs of the GPU that are in no partition.",
    ),
    (
        "mps_sm_partition_unallocated_chunks",
        "gauge",
        (*_SERVER_NAME, *_G),
        f"{_TOOL} (sm-partition list, lspart)",
        "Chunks of the GPU that are in no partition.",
    ),
    (
        "mps_client_sm_partition_info",
        "info",
        (*_DSP, "partition", "fault"),
        f"{_PROC}/PID/environ, {_TOOL}",
        "The partition that a client names. fault: why it cannot have been meant for it.",
    ),
    (
        "mps_server_device_info",
        "info",
        (*_SERVER_NAME, *_G, "ordinal", "pci_bus_id", "name", "attributes"),
        _OF_DAEMON,
        "A GPU as a named server numbers it.",
    ),
    (
        "mps_server_device_sms",
        "gauge",
        (*_SERVER_NAME, *_G),
        _OF_DAEMON,
        "SMs of the GPU, as the daemon counts them.",
    ),
    (
        "mps_server_device_chunks",
        "gauge",
        (*_SERVER_NAME, *_G),
        _OF_DAEMON,
        "Chunks of the GPU.",
    ),
    (
        "mps_control_feature_info",
        "info",
        (*_D, "feature", "enabled", "default", "module", "covers"),
        _OF_DAEMON,
        "An optional behaviour of the daemon. default: whether it is as shipped.",
    ),
    (
        "mps_cgroup_info",
        "info",
        ("cgroup", "container_id", "pod_uid", "slurm_job_id", "systemd_unit"),
        _DMEM,
        "A control group with GPU memory of its own, and what it belongs to.",
    ),
    (
        "mps_cgroup_memory_used_bytes",
        "gauge",
        ("cgroup", *_G),
        f"{_DMEM}/dmem.current, else {_OR_NVML}",
        "Device memory of all processes in the control group.",
    ),
    (
        "mps_cgroup_memory_soft_limit_bytes",
        "gauge",
        ("cgroup", *_G),
        f"{_DMEM}/dmem.min, else {_OR_NVML}",
        "Device memory guaranteed to the control group: above it MPS may end a client of the "
        "group when others need the memory.",
    ),
    (
        "mps_cgroup_memory_hard_limit_bytes",
        "gauge",
        ("cgroup", *_G),
        f"{_DMEM}/dmem.max, else {_OR_NVML}",
        "Device memory beyond which allocations of the control group fail.",
    ),
    (
        "mps_cgroup_memory_limited",
        "gauge",
        ("cgroup", *_G),
        f"{_DMEM}/dmem.max, else {_OR_NVML}",
        "1 when the control group itself has a hard limit, 0 when that is max: then one above it "
        "may still limit it.",
    ),
    (
        "mps_client_cgroup_info",
        "info",
        (*_DSP, "cgroup"),
        f"{_PROC}/PID/cgroup",
        "The control group whose GPU memory the client uses.",
    ),
    (
        "mps_control_reply_not_understood",
        "gauge",
        (*_D, "reply", "part"),
        _TOOL,
        "Parts of the daemon's last replies that were left out, as they are not understood.",
    ),
)

WAITS = _section(
    "Waits caused by UID serialisation",
    (
        "mps_uid_waiting_clients",
        "gauge",
        (*_D, "uid"),
        CONTROL_LOG,
        "Clients now queued behind another user's server, and those that a ghost does not serve.",
    ),
    (
        "mps_uid_waiting_since_timestamp_seconds",
        "gauge",
        (*_D, "uid"),
        CONTROL_LOG,
        "When the user's oldest queued client began to wait, as a Unix timestamp.",
    ),
    (
        "mps_uid_waiting_dead_clients",
        "gauge",
        (*_D, "uid"),
        f"{CONTROL_LOG}, {_PROC}",
        "Queued clients whose process is gone: the daemon hangs when their turn comes.",
    ),
    "mps_uid_wait_seconds",
    "mps_uid_waits_abandoned_total",
    "mps_uid_overtakes_total",
    "mps_uid_handovers_total",
    "mps_uid_handover_idle_seconds_total",
    (
        "mps_uid_handover_backoff_seconds",
        "gauge",
        _D,
        CONTROL_LOG,
        "The daemon's current interval between attempts to stop the running user's server.",
    ),
    "mps_uid_holding_seconds_total",
)

SHARING = _section(
    "GPU sharing",
    (
        "mps_gpu_processes",
        "gauge",
        (*_G, "kind"),
        "NVML",
        "Processes on the GPU: mps_client, mps_server, direct (without MPS), graphics.",
    ),
    (
        "mps_gpu_served",
        "gauge",
        (*_G, "daemon"),
        f"{_TOOL}, {BOTH_LOGS}, NVML",
        "1 for each daemon that serves the GPU; the series ends with the daemon.",
    ),
    (
        "mps_gpu_stranded_clients",
        "gauge",
        _G,
        f"NVML, {_PROC}",
        "MPS client processes on the GPU whose server is gone: they still hold GPU memory.",
    ),
    (
        "mps_gpu_sm_committed_ratio",
        "gauge",
        _G,
        "calculated",
        "Sum of all clients' SM limits over the GPU's SMs; above 1 the limits overlap.",
    ),
    (
        "mps_gpu_client_memory_committed_bytes",
        "gauge",
        _G,
        "calculated",
        "Sum of the memory limits on the GPU of all clients that have one.",
    ),
)

ADVICE_METRICS = _section(
    "Host advice",
    (
        "mps_advice",
        "gauge",
        ("advice", "severity", "daemon", *_G),
        "this exporter",
        "1 for each finding that mps-exporter doctor would print; the doctor also prints why and "
        "what to do.",
    ),
)

EXPORTER = _section(
    "The exporter itself",
    (
        "mps_exporter_build_info",
        "info",
        ("version", "revision", "pythonversion"),
        "this exporter",
        "The exporter's version.",
    ),
    (
        "mps_scrape_collector_duration_seconds",
        "gauge",
        ("collector",),
        "this exporter",
        "How long the source took in this collection.",
    ),
    (
        "mps_scrape_collector_success",
        "gauge",
        ("collector",),
        "this exporter",
        "1 when the source could be read in this collection.",
    ),
    (
        "mps_scrape_collector_timeout",
        "gauge",
        ("collector",),
        "this exporter",
        "1 when the source did not answer before the deadline.",
    ),
    (
        "mps_exporter_unreadable_environments",
        "gauge",
        (),
        _PROC,
        "Processes whose own limits could not be read for lack of permissions: CAP_SYS_PTRACE and "
        "CAP_DAC_READ_SEARCH together provide them.",
    ),
    (
        "mps_exporter_kernel_log_readable",
        "gauge",
        (),
        "/dev/kmsg",
        "1 when the kernel log is being read, which proves who caused a fatal GPU error; "
        "CAP_SYSLOG provides it.",
    ),
    (
        "mps_exporter_ignored_processes",
        "gauge",
        ("uid",),
        _PROC,
        "Processes with the names of MPS's programs, and clients of the user's own daemons, that "
        "are left out because the user has more than 8 daemons, 24 processes or 256 clients: the "
        "32 users with most of these processes.",
    ),
    (
        "mps_exporter_unknown_readings_total",
        "counter",
        (),
        "this exporter",
        "GPU readings that were skipped because no metric exists for their quantity: growth means "
        "that a recording of another version is replayed.",
    ),
    (
        "mps_exporter_recording_info",
        "info",
        ("scenario", "machine", "driver_version", "recorded", "speed"),
        "this exporter",
        "Present only when a recording is replayed: these are not the values of a live host.",
    ),
)

MPS_METRICS: tuple[MetricSpec, ...] = (
    *CONTROL_DAEMON,
    *SERVERS,
    *CLIENTS,
    *PARTITIONS,
    *WAITS,
    *SHARING,
    *ADVICE_METRICS,
    *EXPORTER,
)

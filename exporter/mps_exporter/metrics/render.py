"""Snapshot -> families of samples. Pure: the same snapshot always gives the same metrics.

A metric that has no sample is left out. What is ``None`` in the snapshot is no sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mps_exporter.diagnostics import findings
from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.gpu_readings import series_of
from mps_exporter.metrics.render_partitions import add_cgroups, add_partitioning
from mps_exporter.metrics.spec import Family, HistogramValue
from mps_exporter.mps.log_metrics import LOG_METRICS
from mps_exporter.snapshot import (
    QUERY_FAILURE_REASONS,
    Client,
    ClientState,
    ControlDaemon,
    Gpu,
    Histogram,
    Server,
    Snapshot,
)

LABEL_VALUE_MAX = 200
"""Longer label values are cut: a program's name is whatever its author likes it to be."""

DAEMON = "daemon"
"""The label that is never cut: it is what tells daemons apart."""

LABEL_SETS_KEPT = 4096
"""Label sets whose text is remembered: those of a full host, twice."""

MOMENTS = frozenset(
    name for name in CATALOGUE if name.endswith(("_timestamp_seconds", "_start_time_seconds"))
)
"""Metrics whose values are moments, not durations."""

CONVERTED = MOMENTS.union(name for name, spec in CATALOGUE.items() if spec.kind == "stateset")
"""Metrics whose values are not shown as they are."""

DAEMON_POSITION = {
    name: spec.labels.index(DAEMON) for name, spec in CATALOGUE.items() if DAEMON in spec.labels
}
"""Metric -> which of its labels is the daemon."""

ClientSeries = Literal["full", "summary", "off"]
"""Which series single clients have: all; who they are, their state, contexts and memory; none."""

SampleValue = float | HistogramValue | dict[str, bool]

RawLabels = tuple[str | int | None, ...]
"""Label values before they are text. No booleans: 1 and True are the same key."""

Texts = tuple[str, ...]
"""Label values as they are shown: see _texts."""


@dataclass(frozen=True, slots=True)
class Build:
    """What mps_exporter_build_info says."""

    version: str
    revision: str
    python_version: str


def _identity(moment: float) -> float:
    return moment


class Samples:
    """Collects samples by metric, in the catalogue's order."""

    def __init__(
        self,
        wall: Callable[[float], float],
        gpu_indexes: Mapping[str, str],
        clients: ClientSeries = "full",
    ) -> None:
        self._wall = wall
        self.clients = clients != "off"
        """Whether single clients have series."""
        self.client_limits = clients == "full"
        """Whether they have those of their limits, too."""
        self.gpu_indexes = gpu_indexes
        self._gpus: dict[str, Texts] = {}
        self._by_name: defaultdict[str, dict[Texts, SampleValue]] = defaultdict(dict)

    def add(self, name: str, labels: RawLabels, value: SampleValue | int | None) -> None:
        """Add one sample; None adds nothing. A label set that is there already keeps its value."""
        if value is not None:
            self.put(name, _texts(labels, DAEMON_POSITION.get(name, -1)), value)

    def put(self, name: str, labels: Texts, value: SampleValue | int | None) -> None:
        """Add one sample whose labels are texts already: those of a client serve many samples."""
        if value is None:
            return
        if name in CONVERTED:
            if isinstance(value, dict):
                value = _states(name, value)
            elif name in MOMENTS and isinstance(value, float | int):
                value = self._wall(value)
        self._by_name[name].setdefault(labels, value)

    def put_by_gpu(self, name: str, labels: Texts, values: Mapping[str, float]) -> None:
        """Add a sample for each GPU (by UUID) that has a value."""
        if not values:
            return
        found, gpus = self._by_name[name], self._gpus
        for uuid, value in values.items():
            found.setdefault(labels + (gpus.get(uuid) or self.gpu(uuid)), value)

    def gpu(self, uuid: str) -> Texts:
        """Labels gpu and uuid."""
        found = self._gpus.get(uuid)
        if found is None:
            found = self._gpus[uuid] = _texts((self.gpu_indexes.get(uuid, ""), uuid), -1)
        return found

    def families(self) -> list[Family]:
        unknown = self._by_name.keys() - CATALOGUE.keys()
        if unknown:
            raise KeyError(f"not in the catalogue: {', '.join(sorted(unknown))}")
        return [
            Family(spec, tuple(found.items()))
            for name, spec in CATALOGUE.items()
            if (found := self._by_name.get(name))
        ]


@lru_cache(maxsize=LABEL_SETS_KEPT)
def _texts(labels: RawLabels, whole: int) -> tuple[str, ...]:
    """Label values as text, all but one cut where they are too long.

    Most of what a page says of labels is what the last one said.
    """
    return tuple(
        _label(value, None if position == whole else LABEL_VALUE_MAX)
        for position, value in enumerate(labels)
    )


def _label(value: str | int | None, longest: int | None) -> str:
    if value is None:
        return ""
    text = str(value)[:longest]
    if text.isprintable():
        return text
    # Control characters and lone surrogates of undecodable names become visible escapes.
    visible = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
    return visible[:longest]


def histogram_value(histogram: Histogram) -> HistogramValue:
    """Counts per bucket -> the cumulative buckets of the exposition formats."""
    total = 0
    buckets = []
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        buckets.append((repr(float(bound)), total))
    total += sum(histogram.counts[len(histogram.bounds) :])
    buckets.append(("+Inf", total))
    return HistogramValue(tuple(buckets), histogram.sum_seconds)


def render(
    snapshot: Snapshot,
    build: Build,
    *,
    wall: Callable[[float], float] = _identity,
    clients: ClientSeries = "full",
) -> list[Family]:
    """All metrics of a snapshot.

    Args:
        snapshot: What one collection found.
        build: The exporter's own version.
        wall: Maps a time of the snapshot to the reader's clock; a recording that is replayed
            faster than it was made has a clock of its own.
        clients: Which series single clients have.
    """
    samples = Samples(wall, snapshot.gpu_indexes, clients)
    samples.add(
        "mps_exporter_build_info", (build.version, build.revision, build.python_version), 1.0
    )
    samples.add("mps_exporter_unreadable_environments", (), snapshot.unreadable_environments)
    if snapshot.kernel_log is not None:
        samples.add("mps_exporter_kernel_log_readable", (), snapshot.kernel_log.readable)
    for uid, count in sorted(snapshot.ignored_processes.items()):
        samples.add("mps_exporter_ignored_processes", (uid,), count)
    for one in snapshot.containers if samples.clients else ():
        samples.add(
            "mps_container_info", (one.container_id, one.namespace, one.pod, one.container), 1.0
        )
    samples.add("mps_exporter_unknown_readings_total", (), snapshot.unknown_readings)
    if snapshot.recording is not None:
        recording = snapshot.recording
        labels = (
            recording.scenario,
            recording.machine,
            recording.driver_version,
            recording.recorded_at,
            f"{recording.speed:g}",
        )
        samples.add("mps_exporter_recording_info", labels, 1.0)
    for result in snapshot.collectors:
        name = (result.name,)
        samples.add("mps_scrape_collector_duration_seconds", name, result.duration_seconds)
        samples.add("mps_scrape_collector_success", name, float(result.success))
        samples.add("mps_scrape_collector_timeout", name, float(result.timed_out))
    add_cgroups(samples.add, snapshot, single_clients=samples.clients)
    for daemon in snapshot.daemons:
        _daemon(samples, daemon)
    for gpu in snapshot.gpus:
        _gpu(samples, gpu, snapshot)
    for finding in findings(snapshot):
        advice = finding.advice
        labels = (advice.name, finding.severity, finding.daemon, finding.gpu, finding.uuid)
        samples.add("mps_advice", labels, 1.0)
    return samples.families()


def _daemon(samples: Samples, daemon: ControlDaemon) -> None:
    d = (daemon.pipe_directory,)
    add = samples.add
    if daemon.state is not None:
        add("mps_control_up", d, float(daemon.state == "answering"))
        add("mps_control_state", d, {daemon.state: True})
    if daemon.pid is not None:
        add(
            "mps_control_info",
            (
                *d,
                daemon.pid,
                daemon.uid,
                daemon.user,
                daemon.log_directory,
                daemon.binary_version,
                daemon.protocol,
                None if daemon.multiuser is None else str(daemon.multiuser).lower(),
                daemon.visible_devices,
            ),
            1.0,
        )
    if daemon.facts is not None and daemon.limited:
        add("mps_control_unprivileged_info", (*d, daemon.facts.user), 1.0)
    add("mps_control_start_time_seconds", d, daemon.start_time_seconds)
    add("mps_control_query_duration_seconds", d, daemon.query_duration_seconds)
    add("mps_control_queries_total", d, daemon.queries)
    for reason in QUERY_FAILURE_REASONS:
        failures = daemon.query_failures.get(reason, 0)
        add("mps_control_query_failures_total", (*d, reason), failures)
    add("mps_control_default_active_thread_ratio", d, daemon.default_active_thread_ratio)
    add("mps_control_default_client_priority", d, daemon.default_client_priority)
    per_gpu = daemon.default_pinned_memory_limit_bytes
    name = _texts(d, 0)
    samples.put_by_gpu("mps_control_default_pinned_memory_limit_bytes", name, per_gpu)
    add("mps_control_servers", d, daemon.servers_count)
    for log in daemon.logs:
        add("mps_control_log_size_bytes", (*d, log.log), log.size_bytes)
        add("mps_control_log_readable", (*d, log.log), float(log.readable))
    omitted = daemon.dropped_clients
    for server in daemon.servers:
        omitted += _server(samples, daemon, server)
    add_partitioning(samples.add, daemon, samples.gpu_indexes, single_clients=samples.clients)
    _waits(samples, daemon)
    _log_metrics(samples, daemon)
    add("mps_client_dropped_series", d, omitted)


def _server(samples: Samples, daemon: ControlDaemon, server: Server) -> int:
    """Give how many clients had to be left out."""
    ds = (daemon.pipe_directory, server.pid)
    add = samples.add
    add("mps_server_info", (*ds, server.uid, server.user), 1.0)
    if server.state is not None:
        add("mps_server_state", ds, {server.state: True})
    add("mps_server_start_time_seconds", ds, server.start_time_seconds)
    add("mps_server_clients", ds, server.clients_connected)
    by_gpu, name = samples.put_by_gpu, _texts(ds, 0)
    by_gpu("mps_server_client_contexts", name, server.contexts)
    by_gpu("mps_server_client_contexts_limit", name, server.contexts_limit)
    add("mps_server_active_thread_ratio", ds, server.active_thread_ratio)
    by_gpu("mps_server_pinned_memory_limit_bytes", name, server.pinned_memory_limit_bytes)
    by_gpu("mps_server_memory_used_bytes", name, server.memory_used_bytes)
    if server.ghost is not None:
        add("mps_server_ghost", ds, float(server.ghost))
    # A daemon in a PID namespace of its own calls all clients outside 0: several of them would be
    # one, with the numbers of the first.
    if not samples.clients:
        return len(server.clients)
    nameless = sum(client.pid == 0 for client in server.clients)
    omitted = nameless if nameless > 1 else 0
    for client in server.clients:
        if client.pid or not omitted:
            _client(samples, daemon, client)
    return omitted


def _client(samples: Samples, daemon: ControlDaemon, client: Client) -> None:
    dsp = _texts((daemon.pipe_directory, client.server_pid, client.pid), 0)
    info = (
        client.uid,
        client.user,
        client.command,
        client.container_id,
        client.pod_uid,
        client.slurm_job_id,
        client.systemd_unit,
        client.pid_namespace,
        client.limit_source,
    )
    samples.put("mps_client_info", dsp + _texts(info, -1), 1.0)
    if client.state != "active":  # as nearly all are, since about when they connected
        _client_state(samples, dsp, client.uid, client.state, client.state_since)
    samples.put_by_gpu("mps_client_contexts", dsp, client.contexts)
    samples.put_by_gpu("mps_client_memory_used_bytes", dsp, client.memory_used_bytes)
    if not samples.client_limits:
        return
    samples.put("mps_client_start_time_seconds", dsp, client.connected_at)
    samples.put_by_gpu("mps_client_memory_limit_bytes", dsp, client.memory_limit_bytes)
    samples.put_by_gpu("mps_client_sm_limit", dsp, client.sm_limit)
    if not client.contexts or client.contexts.keys() - client.sm_limit.keys():
        # Elsewhere the SMs say it, after the hardware's rounding.
        samples.put("mps_client_active_thread_ratio", dsp, client.active_thread_ratio)
    samples.put("mps_client_priority", dsp, client.priority or None)


def _client_state(
    samples: Samples, dsp: Texts, uid: int | None, state: ClientState | None, since: float | None
) -> None:
    labels = dsp + _texts((uid, state), -1)
    samples.put("mps_client_state", labels, None if state is None else 1.0)
    samples.put("mps_client_state_since_timestamp_seconds", labels, since)


def _waits(samples: Samples, daemon: ControlDaemon) -> None:
    d = daemon.pipe_directory
    connected = {client.pid for server in daemon.servers for client in server.clients}
    for wait in daemon.waits if samples.clients else ():
        if wait.pid and not wait.dead and wait.pid not in connected:
            dsp = _texts((d, None, wait.pid), 0)
            _client_state(samples, dsp, wait.uid, "waiting", wait.since)
    uids: set[int | None] = {wait.uid for wait in daemon.waits}
    if daemon.counters is not None:
        # Every known user has a 0, so that a graph falls to it instead of ending.
        users = daemon.counters.get("mps_uid_wait_seconds", {})
        uids |= {uid for (uid,) in users if not isinstance(uid, str)}
    for uid in sorted(uids, key=lambda uid: -1 if uid is None else uid):
        queued = [wait for wait in daemon.waits if wait.uid == uid]
        samples.add("mps_uid_waiting_clients", (d, uid), len(queued))
        dead = sum(wait.dead for wait in queued)
        samples.add("mps_uid_waiting_dead_clients", (d, uid), dead)
        if queued:
            since = min(wait.since for wait in queued)
            samples.add("mps_uid_waiting_since_timestamp_seconds", (d, uid), since)
    samples.add("mps_uid_handover_backoff_seconds", (d,), daemon.handover_backoff_seconds)


def _log_metrics(samples: Samples, daemon: ControlDaemon) -> None:
    d = daemon.pipe_directory
    for name, values in (daemon.counters or {}).items():
        if LOG_METRICS[name].labels == ("uuid",):
            for uuid in sorted({"", *daemon.gpu_uuids, *(str(key[0]) for key in values)}):
                shown = _shown(values.get((uuid,), 0))
                samples.put(name, _texts((d,), 0) + samples.gpu(uuid), shown)
        else:
            for key, value in values.items():
                samples.add(name, (d, *key), _shown(value))


def _shown(value: float | Histogram) -> SampleValue:
    return histogram_value(value) if isinstance(value, Histogram) else value


def _gpu(samples: Samples, gpu: Gpu, snapshot: Snapshot) -> None:
    g = (gpu.index, gpu.uuid)
    seen = gpu.observation
    capability = seen.compute_capability
    samples.add(
        "mps_gpu_info",
        (
            *g,
            seen.parent_uuid,
            seen.mig_instance,
            seen.name,
            seen.pci_bus_id,
            seen.architecture,
            None if capability is None else f"{capability[0]}.{capability[1]}",
            snapshot.driver_version,
            snapshot.cuda_version,
            seen.vbios_version,
            seen.serial,
        ),
        1.0,
    )
    samples.add("mps_gpu_sms", g, seen.sm_count)
    if seen.compute_mode is not None:
        samples.add("mps_gpu_compute_mode", g, {seen.compute_mode: True})
    for kind, count in (gpu.processes_by_kind or {}).items():
        samples.add("mps_gpu_processes", (*g, kind), count)
    for daemon in gpu.served_by:
        samples.add("mps_gpu_served", (*g, daemon), 1.0)
    samples.add("mps_gpu_stranded_clients", g, gpu.stranded_clients)
    samples.add("mps_gpu_sm_committed_ratio", g, gpu.sm_committed_ratio)
    committed = gpu.client_memory_committed_bytes
    samples.add("mps_gpu_client_memory_committed_bytes", g, committed)
    texts = _texts(g, -1)
    statesets: dict[tuple[str, Texts], dict[str, bool]] = {}
    for reading in seen.readings:
        series = series_of(reading)
        if series is None:
            continue  # counted by the collector: the page must not be lost for it
        name = series.metric.name
        labels = texts + _texts(series.labels, -1) if series.labels else texts
        if series.state is None:
            samples.put(name, labels, reading.value)
        else:
            statesets.setdefault((name, labels), {})[series.state] = bool(reading.value)
    for (name, labels), states in statesets.items():
        samples.put(name, labels, states)


def _states(name: str, active: Mapping[str, bool]) -> dict[str, bool]:
    """All states of a stateset: the known ones first, then unknown words that were met."""
    found = {_label(state, LABEL_VALUE_MAX): value for state, value in active.items()}
    spec = CATALOGUE.get(name)
    return dict.fromkeys(() if spec is None else spec.states, False) | found

"""What must be true of the exporter's state at any moment of any world."""

import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mps_exporter.collector import Collector
from mps_exporter.commands.doctor_report_and_status import Diagnosis, diagnosis_as_json
from mps_exporter.findings import ADVICE, findings, recent_incidents
from mps_exporter.humanize import UserNames
from mps_exporter.limits_without_a_flag import MAX_EVIDENCE_PROCESSES
from mps_exporter.metrics import Build, render
from mps_exporter.metrics.metric_types import MetricSpec
from mps_exporter.mps.metrics_from_logs import LOG_METRICS
from mps_exporter.mps.protocol_v3 import CLIENTS, SERVERS
from mps_exporter.observations import DaemonFacts, ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Incident, LogMetricValues, Snapshot
from mps_exporter.web.status_api import incident_view, make_status, to_json
from mps_exporter.web.status_page import render_page
from testing.mps_logs import LOGS, numbers, summary
from testing.outputs import ended_among, texts_of, texts_of_findings, words_of
from testing.page import Page, text_of
from testing.world.advice import advice_differences, doctor_differences, untrue, untrue_incident
from testing.world.daemon import Daemon
from testing.world.daemon_v3 import DaemonV3
from testing.world.host import WorldHost
from testing.world.model import World
from testing.world.pages import differences
from testing.world.processes import Client
from testing.world.truth import Truth

RUNNING = ("holding_seconds", "handover_idle_seconds")
"""Times that grow: the exporter counts them up to the last complete reading of the logs."""
SETTLING_SECONDS = 0.3
USERS_POLL_SECONDS = 0.2  # More for an ordinary user's logs, which are read less often.
OF_EXPORTER = ("mps_exporter_", "mps_scrape_", "mps_control_quer", "mps_control_log_")
"""Beginnings of the metrics about the exporter itself."""
KILL = re.compile(r"\bkill (?:-\w+ )?(\d+(?: \d+)*)")
MAX_DAEMON_BYTES, MAX_CLIENT_BYTES, EVIDENCE_BYTES = 60_000, 1_000, 70
"""What the exporter may keep, as pickle writes it; the last of each of 1024 ended clients."""


Sight = Literal[
    "everything",
    "without the control tool",
    "without logs",
    "without server.log",
    "without control.log",
]
EVERYTHING: Sight = "everything"
HIDDEN: Mapping[Sight, tuple[str, ...]] = {
    "without the control tool": (
        *("mps_control_up", "mps_control_state", "mps_control_default_active_thread_ratio"),
    ),
    "without server.log": ("mps_server_ghost",),
    "without control.log": (
        *("mps_server_ghost", "mps_uid_waiting_clients", "mps_uid_waiting_dead_clients"),
        *("mps_uid_waits_abandoned_total", "mps_server_exits_total", "mps_client_losses_total"),
    ),
}
"""Metrics that an exporter with this sight cannot know."""


@dataclass(frozen=True)
class Moment:
    """A collection at which the logs had been quiet for SETTLING_SECONDS."""

    world: World
    snapshot: Snapshot
    previous: Snapshot | None = None
    second: Snapshot | None = None  # What an exporter shows at the same moment that started later.
    sight: Sight = EVERYTHING  # What the second exporter can see.
    collector: Collector | None = None
    later: Collector | None = None
    thorough: bool = False  # All texts are checked, too, which takes longer.
    looks: bool = False  # The page of metrics is checked.


Check = Callable[[Moment], Iterator[str]]


def violations(moment: Moment, checks: Collection[Check]) -> Iterator[str]:
    """Return each difference between the exporter's state and the truth."""
    for check in checks:
        if moment.world.obstructed and check in OF_READINGS:
            continue
        for text in check(moment):
            yield f"{check.__name__}: {text}"


# -- against the truth


def daemons(moment: Moment) -> Iterator[str]:
    """The daemons are those that run, or ran."""
    shown = {daemon.pipe_directory for daemon in moment.snapshot.daemons}
    running = {pipe for pipe, daemon in moment.world.daemons.items() if daemon.exists}
    if not running <= shown <= moment.world.daemons.keys():
        yield f"{sorted(shown)} instead of {sorted(running)}"


def _pairs(moment: Moment, *also: Snapshot | None) -> Iterator[tuple[Daemon, ControlDaemon]]:
    """Yield each daemon of the world with what is shown of it."""
    for shown in (daemon for one in (moment.snapshot, *also) if one for daemon in one.daemons):
        if (true := moment.world.daemons.get(shown.pipe_directory)) is not None:
            yield true, shown


def _knowable(moment: Moment) -> Iterator[tuple[Daemon, ControlDaemon]]:
    """Yield the daemons of which an exporter can know everything."""
    for daemon, shown in _pairs(moment):
        if not daemon.truth.unknowable:
            yield daemon, shown


def processes(moment: Moment) -> Iterator[str]:
    """The exporter's reader of /proc finds what is there."""
    host = None if moment.collector is None else moment.collector._host
    if not isinstance(host, WorldHost) or host.procfs is None:
        return
    pids = moment.world.processes.keys() | {pid for pid, _ in moment.world.exits[-9:]}
    true, daemons = host.truth(pids), host.procfs.discover()
    seen = replace(host.procfs.observe(pids), daemons=daemons)
    if seen.gone != true.gone:
        yield f"{seen.gone} are gone, not {true.gone}"
    digits = -9 if moment.world.stepped_ms else 2  # It keeps the first start that it has read.
    comparable = partial(_comparable, digits=digits)
    for what, one, other in (
        ("processes", seen.processes.values(), true.processes.values()),
        ("daemons", seen.daemons, true.daemons),
    ):
        first, second = set(map(comparable, one)), set(map(comparable, other))
        if first != second:
            yield f"{what}: {first - second}, not {second - first}"


def _comparable(facts: ProcessFacts | DaemonFacts, digits: int) -> str:
    """Return what the world knows of the facts, with the start in the kernel's ticks."""
    if isinstance(facts, ProcessFacts):
        started = round(facts.start_time_seconds, digits)
        return str(replace(facts, start_time_seconds=started, pid_namespace=None))
    inner = [_comparable(one, digits) for one in sorted(facts.processes, key=lambda one: one.pid)]
    return f"{replace(facts, process=None, servers=())} {inner}"


Numbers = Mapping[tuple[str, int], float]


def counters(moment: Moment) -> Iterator[str]:
    """Counters equal the truth; growing times do up to the exporter's settling time."""
    for daemon, shown in _knowable(moment):
        assert shown.counters is not None
        for text in _counter_differences(daemon.truth, shown.counters):
            yield f"{daemon.key}: {text}"


def _counter_differences(truth: Truth, counted: LogMetricValues) -> Iterator[str]:
    seen, true = summary(counted), truth.summary()
    for name in sorted(seen.keys() | true.keys()):
        shown, expected = seen.get(name), true.get(name)
        slack = truth.slack.get(name, 0)
        if not _agree(name, _by_label(shown), _by_label(expected), slack):
            yield f"{name} is {shown}, not {expected}, give or take {slack}"
    for log in LOGS:
        if counted["mps_control_log_unrecognized_lines_total"].get((log,)):
            yield f"unrecognized lines in {log}"


def _agree(name: str, seen: Numbers, true: Numbers, slack: int) -> bool:
    """Compare to the millisecond, or with slack.

    What is not proved of a loss is its cause, which is never a wrong one.
    """
    if name in RUNNING:
        difference = sum(seen.values()) - sum(true.values())
        return abs(difference) <= SETTLING_SECONDS + USERS_POLL_SECONDS + slack / 1000
    if name == "losses" and slack:
        wrong = [
            label
            for label, number in seen.items()
            if number > true.get(label, 0) and not label[0].endswith("unattributed_fault")
        ]
        return not wrong and sum(seen.values()) == sum(true.values())
    labels = seen.keys() | true.keys()
    return all(abs(seen.get(one, 0) - true.get(one, 0)) < slack + 0.0005 for one in labels)


def _by_label(value: Any) -> Numbers:
    """Return all numbers of a counter, or counts and sums of a histogram, by label and place."""
    values = value if isinstance(value, dict) else {"": [] if value is None else value}
    return {
        (label, place): number
        for label, found in values.items()
        for place, number in enumerate(found if isinstance(found, list) else [found])
    }


def holders(moment: Moment) -> Iterator[str]:
    """The server, its clients, and their contexts are those that exist."""
    for daemon, shown in _knowable(moment):
        server = daemon.server
        true = [] if server is None else [(server.pid, _contexts(daemon, server.clients))]
        seen = [
            (server.pid, {client.pid: dict(client.contexts) for client in server.clients})
            for server in shown.servers
        ]
        if seen != true:
            yield f"{daemon.key}: {seen}, not {true}"


def _contexts(daemon: Daemon, clients: Iterable[Client]) -> dict[int, dict[str, int]]:
    """Return PID -> UUID of a GPU -> number of contexts there."""
    uuids = [gpu.uuid for gpu in daemon.gpus]
    return {
        one.pid: dict(Counter(map(uuids.__getitem__, one.contexts.values()))) for one in clients
    }


def waits(moment: Moment) -> Iterator[str]:
    """The waits are those of clients behind another user's server, to the millisecond."""
    for daemon, shown in _knowable(moment):
        true = {(one.pid, one.uid, one.since_ms, one.dead) for one in daemon.waits()}
        seen = {(one.pid, one.uid, round(one.since * 1000), one.dead) for one in shown.waits}
        if seen != true:
            yield f"{daemon.key}: {sorted(seen)}, not {sorted(true)}"
        holder = None if daemon.server is None else daemon.server.uid
        for one in shown.waits:
            if one.behind_uid != holder and holder not in (None, one.uid):
                yield f"{daemon.key}: {one.pid} waits behind {one.behind_uid}, not {holder}"


def metrics(moment: Moment) -> Iterator[str]:
    """Metrics have the values of the world, in both formats."""
    if moment.looks:
        yield from differences(moment.world, moment.snapshot)
        host = None if moment.collector is None else moment.collector._host
        if isinstance(host, WorldHost):
            yield from host.gpus.differences(Page(text_of(moment.snapshot)))
            yield from advice_differences(moment.world, moment.snapshot)
            if host.procfs is not None:
                yield from doctor_differences(moment.world, moment.snapshot, host.procfs.view)


def blame(moment: Moment) -> Iterator[str]:
    """Only those that caused a fault are named, and only real ghosts are called so."""
    first = moment.snapshot.daemons
    leavers = {one.pid for one in moment.world.clients.values() if one.leaves_work}
    warned = "possible_unfinished_work" in {one.advice.name for one in findings(moment.snapshot)}
    for daemon, shown in _pairs(moment, moment.second):
        for server in () if daemon.truth.unknowable else shown.servers:
            real = daemon.server
            true = real is not None and real.ghost
            # A later exporter may not know it, nor one whose log was cut: lines may be lost.
            cut = server.ghost is None and daemon.truncations["server"]
            if bool(server.ghost) != true and (server.ghost or (shown in first and not cut)):
                yield f"{daemon.key}: ghost of server {server.pid} is {server.ghost}, not {true}"
            work = real.abandoned_work.values() if real is not None and not real.torn else ()
            alone = any(_ended_alone(one) for one in work)
            if alone and shown in first and not (warned or server.ghost):
                yield f"{daemon.key}: nothing warns of unfinished work"
            left = server.possible_unfinished_work
            if left is not None and left.pid not in leavers:
                yield f"{daemon.key}: {left.pid} may have left work, although it did not"
        for client in [one for server in shown.servers for one in server.clients]:
            process = moment.world.processes.get(client.pid)
            foreign = process is not None and process.uid != daemon.uid
            if shown.facts.limited and client.confirmed and foreign:
                yield f"{daemon.key}: {client.pid} of another user is called its client"
        culprits = {fault.culprit_pid for fault in daemon.truth.faults}
        for incident in shown.incidents:
            if innocent := set(incident.caused_by_pids) - culprits:
                yield f"{daemon.key}: {innocent} named as the cause of {incident.kind}"


def _ended_alone(client: Client) -> bool:
    """Return whether it has ended, and no other client in that second: it could be theirs."""
    others = [one.ended_ms or 0 for one in client.daemon.served if one is not client]
    ended = client.ended_ms
    return ended is not None and all(abs(one - ended) > 1000 for one in others)


def endings(moment: Moment) -> Iterator[str]:
    """No text and no command ends a process that lives and has lost nothing."""
    healthy = moment.world.healthy_pids()
    for snapshot in filter(None, (moment.snapshot, moment.second)):
        texts = [*texts_of_findings(snapshot), *(texts_of(snapshot) if moment.thorough else ())]
        for source, text in texts:
            for pid, sentence in ended_among(healthy, text):
                yield f"{source} ends {pid}: {sentence}"
            for pids in KILL.findall(text):
                if unknown := set(map(int, pids.split())) - moment.world.known.keys():
                    yield f"{source} kills {unknown}, which never existed"


def texts(moment: Moment) -> Iterator[str]:
    """Each process, user and GPU that a text names is the world's."""
    if any("forged" in one.truth.unknowable for one in moment.world.daemons.values()):
        return
    for snapshot in filter(None, (moment.snapshot, moment.second)):
        for source, text in texts_of_findings(snapshot):
            yield from (f"{source}: {one} in {text}" for one in untrue(moment.world, text))
        for daemon in snapshot.daemons:
            for one in daemon.incidents:
                text = incident_view(daemon.facts, one, UserNames(snapshot)).text
                yield from (f"incident: {wrong} in {text}" for wrong in untrue(moment.world, text))


def incidents(moment: Moment) -> Iterator[str]:
    """Server, user, clients, times, and causes of incidents are the world's."""
    for daemon, shown in _knowable(moment):
        for one in shown.incidents:
            for text in untrue_incident(moment.world, daemon, one):
                yield f"{daemon.key}: {text} in {one}"


# -- against itself


def monotony(moment: Moment) -> Iterator[str]:
    """No counter falls."""
    if moment.looks and moment.previous is not None:
        earlier, later = _counters(moment.previous), _counters(moment.snapshot)
        for key in earlier.keys() & later.keys():
            if later[key] < earlier[key]:
                yield f"{key} fell from {earlier[key]} to {later[key]}"
    before = {} if moment.previous is None else _by_directory(moment.previous)
    for name, daemon in _by_directory(moment.snapshot).items():
        if name not in before:
            continue
        now = numbers(daemon.counters or {})
        for metric, value in numbers(before[name].counters or {}).items():
            if now.get(metric, 0.0) < value:
                yield f"{metric} fell from {value} to {now.get(metric)}"


def _counters(snapshot: Snapshot) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (family.spec.name, labels): value
        for family in render(snapshot, Build("", "", ""))
        if family.spec.kind == "counter"
        for labels, value in family.samples
        if isinstance(value, float | int)
    }


def _by_directory(snapshot: Snapshot) -> dict[str, ControlDaemon]:
    return {daemon.pipe_directory: daemon for daemon in snapshot.daemons}


def verdicts(moment: Moment) -> Iterator[str]:
    """No incident changes or disappears, except the oldest; a ghost stays one."""
    now = _by_directory(moment.snapshot)
    for name, before in ({} if moment.previous is None else _by_directory(moment.previous)).items():
        if name not in now:
            continue
        known = {_verdict(one) for one in now[name].incidents}
        told = [_verdict(one) for one in before.incidents]
        lost = [one for one in told if one not in known]
        if lost and lost != told[: len(lost)]:
            yield f"taken back: {lost}"
        if moment.world.daemons[name].truth.unknowable:
            continue
        ghosts = {server.pid for server in before.servers if server.ghost}
        for server in now[name].servers:
            if server.pid in ghosts and server.ghost is False:
                yield f"server {server.pid} is no ghost any more"


def _verdict(one: Incident) -> object:
    if one.kind in ("server_start_failed", "client_rejected"):  # repetitions are one incident
        return one.kind, one.at
    return one.kind, one.at, one.server_pid, one.uid, one.pids, one.caused_by_pids, one.detail


def growth(moment: Moment) -> Iterator[str]:
    """What the exporter keeps depends on what exists, and not on what existed."""
    if moment.collector is not None and (moment.thorough or moment.second is not None):
        kept = len(pickle.dumps(moment.collector._daemons))
        shown = moment.snapshot
        clients = sum(len(s.clients) for daemon in shown.daemons for s in daemon.servers)
        clients += sum(len(daemon.waits) for daemon in shown.daemons)
        kept -= EVIDENCE_BYTES * min(len(moment.world.clients), MAX_EVIDENCE_PROCESSES)
        if kept > 1_000 + MAX_DAEMON_BYTES * len(shown.daemons) + MAX_CLIENT_BYTES * clients:
            yield f"the state takes {kept} bytes"


# -- against an exporter that started later


Values = Mapping[tuple[str, tuple[str, ...]], float]


def _gauges(snapshot: Snapshot) -> Values:
    """Return what the page shows of the host's state, without counts and the exporter's own."""
    return {
        (family.spec.name, _without_ordinal(family.spec, labels)): value
        for family in render(snapshot, Build("", "", ""))
        if family.spec.kind in ("gauge", "stateset", "info")
        if not family.spec.name.startswith(OF_EXPORTER)
        for labels, value in family.samples
        if isinstance(value, float | int)
    }


def _without_ordinal(spec: MetricSpec, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the GPU's ordinal, which only the control tool shows."""
    return tuple(
        label for name, label in zip(spec.sample_labels, labels, strict=True) if name != "gpu"
    )


def restart(moment: Moment) -> Iterator[str]:
    """A later exporter shows the same; with less sight, it shows nothing else."""
    if moment.second is None:
        return
    known = _by_directory(moment.second)
    running = {pipe for pipe, daemon in moment.world.daemons.items() if daemon.exists}
    if missing := running - known.keys():
        yield f"{missing} not found {moment.sight}"
    comparable = {name for name in known if _is_whole(moment.world.daemons[name])}
    both = [_only(one, comparable) for one in (moment.snapshot, moment.second)]
    if any(gpu.observation.lost for one in both for gpu in one.gpus):
        return  # The later one has never read that GPU.
    if len(both[0].daemons) < len(moment.snapshot.daemons):
        both = [replace(one, gpus=()) for one in both]
    first, later = map(_gauges, both)
    for key in sorted(first.keys() | later.keys()):
        before, after = first.get(key), later.get(key)
        # Zeros begin with the first line about a user, and with the list of a daemon's GPUs.
        if key[0].startswith(("mps_uid_", "mps_server_client_contexts")):
            before, after = before or None, after or None
        same = before == after
        if before is not None and after is not None:
            same = math.isclose(before, after)
        if not same and not _explained(moment, key, first, later):
            yield f"{key} is {after} {moment.sight}, not {before}"


def _is_whole(daemon: Daemon) -> bool:
    """Return whether an exporter that starts now finds the whole history."""
    lost = daemon.truth.unknowable or any(daemon.truncations.values()) or daemon.renamed
    return not (daemon.frozen or lost)


def _only(snapshot: Snapshot, names: Collection[str]) -> Snapshot:
    """Leave the other daemons out."""
    daemons = tuple(one for one in snapshot.daemons if one.pipe_directory in names)
    return replace(snapshot, daemons=daemons)


def _explained(
    moment: Moment, key: tuple[str, tuple[str, ...]], first: Values, later: Values
) -> bool:
    """Return whether one of the exporters cannot know it, or has not queried it yet."""
    name, labels = key
    if name in ("mps_control_up", "mps_control_state") or "daemon_unresponsive" in labels:
        return True  # a reply, or a timeout, is shown until the next query
    if name.endswith("_start_time_seconds") and moment.world.stepped_ms:
        return True  # a process keeps the start that was read first
    if name == "mps_client_info" and (name, (*labels[:-1], "unknown")) in (*first, *later):
        return True  # the daemon's GPUs, by which limits are read, were not known in time
    if name in ("mps_container_info", "mps_cgroup_info") or name.startswith("mps_cgroup_memory"):
        return True  # of the clients that are known
    if name == "mps_gpu_client_memory_committed_bytes" or "memory_limit_ignored" in labels:
        return moment.sight != EVERYTHING or any("unknown" in one for _, one in (*first, *later))
    if name.startswith("mps_control_") or name.endswith(
        (
            "_active_thread_ratio",
            "_active_ratio",
            "_memory_limit_bytes",
            "_sm_limit",
            "_occupancy_ratio",
        )
    ):
        return key not in later or key not in first  # queried now and then
    if "_last_" in name or (name == "mps_advice" and ADVICE[labels[0]].kind == "blindness"):
        return True  # nothing shows when what had ended before an exporter's start
    nameless = name.startswith("mps_uid_") and labels[-1] == ""
    less = name.endswith(("_info", "_sm_committed_ratio"))
    return moment.sight != EVERYTHING and (key not in later or nameless or less)


def absence(moment: Moment) -> Iterator[str]:
    """What cannot be seen is absent."""
    yield from _differences_from_lists(moment.world, moment.snapshot, moment.collector)
    yield from _differences_from_lists(moment.world, moment.second, moment.later)
    if moment.second is None:
        return
    hidden = HIDDEN.get(moment.sight, ())
    for family in render(moment.second, Build("", "", "")):
        if family.spec.name in hidden:
            yield f"{family.spec.name} is {family.samples} {moment.sight}"


def _differences_from_lists(
    world: World, snapshot: Snapshot | None, collector: Collector | None
) -> Iterator[str]:
    """Compare the servers of an MPS v3 daemon with the lists in its replies, its only source."""
    if snapshot is None or collector is None:
        return
    for shown in snapshot.daemons:
        daemon, host = world.daemons[shown.pipe_directory], collector._host
        if not isinstance(daemon, DaemonV3) or not isinstance(host, WorldHost):
            continue
        lists = host.lists.get(daemon.pipe, {})
        hung = SERVERS not in lists or None in lists.values()
        found = [("servers", shown.servers_count, lists.get(SERVERS), f",{daemon.pipe}/")]
        for server in shown.servers:
            what, mark = f"clients of {server.name}", f",{server.name},"
            found.append((what, server.clients_connected, lists.get(CLIENTS), mark))
        meant, page = host.meant.get(daemon.pipe, {}), Page(text_of(snapshot))
        yield from _differences_of_meaning(daemon, meant, page, hung=hung)
        for what, seen, text, mark in found:
            true = "unknown" if text is None else text.count(mark)
            absent = (seen is None and hung) or (seen == 0 and not daemon.servers)
            if seen != true and not absent:
                yield f"{seen} {what} of {daemon.pipe}, not {true}"
        total = make_status(snapshot).totals.clients
        if total is not None and shown.servers and lists.get(CLIENTS) is None:
            yield f"{total} clients in total, not None"


def _differences_of_meaning(
    daemon: DaemonV3, meant: Mapping[str, list[list[Any]]], page: Page, *, hung: bool
) -> Iterator[str]:
    """Compare the page with what the last replies mean; after a hang, their values are absent."""
    every = [sample for samples in meant.values() for sample in samples]
    for name, labels, value in every:
        seen = page.value(name, daemon=daemon.pipe, **labels)
        if seen != value and not (seen is None and (hung or name == "mps_gpu_served")):
            yield f"{name} {labels} is {seen}, not {value}"
    for name in page.keys() & {name for name, *_ in every}:
        if len(page.all(name, daemon=daemon.pipe)) > sum(one == name for one, *_ in every):
            yield f"{name} has more samples than its list"


# -- page, metrics, API and doctor


def surfaces(moment: Moment) -> Iterator[str]:
    """They have the same servers, clients, waits and findings."""
    if not moment.thorough:
        return
    snapshot = moment.snapshot
    page, status = Page(text_of(snapshot)), make_status(snapshot)
    counted = [numbers(one.counters or {}) for one in snapshot.daemons]
    more = sum(value for one in counted for name, value in one.items() if name.endswith(".sum"))
    more -= sum(page.value(f"{name}_sum") or 0 for name in LOG_METRICS)
    api = json.loads(to_json(status))
    recent = recent_incidents(snapshot)
    doctor = json.loads(diagnosis_as_json(Diagnosis(snapshot, recent)))
    servers = [server for daemon in api["daemons"] for server in daemon["servers"]]
    waits = [wait for daemon in api["daemons"] for wait in daemon["waits"]]
    clients = [client for server in servers for client in server["clients"]]
    numberless = [_pids(server["clients"])["0"] for server in servers]
    unknown = Counter({"0": sum(count for count in numberless if count > 1)})  # without samples
    found = [*api["findings"], *api["blind_spots"]]
    told = [*doctor["findings"], *doctor["recent"]]
    words = words_of(render_page(status))
    for what, first, second in (
        ("servers", _pids(servers), _labels(page, "mps_server_info", "server")),
        ("clients", _pids(clients), _labels(page, "mps_client_info", "pid") + unknown),
        ("waits", len(waits), page.value("mps_uid_waiting_clients") or 0),
        (
            "ghosts",
            _pids(server for server in servers if server["ghost"]),
            Counter(o.labels["server"] for o in page.all("mps_server_ghost") if o.value),
        ),
        ("seconds of all histograms", round(more), 0),
        ("findings", _names(found), _names(told)),
        (
            "advice",
            {one["name"] for one in doctor["findings"]},
            {o.labels["advice"] for o in page.all("mps_advice") if o.value},
        ),
        ("page", [one["text"] for one in api["findings"] if one["text"] not in words], []),
    ):
        if first != second:
            yield f"{what}: {first} and {second}"


def _pids(shown: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(str(one["pid"]) for one in shown)


def _names(shown: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(one["name"] for one in shown)


def _labels(page: Page, metric: str, label: str) -> Counter[str]:
    return Counter(one.labels[label] for one in page.all(metric))


CHECKS: tuple[Check, ...] = (
    *(daemons, processes, counters, holders, waits, metrics, blame, texts, incidents, endings),
    *(monotony, verdicts, growth, restart, absence, surfaces),
)
OF_READINGS = (daemons, processes, metrics, verdicts, restart, absence)
"""The checks that no reading may fail."""

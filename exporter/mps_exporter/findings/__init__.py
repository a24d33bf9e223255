"""Findings about this host, each with evidence, reason and remedy.

One table feeds ``mps-exporter doctor``, the metric mps_advice, the findings of the status page and
the alerts of prometheus/rules. Pure: a snapshot in, findings out. Remedies are for the
operator: the exporter changes nothing on the host.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mps_exporter.findings import incidents_and_leftovers
from mps_exporter.findings.finding import Finding, HostFacts, Kind, Severity, effective_severity
from mps_exporter.findings.order import ADVICE, in_order, most_severe
from mps_exporter.humanize import UserNameLookup, UserNames
from mps_exporter.observations import DaemonConditions, Leftovers, ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Snapshot

__all__ = [
    "ADVICE",
    "findings",
    "in_order",
    "incident_severity",
    "most_severe",
    "of_node",
    "recent_incidents",
    "trace_findings",
]


def findings(
    snapshot: Snapshot,
    name_of: UserNameLookup | None = None,
    kinds: Collection[Kind] = frozenset({"state", "blindness"}),
    **facts: Any,
) -> tuple[Finding, ...]:
    """Return the findings of these kinds, the most urgent first.

    `name_of`: default is the snapshot's; `facts`: other fields of HostFacts.
    """
    host = HostFacts(snapshot, name_of or UserNames(snapshot), **facts)
    node = replace(host, snapshot=of_node(snapshot))
    types = [one for one in ADVICE.values() if one.kind in kinds]
    found = [finding for one in types for finding in one.found(host)]
    if node.snapshot is not snapshot:
        on_node = [finding for one in types for finding in one.found(node)]
        known = {one.key for one in on_node}
        # A finding about a GPU is the node's only if it exists with and without users' daemons.
        found = [
            *(one for one in on_node if one.advice.scope != "gpu"),
            *(one for one in found if one.advice.scope == "gpu" and one.key in known),
            *(replace(one, limited=True) for one in found if one.key not in known),
        ]
    return in_order(found)


def of_node(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without ordinary users' daemons: their users can break or forge them."""
    daemons = tuple(one for one in snapshot.daemons if not one.facts.limited)
    if len(daemons) == len(snapshot.daemons):
        return snapshot
    names = {one.pipe_directory for one in daemons}
    gpus = tuple(
        replace(gpu, served_by=tuple(one for one in gpu.served_by if one in names))
        for gpu in snapshot.gpus
    )
    # Without sums for GPUs that only ordinary users' daemons serve.
    no_sums: Any = {"sm_committed_ratio": None, "client_memory_committed_bytes": None}
    gpus = tuple(gpu if gpu.served_by else replace(gpu, **no_sums) for gpu in gpus)
    return replace(snapshot, daemons=daemons, gpus=gpus)


def recent_incidents(
    snapshot: Snapshot,
    name_of: UserNameLookup | None = None,
    views: Mapping[str, DaemonConditions] | None = None,
) -> tuple[Finding, ...]:
    """Return findings about recent incidents, for page and doctor: metrics count incidents.

    `views` are HostFacts.conditions.
    """
    return findings(snapshot, name_of, {"news"}, conditions=views or {})


def trace_findings(traces: Leftovers, daemons: Sequence[ControlDaemon] = ()) -> Iterator[Finding]:
    """Yield the findings about leftovers, which only the doctor searches for.

    `daemons`: all of the host. A user can name any process like an MPS program: the node's
    processes are children of its daemons, or host processes of root or its daemons' users.
    """
    users = {one.pipe_directory for one in daemons if one.facts.limited}
    of_node = [one.facts for one in daemons if not one.facts.limited]
    pids = {one.process.pid for one in of_node if one.process is not None}
    trusted = {0, *(one.user for one in of_node if one.user is not None)}

    def is_nodes(one: ProcessFacts) -> bool:
        return one.parent_pid in pids or (one.uid in trusted and len(one.namespace_pids) < 2)

    for nodes, others in ((True, traces), (False, Leftovers())):
        left = replace(
            others,
            zombies=tuple(one for one in traces.zombies if is_nodes(one) == nodes),
            orphans=tuple(one for one in traces.orphans if is_nodes(one) == nodes),
        )
        for one in findings(Snapshot(0.0), kinds={"trace"}, leftovers=left):
            yield replace(one, limited=not nodes or one.daemon in users)


def incident_severity(kind: str, *, limited: bool) -> Severity:
    """Return an incident's severity, by its finding if any; if limited, at most a warning."""
    if kind in ADVICE:
        return effective_severity(ADVICE[kind].severity, limited=limited)
    return effective_severity(incidents_and_leftovers.SEVERITIES.get(kind, "info"), limited=limited)

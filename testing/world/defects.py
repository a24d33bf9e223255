"""Defects that the exporter had or could have, each as a change of one function in memory."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from mps_exporter.daemon_registry import DaemonRecord, DaemonRegistry
from mps_exporter.findings import daemons_and_servers as daemon_findings
from mps_exporter.findings.finding import HostFacts
from mps_exporter.limits_without_a_flag import END_TO_FAULT_SECONDS
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.metrics import exposition
from mps_exporter.mps.clients import ServerClients
from mps_exporter.mps.incidents_and_counters import Counters, Incidents, Moment
from mps_exporter.mps.servers import Servers, TrackedServer
from mps_exporter.mps.waits import ClientQueue, QueuedClient
from mps_exporter.mps.xid_lines import FaultEvidence, Process, Verdict
from mps_exporter.snapshot import Client, Incident, Server
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.web import status_api
from mps_exporter.web.status_api_fields import View


class Defect(NamedTuple):
    check: str  # The check that finds it.
    owner: Any
    name: str  # Attribute of the owner that is replaced.
    replacement: Any
    seed: int = 0  # A world in which it is found, or one shortly before that.
    minutes: float = 5.0  # Length of that world.


def _of_root(daemons: DaemonRegistry) -> list[DaemonRecord]:
    return [one for one in daemons.data.values() if not one.facts.limited]


def _serve_late(entry: QueuedClient, server_ready_at: float | None, when: Moment) -> bool:
    return _SERVE(entry, None if server_ready_at is None else server_ready_at + 0.002, when)


def _remove_and_count_anew(servers: Servers, server: TrackedServer) -> None:
    _REMOVE(servers, server)
    servers._daemon.counters = Counters()


def _disconnect_and_keep(clients: ServerClients, pid: int, when: Moment) -> None:
    vars(clients._server.daemon).setdefault("ended", []).append(bytes(1000))
    _DISCONNECT(clients, pid, when)


def _push_counted(queue: ClientQueue, pid: int, uid: int, when: Moment) -> QueuedClient:
    return _PUSH(queue, pid, uid, when) if when.counted else QueuedClient(pid, uid, when.at)


def _running_waits(incidents: Incidents) -> tuple[Incident, ...]:
    every = _INCIDENTS(incidents)
    ended = {one.pids for one in every if one.kind == "wait_served"}
    return tuple(one for one in every if one.kind != "wait_started" or one.pids not in ended)


def _late(incidents: Incidents) -> tuple[Incident, ...]:
    return tuple(replace(one, at=one.at + 5.0) for one in _INCIDENTS(incidents))


def _judge_by_time(evidence: FaultEvidence, at: float, gpus: Collection[str]) -> Verdict:
    """Name the client that ended last, as the exporter did without the kernel log."""
    least, most = END_TO_FAULT_SECONDS
    ended = [
        pid
        for pid, life in evidence._clients.items()
        if life.ended_at and least <= at - life.ended_at <= most
    ]
    verdict = _JUDGE(evidence, at, gpus)
    if verdict.cause != "unknown" or not ended:
        return verdict
    return Verdict("unfinished_work", (Process(ended[-1], None, at, ()),))


def _only_unused_is_ghost(server: TrackedServer, when: Moment) -> None:
    if not server.clients.may_have_context:
        _MISSING(server, when)


def _all_if_in_fault(server: Server) -> list[Client]:
    hit = server.state == "FAULT"
    return [one for one in server.clients if hit or one.state == "torn_down"]


def _view_without_waits(*about: Any) -> View:
    return View(_VIEW(*about), waits=())


_SERVE, _REMOVE, _PUSH = QueuedClient.serve, Servers.remove, ClientQueue.push
_DISCONNECT, _INCIDENTS = ServerClients.disconnect, Incidents.snapshot
_MISSING = TrackedServer.credentials_missing
_VIEW, _JUDGE = status_api.daemon_view, FaultEvidence.judge

DEFECTS: dict[str, Defect] = {
    "the daemons of ordinary users are not shown": Defect(
        "daemons", DaemonRegistry, "values", _of_root
    ),
    "a wait ends 2 ms after the server is ready": Defect(
        "counters", QueuedClient, "serve", _serve_late
    ),
    "a client stays after it has disconnected": Defect(
        "holders", ServerClients, "disconnect", lambda *_: None
    ),
    "a server is no child of its daemon": Defect(
        "processes", DaemonDiscovery, "_with_servers", lambda _self, daemon, *_: daemon
    ),
    "the sum of a histogram is not shown": Defect(
        "metrics", exposition, "_histogram_lines", lambda labels, value: iter(())
    ),
    "a client does not wait behind the next server": Defect(
        "waits", ClientQueue, "block_others", lambda *_: None
    ),
    "a server for which others wait is a ghost": Defect(
        *("blame", TrackedServer, "is_ghost"),
        property(lambda server: bool(server.daemon.queue.blocked_clients())),
    ),
    "counting begins again with each server": Defect(
        "monotony", Servers, "remove", _remove_and_count_anew
    ),
    "the beginning of a wait is forgotten at its end": Defect(
        "verdicts", Incidents, "snapshot", _running_waits
    ),
    "a kilobyte of every client is kept": Defect(
        "growth", ServerClients, "disconnect", _disconnect_and_keep, seed=3, minutes=30.0
    ),
    "the queue is not rebuilt from the history": Defect(
        "restart", ClientQueue, "push", _push_counted, seed=14
    ),
    "without server.log no server is a ghost": Defect(
        "absence", TrackedServer, "is_ghost", property(lambda server: server.ghost)
    ),
    "a hung MPS v3 daemon has 0 servers": Defect(
        *("absence", DaemonInputs, "log_names_servers"),
        lambda daemon: daemon.log_readable("control"),
        seed=128,
    ),
    "who ended just before a fault has caused it": Defect(
        "blame", FaultEvidence, "judge", _judge_by_time, seed=36
    ),
    "a fault hit all clients of its server": Defect(
        "endings", daemon_findings, "_torn_down", _all_if_in_fault, seed=60
    ),
    "a server whose clients work is no ghost": Defect(
        "blame", TrackedServer, "credentials_missing", _only_unused_is_ghost
    ),
    "an ordinary user's log names any process": Defect(
        "blame",
        MergeContext,
        "process",
        lambda context, _daemon, pid: context.processes.get(pid),
        seed=60,
    ),
    "each server is called root's": Defect(
        "texts", HostFacts, "server", lambda _host, server: f"root's server {server.pid}"
    ),
    "an incident is told five seconds late": Defect("incidents", Incidents, "snapshot", _late),
    "the API omits the waits": Defect("surfaces", status_api, "daemon_view", _view_without_waits),
}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """Change the exporter of this process, and of its later children."""
    defect = DEFECTS[name]
    with mock.patch.object(defect.owner, defect.name, defect.replacement):
        yield

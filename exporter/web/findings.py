"""What is wrong now, and what cannot be seen: each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.model import ControlDaemon, Server, Snapshot
from exporter.web import words
from exporter.web.view import Finding, Severity

RECENT_SECONDS = 300.0
"""So long a crash is still what a person wants to read first."""

LONG_WAIT_SECONDS = 60.0

_ORDER: tuple[Severity, ...] = ("trouble", "warning", "notice", "ok")


def troubles(snapshot: Snapshot, who: words.Who) -> tuple[Finding, ...]:
    """What is wrong, or was a moment ago; the worst first."""
    found = [
        finding for daemon in snapshot.daemons for finding in _of_daemon(daemon, snapshot, who)
    ]
    found += [
        Finding(
            "trouble",
            f"GPU {gpu.index} ({gpu.uuid}) has fallen off the bus.",
            "Drain the host; the GPU comes back with a reset or a reboot, if at all.",
        )
        for gpu in snapshot.gpus
        if gpu.observation.lost
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def headline(snapshot: Snapshot, found: tuple[Finding, ...]) -> Finding:
    """The one thing to read when there is time for one."""
    if found:
        return found[0]
    if not snapshot.daemons:
        return Finding(
            "notice",
            "No MPS control daemon runs on this host.",
            "Start one with nvidia-cuda-mps-control -d, or name its directory with "
            "--mps.pipe-directory if it hides from /proc.",
        )
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    clients = sum(server.clients_connected or 0 for server in servers)
    if not servers:
        return Finding("ok", "MPS is up and idle: no server runs, and nobody waits.")
    shared = {uuid for daemon in snapshot.daemons for uuid in daemon.gpu_uuids}
    share = "share" if clients != 1 else "uses"
    gpus = f" {words.count(len(shared), 'GPU')}" if shared else " the GPU"
    by = words.count(len(servers), "server")
    if not clients:
        return Finding("ok", f"MPS is up: {by} without clients, and nobody waits.")
    return Finding(
        "ok",
        f"All is well: {words.count(clients, 'client')} {share}{gpus} through {by}, "
        "and nobody waits.",
    )


def _of_daemon(daemon: ControlDaemon, snapshot: Snapshot, who: words.Who) -> Iterator[Finding]:
    now = snapshot.taken_at
    name = words.visible(daemon.pipe_directory, 400)
    for server in daemon.servers:
        yield from _server(server, name, who, now)
    yield from _state(daemon, name, now)
    yield from _queue(daemon, name, who, now)
    yield from _recent(daemon, name, who, now)


def _state(daemon: ControlDaemon, name: str, now: float) -> Iterator[Finding]:
    if daemon.state == "unresponsive":
        yield Finding(
            "trouble",
            f"The MPS daemon {name} does not answer: programs that start now hang.",
            "If it stays so, end it (kill -9) and its server, and start it again; "
            "their clients are lost.",
            name,
        )
    elif daemon.state == "absent" and _quit_at(daemon) is not None:
        ago = words.ago(now - (_quit_at(daemon) or now))
        yield Finding(
            "notice",
            f"The MPS daemon {name} quit, as it was asked to, {ago}: programs started for it use "
            "the GPU without MPS.",
            "Start it with nvidia-cuda-mps-control -d when it is wanted again.",
            name,
        )
    elif daemon.state == "absent":
        yield Finding(
            "warning",
            f"No MPS daemon runs at {name}: programs started for it use the GPU without MPS, "
            "and without its limits.",
            "Start it with nvidia-cuda-mps-control -d.",
            name,
        )
    elif daemon.state == "refused":
        yield Finding(
            "warning",
            f"The MPS daemon {name} refuses to answer.",
            "Run the exporter as root or as the daemon's user.",
            name,
        )
    elif daemon.state == "draining":
        yield Finding(
            "warning",
            f"The MPS daemon {name} was asked to quit and waits for its clients to leave; "
            "it takes no new ones.",
            "It ends when the last client does.",
            name,
        )


def _quit_at(daemon: ControlDaemon) -> float | None:
    """When it quit, if that is the last that is known of it."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


def _server(server: Server, name: str, who: words.Who, now: float) -> Iterator[Finding]:
    owner = f"{who(server.uid)}'s server {server.pid}"
    if server.ghost:
        yield Finding(
            "trouble",
            f"{words.sentence(owner)[:-1]} was started for clients that had died in the queue: "
            "the daemon answers nobody now.",
            f"End the server (kill {server.pid}) to free the queue.",
            name,
        )
    elif server.state == "FAULT":
        left = server.clients_connected
        clients = "its client has" if left == 1 else f"its {left or ''} clients have"
        yield Finding(
            "trouble",
            f"{words.sentence(owner)[:-1]} is in FAULT after a fatal GPU error: it takes no new "
            f"clients until {clients.replace('  ', ' ')} exited.",
            "End the clients that are left; they cannot use the GPU any more.",
            name,
        )
    elif server.state == "INITIALIZING" and server.start_time_seconds is not None:
        age = now - server.start_time_seconds
        if age > 10:
            yield Finding(
                "warning",
                f"{words.sentence(owner)[:-1]} has been starting for {words.age(age)}.",
                "Its server.log says where it is stuck.",
                name,
            )


def _queue(daemon: ControlDaemon, name: str, who: words.Who, now: float) -> Iterator[Finding]:
    alive = sorted((wait for wait in daemon.waits if not wait.dead), key=lambda wait: wait.since)
    dead = [wait for wait in daemon.waits if wait.dead]
    if dead:
        pids = words.processes([wait.pid for wait in dead]) or "a process"
        yield Finding(
            "trouble",
            f"{words.sentence(pids)[:-1]} died while waiting in the queue of {name}, and still "
            "stands in it: when its turn comes, the daemon hangs.",
            "Plan a restart of the daemon before its present server ends.",
            name,
        )
    if not alive:
        return
    first = alive[0]
    seconds = now - first.since
    holder = next((one for one in daemon.servers if one.uid == first.behind_uid), None)
    if first.behind_uid is None:
        behind = "behind another user's server"
    elif holder is not None:
        behind = f"behind {who(first.behind_uid)}'s server {holder.pid}"
    else:
        behind = f"behind {who(first.behind_uid)}"
    text = f"{who(first.uid)} has waited {words.age(seconds)} {behind}"
    if len(alive) == 2:
        text += ", and one more client waits"
    elif len(alive) > 2:
        text += f", and {len(alive) - 1} more clients wait"
    idle = holder is None or (holder.clients_connected == 0 and not holder.ghost)
    if idle and daemon.state == "answering":
        text += ". The GPU is idle meanwhile: the daemon has not noticed yet that it is free"
    yield Finding(
        "trouble" if seconds > LONG_WAIT_SECONDS else "warning",
        words.sentence(text),
        "" if holder is not None and holder.ghost else _ABOUT_WAITS,
        name,
        first.since,
    )


_ABOUT_WAITS = (
    "MPS serves one user at a time: the wait ends when all clients of the other user have left. "
    "Run both as one user, or give each a daemon of their own."
)


def _recent(daemon: ControlDaemon, name: str, who: words.Who, now: float) -> Iterator[Finding]:
    """The last incident of each kind that a person must know of, while it is news."""
    told = {"ghost"}  # while it lasts, the server itself says so
    for incident in reversed(daemon.incidents):
        age = now - incident.at
        if age > RECENT_SECONDS:
            return
        if incident.kind in told or incident.kind not in _NEWS:
            continue
        told.add(incident.kind)
        text = words.incident(incident, who).removesuffix(".")
        remedy = _AFTERWARDS.get(incident.kind, "")
        if incident.kind == "daemon_died" and daemon.state == "answering":
            remedy = "It was started again; programs that were connected were not."
        yield Finding("warning", f"{text}, {words.ago(age)}.", remedy, name, incident.at)


_NEWS = words.SEVERE_INCIDENTS | {"client_rejected"}
_AFTERWARDS = {
    "server_crashed": "Programs that were connected must be started again; the kernel log may "
    "name the cause (Xid).",
    "server_start_failed": "The daemon tries again for as long as a client waits. server.log names "
    "the cause.",
    "fault": "Programs that were connected must be started again; the one that caused it has a "
    "bug, or the GPU has one.",
    "client_rejected": "The program got a CUDA error and has most likely ended.",
    "daemon_died": "Start it again; programs that start meanwhile use the GPU without MPS.",
}


def blind_spots(snapshot: Snapshot, config_error: str | None = None) -> tuple[Finding, ...]:
    """What the exporter could not read, and what to do about it."""
    found = [
        Finding(
            "warning",
            f"{_COLLECTORS.get(result.name, result.name)} could not be read: "
            f"{words.visible(result.error or 'no answer before the deadline', 400)}.",
            _COLLECTOR_REMEDIES.get(result.name, ""),
        )
        for result in snapshot.collectors
        if not result.success and not (result.name == "control" and _is_told(snapshot))
    ]
    for daemon in snapshot.daemons:
        found.extend(_unseen_of_daemon(daemon))
    if snapshot.unreadable_environments:
        unread = words.count(snapshot.unreadable_environments, "process", "processes")
        found.append(
            Finding(
                "notice",
                f"The environment of {unread} cannot be read: limits that they set for "
                "themselves are not known, so theirs are left out.",
                "Give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH.",
            )
        )
    if config_error is not None:
        found.append(
            Finding(
                "warning",
                f"The web configuration cannot be used, the one before stays in force: "
                f"{words.visible(config_error, 400)}.",
                "Mend the file; it is read anew by itself.",
            )
        )
    return tuple(found)


def _is_told(snapshot: Snapshot) -> bool:
    """Whether the states of the daemons tell already why one of them could not be asked."""
    return any(daemon.state in _TELLING for daemon in snapshot.daemons)


_TELLING = ("unresponsive", "draining", "refused")

_COLLECTORS = {
    "nvml": "The GPUs",
    "control": "The control daemons",
    "logs": "The logs",
    "process": "The processes",
}
_COLLECTOR_REMEDIES = {
    "nvml": "GPUs are read through the driver's library libnvidia-ml.so.1. In a container, start "
    "it with the NVIDIA runtime and the utility capability.",
    "control": "Daemons are asked with nvidia-cuda-mps-control; name it with --mps.control-binary "
    "if it is not on PATH.",
    "process": "In a container, share the host's PID namespace (hostPID), and mount its /proc.",
}


def _unseen_of_daemon(daemon: ControlDaemon) -> Iterator[Finding]:
    name = words.visible(daemon.pipe_directory, 400)
    foreground = daemon.facts is not None and daemon.facts.foreground
    for log in daemon.logs:
        if not log.readable and not foreground:
            reason = f": {words.visible(log.error, 200)}" if log.error else ""
            yield Finding(
                "warning",
                f"{words.visible(log.path, 400)} cannot be read{reason}. "
                + (
                    "Waits, crashes and faults of this daemon are not seen."
                    if log.log == "control"
                    else "Faults and clients of this daemon are not seen as they come."
                ),
                "Let the exporter's user read the log directory, or name the right one with "
                "--mps.log-directory.",
                name,
            )
    if foreground:
        yield Finding(
            "notice",
            f"The daemon {name} runs in the foreground (-f) and writes no log files: waits, "
            "crashes and faults are not seen.",
            "Start it with -d, so that it writes its logs.",
            name,
        )
    nameless = sum(1 for server in daemon.servers for client in server.clients if not client.pid)
    if nameless:
        yield Finding(
            "notice",
            f"{words.count(nameless, 'client')} of {name} cannot be told apart: the daemon lives "
            "in a PID namespace of its own.",
            "Run the daemon with the host's PID namespace (hostPID).",
            name,
        )
    if daemon.dropped_clients:
        yield Finding(
            "notice",
            f"{words.count(daemon.dropped_clients, 'client')} of {name} more than "
            "--collector.clients.max are not shown.",
            "Raise --collector.clients.max.",
            name,
        )

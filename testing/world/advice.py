"""What is found on a host, and said about a process, compared with the world."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.findings.before_kill import EndAdvice, before_kill
from mps_exporter.findings.doctor_pid import Check, check_process
from mps_exporter.merge.inputs import SERVER_PROGRAM
from mps_exporter.observations import ProcessView
from mps_exporter.snapshot import Gpu, Incident, Snapshot
from testing.world.daemon import Daemon
from testing.world.files import NAMES, OPEN_GROUP
from testing.world.gpus import mode_of, model_of
from testing.world.model import World
from testing.world.processes import DEBUGGER_PID, SMS, Client, Direct, Process
from testing.world.server import Server

Expected = dict[tuple[str, str], set[int]]
"""Finding and its daemon or GPU -> PIDs that it is about."""


def advice_differences(world: World, snapshot: Snapshot) -> Iterator[str]:
    """Yield each finding that is missing or wrong, or names other processes."""
    shown = {one.pipe_directory: one for one in snapshot.daemons}
    expected: Expected = defaultdict(set)
    subjects = set[str]()
    for daemon in world.daemons.values():
        if daemon.exists and not daemon.truth.unknowable and daemon.pipe in shown:
            subjects.add(daemon.pipe)
            _of_daemon(daemon, expected)
    judged = set(OF_DAEMONS)
    if world.sight.nvml and len(subjects) == len(world.daemons):
        judged |= {*OF_GPUS}
        uuids = {one.uuid for one in world.gpus}
        for gpu in [one for one in snapshot.gpus if one.uuid in uuids]:
            subjects.add(gpu.uuid)
            known = {one.pipe_directory for one in snapshot.daemons if one.gpu_uuids}
            _of_gpu(world, gpu, known, expected)
    yield from _unread(world, snapshot)
    seen: Expected = defaultdict(set)
    for one in findings(snapshot):
        key = one.advice.name, one.uuid or one.daemon
        seen[key] |= {int(pid) for pid in re.findall(r"\b[12]\d{5}\b", one.evidence)}
    keys = {key for key in (*seen, *expected) if key[0] in judged and key[1] in subjects}
    unsure = len(snapshot.gpus) != 1 or snapshot.gpus[0].observation.lost
    for key in sorted(keys):
        if key[0] == "memory_limit_ignored" and key not in seen and unsure:
            continue  # Not all of the daemon's GPUs, or their order, are known.
        if (key in seen) != (key in expected):
            texts = [one.evidence for one in findings(snapshot) if one.advice.name == key[0]]
            yield f"{key} is {'' if key in seen else 'not '}found: {texts}"
        elif (wrong := seen[key] - expected[key]) or (not seen[key] and expected[key]):
            yield f"{key} names {wrong}, not {expected[key]}"


def _unread(world: World, snapshot: Snapshot) -> Iterator[str]:
    texts = [one.evidence for one in findings(snapshot) if one.advice.name == "source_unreadable"]
    if any("no GPU here" in text for text in texts) == world.sight.nvml:
        yield f"source_unreadable: {texts}"


OF_DAEMONS = (
    *("percentage_ignored", "memory_limit_ignored", "limiter_under_mps", "queued_client_dead"),
    *("several_users_one_daemon", "limit_looser_than_default", "log_large", "daemon_refuses"),
    *("replies_not_understood", "directories_assumed", "daemon_outside_host_pid_namespace"),
    *("clients_not_shown", "sm_partition_mismatch", "joined_by_default_directory"),
)
OF_GPUS = (
    *("not_exclusive_mode", "exclusive_without_daemon", "gpu_shared_by_daemons", "unfit_gpu"),
    *("process_bypasses_mps", "pipe_directory_mismatch", "daemon_not_reached", "daemon_missing"),
    *("gpu_lost",),
)


def _of_daemon(daemon: Daemon, expected: Expected) -> None:
    server = daemon.server
    for client in server.clients if server is not None else ():
        if not client.exists:
            continue
        own = client.settings
        if own.percentage is not None and own.ratio is None:
            expected["percentage_ignored", daemon.pipe].add(client.pid)
        if own.memory is not None and own.bytes is None:
            expected["memory_limit_ignored", daemon.pipe].add(client.pid)
        if own.limiter:
            expected["limiter_under_mps", daemon.pipe].add(client.pid)
    for wait in daemon.waits():
        if wait.dead:
            expected["queued_client_dead", daemon.pipe].add(wait.pid)
        else:
            expected["several_users_one_daemon", daemon.pipe].clear()


def _of_gpu(world: World, gpu: Gpu, known: Collection[str], expected: Expected) -> None:
    uuid, index = gpu.uuid, int(gpu.index)
    if gpu.observation.lost:
        expected["gpu_lost", uuid].clear()
        return
    serving = [one for one in world.daemons.values() if one.pipe in gpu.served_by]
    of_root = [one for one in serving if one.uid == 0]
    mode = mode_of(world, uuid)
    if of_root and mode == "default":
        expected["not_exclusive_mode", uuid].clear()
    if len(of_root) > 1:
        expected["gpu_shared_by_daemons", uuid].clear()
    if serving and model_of(world, uuid)[0] < (7, 0):
        expected["unfit_gpu", uuid].clear()
    if mode == "exclusive_process" and not any(
        one.exists and one.uid == 0 for one in world.daemons.values()
    ):
        expected["exclusive_without_daemon", uuid].clear()
    for direct in world.directs.values():
        if direct.gpu.index == index and (name := _name_of(world, direct, serving, known)):
            expected[name, uuid].add(direct.pid)


def _name_of(
    world: World, direct: Direct, serving: Sequence[Daemon], known: Collection[str]
) -> str:
    """Return the finding about a process without MPS; "": none."""
    running = [one for one in world.daemons.values() if one.exists and one.uid in (0, direct.uid)]
    if not any(one in running for one in serving):
        if direct.directory is None:
            return ""
        if all(one.pipe in known for one in running):
            return "daemon_missing"
        reached = any(one.pipe == direct.directory for one in running)
        return "" if reached else "pipe_directory_mismatch"
    if direct.directory is None:
        return "process_bypasses_mps"
    reached = any(one.pipe == direct.directory for one in running)
    return "daemon_not_reached" if reached else "pipe_directory_mismatch"


def doctor_differences(
    world: World, snapshot: Snapshot, view: Callable[[int], ProcessView]
) -> Iterator[str]:
    """Yield what `doctor --pid` says wrongly about a process."""
    found = (*findings(snapshot), *recent_incidents(snapshot))
    served = {uuid for daemon in snapshot.daemons for uuid in daemon.gpu_uuids}
    nvml = world.sight.nvml and not any(gpu.observation.lost for gpu in snapshot.gpus)
    seen_gpus = frozenset(served & {gpu.uuid for gpu in snapshot.gpus})
    clients = [one for daemon in snapshot.daemons for s in daemon.servers for one in s.clients]
    limited = {one.pid for one in clients if one.memory_limit_bytes and one.memory_used_bytes}
    ended = [pid for pid, _ in world.exits[-3:] if pid not in world.processes]
    for process in [*world.processes.values()][-8:]:
        if isinstance(process, Client | Direct):
            seen = view(process.pid)
            checks = check_process(process.pid, snapshot, found, seen)
            said = (text for one in checks for text in (one.text, one.remedy))
            if not any("forged" in one.truth.unknowable for one in world.daemons.values()):
                yield from (
                    f"doctor --pid {process.pid}: {one}"
                    for text in said
                    for one in untrue(world, text)
                )
            for text in (
                *_of_view(process, seen),
                *_of_end(process, before_kill(process.pid, snapshot, process.uid)),
                *_of_checks(process, checks, seen_gpus, nvml=nvml),
                *_of_memory(process, checks, limited),
            ):
                yield f"doctor --pid {process.pid}: {text}"
    for pid in ended:
        checks = check_process(pid, snapshot, found, view(pid))
        if f"No process {pid} is there" not in checks[0].text:
            yield f"doctor --pid {pid}: {checks[0].text}"


def _of_view(process: Client | Direct, seen: ProcessView) -> Iterator[str]:
    directory = process.daemon.pipe if isinstance(process, Client) else process.directory
    closed = directory == "/tmp/closed/mps" and OPEN_GROUP not in process.groups
    known = {
        "uid": process.uid,
        "state": process.letter,
        "tracer": f"{DEBUGGER_PID} (gdb)" if process.halted == "t" else "",
        "command": process.name,
        "parent_pid": process.parent_pid,
        "pipe_directory": directory or "/tmp/nvidia-mps",
        "names_directory": directory is not None,
    }
    if bool(seen.frozen_group) != (process.halted == "frozen"):
        yield f"the frozen group is {seen.frozen_group}"
    for name, true in known.items():
        if getattr(seen, name) != true:
            yield f"{name} is {getattr(seen, name)}, not {true}"
    if bool(seen.path_error and "is closed to user" in seen.path_error) != closed:
        yield f"the path is {seen.path_error or 'open'}"


def _of_checks(
    process: Client | Direct, checks: list[Check], seen_gpus: frozenset[str], *, nvml: bool
) -> Iterator[str]:
    """Compare the conclusions about a process that works, waits, or runs without MPS."""
    wrong = {one.name for one in checks if one.outcome == "problem"}
    texts = " ".join(one.text for one in checks)
    if isinstance(process, Direct):
        if nvml and wrong.isdisjoint({"connection", "directory", "daemon"}):
            yield f"nothing is wrong with a process without MPS: {texts}"
        return
    daemon, server = process.daemon, process.daemon.server
    if daemon.truth.unknowable or daemon.frozen:
        return
    if process.blocked and process in daemon.queue:
        if "connection" not in wrong:
            yield f"it does not wait: {texts}"
        yield from _of_share(process, texts, seen_gpus)
    elif server is not None and process in server.clients and daemon.calm and server.calm:
        if process.complete and f"It has been a client of server {server.pid} for" not in texts:
            yield f"it is no client: {texts}"
        yield from _of_limits(process, wrong, texts)


def _of_end(process: Client | Direct, told: EndAdvice) -> Iterator[str]:
    """Compare what the end of a process would do to others."""
    if isinstance(process, Direct) or process.daemon.truth.unknowable or process.daemon.frozen:
        return
    daemon, server = process.daemon, process.daemon.server
    if process in daemon.queue and process.blocked:
        if not told.in_danger or "waits in the queue" not in told.text[0]:
            yield f"its end is no danger: {told}"
    elif server is not None and process in server.clients and daemon.calm and server.calm:
        reached, found = set(process.contexts.values()), set[int]()
        for _ in daemon.gpus:
            for other in server.clients:
                if other is not process and reached.intersection(other.contexts.values()):
                    reached |= {*other.contexts.values()}
                    found.add(other.pid)
        if set(told.neighbours) != found or told.in_danger != bool(found):
            yield f"{found} can be lost with it, not {told}"
        command = f"terminate_client {server.pid} {process.pid} |"
        if not daemon.uid and not any(command in one.command for one in told.actions):
            yield f"no command ends its work: {told.actions}"


def _of_share(process: Client, texts: str, seen_gpus: frozenset[str]) -> Iterator[str]:
    """Compare the warning of a share of fewer SMs than a context needs, before Hopper."""
    daemon = process.daemon
    share = min(process.settings.ratio or 1.0, daemon.percentage / 100)
    uuids = [gpu.uuid for gpu in daemon.gpus]
    old = {uuid for uuid in uuids if model_of(daemon.world, uuid)[0] < (9, 0)}
    small, warned = share * SMS < 2, "reported to fail with error 46" in texts
    if (warned and not (old and small)) or (small and old & seen_gpus and not warned):
        yield f"{share} of the SMs of {old or uuids}: {texts}"


def _of_memory(
    process: Client | Direct, checks: list[Check], limited: Collection[int]
) -> Iterator[str]:
    """Compare the warning of a memory limit that is nearly reached, if it is the client's own."""
    if isinstance(process, Direct) or process.daemon.truth.unknowable or process.pid not in limited:
        return
    limits = {one: process.limit_on(one) or inf for one in process.gpus}
    near = [one for one in limits if process.used_on(one) >= policy.NEAR_LIMIT_RATIO * limits[one]]
    sure = len(near) == len(limits) == 1 and limits[near[0]] == process.settings.bytes
    if not sure <= any("next allocation" in one.text for one in checks) <= bool(near):
        yield f"{near} of {limits} are nearly reached: {checks}"


def _of_limits(process: Client, wrong: set[str], texts: str) -> Iterator[str]:
    own = process.settings
    ignored = own.percentage is not None and own.ratio is None
    if ("process" in wrong) != process.stopped:
        yield f"it is halted: {process.halted}: {texts}"
    if wrong - {"limits", "history", "process"} or (ignored and "limits" not in wrong):
        yield f"{wrong} of a client that works: {texts}"
    if "limits" in wrong and not (ignored or own.memory is not None):
        yield f"its limits are wrong: {texts}"


# -- what texts say


_OWNED = re.compile(r"\bprocess (\d+) \(([^ ()]+) of ([^(),]+)[,)]", re.IGNORECASE)
_OF_USER = re.compile(r"\b(root|anna|bert|user \d+)'s (server|process) (\d+)", re.IGNORECASE)
_WITHOUT_DAEMON = re.compile(r"CUDA_MPS_PIPE_DIRECTORY is (\S+), where no daemon runs")
_NUMBERED = re.compile(r"\b(server|process|user|GPU|UID) (\d+)\b", re.IGNORECASE)


def untrue(world: World, text: str) -> Iterator[str]:
    """Yield the names and numbers in a text without a process, user, or GPU of the world."""
    uids = {one.uid for found in world.known.values() for one in found}
    for kind, number in _NUMBERED.findall(text):
        found, place = world.named(int(number)), int(number)
        known = {
            "server": any(SERVER_PROGRAM in one.name for one in found),
            "process": bool(found),
            "gpu": place <= len(world.gpus),  # One more may be divided.
        }
        if not known.get(kind.lower(), place in uids):
            yield f"{kind} {number}"
    running = {one.pipe for one in world.daemons.values() if one.exists and one.uid == 0}
    yield from running.intersection(_WITHOUT_DAEMON.findall(text))
    for pid, name, user in _OWNED.findall(text):
        if not any(one.name == name and user in _users(one) for one in world.named(int(pid))):
            yield f"process {pid} is no {name} of {user}"
    for user, kind, pid in _OF_USER.findall(text):
        shown = {name for one in world.named(int(pid)) for name in _users(one)}
        if user.lower() not in shown and not _multiuser(world, int(pid)):
            yield f"{kind} {pid} is not {user}'s"


OF_SERVERS = ("ghost", "ghost_ended", "server_crashed", "fault", "unfinished_work")
OF_CLIENTS = (
    *("wait_started", "wait_served", "wait_abandoned", "client_rejected"),
    *("client_terminated", "ghost"),
)


def untrue_incident(world: World, daemon: Daemon, one: Incident) -> Iterator[str]:
    """Yield what is wrong about an incident of a daemon of which everything can be known."""
    servers = world.named(one.server_pid or 0)
    if one.server_pid and not any(SERVER_PROGRAM in server.name for server in servers):
        yield f"{one.server_pid} is no server"
    if one.kind in OF_SERVERS and one.uid not in (None, *(server.uid for server in servers)):
        yield f"the server's user is not {one.uid}"
    clients = [
        client
        for pid in one.pids
        for client in world.known.get(pid, [])
        if isinstance(client, Client) and client.daemon is daemon
    ]
    if {client.pid for client in clients} != set(one.pids):
        yield f"{one.pids} are not all its clients"
    uids: set[int | None] = {client.shown_uid for client in clients} or {one.uid}
    if one.kind in OF_CLIENTS and one.uid not in uids:
        yield f"{one.pids} are not of user {one.uid}"
    if world.stepped_ms:
        return  # The clock was set: times before and after that do not compare.
    at_ms = round(one.at * 1000)
    queued = {client.queued_ms for client in clients}
    servers = [each for found in world.known.values() for each in found]
    waited = {
        each.ready_ms - (at or 0)
        for each in servers
        if isinstance(each, Server) and each.ready_ms
        for at in queued
    }
    true = {
        "wait_started": at_ms in queued,
        "wait_served": round((one.seconds or 0) * 1000) in waited,
        "daemon_started": at_ms in daemon.starts,
        "ghost": {client.pid for client in clients if client.dead_ms is not None} == {*one.pids},
        "fault": at_ms in {fault.at_ms for fault in daemon.truth.faults},
        "unfinished_work": any(
            fault.at_ms == at_ms and fault.left_work and fault.culprit_pid in one.caused_by_pids
            for fault in daemon.truth.faults
        ),
    }
    if not true.get(one.kind, daemon.starts[0] <= at_ms <= world.now_ms):
        yield f"its time, {at_ms}, or its cause"


def _multiuser(world: World, pid: int) -> bool:
    return any(isinstance(one, Client) and one.daemon.multiuser for one in world.named(pid))


def _users(process: Process) -> tuple[str, ...]:
    """Return the user in words, with and without the name: no process may show it any more."""
    return NAMES.get(process.uid, ""), f"user {process.uid}"

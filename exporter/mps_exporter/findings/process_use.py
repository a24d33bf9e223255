"""Checks of one process: whether it is served, what limits it, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.findings.finding import Finding
from mps_exporter.findings.hangs import HANGS
from mps_exporter.findings.limits import NO_EFFECT, looser
from mps_exporter.findings.process_subject import Check, Subject, ok, problem, unknown, warning
from mps_exporter.findings.safe_commands import quoted_path
from mps_exporter.findings.servers import CREATING_LONG_SECONDS
from mps_exporter.mps.client_limits import (
    effective_ratio,
    parse_active_thread_percentage,
    parse_pinned_memory_limit,
)
from mps_exporter.snapshot import Client, ControlDaemon, Handover, Incident, Wait

NEAR_LIMIT_RATIO = 0.95
"""Used part of a memory limit from which the next allocation can fail."""

CONTEXT_BYTES = 290 << 20
"""Measured on an H200: with this limit cuDevicePrimaryCtxRetain failed with error 2; with 1 GiB a
client without memory of its own had 753 MiB left."""

FEWEST_SMS = 2
"""SMs come in pairs; on Hopper the least share is 8 whatever the percentage (measured)."""

HOPPER = (9, 0)

_BLOCKING = ("ghost_server", "daemon_unresponsive", "daemon_draining", "server_starting_long")
_REFUSING = ("server_in_fault", "server_start_failed", "server_out_of_descriptors")
_HANGS_IN_INIT = "a-program-hangs-in-cuinit"
_LOST = "all-programs-died-at-once"
_BAD_POINTER = "cuda-error-700-illegal-address-under-mps"
_NO_MEMORY = "cuda-error-2-out-of-memory-under-mps"
_UNAVAILABLE = "cuda-error-46-devices-unavailable"
_TOO_MANY = "cuda-error-808-809-mps-max-clients-reached"
_REFUSALS = {
    "context_limit": _TOO_MANY,
    "server_not_ready": "cuda-error-807-mps-server-not-ready",
    "invalid_device": "invalid-cuda-visible-devices",
}


def service(one: Subject) -> Iterator[Check]:
    """Findings of its daemon that keep it waiting, or refuse it."""
    if one.daemon is None or one.stranded_on:
        return
    served = one.client is not None and one.client.state in ("active", "torn_down")
    names = _BLOCKING if served else (*_BLOCKING, *_REFUSING)
    check = warning if served else problem

    def follows(found: Finding) -> bool:
        """Without descriptors the daemon hangs as well: the cause comes first."""
        return found.advice.name != "server_out_of_descriptors"

    for found in sorted(one.found, key=follows):
        if found.daemon == one.daemon.pipe_directory and found.advice.name in names:
            command = next((action.command for action in found.actions if action.heals), "")
            yield check(found.evidence, found.remedy, found.advice.page, command)


def connection(one: Subject) -> Iterator[Check]:
    if one.handover is not None:
        yield _last_served(one.handover)
    elif one.wait is not None:
        yield _waiting(one, one.wait, "It has waited in the daemon's queue")
    elif one.client is not None:
        yield _connected(one.client, one.snapshot.taken_at)
    elif one.stranded_on:
        indexes = ", ".join(gpu.index for gpu in one.stranded_on)
        yield problem(
            f"It has lost its MPS server (error 806): it cannot use GPU {indexes} any more, and "
            "keeps its memory there until it ends.",
            "End it, and start it again.",
            "cuda-error-806-mps-rpc-failure",
            f"kill {one.pid}",
        )
    elif one.direct_on:
        indexes = ", ".join(gpu.index for gpu in one.direct_on)
        yield problem(
            f"It has a context on GPU {indexes} and is no client of a running MPS server: it "
            "started without MPS, or its server has gone.",
            "Start it again with the daemon's CUDA_MPS_PIPE_DIRECTORY.",
            NO_EFFECT,
            one.command_to_use_daemon,
        )
    elif (check := _full(one) or _wait_not_seen(one)) is not None:
        yield check
    else:
        yield warning(
            "It is no client of MPS, does not wait for it, and has no context on a GPU: it has "
            "made no CUDA call yet, has got an error from it, or hangs elsewhere.",
            f"See what it printed; py-spy dump --pid {one.pid}, or cat /proc/{one.pid}/stack as "
            "root.",
        )


def _last_served(last: Handover) -> Check:
    if last.server_pid is None:
        return problem(
            "It is the last that the daemon sent to its server, which has done nothing since.",
            "See what the daemon hangs on; it may be sound.",
            HANGS,
        )
    return problem(
        f"The daemon sent it to server {last.server_pid}, which has ended, and waits for it.",
        "End it, and start it again.",
        HANGS,
        f"kill {last.pid}",
    )


def _waiting(one: Subject, wait: Wait, text: str, because: str = "") -> Check:
    behind = f" behind user {wait.behind_uid}" if wait.behind_uid is not None else ""
    age = humanize.age(one.snapshot.taken_at - wait.since)
    return problem(
        f"{text}{behind} for {age}{because}.",
        "Wait: killing it makes everything hang when its turn comes. It is served when the last "
        "client of the other user has left, and up to 51 s after.",
        _HANGS_IN_INIT,
    )


def _connected(client: Client, now: float) -> Check:
    since = now - client.state_since if client.state_since is not None else None
    age = f" for {humanize.age(since)}" if since is not None else ""
    if client.state in ("connecting", "creating_context"):
        text = f"It is connected to server {client.server_pid}, and has had no context{age}."
        if since is None or since < CREATING_LONG_SECONDS:
            return ok(text)
        return problem(
            text,
            "See the last lines of server.log, and whether the server is in state T or D.",
            "a-client-is-connected-and-hangs",
        )
    if client.state == "torn_down":
        return problem(
            "A fatal GPU error destroyed its context: it cannot use the GPU any more.",
            f"End process {client.pid} and restart it; until it ends, new clients get error 807.",
            _BAD_POINTER,
        )
    return ok(f"It has been a client of server {client.server_pid}{age}.")


def _full(one: Subject) -> Check | None:
    for server in one.daemon.servers if one.daemon is not None else ():
        for uuid, limit in server.contexts_limit.items():
            if server.contexts.get(uuid, 0) >= limit:
                return problem(
                    f"Server {server.pid} has {limit} of at most {limit} contexts on GPU "
                    f"{one.gpu(uuid)}: a process that starts now is refused (error 46 or 808).",
                    "Let some of its clients end, or start a second daemon with a directory of "
                    "its own; then start the process again.",
                    _TOO_MANY,
                )
    return None


def _wait_not_seen(one: Subject) -> Check | None:
    """Say why it is not known whether a process waits; None: it would be seen."""
    daemons = (one.daemon,) if one.daemon is not None else one.snapshot.daemons
    if one.daemon is None and one.view.pipe_directory is not None:
        return None
    for daemon in daemons:
        inner, uid = daemon.has_own_pid_namespace, one.view.uid
        if daemon.state == "absent" or (daemon.shows_waits and not inner):
            continue
        own = [wait for wait in daemon.waits if wait.uid == uid and not wait.dead and not wait.pid]
        if inner and own:
            because = "; its daemon has a PID namespace of its own, so that one may be another's"
            text = f"It waits, as a process of user {uid} does in the daemon's queue"
            return _waiting(one, own[0], text, because)
        return _unknown_wait(one, daemon)
    return None


def _unknown_wait(one: Subject, daemon: ControlDaemon) -> Check:
    remedy, text, uid = "", "whether it waits is not known: ", one.view.uid
    if not daemon.follows("control"):
        text += "control.log is not readable, or not known."
        named = quoted_path(one.environment.get("CUDA_MPS_LOG_DIRECTORY", ""))
        remedy = f"Name the log directory: mps-exporter doctor --mps.log-directory={named or 'DIR'}"
        pipe = quoted_path(daemon.pipe_directory)
        remedy += f" --mps.pipe-directory={pipe or 'DIR'}; or ask root."
    elif daemon.has_own_pid_namespace:
        text += "its daemon has a PID namespace of its own, and logs no PID of this host."
    else:
        text += "an MPS v3 daemon does not tell."
    holders = {server.uid for server in daemon.servers if server.uid is not None}
    if uid is not None and holders and uid not in holders and not daemon.multiuser:
        text += (
            f" The daemon serves user {min(holders)} now: a process of user {uid} waits until all "
            "clients of that user have left. Do not kill it."
        )
    return unknown(text, remedy, _HANGS_IN_INIT)


def limits(one: Subject) -> Iterator[Check]:
    if one.client is not None:
        yield from _client_limits(one, one.client)
        if one.daemon is not None and (excess := looser(one.client, one.daemon)) is not None:
            yield warning(
                f"It may use {excess.text}: it connected before the daemon was configured, or to a "
                "server that was started before.",
                "Restart it when all clients of its server have exited.",
                NO_EFFECT,
            )
    if one.daemon is not None and not one.working:
        yield from _room(one, one.daemon)


def _client_limits(one: Subject, client: Client) -> Iterator[Check]:
    if client.percentage_ignored is not None:
        yield problem(
            "Its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "
            f"({humanize.printable(client.percentage_ignored)}) is ignored.",
            "A number above 0 and at most 100.",
            NO_EFFECT,
        )
    if client.memory_limit_ignored is not None:
        yield problem(
            "Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT "
            f"({humanize.printable(client.memory_limit_ignored)}) is ignored: an entry names no "
            "GPU that the process sees.",
            "UUIDs, or ordinals within its own CUDA_VISIBLE_DEVICES.",
            NO_EFFECT,
        )
    for uuid, limit in client.memory_limit_bytes.items():
        used = client.memory_used_bytes.get(uuid)
        if used is not None and limit and used >= NEAR_LIMIT_RATIO * limit:
            yield warning(
                f"It uses {humanize.memory(used)} of at most {humanize.memory(limit)} on GPU "
                f"{one.gpu(uuid)}: the next allocation can fail.",
                "A higher limit, before it starts.",
                _NO_MEMORY,
            )
    if client.environment_readable is False:
        yield unknown("limits that it sets for itself cannot be seen.")
    if client.sm_limit:
        sms = ", ".join(f"{count} SMs" for count in client.sm_limit.values())
        yield ok(f"It may use at most {sms}.")
    else:
        yield unknown("how many SMs it may use is not known.")


def _room(one: Subject, daemon: ControlDaemon) -> Iterator[Check]:
    """Whether the limits that a process set for itself leave enough for a context."""
    memory_limits = parse_pinned_memory_limit(
        one.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    )
    if memory_limits and (least := min(memory_limits.values())) <= CONTEXT_BYTES:
        yield problem(
            f"Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT allows {humanize.memory(least)}; on an H200 no "
            f"context could be made with {humanize.memory(CONTEXT_BYTES)} (error 2).",
            "A higher limit, and start the process again.",
            _NO_MEMORY,
        )
    if one.recorded:
        return
    text = one.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    own = parse_active_thread_percentage(text).ratio
    ratio = effective_ratio(own, daemon.default_active_thread_ratio)
    for gpu in one.snapshot.gpus:
        sms = gpu.observation.sm_count
        old = (gpu.observation.compute_capability or HOPPER) < HOPPER
        if ratio and sms and old and gpu.uuid in daemon.gpu_uuids and ratio * sms < FEWEST_SMS:
            yield warning(
                f"Its percentage is {humanize.percent(ratio, exact=True)} of {sms} SMs, less than "
                f"{FEWEST_SMS}: reported to fail with error 46.",
                "A higher percentage, or fewer replicas.",
                _UNAVAILABLE,
            )


def host_memory(one: Subject) -> Iterator[Check]:
    if kills := one.view.oom_kills:
        yield warning(
            f"The kernel has ended {humanize.count(kills, 'process', 'processes')} of its control "
            "group because host memory ran out.",
            "Raise the memory limit of the job or pod. If a client is ended like this while it "
            "computes, other clients on its GPU are lost.",
            _LOST,
        )


def history(one: Subject) -> Iterator[Check]:
    for daemon in one.snapshot.daemons:
        for incident in daemon.incidents:
            text, page = _part_in(one.pid, incident)
            if text:
                ago = humanize.ago(one.snapshot.taken_at - incident.at)
                yield problem(f"{ago}: {text}", page=page)


def _part_in(pid: int, incident: Incident) -> tuple[str, str]:
    """What an incident has to do with a process, and the page; "": nothing."""
    if pid in incident.caused_by_pids:
        left = incident.kind == "unfinished_work"
        did = "left GPU work unfinished" if left else "used a bad pointer"
        others = len({*incident.pids} - {pid})
        took = f" and took {humanize.count(others, 'other client')} down" if others else ""
        return (
            f"it {did}, which caused a fatal GPU error{took} (proved by the kernel log).",
            _LOST if left else _BAD_POINTER,
        )
    kind = incident.kind if pid in incident.pids else ""
    if kind in ("fault", "unfinished_work"):
        who = humanize.processes(incident.caused_by_pids)
        by = f", which {who} caused" if who else "; which client caused it is not known"
        text = f"it was lost to a fatal GPU error{by} (error 700 or 719)."
        return text, _LOST if who else _BAD_POINTER
    if kind in ("server_crashed", "daemon_died"):
        return "it lost its server (error 806).", "cuda-error-806-mps-rpc-failure"
    if kind == "client_terminated":
        page = "cuda-error-810-mps-client-terminated"
        return "it was terminated through the daemon (error 810).", page
    if kind == "client_rejected":
        page = _REFUSALS.get(incident.detail, _UNAVAILABLE)
        return f"it was refused: {humanize.printable(incident.detail)}.", page
    return "", ""

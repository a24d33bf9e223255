"""Sentences about incidents: exits, crashes, faults, refusals and waits."""

from collections.abc import Sequence

from mps_exporter.humanize import (
    UserNameLookup,
    count,
    duration,
    join_some,
    printable,
    processes,
    sentence,
)
from mps_exporter.snapshot import Incident


def _lost(pids: Sequence[int], client: str = "client") -> str:
    named = f" ({text})" if (text := processes(pids)) else ""
    return f"; {count(len(pids), client)} {'was' if len(pids) == 1 else 'were'} lost{named}"


def _client_name(incident: Incident, name_of: UserNameLookup) -> str:
    named = processes(incident.pids)
    return f"{name_of(incident.uid)}'s {named}" if named else f"a client of {name_of(incident.uid)}"


def _server_name(incident: Incident, name_of: UserNameLookup) -> str:
    number = "" if incident.server_pid is None else f" {incident.server_pid}"
    if incident.uid is None:
        return f"the server{number}" if number else "a server"
    return f"{name_of(incident.uid)}'s server{number}"


_REJECTIONS = {
    "context_limit": "the server has reached its limit of client contexts",
    "server_not_ready": "the server had not recovered from a fatal GPU error",
    "invalid_device": "the client requested a device that the server does not serve",
    "credentials": "the daemon did not accept the client's credentials",
}


def _rejected(incident: Incident, name_of: UserNameLookup) -> str:
    reason = _REJECTIONS.get(incident.detail, printable(incident.detail))
    verb = "were" if sum(map(bool, incident.pids)) > 1 else "was"
    return f"{_client_name(incident, name_of)} {verb} refused: {reason}"


MPS_NAMES = (
    "which proves nothing (right in 15 of 79 faults by a client's own pointer, 0 of 87 others)"
)
"""Accuracy of MPS in naming the cause. Measured on driver 580.159.04."""


def _fault_sentence(incident: Incident, name_of: UserNameLookup) -> str:
    server, who = _server_name(incident, name_of), processes(incident.caused_by_pids)
    if incident.kind == "unfinished_work":
        text = f"{who} left GPU work unfinished, which caused a fatal GPU error in {server}"
    elif who:
        text = f"a fatal GPU error in {server}: {who} used a bad pointer"
    else:
        text = f"a fatal GPU error in {server}{_UNPROVED.get(incident.proof, '')}"
    if who:
        text += " (proved by the kernel log)"
    others = tuple(pid for pid in incident.pids if pid not in incident.caused_by_pids)
    if others:
        text += _lost(others, "other client" if len(others) < len(incident.pids) else "client")
    if incident.ended_before:
        ended = [
            f"{processes([one.pid]) or 'a client'} (ended {one.seconds:.1f} s before)"
            for one in incident.ended_before
        ]
        text += f"; possible, but not proved: {join_some(ended)}"
    if incident.blamed_pid and incident.blamed_pid not in incident.caused_by_pids:
        text += f"; MPS names process {incident.blamed_pid}, {MPS_NAMES}"
    return text


_UNPROVED = {
    "unit": ": a client that was running used a bad pointer, and which one is not known",
    "unknown": ": which client caused it is not known",
    "unread": ": which client caused it is not known without the kernel log",
}


_SENTENCES = {
    "daemon_started": "the daemon started",
    "daemon_died": "the daemon {died}{lost}{detail}",
    "daemon_quit": "the daemon received quit and exited",
    "server_crashed": "{server} crashed{lost}",
    "server_start_failed": "a server for {user} could not start{reason}",
    "fault": "{fault}",
    "unfinished_work": "{fault}",
    "fault_recovered": "{server} recovered from the fatal error{after}",
    "client_terminated": "{client} was terminated through its daemon",
    "client_rejected": "{rejected}",
    "wait_started": "{client} was queued behind another user's server",
    "wait_served": "{client} was served{after}",
    "wait_abandoned": "{client} {gave_up}{after}",
    "ghost": "{server} was sent a dead client, or had no file descriptor left: it accepts none any "
    "more, and the daemon hangs as soon as another connects",
    "ghost_ended": "{server}, a ghost, exited and no longer blocks the daemon",
}


def _sentence(one: Incident, name_of: UserNameLookup) -> str:
    return _SENTENCES.get(one.kind, printable(one.kind.replace("_", " "))).format(
        server=_server_name(one, name_of),
        client=_client_name(one, name_of),
        user=name_of(one.uid),
        lost=_lost(one.pids) if one.pids else "; no client was connected",
        after="" if one.seconds is None else f" after {duration(one.seconds)}",
        died="ended" if one.detail else "died",
        gave_up="ended without a context" if one.detail else "stopped waiting",
        detail=f"; {one.detail}" if one.detail else "",
        reason=f": {printable(one.detail)}" if one.detail else "",
        fault=_fault_sentence(one, name_of),
        rejected=_rejected(one, name_of),
    )


def describe_incident(one: Incident, name_of: UserNameLookup) -> str:
    text = _sentence(one, name_of)
    if one.count > 1:
        text += f" ({one.count} times)"
    return sentence(text)

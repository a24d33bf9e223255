"""Human-readable text: quantities, names, users and incidents.

The page, the JSON and the command line take their wording from here, so that they agree.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from mps_exporter.snapshot import Incident, Snapshot

MAX_NAME_CHARACTERS = 120
MAX_NAMED_PIDS = 6
MAX_REMEMBERED_USERS = 1000

UserNameLookup = Callable[[int | None], str]
"""UID -> the name to show, with a text for an unknown user (None)."""


def printable(text: str, limit: int = MAX_NAME_CHARACTERS) -> str:
    """Return untrusted text in a form that is safe to show: one line, nothing hidden.

    Control characters and those that change the direction of writing show as escapes; bytes that
    are not UTF-8 show as the replacement character.
    """
    if text.isprintable() and len(text) <= limit:
        return text
    shown = []
    for character in text[: limit + 1]:
        category = unicodedata.category(character)
        if category == "Cs":
            shown.append("\N{REPLACEMENT CHARACTER}")
        elif category in ("Cc", "Cf", "Zl", "Zp"):
            shown.append(character.encode("unicode_escape").decode("ascii"))
        else:
            shown.append(character)
    if len(shown) > limit:
        shown[limit:] = "…"
    return "".join(shown)


def user_name(uid: int | None, user: str | None) -> str:
    """Return the user's name, else the UID in words."""
    if user:
        return printable(user)
    if uid is None:
        return "an unknown user"
    return f"user {uid}" if uid else "root"


def duration(seconds: float) -> str:
    """Return a duration: 25 ms, 4.2 s, 13 s, 4 min, 2 h 5 min, 3 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def age(seconds: float) -> str:
    """Return a duration without fractions of a second."""
    return duration(seconds) if seconds >= 90 else f"{max(0.0, seconds):.0f} s"


def ago(seconds: float) -> str:
    """Return a time in the past, relative to now."""
    return "just now" if seconds < 1.5 else f"{age(seconds)} ago"


def memory(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            number = size / scale
            return f"{number:.0f} {unit}" if number >= 99.95 else f"{number:.1f} {unit}"
    return f"{size:.0f} B"


def percent(ratio: float, *, exact: bool = False) -> str:
    """Return a ratio (0-1) in percent; with `exact` to two decimals, for a set limit (12.5 %)."""
    return f"{round(ratio * 100, 2):g} %" if exact else f"{ratio * 100:.0f} %"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: 1 client, 3 clients."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def iso_timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def processes(pids: Sequence[int], pods: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return known PIDs and pods: process 12, processes 12 and 13 (pod a/b), … and 9 more."""
    known = [f"{pid} (pod {pods[pid]})" if pid in pods else f"{pid}" for pid in sorted(pids) if pid]
    if not known:
        return ""
    if len(known) == 1:
        return f"process {known[0]}"
    if len(known) > MAX_NAMED_PIDS:
        rest = len(known) - MAX_NAMED_PIDS
        return f"processes {', '.join(known[:MAX_NAMED_PIDS])} and {rest} more"
    return f"processes {', '.join(known[:-1])} and {known[-1]}"


def process(pid: int, program: str | None, user: str) -> str:
    named = f"process {pid}" if pid else "a process without a known PID"
    return f"{named} ({printable(program or 'an unknown program')} of {user})"


def join_some(texts: Sequence[str], most: int = 5) -> str:
    """Join the first texts, and count the rest."""
    shown = "; ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown}; and {len(texts) - most} more"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return the text with a capital first letter and a full stop."""
    return capitalize(text) + ("" if text.endswith(".") else ".")


class UserNames:
    """The users of this host by UID; the names of users without processes are kept."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._names: dict[int, str] = {}
        if snapshot is not None:
            self.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        new = snapshot.user_names
        kept = [(uid, user) for uid, user in self._names.items() if uid not in new]
        self._names = dict([*kept, *new.items()][-MAX_REMEMBERED_USERS:])

    def __call__(self, uid: int | None) -> str:
        return user_name(uid, None if uid is None else self._names.get(uid))


# ---------------------------------------------------------------------- incidents


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
    "client_rejected": "{client} {were} refused: {refusal}",
    "wait_started": "{client} was queued behind another user's server",
    "wait_served": "{client} was served{after}",
    "wait_abandoned": "{client} {gave_up}{after}",
    "ghost": "{server} was sent a dead client, or had no file descriptor left: it accepts none any "
    "more, and the daemon hangs as soon as another connects",
    "ghost_ended": "{server}, a ghost, exited and no longer blocks the daemon",
}


def describe_incident(one: Incident, name_of: UserNameLookup) -> str:
    text = _SENTENCES.get(one.kind, printable(one.kind.replace("_", " "))).format(
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
        were="were" if sum(map(bool, one.pids)) > 1 else "was",
        refusal=_REJECTIONS.get(one.detail, printable(one.detail)),
    )
    return sentence(f"{text} ({one.count} times)" if one.count > 1 else text)

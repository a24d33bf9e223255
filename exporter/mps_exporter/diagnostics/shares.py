"""What was promised against what is enforced: limits that are looser, or held several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mps_exporter import humanize
from mps_exporter.diagnostics.finding import Finding
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import Client, ControlDaemon

_ROUNDING = 0.005
"""Shares that differ by less are the same: thirds are written as 33."""


class Excess(NamedTuple):
    """More than the daemon gives to one process by default."""

    of: str
    """SMs (as a share of all) or GPU memory (in bytes)."""
    own: float | None
    """None: all there is."""
    default: float

    @property
    def text(self) -> str:
        """Both values, for a sentence."""
        return f"{self._value(self.own)} of {self.of}, where the default is " + self._value(
            self.default
        )

    def _value(self, value: float | None) -> str:
        if value is None:
            return "any amount"
        if self.of == _SMS:
            return humanize.percent(min(value, 1.0), exact=True)
        return humanize.memory(int(value))


_SMS, _MEMORY = "the SMs", "GPU memory"


def share_findings(
    daemon: ControlDaemon,
    clients: Sequence[Client],
    found: Callable[..., Finding],
    name_of: UserNameLookup,
) -> Iterator[Finding]:
    """Compare the limits of a daemon's clients with its defaults of now."""
    share = daemon.default_active_thread_ratio
    if (share is None or share >= 1) and not daemon.default_pinned_memory_limit_bytes:
        return
    having = [(one, what) for one in clients if (what := looser(one, daemon)) is not None]
    if having:
        yield found("limit_looser_than_default", lambda: _looser_texts(having, name_of))
    exceeding = list(_exceeding(daemon, clients))
    if exceeding:
        yield found("share_exceeded", lambda: _exceeding_texts(exceeding))


def looser(client: Client, daemon: ControlDaemon) -> Excess | None:
    """What a client has more of than one that starts under the defaults of now."""
    share, ratio = daemon.default_active_thread_ratio, client.active_thread_ratio
    if share is not None and ratio is not None and ratio > share + _ROUNDING:
        return Excess(_SMS, ratio, share)
    if client.limit_source == "unknown":
        return None
    for uuid, limit in daemon.default_pinned_memory_limit_bytes.items():
        own = client.memory_limit_bytes.get(uuid)
        if uuid in client.contexts and (own is None or own > limit):
            return Excess(_MEMORY, own, limit)
    return None


def _looser_texts(
    having: Sequence[tuple[Client, Excess]], name_of: UserNameLookup
) -> tuple[str, str]:
    those = [
        f"{humanize.process(one.pid, one.command, name_of(one.uid))} may use {what.text}"
        for one, what in having
    ]
    return (
        f"{humanize.capitalize(humanize.join_some(those))}.",
        "Restart it, if the default is meant for it. A server that was started before keeps its "
        "own limits for new clients, too, until all of its clients have exited. Configure a daemon "
        "before programs can start.",
    )


def _exceeding(
    daemon: ControlDaemon, clients: Sequence[Client]
) -> Iterator[tuple[tuple[str, str], int, Excess]]:
    """The jobs and pods whose processes may together use more than one process may."""
    groups: dict[tuple[str, str], list[Client]] = {}
    for client in clients:
        if client.slurm_job_id is not None:
            groups.setdefault(("Slurm job", client.slurm_job_id), []).append(client)
        elif client.pod_uid is not None:
            groups.setdefault(("pod", client.pod_uid), []).append(client)
    for name, members in groups.items():
        for uuid in sorted({uuid for one in members for uuid in one.contexts}):
            here = [one for one in members if uuid in one.contexts]
            if len(here) > 1 and (excess := _above_share(daemon, here, uuid)) is not None:
                yield name, len(here), excess
                break


def _above_share(daemon: ControlDaemon, here: Sequence[Client], uuid: str) -> Excess | None:
    share = daemon.default_active_thread_ratio
    ratios = [one.active_thread_ratio for one in here if one.active_thread_ratio is not None]
    if share is not None and share < 1 and sum(ratios) > share + _ROUNDING and len(ratios) > 1:
        return Excess(_SMS, sum(ratios), share)
    limit = daemon.default_pinned_memory_limit_bytes.get(uuid)
    limits = [one.memory_limit_bytes[uuid] for one in here if uuid in one.memory_limit_bytes]
    if limit is not None and sum(limits) > limit and len(limits) > 1:
        return Excess(_MEMORY, sum(limits), limit)
    return None


def _exceeding_texts(
    exceeding: Sequence[tuple[tuple[str, str], int, Excess]],
) -> tuple[str, str]:
    those = [
        f"{kind} {humanize.printable(name)} has {count} processes, which may together use "
        f"{excess.text} for one process"
        for (kind, name), count, excess in exceeding
    ]
    return (
        f"{humanize.capitalize(humanize.join_some(those))}.",
        "Divide the limits by the number of processes, in the environment of the job "
        "(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT).",
    )

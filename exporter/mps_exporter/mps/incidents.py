"""The last incidents of a daemon."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from mps_exporter.snapshot import Incident

MAX_INCIDENTS = 100

MAX_PIDS = 64
"""Processes that one incident names."""

SAME_WITHIN_SECONDS = 60.0
"""A server that fails to start does so twenty times a second: one incident with a count."""

RECENT = 8
"""The last incidents among which an earlier one of the same kind is looked for."""

_REPEATED = frozenset({"server_start_failed", "client_rejected"})


def _same_but_for_time(one: Incident, other: Incident) -> bool:
    """Whether they differ only in their time and their processes."""
    return (
        (one.kind, one.uid, one.detail, one.counted)
        == (other.kind, other.uid, other.detail, other.counted)
    ) and other.at - one.at <= SAME_WITHIN_SECONDS


class Incidents:
    """The last ones, oldest first, numbered so that a reader can ask for the new ones."""

    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._added = 0

    def add(self, incident: Incident) -> None:
        """Add one; a repetition of a recent one raises its count instead."""
        if max(len(incident.pids), len(incident.ended_before)) > MAX_PIDS:
            pids, ended = incident.pids[:MAX_PIDS], incident.ended_before[:MAX_PIDS]
            incident = replace(incident, pids=pids, ended_before=ended)
        if incident.kind in _REPEATED:
            for index in range(-1, -1 - min(RECENT, len(self._incidents)), -1):
                earlier = self._incidents[index]
                if _same_but_for_time(earlier, incident):
                    pids = tuple(dict.fromkeys((*earlier.pids, *incident.pids)))[:MAX_PIDS]
                    self._incidents[index] = replace(earlier, count=earlier.count + 1, pids=pids)
                    return
        self._incidents.append(incident)
        self._added += 1

    def snapshot(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    def since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Return those after the first `seen` ones, and how many there have been by now."""
        new = min(self._added - seen, len(self._incidents))
        if new <= 0:
            return (), self._added
        return tuple(self._incidents)[-new:], self._added

"""When something happened to a daemon, and where it is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mps_exporter.mps.counters import Counters
from mps_exporter.mps.incidents import Incidents
from mps_exporter.snapshot import EndedBefore, FaultProof, Incident, IncidentKind


class Moment(NamedTuple):
    """A moment, with the counters and incidents of the daemon."""

    at: float
    """Unix time in seconds."""
    counted: bool
    """False: before the exporter started. The event rebuilds the state and no counter counts it."""
    counters: Counters
    incidents: Incidents

    def increment(self, name: str, by: int = 1, **labels: str | int | None) -> None:
        self.counters.increment(name, by, counted=self.counted, **labels)

    def observe(self, name: str, seconds: float, **labels: str | int | None) -> None:
        self.counters.observe(name, seconds, counted=self.counted, **labels)

    def add_incident(
        self,
        kind: IncidentKind,
        *,
        at: float | None = None,
        server_pid: int | None = None,
        uid: int | None = None,
        pids: Iterable[int] = (),
        blamed_pid: int | None = None,
        caused_by_pids: Iterable[int] = (),
        proof: FaultProof = "",
        ended_before: Iterable[EndedBefore] = (),
        gpu_uuids: Iterable[str] = (),
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Record an incident; `at` where it is not this moment."""
        incident = Incident(
            at=self.at if at is None else at,
            kind=kind,
            server_pid=server_pid,
            uid=uid,
            pids=tuple(pids),
            blamed_pid=blamed_pid,
            caused_by_pids=tuple(caused_by_pids),
            proof=proof,
            ended_before=tuple(ended_before),
            gpu_uuids=tuple(uuid for uuid in gpu_uuids if uuid),
            seconds=None if seconds is None else round(max(seconds, 0.0), 3),
            detail=detail,
            counted=self.counted,
        )
        self.incidents.add(incident)

    def count_loss(self, uid: int | None, cause: str) -> None:
        """Count a client that ended abnormally."""
        self.increment("mps_client_losses_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_loss_timestamp_seconds", self.at)

    def count_rejection(self, uid: int | None, cause: str, pids: Iterable[int] = ()) -> None:
        self.increment("mps_client_rejections_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_rejection_timestamp_seconds", self.at)
        self.add_incident("client_rejected", uid=uid, pids=pids, detail=cause)

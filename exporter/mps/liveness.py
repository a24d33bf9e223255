"""Who is still there: the processes of /proc, asked in the numbers that a daemon's log uses."""

from __future__ import annotations

from exporter.mps.deaths import Alive
from exporter.observations import DaemonFacts, ProcfsObservation

START_SLACK_SECONDS = 1.0
"""How far a start time of /proc, which counts ticks since boot, and a log's stamp may differ."""


def alive(facts: DaemonFacts, seen: ProcfsObservation) -> Alive:
    """Give the function that tells whether a process of a daemon's log is still there."""
    foreign = lives_elsewhere(facts)
    servers = {
        process.namespace_pids[-1]: process for process in facts.servers if process.namespace_pids
    }

    def told(pid: int, moment: float) -> bool | None:
        if foreign:
            # Its numbers are not ours; only its own children can be translated.
            return True if pid in servers else None
        facts_of = seen.processes.get(pid)
        if facts_of is None:
            return False if pid in seen.gone else None
        if facts_of.state in ("X", "Z"):
            return False
        return facts_of.start_time_seconds <= moment + START_SLACK_SECONDS

    return told


def lives_elsewhere(facts: DaemonFacts) -> bool:
    """Whether a daemon numbers processes otherwise than /proc here does.

    Its NSpid line then has more than one number; one that holds the lock and is seen by nobody
    (the lock names process 0 then) lives in a PID namespace that is closed to us.
    """
    if facts.process is not None:
        return len(facts.process.namespace_pids) > 1
    return facts.lock_holder_pid == 0


def daemon_alive(facts: DaemonFacts) -> bool | None:
    """Whether the control daemon's process is there; None when neither /proc nor its lock tells."""
    if facts.process is not None:
        return True
    if facts.lock_tested:
        return facts.lock_holder_pid is not None
    return None

"""A log directory, a clock, and the tails that follow it."""

import os
from pathlib import Path

from mps_exporter.observations import DaemonFacts, LogChunk, LogsObservation, LogState
from mps_exporter.sources.log_follower import LogFollower
from testing.mps_logs import EIGHT, script

PIPE = "/tmp/nvidia-mps"


def own_logs(pipe_directory: str, folder: Path) -> DaemonFacts:
    """Return a daemon whose logs the test itself writes."""
    return DaemonFacts(pipe_directory, str(folder), log_owners=(os.geteuid(),))


def poll_all(follower: LogFollower, *daemons: DaemonFacts) -> LogsObservation:
    """Read what the logs of these daemons gained, and close those of all others."""
    at = follower.clock()
    for gone in follower._daemons.keys() - {daemon.pipe_directory for daemon in daemons}:
        follower.forget(gone)
    parts = [follower.read_daemon(daemon) for daemon in daemons]
    chunks = tuple(chunk for part in parts for chunk in part.chunks)
    return LogsObservation(at, chunks, tuple(state for part in parts for state in part.states))


class LogFolder:
    """The logs of one daemon, written and followed by a test."""

    def __init__(self, folder: Path, now: float = EIGHT + 3600.0) -> None:
        self.folder = folder
        self.now = now
        self.tails = LogFollower(clock=lambda: self.now)

    def write(self, log: str, data: bytes | str, *, mtime: float | None = None) -> None:
        """Append lines (see mps_logs.script) or bytes to a log."""
        text = data if isinstance(data, bytes) else script(data)[log]  # type: ignore[index]
        with (self.folder / f"{log}.log").open("ab") as file:
            file.write(text)
        moment = self.now if mtime is None else mtime
        os.utime(self.folder / f"{log}.log", (moment, moment))

    def poll(self) -> LogsObservation:
        """Poll the logs 0.2 s later."""
        self.now += 0.2
        return poll_all(self.tails, own_logs(PIPE, self.folder))

    def chunks(self, log: str) -> list[LogChunk]:
        """Return the chunks of a log in one poll."""
        return [chunk for chunk in self.poll().chunks if chunk.log == log]

    def data(self, log: str) -> bytes:
        """Return the data of a log in one poll."""
        return b"".join(chunk.data for chunk in self.chunks(log))

    def read(self, log: str) -> list[LogChunk]:
        """Return the chunks with data of several polls."""
        return [chunk for _ in range(6) for chunk in self.chunks(log) if chunk.data]


def state(observation: LogsObservation, log: str) -> LogState:
    (found,) = [one for one in observation.states if one.log == log]
    return found

"""No text tells an operator to end a healthy process, at any time of any recording.

Healthy are: a client with a context that no fault has hit, a process that waits in the queue, and
the server and the daemon of such a client. Checked are the page, the status API, the doctor, the
doctor of each process, and the alerts, every two seconds of a recording and at each new log data.

A fault lasts some milliseconds, and most recordings read its end together with its beginning. So
a state in which a client is torn down is also checked with its server still in FAULT. The page,
the API and the doctor also get each state with an unhealthy daemon or unhealthy servers: what the
control tool reports is not always in the logs.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mps_exporter.findings import findings, recent_incidents
from mps_exporter.observations import LogsObservation
from mps_exporter.snapshot import Client, ControlState, Server, Snapshot
from mps_exporter.sources.recording import read_recording
from testing.outputs import ended_among, ended_pids, texts_of, texts_of_findings, texts_of_processes
from testing.page import text_of
from testing.player import RECORDINGS, Player
from testing.promtool import fired, page_of

STEP_SECONDS = 2.0
SCRAPE = 120.0
"""The rules' seconds between two moments: a wait of seconds is one of minutes for them."""


@dataclass(frozen=True)
class Told:
    """A text, and the moment of the recording at which it was given."""

    number: int
    source: str
    text: str


async def moments_of(file: Path) -> list[Snapshot]:
    """What the exporter sees at each moment."""
    recording = read_recording(file)
    start, end = recording.header.started_at, recording.ended_at
    news = {
        one.at + 0.001
        for one in recording.observations
        if isinstance(one, LogsObservation) and any(chunk.data for chunk in one.chunks)
    }
    seconds = {start + step * STEP_SECONDS for step in range(1, int(end - start) + 1)}
    player, found = Player(recording), []
    for moment in sorted(one for one in news | seconds if one <= end):
        snapshot = (await player.to(moment)).snapshot
        found.append(snapshot)
        held = in_fault(snapshot)
        if held != snapshot:
            found.append(held)
    return found


def in_fault(snapshot: Snapshot, *, unknowns: bool = False) -> Snapshot:
    """The same, with each server in FAULT that has a torn down client (unknowns: any client)."""

    def failed(server: Server) -> Server:
        hit = any(unknowns or client.state == "torn_down" for client in server.clients)
        return replace(server, state="FAULT") if hit else server

    return replace(
        snapshot,
        daemons=tuple(
            replace(daemon, servers=tuple(map(failed, daemon.servers)))
            for daemon in snapshot.daemons
        ),
    )


def worse(snapshot: Snapshot) -> Iterator[Snapshot]:
    """What else the control tool may report of these daemons and servers."""
    yield in_fault(snapshot, unknowns=True)
    states: tuple[ControlState, ...] = ("unresponsive", "draining", "refused")
    for state in states:
        yield replace(
            snapshot, daemons=tuple(replace(one, state=state) for one in snapshot.daemons)
        )


def shape_of(snapshot: Snapshot) -> object:
    """Return all that texts depend on, except ages."""
    found = (*findings(snapshot), *recent_incidents(snapshot))
    clients = [
        (server.pid, server.state, client.pid, client.state, sum(client.contexts.values()))
        for daemon in snapshot.daemons
        for server in daemon.servers
        for client in server.clients
    ]
    return [(one.advice.name, one.daemon, one.gpu) for one in found], clients


def told_by_programs(snapshots: Sequence[Snapshot]) -> Iterator[Told]:
    """Yield the texts of page, API and doctor for each state of a daemon, and for worse states."""
    last: dict[str, object] = {}
    for number, snapshot in enumerate(snapshots):
        for daemon in snapshot.daemons:
            alone = replace(snapshot, daemons=(daemon,))
            if (shape := shape_of(alone)) == last.get(daemon.pipe_directory):
                continue
            last[daemon.pipe_directory] = shape
            yield from (Told(number, *told) for told in texts_of(alone))
            for seen in worse(alone):
                # Only what differs in a worse state, which is less work.
                worst = (*texts_of_findings(seen), *texts_of_processes(seen))
                yield from (Told(number, *told) for told in worst)


def is_healthy(client: Client) -> bool:
    return client.state in ("active", None) and sum(client.contexts.values()) > 0


def healthy_pids(snapshot: Snapshot) -> tuple[set[int], set[int]]:
    """Healthy clients and waiting processes; their servers and daemons."""
    clients: set[int] = set()
    hosts: set[int | None] = set()
    for daemon in snapshot.daemons:
        clients |= {wait.pid for wait in daemon.waits if not wait.dead}
        for server in daemon.servers:
            if server.ghost:  # who hangs on it is lost with it
                clients -= {client.pid for client in server.clients}
            if working := {client.pid for client in server.clients if is_healthy(client)}:
                clients |= working
                hosts |= {server.pid, daemon.pid}
    return clients - {0}, {pid for pid in hosts if pid}


def pages_of(snapshots: list[Snapshot]) -> list[dict[str, str]]:
    """What a scrape of each moment shows: series -> value."""
    times = [snapshot.taken_at for snapshot in snapshots]

    def wall(at: float) -> float:
        return SCRAPE * bisect_right(times, at)

    return [page_of(text_of(snapshot, wall=wall)) for snapshot in snapshots]


def alerts_told(folder: Path, pages: list[dict[str, str]]) -> Iterator[Told]:
    """The descriptions of the alerts that fire at each moment, without their waiting times."""
    for at, labels, texts in fired(folder, "gpu01", pages, SCRAPE, waiting=False):
        yield Told(round(at / SCRAPE) - 1, labels["alertname"], texts["description"])


def mistakes(told: Iterable[Told], snapshots: Sequence[Snapshot]) -> list[str]:
    """Healthy clients that a text ends, and servers and daemons of such that it ends silently."""
    healthy = [healthy_pids(snapshot) for snapshot in snapshots]
    found = set()
    for one in told:
        clients, hosts = healthy[one.number]
        for pid, sentence in ended_among(clients | hosts, one.text):
            if pid in clients or "lost" not in sentence:
                found.add(f"{one.source} ends {pid}: {sentence}")
    return sorted(found)


FILES = sorted(RECORDINGS.glob("*.rec.gz"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
async def test_nothing_ends_a_healthy_process(file: Path, tmp_path: Path) -> None:
    """Page, API, doctor, and alerts."""
    snapshots = await moments_of(file)
    assert mistakes(told_by_programs(snapshots), snapshots) == []
    assert mistakes(alerts_told(tmp_path, pages_of(snapshots)), snapshots) == []


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        ("End the remaining clients (kill 590 591).", {590, 591}),
        (
            "Still connected: PID 590 (train), PID 591. First: end these clients with SIGTERM.",
            {590, 591},
        ),
        ("ps -o args= -p 461 | grep nvidia-cuda-mps-server && kill -9 461", {461}),
        ("echo terminate_client 442 591 | nvidia-cuda-mps-control", {442, 591}),
        ("docker kill 590\nscancel 77", {590, 77}),
        ("What still hangs must be ended (kill 591).", {591}),
        ("Do not kill process 663: a dead entry in the queue hangs the daemon.", set()),
        ("kill -CONT 590", set()),
        ("Process 590 ended with GPU work in flight; 591 was killed (error 700).", set()),
        ("Ask alice when her programs 590 and 591 end.", set()),
    ],
)
def test_what_a_text_ends(text: str, pids: set[int]) -> None:
    assert {pid for pid, _ in ended_pids(text)} == pids

"""The minutes before an incident: what is kept of them, and its bounds."""

import asyncio
import errno
import gzip
import json
import pickle
import re
import secrets
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mps_exporter.backend import advance
from mps_exporter.collector import Collector
from mps_exporter.commands.record import record
from mps_exporter.flags import Settings, StartError
from mps_exporter.hindsight import (
    AFTER_SECONDS,
    ENCODE_INTERVAL_SECONDS,
    KEPT_SECONDS,
    MAX_FILES,
    Hindsight,
    latest_recording,
)
from mps_exporter.limits_without_a_flag import MAX_CONTROL_OUTPUT_BYTES
from mps_exporter.observations import (
    AddressRanges,
    CgroupMemory,
    ControlObservation,
    DaemonFacts,
    Exchange,
    KernelObservation,
    LogChunk,
    LogsObservation,
    LogState,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.sources.anonymiser import _KNOWN_VARIABLES
from mps_exporter.sources.recording import Recording, RecordingError, read_recording
from mps_exporter.sources.replay_host import ReplayHost
from testing.player import RECORDINGS
from testing.waiting import until

PIPE = "/tmp/nvidia-mps"
FAULT = read_recording(RECORDINGS / "fault.rec.gz")


class Kept:
    """A ring that was given the observations of a recording, and its clock."""

    def __init__(self, directory: Path | None = None, **settings: Any) -> None:
        self.now = 0.0
        kept_in = str(directory) if directory else None
        settings = {"record_names": True, "record_directory": kept_in} | settings
        self.ring = Hindsight(Settings(**settings), lambda: self.now, "/tmp/alice".__eq__)

    def observe(self, *observations: Observation) -> None:
        for one in observations:
            self.now = max(self.now, one.at)
            self.ring.add(one)

    def encode(self, *observations: Observation) -> None:
        self.observe(*observations)
        waiting, self.ring._waiting = self.ring._waiting, []
        self.ring._encode(waiting)


def played(recording: Recording) -> Snapshot:
    host = ReplayHost(recording)
    collector = Collector(host, Settings())
    return asyncio.run(advance(host, collector, recording.duration_seconds))


def later(recording: Recording, seconds: float) -> list[Observation]:
    """Return the observations of a recording at another time, without logs and exits."""
    return [
        replace(one, at=one.at + seconds)
        for one in recording.observations
        if type(one).__name__ in ("NvmlObservation", "ProcfsObservation", "ControlObservation")
    ]


def shown(snapshot: Snapshot) -> list[object]:
    """What the logs and exits show; the time of holding ends with the last observation."""
    return [
        (
            one.pipe_directory,
            {
                name: values
                for name, values in (one.counters or {}).items()
                if name != "mps_uid_holding_seconds_total"
            },
            one.incidents,
            [server.clients for server in one.servers],
        )
        for one in snapshot.daemons
    ]


async def recording_at(kept: Kept, at: float, path: Path) -> Recording:
    data = await kept.ring.recording(at)
    assert data is not None
    path.write_bytes(data)
    return read_recording(path)


@pytest.mark.parametrize("name", ["fault", "server-killed", "deaf-server", "daemon-killed"])
def test_a_replay_shows_the_incident_as_it_was(name: str, tmp_path: Path) -> None:
    original = read_recording(RECORDINGS / f"{name}.rec.gz")
    kept = Kept()
    for one in original.observations:
        kept.encode(one)
    found = asyncio.run(recording_at(kept, original.ended_at, tmp_path / "found.rec.gz"))
    assert shown(played(found)) == shown(played(original))


def test_the_state_from_before_the_kept_minutes_is_rebuilt(tmp_path: Path) -> None:
    kept = Kept()
    kept.encode(*FAULT.observations)
    step = FAULT.duration_seconds + 1
    for number in range(1, int(1.5 * KEPT_SECONDS / step) + 1):
        kept.encode(*later(FAULT, number * step))
    found = asyncio.run(recording_at(kept, kept.now, tmp_path / "found.rec.gz"))
    length = found.duration_seconds
    assert KEPT_SECONDS <= length <= KEPT_SECONDS + AFTER_SECONDS + step
    assert not any(one.at > found.ended_at for one in found.observations)
    incidents = [one.incidents for one in played(found).daemons]
    assert incidents == [one.incidents for one in played(FAULT).daemons]


def test_no_source_has_a_hole(tmp_path: Path) -> None:
    kept = Kept()
    readings = [one for one in FAULT.observations if type(one).__name__ == "NvmlObservation"]
    times = [FAULT.header.started_at + second for second in range(400)]
    kept.encode(*(replace(readings[i % 2], at=at) for i, at in enumerate(times)))
    found = asyncio.run(recording_at(kept, kept.now, tmp_path / "found.rec.gz"))
    gaps = [b.at - a.at for a, b in pairwise(found.observations)]
    assert max(gaps) <= 2 * ENCODE_INTERVAL_SECONDS


def test_the_memory_is_bounded() -> None:
    kept = Kept()
    kept.ring._max_bytes = 64 << 10
    for number in range(200):
        kept.encode(*(replace(one, at=one.at + 40 * number) for one in FAULT.observations))
        assert kept.ring._size <= 64 << 10


def test_an_incident_is_written_with_the_minute_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mps_exporter.hindsight.ENCODE_INTERVAL_SECONDS", 0.01)
    directory = tmp_path / "incidents"
    kept = Kept(directory)
    kept.observe(*FAULT.observations)
    incident = Incident(kept.now, "fault")

    async def run() -> None:
        task = asyncio.create_task(kept.ring.run())
        kept.ring.note(replace(incident, counted=False))
        kept.ring.note(replace(incident, kind="wait_started"))
        kept.now += AFTER_SECONDS
        await asyncio.sleep(0.1)
        assert not directory.exists()
        kept.ring.note(replace(incident, at=kept.now))
        await asyncio.sleep(0.1)
        assert not directory.exists()
        kept.now += AFTER_SECONDS
        while not list(directory.glob("incident-*.rec.gz")):  # not the unfinished file
            await asyncio.sleep(0.01)
        task.cancel()
        [path] = directory.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert await kept.ring.recording(kept.now - AFTER_SECONDS) == path.read_bytes()
        assert await kept.ring.recording(kept.now - KEPT_SECONDS) is None
        for ring in (kept.ring, Kept(directory).ring):  # the other: after a restart
            assert await ring.recording(None) == path.read_bytes()
        assert await Kept().ring.recording(None) is None
        assert await asyncio.to_thread(latest_recording, str(directory)) == path

    asyncio.run(run())


def test_the_latest_recording_is_of_the_latest_incident_that_is_recorded(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.encode(*FAULT.observations)
    kept.ring._write(tmp_path, Incident(kept.now - KEPT_SECONDS, "ghost"))
    kept.ring.note(Incident(kept.now, "fault"))
    kept.ring.note(Incident(kept.now - KEPT_SECONDS, "wait_started"))
    [written] = tmp_path.iterdir()
    found = asyncio.run(kept.ring.recording(None))
    assert found not in (None, written.read_bytes())


def test_one_command_makes_a_bug_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = Kept(tmp_path, record_names=False, record_memory=4, path_procfs="/home/x/proc")
    report = tmp_path / "report.rec.gz"
    kept.encode(*FAULT.observations)
    settings = Settings(
        record_file=str(report), record_incident="latest", record_directory=str(tmp_path)
    )
    with pytest.raises(StartError, match="name one that the page gave"):
        asyncio.run(record(settings))
    kept.ring._write(tmp_path, Incident(kept.now, "fault"))
    assert asyncio.run(record(settings)) == 0
    text = capfd.readouterr().err
    assert "without names: the recording of an incident" in text
    assert "doctor's findings\n(daemon_quit, fault)" in text
    assert text.endswith("github.com/mps-exporter/mps-exporter/issues\n")
    flags = ("path.procfs=set", "record.memory=4", "record.directory=set")
    assert read_recording(report).header.flags == flags
    added = json.loads(gzip.decompress(report.read_bytes()).splitlines()[-1])
    assert added["doctor"]["recent"][0]["name"] == "fault"
    cut = tmp_path / "cut.rec.gz"
    cut.write_bytes((RECORDINGS / "fault.rec.gz").read_bytes()[:-2000])
    with pytest.raises(RecordingError):
        asyncio.run(record(replace(settings, record_incident=str(cut))))
    assert not report.exists()


def test_the_directory_is_bounded_and_a_failure_loses_only_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.encode(*FAULT.observations)
    (tmp_path / "of somebody else").touch()
    for number in range(MAX_FILES + 3):
        kept.ring._write(tmp_path, Incident(kept.now + number, "ghost"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == MAX_FILES + 1
    assert "of somebody else" in names
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("mps_exporter.hindsight.create_private", side_effect=full):
        kept.ring._write(tmp_path, Incident(kept.now + MAX_FILES, "fault"))
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr("mps_exporter.hindsight.MAX_DIRECTORY_BYTES", 3 * size + 99)
    kept.ring._write(tmp_path, Incident(kept.now + MAX_FILES, "fault"))
    assert len(list(tmp_path.glob("*.rec.gz"))) == 3
    kept.ring._write(tmp_path / "of somebody else", Incident(kept.now, "ghost"))
    assert "cannot write the recording of an incident" in caplog.text


def test_a_failure_ends_neither_the_exporter_nor_later_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mps_exporter.hindsight.ENCODE_INTERVAL_SECONDS", 0.01)
    kept = Kept(tmp_path)
    kept.ring.note(Incident(-AFTER_SECONDS, "fault"))  # nothing was observed yet
    encode = kept.ring._encoder.observation
    monkeypatch.setattr(kept.ring._encoder, "observation", lambda _: 1 / 0)

    async def run() -> None:
        task = asyncio.create_task(kept.ring.run())
        kept.observe(FAULT.observations[0])
        await until(lambda: "cannot record" in caplog.text)
        monkeypatch.setattr(kept.ring._encoder, "observation", encode)
        await until(lambda: "recorded again" in caplog.text)
        kept.observe(*FAULT.observations[1:])
        await until(lambda: bool(kept.ring._recent))
        task.cancel()

    caplog.set_level("INFO")
    asyncio.run(run())
    assert caplog.text.count("cannot record") == 1


@pytest.mark.parametrize(("names", "step"), [(True, 0.1), (False, 0.1), (True, 15.0)])
def test_an_ordinary_users_log_drives_out_nothing_of_others(
    names: bool, step: float, tmp_path: Path
) -> None:
    """Random names fill the memory, or in time that of old lines; replaced, the table of names."""
    kept = Kept(record_names=names, record_memory=1)
    kept.encode(*FAULT.observations)
    start = "[2026-01-01 00:00:00.000 Server 1] MPS Server failed to create/open SHM segment"
    for _ in range(60):
        lines = "".join(f"{start} /tmp/{secrets.token_hex(16)}\n" for _ in range(1000))
        chunk = LogChunk(kept.now + step, "/tmp/alice", "server", lines.encode())
        kept.encode(LogsObservation(kept.now + step, (chunk,)))
    kept.encode(*later(FAULT, kept.now - FAULT.header.started_at))
    assert kept.ring._users_size > 50_000, "the flood is kept, too"
    found = asyncio.run(recording_at(kept, kept.now, tmp_path / "found.rec.gz"))
    [daemon] = played(found).daemons
    incidents = [(one.at, one.kind, one.pids) for one in daemon.incidents]
    expected = played(FAULT).daemons[0].incidents
    assert incidents == [(one.at, one.kind, one.pids) for one in expected]
    assert step > 1 or found.header.started_at == FAULT.observations[0].at


@pytest.mark.parametrize("names", [True, False])
def test_what_users_choose_about_their_processes_drives_out_nothing(
    names: bool, tmp_path: Path
) -> None:
    """Each process has other variables, folders, groups and memory in each second."""
    kept = Kept(record_names=names, record_memory=1)
    kept.encode(*FAULT.observations)
    found = [one for one in FAULT.observations if isinstance(one, ProcfsObservation)]
    seen = [one for one in found if one.daemons and one.processes][-1]
    [node] = seen.daemons
    for _ in range(60):
        kept.now += 1
        alice = [hostile_process(pid) for pid in range(50_000, 50_024)]
        bob = ProcessFacts(60_000, 1.0, 2002, "bob", "nvidia-cuda-mps", "S")
        his = partial(DaemonFacts, process=bob, limited=True)
        daemons = (node, *(his(f"/tmp/{number}", f"/{noise(4000)}") for number in range(16)))
        kept.observe(
            replace(
                seen,
                at=kept.now,
                daemons=daemons,
                processes={**seen.processes, **{one.pid: one for one in alice}},
                gone=(int(kept.now),),
                cgroup_memory=tuple(CgroupMemory(f"/{noise(400)}", "0:1:0") for _ in range(99)),
            )
        )
        ranges = tuple((secrets.randbits(47), secrets.randbits(47)) for _ in range(20 * 512))
        hers_only = (AddressRanges(kept.now, 50_000, 2001, ranges),)
        kept.observe(KernelObservation(kept.now, readable=True, ranges=hers_only))
        log = partial(LogState, "/tmp/alice", "control", readable=True)
        states = tuple(log(path=f"/{noise(4000)}") for _ in range(32))
        kept.encode(LogsObservation(kept.now, (), states))
        assert kept.ring._size <= 1 << 20
        assert kept.ring._users_size <= 1 << 18
    made = asyncio.run(recording_at(kept, kept.now, tmp_path / "found.rec.gz"))
    assert made.header.started_at == FAULT.observations[0].at
    assert kept.ring._users_size > 50_000, "the flood is kept, too"
    last = [one for one in made.observations if isinstance(one, ProcfsObservation)][-1]
    assert last.at == kept.now, "the node's part is kept without the users' part"
    assert (node in last.daemons) == names
    assert last.processes.keys() >= seen.processes.keys()
    for pid, facts in seen.processes.items():
        assert {*(last.processes[pid].mps_environment or ())} == {*(facts.mps_environment or ())}


def noise(length: int) -> str:
    return re.sub("(.{8})", r"\1/", secrets.token_hex(length // 2))


def hostile_process(pid: int) -> ProcessFacts:
    variables = {name: noise(400) for name in sorted(_KNOWN_VARIABLES)}
    return ProcessFacts(
        pid, 1.0, 2001, "alice", noise(800), "S", cgroup=noise(400), mps_environment=variables
    )


def test_sources_that_users_choose_do_not_grow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mps_exporter.hindsight.MAX_STREAMS", 10)
    kept = Kept(record_names=False)
    ring = kept.ring
    for number in range(200):
        at = number * KEPT_SECONDS / 50
        answer = ControlObservation(at, f"/home/user-{number}/mps", "probe", Outcome.OK)
        kept.observe(answer)
        asyncio.run(ring._step())
        assert len(ring._kept) <= 11
        assert len(ring._old[0]) <= 10
        assert len(ring._encoder._previous) <= 11
    assert ring._old[0]


@pytest.mark.parametrize(("number", "unit"), [(12, ""), (200, " ")])
def test_replies_of_users_daemons_do_not_grow_it(number: int, unit: str) -> None:
    """Each is of another daemon, and half as long as the control tool's output may be."""
    kept = Kept(record_memory=4)
    kept.ring._is_limited = lambda daemon: daemon != PIPE
    kept.observe(ControlObservation(0.0, PIPE, "probe", Outcome.OK))
    length = MAX_CONTROL_OUTPUT_BYTES // 2
    for one in range(number):
        text = f"{one}{unit * length}" if unit else noise(length)
        reply = Exchange(("ps",), Outcome.OK, text)
        pipe = f"/tmp/alice/{one}"
        kept.encode(ControlObservation(kept.now, pipe, "probe", Outcome.OK, (reply,)))
        kept.now += 4 * KEPT_SECONDS / number
    assert 0 < sum(line.size for line in kept.ring._old[1].values()) <= 4 << 17
    assert [*kept.ring._old[0]] == [f"control probe {PIPE}"]
    assert len(pickle.dumps(kept.ring._encoder._previous)) < 20_000
    assert len(gzip.decompress(kept.ring._recording("an incident"))) < 48 << 20


async def test_readers_of_recordings_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, inside, most = Kept(), threading.Semaphore(0), 0

    def find(_at: float | None) -> None:
        nonlocal most
        inside.release()
        time.sleep(0.001)
        most = max(most, inside._value)
        inside.acquire()

    monkeypatch.setattr(kept.ring, "_find", find)
    await asyncio.gather(*(kept.ring.recording(None) for _ in range(20)))
    assert most == 1

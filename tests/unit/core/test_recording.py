import errno
import gzip
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    Exchange,
    GpuObservation,
    LogChunk,
    LogsObservation,
    LogState,
    NvmlObservation,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import RecordingHeader
from mps_exporter.sources.recording import RecordingError, RecordingWriter, read_recording

UUID = "GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893"
HEADER = RecordingHeader(
    scenario="a test",
    machine="nothing",
    driver_version="580",
    recorded_at="2026-11-21T00:00:00Z",
    started_at=1000.0,
    exporter_version="0",
    anonymised=False,
)


def written(path: Path, *seen: Observation, header: RecordingHeader = HEADER) -> Path:
    writer = RecordingWriter(path, header)
    for observation in seen:
        writer.add(observation)
    writer.close()
    return path


def chunk(at: float, data: bytes, log: str = "control") -> LogChunk:
    return LogChunk(at, "/p", log, data, complete_until=at, utc_offset_seconds=3600.0)  # type: ignore[arg-type]


STATES = (LogState("/p", "control", "/l/control.log", readable=True, size_bytes=5),)


SERVER = b"[2026-11-21 08:55:42.578 Server   640] "
SOCKET = b"[2026-11-21 08:55:42.578 Control   630] Starting control daemon using socket /"


@given(st.binary(max_size=50).filter(lambda data: not set(data) & set(b"\r\n")))
@settings(max_examples=60, deadline=None)
def test_bytes_of_known_lines_survive(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    seen = LogsObservation(1001.0, (chunk(1001.0, SOCKET + data + b"\xff\n"),), STATES)
    recording = read_recording(written(tmp_path_factory.mktemp("r") / "x.rec.gz", seen))
    assert recording.observations == (seen,)


def test_other_lines_are_not_recorded(tmp_path: Path) -> None:
    """A log may lead to any file of the host; half a line waits for its other half."""
    secret = b"root:$6$salt$hash:20228:0:99999:7:::\n"
    seen = [
        LogsObservation(1001.0, (chunk(1001.0, secret + SERVER + b"Exi"),), STATES),
        LogsObservation(1002.0, (chunk(1002.0, b"ting\n" + SERVER + secret),), STATES),
    ]
    path = written(tmp_path / "x.rec.gz", *seen)
    assert "root:" not in gzip.decompress(path.read_bytes()).decode()
    first, second = [
        one for one in read_recording(path).observations if isinstance(one, LogsObservation)
    ]
    assert first.chunks[0].data.startswith(b"(withheld: 36 bytes")
    assert second.chunks[0].data.startswith(SERVER + b"Exiting\n" + SERVER + b"(withheld: 36 b")


def test_repeated_observations_are_not_written(tmp_path: Path) -> None:
    first = NvmlObservation(1001.0, Outcome.OK)
    again = NvmlObservation(1002.0, Outcome.OK)
    silent = LogsObservation(1003.0, (), STATES)
    recording = read_recording(written(tmp_path / "x", first, again, silent, silent))
    assert [type(one).__name__ for one in recording.observations] == [
        "NvmlObservation",
        "LogsObservation",
    ]
    assert recording.ended_at == 1003.0


def test_an_anonymised_recording_contains_no_user_name(tmp_path: Path) -> None:
    """docs/recordings.md and record --help list what it keeps."""
    home = "/nfs/staff/Alice Liddell"
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": "alice/mps",
        "CUDA_MPS_LOG_DIRECTORY": f"{home}/log",
        "CUDA_MPS_TOKEN": "of alice",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
    }
    facts = ProcessFacts(
        7,
        1.0,
        1001,
        "alice",
        "secret-project",
        cgroup="0::/kept/group",
        mps_environment=environment,
        tracer="9 (secret-debugger)",
    )
    daemon = DaemonFacts(f"{home}/mps", f"{home}/log", root="/proc/7/root", process=facts)
    server = ProcessFacts(8, 1.0, 0, "root", "nvidia-cuda-mps-server")
    line = SERVER + f"Device NVIDIA H200 (uuid {UUID}) is associated\n".encode()
    line += f"[2026-11-21 08:55:42.578 Control 630] Device {UUID.upper()} of jane\n".encode()
    line += SOCKET[:-1] + f"{home}/mps/control\n".encode()
    line += SERVER + b"Using log directory: /u/alice liddell\n"
    state = LogState(f"{home}/mps", "control", f"{home}/log/control.log", readable=False)
    error = f"{home}/mps/control: the socket cannot be reached, as /Users/alice/x"
    path = written(
        tmp_path / "x",
        ProcfsObservation(1001.0, (daemon,), {7: facts, 8: server}, error=f"because of {error}"),
        NvmlObservation(
            1002.0, Outcome.OK, gpus=(GpuObservation(0, UUID, serial="1652922001234"),)
        ),
        LogsObservation(1003.0, (chunk(1003.0, line),), (state,)),
        ControlObservation(
            1004.0,
            f"{home}/mps",
            "probe",
            Outcome.OK,
            (Exchange(("ps",), Outcome.OK, f"7 1 8 {UUID[:22]} 4026531836", "/root/.alice"),),
            error=error,
        ),
        header=replace(HEADER, anonymised=True),
    )
    text = gzip.decompress(path.read_bytes()).decode()
    secrets = "alice", "liddell", "staff", "secret", "1652922001234", "5e4dfbf1", "c801", "token"
    for secret in secrets:
        assert secret not in text.lower()
    for kept in ("0::/kept/group", "the socket cannot be reached", "/proc/7/root"):
        assert kept in text
    procfs, nvml, logs, _ = read_recording(path).observations
    assert isinstance(procfs, ProcfsObservation)
    process = procfs.processes[7]
    assert process.user == "user-1001"
    assert re.fullmatch("program-[0-9a-f]{8}", process.name)
    assert re.fullmatch(r"9 \(program-[0-9a-f]{8}\)", process.tracer)
    assert process.mps_environment is not None
    assert process.mps_environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    (shown,) = procfs.daemons
    assert shown.pipe_directory.endswith("/mps")
    assert shown.log_directory == process.mps_environment["CUDA_MPS_LOG_DIRECTORY"]
    assert procfs.processes[8].name == "nvidia-cuda-mps-server"
    assert isinstance(nvml, NvmlObservation)
    assert isinstance(logs, LogsObservation)
    data = logs.chunks[0].data  # the same thing, the same name
    assert nvml.gpus[0].uuid.encode() in data
    assert f"socket {shown.pipe_directory}/control\n".encode() in data


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "No such file"),
        ("", "Is a directory"),
        ("/dev/zero", "no regular file"),
        ("empty", "is no recording"),
        ("text", "cannot read recording"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not gzip")
    with pytest.raises(RecordingError, match=reason):
        read_recording(tmp_path / name)


def test_other_users_cannot_read_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"an older recording, longer than the new one" * 100)
    path.chmod(0o644)
    before = os.umask(0)
    try:
        for one in (path, tmp_path / "new"):
            written(one, NvmlObservation(1001.0, Outcome.OK))
            assert one.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert len(read_recording(path).observations) == 1  # and nothing is left of the older one


def test_a_fifo_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for name in ("x", "missing/x"):
        with pytest.raises(RecordingError, match="cannot write"):
            written(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_nothing_of_an_ordinary_user_is_recorded_into(tmp_path: Path, kind: str) -> None:
    """What she puts into /tmp, where root is known to record to."""
    path, roots = tmp_path / "x", tmp_path / "of root"
    roots.write_text("as it was")
    if kind == "link":
        path.symlink_to(roots)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"")
    os.chown(path, 2001, 2001, follow_symlinks=False)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(RecordingError, match="it belongs to user 2001"):
        written(path)
    assert os.read(reader, 100) == (b"as it was" if kind == "link" else b"")
    os.close(reader)


def test_an_older_recording_stays_until_there_is_something_to_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "x", NvmlObservation(1001.0, Outcome.OK))
    monkeypatch.setattr("mps_exporter.sources.recording.os.write", full)
    with pytest.raises(RecordingError, match=r"cannot write .*: No space left on device"):
        RecordingWriter(path, HEADER)
    assert len(read_recording(path).observations) == 1


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    writer = RecordingWriter(path, HEADER)
    writer.add(NvmlObservation(1001.0, Outcome.OK))
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr("mps_exporter.sources.recording.os.write", full)
        writer.add(NvmlObservation(1002.0, Outcome.OK, driver_version="1"))
        writer.flush()
        assert writer.failure is not None
        assert writer.failure.errno == errno.ENOSPC
    writer.add(NvmlObservation(1003.0, Outcome.OK, driver_version="2"))
    writer.close()  # the disk has room again: no hole may follow
    assert [one.at for one in read_recording(path).observations] == [1001.0]


def test_a_recording_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    seen = [NvmlObservation(1000.0 + n, Outcome.OK, driver_version=str(n)) for n in range(2000)]
    path = written(tmp_path / "x", *seen)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    got = read_recording(path).observations
    assert 0 < len(got) < len(seen)
    assert list(got) == seen[: len(got)]


# ------------------------------------------------------------------------- untrusted files

LINE = (
    '{"format":"mps-exporter-recording","version":2,"scenario":"","machine":"","driver_version":"",'
    '"recorded_at":"","started_at":%s,"exporter_version":"","anonymised":false}\n'
)
FIRST = LINE % "1000"
LOOK = '{"kind":"procfs","observation":{"at":%s}}\n'
END = '{"kind":"end","at":%s}\n'


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x"
    gpu = f'{{"index":0,"uuid":"{UUID}","coolant":"water"}}'
    line = f'{{"kind":"nvml","observation":{{"at":1001,"outcome":"ok","gpus":[{gpu}],"new":1}}}}\n'
    text = FIRST.replace("{", '{"weather":"fine",') + line + END % "1001"
    path.write_bytes(gzip.compress(text.encode()))
    seen = NvmlObservation(1001.0, Outcome.OK, gpus=(GpuObservation(0, UUID),))
    assert read_recording(path).observations == (seen,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": "else"}\n', "is no recording"),
        ("[1]\n", "is not an object"),
        (FIRST.replace("2", "99", 1), "version 99 of the format, this program reads version 2"),
        ('{"format": "mps-exporter-recording", "version": 2}\n', "incomplete"),
        ("{x\n", "line 1 is not JSON"),
        (FIRST, "holds no observation"),
        (FIRST + END % "1000", "holds no observation"),
        (LINE % "Infinity" + LOOK % "1000", "out of range"),
        (LINE % "-1" + LOOK % "1000", "started_at is no moment"),
        (LINE % "1e308" + LOOK % "1000", "out of range"),
        (LINE % "5000000000" + LOOK % "1000", "started_at is no moment"),
        (FIRST + LOOK % "1e18", "at is no moment"),
        (FIRST + LOOK % "1e400", "out of range"),
        (FIRST + LOOK % "NaN", "out of range"),
        (FIRST + LOOK % "4000000000", "is not of the 7 days"),
        (LINE % "4000000000" + LOOK % "1", "is not of the 7 days"),
        (FIRST + LOOK % "1001" + END % "4000000000", "is not of the 7 days"),
        (FIRST + LOOK % "1001" + '{"kind":"end"}\n', "no observation: KeyError"),
        (FIRST + LOOK % "1001" + END % '"x"', "no observation: ValueError"),
        (FIRST + LOOK % "1001" + END % "null", "no observation: TypeError"),
        (FIRST + LOOK % "1001" + END % "[]", "no observation: TypeError"),
        (FIRST + "{}\n", "line 2 is no observation"),
    ],
)
def test_a_hostile_recording_is_refused_with_one_error(
    tmp_path: Path, text: str, reason: str
) -> None:
    check_refusal(tmp_path, text, reason)


def check_refusal(folder: Path, text: str, reason: str) -> None:
    path = folder / "evil.rec.gz"
    path.write_bytes(gzip.compress(text.encode(), 1))
    with pytest.raises(RecordingError) as refused:
        read_recording(path)
    assert reason in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_large_recording_is_refused_with_one_error(tmp_path: Path) -> None:
    check_refusal(tmp_path, FIRST + "[" * 100_000 + "\n", "nested too deeply")
    check_refusal(tmp_path, FIRST + '{"a":' * 100_000 + "\n", "nested too deeply")
    many = FIRST + '{"kind":[' + "[]," * 1_000_001 + "0]}\n"
    check_refusal(tmp_path, many, "line 2 is too large")
    check_refusal(tmp_path, FIRST + " " * (33 << 20) + "\n", "line 2 is too large")
    blanks = FIRST + (" " * (31 << 20) + END % "1000") * 5
    check_refusal(tmp_path, blanks, "holds no observation")


def test_the_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.rec.gz"
    look = LOOK % "1001"
    path.write_bytes(gzip.compress((FIRST + look * 100).encode()))
    assert len(read_recording(path).observations) == 100
    monkeypatch.setattr(policy, "MAX_RECORDING_BYTES", len(FIRST + look * 50))
    with pytest.raises(RecordingError, match="when unpacked"):
        read_recording(path)

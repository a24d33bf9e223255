"""What surrounds the program: signals, full disks, closed streams, terminals that go away."""

import gzip
import json
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.observations import ProcfsObservation
from mps_exporter.sources.recording import RecordingError, read_recording
from testing.commands import output_of
from testing.ports import free_port
from testing.waiting import PATIENCE_SECONDS, wait_for
from tests.unit.web.webconfigs import TLS, write_certificates

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "exporter" / "mps_exporter" / "recordings" / "tour.rec.gz"
PROGRAM = (sys.executable, "-m", "mps_exporter")
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run in a shell; $E is the program."""
    return output_of(
        "bash",
        "-c",
        command,
        cwd=ROOT,
        timeout=PATIENCE_SECONDS,
        env={**ENVIRONMENT, "E": " ".join(PROGRAM), "DEMO": str(DEMO)},
    )


@contextmanager
def started(*words: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    how = {"stderr": subprocess.PIPE, "env": ENVIRONMENT, **how}
    with subprocess.Popen([*PROGRAM, *words], text=True, cwd=ROOT, **how) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ends_well(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.wait(PATIENCE_SECONDS) == 0


@contextmanager
def terminal() -> Iterator[tuple[int, dict[str, Any]]]:
    """Open a terminal: the test's end, and the arguments that give a program the other end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    try:
        yield (
            ours,
            {
                **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
                "start_new_session": True,
                "env": {key: value for key, value in ENVIRONMENT.items() if key != "COLUMNS"},
            },
        )
    finally:
        os.close(theirs)
        with suppress(OSError):
            os.close(ours)


def until_printed(terminal: int, pattern: bytes) -> re.Match[bytes]:
    output = b""
    while not (found := re.search(pattern, output)):
        output += os.read(terminal, 65536)
    return found


def until_it_says(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if words in line:
            return output
    raise AssertionError(f"it ended with {process.wait()}:\n{output}")


# -------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("$E doctor --recording $DEMO | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("$E doctor --recording $DEMO >&-", 0, ""),
        ("$E doctor --recording $DEMO --json 2>&- >&-", 0, ""),
        ("$E doctor --recording $DEMO >/dev/full", 3, "write error: No space"),
        ("$E doctor --help >/dev/full", 3, "write error: No space"),
        ("$E explain 805 >/dev/full", 1, "write error: No space"),
        ("$E top </dev/null >/dev/full", 1, "write error: No space"),
        ("$E version >/dev/full", 1, "write error: No space"),
        ("$E doctor --recording /nonexistent", 3, "No such file"),
        ("$E doctor --recording $DEMO --at 100h", 3, "s after its start"),
        ("$E doctor --recording $DEMO --at 3s", 0, ""),
    ],
)
def test_the_statuses_are_those_of_the_help(command: str, status: int, words: str) -> None:
    done = run(command)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert words in done.stderr
    assert bool(words) == bool(done.stderr)


def test_colours_are_for_terminals_that_have_them() -> None:
    def coloured(**environment: str) -> bool:
        with terminal() as (ours, ends):
            command = [*PROGRAM, "doctor", f"--recording={DEMO}", "--at=1s"]
            env = {**ENVIRONMENT, "TERM": "xterm", **environment}
            subprocess.run(command, stdout=ends["stdout"], check=False, cwd=ROOT, env=env)
            return b"\x1b[" in os.read(ours, 65536)

    assert coloured()
    assert coloured(NO_COLOR="")  # as https://no-color.org has it
    assert not coloured(NO_COLOR="1")
    assert not coloured(TERM="dumb")


# -------------------------------------------------------------------------------- record


@contextmanager
def recording(path: Path, *words: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A recorder that has begun."""
    with started("record", str(path), "--duration=3600s", *words, **how) as process:

        def has_begun() -> bool:
            assert process.poll() is None, process.communicate()
            return path.exists() and has_seen_processes(path)

        wait_for(has_begun)
        yield process


def has_seen_processes(path: Path) -> bool:
    """Whether a recorder has written what /proc said."""
    with suppress(RecordingError):
        return any(isinstance(one, ProcfsObservation) for one in read_recording(path).observations)
    return False


@pytest.mark.parametrize("received", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_recording_that_is_ended_is_whole(tmp_path: Path, received: signal.Signals) -> None:
    """SIGTERM finds a recorder of nohup, which ignores SIGHUP."""
    path = tmp_path / "x.rec.gz"
    nohup = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    with recording(path, **(nohup if received == signal.SIGTERM else {})) as process:
        if received == signal.SIGTERM:
            status = Path(f"/proc/{process.pid}/status").read_text()
            ignored = re.search(r"^SigIgn:\t(\w+)$", status, re.MULTILINE)
            assert ignored is not None
            assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1
        process.send_signal(received)
        _, output = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "Recorded " in output
    assert '"kind":"end"' in gzip.decompress(path.read_bytes()).decode()


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.rec.gz"
    # Without coverage, which would run into the same limit with files of its own.
    plain = {key: value for key, value in ENVIRONMENT.items() if not key.startswith("COV")}
    with recording(path, env=plain) as process:
        size = path.stat().st_size + 1
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
        process.send_signal(signal.SIGTERM)  # so that it writes the end
        _, output = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert output.splitlines()[-1] == (
        f"mps-exporter: cannot write {path}: File too large; what was written until then can be "
        "read"
    )
    # No source is blamed for it. (One may fail for another reason: this is the machine's own /proc,
    # where other tests have daemons whose directories do not answer.)
    assert output.count("File too large") == 1
    assert "Traceback" not in output
    assert read_recording(path).header.scenario == "no description given"


# --------------------------------------------------------------------------------- serve


def test_a_daemon_goes_on_after_sighup(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (tmp_path / "web.yml").write_text("{}\n")
    flags = [f"--web.listen-address=unix:{path}", f"--web.config.file={tmp_path}/web.yml"]
    with started("serve", f"--replay={DEMO}", *flags) as process:
        until_it_says(process, "listening")
        (tmp_path / "web.yml").write_text("junk\n")
        process.send_signal(signal.SIGHUP)
        until_it_says(process, "SIGHUP: the web configuration is checked")
        until_it_says(process, "the web configuration cannot be used")  # without a request
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        ends_well(process)
    assert not path.exists()


def test_closing_the_terminal_leaves_no_process_running() -> None:
    words = ("demo", f"--web.listen-address=127.0.0.1:{free_port()}")
    with terminal() as (ours, ends), started(*words, **ends) as process:
        until_printed(ours, b"Ctrl-C")
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_the_announcement_names_what_is_listened_on(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    (tmp_path / "web.yml").write_text(TLS)
    flags = ["--web.listen-address=127.0.0.1:0", f"--web.config.file={tmp_path}/web.yml"]
    with started("demo", *flags) as process:
        output = until_it_says(process, "Ctrl-C")
    port = re.search(r"address=127\.0\.0\.1:(\d+)", output)
    assert port is not None, output
    assert f"Status page  https://127.0.0.1:{port[1]}/\n" in output
    with started("demo", f"--web.listen-address=unix:{tmp_path}/s") as process:
        output = until_it_says(process, "Ctrl-C")
    assert f"  Socket       {tmp_path}/s\n" in output
    assert "http://" not in output


def test_a_recording_of_one_moment_ends_at_once_and_moves_no_cursor(tmp_path: Path) -> None:
    """It has no length, so its loops follow each other; and its words go to the terminal."""
    path = tmp_path / "short.rec.gz"
    with gzip.open(DEMO, "rt") as recorded:
        header = json.loads(recorded.readline())
    header |= {"scenario": "\x1b[2Jgone", "started_at": 1000.0}
    observation = {"kind": "procfs", "observation": {"at": 1000.0}}
    path.write_bytes(gzip.compress(f"{json.dumps(header)}\n{json.dumps(observation)}\n".encode()))
    flags = ["--web.listen-address=127.0.0.1:0"]
    with started("serve", f"--replay={path}", *flags) as process:
        output = until_it_says(process, "Ctrl-C")
        ends_well(process)
    assert "\x1b" not in output
    assert "x1b[2Jgone" in output


def test_nothing_is_announced_before_the_port_is_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        done = run(f"$E demo --web.listen-address=127.0.0.1:{port}")
    assert done.returncode == 1
    assert "Status page" not in done.stderr
    assert "another program listens there" in done.stderr


def replies(port: int) -> bool:
    with suppress(OSError):
        url = f"http://127.0.0.1:{port}/-/healthy"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            return bool(reply.status == 200)
    return False


def test_standard_error_may_be_closed() -> None:
    port = free_port()
    command = f"exec {' '.join(PROGRAM)} demo --web.listen-address=127.0.0.1:{port} 2>&- >&- <&-"
    with subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=ENVIRONMENT, text=True) as process:
        try:
            wait_for(lambda: process.poll() is not None or replies(port))
            ends_well(process)
        finally:
            process.kill()

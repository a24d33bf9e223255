"""A hostile ordinary user on root's host: root's daemon is shown correctly.

The processes, namespaces, locks, files and users are real; the daemons are stand-ins, and those of
the hostile user are programs with the same name.
"""

import gzip
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from testing.attacker import (
    ALICE,
    AS_ALICE,
    PIPE,
    SECRET,
    attack,
    fake,
    in_namespaces,
    lock_memory,
    take_the_pid,
)
from testing.own_host import ENVIRONMENT, TOOL, Daemon, OwnHost, as_user, inside
from testing.waiting import wait_for


@pytest.fixture
def host(host: OwnHost) -> OwnHost:
    host.outside("/tmp/alice").mkdir(mode=0o755)
    host.start("chown", str(ALICE), "/tmp/alice").wait()
    return host


def crash_is_counted(daemon: Daemon, pid: int = 7001) -> None:
    """Crash a server of a daemon, and wait until that is shown; the first crash here."""
    daemon.crash(pid)
    wait_for(lambda: daemon.crashes == 1, 60)


def ends(daemon: Daemon) -> None:
    """Kill a daemon, and wait until that is shown."""
    daemon.kill()
    wait_for(lambda: daemon.states == ["absent"], 30)


def users_of(host: OwnHost) -> set[str]:
    return {sample.labels["uid"] for sample in host.scrape().get("mps_control_info", ())}


def recorded(host: OwnHost) -> str:
    """Return a recording of the host, which holds all that the exporter reads."""
    path = "/run/exporter/seen.rec.gz"
    words = [sys.executable, "-m", "mps_exporter", "record", path, "--duration=1s"]
    flags = [f"--mps.control-binary={TOOL}", "--no-collector.nvml"]
    assert host.start(*words, *flags, environment=ENVIRONMENT).wait() == 0
    return gzip.decompress(host.outside(path).read_bytes()).decode()


@pytest.mark.parametrize("way", ["mount", "link", "own mount"])
def test_no_file_of_root_is_read_as_a_log(host: OwnHost, way: str) -> None:
    """She binds /etc/shadow over her control.log, or names a directory that is not hers."""
    secret = host.outside("/run/secret")
    secret.mkdir(mode=0o755)
    (secret / "control.log").write_text(f"{SECRET}\n")
    (secret / "control.log").chmod(0o600)
    mounts: Sequence[str] = ()
    logs = "/tmp/alice/logs"
    if way == "mount":
        script = f"mkdir -p {logs} && mount -t tmpfs tmpfs {logs} && touch {logs}/control.log"
        mounts = in_namespaces(
            f"{script} && mount --bind /run/secret/control.log {logs}/control.log", "--mount"
        )
    elif way == "own mount":
        # A directory of root's, where her mount namespace has one of hers.
        mounts = in_namespaces(f"mkdir -p {logs} && mount --bind /run/secret {logs}", "--mount")
    else:
        host.outside(logs).symlink_to("/run/secret")
    fake(
        host,
        {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/alice", "CUDA_MPS_LOG_DIRECTORY": logs},
        inside=mounts,
    )
    # One of hers that is what it says, so that it is known when the logs were read.
    honest = host.daemon("/tmp/alice/pipe", "/tmp/alice/honest", rights=AS_ALICE)
    host.serve()
    wait_for(lambda: honest.value("mps_control_log_readable", log="control"))
    crash_is_counted(honest)
    metrics = host.scrape()
    assert SECRET not in recorded(host)
    # (Without her mounts there may be an empty file of hers.)
    size = metrics.value("mps_control_log_size_bytes", daemon="/tmp/alice", log="control")
    assert not size


@pytest.mark.parametrize("configured", [False, True])
def test_a_long_path_does_not_blind_the_exporter(host: OwnHost, configured: bool) -> None:
    host.daemon()
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        fake(host, {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/alice", name: "/a" * 65_000})
    host.serve(*["--no-mps.discovery", f"--mps.pipe-directory={PIPE}"] if configured else [])
    began = time.monotonic()
    host.scrape()
    assert time.monotonic() - began < 30  # it was minutes

    def is_seen() -> bool:
        metrics = host.scrape()
        succeeded = metrics.value("mps_scrape_collector_success", collector="process")
        return metrics.value("mps_control_up", daemon=PIPE) == succeeded == 1

    wait_for(is_seen)


def test_a_pid_that_is_used_again_is_of_another_process(host: OwnHost) -> None:
    """Root's daemon in a container ends, and she gets its PID and its directory's name."""
    mounts = "mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /var/log"
    boxed = host.daemon("/tmp/boxed", inside=inside(mounts))
    daemon = host.daemon()
    host.serve()
    wait_for(boxed.is_up)
    crash_is_counted(boxed)
    ends(boxed)  # until the exporter knows of the end, it may look where the PID leads
    take_the_pid(
        host,
        boxed.pid,
        {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/boxed", "CUDA_MPS_LOG_DIRECTORY": "/tmp/alice"},
    )
    crash_is_counted(daemon, 7002)
    for _ in range(2):
        assert boxed.states == ["absent"]
        assert str(ALICE) not in users_of(host)
        assert boxed.crashes == 1  # below /proc/PID/root are the host's logs now


def test_no_directory_of_another_process_may_be_named(host: OwnHost) -> None:
    daemon = host.daemon()
    other = f"/proc/{daemon.pid}/root{PIPE}"
    fake(host, {"CUDA_MPS_PIPE_DIRECTORY": other, "CUDA_MPS_LOG_DIRECTORY": other})
    host.serve()
    assert [one.labels["daemon"] for one in host.scrape()["mps_control_up"]] == [PIPE]


def test_what_is_masked_from_the_exporter_stays_masked(host: OwnHost) -> None:
    """Like ProtectHome= of the unit: the host's /home is reachable below /proc/PID/root."""
    host.daemon("/tmp/open", "/var/lib/home/logs")
    none = "/run/systemd/inaccessible/dir"
    mask = f"mkdir -p {none} && chmod 0 {none} && mount --bind {none} /var/lib/home"
    host.serve(inside=inside(mask))
    wait_for(lambda: host.scrape().get("mps_control_log_readable"))
    metrics = host.scrape()
    assert metrics.value("mps_control_up", daemon="/tmp/open") == 1
    assert metrics.value("mps_control_log_readable", daemon="/tmp/open", log="control") == 0


def test_a_program_that_changes_its_user_is_not_roots(host: OwnHost) -> None:
    """She starts a set-user-ID program of root's by the name of a daemon, with her variables."""
    host.outside("/run/set-id").mkdir(mode=0o755)
    host.start(
        "sh",
        "-c",
        "mount -t tmpfs -o mode=755,suid tmpfs /run/set-id"
        " && cp $(command -v tail) /run/set-id && chmod u+s /run/set-id/tail",
    ).wait()
    link = host.outside("/tmp/alice/nvidia-cuda-mps-control")
    link.symlink_to("/run/set-id/tail")
    before = host.pids()
    host.start(
        "/tmp/alice/nvidia-cuda-mps-control",
        "-f",
        "/dev/null",
        environment={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/alice", "CUDA_MPS_LOG_DIRECTORY": "/var/log"},
        rights=AS_ALICE,
    )
    wait_for(lambda: host.pids() - before)
    daemon = host.daemon()
    host.serve()
    names = [one.labels["daemon"] for one in host.scrape()["mps_control_up"]]
    assert names == [daemon.pipe]


HANG = """
import ctypes, os, sys, time
device = os.open("/dev/fuse", os.O_RDWR)
data = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"fuse", sys.argv[1].encode(), b"fuse", 0, data):
    sys.exit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
time.sleep(3600)
"""


def test_a_hung_file_system_delays_no_other_daemon(host: OwnHost) -> None:
    """Like a dead NFS server: each access hangs."""
    host.outside("/run/dead").mkdir()
    hanging = host.start(sys.executable, "-c", HANG, "/run/dead")
    assert hanging.stdout is not None
    assert hanging.stdout.readline() == b"ready\n"
    root = host.daemon()
    dead = {"CUDA_MPS_PIPE_DIRECTORY": "/run/dead/pipe", "CUDA_MPS_LOG_DIRECTORY": "/run/dead/logs"}
    fake(host, dead)
    host.serve("--mps.query-timeout=2s", "--collector.timeout=10s")
    wait_for(root.is_up, 30)
    wait_for(host.daemon("/tmp/later", "/var/log/later").is_up, 30)
    crash_is_counted(root)


CONFIGURED = (f"--mps.pipe-directory={PIPE}", "--mps.log-directory=/var/log/nvidia-mps")
ALONE = ("--no-mps.discovery", "--no-collector.process")


@pytest.mark.parametrize(
    ("name", "first", "flags", "rights"),
    [
        pytest.param("nvidia-cuda-mps", True, (), (), id="a daemon's name"),
        pytest.param("nvidia-cuda-mps", True, CONFIGURED, (), id="configured"),
        pytest.param("nvidia-cuda-mps", True, (*CONFIGURED, *ALONE), (), id="nothing searched"),
        pytest.param("nvidia-cuda-mps", True, (), as_user(1001), id="an exporter without rights"),
        pytest.param("nvidia-cuda-mps", False, (), (), id="later"),
        pytest.param("train", False, (), (), id="a client of root's daemon"),
    ],
)
def test_a_process_that_cannot_be_read_hides_nothing(
    host: OwnHost, name: str, first: bool, flags: Sequence[str], rights: Sequence[str]
) -> None:
    daemon = host.daemon()
    if first:
        lock_memory(host, name)
    host.serve(*flags, rights=rights)
    wait_for(daemon.is_up)
    if not first:
        pid = lock_memory(host, name)
        daemon.connect(pid, ALICE)
        wait_for(lambda: daemon.value("mps_client_info", pid=pid))
    crash_is_counted(daemon)
    success = host.scrape()["mps_scrape_collector_success"]
    assert {one.labels["collector"]: one.value for one in success}.get("process", 1) == 1
    if ALONE[0] not in flags:
        wait_for(host.daemon("/tmp/later", "/var/log/later").is_up, 30)
    ends(daemon)


def test_the_doctor_has_a_deadline_beside_a_process_that_cannot_be_read(host: OwnHost) -> None:
    host.daemon()
    pid = lock_memory(host)

    def doctor(*words: str) -> subprocess.Popen[bytes]:
        flags = [f"--mps.control-binary={TOOL}", "--no-collector.nvml"]
        command = [sys.executable, "-m", "mps_exporter", "doctor", *flags, *words]
        return host.start(*command, environment=ENVIRONMENT)

    wait_for(lambda: PIPE.encode() in doctor().communicate(timeout=60)[0])
    expected = {
        "--json": "processes_ignored",
        "--check=critical": "critical: no",
        f"--pid={pid}": "cannot be interrupted (state D)",
        f"--user={ALICE}": "",
        "--job=1": "",
    }
    for text, process in [(text, doctor(word)) for word, text in expected.items()]:
        assert text in process.communicate(timeout=60)[0].decode()


RIGHTS = """
import os, re, sys
path = os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/rights.txt"
status = open("/proc/self/status").read()
lines = re.findall(r"^(?:Uid|Gid|Groups|CapPrm|CapEff|CapAmb|NoNewPrivs):.*$", status, re.MULTILINE)
with open(path, "w") as file:
    print(*lines, "Path: " + os.environ["PATH"], "Cwd: " + os.getcwd(), sep="\\n", file=file)
"""


@pytest.mark.parametrize("exporter", ["root", "user"])
def test_the_tool_meets_her_socket_with_her_rights(host: OwnHost, exporter: str) -> None:
    tool = host.outside("/run/stand-ins/rights")
    tool.write_text(f"#!{sys.executable} -SE\n{RIGHTS}")
    tool.chmod(0o755)
    host.daemon("/tmp/alice/pipe", "/tmp/alice/logs", rights=AS_ALICE)
    host.outside("/tmp/alice/pipe").chmod(0o777)
    host.daemon()
    host.outside(PIPE).chmod(0o777)
    unit = as_user(1001, "sys_ptrace", "dac_read_search")
    rights = () if exporter == "root" else unit
    host.serve("--mps.control-binary=/run/stand-ins/rights", rights=rights)
    wait_for(lambda: host.scrape() and host.outside("/tmp/alice/pipe/rights.txt").exists())
    for pipe, uid in (("/tmp/alice/pipe", ALICE), (PIPE, 0)):
        wait_for(host.outside(f"{pipe}/rights.txt").read_text)
        text = host.outside(f"{pipe}/rights.txt").read_text()
        found = dict(line.split(":", 1) for line in text.splitlines())
        assert set(found["Uid"].split()) == {str(uid if exporter == "root" else 1001)}
        assert found["Groups"].split() == []
        for name in ("CapPrm", "CapEff", "CapAmb"):
            assert int(found[name], 16) == 0, name
        assert found["NoNewPrivs"].strip() == "1"
        assert found["Cwd"].strip() == "/"


def test_all_of_it_at_once(host: OwnHost) -> None:
    root = host.daemon()
    host.serve(f"--mps.pipe-directory={PIPE}", "--mps.query-timeout=2s", "--collector.timeout=10s")
    attack(host, root)
    wait_for(lambda: host.scrape().value("mps_exporter_ignored_processes", uid=str(ALICE)))
    crash_is_counted(root)
    for _ in range(10):
        metrics = host.scrape()
        assert metrics.value("mps_control_up", daemon=PIPE) == 1
        for collector in ("control", "logs", "process"):
            name = "mps_scrape_collector_success"
            assert metrics.value(name, collector=collector) == 1, collector
    assert SECRET not in recorded(host)
    memory = host.scrape().value("process_resident_memory_bytes")
    assert (memory or 0) < 100e6
    ends(root)

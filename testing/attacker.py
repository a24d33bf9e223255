"""Attacks of an ordinary user on an exporter that monitors root's daemon.

Users, processes, namespaces, mounts and files are real; the daemons are stand-ins, and most of the
hostile user's are programs that only have the name.
"""

import os
import sys
from collections.abc import Mapping, Sequence

import pytest

from testing.own_host import PROGRAMS, ROOT, Daemon, OwnHost, as_user, inside
from testing.waiting import wait_for

ALICE = 2001
AS_ALICE = as_user(ALICE)
PIPE, LOGS = "/tmp/nvidia-mps", "/var/log/nvidia-mps"
CONTROL = f"{PROGRAMS}/nvidia-cuda-mps-control"
SHELL = f"{PROGRAMS}/shell/nvidia-cuda-mps-control"
SECRET = "root:*:20228:0:99999:7:::"

SLEEP = "print('ready', flush=True); import time; time.sleep(3600)"
TAKE_THE_PID = """
import os, sys
pid, uid = int(sys.argv[1]), int(sys.argv[2])
while True:
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))
    if (child := os.fork()) == 0:
        if os.getpid() == pid:
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.execv(sys.argv[3], sys.argv[3:])
        os._exit(0)
    if child == pid:
        break
    os.waitpid(child, 0)
os.waitpid(child, 0)
"""
FLOOD = """
import os, time
text = "NEW CLIENT 632 from user 2001: Server already exists"
line = f"[2026-11-21 08:55:42.578 Control   630] {text}\\n".encode()
with open("/tmp/alice/flooded/control.log", "ab") as log:
    print("ready", flush=True)
    while True:
        log.write(line * 10_000)
        log.flush()
        if log.tell() > 1 << 28:  # it is in memory
            log.truncate(0)
        time.sleep(0.1)
"""


VANISH = """
import socket, struct, time
print("ready", flush=True)
while True:
    try:
        with socket.create_connection(("127.0.0.1", 9400), 10, ("127.0.0.2", 0)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    except OSError:
        pass
    time.sleep(0.005)
"""
LOCK_WHEN_FREE = """
import fcntl, struct, sys, time
lock = open(sys.argv[1] + "/control_lock", "a")
print("ready", flush=True)
fcntl.fcntl(lock, fcntl.F_OFD_SETLKW, struct.pack("hhlli", fcntl.F_WRLCK, 0, 0, 0, 0))
time.sleep(3600)
"""
SERVE_WHEN_FREE = """
import fcntl, os, socket, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
lock = open(pipe + "/control_lock", "a")
print("ready", flush=True)
fcntl.lockf(lock, fcntl.LOCK_EX)
os.unlink(pipe + "/control")
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(pipe + "/control")
listener.listen()
time.sleep(3600)
"""
FAULT = (
    "Client {PID: 1, Context: 1} encountered a fatal GPU error.",
    "Server is handling a fatal GPU error.",
    "Client {PID: 1, Context ID: 1} on device 0 to be torn down",
)


def crowd(number: int, folder: str = "/tmp/alice") -> str:
    """A program that starts this many others with the name of a daemon.

    They are shells, which begin thirty times as fast as Python, and read what is never written.
    """
    return (
        f"import os\nos.dup2(os.pipe()[0], 0)\nfor number in range({number}):\n"
        "    if os.fork() == 0:\n"
        f"        os.execve({SHELL!r}, [{SHELL!r}, '-c', 'read line', '-d'],"
        f" {{'CUDA_MPS_PIPE_DIRECTORY': '{folder}/%d' % number}})\n"
        f"{SLEEP}"
    )


def fake(
    host: OwnHost, variables: Mapping[str, str], code: str = SLEEP, inside: Sequence[str] = ()
) -> None:
    """Start a program of hers that has the name of a daemon, and wait until it runs."""
    host.ready(*inside, CONTROL, "-c", code, "-d", environment=variables, rights=AS_ALICE)


def in_namespaces(script: str, *flags: str) -> tuple[str, ...]:
    """Return a command that starts a program in a user namespace of hers."""
    return inside(script, "--user", "--map-root-user", *flags)


def have_the_pid(host: OwnHost, pid: int) -> None:
    """Start a program that has this PID, in a PID namespace of hers, and root's log directory."""
    host.ready(
        *in_namespaces("true", "--pid", "--fork", "--mount-proc", "--mount"),
        *(sys.executable, "-c", TAKE_THE_PID, str(pid), "0", CONTROL, "-c", SLEEP, "-d"),
        environment={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/alice", "CUDA_MPS_LOG_DIRECTORY": LOGS},
        rights=AS_ALICE,
    )


def take_the_pid(host: OwnHost, pid: int, variables: Mapping[str, str]) -> None:
    """Start a program of hers with a daemon's name and the PID of a process that ended."""
    words = (sys.executable, "-c", TAKE_THE_PID, str(pid), str(ALICE))
    host.ready(*words, CONTROL, "-c", SLEEP, "-d", environment=variables)


def lock_memory(host: OwnHost, name: str = "nvidia-cuda-mps") -> int:
    """Start a process of hers that cannot be read (see locked_memory); return its PID."""
    directory = host.outside(f"/run/locked-{name}")
    directory.mkdir()
    words = [sys.executable, "-m", "testing.locked_memory", f"/run/{directory.name}"]
    process = host.start(
        *words, str(ALICE), name, environment={"PYTHONPATH": f"{ROOT}/exporter:{ROOT}"}
    )
    assert process.stdout is not None
    return int(process.stdout.readline() or pytest.skip("no file system (FUSE) can be mounted"))


def attack(host: OwnHost, root: Daemon) -> None:
    """Run all attacks at once; /tmp/alice must be hers, and the exporter must run.

    Files of root's under the names of her logs, root's PID, directories and log, paths of 130 kB,
    a daemon that hangs, a log that grows by 10 MB/s, a sparse log, and 200 more daemons.
    """
    have_the_pid(host, root.pid)
    secret = host.outside("/run/secret.log")
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    logs = "/tmp/alice/logs"
    fake(
        host,
        {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/alice/shadow", "CUDA_MPS_LOG_DIRECTORY": logs},
        inside=in_namespaces(
            f"mkdir -p {logs} && touch {logs}/control.log && "
            f"mount --bind /run/secret.log {logs}/control.log",
            "--mount",
        ),
    )
    fake(host, {"CUDA_MPS_PIPE_DIRECTORY": PIPE, "CUDA_MPS_LOG_DIRECTORY": LOGS})
    fake(host, {"CUDA_MPS_PIPE_DIRECTORY": "/a" * 65_000, "CUDA_MPS_LOG_DIRECTORY": "/a" * 65_000})
    hanging = host.daemon("/tmp/alice/hangs", "/tmp/alice/hanging", rights=AS_ALICE)
    hanging.be(mode="hang")
    host.daemon("/tmp/alice/floods", "/tmp/alice/flooded", rights=AS_ALICE)
    host.ready(sys.executable, "-c", FLOOD, rights=AS_ALICE)
    host.daemon("/tmp/alice/sparse", "/tmp/alice/sparse-logs", rights=AS_ALICE)
    wait_for(
        lambda: host.scrape().value(
            "mps_control_log_size_bytes", daemon="/tmp/alice/sparse", log="control"
        )
    )
    os.truncate(host.outside("/tmp/alice/sparse-logs/control.log"), 1 << 38)
    fake(host, {}, crowd(200))


def in_pod(host: OwnHost, code: str, uid: int, variables: Mapping[str, str] | None = None) -> None:
    """Start a program with the name of a daemon in a pod, without rights, and wait for it."""
    pod = inside("mount -t tmpfs tmpfs /var/log", "--mount", "--pid", "--fork", "--mount-proc")
    words = (*pod, "setpriv", *as_user(uid), CONTROL, "-c", code, "-d")
    host.ready(*words, environment=variables)


def fault_and_death(host: OwnHost) -> None:
    """Two daemons of hers: one logs a fault and a crash, the other is shown and then dies."""
    faulty, dead = (
        host.daemon(f"/tmp/alice/{name}", f"/tmp/alice/{name}-logs", rights=AS_ALICE)
        for name in ("faulty", "dead")
    )
    state = faulty.state
    state["servers"][0]["state"] = "FAULT"
    faulty.be(**state)
    faulty.log_of_server(faulty.server, *FAULT)
    faulty.crash(6001)
    wait_for(dead.is_up)
    dead.kill()


def another_job(host: OwnHost, root: Daemon) -> None:
    """Start a client of hers in a job's control group, below one that is delegated to her.

    Raises:
        OSError: If this machine has no control groups, or they cannot be made.
    """
    job = f"user@{ALICE}.service/system.slice/slurmstepd.scope/job_4242"
    host.client(root, ALICE, cgroup=host.control_group(f"attacks-{host.init}/{job}"))

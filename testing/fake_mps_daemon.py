"""A stand-in for the control daemon: a process that looks like it, with a server as its child.

It holds the lock, listens on the socket, has the PID file and the first lines of both logs, as
driver 580 does; everything that is asked of it is answered by fake_mps_control, out of the file
that it writes. Started as ``nvidia-cuda-mps-control fake_mps_daemon.py -d`` it says "ready" and
stays. Its server is a process of the program nvidia-cuda-mps-server beside its own.
"""

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
LOGS = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))
DEVICE = {
    "ordinal": 0,
    "pci": "0000:00.06.00",
    "uuid": "GPU-00000000-1111-2222-3333-444444444444",
    "name": "NVIDIA H200",
}


def log(name: str, component: str, pid: int, *lines: str, folder: Path = LOGS) -> None:
    """Write lines to a log, as driver 580 does."""
    now = time.time()
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    stamp = f"[{seconds}.{int(now * 1000) % 1000:03d} {component} {pid:5d}] "
    with (folder / f"{name}.log").open("a") as file:
        file.write("".join(f"{stamp}{line}\n" for line in lines))


def start_server(uid: int) -> int:
    program = str(Path(sys.argv[0]).with_name("programs") / "nvidia-cuda-mps-server")
    server = os.fork()
    if server == 0:
        os.setsid()
        os.execv(program, [program, "-c", "import time; time.sleep(3600)"])  # noqa: S606
    me = os.getpid()
    log("control", "Control", me, f"Starting new server {server} for user {uid}")
    log("server", "Other", server, "Startup")
    log(
        "server",
        "Server",
        server,
        "CUDA MPS Server for Linux/Unix. Binary version: 13000",
        "Active Threads Percentage set to 100.0",
        "Server has started",
    )
    log("control", "Control", me, f"NEW SERVER {server}: Ready")
    return server


def main() -> None:
    PIPE.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    me = os.getpid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (PIPE / "control_lock").open("a") as lock:
        (PIPE / "control_lock").chmod(0o666)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        listener.bind(str(PIPE / "control"))
        (PIPE / "control").chmod(0o666)
        listener.listen()
        (PIPE / "nvidia-cuda-mps-control.pid").write_text(f"{me}\n")
        (LOGS / "server.log").touch()
        log(
            "control",
            "Control",
            me,
            f"Starting control daemon using socket {PIPE}/control",
            f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={PIPE}",
            "CUDA MPS Control binary version: 13000",
        )
        server = start_server(os.getuid())
        state = {
            "pid": me,
            # The tool may run in another mount namespace, and could not write it.
            "log_directory": None,
            "devices": [DEVICE],
            "servers": [{"pid": server, "clients": []}],
        }
        (PIPE / "fake-mps.json").write_text(json.dumps(state))
        os.write(1, b"ready\n")
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(3600)


if __name__ == "__main__":
    main()

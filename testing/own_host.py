"""A host of one's own: PID, mount and network namespaces where nothing runs but what a test starts.

/tmp, /run, /var/log and /var/lib are empty there. Programs and this project are where they always
are, and every user can read them, also where they lie in root's home.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.limits_without_a_flag import MIN_QUERY_AGE_SECONDS
from testing import fake_mps_daemon
from testing.fake_host import install_tool
from testing.page import Page
from testing.waiting import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}/exporter:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment of the programs of this project."""
SOCKET = "/run/exporter/exporter.sock"
STAND_INS = "/run/stand-ins"
PROGRAMS = f"{STAND_INS}/programs"
TOOL = f"{STAND_INS}/nvidia-cuda-mps-control"
UNSHARE = ("unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc")
EMPTY = ("/tmp", "/run", "/var/log", "/var/lib")


@dataclass
class Daemon:
    """A control daemon's stand-in, started on an own host."""

    host: OwnHost
    pid: int  # PID on the host.
    pipe: str
    logs: str  # Both directories are in the daemon's own mount namespace.
    own_pids: bool = False
    """The daemon has a PID namespace of its own, so it calls every client PID 0."""

    @property
    def seen(self) -> Path:
        """The daemon's root directory, from outside."""
        return self.host.outside(f"/proc/{self.pid}/root")

    @property
    def _state_file(self) -> Path:
        return self.seen / self.pipe.lstrip("/") / "fake-mps.json"

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._state_file.read_text())
        return found

    @property
    def server(self) -> int:
        """PID of the server in the daemon's PID namespace."""
        pid: int = self.state["servers"][0]["pid"]
        return pid

    def be(self, **state: Any) -> None:
        """Change the daemon's replies from now on."""
        self._state_file.write_text(json.dumps({**self.state, **state}))

    def connect(self, pid: int, uid: int) -> None:
        """Connect a client: both logs and the daemon's replies contain it."""
        shown = 0 if self.own_pids else pid
        state = self.state
        state["servers"][0]["clients"].append({"pid": shown, "contexts": {"0": [1]}})
        self.be(**state)
        self.log(
            "Accepting connection...", f"NEW CLIENT {shown} from user {uid}: Server already exists"
        )
        name_of = f"{{PID: {shown}, Context ID: %d}}"
        self.log_of_server(
            self.server,
            f"Received new client request for {name_of % 0}",
            f"Client {name_of % 0} connected",
            f"Creating worker thread for client {name_of % 0}",
            f"Received new client request for {name_of % 0}",
            f"Client {name_of % 1} connected",
            f"Creating worker thread for client {name_of % 1}",
            f"Device NVIDIA H200 (uuid {fake_mps_daemon.DEVICE['uuid']}) is associated",
            f"Status of client {name_of % 1} is ACTIVE",
        )

    def queue(self, pid: int, uid: int) -> None:
        """A client is put into the queue behind the server's user; the server has clients."""
        server = self.server
        self.log(
            "Accepting connection...",
            f"NEW CLIENT {0 if self.own_pids else pid} from user {uid}: "
            "Server is not ready, push client to pending list",
            f"Try shutting down server {server}, backoff is disabled",
            f"Server {server} has 2 active worker threads. Server will not shutdown.",
            f"Control will try shutting down server {server} again in at most 51200ms",
        )

    def log(self, *lines: str) -> None:
        """Write lines to control.log, as the daemon does."""
        self._log("control", "Control", self.state["pid"], *lines)

    def log_of_server(self, pid: int, *lines: str) -> None:
        """Write lines to server.log, as its server of this PID does."""
        self._log("server", "Server", pid, *lines)

    def _log(self, name: str, component: str, pid: int, *lines: str) -> None:
        folder = self.seen / self.logs.lstrip("/")
        fake_mps_daemon.log(name, component, pid, *lines, folder=folder)

    def crash(self, server: int) -> None:
        """Log the start of a server with this PID, and its end by a signal."""
        self.log(f"Starting new server {server} for user 0")
        self._log("server", "Other", server, "Startup")
        self.log(f"NEW SERVER {server}: Ready", f"Server {server} exited with status 0")

    def kill(self) -> None:
        self.host.signal(self.pid, signal.SIGKILL)

    def value(self, metric: str, **labels: object) -> float | None:
        """Scrape a metric of this daemon."""
        return self.host.scrape().value(metric, daemon=self.pipe, **labels)

    @property
    def crashes(self) -> float | None:
        """Number of crashes of its servers, as the exporter counts them."""
        return self.value("mps_server_exits_total", cause="crashed")

    def is_up(self) -> bool:
        return self.value("mps_control_up") == 1

    @property
    def states(self) -> list[str]:
        """Its state, as the exporter shows it."""
        found = self.host.scrape().all("mps_control_state", daemon=self.pipe)
        return [one.labels["mps_control_state"] for one in found if one.value]


class OwnHost:
    """Namespaces, and what runs in them. Use own_host()."""

    def __init__(self, init: int) -> None:
        self.init = init
        self._processes: list[subprocess.Popen[bytes]] = []
        self.exporters: list[subprocess.Popen[bytes]] = []
        self._groups: list[Path] = []
        """Control groups to remove at the end, in the order in which they were made."""
        self._youngest = 0.0
        """When the last server was started (Unix time)."""

    def outside(self, path: str) -> Path:
        """A path of this host, as the test reaches it."""
        return Path(f"/proc/{self.init}/root{path}")

    def control_group(self, path: str) -> Path:
        """Make a control group and its parents, which are removed at the end.

        Raises:
            OSError: If this machine has no control groups, or they cannot be made.
        """
        group = _cgroup_root()
        for name in path.split("/"):
            group /= name
            if not group.exists():
                group.mkdir()
                self._groups.append(group)
        return group

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        rights: Sequence[str] = (),
        inside: Sequence[str] = (),
        cgroup: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host.

        Args:
            rights: Arguments of setpriv, such as --reuid=1001; none: root.
            inside: A command that makes further namespaces first: see inside().
            cgroup: The program's control group.
        """
        enter = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--net", "--wd=/", "--"]
        join = ["sh", "-c", f'echo 0 >{cgroup}/cgroup.procs; exec "$@"', "sh"] if cgroup else []
        lower = ["setpriv", *rights, "--"] if rights else []
        process = subprocess.Popen(
            [*enter, *join, *inside, *lower, *command],
            env={"PATH": os.environ["PATH"], **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "serve" in command else None,
        )
        self._processes.append(process)
        return process

    def ready(self, *command: str, **settings: Any) -> None:
        """Start a program on this host (see start()), and wait until it prints "ready"."""
        process = self.start(*command, **settings)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    def daemon(
        self,
        pipe: str | None = None,
        logs: str | None = None,
        *,
        inside: Sequence[str] = (),
        rights: Sequence[str] = (),
        own_pids: bool = False,
        umask: str = "022",
    ) -> Daemon:
        """Start a control daemon's stand-in and wait until it is ready."""
        variables = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": logs}
        before = self.pids()
        self.ready(
            *("sh", "-c", f'umask {umask}; exec "$@"', "sh"),
            f"{PROGRAMS}/nvidia-cuda-mps-control",
            f"{STAND_INS}/fake_mps_daemon.py",
            "-d",
            environment={name: value for name, value in variables.items() if value},
            inside=inside,
            rights=rights,
        )
        self._youngest = time.time()
        pid = self._named("nvidia-cuda-mps", self.pids() - before)  # Its server is younger.
        assert pid is not None
        return Daemon(
            self, pid, pipe or "/tmp/nvidia-mps", logs or "/var/log/nvidia-mps", own_pids=own_pids
        )

    def client(
        self,
        daemon: Daemon,
        uid: int,
        *,
        environment: Mapping[str, str] | None = None,
        cgroup: Path | None = None,
    ) -> int:
        """Start a program that is connected to a daemon; return its PID."""
        pid = self.program(uid, environment=environment, cgroup=cgroup)
        daemon.connect(pid, uid)
        return pid

    def program(
        self, uid: int, *, environment: Mapping[str, str] | None = None, cgroup: Path | None = None
    ) -> int:
        """Start a program of a user; return its PID."""
        before = self.pids()
        self.start(
            f"{PROGRAMS}/train", "3600", environment=environment, rights=as_user(uid), cgroup=cgroup
        )
        return wait_for(lambda: self._named("train", self.pids() - before))

    def _named(self, name: str, pids: set[int]) -> int | None:
        """Return the first of these processes with this name, of at most 15 letters."""
        for pid in sorted(pids):
            with suppress(OSError):
                if self.outside(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                    return pid
        return None

    def pids(self) -> set[int]:
        """Everything that runs here."""
        found = self.outside("/proc").iterdir()
        return {int(one.name) for one in found if one.name.isdecimal()}

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of this host, by the PID that it has here."""
        self.start("sh", "-c", f"kill -{number.value} {pid}").wait()

    def serve(
        self, *flags: str, rights: Sequence[str] = (), inside: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start the exporter on SOCKET, when all servers are old enough to be queried."""
        wait_for(lambda: time.time() - self._youngest > MIN_QUERY_AGE_SECONDS)
        directory = self.outside("/run/exporter")
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)
        process = self.start(
            sys.executable,
            "-m",
            "mps_exporter",
            "serve",
            f"--web.listen-address=unix:{SOCKET}",
            f"--mps.control-binary={TOOL}",
            "--no-collector.nvml",
            "--mps.min-query-interval=0s",
            # Many tests may run at once; what hangs is another matter.
            "--mps.query-timeout=20s",
            "--collector.timeout=60s",
            *flags,
            environment=ENVIRONMENT,
            rights=rights,
            inside=inside,
        )
        self.exporters.append(process)
        wait_for(lambda: self._answers(process))
        return process

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is not None:
            assert process.stderr is not None
            pytest.fail(f"the exporter ended: {process.stderr.read().decode()}")
        with suppress(OSError):
            return self.get("/-/ready")[0] == 200
        return False

    @contextmanager
    def _response(self, path: str) -> Iterator[http.client.HTTPResponse]:
        with closing(_UnixConnection(str(self.outside(SOCKET)))) as connection:
            connection.request("GET", path)
            yield connection.getresponse()

    def get(self, path: str) -> tuple[int, str]:
        with self._response(path) as response:
            return response.status, response.read().decode()

    @contextmanager
    def incidents(self) -> Iterator[Iterator[dict[str, Any]]]:
        """What happens from now on, as the event stream tells it."""
        with self._response("/api/v1/events") as response:
            lines = (line for line in response if line.startswith(b"data: {"))
            yield (json.loads(line.removeprefix(b"data: ")) for line in lines)

    def scrape(self) -> Page:
        status, text = self.get("/metrics")
        assert status == 200, text
        return Page(text)

    def stop_exporters(self) -> None:
        for pid in self.pids():
            with suppress(OSError):
                if b"\0mps_exporter\0serve\0" in self.outside(f"/proc/{pid}/cmdline").read_bytes():
                    self.signal(pid, signal.SIGTERM)
        for process in self.exporters:
            process.wait(PATIENCE_SECONDS)
        self.exporters.clear()

    def close(self) -> None:
        """End everything: with the first process of a PID namespace, all end."""
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        for process in self._processes:
            process.wait(PATIENCE_SECONDS)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for group in reversed(self._groups):
            wait_for(partial(_removed, group))


def _cgroup_root() -> Path:
    """Return a place for control groups: version 2, or systemd's hierarchy of version 1."""
    for candidate in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
        if Path(candidate, "cgroup.procs").exists():
            return Path(candidate)
    raise OSError("no hierarchy of control groups is mounted below /sys/fs/cgroup")


def _removed(group: Path) -> bool:
    """Remove a control group; its processes may still be exiting."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        self.sock.connect(self._path)


def as_user(uid: int, *capabilities: str) -> tuple[str, ...]:
    """Return arguments of setpriv: a user with these capabilities and no others."""
    bounding = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    words = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--bounding-set={bounding}")
    if not capabilities:
        return words
    return (*words, f"--inh-caps={bounding}", f"--ambient-caps={bounding}")


def inside(script: str, *namespaces: str) -> tuple[str, ...]:
    """Return a command that starts another in further namespaces, after a script of the shell."""
    return ("unshare", *(namespaces or ("--mount",)), "sh", "-c", f'{script} && exec "$@"', "sh")


def in_container(mounts: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command that starts another in a container: mounts by their directories in there."""
    steps = (
        f"mkdir -p {here} {source} && mount --bind {source} {here}"
        for here, source in mounts.items()
    )
    return inside(" && ".join(steps))


def require_rights() -> None:
    """Fail with the reason if namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.fail("these tests make namespaces and other users' processes: run them as root")
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.fail(f"namespaces cannot be made here (a container?): {tried.stderr.strip()}")


@contextmanager
def own_host() -> Iterator[OwnHost]:
    """Make a host, and end everything on it afterwards."""
    require_rights()
    with subprocess.Popen(
        [*UNSHARE, sys.executable, "-m", "testing.own_host"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as outer:
        assert outer.stdout is not None
        assert outer.stderr is not None
        if outer.stdout.readline() != b"ready\n":
            pytest.fail(f"no host: {outer.stderr.read().decode()}")
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        host = OwnHost(int(children[0]))
        try:
            yield host
        finally:
            host.close()


# ---------------------------------------------------------------------- its first process


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = (source.encode(), target.encode(), kind.encode())
    if libc.mount(*words, flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} at {target}")


_MS_BIND = 4096
_MS_REC = 16384


def _keep_readable(paths: Sequence[Path]) -> None:
    """Replace the directories that hide these by empty ones that all users may pass.

    Hiding directories are those that will be empty anyway, and homes that are closed to others.
    """
    handles = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in paths}
    closed = [
        parent
        for path in paths
        for parent in reversed(path.parents)
        if not parent.stat().st_mode & stat.S_IXOTH
    ]
    for directory in dict.fromkeys([*map(Path, EMPTY), *closed]):
        mode = "1777" if directory == Path("/tmp") else "755"
        _mount("tmpfs", str(directory), "tmpfs", 0, f"mode={mode}")
    for path, handle in handles.items():
        hidden = any(Path(empty) in path.parents for empty in [*map(Path, EMPTY), *closed])
        if hidden:
            path.mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", str(path), "", _MS_BIND | _MS_REC)
        os.close(handle)


def _furnish() -> None:
    """Put the stand-ins where STAND_INS says."""
    programs = Path(PROGRAMS)
    programs.mkdir(parents=True)
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        (programs / name).symlink_to(Path(sys.executable).resolve())
    sleep = shutil.which("sleep")
    assert sleep is not None
    (programs / "train").symlink_to(sleep)
    (programs / "shell").mkdir()
    (programs / "shell" / "nvidia-cuda-mps-control").symlink_to("/bin/sh")
    install_tool(Path(STAND_INS))
    shutil.copy(Path(__file__).with_name("fake_mps_daemon.py"), STAND_INS)


def _be_the_first_process() -> None:
    prefixes = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
    _keep_readable([path.resolve() for path in dict.fromkeys(prefixes)])
    os.chdir("/")
    _furnish()
    os.write(1, b"ready\n")
    while True:  # orphans come here
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.1)


if __name__ == "__main__":
    _be_the_first_process()

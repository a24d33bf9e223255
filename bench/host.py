"""A full host for measuring: many GPUs and clients, read by the exporter's real sources.

Synthetic are: NVML's values (recorded on an H200, see testing/fake_nvml.py), the files of /proc,
and the control tool (testing/fake_mps_control.py).
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self, TextIO, cast

from mps_exporter.cli import parse_words
from mps_exporter.flags import Settings, load
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.accumulators import GPM_ALL
from mps_exporter.sources.nvml.pynvml_api import Device, Listed, ProcessKind
from testing.fake_host import install_tool, set_daemon
from testing.fake_mps_control import stamp
from testing.fake_nvml import FakeDevice, FakeNvml
from testing.fake_proc import BOOT_TIME, FakeProc

GPUS = 8
DAEMONS = 2
CLIENTS_PER_GPU = 48
OTHER_PROCESSES = 400  # Number of processes without a relation to MPS.

USERS = (1001, 1002, 1003)
CLIENT_BYTES = 1 << 30


def uuid_of(gpu: int) -> str:
    return f"GPU-{gpu:08d}-1111-2222-3333-444444444444"


def busy_gpus(number: int) -> list[FakeDevice]:
    metrics = dict.fromkeys(GPM_ALL, 50.0)
    return [
        FakeDevice(uuid_of(gpu), busy=lambda now: now * 0.6, metrics=metrics)
        for gpu in range(number)
    ]


class StagedNvml(FakeNvml):
    """The stand-in for NVML, in real time; what uses the GPUs is read from a host's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, Any]] = {}
        super().__init__(*busy_gpus(len(self._read("nvml.json"))))

    def _read(self, name: str) -> Any:
        path = self._folder / name
        stamp = path.stat().st_mtime_ns
        if self._seen.get(name, (0, None))[0] != stamp:
            self._seen[name] = stamp, json.loads(path.read_text())
        return self._seen[name][1]

    @property
    def now(self) -> float:
        return time.monotonic()

    @now.setter
    def now(self, moment: float) -> None:
        """Do nothing: the clock is real."""

    def processes(self, device: Device, kind: ProcessKind) -> Listed:
        self.fail("", self._read("failing.json"))
        super().processes(device, kind)
        number = self.gpus.index(cast("FakeDevice", device))
        rows = self._read("nvml.json")[number][kind]
        return {int(pid): used for pid, used in rows.items()}

    def text(self, function: str, *arguments: object) -> str:
        """Read a text: the driver's version is queried even when nothing else works."""
        self.fail("", self._read("failing.json"))
        return super().text(function, *arguments)


@dataclass
class Client:
    """A process that uses one GPU through MPS."""

    pid: int
    gpu: int
    uid: int


@dataclass
class Daemon:
    """A control daemon with one server, and the GPUs that are its own."""

    number: int
    folder: Path
    gpus: Sequence[int]
    pid: int = 0
    server: int = 0
    user: int = USERS[0]  # Owner of the server.
    clients: dict[int, Client] = field(default_factory=dict)
    waiting: dict[int, Client] = field(default_factory=dict)  # Queued clients of the next user.
    files: dict[str, TextIO] = field(default_factory=dict)
    """Its logs: open while it runs, also if they are renamed."""
    cgroup: str = "0::/\n"
    caused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Expected counters: (metric, label value next to the daemon's) -> events."""

    @property
    def pipe(self) -> Path:
        return self.folder / f"pipe{self.number}"

    @property
    def logs(self) -> Path:
        return self.folder / f"log{self.number}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the daemon and its clients."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "CUDA_VISIBLE_DEVICES": ",".join(uuid_of(gpu) for gpu in self.gpus),
        }

    def log(self, name: str, *lines: str) -> None:
        """Write these lines now."""
        writer = ("Control", self.pid) if name == "control" else ("Server", self.server)
        prefix = stamp(*writer)
        file = self.files.get(name)
        if file is None:
            file = self.files[name] = (self.logs / f"{name}.log").open("a")
        file.write("".join(f"{prefix}{line}\n" for line in lines))
        file.flush()
        self.caused["mps_control_log_lines_total", name] += len(lines)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()


class FullHost:
    """The host, in its own folder."""

    def __init__(
        self,
        folder: Path,
        clients: int = GPUS * CLIENTS_PER_GPU,
        *,
        gpus: int = GPUS,
        daemons: int = DAEMONS,
        other_processes: int = OTHER_PROCESSES,
    ) -> None:
        self.folder = folder
        self.proc = FakeProc(folder / "proc")
        self.tool = install_tool(folder)
        self._pids = count(100_000)
        self._started = time.time() - BOOT_TIME - 100
        self.failing = False
        self.fail(None)
        share = gpus // daemons
        self.jobs: list[Daemon] = []
        self.daemons = [
            Daemon(number, folder, range(number * share, (number + 1) * share))
            for number in range(daemons)
        ]
        for daemon in self.daemons:
            daemon.logs.mkdir()
            # No control_lock: none of these processes exists, so none can hold it.
            self.start(daemon)
        for number in range(other_processes):
            self.proc.add(30_000 + number, argv=[f"/usr/bin/program{number}"])
        for daemon in self.daemons:
            own = [gpu for gpu in (n % gpus for n in range(clients)) if gpu in daemon.gpus]
            self.connect(daemon, own)
        self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for daemon in (*self.daemons, *self.jobs):
            daemon.close()

    # -- events on the host

    def _run(self, daemon: Daemon, *argv: str, **more: Any) -> int:
        """Start a process with a daemon's environment and control group; return its PID."""
        pid = next(self._pids)
        about: dict[str, Any] = {
            "environ": daemon.environment,
            "cgroup": daemon.cgroup,
            "started": self._started,
        }
        self.proc.add(pid, argv=argv, **about, **more)
        return pid

    def start(self, daemon: Daemon) -> None:
        daemon.pid = self._run(daemon, "/usr/bin/nvidia-cuda-mps-control", "-d")
        daemon.log("control", f"Starting control daemon using socket {daemon.pipe}/control")
        daemon.caused["mps_control_starts_total", ""] += 1
        self._start_server(daemon)

    def _start_server(self, daemon: Daemon) -> None:
        program = "nvidia-cuda-mps-server"
        daemon.server = self._run(daemon, program, parent=daemon.pid, uid=daemon.user)
        daemon.log(
            "control",
            f"Starting new server {daemon.server} for user {daemon.user}",
            f"NEW SERVER {daemon.server}: Ready",
        )
        daemon.caused["mps_server_starts_total", str(daemon.user)] += 1

    def restart(self, daemon: Daemon) -> None:
        """Stop a daemon with all its clients, and start it again."""
        self.leave(daemon, list(daemon.clients))
        daemon.log("control", "Exit")
        daemon.caused["mps_server_exits_total", "requested"] += 1
        for client in daemon.waiting.values():
            daemon.caused["mps_uid_waits_abandoned_total", str(client.uid)] += 1
        for pid in (*daemon.waiting, daemon.server, daemon.pid):
            self.proc.remove(pid)
        daemon.waiting.clear()
        daemon.close()
        self.start(daemon)

    def start_job(self, number: int) -> Daemon:
        """Start the daemon of a Slurm job, in its own directories."""
        cgroup = f"0::/system.slice/slurmstepd.scope/job_{number}/step_0/user/task_0\n"
        daemon = Daemon(number, self.folder, (), cgroup=cgroup)
        daemon.logs.mkdir()
        self.start(daemon)
        self.jobs.append(daemon)
        self._replies(daemon)
        return daemon

    def end_job(self, daemon: Daemon) -> None:
        """Stop the daemon of a job, and remove its directories."""
        for pid in (daemon.server, daemon.pid):
            self.proc.remove(pid)
        daemon.close()
        self.jobs.remove(daemon)
        shutil.rmtree(daemon.pipe)
        shutil.rmtree(daemon.logs)

    def connect(self, daemon: Daemon, gpus: Iterable[int]) -> list[int]:
        """Connect a client for each of these GPUs; return their PIDs."""
        came = [self._spawn(daemon, gpu, daemon.user) for gpu in gpus]
        if daemon.waiting:
            daemon.caused["mps_uid_overtakes_total", str(daemon.user)] += len(came)
        self._served(daemon, came)
        return [client.pid for client in came]

    def queue(self, daemon: Daemon, gpus: Iterable[int]) -> None:
        """Queue clients of the next user."""
        user = USERS[(USERS.index(daemon.user) + 1) % len(USERS)]
        for client in [self._spawn(daemon, gpu, user) for gpu in gpus]:
            daemon.waiting[client.pid] = client
            daemon.log(
                "control",
                f"NEW CLIENT {client.pid} from user {user}: Server is not ready, push client to "
                "pending list",
                f"Try shutting down server {daemon.server}, backoff is enabled",
                f"Server {daemon.server} has {2 * len(daemon.clients)} active worker threads. "
                "Server will not shutdown.",
                f"Control will try shutting down server {daemon.server} again in at most 200ms",
            )

    def hand_over(self, daemon: Daemon) -> None:
        """Stop the clients and the server, and serve the next user's clients."""
        self.leave(daemon, list(daemon.clients))
        daemon.log("control", f"Try shutting down server {daemon.server}, backoff is enabled")
        daemon.log("server", "Server has been notified to shutdown", "Exiting")
        time.sleep(0.005)
        daemon.log("control", f"Server {daemon.server} exited with status 0")
        daemon.caused["mps_server_exits_total", "requested"] += 1
        self.proc.remove(daemon.server)
        came = list(daemon.waiting.values())
        daemon.waiting.clear()
        if came:
            daemon.user = came[0].uid
            daemon.caused["mps_uid_handovers_total", ""] += 1
            daemon.caused["mps_uid_wait_seconds_count", str(daemon.user)] += len(came)
        self._start_server(daemon)
        self._served(daemon, came)

    def _spawn(self, daemon: Daemon, gpu: int, uid: int) -> Client:
        pid = next(self._pids)
        self.proc.add(
            pid,
            argv=["/opt/conda/bin/python3", "train.py"],
            uid=uid,
            environ={
                **daemon.environment,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G",
            },
            started=time.time() - BOOT_TIME,
            cgroup=f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pid:08x}"
            f"_0000_4000_8000_000000000000.slice/cri-containerd-{pid:064x}.scope\n",
        )
        return Client(pid, gpu, uid)

    def _served(self, daemon: Daemon, came: Iterable[Client]) -> None:
        control: list[str] = []
        server: list[str] = []
        for client in came:
            pid = client.pid
            daemon.clients[pid] = client
            daemon.caused["mps_client_connections_total", str(client.uid)] += 1
            control += [
                "Accepting connection...",
                f"NEW CLIENT {pid} from user {client.uid}: Server already exists",
            ] * 2
            server += [
                f"Received new client request for {{PID: {pid}, Context ID: 0}}",
                f"Client {{PID: {pid}, Context ID: 0}} connected",
                f"Creating worker thread for client {{PID: {pid}, Context ID: 0}}",
                f"Client {{PID: {pid}, Context ID: 1}} connected",
                f"Creating worker thread for client {{PID: {pid}, Context ID: 1}}",
                f"Device NVIDIA H200 (uuid {uuid_of(client.gpu)}) is associated",
                f"Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE",
            ]
        daemon.log("control", *control)
        time.sleep(0.005)  # a server needs longer
        daemon.log("server", *server)

    def leave(self, daemon: Daemon, pids: Iterable[int]) -> None:
        lines: list[str] = []
        for pid in pids:
            client = daemon.clients.pop(pid)
            daemon.caused["mps_client_disconnections_total", str(client.uid)] += 1
            daemon.caused["mps_client_session_seconds_count", str(client.uid)] += 1
            self.proc.remove(pid)
            context = f"{{PID: {pid}, Context ID: 1}}"
            lines += [
                f"Client {context} exiting. Number of active client contexts is 0.",
                f"Client process {pid} disconnected",
            ]
        daemon.log("server", *lines)

    def rename(self, daemon: Daemon) -> None:
        """Rename the logs, like logrotate without copytruncate: MPS continues to write to them.

        Then the administrator restarts the daemon.
        """
        for log in ("control", "server"):
            path = daemon.logs / f"{log}.log"
            path.replace(path.with_suffix(".log.1"))
        daemon.log("control", "Accepting connection...")
        self.restart(daemon)

    def rotate(self, daemon: Daemon) -> None:
        """Copy and truncate the logs, like logrotate's copytruncate."""
        for log in ("control", "server"):
            path = daemon.logs / f"{log}.log"
            shutil.copyfile(path, path.with_suffix(".log.1"))
            with path.open("r+") as file:
                file.truncate(0)

    def tell(self) -> None:
        """Update the values of NVML and the replies of the control tool."""
        gpus = []
        for daemon in self.daemons:
            for gpu in daemon.gpus:
                used = [pid for pid, one in daemon.clients.items() if one.gpu == gpu]
                clients = dict.fromkeys(used, CLIENT_BYTES)
                compute = {**clients, daemon.server: 70 << 20}
                gpus.append({"Compute": compute, "MPSCompute": clients, "Graphics": {}})
            self._replies(daemon)
        self._write("nvml.json", json.dumps(gpus))

    def fail(self, code: int | None) -> None:
        """Make every call of NVML fail with this code; None ends the failure."""
        self.failing = code is not None
        self._write("failing.json", json.dumps(code))

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f"{name}.new"
        draft.write_text(text)
        draft.replace(self.folder / name)

    def _replies(self, daemon: Daemon) -> None:
        clients = [
            {"pid": pid, "contexts": {str(daemon.gpus.index(one.gpu)): [1]}}
            for pid, one in daemon.clients.items()
        ]
        devices = [
            {"ordinal": n, "pci": f"0000:{gpu:02x}.00.0", "uuid": uuid_of(gpu), "name": "H200"}
            for n, gpu in enumerate(daemon.gpus)
        ]
        servers = [{"pid": daemon.server, "clients": clients}]
        set_daemon(daemon.pipe, devices=devices, servers=servers)

    # -- the exporter on it

    @property
    def flags(self) -> list[str]:
        return [f"--path.procfs={self.proc.root}", f"--mps.control-binary={self.tool}"]

    @property
    def settings(self) -> Settings:
        return load(parse_words(["serve", *self.flags]) or {}, {}, "serve")

    def live(self, settings: Settings | None = None) -> LiveHost:
        """Return the exporter's sources for this host."""
        host = LiveHost(settings or self.settings)
        host._nvml = NvmlSession(api=StagedNvml(self.folder))  # noqa: SLF001 - there is no NVML to load here
        return host

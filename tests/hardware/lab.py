"""The hardware lab: real daemons, real clients and the real exporter in one program.

A scenario starts control daemons and CUDA clients, watches them through the exporter's own
collector, and states what must be observed. All that the sources read goes into a recording, every
check into a truth file; CI replays the recording and requires the same numbers at the same times.

The lab changes no setting of the GPU and ends every process that it started.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import mps_exporter
from bench.http import children, started
from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.metrics import CATALOGUE
from mps_exporter.snapshot import RecordingHeader
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import RecordingWriter
from testing.commands import output_of
from testing.player import Metrics

HERE = Path(__file__).parent
T = TypeVar("T")
Wanted = float | tuple[float, float] | None  # A value, a range, or absence.
CONTROL = "nvidia-cuda-mps-control"


@functools.cache
def program(name: str, architecture: str = "sm_90") -> str:
    """Compile a CUDA program, which every user may run, and which goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="lab-build-"))
    atexit.register(shutil.rmtree, folder)
    binary, source = str(folder / name), str(HERE / f"{name}.cu")
    flags = ("-O2", f"-arch={architecture}", "-lcuda")
    subprocess.run(["nvcc", *flags, "-o", binary, source], check=True)
    for path in (folder, folder / name):
        path.chmod(0o755)
    return binary


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists. PID 0 is a daemon that was never found."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def run(
    *command: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def wait(condition: Callable[[], T], seconds: float) -> T:
    """Return what a condition returns, once that is true, or after this time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.002)
    return found


def exporter(*arguments: str, uid: int | None = None) -> list[str]:
    return [*as_user(uid), sys.executable, "-m", "mps_exporter", *arguments]


def get(port: int, path: str) -> str:
    """Return a page of the exporter that listens on this port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
        text: str = reply.read().decode()
    return text


@contextlib.contextmanager
def serving(port: int, *flags: str, before: Sequence[str] = ()) -> Iterator[None]:
    """Run an exporter on this port, by another program if need be."""
    command = [*before, *exporter(f"--web.listen-address=127.0.0.1:{port}", *flags)]
    with started(command, f"http://127.0.0.1:{port}/metrics") as served:
        served.until_good()
        yield


def inner_pid(outer: int) -> int:
    """Return the only child of a process, once it exists."""
    return wait(lambda: children(outer), 5)[0]


@dataclass
class Daemon:
    """A control daemon with directories of its own."""

    pipe: Path
    log: Path
    environment: dict[str, str]
    pid: int = 0

    @property
    def label(self) -> str:
        return str(self.pipe)

    @property
    def enter(self) -> tuple[str, ...]:
        """A command that starts another in its namespaces."""
        return ("nsenter", f"--target={self.pid}", "--mount", "--pid")

    def tool(self, text: str, seconds: float = 20) -> str:
        """Run the control tool: only the lab may change settings."""
        done = output_of(CONTROL, input=f"{text}\n", env=self.environment, timeout=seconds)
        return done.stdout + done.stderr

    def find(self) -> None:
        """Read the PID of a daemon that another program started."""
        self.pid = int((self.pipe / f"{CONTROL}.pid").read_text())

    def servers(self) -> list[int]:
        return children(self.pid)

    def resume(self) -> None:
        """Continue it and its servers, if they are stopped."""
        for pid in (self.pid, *self.servers()):
            send(pid, signal.SIGCONT)

    def quit(self, seconds: float = 60) -> None:
        """Stop it cleanly, and wait until it has exited."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.tool("quit", seconds)
        if wait(lambda: not _runs(self.pid), 5):
            return
        servers = self.servers()
        self.kill()
        for server in servers:  # a deaf server remains, with its GPU memory
            send(server, signal.SIGKILL)

    def kill(self) -> None:
        send(self.pid, signal.SIGKILL)

    def lines(self, log: str) -> int:
        path = self.log / f"{log}.log"
        return len(path.read_bytes().splitlines()) if path.exists() else 0


def daemon_at(pipe: Path, log: Path, **environment: str) -> Daemon:
    """Return a daemon with these directories that is not started yet."""
    directories = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    return Daemon(pipe, log, {"PATH": os.environ["PATH"], **directories, **environment})


@dataclass
class Client:
    process: subprocess.Popen[bytes]
    output: Path
    uid: int
    daemon: Daemon | None  # None: the youngest when it was started.
    before: tuple[str, ...]  # The command that started it.
    environment: Mapping[str, str]  # What was set for it alone.
    inner: int = 0  # PID of what that command started, if it stays itself.

    @property
    def pid(self) -> int:
        return self.inner or self.process.pid

    def events(self) -> list[dict[str, object]]:
        lines = self.output.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def event(self, name: str) -> dict[str, object] | None:
        """Return the first event of this name, if it has been printed."""
        return next((event for event in self.events() if event["event"] == name), None)

    def has_printed(self, word: str) -> bool:
        return word in self.output.read_text(errors="replace")

    def wait_for(self, word: str) -> None:
        """Wait until it has printed this word, or exited."""
        wait(lambda: self.has_printed(word) or self.process.poll() is not None, 60)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)


def end_all(clients: Sequence[Client]) -> None:
    """Kill these clients, also those that are stopped, and wait until they have exited."""
    for client in clients:
        client.kill(signal.SIGCONT)
        client.kill()
    for client in clients:
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.process.wait(10)


@dataclass
class Check:
    name: str
    ok: bool
    wanted: str
    got: str


@dataclass
class Actors:
    """Daemons and clients, with what they write in a folder."""

    folder: Path
    daemons: list[Daemon] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.folder.chmod(0o755)

    def directories(self, name: str, **environment: str) -> Daemon:
        """Make the directories of a daemon that is not started yet."""
        pipe, log = self.folder / name, self.folder / f"{name}-log"
        for directory in (pipe, log):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o777)
        return daemon_at(pipe, log, **environment)

    def daemon(
        self,
        name: str = "mps",
        *,
        uid: int | None = None,
        arguments: Sequence[str] = ("-d",),
        before: Sequence[str] = (),
        **environment: str,
    ) -> Daemon:
        daemon = self.directories(name, **environment)
        command = [*before, *as_user(uid), CONTROL, *arguments]
        subprocess.run(
            command, env=daemon.environment, check=True, timeout=30, stdout=subprocess.DEVNULL
        )
        pid_file = daemon.pipe / f"{CONTROL}.pid"
        wait(lambda: pid_file.exists() and pid_file.read_text().strip(), 2)
        daemon.find()
        self.daemons = [one for one in self.daemons if one.pipe != daemon.pipe] + [daemon]
        return daemon

    def client(
        self,
        mode: str,
        seconds: float,
        *,
        daemon: Daemon | None = None,
        mps: bool = True,
        uid: int = 0,
        mebibytes: int = 64,
        blocks: int = 8,
        streams: int = 1,
        percentage: str = "",
        memory_limit: str = "",
        gpus: str = "",
        command: Sequence[str] | None = None,
        before: Sequence[str] = (),
        more: Mapping[str, str] | None = None,
    ) -> Client:
        """Start a CUDA client of a daemon (None: the youngest), by another program if need be."""
        settings = {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": memory_limit,
            "CUDA_VISIBLE_DEVICES": gpus,
        }
        pipe = (daemon or self.daemons[-1]).pipe if mps else self.folder / "nowhere"
        env = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
            "HOME": "/tmp",
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            **{name: value for name, value in settings.items() if value},
            **(more or {}),
        }
        output = self.folder / f"client-{len(self.clients)}.out"
        load = (mode, seconds, mebibytes, blocks, streams)
        words = command or [program("client"), *map(str, load)]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*before, *as_user(uid), *words],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )
        client = Client(process, output, uid, daemon, tuple(before), more or {})
        self.clients.append(client)
        return client

    def leaver(self, *arguments: str, **settings: Any) -> Client:
        """Start leave.cu as a client."""
        return self.client("", 0, command=[program("leave"), *arguments], **settings)

    def python(self, script: str, *arguments: object, **settings: Any) -> Client:
        """Start a Python program of this folder as a client."""
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        more = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **settings.pop("more", {})}
        return self.client(script, 0, command=command, more=more, **settings)

    def stayer(self, **settings: Any) -> Client:
        """Start a client that makes a context, and stays whatever comes of it."""
        return self.python("sleeper.py", 600, "stay", **settings)

    def torch(self, act: str, *arguments: object, **settings: Any) -> Client:
        """Start a function of torch_program.py as a client."""
        return self.python("torch_program.py", act, *arguments, **settings)

    def start_contained(self, daemon: Daemon, script: str, *namespaces: str) -> int:
        """Run a shell script that starts a daemon in a PID namespace; return its PID there."""
        flags = ("--pid", "--fork", "--mount-proc", "--kill-child", *namespaces)
        command = ["unshare", *flags, "sh", "-c", script]
        outer = subprocess.Popen(command, env=daemon.environment)
        self.others.append(outer)
        self.daemons.append(daemon)
        return inner_pid(outer.pid)

    def hidden_daemon(
        self, name: str, *, uid: int | None = None, mode: str = "777", **environment: str
    ) -> Daemon:
        """Start a daemon whose directories lie in a mount namespace of its own.

        Its PID is that of the first process of its PID namespace: all others end with it.
        """
        inner = self.folder / name
        inner.mkdir()
        daemon = daemon_at(inner / "pipe", inner / "log", **environment)
        # setpriv undoes --kill-child.
        script = (
            f"mount -t tmpfs none {inner} && chmod 777 {inner} && exec {' '.join(as_user(uid))} "
            f"sh -c 'mkdir -m {mode} {daemon.pipe} {daemon.log} && {CONTROL} -d; sleep 200'"
        )
        daemon.pid = self.start_contained(daemon, script, "--mount")
        return daemon

    def start_in_foreground(self, daemon: Daemon) -> None:
        """Start a control daemon that writes no log files."""
        silent = subprocess.DEVNULL
        process = subprocess.Popen(
            [CONTROL, "-f"], env=daemon.environment, stdout=silent, stderr=silent
        )
        self.others.append(process)
        self.daemons.append(daemon)
        daemon.pid = process.pid

    def clean_up(self) -> None:
        """End everything that was started, by PID."""
        end_all(self.clients)
        for other in self.others:
            other.kill()
            other.wait(5)
        for daemon in self.daemons:
            daemon.resume()
            for pid in (*daemon.servers(), daemon.pid):
                send(pid, signal.SIGKILL)


@dataclass(kw_only=True)
class Lab(Actors):
    scenario: str
    out: Path
    collector: Collector
    checks: list[Check] = field(default_factory=list)
    truth: list[dict[str, object]] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    seen: Metrics = field(init=False)  # The last collection.
    looked_at: float = 0.0

    # -- waiting for clients

    async def ready_client(self, mode: str, seconds: float, **settings: Any) -> Client:
        (client,) = await self.crowd(1, mode, seconds, **settings)
        return client

    async def end(self, *clients: Client) -> None:
        """Kill these clients, and wait until they have exited."""
        for client in clients:
            client.kill()
        await self.left(*clients)

    async def crowd(self, number: int, mode: str, seconds: float, **settings: Any) -> list[Client]:
        clients = [self.client(mode, seconds, **settings) for _ in range(number)]
        await self.ready(*clients)
        return clients

    async def quit(self, daemon: Daemon, *clients: Client) -> None:
        """Wait until these clients have exited, stop the daemon, and collect for a second."""
        await self.left(*clients)
        daemon.quit()
        await self.run(1)

    async def ready(self, *clients: Client, seconds: float = 30) -> None:
        """Wait until these clients have a context."""
        await self._await(lambda one: one.event("ready") is not None, "ready", clients, seconds)

    async def left(self, *clients: Client, seconds: float = 60) -> None:
        """Wait until these clients have exited."""
        await self._await(lambda one: one.process.poll() is not None, "left", clients, seconds)

    async def settled(self, client: Client, seconds: float) -> str:
        """Wait for a client's first event; return its name, with the code of an error.

        "" if the client hangs or crashed.
        """
        await asyncio.to_thread(
            wait, lambda: client.process.poll() is not None or client.events(), seconds
        )
        said = (client.events() or [{}])[0]
        return f"{said.get('event', '')} {said.get('code', '')}".strip()

    async def _await(
        self, done: Callable[[Client], bool], words: str, clients: Sequence[Client], seconds: float
    ) -> None:
        """Wait for all clients; meanwhile the recording continues, with a collection a second."""
        end = time.monotonic() + seconds
        while not all(map(done, clients)):
            if time.monotonic() > end:
                self.note(f"clients {words}", ok=False, wanted=words, got="not in time")
                return
            await asyncio.sleep(0.05)
            if time.monotonic() - self.looked_at > 1.0:
                await self.look()

    # -- watching

    async def look(self) -> Metrics:
        self.looked_at = time.monotonic()
        self.seen = Metrics(await self.collector.collect())
        return self.seen

    async def run(self, seconds: float) -> None:
        """Wait, with a collection a second for the recording."""
        end = time.monotonic() + seconds
        await self.look()
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(1.0, left))
            await self.look()

    def note(self, name: str, *, ok: bool, wanted: object, got: object) -> None:
        self.checks.append(Check(name, ok, str(wanted), str(got)))
        mark = "ok  " if ok else "FAIL"
        print(f"    {mark} {name}: {got}" + ("" if ok else f" (wanted {wanted})"), flush=True)

    def equal(self, name: str, got: object, wanted: object) -> None:
        self.note(name, ok=got == wanted, wanted=wanted, got=got)

    def value(self, name: str, **labels: object) -> float | None:
        """Return a metric of the last collection, of the youngest daemon unless another is named.

        See Metrics.value.
        """
        return self.seen.value(name, **self._about(name, labels))

    @property
    def server(self) -> int:
        """PID of the first server of the last collection."""
        return self.seen.snapshot.daemons[0].servers[0].pid

    def _about(self, name: str, labels: dict[str, object]) -> dict[str, object]:
        spec = CATALOGUE[name.removesuffix("_sum")]
        default = {"daemon": self.daemons[-1].label} if "daemon" in spec.labels else {}
        return {**default, **labels}

    def check(self, name: str, wanted: Wanted, **labels: object) -> None:
        """Check that a metric has this value, or is in this range, or (None) is absent."""
        got = self.value(name, **labels)
        shown = ",".join(f"{key}={label}" for key, label in labels.items() if key != "daemon")
        self.note(f"{name}{{{shown}}}", ok=_fits(got, wanted), wanted=wanted, got=got)
        words = {key: str(label) for key, label in self._about(name, labels).items()}
        at = self.seen.snapshot.taken_at
        self.truth.append({"at": at, "metric": name, "labels": words, "value": got})

    async def until(
        self, name: str, wanted: Wanted, *, seconds: float = 10, **labels: object
    ) -> None:
        """Collect until a metric has this value; a check in itself."""
        end = time.monotonic() + seconds
        await self.look()
        while not _fits(self.value(name, **labels), wanted) and time.monotonic() < end:
            await asyncio.sleep(0.2)
            await self.look()
        self.check(name, wanted, **labels)


def _runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def as_user(uid: int | None) -> list[str]:
    if not uid:
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _fits(got: float | None, wanted: Wanted) -> bool:
    if wanted is None or got is None:
        return wanted is None and got is None
    low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return low - 1e-9 <= got <= high + 1e-9


def machine() -> tuple[str, str]:
    """Return (GPUs, driver version) for the recordings' headers."""
    text = output_of(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", check=True
    ).stdout
    rows = [row.split(", ") for row in text.strip().splitlines()]
    return f"{len(rows)} x {rows[0][0]}, Linux {platform.release()}", rows[0][1]


@contextlib.asynccontextmanager
async def lab(scenario: str, words: str, out: Path, **overrides: object) -> AsyncIterator[Lab]:
    """A lab for one scenario; writes SCENARIO.rec.gz and SCENARIO.json at its end."""
    folder = Path(f"/tmp/lab-{scenario}")
    shutil.rmtree(folder, ignore_errors=True)
    values: dict[str, object] = {"mps_min_query_interval": 1.0, **overrides}
    settings = Settings(**values)  # type: ignore[arg-type]
    where, driver = machine()
    header = RecordingHeader(
        scenario=words,
        machine=where,
        driver_version=driver,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        started_at=time.time(),
        exporter_version=mps_exporter.__version__,
        anonymised=True,
    )
    writer = RecordingWriter(out / f"{scenario}.rec.gz", header)
    host = LiveHost(settings)
    collector = Collector(host, settings, on_observation=writer.add)
    follower = asyncio.create_task(collector.run_between_collections())
    one = Lab(folder, scenario=scenario, out=out, collector=collector)
    print(f"== {scenario}: {words}", flush=True)
    began = time.monotonic()
    try:
        yield one
    except Exception as error:  # noqa: BLE001 - a scenario that breaks is a failed check, the next one runs
        one.note("scenario", ok=False, wanted="to run", got=f"{type(error).__name__}: {error}")
        import traceback

        traceback.print_exc(file=sys.stdout)
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
        await host.close()
        writer.close()
        one.clean_up()
        truth = {
            "scenario": words,
            "machine": where,
            "driver_version": driver,
            "facts": one.facts,
            "checks": one.truth,
        }
        (out / f"{scenario}.json").write_text(json.dumps(truth, indent=1) + "\n")
        for daemon in one.daemons:
            for log in ("control", "server"):
                source = daemon.log / f"{log}.log"
                if source.exists():
                    shutil.copy(source, out / f"{scenario}.{daemon.pipe.name}.{log}.log")
        print(f"   {time.monotonic() - began:.1f} s", flush=True)

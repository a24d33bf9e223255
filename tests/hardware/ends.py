"""Ends of MPS clients, with and without GPU work in flight: python3 -m tests.hardware.ends OUT.

Each round starts a control daemon of its own, some neighbours (busy or idle clients), and one or
more clients that end in a known way. It keeps both logs, the truth (who ended how, who lost its
CUDA context, who had an illegal access of its own), and what a running exporter reported of it.
`python3 -m tools.unfinished_work_table` makes the table of docs/unfinished-work.md from them.

Needs nvcc, root, and PyTorch for a few of the rounds. It changes no GPU setting, and ends every
process that it started by its PID.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CONTROL = "nvidia-cuda-mps-control"
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}
CALLS = ("abort", "exit", "_exit", "segv")
LONG_WORK = ("device", "200", "100")
"""Kernels of 0.2 s that write device memory: 100 of them are queued."""

AFTER_END_SECONDS = 0.9
"""Between an end and the newcomer: a fault beside busy neighbours comes 0.1 to 0.3 s after it."""


@dataclass(frozen=True)
class End:
    """One client that ended."""

    pid: int
    how: str
    in_flight: bool | None
    """Whether it had GPU work queued; None: not known."""
    at: float
    neighbours: str
    work: str = ""


class Process(NamedTuple):
    """A CUDA program that was started."""

    role: str
    popen: subprocess.Popen[str]
    output: Path

    @property
    def pid(self) -> int:
        """Return its PID."""
        return self.popen.pid

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text(errors="replace")

    def wait_for(self, word: str, seconds: float = 60.0) -> bool:
        """Wait until it has printed this word; False: it ended without, or it took too long."""
        limit = time.monotonic() + seconds
        while word not in self.text():
            if self.popen.poll() is not None or time.monotonic() > limit:
                return word in self.text()
            time.sleep(0.005)
        return True


@dataclass
class Round:
    """One control daemon with its clients."""

    name: str
    gpu: str
    programs: Path
    folder: Path
    out: Path
    exporter: str
    ends: list[End] = field(default_factory=list)
    own_faults: list[int] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    daemon_pid: int = 0

    def start(self) -> None:
        """Start the control daemon."""
        for part in ("pipe", "log"):
            (self.folder / part).mkdir(parents=True)
        self._environment = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }
        environment = {**self._environment, "CUDA_VISIBLE_DEVICES": self.gpu}
        subprocess.run([CONTROL, "-d"], env=environment, check=True, timeout=20)
        self.daemon_pid = int((self.folder / "pipe/nvidia-cuda-mps-control.pid").read_text())

    def control(self, command: str) -> str:
        """Send the control daemon a command and return its reply."""
        try:
            return subprocess.run(
                [CONTROL],
                input=f"{command}\n",
                text=True,
                capture_output=True,
                timeout=10,
                env=self._environment,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired:
            return "no reply within 10 s"

    def run(self, role: str, program: str, *arguments: str) -> Process:
        """Start a CUDA program."""
        output = self.folder / f"output-{len(self.processes)}"
        binary = [sys.executable, str(HERE / program)] if program.endswith(".py") else None
        with output.open("w") as file:
            popen = subprocess.Popen(
                [*(binary or [str(self.programs / program)]), *arguments],
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        process = Process(role, popen, output)
        self.processes.append(process)
        return process

    def neighbours(self, words: str) -> None:
        """Start neighbours: "busy3+idle1" are three that run short kernels, and an idle one."""
        started = []
        for kind, number in re.findall(r"([a-z]+)(\d+)", words):
            for _ in range(int(number)):
                if kind == "idle":
                    started.append(self.run("idle", "leave", "nop", "0", "1", "sync_pause", "30"))
                else:
                    work = "device" if kind == "writing" else "read"
                    started.append(self.run("busy", "leave", work, "2", "1", "loop", "30"))
        for process in started:
            process.wait_for("init")
        time.sleep(0.2)

    def end(self, process: Process, how: str, *, in_flight: bool | None, words: str) -> None:
        """End a client by a signal, or note the end that it makes itself."""
        if how not in SIGNALS:
            process.wait_for("ending")
        at = time.time()
        if how in SIGNALS:
            os.kill(process.pid, SIGNALS[how])
        work = (
            " ".join(map(str, process.popen.args[1:4]))
            if isinstance(process.popen.args, list)
            else ""
        )
        self.ends.append(End(process.pid, how, in_flight, at, words, work))

    def newcomer(self) -> None:
        """Run a short client to its end."""
        process = self.run("newcomer", "leave", "device", "2", "1", "loop", "0.5")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(15)

    def finish(self) -> dict[str, object]:
        """Ask the exporter what it saw, end everything, and return the truth."""
        time.sleep(1.3)
        seen = self._seen()
        victims = []
        for process in self.processes:
            error = re.search(r"ERR (\d+)|CUDA error: (.*)", process.text())
            if error and process.pid not in self.own_faults:
                victims.append(
                    {"pid": process.pid, "role": process.role, "error": error[1] or error[2]}
                )
        return {
            "ends": [asdict(end) for end in self.ends],
            "victims": victims,
            "own_faults": self.own_faults,
            "processes": [
                {"pid": process.pid, "role": process.role, "returncode": process.popen.poll()}
                for process in self.processes
            ],
            "seen": seen,
        }

    def _seen(self) -> list[object]:
        """Return the incidents that the exporter reports of this daemon."""
        if not self.exporter:
            return []
        connection = http.client.HTTPConnection(self.exporter, timeout=20)
        connection.request("GET", "/api/v1/status")
        with connection.getresponse() as reply:
            status = json.load(reply)
        label = str(self.folder / "pipe")
        return [incident for incident in status["incidents"] if incident["daemon"] == label]

    def close(self) -> None:
        """End every process, and keep the logs."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()
        if self.daemon_pid:
            self.control("quit")
            time.sleep(0.15)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.daemon_pid, signal.SIGKILL)
        self.out.mkdir(parents=True, exist_ok=True)
        for log in ("control.log", "server.log"):
            source = self.folder / "log" / log
            if source.exists():
                shutil.copy(source, self.out)


Scenario = Callable[[Round], None]


def leave(how: str, neighbours: str, work: Sequence[str] = LONG_WORK) -> Scenario:
    """One client ends with kernels queued."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        last = ["pause", "25"] if how in SIGNALS else [how]
        process = one.run("leaver", "leave", *work, *last)
        if process.wait_for("queued"):
            time.sleep(0.25)
            one.end(process, how, in_flight=True, words=neighbours)
        time.sleep(AFTER_END_SECONDS)
        one.newcomer()

    return scenario


def leave_after(gap: float, neighbours: str) -> Scenario:
    """One ends with kernels queued, an idle one `gap` seconds later (earlier, if negative)."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        idle = one.run("leaver", "leave", "nop", "0", "1", "sync_pause", "30")
        idle.wait_for("synced")
        busy = one.run("leaver", "leave", *LONG_WORK, "pause", "25")
        busy.wait_for("queued")
        time.sleep(0.3)
        order = [(busy, True), (idle, False)]
        for number, (process, in_flight) in enumerate(order if gap >= 0 else order[::-1]):
            time.sleep(abs(gap) * number)
            one.end(process, "SIGKILL", in_flight=in_flight, words=neighbours)
        time.sleep(AFTER_END_SECONDS)
        one.newcomer()

    return scenario


def without_work(what: str, how: str, neighbours: str) -> Scenario:
    """One client ends with nothing queued."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        word = "synced"
        if what == "idle":
            process = one.run("leaver", "leave", "nop", "0", "1", "sync_pause", "30")
        elif what == "synchronised":
            process = one.run("leaver", "leave", "device", "5", "10", "sync_pause", "30")
        elif what == "terminated":
            process = one.run("leaver", "leave", *LONG_WORK, "pause", "25")
            word = "queued"
        else:  # short kernels
            process = one.run(
                "leaver",
                "leave",
                "nop",
                "0",
                "100",
                *(["pause", "25"] if how in SIGNALS else [how]),
            )
            word = "queued"
        process.wait_for(word)
        time.sleep(0.5)
        if what == "terminated":
            server = one.control("get_server_list").split()[0]
            one.control(f"terminate_client {server} {process.pid}")
        one.end(process, how, in_flight=False, words=neighbours)
        time.sleep(0.6)
        one.newcomer()

    return scenario


def in_order(number: int, neighbours: str) -> Scenario:
    """Clients that finish their work and end by themselves, at about the same time."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        group = [one.run("leaver", "leave", "read", "2", "1", "loop", "3") for _ in range(number)]
        for process in group:
            process.popen.wait()
            one.ends.append(
                End(
                    process.pid,
                    "in order",
                    in_flight=False,
                    at=time.time(),
                    neighbours=f"{number} at once",
                )
            )
        time.sleep(0.5)
        one.newcomer()

    return scenario


def together(number: int, how: str, neighbours: str, with_work: str = "") -> Scenario:
    """Many idle clients are killed at once.

    with_work: one with kernels queued is killed with them, "first" or "last".
    """

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        group = [
            one.run("leaver", "leave", "nop", "0", "1", "sync_pause", "30") for _ in range(number)
        ]
        for process in group:
            process.wait_for("synced")
        ending = [(process, False) for process in group]
        if with_work:
            busy = one.run("leaver", "leave", *LONG_WORK, "pause", "25")
            busy.wait_for("queued")
            time.sleep(0.25)
            ending.insert(0 if with_work == "first" else number, (busy, True))
        for process, in_flight in ending:
            one.end(process, how, in_flight=in_flight, words=f"{number} at once")
        time.sleep(2.2)
        one.newcomer()

    return scenario


def two_leave(neighbours: str) -> Scenario:
    """Two clients end with kernels queued, at once."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        group = [one.run("leaver", "leave", *LONG_WORK, "pause", "25") for _ in range(2)]
        for process in group:
            process.wait_for("queued")
        time.sleep(0.3)
        for process in group:
            one.end(process, "SIGKILL", in_flight=True, words=neighbours)
        time.sleep(AFTER_END_SECONDS)
        one.newcomer()

    return scenario


def own_fault(mode: str, neighbours: str, idle_ends: float | None = None) -> Scenario:
    """A client has a fault of its own; an idle one was killed `idle_ends` seconds before it."""

    def scenario(one: Round) -> None:
        culprit = one.run("own fault", "leave", mode, "2500")
        culprit.wait_for("init")
        due = time.monotonic() + 2.5
        one.own_faults.append(culprit.pid)
        one.neighbours(neighbours)
        if idle_ends is not None:
            idle = one.run("leaver", "leave", "nop", "0", "1", "sync_pause", "30")
            idle.wait_for("synced")
            time.sleep(max(0.0, due - idle_ends - time.monotonic()))
            one.end(idle, "SIGKILL", in_flight=False, words=neighbours)
        culprit.popen.wait()
        time.sleep(0.8)
        one.newcomer()

    return scenario


def torch(mode: str, how: str, neighbours: str, *, in_flight: bool | None) -> Scenario:
    """A PyTorch program is ended by a signal."""

    def scenario(one: Round) -> None:
        one.neighbours(neighbours)
        process = one.run("leaver", "torch_leave.py", mode, "25")
        if process.wait_for("queued", 90):
            time.sleep(0.3)
            one.end(process, how, in_flight=in_flight, words=neighbours)
        time.sleep(AFTER_END_SECONDS)
        one.newcomer()

    return scenario


def rounds_with_work() -> Iterator[tuple[str, Scenario]]:
    """Give the rounds in which clients end with kernels queued."""
    for how, near in product(
        (*SIGNALS, *CALLS), ("busy1", "busy3", "idle3", "none", "writing2+idle1")
    ):
        yield f"leave-{how}-{near}", leave(how, near)
    works = (
        "device 2000 3",
        "device 20 500",
        "device 2 4000",
        "host 200 100",
        "graph 100 100",
        "streams 100 100",
        "read 200 100",
    )
    for work, near in product(works, ("busy2", "idle2", "none")):
        yield f"leave-{work.replace(' ', '-')}-{near}", leave("SIGKILL", near, work.split())
    for near in ("busy7", "writing7", "idle7", "busy3+idle4"):
        yield f"leave-SIGKILL-{near}", leave("SIGKILL", near)
    for near in ("busy2", "idle2", "none"):
        yield f"two-{near}", two_leave(near)
    for gap in (-0.3, -0.15, -0.05, 0.0, 0.05, 0.12):
        yield f"idle-after-{gap}-busy2", leave_after(gap, "busy2")
    for gap in (-0.1, 0.0, 0.1):
        yield f"idle-after-{gap}-idle2", leave_after(gap, "idle2")
    for place, (number, near) in product(
        ("first", "last"), ((20, "busy2"), (6, "busy2"), (8, "idle2"))
    ):
        yield f"together-{number}-{place}-{near}", together(number, "SIGKILL", near, place)


def rounds_without_work() -> Iterator[tuple[str, Scenario]]:
    """Give the rounds in which clients end with nothing queued."""
    ways = {
        "idle": tuple(SIGNALS),
        "synchronised": ("SIGKILL", "SIGTERM"),
        "short": ("SIGKILL", "exit", "abort"),
        "terminated": ("SIGKILL",),
    }
    for what, hows in ways.items():
        for how, near in product(hows, ("busy2", "idle2", "none")):
            yield f"clean-{what}-{how}-{near}", without_work(what, how, near)
    for number, near in ((1, "busy2"), (1, "idle2"), (1, "none"), (20, "busy2"), (20, "none")):
        yield f"in-order-{number}-{near}", in_order(number, near)
    for near, how in product(("busy2", "idle3", "none"), ("SIGKILL", "SIGTERM")):
        yield f"together-20-{how}-{near}", together(20, how, near)


def rounds_with_own_faults() -> Iterator[tuple[str, Scenario]]:
    """Give the rounds in which a client has a fault of its own."""
    for mode, near in product(("fault", "trap"), ("busy3", "idle3", "none", "writing3")):
        yield f"own-{mode}-{near}", own_fault(mode, near)
    for seconds, near in product((0.05, 0.12, 0.16, 0.2, 0.25, 0.4), ("busy3", "idle2")):
        yield f"own-fault-{near}-after-{seconds}", own_fault("fault", near, seconds)


def rounds_of_torch() -> Iterator[tuple[str, Scenario]]:
    """Give the rounds with PyTorch."""
    for mode, how in product(("matmul", "streams", "graph", "train"), ("SIGKILL", "SIGTERM")):
        flight = None if mode == "train" else True
        yield f"torch-{mode}-{how}-busy2", torch(mode, how, "busy2", in_flight=flight)
    for near, how in (("idle2", "SIGKILL"), ("busy2", "SIGINT"), ("none", "SIGKILL")):
        yield f"torch-matmul-{how}-{near}", torch("matmul", how, near, in_flight=True)


def plan() -> list[tuple[str, Scenario]]:
    """Return all rounds, by name."""
    return [
        *rounds_with_work(),
        *rounds_without_work(),
        *rounds_with_own_faults(),
        *rounds_of_torch(),
    ]


def gpus() -> list[str]:
    """Return the indices of this machine's GPUs."""
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return re.findall(r"^GPU (\d+):", listing.stdout, re.MULTILINE)


def main() -> int:
    """Act the rounds out, one GPU beside the other; give 1 if any could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="start no round after this")
    parser.add_argument(
        "--exporter", default="", help="HOST:PORT of a running exporter to compare with"
    )
    parser.add_argument("--only", default="", help="regular expression of rounds to act out")
    arguments = parser.parse_args()
    jobs = [
        (number, *one) for number, one in enumerate(plan()) if re.search(arguments.only, one[0])
    ]
    random.Random(7).shuffle(jobs)  # so that an early end leaves a mixture
    limit, lock, failed = time.monotonic() + arguments.seconds, threading.Lock(), list[str]()

    def work(gpu: str, programs: Path, folder: Path) -> None:
        while True:
            with lock:
                if not jobs or time.monotonic() > limit:
                    return
                number, name, scenario = jobs.pop()
            label = f"{number:03d}-{name}"
            one = Round(
                label, gpu, programs, folder / label, arguments.out / label, arguments.exporter
            )
            try:
                one.start()
                scenario(one)
                truth = one.finish()
            except Exception as error:  # noqa: BLE001 - the other rounds are still worth having
                failed.append(f"{label}: {error!r}")
                truth = None
            finally:
                one.close()
            if truth is not None:
                (one.out / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
                print(f"{label}: victims {truth['victims']}", flush=True)

    with tempfile.TemporaryDirectory(prefix="ends-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        source, binary = HERE / "leave.cu", folder / "leave"
        subprocess.run(["nvcc", "-arch=sm_90", "-o", str(binary), str(source)], check=True)
        threads = [threading.Thread(target=work, args=(gpu, folder, folder)) for gpu in gpus()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{len(jobs)} rounds not acted out, {len(failed)} failed", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""GPU faults with a known cause: python3 -m tests.hardware.faults OUT.

In each round a client with neighbours ends with GPU work in flight, or uses a bad pointer. Two
exporters observe, one without the kernel log, a third records. Needs nvcc, root, and PyTorch.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hardware.lab import Actors, Client, exporter, get, serving

PORTS = {"kernel log": 9481, "no kernel log": 9482}
WORK = ("device", "100", "60")  # 60 kernels of 0.1 s that write device memory.
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
MEMORY_GROUP = Path("/sys/fs/cgroup/mps-lab")


@dataclass
class Round(Actors):
    """One control daemon with its clients, and the truth about them."""

    left_work: list[int] = field(default_factory=list)
    own_fault: list[int] = field(default_factory=list)
    innocent: list[int] = field(default_factory=list)

    def run(self, *arguments: str, uid: int = 0, memory_limit: bool = False) -> Client:
        join = f'echo $$ >{MEMORY_GROUP}/cgroup.procs; exec "$@"'
        before = ("sh", "-c", join, "sh") if memory_limit else ()
        if arguments[0] == "torch":
            return self.torch("leave", *arguments[1:], uid=uid, before=before)
        return self.leaver(*arguments, uid=uid, before=before)

    def neighbours(self, words: str, uid: int = 0) -> None:
        """Start neighbours: "busy3+idle1" are three that run short kernels, and an idle one."""
        started = [
            self.idle() if kind == "idle" else self.run("read", "2", "1", "loop", "30", uid=uid)
            for kind, number in re.findall(r"([a-z]+)(\d+)", words)
            for _ in range(int(number))
        ]
        for client in started:
            client.wait_for("init")
        time.sleep(0.3)

    def idle(self) -> Client:
        return self.run("nop", "0", "1", "sync_pause", "30")

    def new_client(self) -> None:
        client = self.run("device", "2", "1", "loop", "0.3")
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.process.wait(10)


Act = Callable[[Round], None]


def leave(how: str, near: str, *work: str, number: int = 1, gap: float = 0.0, uid: int = 0) -> Act:
    """Clients exit with kernels queued, at the same time or `gap` seconds apart."""

    def act(one: Round) -> None:
        one.neighbours(near, uid)
        end = ("pause", "25") if how in FROM_OUTSIDE else (how, "1")
        python = work[:1] == ("torch",)
        words = (*work, "25") if python else (*(work or WORK), *end)
        group = [one.run(*words, uid=uid, memory_limit=how == "oom") for _ in range(number)]
        for client in group:
            client.wait_for("queued")
        time.sleep(0.35)
        for client in group:
            one.left_work.append(client.pid)
            if how in FROM_OUTSIDE:
                os.kill(client.pid, getattr(signal, how))
            time.sleep(gap)
        time.sleep(1.0)
        one.new_client()

    return act


def quick(near: str) -> Act:
    """A client exits right after it has connected."""

    def act(one: Round) -> None:
        one.neighbours(near)
        client = one.run(*WORK, "_exit", "0")
        one.left_work.append(client.pid)
        client.process.wait(20)
        time.sleep(0.8)
        one.new_client()

    return act


def own(kind: str, near: str, *, first: bool = False, innocent_after: float | None = None) -> Act:
    """A client uses a bad pointer; an idle client is killed some seconds later or earlier."""

    def act(one: Round) -> None:
        if not first:
            one.neighbours(near)
        faulty = one.run(kind, "0", "0", "", "0.5")
        faulty.wait_for("queued")
        if first:
            one.neighbours(near)
        one.own_fault.append(faulty.pid)
        steps = [(0.0, faulty.pid, signal.SIGUSR1)]
        if innocent_after is not None:
            innocent = one.idle()
            innocent.wait_for("synced")
            one.innocent.append(innocent.pid)
            steps.append((innocent_after, innocent.pid, signal.SIGKILL))
        time.sleep(0.5)
        steps.sort()
        begun = steps[0][0]
        for at, pid, number in steps:
            time.sleep(at - begun)
            begun = at
            os.kill(pid, number)
        time.sleep(1.0)
        one.new_client()

    return act


def loaded(act: Act) -> Act:
    """Meanwhile two processes for each CPU compute."""

    def under_load(one: Round) -> None:
        count = 2 * (os.cpu_count() or 1)
        spin = [sys.executable, "-c", "while True: pass"]
        burners = [subprocess.Popen(spin) for _ in range(count)]
        try:
            act(one)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()

    return under_load


BUSY, MIXED = "busy2", "busy1+idle1"
CONTEXTS = ("contexts", *WORK[1:])
PLAN: list[tuple[str, Act]] = [
    *((how, leave(how, BUSY)) for how in (*FROM_OUTSIDE, "exit", "_exit", "abort", "segv", "exec")),
    *((f"{how} idle2", leave(how, "idle2")) for how in ("SIGKILL", "exit", "exec")),
    *((f"oom {near}", leave("oom", near)) for near in (BUSY, BUSY, BUSY, "idle2", MIXED)),
    *(
        (f"contexts {near}", leave("SIGKILL", near, *CONTEXTS))
        for near in (BUSY, BUSY, "idle2", MIXED)
    ),
    *(
        (f"{work} {near}", leave("SIGKILL", near, work, *WORK[1:]))
        for work in ("graph", "streams", "read")
        for near in (BUSY, MIXED)
    ),
    *(
        (f"torch {mode} {how}", leave(how, BUSY, "torch", mode))
        for mode, how in (("matmul", "SIGKILL"), ("matmul", "SIGTERM"), ("streams", "SIGKILL"))
    ),
    *(
        (f"loaded {how} {near}", loaded(leave(how, near)))
        for how, near in (
            ("SIGKILL", BUSY),
            ("SIGKILL", "idle3"),
            ("exit", BUSY),
            ("SIGTERM", "busy1"),
        )
    ),
    ("loaded contexts", loaded(leave("SIGKILL", BUSY, *CONTEXTS))),
    *(
        (f"{number} at once {gap} {near}", leave("SIGKILL", near, number=number, gap=gap))
        for number, gap, near in (
            (2, 0, BUSY),
            (2, 0, "idle2"),
            (2, 0.03, BUSY),
            (4, 0, BUSY),
            (4, 0, "idle1"),
        )
    ),
    *((f"alone {how}", leave(how, "")) for how in ("SIGKILL", "exit", "SIGTERM")),
    *((f"quick {near}", quick(near)) for near in (BUSY, "idle2")),
    ("user 1001", leave("SIGKILL", BUSY, uid=1001)),
    *(
        (f"own {kind} {near}", own(kind, near))
        for kind in ("null", "over")
        for near in (BUSY, "idle2")
    ),
    *((f"own {kind} first", own(kind, BUSY, first=True)) for kind in ("null", "over")),
    ("own trap", own("trap", BUSY)),
    *(
        (f"own {kind} innocent {after}", own(kind, BUSY, innocent_after=after))
        for kind in ("null", "over")
        for after in (-0.05, -0.01, -0.003, 0, 0.003, 0.01, 0.05)
    ),
    ("own null innocent 0 idle2", own("null", "idle2", innocent_after=0)),
]


def incidents(port: int, pipe: str) -> list[dict[str, Any]]:
    """Return the faults of a daemon that an exporter reports."""
    status = json.loads(get(port, "/api/v1/status"))
    kinds = ("fault", "unfinished_work")
    return [i for i in status["incidents"] if i["daemon"] == pipe and i["kind"] in kinds]


def verdict(one: Round, seen: list[dict[str, Any]]) -> str:
    """Compare an exporter's report with the truth."""
    named = {(incident["kind"], pid) for incident in seen for pid in incident["caused_by_pids"]}
    true = {("unfinished_work", pid) for pid in one.left_work} | {
        ("fault", pid) for pid in one.own_fault
    }
    listed = {ended["pid"] for incident in seen for ended in incident["ended_before"]}
    if named - true:
        return "WRONG"
    if named:
        return "named"
    proofs = "/".join(sorted({incident["proof"] for incident in seen}))
    suspected = " (lists an innocent)" if listed & {*one.innocent} else ""
    return f"not named: {proofs}{suspected}" if seen else "no fault"


def scrape() -> None:
    """Scrape each exporter once a second: a scrape discovers new daemons."""
    while True:
        for port in PORTS.values():
            with contextlib.suppress(OSError):
                get(port, "/metrics")
        time.sleep(1.0)


def act_out(name: str, act: Act, folder: Path) -> dict[str, Any]:
    one = Round(folder)
    daemon = one.daemon()
    began = time.time()
    try:
        act(one)
        time.sleep(2.0)
        seen = {which: incidents(port, daemon.label) for which, port in PORTS.items()}
    finally:
        for client in one.clients:
            client.kill()
        daemon.quit(5)
        one.clean_up()
    result = {
        "round": name,
        "daemon": daemon.label,
        "began": began,
        "left_work": one.left_work,
        "own_fault": one.own_fault,
        "innocent": one.innocent,
        "verdicts": {which: verdict(one, found) for which, found in seen.items()},
        "seen": seen,
    }
    print(f"{name}: {result['verdicts']}", flush=True)
    return result


def prepare_memory_group() -> None:
    """Make a control group whose processes are killed when they use 3 GiB."""
    with contextlib.suppress(OSError):
        (MEMORY_GROUP.parent / "cgroup.subtree_control").write_text("+memory")
    MEMORY_GROUP.mkdir(exist_ok=True)
    (MEMORY_GROUP / "memory.max").write_text(str(3 << 30))
    with contextlib.suppress(OSError):
        (MEMORY_GROUP / "memory.swap.max").write_text("0")


def main() -> int:
    """Act the rounds out; return 1 if an exporter was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="start no round after this")
    parser.add_argument("--only", default="", help="regular expression of rounds to act out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    limit = time.monotonic() + arguments.seconds
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            prepare_memory_group()
        except OSError as error:
            print(f"no memory limit can be set: {error}", flush=True)
        recording = arguments.out / "faults.rec.gz"
        quiet = "--log.level=error"
        stack.enter_context(serving(PORTS["kernel log"], quiet))
        stack.enter_context(serving(PORTS["no kernel log"], quiet, "--path.kmsg=/nonexistent"))
        flags = ("--anonymise", "--duration=3600s", quiet)
        recorder = subprocess.Popen(exporter("record", str(recording), *flags))
        stack.callback(recorder.wait, 20)
        stack.callback(recorder.terminate)
        time.sleep(3)
        threading.Thread(target=scrape, daemon=True).start()
        for number, (words, act) in enumerate(PLAN):
            if time.monotonic() > limit:
                print(f"no time for {words}", flush=True)
            elif re.search(arguments.only, words):
                try:
                    results.append(act_out(words, act, folder / f"r{number}"))
                except Exception as error:  # noqa: BLE001 - the other rounds are still worth having
                    print(f"{words}: {error!r}", flush=True)
    (arguments.out / "faults.json").write_text(json.dumps(results) + "\n")
    for which in PORTS:
        print(which, dict(Counter(one["verdicts"][which] for one in results)), flush=True)
    return int(any("WRONG" in one["verdicts"].values() for one in results))


if __name__ == "__main__":
    sys.exit(main())

"""Attacks of ordinary users, pods and the network, all at once on a host with root's daemons.

    python -m bench.attacks [--scrapes N] [--fakes N]

Run it as root. It makes a host of its own (namespaces, loopback only) for root's daemons, the
exporter with the rights of its systemd unit, Prometheus and Alertmanager with the rules and routes
of this project, and the attackers. Prometheus' intervals are 5 s. A second host without attackers
is scraped at the same time: the attackers' programs take CPU time of both hosts. An attack that
this machine does not allow is reported with the reason. Ends with status 1 if a limit is exceeded.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import yaml

from bench.http import children_cpu_seconds
from testing.attacker import (
    ALICE,
    AS_ALICE,
    LOCK_WHEN_FREE,
    LOGS,
    PIPE,
    SERVE_WHEN_FREE,
    VANISH,
    another_job,
    attack,
    crowd,
    fault_and_death,
    in_pod,
    lock_memory,
)
from testing.own_host import ENVIRONMENT, ROOT, TOOL, Daemon, OwnHost, as_user, own_host
from testing.prometheus_programs import alertmanager, program

SLOWER, SECONDS, REFUSAL_SECONDS, DOCTOR_SECONDS = 2.0, 30.0, 5.0, 60.0
"""Limits: attacked to calm scrapes; until an event is shown; N10; how long doctor is awaited."""
TICKET_SECONDS = 60.0  # Alertmanager collects a group's first tickets for 30 s.
INTERVAL = "5s"
ADDRESS = "127.0.0.1:9400"
NOTIFICATIONS = "/run/notifications"
CLIENTS_UID, EXPORTER_UID = 1002, 1001
LOCKED, SERVED = "/tmp/mps-locked", "/tmp/mps-served"
"""Daemons that die: an ordinary user locks the directory of one, a pod that of the other."""
PIPES = (PIPE, LOCKED, SERVED)
AS_UNIT = as_user(EXPORTER_UID, "sys_ptrace", "dac_read_search")

SCRAPE = f"""
import http.client, sys, time
for _ in range(int(sys.argv[1])):
    began, status = time.monotonic(), 0
    try:
        connection = http.client.HTTPConnection("{ADDRESS}", timeout=10)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    except (OSError, http.client.HTTPException):
        pass
    print(time.monotonic() - began, status, flush=True)
    time.sleep(0.5)
"""
RECEIVE = f"""
import http.server, json
class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("{NOTIFICATIONS}", "a") as file:
            for alert in body["alerts"]:
                print(json.dumps([self.path, alert["labels"]]), file=file)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 9099), Receiver)
print("ready", flush=True)
server.serve_forever()
"""


@dataclass
class Stage:
    """A host with root's daemons and the exporter, and what the attackers did there."""

    host: OwnHost
    daemons: dict[str, Daemon]  # Root's, by their pipe directories.
    fakes: int
    refusal_seconds: float = 0.0  # CPU time until the exporter refuses a web configuration.
    not_acted: dict[str, str] = field(default_factory=dict)  # Attack -> reason.

    def value(self, metric: str, **labels: object) -> float:
        """Scrape, and return the sum of a metric's values with these labels; 0 if absent."""
        return self.host.scrape().value(metric, **labels) or 0.0

    def run(self, code: str, *arguments: str) -> None:
        """Run a program of hers, and wait until it is ready."""
        self.host.ready(sys.executable, "-c", code, *arguments, rights=AS_ALICE)


# ---------------------------------------------------------------------- attacks


def unreadable_processes(stage: Stage) -> None:
    """One has the name of a daemon, the other is a client of root's daemon."""
    lock_memory(stage.host)
    stage.daemons[PIPE].connect(lock_memory(stage.host, "train"), ALICE)


def pods(stage: Stage) -> None:
    """Root of a pod and the exporter's UID in a pod; root of a pod replaces root's daemon."""
    for uid in (0, EXPORTER_UID):
        in_pod(stage.host, crowd(stage.fakes, "/tmp/pod"), uid)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": SERVED, "CUDA_MPS_LOG_DIRECTORY": "/var/log/pod"}
    in_pod(stage.host, SERVE_WHEN_FREE, 0, variables)


def nested_configuration(stage: Stage) -> None:
    """A web configuration of 2,000 nested levels."""
    stage.host.outside("/run/nested.yml").write_text("[\n" * 2000)
    words = ("-m", "mps_exporter", "serve", "--web.config.file=/run/nested.yml")
    before = children_cpu_seconds()
    status = stage.host.start(sys.executable, *words, environment=ENVIRONMENT).wait(60)
    stage.refusal_seconds = children_cpu_seconds() - before if status else float("inf")


ATTACKS: dict[str, Callable[[Stage], None]] = {
    "N2, N5, N9": lambda stage: fault_and_death(stage.host),
    "older ones": lambda stage: attack(stage.host, stage.daemons[PIPE]),
    "N3": lambda stage: stage.run(LOCK_WHEN_FREE, LOCKED),
    "N4": pods,
    "N6": lambda stage: another_job(stage.host, stage.daemons[PIPE]),
    "N7": lambda stage: stage.run(VANISH),
    "N10": nested_configuration,
    "N1": unreadable_processes,
}
"""Each continues until the end. N1 is last: an exporter that it blinds shows no other attack."""


def act(stage: Stage) -> None:
    for name, attacker in ATTACKS.items():
        try:
            attacker(stage)
        except (OSError, pytest.skip.Exception) as error:
            stage.not_acted[name] = str(error)


# ---------------------------------------------------------------------- root's side

FLAGS = [f"--mps.pipe-directory={pipe}" for pipe in PIPES]


@contextmanager
def staged(fakes: int) -> Iterator[Stage]:
    """Make a host with root's daemons, a client and the exporter, and end them."""
    with own_host() as host:
        host.outside("/tmp/alice").mkdir(mode=0o755)
        host.start("chown", str(ALICE), "/tmp/alice").wait()
        host.start("ip", "link", "set", "lo", "up").wait()
        daemons = {pipe: host.daemon(pipe, pipe.replace("/tmp", "/var/log")) for pipe in PIPES}
        stage = Stage(host, daemons, fakes)
        host.client(stage.daemons[PIPE], CLIENTS_UID)
        deadlines = ("--mps.query-timeout=2s", "--collector.timeout=10s")
        more = (f"--web.listen-address={ADDRESS}", "--mps.min-query-interval=5s")
        host.serve(*FLAGS, *deadlines, *more, rights=AS_UNIT)
        yield stage


def start_pager(host: OwnHost) -> bool:
    """Start Prometheus, Alertmanager and a webhook, if they are installed."""
    try:
        prometheus, manager = str(program("prometheus").resolve()), alertmanager()
    except AssertionError:
        return False
    config = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    names = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config["global"] |= dict.fromkeys(names, INTERVAL)
    config["rule_files"] = [f"{ROOT}/prometheus/rules/*.yml"]
    host.outside("/run/prometheus.yml").write_text(yaml.safe_dump(config))
    host.ready(sys.executable, "-c", RECEIVE)
    routes = f"--config.file={ROOT}/prometheus/alertmanager.yml"
    for command in (
        [*manager, routes, "--cluster.listen-address="],
        [prometheus, "--config.file=prometheus.yml", "--web.listen-address=127.0.0.1:9090"],
    ):
        host.start("sh", "-c", 'cd /run && exec "$@" >/dev/null 2>&1', "sh", *command)
    return True


def notified(host: OwnHost) -> list[tuple[str, dict[str, str]]]:
    file = host.outside(NOTIFICATIONS)
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


Scrapes = list[tuple[float, int]]  # Seconds and status of each scrape; status 0: no answer.
Bar = tuple[str, str, bool]  # What is measured, the value, and whether it is within its limit.


def in_time(name: str, question: Callable[[], object], limit: float = SECONDS) -> Bar:
    """Ask until the answer is true, twice as long as the limit."""
    began = time.monotonic()
    while not (answer := question()) and time.monotonic() - began < 2 * limit:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    text = f"after {seconds:.1f} s (limit {limit:g})"
    return name, text, bool(answer) and seconds <= limit


def verdict(host: OwnHost) -> str:
    """Return the status and the text of the node's health check."""
    words = ("-m", "mps_exporter", "doctor", "--check=critical", *FLAGS)
    more = (f"--mps.control-binary={TOOL}", "--no-collector.nvml")
    process = host.start(sys.executable, *words, *more, environment=ENVIRONMENT, rights=AS_UNIT)
    try:
        text, _ = process.communicate(timeout=DOCTOR_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {DOCTOR_SECONDS:g} s"
    return f"{process.returncode} {text.decode().strip()}"


def scrapes(count: int, *stages: Stage) -> list[Scrapes]:
    """Scrape these hosts from inside, at the same time."""
    words = (sys.executable, "-c", SCRAPE, str(count))
    outputs = [one.communicate()[0] for one in [stage.host.start(*words) for stage in stages]]
    rows = [[line.split() for line in output.decode().splitlines()] for output in outputs]
    return [[(float(seconds), int(status)) for seconds, status in one] for one in rows]


def scrape_bars(before: Scrapes, beside: Scrapes, calm: Scrapes) -> Iterator[Bar]:
    """Compare scrapes before and during the attacks, and scrapes of the calm host."""
    medians = []
    names = ("before the attacks", "attacked", "of the calm host meanwhile")
    for name, rows in zip(names, (before, beside, calm), strict=True):
        times = [seconds for seconds, _ in rows]
        medians.append(statistics.median(times))
        text = f"{medians[-1]:.3f} s, at most {max(times):.3f} s"
        yield f"{len(rows)} scrapes {name}", text, True
    ratio = medians[1] / max(medians[0], medians[2])
    yield "attacked to calm", f"{ratio:.2f} (limit {SLOWER:g})", ratio <= SLOWER
    failed = [status for _, status in beside if status != 200]
    yield "failed scrapes", f"{len(failed)}", not failed


def bars(stage: Stage, calm: Stage, count: int) -> Iterator[Bar]:
    """Attack, and yield what was measured."""
    host, log = stage.host, stage.host.outside(f"{LOGS}/control.log")
    quiet, _ = scrapes(count, stage, calm)
    before = verdict(host)
    paged = start_pager(host)
    act(stage)
    beside, meanwhile = scrapes(count, stage, calm)
    yield from scrape_bars(quiet, beside, meanwhile)
    after = verdict(host)
    yield "verdict on the node", f"{before} -> {after}", before == after
    stage.daemons[PIPE].crash(7001)
    shutil.copy(log, f"{log}.1")
    log.write_bytes(b"")  # copytruncate (N8)

    def counted() -> float:
        return stage.value("mps_server_exits_total", daemon=PIPE, cause="crashed")

    def told() -> bool:
        page = ("/pager", "MpsServerCrashed", PIPE)
        found = [(to, of["alertname"], of.get("daemon")) for to, of in notified(host)]
        return page in found if paged else counted() == 1

    where = "a webhook" if paged else "/metrics, because Prometheus is missing"
    yield in_time(f"root's crash is at {where}", told)
    yield "N8 crashes counted in a truncated log", f"{counted():g} of 1", counted() == 1
    new = host.daemon("/tmp/mps-new", "/var/log/mps-new")
    yield in_time("N1 new daemon is found", new.is_up)
    for name, pipe in (("N3", LOCKED), ("N4", SERVED)):
        stage.daemons[pipe].kill()
        absent = {"daemon": pipe, "mps_control_state": "absent"}
        question = partial(stage.value, "mps_control_state", **absent)
        yield in_time(f"{name} dead daemon is absent", question)

    def is_ticket() -> bool:
        return any(
            to == "/tickets" and of.get("daemon_uid") == str(ALICE) for to, of in notified(host)
        )

    if paged:
        yield in_time("N9 ticket about her daemon", is_ticket, TICKET_SECONDS)
    yield from text_bars(stage)


def text_bars(stage: Stage) -> Iterator[Bar]:
    """Yield what contains an attacker's words, and N10."""
    host = stage.host
    found = json.loads(host.get("/api/v1/status")[1])["findings"]
    commands = [action["command"] for one in found for action in one["actions"]]
    hers = [one for one in commands if "alice" in one and not one.startswith("sudo -u '#")]
    yield "N5 commands with her text", f"{hers}", not hers
    jobs = stage.value("mps_client_info", slurm_job_id=4242)
    yield "N6 clients in another's job", f"{jobs:g}", not jobs
    about_her = [(to, of) for to, of in notified(host) if "alice" in of.get("daemon", "")]
    bad = [of for to, of in about_her if to == "/pager" or of["daemon_uid"] != str(ALICE)]
    yield "N9 pages about her daemons, or without her UID", f"{bad}", not bad
    refused = stage.refusal_seconds
    text = f"is refused after {refused:.1f} s of CPU"
    yield "N10 nested configuration", text, refused <= REFUSAL_SECONDS


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attacks", description=__doc__)
    parser.add_argument("--scrapes", type=int, default=40, help="scrapes per phase (40)")
    parser.add_argument("--fakes", type=int, default=100, help="fake daemons per pod (100)")
    given = parser.parse_args(arguments)
    missed = 0
    with staged(given.fakes) as stage, staged(0) as calm:
        for name, value, met in bars(stage, calm, given.scrapes):
            print(f"{'met    ' if met else 'NOT MET'} {name}: {value}", flush=True)
            missed += not met
        for name, reason in stage.not_acted.items():
            print(f"not acted: {name}: {reason}")
    return min(1, missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

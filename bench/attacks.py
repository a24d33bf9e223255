"""An attacker beside root's daemon: what honest scrapes take, and when a crash reaches the pager.

    python -m bench.attacks [--scrapes N] [--clients N]

On a host of its own (namespaces: run it as root) it starts two daemons of root's, the exporter, the
real Prometheus and Alertmanager with the rules and the routes of this project, and a webhook. All
intervals of Prometheus are 5 s, for with 30 s a crash reaches a pager within 70 s, whoever attacks.
A server of one daemon crashes on the calm host, one of the other while an ordinary user does all of
testing/attacker.py, and somebody on the network scrapes with a timeout of 1 ms. Ends with
status 1 when a bar is not met. Meanwhile the exporter of a second such host, without an attacker,
is scraped just as often: on a machine without free cores the attacker's programs take the time of
both, and what the exporter itself does for the attacker shows in the ratio of these two.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from testing.attacker import ALICE, AS_ALICE, LOGS, PIPE, attack, crash
from testing.own_host import Daemon, OwnHost, own_host
from testing.prometheus_programs import alertmanager, program
from testing.waiting import wait_for

ROOT = Path(__file__).parents[1]
INTERVAL = "5s"
EXPORTER, WEBHOOK = 9400, 9099
CLIENTS_UID = 1001
OTHER_PIPE, OTHER_LOGS = "/tmp/mps-calm", "/var/log/mps-calm"
CONFIGURATION, NOTIFICATIONS = "/run/prometheus.yml", "/run/notifications"
SLOWER, SECONDS, MEGABYTES = 2.0, 30.0, 100.0


def scrapes(count: int, path: Path, pause_seconds: float = 0.5) -> list[tuple[float, int]]:
    """Scrape from 127.0.0.1; gives seconds and status of each, and 0 where none came."""
    found = []
    for _ in range(count):
        began, status = time.monotonic(), 0
        try:
            connection = http.client.HTTPConnection("127.0.0.1", EXPORTER, timeout=10)
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            answer.read()
            status = answer.status
            connection.close()
        except (OSError, http.client.HTTPException):
            pass
        found.append((time.monotonic() - began, status))
        time.sleep(pause_seconds)
    path.write_text(json.dumps(found))
    return found


def hurry() -> None:
    """Scrape with a timeout of 1 ms, four at a time, from another address, for ever."""

    def ask() -> None:
        while True:
            try:
                connection = http.client.HTTPConnection(
                    "127.0.0.1", EXPORTER, timeout=10, source_address=("127.0.0.2", 0)
                )
                headers = {"X-Prometheus-Scrape-Timeout-Seconds": "0.001"}
                connection.request("GET", "/metrics", headers=headers)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.25)

    for _ in range(4):
        threading.Thread(target=ask).start()
    print("ready", flush=True)


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Notes what Alertmanager sends, and when."""

    def do_POST(self) -> None:
        """Take one notification."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(NOTIFICATIONS).open("a") as file:
            for alert in body["alerts"]:
                note = {"at": time.time(), "receiver": self.path, "labels": alert["labels"]}
                file.write(json.dumps(note) + "\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def receive() -> None:
    """Be the webhook."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", WEBHOOK), _Receiver)
    print("ready", flush=True)
    server.serve_forever()


# ---------------------------------------------------------------------- on the host


def _here(host: OwnHost, *words: str, rights: Sequence[str] = ()) -> Any:
    return host.start(
        sys.executable,
        "-m",
        "bench.attacks",
        *words,
        environment={"PYTHONPATH": f"{ROOT}/exporter:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
        rights=rights,
    )


def _ready(process: Any) -> None:
    assert process.stdout.readline() == b"ready\n"


def start_monitoring(host: OwnHost) -> None:
    """Start Prometheus, Alertmanager and the webhook as shipped, but for the intervals."""
    config = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    config["global"]["scrape_timeout"] = INTERVAL
    config["rule_files"] = [str(ROOT / "prometheus" / "rules" / "*.yml")]
    host.outside(CONFIGURATION).write_text(yaml.safe_dump(config))
    _ready(_here(host, "receive"))
    host.start(
        "sh",
        "-c",
        'exec "$@" >/run/alertmanager.log 2>&1',
        "sh",
        *alertmanager(),
        f"--config.file={ROOT}/prometheus/alertmanager.yml",
        "--storage.path=/run/alertmanager",
        "--cluster.listen-address=",
    )
    host.start(
        "sh",
        "-c",
        'exec "$@" >/run/prometheus.log 2>&1',
        "sh",
        str(program("prometheus").resolve()),
        f"--config.file={CONFIGURATION}",
        "--storage.tsdb.path=/run/prometheus",
        "--web.listen-address=127.0.0.1:9090",
    )


def notified(host: OwnHost) -> list[dict[str, Any]]:
    """All notifications until now."""
    file = host.outside(NOTIFICATIONS)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until_paged(host: OwnHost, daemon: Daemon, server: int) -> float:
    """Let a server crash; gives seconds until the pager's webhook is told."""
    began = time.time()
    crash(daemon, server)

    def paged() -> float | None:
        for one in notified(host):
            labels = one["labels"]
            about = labels.get("daemon") == daemon.pipe
            crashed = labels["alertname"] == "MpsServerCrashed"
            if about and crashed and one["receiver"] == "/pager":
                return float(one["at"])
        return None

    return wait_for(paged) - began


def measured(count: int, *hosts: OwnHost) -> list[list[tuple[float, int]]]:
    """Scrape from inside these hosts, at the same time."""
    for process in [_here(host, "scrape", str(count), "/run/scrapes") for host in hosts]:
        process.wait()
    return [json.loads(host.outside("/run/scrapes").read_text()) for host in hosts]


def populate(host: OwnHost, clients: int) -> tuple[Daemon, Daemon]:
    """Start two daemons, the clients of the second, and the exporter."""
    host.start("ip", "link", "set", "lo", "up").wait()
    calm_daemon, daemon = host.daemon(OTHER_PIPE, OTHER_LOGS), host.daemon()
    for _ in range(clients):
        host.client(daemon, CLIENTS_UID)
    host.serve(
        f"--web.listen-address=127.0.0.1:{EXPORTER}",
        "--mps.min-query-interval=5s",
        "--mps.query-timeout=2s",
        "--collector.timeout=10s",
        f"--mps.pipe-directory={PIPE}",
        f"--mps.log-directory={LOGS}",
        f"--mps.pipe-directory={OTHER_PIPE}",
        f"--mps.log-directory={OTHER_LOGS}",
    )
    return calm_daemon, daemon


def parts(host: OwnHost, count: int = 9) -> dict[str, float]:
    """What the exporter says its sources take, medians of some scrapes (seconds)."""
    found: dict[str, list[float]] = {}
    for _ in range(count):
        for one in host.scrape()["mps_scrape_collector_duration_seconds"]:
            found.setdefault(one.labels["collector"], []).append(one.value)
        time.sleep(0.3)
    return {name: statistics.median(values) for name, values in found.items()}


def measure(count: int, clients: int) -> int:
    """Run it; gives how many bars are not met."""
    with own_host() as host, own_host() as other:
        host.outside("/tmp/alice").mkdir(mode=0o755)
        host.start("chown", str(ALICE), "/tmp/alice").wait()
        calm_daemon, daemon = populate(host, clients)
        populate(other, clients)
        start_monitoring(host)
        calm, _ = measured(count, host, other)
        calm_parts = parts(host)
        calm_page = until_paged(host, calm_daemon, 7001)
        attack(host, daemon)
        _ready(_here(host, "hurry", rights=AS_ALICE))
        wait_for(lambda: host.scrape().value("mps_exporter_ignored_processes", uid=str(ALICE)))
        beside, spared = measured(count, host, other)
        page = until_paged(host, daemon, 7002)
        more, more_spared = measured(count, host, other)
        beside, spared = beside + more, spared + more_spared
        beside_parts, metrics = parts(host), host.scrape()
        memory = (metrics.value("process_resident_memory_bytes") or 0) / 1e6
        hers = [
            one
            for one in notified(host)
            if one["receiver"] == "/pager" and "alice" in one["labels"].get("daemon", "")
        ]
    for name, seconds in sorted(beside_parts.items()):
        print(f"  {name:8} {1000 * calm_parts[name]:6.1f} ms calm, {1000 * seconds:6.1f} ms beside")
    failed = [status for _, status in beside if status != 200]
    medians = [statistics.median(seconds for seconds, _ in rows) for rows in (calm, beside, spared)]
    slowest = max(seconds for seconds, _ in beside)
    print(
        f"a scrape: {1000 * medians[0]:.0f} ms calm, {1000 * medians[1]:.0f} ms beside the attacker"
        f" (median of {len(beside)}; longest {slowest:.2f} s), {medians[1] / medians[0]:.2f} x\n"
        f"at the same time on the host without an attacker: {1000 * medians[2]:.0f} ms\n"
        f"crash to webhook: {calm_page:.1f} s calm, {page:.1f} s beside the attacker"
    )
    bars = {
        f"{len(failed)} honest scrapes fail": not failed,
        f"{medians[1] / medians[2]:.2f} times a host without attacker (at most {SLOWER:g})": (
            medians[1] <= SLOWER * medians[2]
        ),
        f"{page:.1f} s from the crash to the webhook (at most {SECONDS:g})": page <= SECONDS,
        f"{memory:.0f} MB of memory (at most {MEGABYTES:g})": memory <= MEGABYTES,
        f"{len(hers)} pages about daemons of hers": not hers,
    }
    for text, met in bars.items():
        print("met    " if met else "NOT MET", text)
    return list(bars.values()).count(False)


def main(arguments: Sequence[str]) -> int:
    """Run it, or one of the programs inside the host."""
    match arguments:
        case ["scrape", count, path]:
            scrapes(int(count), Path(path))
        case ["hurry"]:
            hurry()
        case ["receive"]:
            receive()
        case _:
            parser = argparse.ArgumentParser(
                prog="python -m bench.attacks",
                description=__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            parser.add_argument("--scrapes", type=int, default=40)
            parser.add_argument("--clients", type=int, default=40)
            given = parser.parse_args(arguments)
            return min(1, measure(given.scrapes, given.clients))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Recorded incidents, from the exporter to the pager, with nothing in between replaced.

Each recording of a real host is replayed by the real exporter, scraped by a real Prometheus with
our rules, and what fires goes through a real Alertmanager with our configuration to a webhook.
What arrives must be what the table below says, and nothing else.

Recordings last seconds, alerts wait minutes. So all durations in the rules, in Alertmanager's
configuration and in Prometheus's look-back are divided by PACE, and nothing else is changed: a
`for` of one minute becomes two seconds. A recording whose incident is shorter than that is
replayed more slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
import yaml
from aiohttp import web

from exporter.sources.recording import read
from tests.unit.rules.rulebook import ROOT
from tests.unit.rules.servers import alertmanager, free_port, program, write_faster_rules

RECORDINGS = Path(__file__).parents[1] / "recordings"
PACE = 30
SCRAPE_SECONDS = 1.0
EVALUATION_SECONDS = 0.5
GROUP_WAIT_SECONDS = 0.5
STARTUP_SECONDS = 30


@dataclass(frozen=True)
class Expected:
    """One alert that has to arrive, once."""

    name: str
    receiver: str
    labels: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    """A regular expression that the description contains."""


@dataclass(frozen=True)
class Incident:
    """A recording and all the alerts that it must raise."""

    recording: str
    expected: tuple[Expected, ...] = ()
    speed: float = 1.0
    possible: frozenset[str] = frozenset()
    """Alerts that may come, because seconds that were not shortened meet windows that were."""

    @property
    def file(self) -> Path:
        return RECORDINGS / f"{self.recording}.rec.gz"

    @cached_property
    def seconds(self) -> float:
        """How long one replay takes."""
        recording = read(self.file)
        return (recording.ended_at - recording.header.started_at) / self.speed


BYPASS = Expected("MpsProcessBypassesMps", "tickets", {"gpu": "0"}, "MPS that serves it: [12]")
"""In some recordings the lab itself had a process on the GPU, beside MPS."""

# A hand-over takes its real seconds out of half an hour that lasts one minute here. Once a ghost is
# killed, the exporter takes its real seconds until it asks the daemon again.
HANDOVER = frozenset({"MpsHandoverIdle"})
HEALING = HANDOVER | {"MpsControlDaemonUnresponsive"}

INCIDENTS = (
    Incident("one-client"),
    Incident(
        "server-killed",
        (Expected("MpsServerCrashed", "pager", {}, r"Clients lost: 2 \(2 of uid 0\)"),),
    ),
    Incident("stranded", (Expected("MpsServerCrashed", "pager", {}, r"Clients lost: 1 \("),)),
    Incident(
        "daemon-killed",
        (Expected("MpsControlDaemonDown", "pager", {}, "and is gone"),),
        speed=0.15,
    ),
    Incident(
        "fault",
        (
            Expected(
                "MpsServerFault", "tickets", {"gpu": "0"},
                "Culprits: 1 of uid 1001. Neighbours lost, .*: 1 of uid 1001.",
            ),
        ),
    ),
    Incident(
        "fault-held",
        (
            Expected("MpsServerFault", "tickets", {"gpu": "0"}, "met 1 fatal GPU error"),
            Expected("MpsServerStuckInFault", "pager", {}, "Still connected: PID 1168 .program-1"),
            Expected("MpsClientsRejected", "tickets", {"cause": "server_not_ready"}, "error 807"),
        ),
    ),
    Incident("crash-loop", (Expected("MpsServerCrashLooping", "pager", {}, "^6 starts"),)),
    # The server first: that blocks nobody. Then the daemon: that blocks everybody.
    Incident("stopped", (Expected("MpsControlDaemonUnresponsive", "pager"),)),
    Incident("draining", (Expected("MpsControlDaemonDraining", "tickets"),), speed=0.35),
    Incident(
        "foreground",
        (Expected("MpsExporterLogsUnreadable", "tickets", {"log": "server"}, "foreground"),),
        speed=0.25,
    ),
    Incident(
        "wait-served",
        (Expected("MpsUidWaitLong", "tickets", {"uid": "1002"}, "Held by uid 1001"), BYPASS),
        speed=0.5,
        possible=HANDOVER,
    ),
    Incident(
        "three-users",
        (Expected("MpsUidWaitLong", "tickets", {"uid": "1003"}, "Held by uid 100[12]"),),
        speed=0.5,
        # NVML's lists were recorded every few seconds only, and last twice as long here.
        possible=HANDOVER | {"MpsStrandedClient"},
    ),
    # The ghost silences the daemon that hangs on it, and its end is no crash.
    Incident(
        "wait-abandoned-sigkill",
        (
            Expected("MpsQueuedClientDead", "tickets", {"uid": "1002"}, "1 queued client at"),
            Expected("MpsGhostServer", "pager", {"server": "863"}, "kill -9 863"),
        ),
        possible=HEALING,
    ),
    Incident(
        "wait-abandoned-sigterm",
        (
            Expected("MpsQueuedClientDead", "tickets", {"uid": "1002"}, "1 queued client at"),
            Expected("MpsGhostServer", "pager", {"server": "1413"}, "kill -9 1413"),
        ),
        possible=HEALING,
    ),
    Incident(
        "context-limit",
        (
            Expected("MpsClientsRejected", "tickets", {"cause": "context_limit"}, "4 clients"),
            Expected("MpsContextsNearLimit", "tickets", {"gpu": "0"}, "admits: 48 of 48"),
        ),
        speed=0.7,
    ),
    Incident("limits", (BYPASS,), speed=0.7),
    Incident("memory-limit"),
    Incident("multi-user"),
    Incident("own-pid-namespace"),
    Incident("terminate-client"),
)  # fmt: skip


@dataclass
class Arrived:
    """An alert as the webhook got it, the first time."""

    receiver: str
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: float
    received_at: float

    @property
    def name(self) -> str:
        return self.labels["alertname"]


@dataclass
class Replay:
    """One exporter that replays one incident, once."""

    incident: Incident
    port: int
    began: float = 0.0
    ended: float = 0.0
    alerts: list[Arrived] = field(default_factory=list)
    crashed_at: float | None = None


class Stage:
    """All servers of a test, on 127.0.0.1, gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prometheus = f"127.0.0.1:{free_port()}"
        self.alertmanager = f"127.0.0.1:{free_port()}"
        self.webhook_port = free_port()
        self.arrived: dict[tuple[tuple[str, str], ...], Arrived] = {}
        self._exits = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._exits.aclose()

    async def start(self, *command: str | Path, log: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{log}.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *map(str, command), stdout=output, stderr=output
            )
        self._exits.push_async_callback(_end, process)
        return process

    async def listen(self) -> None:
        """The webhook: keeps each alert as it came first."""

        async def receive(request: web.Request) -> web.Response:
            for alert in (await request.json())["alerts"]:
                if alert["status"] == "firing":
                    key = (*sorted(alert["labels"].items()), ("startsAt", alert["startsAt"]))
                    self.arrived.setdefault(
                        key,
                        Arrived(
                            receiver=request.path.strip("/"),
                            labels=alert["labels"],
                            annotations=alert["annotations"],
                            starts_at=_timestamp(alert["startsAt"]),
                            received_at=time.time(),
                        ),
                    )
            return web.Response()

        app = web.Application()
        app.router.add_post("/{receiver}", receive)
        runner = web.AppRunner(app)
        await runner.setup()
        self._exits.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self.webhook_port).start()

    async def start_alertmanager(self) -> None:
        """With our configuration: only waiting times and the webhooks' addresses are others."""
        text = (ROOT / "alertmanager.yml").read_text()
        text = text.replace("localhost:9099", f"127.0.0.1:{self.webhook_port}")
        text = text.replace("alertmanager/*.tmpl", str(ROOT / "alertmanager" / "*.tmpl"))
        text = re.sub(r"group_wait: \w+", f"group_wait: {int(GROUP_WAIT_SECONDS * 1000)}ms", text)
        text = re.sub(r"group_interval: \w+", "group_interval: 500ms", text)
        (self.folder / "alertmanager.yml").write_text(text)
        await self.start(
            *alertmanager(),
            f"--config.file={self.folder / 'alertmanager.yml'}",
            f"--storage.path={self.folder / 'alertmanager'}",
            f"--web.listen-address={self.alertmanager}",
            "--cluster.listen-address=",
            log="alertmanager",
        )
        await until_ready(f"http://{self.alertmanager}/-/ready")

    async def start_evaluation(self, targets: Mapping[str, str]) -> None:
        """Prometheus with our rules at another pace; targets: label instance -> address."""
        scrape = f"{int(SCRAPE_SECONDS * 1000)}ms"
        config = {
            "global": {
                "scrape_interval": scrape,
                "scrape_timeout": scrape,
                "evaluation_interval": f"{int(EVALUATION_SECONDS * 1000)}ms",
            },
            "rule_files": [str(self.faster_rules() / "*.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alertmanager]}]}]},
            "scrape_configs": [scrape_config(targets)],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        await self.start(
            program("prometheus"),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'prometheus'}",
            f"--web.listen-address={self.prometheus}",
            f"--query.lookback-delta={5 * 60 / PACE:g}s",
            "--rules.alert.resend-delay=500ms",
            log="prometheus",
        )
        await until_ready(f"http://{self.prometheus}/-/ready")

    async def check(self) -> None:
        """No rule failed."""
        assert not await self.query("sum(prometheus_rule_evaluation_failures_total) > 0")

    def faster_rules(self) -> Path:
        """The folder with our rules at this test's pace."""
        folder = self.folder / "rules"
        folder.mkdir()
        write_faster_rules(folder, PACE)
        return folder

    async def query(self, expr: str) -> list[dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"http://{self.prometheus}/api/v1/query", params={"query": expr}
            ) as response,
        ):
            answer = await response.json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    async def replay(self, incident: Incident) -> Replay:
        """One exporter; Prometheus finds it under the port that it was told."""
        return Replay(incident, free_port())

    async def run(self, replay: Replay) -> None:
        """Replays the recording once, and ends the exporter before it begins anew."""
        address = f"http://127.0.0.1:{replay.port}/metrics"
        async with self._starting:  # side by side, each would start late
            process = await self.start(
                program("mps-exporter"), "serve",
                "--replay", replay.incident.file,
                "--replay.speed", str(replay.incident.speed),
                "--web.listen-address", f"127.0.0.1:{replay.port}",
                "--mps.min-query-interval", "0",
                log=f"exporter-{replay.incident.recording}",
            )  # fmt: skip
            replay.began = await until_ready(address)
        await asyncio.sleep(replay.incident.seconds - 0.2)
        async with aiohttp.ClientSession() as session, session.get(address) as response:
            replay.crashed_at = _crash(await response.text())
        replay.ended = time.time()
        await _end(process)


def scrape_config(targets: Mapping[str, str]) -> dict[str, Any]:
    return {
        "job_name": "mps-exporter",
        "static_configs": [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in targets.items()
        ],
    }


def _crash(exposition: str) -> float | None:
    found = re.search(
        r'^mps_server_last_exit_timestamp_seconds\{cause="crashed".*\} (\S+)$',
        exposition,
        flags=re.MULTILINE,
    )
    return float(found[1]) if found else None


def _timestamp(text: str) -> float:
    moment = re.fullmatch(r"(.+?)(\.\d+)?Z", text)
    assert moment, text
    seconds = time.mktime(time.strptime(moment[1], "%Y-%m-%dT%H:%M:%S")) - time.timezone
    return seconds + float(moment[2] or 0)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def until_ready(url: str) -> float:
    """Wait until somebody answers 200 there; says when."""
    deadline = time.time() + STARTUP_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.time() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return time.time()
            await asyncio.sleep(0.1)
    raise AssertionError(f"nobody answers at {url}")


@contextlib.asynccontextmanager
async def played(stage: Stage, incidents: tuple[Incident, ...]) -> AsyncIterator[list[Replay]]:
    """Plays them all side by side, each as a host of its own, and waits for the last alert."""
    async with stage:
        longest_first = sorted(incidents, key=lambda incident: -incident.seconds)
        replays = [await stage.replay(incident) for incident in longest_first]
        await stage.listen()
        await stage.start_alertmanager()
        await stage.start_evaluation(
            {replay.incident.recording: f"127.0.0.1:{replay.port}" for replay in replays}
        )
        await asyncio.gather(*(stage.run(replay) for replay in replays))
        await asyncio.sleep(2 * SCRAPE_SECONDS + 2 * GROUP_WAIT_SECONDS + 1)
        await stage.check()
        for replay in replays:
            replay.alerts = [
                alert
                for alert in stage.arrived.values()
                if alert.labels.get("instance") == replay.incident.recording
                # What begins before or after is about an exporter that this test starts and stops.
                and replay.began < alert.starts_at < replay.ended
            ]
        yield replays


def mistakes_of(replay: Replay) -> list[str]:
    """What arrived and should not have, what should have and did not, and texts with holes."""
    incident = replay.incident
    arrived = {alert.name: alert for alert in replay.alerts}
    shown = "; ".join(f"{alert.name} {alert.labels}" for alert in replay.alerts)
    wanted = {expected.name for expected in incident.expected}
    found = [f"{name} did not come" for name in sorted(wanted - arrived.keys())]
    found += [
        f"{name} came: {arrived[name].annotations['description']}"
        for name in sorted(arrived.keys() - wanted - incident.possible)
    ]
    for expected in incident.expected:
        fitting = [
            alert
            for alert in replay.alerts
            if (alert.name, alert.receiver) == (expected.name, expected.receiver)
            and expected.labels.items() <= alert.labels.items()
            and re.search(expected.text, alert.annotations["description"])
        ]
        if expected.name in arrived and not fitting:
            description = arrived[expected.name].annotations["description"]
            found.append(f"{expected} did not come, but {shown}, saying: {description}")
    for alert in replay.alerts:
        for name, text in alert.annotations.items():
            if re.search(r"<no value>|<error|\{\{|%!|\bNaN\b", text):
                found.append(f"{alert.name}: {name}: {text}")
    return [f"{incident.recording}: {mistake}" for mistake in found]


@pytest.mark.timeout(180)
async def test_each_incident_raises_its_alerts_and_no_others(tmp_path: Path) -> None:
    async with played(Stage(tmp_path), INCIDENTS) as replays:
        mistakes = [mistake for replay in replays for mistake in mistakes_of(replay)]
        assert not mistakes, "\n".join(mistakes)
        killed = next(replay for replay in replays if replay.incident.recording == "server-killed")
        crash = next(alert for alert in killed.alerts if alert.name == "MpsServerCrashed")
        # Within three scrapes (this alert has no `for`), Alertmanager's own wait aside.
        assert killed.crashed_at is not None
        waited = crash.received_at - killed.crashed_at - GROUP_WAIT_SECONDS
        assert waited < 3 * SCRAPE_SECONDS


def test_every_recording_is_in_the_table() -> None:
    there = {file.name.removesuffix(".rec.gz") for file in RECORDINGS.glob("*.rec.gz")}
    assert there == {incident.recording for incident in INCIDENTS}

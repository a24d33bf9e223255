"""The same rule files in VictoriaMetrics' vmalert raise the same alerts.

Prometheus, in agent mode, only scrapes and writes to VictoriaMetrics; vmalert evaluates. All else
is as in tests/integration/test_alerts_e2e.py.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import yaml

from testing.ports import free_port
from testing.program import Page
from testing.prometheus_programs import program
from testing.rule_files import RULE_FILES
from tests.integration.test_alerts_e2e import (
    EVALUATION_SECONDS,
    INCIDENTS,
    PACE,
    SCRAPE_SECONDS,
    Incident,
    Replay,
    Stage,
    mistakes_of,
    play,
    scrape_config,
    until_ready,
)

RECORDINGS = {
    "one-client",
    "server-killed",
    "fault",
    "crash-loop",
    "stopped",
    "draining",
    "wait-abandoned-sigkill",
    "wait-served",
    "context-limit",
    "foreground",
}
"""Of each kind of rule one; all of them are with the tests of Prometheus."""


FORGOTTEN_MINUTES = 12
"""Longer than any of these rules looks back, but for texts, and for the number of GPUs, which is
the same in both runs."""

REPORTED_AT_ONCE = {
    "MpsServerCrashed": r"Clients lost: 2( \(2 of uid 0\))?\. They get",
    "MpsServerFault": "had 1 fatal GPU error within 5 minutes on GPU 0",
}
"""vmalert asks the database for what it has just recorded, which it may not find yet: a text that
names the users who lost clients can come without them."""


def as_reported_by_vmalert(incident: Incident) -> Incident:
    """Slower, since data takes a second longer on this way.

    At this pace a daemon that does not answer does so for about the 5 minutes after which its
    collector's alert fires, too. And a query finds a sample up to 5 seconds later here: a wait of 8
    seconds, 4 minutes for the rules, may look like one of 6 minutes.
    """
    possible = set(incident.possible)
    if "MpsControlDaemonUnresponsive" in possible:
        possible.add("MpsExporterCollectorFailing")
    if incident.recording == "wait-abandoned-sigkill":
        possible.add("MpsUidWaitLong")
    return replace(
        incident,
        speed=incident.speed * 0.8,
        possible=frozenset(possible),
        expected=tuple(
            replace(one, text=REPORTED_AT_ONCE.get(one.name, one.text)) for one in incident.expected
        ),
    )


def test_vmalert_takes_our_rules_as_they_are() -> None:
    done = subprocess.run(
        [program("vmalert"), "-dryRun", *(f"-rule={file}" for file in RULE_FILES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class VictoriaStage(Stage):
    """Prometheus scrapes, VictoriaMetrics stores, vmalert evaluates."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.victoria = self.database = f"127.0.0.1:{free_port()}"
        self.vmalert = f"127.0.0.1:{free_port()}"

    async def start_evaluation(self, targets: Mapping[str, str]) -> None:
        await self.start(
            program("victoria-metrics"),
            f"-storageDataPath={self.folder / 'victoria'}",
            f"-httpListenAddr={self.victoria}",
            "-search.latencyOffset=0s",
            f"-search.maxStalenessInterval={5 * 60 / PACE:g}s",
            "-search.disableCache",
            log="victoria",
        )
        await until_ready(f"http://{self.victoria}/health")
        scrape = f"{int(SCRAPE_SECONDS * 1000)}ms"
        config = {
            "global": {"scrape_interval": scrape, "scrape_timeout": scrape},
            "remote_write": [
                {
                    "url": f"http://{self.victoria}/api/v1/write",
                    "queue_config": {"batch_send_deadline": "200ms"},
                }
            ],
            "scrape_configs": [scrape_config(targets)],
        }
        (self.folder / "agent.yml").write_text(yaml.safe_dump(config))
        await self.start(
            program("prometheus3"),
            "--agent",
            f"--config.file={self.folder / 'agent.yml'}",
            f"--storage.agent.path={self.folder / 'agent'}",
            f"--web.listen-address={self.prometheus}",
            log="agent",
        )
        await until_ready(f"http://{self.prometheus}/-/ready")
        await self.start(
            program("vmalert"),
            f"-rule={self.faster_rules()}/*.yml",
            f"-datasource.url=http://{self.victoria}",
            f"-remoteWrite.url=http://{self.victoria}",
            "-remoteWrite.flushInterval=200ms",
            f"-notifier.url=http://{self.alertmanager}",
            f"-httpListenAddr={self.vmalert}",
            f"-evaluationInterval={int(EVALUATION_SECONDS * 1000)}ms",
            "-rule.evalDelay=0s",
            # It would add a label with the name of the group to each alert.
            "-disableAlertgroupLabel",
            "-rule.resendDelay=500ms",
            log="vmalert",
        )
        await until_ready(f"http://{self.vmalert}/health")

    async def run(self, replay: Replay) -> None:
        """Twice for the database to meet the series, and once more when the rules forgot that.

        VictoriaMetrics may take 10 seconds until a query that it knows finds a series that is new:
        5 minutes at this pace. So the first time no rule may find the exporter's series in time,
        and what a rule records is new the second time.
        """
        incident = replay.incident
        quick = replace(incident, speed=2 * incident.speed)
        for _ in range(2):
            await super().run(replace(replay, incident=quick))
            await asyncio.sleep(FORGOTTEN_MINUTES * 60 / PACE)
        await super().run(replay)

    async def missed_evaluations(self) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{self.vmalert}/metrics") as response,
        ):
            page = Page(await response.text())
        return page.value("vmalert_iteration_missed_total") or 0.0

    async def check(self) -> None:
        url = f"http://{self.vmalert}/api/v1/rules"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            groups = (await response.json())["data"]["groups"]
        errors = [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]
        assert not errors, errors


@pytest.mark.timeout(3600)
async def test_the_same_incidents_raise_the_same_alerts(tmp_path: Path) -> None:
    chosen = tuple(as_reported_by_vmalert(one) for one in INCIDENTS if one.recording in RECORDINGS)
    await play(VictoriaStage, tmp_path, chosen, judge)


async def judge(stage: Stage, replays: list[Replay]) -> None:
    mistakes = [mistake for replay in replays for mistake in mistakes_of(replay)]
    assert not mistakes, "\n".join(mistakes)

"""Recorded incidents, from the exporter to the receiver.

Each recording of a real host is played with a clock of the test's own, and rendered as often as it
would be scraped. Prometheus' own promtool evaluates our rules over these samples, and amtool shows
the receiver to which our Alertmanager routes each alert. The alerts must be those of the table
below, and no others. Nothing waits, and nothing depends on how busy the machine is.

Recordings last seconds, alerts wait minutes. So a recording is played PACE times as slowly as the
rules' clock: each second of it is half a minute for the rules. A recording whose incident is
shorter than the rules require is played more slowly still.

That a page and a ticket take the real path, through Prometheus and Alertmanager to a webhook, is
measured by bench/attacks.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mps_exporter.flags import Settings
from mps_exporter.sources.recording import read_recording
from testing.page import text_of
from testing.player import RECORDINGS, Player
from testing.promtool import Fired, fired, page_of

PACE = 30
SEVERITY = {"pager": "critical", "tickets": "warning"}


@dataclass(frozen=True)
class Expected:
    receiver: str
    text: str  # A regular expression that the description contains.
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Incident:
    recording: str
    instance: str
    expected: tuple[Expected, ...] = ()
    speed: float = 1.0
    laps: int = 1  # Number of times that it is played: at its end the exporter restarts it.
    possible: frozenset[str] = frozenset()
    """Alerts that may fire, because some durations are not divided by PACE."""


TABLE = r"""
# Nothing happens, for 45 minutes of the rules' time.
quiet
# A quarter of an hour of that host, in the rules' time as in its own.
quiet speed=30 laps=10
# Orderly exits: no alert.
one-client
limits speed=0.7
  tickets ProcessBypassesMps kind=direct gpu=0 daemon=- : daemon that serves it: [12]
memory-limit
memory-ordinals
multi-user
own-pid-namespace
terminate-client
training-1-direct speed=0.4
training-1-mps speed=0.4
training-5-direct speed=0.4
training-5-mps speed=0.4
training-10-direct speed=0.4
training-10-mps speed=0.4
streams speed=0.5
percentages speed=0.5
containers speed=0.5
data-parallel speed=0.5
three-daemons speed=0.5
# Nobody asked these daemons anything for 8 of their seconds: at their own speed that would be
# a source that cannot be read for 5 minutes.
two-daemons speed=2
two-gpus-one-daemon speed=2
# Servers.
server-killed
  pager ServerCrashed : ago\. Clients lost: 2 \(2 of uid 0\)\. They get
# Its client lives on, but not for the 5 minutes after which it would be a stranded one.
stranded
  pager ServerCrashed : Clients lost: 1 \(1 of uid 0\)\. They get
fault
  tickets ServerFault gpu=0 : Lost, and who caused it is not proved: 2 of uid 1001.
fault-two-gpus
  tickets ServerFault gpu=1 : Lost, and who caused it is not proved: 2 of uid 0.
fault-held
  tickets ServerFault gpu=0 : had 1 fatal GPU error within
  pager ServerStuckInFault server=1171 mps_server_state=FAULT : Torn down: PID 1168 .program-1
  tickets ClientStuck server=1171 pid=1168 uid=0 state=torn_down :
    PID 1168 .program-1.* was torn down by a fatal GPU error
  tickets ClientsRejected cause=server_not_ready uid=0 : 1 client of uid 0 .*error 807
crash-loop
  pager ServerCrashLooping : ^6 starts of a server by .* failed within
# Daemons.
daemon-killed laps=2
  pager ControlDaemonDied : ago without .*Clients lost: \d
# So slowly that it is down for 3 minutes. The second until its death is certain is 3 of them,
# too, and then the one alert silences the other.
daemon-killed speed=0.15 possible=ControlDaemonDied
  pager ControlDaemonDown mps_control_state=absent : is gone; it is configured
# It does not come back.
served-after-death speed=0.5
  pager ControlDaemonDied : ago .*Clients lost: 1 \(1 of uid 1001\)
  pager ControlDaemonDown mps_control_state=absent : is gone; it is configured
# The server first, which blocks no client. Then the daemon, which blocks all clients.
stopped
  pager ControlDaemonUnresponsive mps_control_state=unresponsive : is alive but has not answered any
draining speed=0.3
  tickets ControlDaemonDraining mps_control_state=draining : last clients \(1 connected\)\. Until
foreground speed=0.25
  tickets ExporterLogsUnreadable log=control : control.log .*foreground
  tickets ExporterLogsUnreadable log=server : server.log .*foreground
# Waits.
wait-served speed=0.5 possible=HandoverIdle
  tickets UidWaitLong uid=1002 : with 1 client.*(Held by uid 1001|its own starts)
  tickets ProcessBypassesMps kind=direct gpu=0 daemon=- : daemon that serves it: [12]
three-users speed=0.5 possible=HandoverIdle,StrandedClient
  tickets UidWaitLong uid=1003 : Held by uid 100[12]|its own starts
# 6 seconds of waiting, half an hour for the rules.
starved speed=0.1 possible=ControlDaemonDown,HandoverIdle
  tickets UidWaitLong uid=1002 : with 1 client.*(Held by uid 1001|its own starts)
  pager UidStarved uid=1002 : are still admitted first
# The ghost silences the daemon that hangs on it, and its end is no crash.
wait-abandoned-sigkill possible=ControlDaemonUnresponsive,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
  pager GhostServer server=863 : for uid 1002.*kill -9 863`
wait-abandoned-sigterm possible=ControlDaemonUnresponsive,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
  pager GhostServer server=1413 : for uid 1002.*kill -9 1413`
# Five ghosts, and on each hangs a client of the user who is dead in the queue.
deaf-server possible=ControlDaemonUnresponsive,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
  pager GhostServer server=6429 : for uid 1002.* Clients hanging on it: PID 6421;.*kill -9 6429`
  pager GhostServer server=6492 : for uid 1002.* Clients hanging on it: PID 6484;.*kill -9 6492`
  pager GhostServer server=6554 : for uid 1002.* Clients hanging on it: PID 6550;.*kill -9 6554`
  pager GhostServer server=6620 : for uid 1002.* Clients hanging on it: PID 6612;.*kill -9 6620`
  pager GhostServer server=6682 : for uid 1002.* Clients hanging on it: PID 6678;.*kill -9 6682`
# Only when no client works on it may the ghost be ended.
deaf-with-clients possible=GhostServer
  pager ControlDaemonUnresponsive mps_control_state=unresponsive : has not answered
# Each daemon quits when its case is over.
hangs possible=ControlDaemonDown,ControlDaemonUnresponsive,HandoverIdle
  pager ServerCrashLooping daemon=passable/pipe : ^6 starts of a server
  tickets ServerCrashLooping daemon=of-1001 daemon_uid=1001 : ^6 starts
  tickets ClientsRejected daemon=no-visible-device cause=invalid_device uid=0 :
    1 client.*a GPU that this daemon does not
  tickets ClientsRejected daemon=unknown-visible-device cause=invalid_device uid=0 :
    1 client.*a GPU that this daemon does not
  tickets ClientsRejected daemon=refused-by-a-server-in-fault cause=server_not_ready uid=0 :
    1 client.*not ready
  tickets ClientsRejected daemon=server-full cause=context_limit uid=0 :
    1 client.*no client context left
  pager ControlDaemonUnresponsive daemon=daemon-stopped mps_control_state=unresponsive :
    has not answered
  pager ControlDaemonUnresponsive daemon=server-stopped mps_control_state=unresponsive :
    has not answered
  pager ControlDaemonUnresponsive daemon=ghost-server mps_control_state=unresponsive :
    has not answered
  pager GhostServer daemon=ghost-server server=1919 : uid 1002
  tickets QueuedClientDead daemon=deaf-server uid=1002 : 1 queued
  pager GhostServer daemon=deaf-server server=2021 : uid 1002
  pager ServerCrashed daemon=server-lost : Clients lost: 1
  tickets ServerFault daemon=refused-by-a-server-in-fault gpu=0 : 1 fatal GPU error
  tickets ClientStuck daemon=refused-by-a-server-in-fault pid=2210 server=2212
    state=torn_down uid=0 : fatal GPU error
  tickets ContextsNearLimit daemon=server-full server=2381 gpu=0 : uses 93.75%
wedge-times possible=ControlDaemonUnresponsive,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
  pager GhostServer server=6811 : for uid 1002.*kill -9 6811`
dead-between-scrapes possible=ControlDaemonUnresponsive,GhostServer,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
# Clients.
# Four are terminated before they end, the fifth is not; the kernel log proves it. So slowly that
# the alert comes in time before the recording ends.
ending-jobs speed=0.5 possible=HandoverIdle
  tickets UnfinishedWork : 3 clients of .*Lost: 3 of uid 0
# The fault lasts 2 s, a minute for the rules.
overrun possible=ClientStuck,ServerStuckInFault
  tickets ServerFault daemon=/tmp/lab-fault/mps gpu=0 : Caused by a bad pointer.*1001
# Each daemon of the scenario ends with its case, and most of them without an order.
hangs-of-processes
    possible=ControlDaemonDown,ProcessBypassesMps,ServerFault,ClientStuck,StrandedClient
  pager ControlDaemonUnresponsive daemon=server-frozen mps_control_state=unresponsive :
    alive but has not answered
  pager ControlDaemonUnresponsive daemon=daemon-frozen mps_control_state=unresponsive :
    alive but has not answered
  pager ControlDaemonUnresponsive daemon=server-under-a-debugger mps_control_state=unresponsive :
    alive but has not answered
  tickets QueuedClientDead daemon=ghost-and-asked-by-a-third-user uid=1002 :
    1 queued client of uid 1002
  pager GhostServer daemon=ghost-and-asked-by-a-third-user server=936 : kill -9 936`
  pager GhostServer daemon=few-descriptors server=1024 : kill -9 1024`
  pager ServerStuckInFault daemon=refused-and-not-reaped server=1092 mps_server_state=FAULT :
    Torn down: PID 1090 .program-6
  tickets ClientsRejected daemon=refused-and-not-reaped cause=server_not_ready uid=0 : error 807
  tickets ClientsRejected daemon=refused-at-the-limit-and-reaped cause=context_limit uid=0 :
    error 808 or 809
context-limit speed=0.7
  tickets ClientsRejected cause=context_limit uid=0 : refused 4 clients of uid 0 .*808 or 809
  tickets ContextsNearLimit server=1478 gpu=0 : admits: 48 of 48
# Of everything something.
tour speed=1.3 possible=HandoverIdle
  tickets ProcessBypassesMps kind=direct gpu=0 daemon=- : daemon that serves it: [12]
  tickets UidWaitLong uid=1002 : with 1 client.*(Held by uid 1001|its own starts)
  tickets ServerFault gpu=0 : Lost, and who caused it is not proved: 4 of uid 1002.
  pager ServerCrashed : Clients lost: 3 \(3 of uid 1002\)\. They get
# Troubles that last a second each, among them a death in the queue, the ghost of it, and a
# killed server with a client.
doctor speed=0.2 possible=ControlDaemonDown,ControlDaemonUnresponsive,GhostServer,HandoverIdle
  tickets QueuedClientDead uid=1002 : 1 queued client of uid 1002 at
  pager ServerCrashed : Clients lost: 1 \(1 of uid 0\)\. They get
"""
"""Recordings with the settings of their play, and below each recording the expected alerts.

An alert: receiver, name (without Mps), labels, and after the colon a regular expression that the
description contains. Its daemon is the lab's; the daemon of a case of "hangs" is named; "-": none.
"""


def incidents() -> Iterator[Incident]:
    lines = re.sub(r"\n {4,}", " ", re.sub(r"^#.*\n", "", TABLE, flags=re.MULTILINE))
    for part in re.split(r"\n(?! )", lines.strip()):
        head, *alerts = part.split("\n")
        recording, *given = head.split()
        options = dict(option.split("=") for option in given)
        laps = int(options.get("laps", 1))
        instance = recording if laps == 1 else f"{recording}-{laps}-times"
        possible = options.get("possible", "")
        yield Incident(
            recording,
            instance,
            tuple(expected(alert, recording, instance) for alert in alerts),
            float(options.get("speed", 1)),
            laps,
            frozenset(f"Mps{name}" for name in possible.split(",") if name),
        )


def expected(line: str, recording: str, instance: str) -> Expected:
    words, _, text = line.partition(" : ")
    receiver, name, *given = words.split()
    labels = {"daemon": "mps", **dict(label.split("=") for label in given)}
    if labels["daemon"] == "-":
        del labels["daemon"]
    elif not labels["daemon"].startswith("/"):
        labels["daemon"] = f"/tmp/lab-{recording}/{labels['daemon']}"
    if "gpu" in labels:
        number = int(labels["gpu"]) + 1
        labels["uuid"] = f"GPU-{number:08d}-0000-4000-8000-{number:012d}"
    labels |= {"alertname": f"Mps{name}", "severity": SEVERITY[receiver]}
    return Expected(receiver, text, {**labels, "job": "mps-exporter", "instance": instance})


INCIDENTS = tuple(incidents())


def mistakes_of(incident: Incident, alerts: Sequence[Fired]) -> Iterator[str]:
    """Yield unexpected alerts, missing alerts, wrong receivers and wrong texts."""
    unexpected = [alert for alert in alerts if alert.name not in incident.possible]
    for expected in incident.expected:
        same = [alert for alert in alerts if alert.labels == expected.labels]
        if not same:
            yield f"did not come: {expected.labels}"
        for alert in same:
            if alert in unexpected:
                unexpected.remove(alert)
            if alert.receiver != expected.receiver:
                yield f"{alert.name} went to {alert.receiver}"
            if not re.search(expected.text, alert.annotations["description"]):
                yield f"{alert.name}: {alert.annotations['description']}"
    for alert in unexpected:
        yield f"came: {alert.labels}: {alert.annotations['description']}"


def holes_in(alerts: Sequence[Fired]) -> list[str]:
    """Return the texts with templates that could not be filled in."""
    hole = re.compile(r"<no value>|<error|\{\{|%!|\bNaN\b")
    return [text for alert in alerts for text in alert.annotations.values() if hole.search(text)]


# ------------------------------------------------------------------------ with a clock of its own

ONE_SCRAPE = 30.0  # Seconds of the rules' time between two scrapes, and between two evaluations.
LOG_POLLS = 5  # Polls of the logs between two scrapes.


async def pages_of(incident: Incident) -> list[dict[str, str]]:
    """Return series -> value for each scrape. The first is one scrape after the beginning."""
    recording = read_recording(RECORDINGS / f"{incident.recording}.rec.gz")
    header = recording.header
    seconds = (recording.ended_at - header.started_at) / incident.speed  # of a lap
    settings = replace(Settings(), mps_min_query_interval=0.0)
    pages = []
    player, lap = Player(recording, settings), 0
    for number in range(1, int(incident.laps * seconds * PACE / ONE_SCRAPE) + 1):
        elapsed = number * ONE_SCRAPE / PACE
        if elapsed // seconds > lap:
            player, lap = Player(recording, settings), int(elapsed // seconds)
        moment = (elapsed - lap * seconds) * incident.speed
        for _ in range(LOG_POLLS):
            player.clock += (moment - player.clock) / LOG_POLLS
            await player.collector.poll_logs()
        player.clock = moment
        # In the rules' time, from 0 on, as promtool counts.
        text = text_of(
            await player.collector.collect(),
            wall=lambda at, lap=lap: (
                (lap * seconds + (at - header.started_at) / incident.speed) * PACE
            ),
        )
        pages.append(page_of(text))
    return pages


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.instance)
async def test_each_incident_raises_its_alerts_and_no_others(
    tmp_path: Path, incident: Incident
) -> None:
    pages = await pages_of(incident)
    every = fired(tmp_path, incident.instance, pages, ONE_SCRAPE)
    latest_first = sorted(every, key=lambda one: -one.seconds)
    alerts = list({str(sorted(one.labels.items())): one for one in latest_first}.values())
    # Alerts of severity info notify no receiver.
    advice = {alert.name for alert in alerts if alert.labels["severity"] == "info"}
    notified = [alert for alert in alerts if alert.labels["severity"] != "info"]
    assert list(mistakes_of(incident, notified)) == []
    assert holes_in(notified) == []
    if incident.instance == "quiet":
        # The lab's GPU was open to all programs; there is no other advice.
        assert advice == {"MpsNotExclusiveMode"}


def test_every_recording_is_in_the_table() -> None:
    existing = {file.name.removesuffix(".rec.gz") for file in RECORDINGS.glob("*.rec.gz")}
    assert existing == {incident.recording for incident in INCIDENTS}

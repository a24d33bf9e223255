"""Lost lines, wrong clocks, late replies; no log raises, or needs unbounded memory."""

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.limits_without_a_flag import Quota
from mps_exporter.mps.tool_commands import ServerReply
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import DaemonFacts, LogName, LogsObservation, ProcessFacts
from testing.mps_logs import (
    EIGHT,
    LOGS,
    PIPE,
    SAMPLES,
    Logs,
    at,
    more,
    numbers,
    observation,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import HOLDER, client

DAEMON = ProcessFacts(630, EIGHT, state="S", namespace_pids=(630,))
SERVER = ProcessFacts(110, EIGHT + 1, name="nvidia-cuda-mps-server", state="S")
FACTS = DaemonFacts(PIPE, "/log", process=DAEMON, servers=(SERVER,))


def clients(tracker: DaemonTracker) -> list[int]:
    (server,) = tracker.state.servers
    return [client.pid for client in server.clients]


def said(tracker: DaemonTracker, now: float, *pids: int) -> None:
    tracker.reconcile(now, now, (110,), [ServerReply(110, state="ACTIVE", client_pids=pids)])
    tracker.add_logs(observation(now + 1, {}))


# ---------------------------------------------------------------- clients


def test_two_replies_that_contradict_the_log_are_accepted() -> None:
    tracker = start(HOLDER)
    said(tracker, at("00:10"), 300)
    assert clients(tracker) == [100]
    said(tracker, at("00:15"), 300)
    assert clients(tracker) == [100]  # too soon after the first
    said(tracker, at("00:30"), 300)
    assert clients(tracker) == [300]


def test_a_client_keeps_the_limits_that_it_connected_with() -> None:
    set_before = (
        "00:01.100 S110 Active Threads Percentage set to 100.0\n"
        "00:01.100 S110 Device pinned memory limit for device 0 set to 0x40000000 bytes\n"
    )
    tracker = start(HOLDER.replace("00:01.200 C630", f"{set_before}00:01.200 C630"))
    more(
        tracker,
        "00:10.000 C630 NEW UI\n"
        "00:10.000 C630 Cmd:set_active_thread_percentage 110 20\n"
        "00:10.000 C630 20.0\n"
        "00:10.000 C630 UI closed\n"
        "00:11.000 S110 Device pinned memory limit for device 0 set to 0x10000000 bytes\n",
    )
    (server,) = tracker.state.servers
    (first,) = server.clients
    assert (server.thread_ratio, first.thread_ratio) == (0.2, 1.0)
    assert first.memory_limits == {0: 1 << 30}
    assert tracker.state.daemon.configured_at == at("00:10")
    # What was set before the first line that could be read is not known; the control tool may say.
    (server,) = start(client("00:01.200", 100, 110)).state.servers
    assert next(iter(server.clients)).memory_limits is None


# ---------------------------------------------------------------- servers


def test_a_server_that_the_daemon_no_longer_lists_vanishes() -> None:
    tracker = start(HOLDER)
    for second in (10, 15):
        tracker.reconcile(EIGHT + second, EIGHT + second, (), [])
        tracker.add_logs(observation(EIGHT + second + 1, {}))
        assert len(tuple(tracker.state.servers)) == 1
    tracker.reconcile(EIGHT + 30, EIGHT + 30, (), [])
    tracker.add_logs(observation(EIGHT + 31, {}))
    assert tuple(tracker.state.servers) == ()


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("ahead", [0.0, 5.0, 3600.0])
def test_a_child_of_the_daemon_lives_whatever_the_clock(ahead: float) -> None:
    """Set back after the boot time was read, it makes all start times later than the stamps."""
    tracker = start(HOLDER)
    late = ProcessFacts(110, EIGHT + 1 + ahead, name="nvidia-cuda-mps-server", state="S")
    client = ProcessFacts(100, EIGHT + 1 + ahead, state="S")
    daemon = ProcessFacts(630, EIGHT + ahead, state="S", namespace_pids=(630,))
    facts = DaemonFacts(PIPE, "/log", process=daemon, servers=(late,))
    tracker.observe(at("00:10"), facts, {110: late, 100: client}, {100, 110})
    tracker.add_logs(observation(at("00:40"), {}))
    assert clients(tracker) == [100]


# ---------------------------------------------------------------- logs that are read late


def test_a_server_that_the_tool_named_before_the_logs_were_read_has_not_exited() -> None:
    """On a busy machine or a slow file system the reply precedes the first line."""
    tracker = DaemonTracker(PIPE)
    said(tracker, at("02:00"), 100)
    tracker.add_logs(observation(at("02:05"), script(HOLDER).data, history=True))
    view = tracker.state
    assert [server.pid for server in view.servers] == [110]
    assert next(iter(view.servers)).started_at < at("01:00")  # as the log says
    assert clients(tracker) == [100]
    assert values(view, "mps_server_last_exit_timestamp_seconds") == {}
    assert "daemon_died" not in {incident.kind for incident in view.incidents.snapshot()}


def test_a_server_of_the_present_daemon_has_not_exited_with_the_last_one() -> None:
    """The log was away while one daemon died and another started: the first one's server ended."""
    tracker = start(HOLDER)
    tracker.add_logs(observation(at("05:00"), {}, readable=()))
    tracker.reconcile(at("06:00"), at("06:00"), (210,), [ServerReply(210, state="ACTIVE")])
    assert len(tuple(tracker.state.servers)) == 2
    restart = "05:30.000 C730 Starting control daemon using socket /tmp/mps/control\n"
    started = "05:31.000 C730 Starting new server 210 for user 1001\n"
    tracker.add_logs(observation(at("06:01"), script(restart + started).data))
    view = tracker.state
    assert [server.pid for server in view.servers] == [210]
    assert summary(view.counters)["server_exits"] == {"daemon_died": 1}


# ---------------------------------------------------------------- failed scans


@pytest.mark.parametrize(
    ("process", "ended"),
    [
        (DAEMON, False),
        (replace(DAEMON, state="Z"), True),
        (replace(DAEMON, start_time_seconds=at("00:30")), True),
        (None, True),
    ],
    ids=["there", "zombie", "another", "gone"],
)
def test_the_pid_of_a_daemon_shows_whether_it_has_exited(
    process: ProcessFacts | None, ended: bool
) -> None:
    """It was not found as a daemon, for example because its directory could not be read."""
    tracker = start(HOLDER)
    tracker.observe(at("00:20"), FACTS, {110: SERVER}, {100, 110})
    missed = replace(FACTS, process=None, servers=())
    there = {110: SERVER} if process is None else {110: SERVER, 630: process}
    tracker.observe(at("00:40"), missed, there, {110, 630})
    tracker.add_logs(observation(at("00:50"), {}))
    view = tracker.state
    assert (view.daemon.ended_at is not None) is ended
    assert bool(values(view, "mps_server_last_exit_timestamp_seconds")) is ended


NUMBERS = st.sampled_from([0, 1, 2, 100, 101, 110, 111, 1001, 1002, 9999999])
NUMBER = re.compile(r"(?<![\w-])\d+(?![\w-])")
UNRECORDED = {
    "C0 Failed to start server using uid 0, error: Operation not permitted",
    "S0 Failed to accept new client. Maximum number of clients (48) reached.",
    "S0 nonsense",
}


def recorded(log: LogName) -> Iterator[str]:
    """The different messages of the recorded logs, with 0 in the place of each number."""
    for path in SAMPLES.glob(f"*/{log}.log"):
        for line in path.read_text().splitlines():
            yield f"{log[0].upper()}0 {NUMBER.sub('0', line.partition('] ')[2])}"


STEPS = st.lists(
    st.tuples(
        st.integers(0, 4_000),
        st.builds(
            lambda shape, found: f"{shape[0]}{NUMBER.sub(lambda _: str(found.pop()), shape[1:])}",
            st.sampled_from(sorted(UNRECORDED.union(*map(recorded, LOGS)))),
            st.lists(NUMBERS, min_size=6, max_size=6),
        ),
    ),
    max_size=60,
)


def written(steps: list[tuple[int, str]]) -> Logs:
    """Lines with the milliseconds between them."""
    now, text = 0, []
    for pause, line in steps:
        now += pause
        text.append(f"{now // 60_000:02}:{now // 1000 % 60:02}.{now % 1000:03} {line}")
    return script("\n".join(text))


@settings(max_examples=150, deadline=None)
@given(STEPS, st.lists(st.booleans(), min_size=4, max_size=4))
def test_law_whatever_the_log_says_counters_only_grow(
    steps: list[tuple[int, str]], alive: list[bool]
) -> None:
    logs = written(steps)
    tracker = DaemonTracker(PIPE)
    last: Mapping[str, float] = {}
    end = logs.stamps()[-1] if steps else EIGHT
    for share, living in zip((0.3, 0.6, 1.0, 1.2), alive, strict=True):
        now = EIGHT + (end - EIGHT) * share + 0.5
        before = LogsObservation(at=now)
        until = logs.until(now)
        seen = numbers(tracker.state.counters)
        assert {name: seen[name] >= value for name, value in last.items()} == dict.fromkeys(
            last, True
        )
        last = seen
        lines = {log: int(seen.get(f"mps_control_log_lines_total{(log,)}", 0)) for log in LOGS}
        data = {log: b"".join(until[log].splitlines(keepends=True)[lines[log] :]) for log in LOGS}
        tracker.add_logs(observation(now, data))
        tracker.add_logs(before)
        tracker.update_liveness(now, lambda _pid, _at: living, daemon=living)  # noqa: B023 - at once
        tracker.advance_to(now + 30.0)
        view = tracker.state
        assert all(number >= 0 for number in numbers(view.counters).values())


def flood(tracker: DaemonTracker, begin: int, count: int) -> None:
    """A log that names ever new users, servers, clients, GPUs and queued processes."""
    text = []
    for number in range(begin, begin + count):
        text += [
            f"00:01.000 C630 Starting new server {number} for user {number}",
            f"00:01.000 C630 NEW CLIENT {number} from user {number + 7}: Server is not ready, "
            "push client to pending list",
            f"00:01.000 C630 NEW CLIENT {number} from user {number}: Server already exists",
            "00:01.000 C630 User did not send valid credentials",
            f"00:01.000 C630 Failed to start server using uid {number}, error: no",
            f"00:01.000 S{number} Client {{PID: {number}, Context ID: 0}} connected",
            f"00:01.000 S5 Client {{PID: {number}, Context ID: {number}}} connected",
            f"00:01.000 S5 Client {{PID: 7, Context ID: {number}}} connected",
            f"00:01.000 S5 Device X (uuid GPU-{number}) is associated",
            f"00:01.000 S5 Creating server context on device {number} (X)",
            f"00:01.000 S5 Device pinned memory limit for device {number} set to 0x1 bytes",
            f"00:01.000 S5 Client {{PID: {number}, Context: 1}} encountered a fatal GPU error.",
            f"00:01.000 S5 Client {{PID: {number}, Context ID: 1}} on device {number} "
            "to be torn down",
            "00:01.000 S5 The following devices will be reset:",
            f"00:01.000 S5 {number}",
            "00:01.000 S5 The following client process have a sticky error set:",
            f"00:01.000 S5 {number}",
            f"00:01.000 K{number} Invalid CUDA_VISIBLE_DEVICES.",
        ]
    logs = script("\n".join(text))
    tracker.add_logs(observation(EIGHT + 2.0, {log: logs[log] for log in LOGS}))


FLOOD = 400
"""More than the test's quota, and than each limit that a quota does not set: 256 recent events."""


def test_a_flood_of_names_is_bounded() -> None:
    quota = Quota(servers=16, clients=128, queued=64, users=32, gpus=32)
    tracker = DaemonTracker(PIPE, quota)
    flood(tracker, 10_000, FLOOD)
    once = len(pickle.dumps(tracker.state))
    flood(tracker, 20_000, FLOOD)
    assert len(pickle.dumps(tracker.state)) < 1.2 * once
    view = tracker.state
    assert len(view.incidents.snapshot()) <= 100
    assert len(tuple(view.servers)) <= quota.servers
    assert len(values(view, "mps_server_starts_total")) <= quota.users + 1
    assert len(values(view, "mps_server_faults_total")) <= quota.gpus + 1

"""Whatever a log says: nothing raises, nothing runs backwards, and memory stays bounded."""

import pickle
import re
from collections.abc import Iterator, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.limits_timeouts_intervals import Quota
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogName, LogsObservation
from testing.mps_logs import EIGHT, LOGS, PIPE, SAMPLES, Logs, numbers, observation, script, values

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
        assert all(server.clients.count >= 0 for server in view.servers)
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

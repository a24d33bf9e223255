"""Whatever a log says: nothing raises, nothing runs backwards, and memory stays bounded."""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.mps.policy import Quota
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogsObservation
from testing.mps_logs import EIGHT, LOGS, PIPE, Logs, numbers, observation, script, values

PIDS = st.sampled_from([0, 100, 101, 110, 111, 9999999])
UIDS = st.sampled_from([0, 1001, 1002])
CONTEXTS = st.integers(0, 3)


def shaped(shape: str) -> st.SearchStrategy[str]:
    """Lines of this shape, with any numbers in it."""
    return st.builds(
        lambda pid, uid, context: shape.format(pid=pid, uid=uid, context=context),
        PIDS,
        UIDS,
        CONTEXTS,
    )


CONTROL = st.one_of(
    shaped("NEW CLIENT {pid} from user {uid}: Server already exists"),
    shaped("NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list"),
    shaped("Starting new server {pid} for user {uid}"),
    shaped("NEW SERVER {pid}: Ready"),
    shaped("Server {pid} exited with status {context}"),
    shaped("Failed to start server using uid {uid}, error: Operation not permitted"),
    shaped("Try shutting down server {pid}, backoff is enabled"),
    shaped("Control will try shutting down server {pid} again in at most 200ms"),
    shaped("Cmd:set_active_thread_percentage {pid} 50"),
    shaped("Cmd:terminate_client {pid} 100"),
    st.sampled_from(
        [
            "Starting control daemon using socket /tmp/mps/control",
            "Exit with status 0",
            "User did not send valid credentials",
            "NEW UI",
            "Cmd:quit",
            "0",
            "50.0",
            "UI closed",
            "nonsense",
        ]
    ),
)
SERVER = st.one_of(
    shaped("Client {{PID: {pid}, Context ID: {context}}} connected"),
    shaped("Status of client {{PID: {pid}, Context ID: {context}}} is ACTIVE"),
    shaped(
        "Client {{PID: {pid}, Context ID: {context}}} exiting. "
        "Number of active client contexts is 0."
    ),
    shaped("Client process {pid} disconnected"),
    shaped(
        "Server failed to recevie command with status 806, assuming client "
        "{{PID: {pid}, Context ID: {context}}} exit"
    ),
    shaped("Client {{PID: {pid}, Context: {context}}} encountered a fatal GPU error."),
    shaped("Client {{PID: {pid}, Context ID: {context}}} on device {context} to be torn down"),
    shaped(
        "Server teardown in progress. Refusing to accept new client "
        "{{PID: {pid}, Context ID: {context}}}"
    ),
    shaped("MPS server requesting client {{PID: {pid}, Context ID: {context}}} to exit"),
    shaped("Destroy server context on device {context}"),
    shaped("Creating server context on device {context} (NVIDIA H200)"),
    st.sampled_from(
        [
            "Startup",
            "Server has started",
            "Exiting",
            "Received new client request",
            "Client process disconnected",
            "Server is handling a fatal GPU error.",
            "The following devices will be reset:",
            "The following client process have a sticky error set:",
            "100",
            "Client termination succeeded.",
            "Failed to accept new client. Maximum number of clients (48) reached.",
            "User did not send valid credentials",
            "Device NVIDIA H200 (uuid GPU-00000000-1111-2222-3333-444444444444) is associated",
        ]
    ),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 4_000),
        st.one_of(
            CONTROL.map("C630 {}".format), st.tuples(PIDS, SERVER).map("S{0[0]} {0[1]}".format)
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


def weight(thing: object, seen: set[int]) -> int:
    """How many bytes a thing and all that it holds take."""
    if id(thing) in seen or isinstance(thing, type) or callable(thing):
        return 0
    seen.add(id(thing))
    total = sys.getsizeof(thing)
    if isinstance(thing, Mapping):
        total += sum(weight(k, seen) + weight(v, seen) for k, v in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        total += sum(weight(part, seen) for part in thing)
    if is_dataclass(thing):
        total += sum(weight(getattr(thing, one.name), seen) for one in fields(thing))
    for name in getattr(thing, "__dict__", {}):
        total += weight(getattr(thing, name), seen)
    return total


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
    once = weight(tracker.state, set())
    flood(tracker, 20_000, FLOOD)
    assert weight(tracker.state, set()) < 1.2 * once
    view = tracker.state
    assert len(view.incidents.snapshot()) <= 100
    assert len(tuple(view.servers)) <= quota.servers
    assert len(values(view, "mps_server_starts_total")) <= quota.users + 1
    assert len(values(view, "mps_server_faults_total")) <= quota.gpus + 1

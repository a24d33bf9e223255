"""Bounds of each client's use of the SMs."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.observations import GpuObservation, GpuProcess, Reading
from mps_exporter.sm_use import SmUseCounter
from mps_exporter.snapshot import Gpu, SmUse, Snapshot
from testing.snapshots import NOW, UUID, client, daemon, gpu, server, snapshot

SMS = 132
DIRECT = 900


@dataclass
class Host:
    """A GPU with clients of one server, whose use of the SMs is known."""

    limits: dict[int, int]  # Client -> SMs.
    others: tuple[int, ...] = ()  # Processes without MPS.
    at: float = NOW
    used: dict[int, float] = field(default_factory=dict)  # Client -> SM-seconds.
    connections: int = 0
    counter: SmUseCounter = field(default_factory=SmUseCounter)
    readable: bool = True
    unseen: float = 0.0  # SM-seconds in unobserved time.
    unobserved: float = 0.0

    def look(self, **changes: object) -> dict[int, SmUse]:
        clients = [client(pid, sm_limit={UUID: sms}) for pid, sms in self.limits.items()]
        pids = (634, *self.limits, *self.others)
        active = (sum(self.used.values()) - self.unseen) / SMS
        seen = GpuObservation(
            0,
            UUID,
            sm_count=SMS,
            processes=tuple(GpuProcess(pid, "compute") for pid in pids),
            readings=(
                Reading("sm_active_time", active),
                Reading("unobserved_time", self.unobserved, (("counter", "active"),)),
            ),
            activity_age_seconds=0.5,
        )
        made: Gpu = gpu(observation=replace(seen, **changes))  # type: ignore[arg-type]
        logs = daemon().logs if self.readable else ()
        counters = {"mps_client_connections_total": {(1001,): float(self.connections)}}
        host: Snapshot = snapshot(
            daemon(server(*clients), counters=counters, logs=logs), gpus=(made,)
        )
        found = self.counter.count(host, self.at)
        return {pid: by_gpu[UUID] for (_, _, pid), by_gpu in found.items()}

    def work(self, seconds: float, observed: bool = True, **sms: float) -> None:
        """Record that clients (named p1, p2, ...) use this number of SMs."""
        self.at += seconds
        if not observed:
            self.unseen += sum(sms.values()) * seconds
            self.unobserved += seconds
        for name, number in sms.items():
            pid = int(name[1:])
            self.used[pid] = self.used.get(pid, 0.0) + number * seconds


def settled(host: Host) -> Host:
    """The host after three looks: its processes have been the same for a while."""
    for _ in range(3):
        host.look()
        host.at += 1.0
    return host


def test_a_client_alone_is_known_exactly() -> None:
    host = settled(Host({1: 66}))
    before = host.look()[1]
    host.work(10.0, p1=40.0)
    use = host.look()[1]
    assert use.high - before.high == use.low - before.low == pytest.approx(400.0)
    assert use.alone_sm_seconds - before.alone_sm_seconds == pytest.approx(400.0)
    assert use.alone_seconds - before.alone_seconds == pytest.approx(10.0)


def test_the_others_limits_bound_from_below_and_the_own_limit_from_above() -> None:
    host = settled(Host({1: 100, 2: 33}))
    before = host.look()
    host.work(1.0, p1=90.0, p2=10.0)
    after = host.look()
    assert after[1].low - before[1].low == pytest.approx(100.0 - 33.0)
    assert after[1].high - before[1].high == pytest.approx(100.0)
    assert after[2].low == before[2].low
    assert after[2].high - before[2].high == pytest.approx(33.0)
    assert after[1].alone_seconds == before[1].alone_seconds


@pytest.mark.parametrize("why", ["direct", "unlisted", "came and went", "no server.log"])
def test_nothing_is_known_from_below(why: str) -> None:
    host = settled(Host({1: 100, 2: 33}, others=(DIRECT,) if why == "direct" else ()))
    changes: dict[str, object] = {}
    if why == "unlisted":
        changes = {"processes": None}
    elif why == "came and went":
        host.connections += 1
    elif why == "no server.log":
        host.readable = False
    before = host.look(**changes)[1].low
    for _ in range(1 if why == "came and went" else 3):
        host.work(1.0, p1=90.0)
        assert host.look(**changes)[1].low == before


def test_two_samples_do_not_show_that_the_processes_were_the_same() -> None:
    host = Host({1: 100})
    host.look()
    host.work(1.0, p1=90.0)
    assert host.look()[1].low == 0.0


def test_a_gpu_without_sm_activity_has_no_bounds() -> None:
    assert Host({1: 100}).look(activity_age_seconds=None) == {}
    assert Host({1: 100}).look(readings=()) == {}
    assert Host({1: 100}).look(sm_count=None) == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.2, 1.0, 15.0]),
            st.dictionaries(st.integers(1, 4), st.floats(0, 1), max_size=4),
            st.sets(st.integers(1, 4), min_size=1),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_the_truth_is_within_the_bounds(
    steps: list[tuple[float, dict[int, float], set[int], bool]],
) -> None:
    limits = {1: 132, 2: 66, 3: 32, 4: 14}
    host = Host({1: 132})
    began: dict[int, tuple[float, SmUse]] = {}
    for seconds, shares, present, observed in steps:
        host.connections += len(present - host.limits.keys())
        host.limits = {pid: limits[pid] for pid in present}
        for pid, use in host.look().items():
            began.setdefault(pid, (host.used.get(pid, 0.0), use))
        for pid in began.keys() - present:
            del began[pid]
        sms = {f"p{pid}": shares.get(pid, 0) * limits[pid] for pid in present}
        host.work(seconds, observed, **sms)
        for pid, use in host.look().items():
            used, first = began[pid]
            truth = host.used.get(pid, 0.0) - used
            assert use.low - first.low <= truth + 1e-6
            assert truth <= use.high - first.high + 1e-6

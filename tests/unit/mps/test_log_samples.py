"""Logs of a real daemon have one result, however and whenever they are read."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogChunk, LogName, LogsObservation
from mps_exporter.snapshot import Incident
from testing.mps_logs import (
    LOGS,
    PIPE,
    SETTLED,
    Logs,
    numbers,
    observation,
    read,
    sample,
    shown,
    summary,
    truth,
)

TRUTH = truth()
NAMES = sorted(TRUTH)


@pytest.mark.parametrize("name", NAMES)
def test_the_counters_match_the_truth(name: str) -> None:
    counters = read(sample(name)).counters.snapshot()
    assert summary(counters) == {
        key: pytest.approx(value, abs=0.004) if not isinstance(value, dict) else value
        for key, value in TRUTH[name].items()
    }
    assert counters["mps_control_log_unrecognized_lines_total"] == {("control",): 0, ("server",): 0}


# ---------------------------------------------------------------- laws


def final(tracker: DaemonTracker, end: float) -> DaemonState:
    """The state once everything is read and settled."""
    tracker.add_logs(observation(end + 60.0, {}))
    return tracker.state


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_law_pauses_and_read_sizes_do_not_matter(name: str, data: st.DataObject) -> None:
    logs = sample(name)
    first, end = logs.stamps()[0], logs.stamps()[-1]
    moments = data.draw(
        st.lists(st.floats(first - 1.0, end + 3.0), max_size=10).map(sorted), label="polls"
    )
    tracker = DaemonTracker(PIPE)
    done = dict.fromkeys(LOGS, 0)
    for now in [*moments, end + 3.5]:
        chunks = []
        for log in LOGS:
            written = logs.until(now)[log]
            left = len(written) - done[log]
            whole = now > end + 3.0 or data.draw(st.booleans())
            size = left if whole else data.draw(st.integers(0, left))
            part = written[done[log] : done[log] + size]
            done[log] += size
            chunks += pieces(log, part, now, complete=size == left, data=data)
        tracker.add_logs(LogsObservation(at=now, chunks=tuple(chunks)))
    assert shown(final(tracker, end)) == shown(at_once(name))


@cache
def at_once(name: str) -> DaemonState:
    """The final state when everything is read in one go."""
    logs = sample(name)
    end = logs.stamps()[-1]
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(end + 0.5, {log: logs[log] for log in LOGS}))
    return final(tracker, end)


def pieces(
    log: LogName, part: bytes, now: float, *, complete: bool, data: st.DataObject
) -> list[LogChunk]:
    """One read, in one or two chunks."""
    cut = data.draw(st.integers(0, len(part)))
    ends = [None, now if complete else None]
    parts = [part[:cut], part[cut:]]
    return [
        LogChunk(at=now, pipe_directory=PIPE, log=log, data=one, complete_until=done)
        for one, done in zip(parts, ends, strict=True)
    ]


def told(view: DaemonState) -> tuple[list[Incident], int]:
    """The incidents; repetitions, which the exporter's start splits, as a sum."""
    refused = sum(i.count for i in view.incidents.snapshot() if i.kind == "client_rejected")
    others = [
        replace(i, counted=True) for i in view.incidents.snapshot() if i.kind != "client_rejected"
    ]
    return others, refused


@pytest.mark.parametrize("name", NAMES)
def test_law_the_exporter_may_start_at_any_line(name: str) -> None:
    logs = sample(name)
    end = logs.stamps()[-1]
    whole = at_once(name)
    everything = numbers(whole.counters)
    losses = [key for key in everything if "_losses_" in key]
    known, read_before = DaemonTracker(PIPE), Logs(b"", b"")
    for moment in logs.stamps()[::3]:
        before = logs.until(moment)
        new = {log: before[log][len(read_before[log]) :] for log in LOGS}
        known.add_logs(observation(moment + 0.0004, new, complete=moment + SETTLED))
        tracker = DaemonTracker(PIPE)
        tracker.add_logs(
            observation(moment + 0.0004, before.data, complete=moment + SETTLED, history=True)
        )
        read_before = before
        counted, before_it = tracker.state, shown(known.state)
        assert numbers(counted.counters) == {}
        assert shown(counted)[:2] == before_it[:2]
        tracker.add_logs(
            observation(end + 0.5, {log: logs[log][len(before[log]) :] for log in LOGS})
        )
        view = final(tracker, end)
        assert shown(view)[:2] == shown(whole)[:2]
        assert told(view) == told(whole)
        # A fault counts by its own moment, and its victims are counted when its report is complete.
        seen = numbers(known.state.counters)
        begun = numbers(final(deepcopy(known), end).counters) if losses else {}
        earlier = seen | {key: begun.get(key, 0.0) for key in losses}
        assert numbers(view.counters) == {
            key: pytest.approx(number - earlier.get(key, 0.0), abs=0.0021)
            for key, number in everything.items()
            if round(number - earlier.get(key, 0.0), 3)
        }

"""Who held the GPU and who waited in the last ten minutes."""

from __future__ import annotations

from mps_exporter.mps.policy import MAX_TIMELINE_SPANS, TIMELINE_SECONDS
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.waits import Timeline
from testing.mps_logs import at, read, script
from testing.mps_script import HOLDER, client, leaves, pending, server_ends, server_starts


def spans(view: DaemonState) -> list[tuple[str, int | None, float, float, bool]]:
    return [
        (one.kind, one.uid, one.start, one.end, one.ongoing)
        for one in view.timeline.snapshot(0.0)[1]
        if one.end - one.start > 0.01
    ]


def test_a_wait_and_its_hand_over() -> None:
    text = HOLDER + pending("00:10.000", 200, 1002) + leaves("00:19.000", 100, 110)
    text += server_ends("00:20.000", 110) + server_starts("00:20.000", "00:20.300", 210, 1002)
    text += client("00:20.300", 200, 210) + leaves("00:30.000", 200, 210)
    found = spans(read(script(text)))

    held, waited, idle, served = found[0], found[1], found[2], found[-1]
    assert (held[:2], held[3]) == (("held", 1001), at("00:19.000"))
    assert waited == ("waited", 1002, at("00:10.000"), at("00:20.300"), False)
    assert idle == ("idle", 1001, at("00:19.000"), at("00:20.000"), False)
    assert (served[:2], served[3]) == (("held", 1002), at("00:30.000"))


def test_what_goes_on_is_ongoing_and_begins_with_the_first_line() -> None:
    view = read(script(HOLDER + pending("00:10.000", 200, 1002) + leaves("00:19.000", 1, 110)))

    since, found = view.timeline.snapshot(0.0)
    assert {one.kind for one in found if one.ongoing} == {"held", "waited"}
    assert since is not None
    assert since <= at("00:01.000")


def test_it_is_bounded() -> None:
    lines = Timeline()
    for step in range(5 * MAX_TIMELINE_SPANS):
        lines.add(step, step + 1, [("held", step)])
    assert len(lines.snapshot(1.0)[1]) == MAX_TIMELINE_SPANS
    lines.add(5000, 5000 + 2000 * TIMELINE_SECONDS, [("waited", 1)])
    late = 5.0 + 2 * TIMELINE_SECONDS
    since, found = lines.snapshot(late)
    assert [(one.kind, one.start, one.end) for one in found] == [("waited", late - 600, late)]
    assert since == late - 600

"""Bytes in pieces, two logs, jumping timestamps: each line is complete, unique and in order."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.limits_without_a_flag import MAX_HOLD_SECONDS, MAX_LINE_BYTES
from mps_exporter.mps.log_parser import LINE_TOO_LONG, LogMerger
from mps_exporter.mps.log_wordings import LINES_LOST, Event, LogEntry
from mps_exporter.observations import LogChunk, LogName
from testing.mps_logs import LOGS, PIPE, at, script

NOW = at("10:00")


def chunk(log: LogName, data: bytes | str = b"", now: float = NOW, **more: object) -> LogChunk:
    text = data if isinstance(data, bytes) else script(data)[log]
    return LogChunk(at=now, pipe_directory=PIPE, log=log, data=text, **more)  # type: ignore[arg-type]


def merger(*readable: LogName) -> LogMerger:
    return LogMerger({log: log in readable for log in LOGS})


def out(sequencer: LogMerger, now: float = NOW) -> list[LogEntry]:
    return list(sequencer.pop_ready(now))


def test_entries_that_are_held_are_not_complete() -> None:
    sequencer = merger()
    line = "00:02.000 C630 NEW UI"
    sequencer.add_chunk(chunk("control", line, at("00:02.400"), complete_until=at("00:02.400")))
    sequencer.add_chunk(chunk("server", b"", at("00:02.500"), complete_until=at("00:02.500")))
    assert sequencer.complete_until == at("00:02.000")
    assert len(out(sequencer, at("00:02.500"))) == 1
    assert sequencer.complete_until == pytest.approx(at("00:02.300"))


def test_no_line_is_held_indefinitely() -> None:
    sequencer = merger("server")
    sequencer.add_chunk(chunk("control", "00:02.000 C630 NEW UI", at("00:02.100")))
    assert out(sequencer, at("00:02.100") + MAX_HOLD_SECONDS - 0.1) == []
    assert len(out(sequencer, at("00:02.100") + MAX_HOLD_SECONDS)) == 1


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("gap", [{"restarted": True}, {"lost_bytes": 99}])
@pytest.mark.parametrize("half", ["short", "too long"])
def test_half_a_line_before_a_truncation_or_a_gap_is_void(
    gap: dict[str, Any], half: str, at_once: bool
) -> None:
    sequencer = merger()
    line = script("00:01.000 C630 NEW UI").control[:-3]
    more = b"" if half == "short" else b"x" * MAX_LINE_BYTES
    sequencer.add_chunk(chunk("control", line + more))
    assert out(sequencer) == []
    if not at_once:
        sequencer.add_chunk(chunk("control", b"", **gap))
        gap = {}
    sequencer.add_chunk(chunk("control", "00:02.000 C630 UI closed", **gap))
    assert [entry.event.name for entry in out(sequencer)] == [LINES_LOST, "ui_closed"]


@pytest.mark.parametrize("size", [MAX_LINE_BYTES + 1, 1_000_000])
@pytest.mark.parametrize("step", [10_000, 10_000_000])
def test_a_line_without_an_end_is_skipped(size: int, step: int) -> None:
    before = script("00:01.000 C630 NEW UI").control
    data = before + b"x" * size + b"\n" + script("00:02.000 C630 UI closed").control
    sequencer = merger()
    for begin in range(0, len(data), step):
        sequencer.add_chunk(chunk("control", data[begin : begin + step]))
    found = [entry.event for entry in out(sequencer)]
    assert found == [Event("ui_opened"), LINE_TOO_LONG, Event("ui_closed")]


def test_the_zone_of_the_stamps() -> None:
    sequencer = merger()
    sequencer.add_chunk(chunk("control", "00:01.000 C630 NEW UI", utc_offset_seconds=3600.0))
    assert out(sequencer)[0].at == at("00:01") - 3600.0


def test_a_stamp_of_the_future_happened_when_it_was_read() -> None:
    sequencer = merger("server")
    sequencer.add_chunk(
        chunk("control", "59:00.000 C630 NEW UI", at("00:10"), complete_until=at("00:10"))
    )
    sequencer.add_chunk(chunk("server", b"", at("00:11"), complete_until=at("00:11")))
    (entry,) = out(sequencer, at("00:11"))
    assert entry.at == at("00:10")


def test_a_clock_set_back_stops_nothing() -> None:
    sequencer = merger()
    found: list[LogEntry] = []
    for now, lines in [
        (at("30:00"), "30:00.000 C630 NEW UI\n30:00.000 S110 Startup"),
        (at("20:01"), "20:00.500 C630 UI closed\n20:00.400 S110 Exiting"),
        (at("20:02"), "20:01.500 C630 NEW UI"),
        (at("20:03"), ""),
    ]:
        for log in ("control", "server"):
            sequencer.add_chunk(chunk(log, lines, now, complete_until=now))
        found += out(sequencer, now)
        if now == at("20:03"):
            assert sequencer.complete_until == pytest.approx(at("20:02.900"))
    assert [entry.event for entry in found] == [
        Event("server_process"),
        Event("ui_opened"),
        Event("server_exiting"),
        Event("ui_closed"),
        Event("ui_opened"),
    ]


def test_a_line_without_stamp_belongs_to_the_one_before() -> None:
    sequencer = merger()
    first, last = (script(f"00:0{n}.000 C630 NEW UI").control for n in (1, 3))
    sequencer.add_chunk(chunk("control", b"Server 634\n%bServer 634\n%b" % (first, last)))
    sequencer.add_chunk(chunk("server", "00:02.000 S110 Startup", complete_until=NOW))
    found = [entry.at for entry in out(sequencer)]
    assert found == [NOW, at("00:01"), at("00:01"), at("00:02"), at("00:03")]


@given(
    st.lists(st.binary(max_size=60), max_size=12), st.lists(st.booleans(), min_size=12, max_size=12)
)
def test_law_no_bytes_are_lost_or_raise(parts: list[bytes], sides: list[bool]) -> None:
    sequencer = merger()
    found: list[LogEntry] = []
    for part, side in zip(parts, sides, strict=False):
        sequencer.add_chunk(chunk("control" if side else "server", part))
        found += out(sequencer)
    # Every line is returned exactly once, whatever its text.
    found += out(sequencer, NOW + MAX_HOLD_SECONDS)
    assert len(found) == sum(part.count(b"\n") for part in parts)


# ------------------------------------------------------------------------------ named servers


def of_server(name: str, lines: str, now: float = NOW, **more: float) -> LogChunk:
    return replace(chunk("server", lines, now, **more), server_name=name)


def test_the_logs_of_several_servers_are_merged_with_their_daemon_s() -> None:
    sequencer = merger()
    first = chunk("server", "00:01.000 S110 Startup\n00:04.000 S110 Exiting")
    sequencer.add_chunk(replace(first, data=first.data[:30], server_name="a"))
    sequencer.add_chunk(of_server("b", "00:02.000 S120 Startup"))
    sequencer.add_chunk(replace(first, data=first.data[30:], server_name="a"))
    sequencer.add_chunk(chunk("control", "00:03.000 C630 NEW UI\n00:05.000 C630 UI closed"))
    found = [(entry.pid, entry.event) for entry in out(sequencer, NOW + MAX_HOLD_SECONDS)]
    assert found == [
        (110, Event("server_process")),
        (120, Event("server_process")),
        (630, Event("ui_opened")),
        (110, Event("server_exiting")),
        (630, Event("ui_closed")),
    ]


def test_a_server_s_log_that_is_not_read_yet_holds_the_others_back() -> None:
    sequencer = merger()
    early = at("00:01")
    sequencer.add_chunk(of_server("a", "", now=early, complete_until=early))
    sequencer.add_chunk(of_server("b", "00:02.000 S120 Startup", now=at("00:03")))
    sequencer.mark_idle("server", at("00:03"), busy={("server", "a"), ("server", "b")})
    assert out(sequencer, at("00:03")) == []
    sequencer.mark_idle("server", at("00:04"), busy={("server", "b")})
    assert [entry.pid for entry in out(sequencer, at("00:04"))] == [120]

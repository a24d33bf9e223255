"""What leaves the host of a log: lines of MPS, and of others the length and a hash."""

from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.limits_timeouts_intervals import MAX_LINE_BYTES
from mps_exporter.mps.log_parser import LogFilter, parse_line, withhold_unknown

PREFIX = b"[2026-11-21 08:55:42.578 Control   630] "
KNOWN = PREFIX + b"NEW CLIENT 632 from user 1001: Server already exists\n"
SHADOW = b"root:$6$salt$hash:20228:0:99999:7:::\n"


@given(st.lists(st.sampled_from([KNOWN, SHADOW, PREFIX + SHADOW, b"\n", PREFIX + b"\n"])))
def test_a_replay_reads_the_same_kinds_of_lines(lines: list[bytes]) -> None:
    data = b"".join(lines)
    shown = withhold_unknown(data)
    assert [parse_line(line).event.name for line in shown.split(b"\n")] == [
        parse_line(line).event.name for line in data.split(b"\n")
    ]


@given(st.lists(st.integers(0, 400), max_size=10).map(sorted))
def test_pieces_of_lines_are_put_together(cuts: list[int]) -> None:
    data = KNOWN * 3 + SHADOW + KNOWN
    lines = LogFilter()
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    shown = b"".join(lines.feed(piece, restarted=False) for piece in pieces)
    assert shown == withhold_unknown(data)


def test_a_line_without_an_end_is_not_buffered_indefinitely() -> None:
    lines = LogFilter()
    shown = b"".join(lines.feed(b"x" * 10_000, restarted=False) for _ in range(20))
    assert 2 * MAX_LINE_BYTES < 20 * 10_000
    assert shown.count(b"withheld") == 2
    assert b"xx" not in shown


def test_what_was_before_a_truncation_is_void() -> None:
    lines = LogFilter()
    assert lines.feed(KNOWN[:40], restarted=False) == b""
    assert lines.feed(KNOWN, restarted=True) == KNOWN

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.logging import (
    MAX_FIELD_CHARACTERS,
    MAX_QUEUED_LINES,
    JsonFormatter,
    LogfmtFormatter,
    TransitionLogger,
    configure,
    print_status,
)
from testing.waiting import wait_for

logger = logging.getLogger("mps_exporter.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged."""
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    configure("info", "logfmt", stream)
    yield stream
    logging.getLogger().handlers[:] = before
    logging.getLogger("mps_exporter").setLevel(logging.NOTSET)


def test_a_line_is_logfmt(stream: io.StringIO) -> None:
    logger.warning("it's late", extra={"fields": {"daemon": "/tmp/a b", "tries": 2, "no": None}})
    line = stream.getvalue()
    assert line.startswith("time=20")
    assert line.endswith(' level=warn source=test msg="it\'s late" daemon="/tmp/a b" tries=2\n')


def test_lines_below_the_level_are_dropped(stream: io.StringIO) -> None:
    logger.debug("nobody reads this")
    assert not stream.getvalue()


@given(st.text(), st.text())
def test_a_record_is_always_one_line(message: str, value: str) -> None:
    record = logging.LogRecord("mps_exporter.x", logging.INFO, "", 0, "%s", (message,), None)
    record.fields = {"key": value}
    assert len(LogfmtFormatter().format(record).splitlines()) == 1
    assert json.loads(JsonFormatter().format(record))["key"] == value


def test_a_long_field_is_shortened(stream: io.StringIO) -> None:
    logger.warning("fails", extra={"fields": {"daemon": "/" + "a" * 131_000}})
    assert len(stream.getvalue()) < MAX_FIELD_CHARACTERS + 200
    assert "(131001 characters)" in stream.getvalue()


@contextlib.contextmanager
def full_stderr() -> Iterator[int]:
    """Replace standard error by a full pipe; yield the end to read from."""
    before = os.dup(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield reading
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(reading)


def test_a_full_standard_error_blocks_nothing(stream: io.StringIO) -> None:
    configure("info", "logfmt")
    received = bytearray()
    with full_stderr() as stderr:
        for number in range(MAX_QUEUED_LINES + 500):
            logger.warning("line", extra={"fields": {"number": number}})
        print_status("a notice\n")

        os.set_blocking(stderr, False)

        def comes(words: bytes) -> bool:
            with contextlib.suppress(BlockingIOError):
                received.extend(os.read(stderr, 1 << 16))
            return words in received

        wait_for(lambda: comes(f"number={MAX_QUEUED_LINES - 1}\n".encode()))
        wait_for(lambda: comes(b"a notice\n"))
        logger.warning("heard again")
        wait_for(lambda: comes(b"heard again"))
    assert f"number={MAX_QUEUED_LINES + 400}\n".encode() not in received


def test_one_line_when_it_starts_failing_one_when_it_recovers(stream: io.StringIO) -> None:
    transitions = TransitionLogger(logger)
    for why in ("why", "why", "how"):
        transitions.failed("a", message="a fails", err=why)
    for why in ("why", "why", "how"):
        transitions.failed("c", message="c fails", reason=why)
    transitions.failed("b", message="b fails")
    for _ in range(3):
        transitions.recovered("a", message="a works again")
    messages = [line.split("msg=")[1] for line in stream.getvalue().splitlines()]
    assert messages == [
        '"a fails" err=why',
        '"c fails"',
        '"c fails"',
        '"b fails"',
        '"a works again"',
    ]


def test_a_forgotten_failure_does_not_recover(stream: io.StringIO) -> None:
    transitions = TransitionLogger(logger)
    transitions.failed("a", message="a fails")
    transitions.forget("a")
    transitions.recovered("a", message="a works again")
    assert len(stream.getvalue().splitlines()) == 1

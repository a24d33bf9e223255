"""Only two modules have the wording of MPS's logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mps_exporter
from mps_exporter.mps.log_lines import CONTROL_LINES, SERVER_LINES, UNRECOGNIZED
from mps_exporter.mps.log_parser import (
    DAEMON_ACTIVITY_LINE,
    DAEMON_STARTING_LINE,
    control_line_of,
    parse_line,
)

SOURCES = Path(mps_exporter.__file__).parent
WRITER = "[2026-11-21 08:55:42.578 Control   630] "


NOT_OF_A_LOG = {
    ("mps/control_protocol.py", "Insufficient privileges"),  # the control tool answers so, too
    ("mps/log_metrics.py", "Client process"),  # prose: "Client processes that connected ..."
    ("metrics/daemons.py", "Client process"),
    ("metrics/partitions.py", "Client process"),
    ("findings/incidents.py", "Exit with status"),  # prose: names the line for the operator
}


def _phrases() -> set[str]:
    """Plain text of two words or more that some line must contain."""
    found = {"Accepting connection", "] Start", " Control +", " Control  "}
    for _, wording, *_ in (*CONTROL_LINES.rows, *SERVER_LINES.rows):
        plain = re.split(r"<\w+>|\(\?:|\\.[+*]?|.[?*+]|[][.{}()|]", wording)
        phrase = max(plain, key=len).strip(" :")
        if " " in phrase:
            found.add(phrase)
    return found


def _texts(module: Path) -> Iterator[str]:
    """All text in the code of a module, without what documents it."""
    tree = ast.parse(module.read_bytes())
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            if isinstance(node.value, bytes):
                yield node.value.decode("latin-1")
            elif isinstance(node.value, str):
                yield node.value


def test_no_other_module_knows_a_phrase_of_the_logs() -> None:
    phrases = _phrases()
    assert len(phrases) > 40
    found = {
        (module.relative_to(SOURCES).as_posix(), phrase)
        for module in SOURCES.rglob("*.py")
        if module.name not in ("log_parser.py", "log_lines.py")
        for text in _texts(module)
        for phrase in phrases
        if phrase in text
    }
    assert found <= NOT_OF_A_LOG


@pytest.mark.parametrize(
    "message", ["Starting control daemon using socket /tmp/mps/control", "Start", "Start\r"]
)
def test_a_start_is_found_by_the_search_and_by_the_parser(message: str) -> None:
    line = WRITER + message
    assert parse_line(line).event.name == "daemon_starting"
    assert DAEMON_STARTING_LINE.search(f"junk\n{line}\n".encode()) is not None
    # A line of a client or a server, or text within a line, does not show a start.
    assert DAEMON_STARTING_LINE.search(line.replace("Control", "Server").encode()) is None
    assert DAEMON_STARTING_LINE.search(f"echo {line}".encode()) is None


def test_what_shows_activity_is_known_to_the_parser() -> None:
    for message in (
        "Accepting connection...",
        "NEW UI",
        "NEW CLIENT 632 from user 1001: Server already exists",
        "NEW SERVER 634: Ready",
        "Server 634 exited with status 0",
    ):
        line = WRITER + message
        assert DAEMON_ACTIVITY_LINE.search(line.encode()) is not None
        assert parse_line(line).event.name != UNRECOGNIZED
    assert DAEMON_ACTIVITY_LINE.search(f"{WRITER}Unable to accept connection".encode()) is None


def test_the_lines_of_a_daemon_are_found_by_its_pid() -> None:
    data = f"{WRITER}NEW UI\n".encode()
    assert control_line_of(630).search(data) is not None
    assert control_line_of(63).search(data) is None

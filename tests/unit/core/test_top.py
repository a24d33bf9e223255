import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from mps_exporter.cli import main
from mps_exporter.commands.top import ORDERS, rows, screen
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.status_api import make_status, to_json
from testing import snapshots as hosts
from testing.waiting import PATIENCE_SECONDS

TOP = (sys.executable, "-m", "mps_exporter", "top")


def status_of(snapshot: Snapshot) -> dict[str, object]:
    return {**json.loads(to_json(make_status(snapshot))), "source": "this host"}


def shown(snapshot: Snapshot, order: str = "s") -> str:
    console = Console(width=120)
    with console.capture() as printed:
        console.print(screen(status_of(snapshot), order))
    return printed.get()


@pytest.fixture
def exporter(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the URL of a server whose pages are this text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(request.param.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_waiting_processes_come_first_and_unknown_values_are_dashes() -> None:
    lines = shown(hosts.waiting()).splitlines()
    begin = next(number for number, line in enumerate(lines) if "PROGRAM" in line)
    first = lines[begin + 1].split()
    assert "waits behind" in lines[begin + 1]
    assert first[-3:] == ["-", "-", "-"]


def test_the_biggest_client_is_first_in_the_order_of_memory() -> None:
    found = sorted(rows(status_of(hosts.full(2, 5))), key=ORDERS["m"][1])
    sizes = [row["MEMORY"] or 0 for row in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1


def test_names_that_users_choose_are_text() -> None:
    assert "\x1b" not in shown(hosts.nasty())


@pytest.mark.parametrize("exporter", [to_json(make_status(hosts.waiting()))], indirect=True)
def test_keys_change_the_order_and_end_it(exporter: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    before = termios.tcgetattr(theirs)
    words = (*TOP, f"--url={exporter}")
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        for expected, key in ((b"ordered by state", b"m"), (b"ordered by memory", b"q")):
            output = b""
            while not re.search(expected, output):
                output += os.read(ours, 65536)
            os.write(ours, key)
        # Otherwise the rest of the output fills the terminal, and stops the program.
        threading.Thread(target=drain, args=(ours,), daemon=True).start()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        os.close(terminal)


@pytest.mark.parametrize("exporter", ["<html>", '{"status": "ok"}'], indirect=True)
def test_a_reply_that_is_no_status_is_named(
    exporter: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"--url={exporter}"]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"mps-exporter: cannot read {exporter}/api/v1/status: ")

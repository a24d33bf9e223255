"""The comparison of exporters: what it is told, and what it says of a server that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.http import Cost, Exporter, compare, cpu_seconds, percentile, report
from testing.ports import free_port

SERVER = """
import gzip, http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = gzip.compress(b"# HELP a b\\na 1\\nb 2\\n")
        self.send_response(200 if self.path == "/metrics?collect[]=logs" else 404)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_an_entry_with_a_url() -> None:
    found = Exporter.parse("ours=python -m it --flag='a b'=http://127.0.0.1:9400/metrics")
    assert found.name == "ours"
    assert found.command == ("python", "-m", "it", "--flag=a b")
    assert found.url == "http://127.0.0.1:9400/metrics"


def test_an_entry_without_a_url_is_a_tool() -> None:
    found = Exporter.parse("smi=nvidia-smi --query-gpu=uuid")
    assert found.command == ("nvidia-smi", "--query-gpu=uuid")
    assert not found.url


@pytest.mark.parametrize("text", ["", "name", "=command", "name=", "name==http://127.0.0.1"])
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=COMMAND"):
        Exporter.parse(text)


def test_percentile() -> None:
    assert percentile(range(1, 101), 95) == 95
    assert percentile([7.0], 95) == 7
    assert percentile([1.0, 2.0], 50) == 1


def test_cpu_of_a_process_that_is_gone_is_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as done:
        done.wait()
    assert cpu_seconds(done.pid) == 0


def test_cpu_includes_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        before = 0.0
        while before < 0.2:
            assert parent.poll() is None
            before = cpu_seconds(parent.pid)
        parent.communicate(b"\n")


def test_a_server_and_a_tool_are_measured(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics?collect[]=logs"
    server = Exporter("server", (sys.executable, str(program), str(port)), url)
    tool = Exporter("tool", (sys.executable, "-c", "print('a 1')"))
    of_server, of_tool = compare([server, tool], rounds=2, interval=0.01)
    assert (of_server.page_bytes, of_server.series) == (19, 2)
    assert of_server.sent_bytes != of_server.page_bytes
    assert of_server.rss_megabytes > 0
    assert len(of_server.paced_ms) == len(of_tool.paced_ms) == 2
    assert of_tool.series == 1
    assert of_tool.cpu_percent > 0
    assert of_tool.idle_cpu_percent is None


def test_a_program_that_gives_no_page_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    broken = Exporter("broken", (sys.executable, "-c", "raise SystemExit('no such GPU')"), url)
    with pytest.raises(RuntimeError, match="no such GPU"):
        compare([broken], rounds=1, interval=0.01)


def test_the_report_compares_with_the_named_one() -> None:
    ours = Cost("ours", paced_ms=[2.0], burst_ms=[1.0], cpu_percent=1.0)
    base = Cost("base", paced_ms=[4.0], burst_ms=[4.0], cpu_percent=2.0, idle_cpu_percent=0.5)
    lines = report([ours, base], "base")
    assert lines[-2] == "ratios to base:"
    assert lines[-1].split() == ["ours", "0.50", "0.50", "0.25", "0.50"]

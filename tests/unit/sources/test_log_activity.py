import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.flags import Settings
from mps_exporter.observations import DaemonFacts, LogChunk
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.log_tail import last_activity
from testing.mps_logs import PIPE, at, script
from testing.waiting import PATIENCE_SECONDS


def chunk(text: str) -> LogChunk:
    return LogChunk(0.0, PIPE, "control", script(text).control, utc_offset_seconds=0.0)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("00:01.000 C630 Accepting connection...", "00:01"),
        ("00:01.000 C630 NEW UI\n00:02.500 C630 Cmd:get_server_list", "00:01"),
        ("00:02.500 C630 NEW CLIENT 2 from user 1001: Server already exists", "00:02.500"),
        ("00:01.000 C630 Server 863 exited with status 0", "00:01"),
        ("00:01.000 C630 NEW SERVER 878: Ready\n00:01.500 O878 Startup", "00:01"),
        ("00:01.000 C630 Unable to accept connection", None),
        ("00:01.000 C630 Try shutting down server 90, backoff is enabled", None),  # drains
        ("", None),
    ],
)
def test_lines_of_a_daemon_that_serves(text: str, moment: str | None) -> None:
    assert last_activity(chunk(text)) == (None if moment is None else at(moment))


def test_old_or_undated_lines_prove_nothing() -> None:
    seen = chunk("00:01.000 C630 NEW UI")
    assert last_activity(replace(seen, utc_offset_seconds=3600.0)) == at("00:01") - 3600.0
    assert last_activity(replace(seen, utc_offset_seconds=None)) is None
    assert last_activity(replace(seen, history=True)) is None
    assert last_activity(replace(seen, log="server")) is None


async def test_this_host_hears_of_it_from_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LOG_POLL_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    host = LiveHost(Settings(collector_nvml=False))
    heard: list[tuple[str, float]] = []
    monkeypatch.setattr(host.control, "record_activity", lambda *output: heard.append(output))
    daemon = DaemonFacts(PIPE, str(tmp_path), log_owners=(os.geteuid(),))
    await host.poll_logs([daemon], PATIENCE_SECONDS)
    now = datetime.now()  # noqa: DTZ005 - as MPS does
    stamp = now.isoformat(" ", "milliseconds")
    (tmp_path / "control.log").write_text(f"[{stamp} Control   630] Accepting connection...\n")
    await host.poll_logs([daemon], PATIENCE_SECONDS)
    await host.close()
    ((pipe_directory, moment),) = heard
    assert (pipe_directory, round(moment - now.timestamp())) == (PIPE, 0)

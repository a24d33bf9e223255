"""Exits of processes that no log shows: found by a scan once a second."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.observations import ProcfsObservation
from mps_exporter.sources import SourceTimeoutError
from mps_exporter.sources.live_host import LiveHost
from testing.fake_proc import FakeProc


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveHost]:
    """Give a host without a limit on scans."""
    monkeypatch.setattr(policy, "EXIT_POLL_INTERVAL_SECONDS", 0.0)
    FakeProc(tmp_path)
    one = LiveHost(Settings(collector_nvml=False, path_procfs=str(tmp_path)))
    yield one
    await one.close()


@pytest.mark.parametrize("after", [None, {"started": 5.0, "state": "Z"}, {"started": 50.0}])
async def test_an_exit_is_found(
    host: LiveHost, tmp_path: Path, after: dict[str, Any] | None
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    proc.add(21, argv=["train"], started=5.0)
    (first,) = await host.exit_observations([20], [21], 5.0)
    assert first.processes.keys() == {20, 21}
    assert await host.exit_observations([20], [21], 5.0) == ()
    proc.remove(20)
    if after is not None:  # a zombie, or another process
        proc.add(20, argv=["train"], **after)
    before = host.now()
    (found,) = await host.exit_observations([20], [21], 5.0)
    facts = found.processes.get(20)
    assert facts is None or facts.state == "Z" or facts.start_time_seconds > 50.0
    assert before <= found.at
    assert await host.exit_observations([20], [21], 5.0) == ()


async def test_an_exit_is_not_lost_while_proc_is_busy(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    await host.exit_observations([20], [], 5.0)
    proc.remove(20)

    async def busy(*_arguments: object) -> ProcfsObservation:
        raise SourceTimeoutError("procfs is busy")

    with monkeypatch.context() as patch:
        patch.setattr(host, "identify", busy)
        with pytest.raises(SourceTimeoutError):
            await host.exit_observations([20], [], 5.0)
    (found,) = await host.exit_observations([20], [], 5.0)
    assert found.gone == (20,)


async def test_a_scan_is_made_once_a_second(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeProc(tmp_path).add(20, argv=["train"], started=5.0)
    monkeypatch.setattr(policy, "EXIT_POLL_INTERVAL_SECONDS", 3600.0)
    (first,) = await host.exit_observations([20], [], 5.0)
    assert first.processes.keys() == {20}
    FakeProc(tmp_path).remove(20)
    assert await host.exit_observations([20], [], 5.0) == ()


async def test_a_process_that_hidepid_hides_has_not_exited(host: LiveHost, tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    for pid in (20, 21):
        proc.add(pid, argv=["train"], started=5.0)
    await host.exit_observations([20, 21], [], 5.0)
    for pid in (1, 20):
        proc.remove(pid)
    assert await host.exit_observations([20, 21], [], 5.0) == ()
    proc.add(21, argv=["train"], started=50.0)
    (found,) = await host.exit_observations([20, 21], [], 5.0)
    assert (set(found.processes), found.gone) == ({21}, ())

"""What other users choose is not interned: Python 3.12.0 to 3.12.6 keep interned strings."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bench.host import FullHost
from mps_exporter.collector import Collector
from mps_exporter.snapshot import Snapshot
from testing.waiting import PATIENCE_SECONDS

JOB = 4711


def clients(snapshot: Snapshot) -> set[int]:
    """The clients that were found in /proc."""
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    return {client.pid for server in servers for client in server.clients if client.confirmed}


async def test_pids_and_names_are_not_interned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interned: list[str] = []

    def intern(text: str) -> str:
        interned.append(text)
        return text

    with FullHost(tmp_path, 4, gpus=2, daemons=1, other_processes=2) as full:
        host = full.live()
        collector = Collector(host, full.settings)
        await collector.collect()
        job = full.start_job(JOB)
        came = full.connect(full.daemons[0], [0, 1])
        full.tell()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "intern", intern)
            snapshot = await collector.collect()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not clients(snapshot).issuperset(came):
                    await asyncio.sleep(0.05)
                    snapshot = await collector.collect()
        await host.close()

    assert str(job.pipe) in {daemon.pipe_directory for daemon in snapshot.daemons}
    assert [text for text in interned if text.isdecimal() or str(JOB) in text] == []

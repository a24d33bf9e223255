"""Where pages are rendered."""

from __future__ import annotations

import threading

import pytest

from mps_exporter import backend, policy
from mps_exporter.backend import CollectorBackend
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.render import ClientSeries
from mps_exporter.metrics.spec import Family
from mps_exporter.snapshot import Snapshot
from testing.snapshots import full


async def test_large_pages_and_the_first_one_do_not_stop_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered_in, render = list[threading.Thread](), backend.render_families

    def noted(snapshot: Snapshot, clients: ClientSeries) -> list[Family]:
        rendered_in.append(threading.current_thread())
        return render(snapshot, clients)

    monkeypatch.setattr(backend, "render_families", noted)
    service, small, large = CollectorBackend(Settings()), Snapshot(taken_at=0.0), full()
    try:
        for snapshot in (small, small, large, large, small, small):
            page = await service.expose(snapshot, TEXT_0_0_4, gzip=False)
            assert (len(page) > policy.SMALL_PAGE_BYTES) == (snapshot is large)
    finally:
        await service.close()
    on_the_loop = [thread is threading.current_thread() for thread in rendered_in]
    assert on_the_loop == [False, True, True, False, False, True]

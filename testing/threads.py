"""Threads of blocking calls, and a machine that is short of threads."""

import threading
from collections.abc import Hashable
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.sources import blocking
from mps_exporter.sources.blocking import BlockingCalls


def allow_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one more thread, and refuse all others like the kernel at a limit."""
    monkeypatch.setattr(blocking, "_idle", [])
    monkeypatch.setattr(policy, "MAX_IDLE_THREADS", 0)
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def is_under_way(calls: BlockingCalls[Any], key: Hashable) -> bool:
    """Return whether the last call with this key has not returned."""
    call = calls._calls.get(key)
    return call is not None and not call.future.done()

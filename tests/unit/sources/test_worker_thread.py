from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from mps_exporter.sources.worker_thread import WorkerBusyError, WorkerThread, WorkerTimeoutError
from testing.waiting import PATIENCE_SECONDS as PATIENCE
from testing.waiting import until, wait_for


def threads_named(name: str) -> int:
    gc.collect()
    return sum(thread.name == name for thread in threading.enumerate())


async def settled(name: str, expected: int) -> None:
    await until(lambda: threads_named(name) == expected)


async def idle(worker: WorkerThread) -> None:
    await until(lambda: worker.busy_since is None)


async def test_gives_the_result_from_a_thread_of_its_own() -> None:
    worker = WorkerThread("w-result")
    names = [
        await worker.call(lambda: threading.current_thread().name, deadline_seconds=PATIENCE)
        for _ in range(3)
    ]
    assert names == ["w-result"] * 3
    assert threads_named("w-result") == 1
    assert worker.busy_since is None
    worker.close()
    await settled("w-result", 0)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), SystemExit(3)])
async def test_raises_what_the_function_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    worker = WorkerThread("w-raise")
    with pytest.raises(type(error)) as caught:
        await worker.call(fail, deadline_seconds=PATIENCE)
    assert caught.value is error
    assert await worker.call(len, "abc", deadline_seconds=PATIENCE) == 3
    worker.close()


async def test_stop_iteration_does_not_kill_the_future() -> None:
    worker = WorkerThread("w-stop")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.call(next, iter(()), deadline_seconds=PATIENCE)
    worker.close()


async def test_a_call_that_hangs_costs_its_deadline_and_then_nothing() -> None:
    release = threading.Event()
    worker = WorkerThread("w-hang", clock=lambda: 1000.0)
    with pytest.raises(WorkerTimeoutError, match=r"w-hang did not answer within 0\.05 s"):
        await worker.call(release.wait, deadline_seconds=0.05)
    for _ in range(3):
        with pytest.raises(WorkerBusyError) as caught:
            await worker.call(len, "abc", deadline_seconds=PATIENCE)
        assert caught.value.since == 1000.0
    assert worker.busy_since == 1000.0
    release.set()
    await idle(worker)
    assert await worker.call(len, "abc", deadline_seconds=PATIENCE) == 3
    assert threads_named("w-hang") == 1
    worker.close()


async def test_a_late_result_is_dropped() -> None:
    release = threading.Event()

    def late() -> str:
        release.wait()
        return "late"

    worker = WorkerThread("w-late")
    with pytest.raises(WorkerTimeoutError):
        await worker.call(late, deadline_seconds=0.02)
    release.set()
    await idle(worker)
    assert await worker.call(str, "mine", deadline_seconds=PATIENCE) == "mine"
    worker.close()


async def test_without_time_nothing_is_started() -> None:
    worker = WorkerThread("w-none")
    with pytest.raises(WorkerTimeoutError):
        await worker.call(len, "abc", deadline_seconds=0)
    assert threads_named("w-none") == 0


async def test_a_cancelled_caller_leaves_the_call_inside() -> None:
    release = threading.Event()
    worker = WorkerThread("w-cancel")
    caller = asyncio.ensure_future(worker.call(release.wait, deadline_seconds=PATIENCE))
    await until(lambda: worker.busy_since)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(WorkerBusyError):
        await worker.call(len, "abc", deadline_seconds=PATIENCE)
    release.set()
    worker.close()
    await settled("w-cancel", 0)


async def test_the_thread_ends_with_the_last_reference() -> None:
    worker = WorkerThread("w-gone")
    assert await worker.call(len, "abc", deadline_seconds=PATIENCE) == 3
    del worker
    await settled("w-gone", 0)


async def test_a_closed_worker_refuses() -> None:
    worker = WorkerThread("w-closed")
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.call(len, "abc", deadline_seconds=PATIENCE)


def test_a_closed_loop_does_no_harm() -> None:
    release = threading.Event()
    worker = WorkerThread("w-loop")

    async def abandon() -> None:
        with pytest.raises(WorkerTimeoutError):
            await worker.call(release.wait, deadline_seconds=0.02)

    asyncio.run(abandon())
    release.set()
    wait_for(lambda: worker.busy_since is None)
    assert asyncio.run(worker.call(len, "abc", deadline_seconds=PATIENCE)) == 3
    worker.close()

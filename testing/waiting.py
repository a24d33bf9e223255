"""Waiting for conditions, as long as a slow and busy machine may need.

A test never waits for an amount of time: it waits for a condition, and fails so late that only a
fault can be the reason. Speed is measured by bench/, not by tests.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

PATIENCE_SECONDS = 120.0
"""Far beyond what anything here takes when its core is shared with many, and far below `timeout` in
pyproject.toml, so that what did not come is named by the test."""

T = TypeVar("T")


def wait_for(question: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    """Ask until the answer is something, and give it."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:g} s: {question}")
        time.sleep(0.01)
    return answer


async def until(question: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    """Wait until a condition is true, while other tasks run."""

    async def ask() -> T | None:
        return question()

    return await until_awaited(ask, seconds)


async def until_awaited(
    question: Callable[[], Awaitable[T | None]], seconds: float = PATIENCE_SECONDS
) -> T:
    """Wait until an awaited condition is true."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not (answer := await question()):
        if loop.time() > end:
            pytest.fail(f"not within {seconds:g} s: {question}")
        await asyncio.sleep(0.01)
    return answer

"""What mps-exporter.pyz uses of Python 3.11, for Python 3.10 (Ubuntu 22.04).

async_timeout and exceptiongroup are the backports that aiohttp and cattrs need there as well.
"""

# ruff: noqa: ICN001, INP001, PYI034, UP017, UP042 - a file of mps-exporter.pyz, for Python 3.10
from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import datetime
import enum
import typing
from types import TracebackType
from typing import Any

import async_timeout
import exceptiongroup
import typing_extensions


class StrEnum(str, enum.Enum):
    """As enum.StrEnum."""

    __str__ = str.__str__
    __format__ = str.__format__


class TaskGroup:
    """As asyncio.TaskGroup, for tasks that are started before the block ends."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> TaskGroup:
        return self

    def create_task(self, coroutine: Any, *, name: str | None = None) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(coroutine, name=name))
        return self._tasks[-1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def install() -> None:
    """Add these names to the modules that have them since Python 3.11."""
    # One class since 3.11: what asyncio raises must be caught as TimeoutError.
    asyncio.TimeoutError = asyncio.exceptions.TimeoutError = builtins.TimeoutError  # type: ignore[misc]
    concurrent.futures.TimeoutError = builtins.TimeoutError  # type: ignore[misc]
    concurrent.futures._base.TimeoutError = builtins.TimeoutError  # noqa: SLF001
    asyncio.tasks.exceptions.TimeoutError = builtins.TimeoutError
    asyncio.timeout = async_timeout.timeout
    asyncio.TaskGroup = TaskGroup
    datetime.UTC = datetime.timezone.utc
    enum.StrEnum = StrEnum
    for name in ("Self", "Never", "LiteralString", "Required", "NotRequired", "assert_never"):
        setattr(typing, name, getattr(typing_extensions, name))
    builtins.BaseExceptionGroup = exceptiongroup.BaseExceptionGroup
    builtins.ExceptionGroup = exceptiongroup.ExceptionGroup

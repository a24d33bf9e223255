"""Answers being rendered: those who want the same bytes at the same moment share them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable


class SharedRenderings:
    """Answers under way, by what tells them from others."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[bytes]] = {}

    async def join(self, key: Hashable, render: Callable[[], Awaitable[bytes]]) -> bytes:
        """Render, or wait for who renders the same.

        ``key`` may contain the id() of a snapshot that ``render`` refers to.
        """
        answer = self._under_way.get(key)
        if answer is None:
            answer = asyncio.ensure_future(render())
            self._under_way[key] = answer
            answer.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(answer)

"""The shortest list of actions that still shows a violation."""

from collections.abc import Awaitable, Callable, Sequence

from testing.world.script import Action

Fails = Callable[[Sequence[Action]], Awaitable[bool]]


async def shrink(actions: Sequence[Action], fails: Fails) -> tuple[Action, ...]:
    """Remove halves, quarters ... single actions for as long as it still fails.

    Every delay of a world depends on its own entity only, so the rest of the history stays.
    """
    kept = list(actions)
    size = max(len(kept) // 2, 1)
    while True:
        removed = False
        for begin in range(len(kept) - size, -1, -size):
            fewer = kept[:begin] + kept[begin + size :]
            if await fails(fewer):
                kept, removed = fewer, True
        if size == 1 and not removed:
            return tuple(kept)
        size = max(size // 2, 1)

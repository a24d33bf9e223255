"""How this process treats its memory: little of it, and little time spent on looking after it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

GARBAGE_THRESHOLD = 50_000
"""New objects after which Python looks for cycles among them. A collection on a full host makes
half as many, nearly all freed without that look; by default it is taken 35 times on the way, for a
tenth of the collection's time, and for a fifth of the program's start."""

COLLECT_INTERVAL_SECONDS = 60.0
"""How often to look all the same: every closed connection leaves a cycle (asyncio's transport and
its socket), which came to 5 MB in half an hour of the soak. It takes 10 ms."""

M_ARENA_MAX = -8
"""<malloc.h>: how many pools malloc may have. By default each thread gets one of its own, and pages
that were rendered by turns on several threads leave 1.4 MB more behind (of 59, in the soak)."""


def tune_allocator() -> None:
    """Set both. To be called before there are threads, and before modules are imported."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    with suppress(OSError, AttributeError):  # musl has no such call
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def freeze_startup_objects() -> None:
    """Never look for garbage among what the start left: it stays."""
    gc.freeze()


async def collect_garbage_periodically() -> None:
    """Look for garbage once a minute, until cancelled."""
    while True:
        await asyncio.sleep(COLLECT_INTERVAL_SECONDS)
        gc.collect()

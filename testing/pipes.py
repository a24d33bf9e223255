"""A pipe that is full, as standard error is when its reader has stopped."""

from __future__ import annotations

import contextlib
import os


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that accepts no more data: (reading, writing)."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    return reading, writing

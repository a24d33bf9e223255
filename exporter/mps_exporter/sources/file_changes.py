"""Reports that open files were written to, truncated, renamed or removed (inotify).

The kernel does not see what another machine does to a file on a network file system. So silence
means that nothing changed only where a change of the same file has been reported before.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress

_MODIFY, _ATTRIBUTES, _MOVE_SELF, _DELETE_SELF = 0x2, 0x4, 0x800, 0x400
_ONE_EVENT = 0x8000_0000
"""A file that is written to a thousand times a second is reported once."""
_MASK = _MODIFY | _ATTRIBUTES | _MOVE_SELF | _DELETE_SELF | _ONE_EVENT
_READ_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class FileChanges:
    """The next change of some open files."""

    def __init__(self) -> None:
        found: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptor = None if found < 0 else found
        """Readable when happened() may say something new; None: the kernel gives none."""
        self._happened = False
        if found >= 0:
            weakref.finalize(self, os.close, found)

    def watch(self, files: Iterable[int]) -> bool:
        """Forget what happened, and watch these from now on; False: one of them cannot be.

        May block, on any thread.
        """
        self._happened = False
        paths = [f"/proc/self/fd/{file}".encode() for file in files]
        return self.descriptor is not None and all(
            _libc.inotify_add_watch(self.descriptor, path, _MASK) >= 0 for path in paths
        )

    def happened(self) -> bool:
        """Whether one of the files has changed. Does not block."""
        if self.descriptor is not None:
            with suppress(BlockingIOError):
                os.read(self.descriptor, _READ_BYTES)  # one event stands for all files
                self._happened = True
        return self._happened

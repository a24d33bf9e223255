"""A gzip file that grows, and that can be read at any time as far as it goes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from pathlib import Path

_GZIP = 16 + zlib.MAX_WBITS


class GzipAppender:
    """Text that is compressed as it comes.

    What was there before goes only when there is something to replace it. After :meth:`flush`
    everything written so far can be read, though the writer be killed. A write that fails is the
    last one: what the file holds then stays as it is, and ``failure`` says why.
    """

    def __init__(self, path: Path, beginning: str) -> None:
        """Create the file with its beginning.

        Raises:
            OSError: It cannot be written.
        """
        self.failure: OSError | None = None
        self._zip = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=_GZIP)
        self._changed = False
        # A recording shows what runs on this host: nobody else's business, also when it is older.
        _check_owner(path, path.lstat() if path.is_symlink() else None)
        # (A FIFO that nobody reads is no reason to wait.)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            _check_owner(path, os.fstat(self._file))
            os.set_blocking(self._file, True)
            regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if regular:
                with contextlib.suppress(PermissionError):  # another's file that we may write
                    os.fchmod(self._file, 0o600)
            first = self._zip.compress(beginning.encode()) + self._zip.flush(zlib.Z_SYNC_FLUSH)
            self._put(first)
            if regular:
                os.ftruncate(self._file, len(first))
        except OSError:
            os.close(self._file)
            raise

    def write(self, text: str) -> None:
        """Add text; nothing after a failure."""
        if self.failure is None:
            self._changed = True
            self._try(self._zip.compress(text.encode()))

    def flush(self) -> None:
        """Make all of it readable."""
        if self.failure is None and self._changed:
            self._changed = False
            self._try(self._zip.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        """Write the end."""
        if self.failure is None:
            self._try(self._zip.flush(zlib.Z_FINISH))
        try:
            os.close(self._file)
        except OSError as error:  # some file systems tell only now that there was no room
            self.failure = self.failure or error

    def _try(self, data: bytes) -> None:
        try:
            self._put(data)
        except OSError as error:
            self.failure = error

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def _check_owner(path: Path, found: os.stat_result | None) -> None:
    """Refuse what an ordinary user put where the recording is to be, as in /tmp.

    Raises:
        OSError: It is theirs: a file or FIFO would be read, a link would lead anywhere.
    """
    if found is not None and found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))

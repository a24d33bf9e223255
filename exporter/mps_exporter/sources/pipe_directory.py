"""A pipe directory as it is reached from here: whose it is, and who holds the lock in it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mps_exporter.sources.procfs_parse import pack_lock_query, parse_lock_reply
from mps_exporter.sources.resolve_in_root import opened_directory

LOCK_FILE = "control_lock"

_NOT_THERE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ESRCH,
    }
)
"""It is not there, or not for us. Other errors (no descriptor is left, a file server is gone) are
over some time, and say nothing of it."""


@dataclass(frozen=True, slots=True)
class PipeDirectory:
    """A pipe directory, and what the kernel tells of it."""

    root: str
    directory: str
    lock_tested: bool
    holder: int | None
    """Who holds the lock; only one whose right to it is plain, see belongs_to()."""
    identity: object
    """The same for the same directory, whatever it is called."""
    owner_uid: int | None = None
    """None: it is not there, or cannot be seen."""
    lock_owner_uid: int | None = None

    @property
    def exists(self) -> bool:
        """It can be seen."""
        return self.owner_uid is not None

    def belongs_to(self, uid: int | None, *, strictly: bool) -> bool:
        """Whether a daemon of this user may be what runs here.

        Its lock file has mode 0666, so anybody may take the lock in a directory of root's whose
        daemon is gone. In a directory that all may write to (/tmp), the lock file is the owner's.

        Args:
            uid: None: not known.
            strictly: The directory itself must be the user's, as for one that was configured.
        """
        if uid == 0:
            return True
        if not self.exists:
            return not strictly or uid == os.geteuid()
        return uid is not None and (
            uid == self.owner_uid or (not strictly and uid == self.lock_owner_uid)
        )


class UnlessNotThere:
    """Suppresses the errors which say that a path is not there, or not for us, and no others."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, OSError):
            return error.errno in _NOT_THERE
        return isinstance(error, ValueError)


def look_at(
    root: str,
    directory: str,
    procfs: str,
    uid_of: Callable[[int], int | None],
    *,
    strictly: bool = False,
) -> PipeDirectory:
    """Look at a pipe directory.

    Args:
        root: Prefix under which it is reached: "" or /proc/PID/root.
        directory: Its name.
        procfs: Where procfs is mounted.
        uid_of: Whose process a PID is; None: it cannot be told.
        strictly: See PipeDirectory.belongs_to.

    Raises:
        OSError: Whether it is there cannot be told now.
    """
    path = root + directory
    found = lock_owner = None
    with UnlessNotThere(), opened_directory(path, procfs) as opened:
        found = os.fstat(opened)
        with suppress(OSError):
            lock_owner = os.stat(LOCK_FILE, dir_fd=opened, follow_symlinks=False).st_uid
        tested, holder = lock_holder(LOCK_FILE, opened)
    if found is None:
        return PipeDirectory(root, directory, lock_tested=False, holder=None, identity=path)
    identity = found.st_dev, found.st_ino
    seen = PipeDirectory(root, directory, tested, None, identity, found.st_uid, lock_owner)
    if holder:
        uid = uid_of(holder)
        if uid is not None and not seen.belongs_to(uid, strictly=strictly):
            return seen
    return PipeDirectory(root, directory, tested, holder, identity, found.st_uid, lock_owner)


def identity_of(path: str, procfs: str) -> tuple[int, int] | None:
    """Give what is the same for the same directory; None: it is not there, or not to be seen.

    Raises:
        OSError: It cannot be told now.
    """
    with UnlessNotThere(), opened_directory(path, procfs) as opened:
        found = os.fstat(opened)
        return found.st_dev, found.st_ino
    return None


def owner_of(path: str, procfs: str) -> int | None:
    """Give whose a directory is; None: it is not there, or not to be seen.

    Raises:
        OSError: It cannot be told now.
    """
    with UnlessNotThere(), opened_directory(path, procfs) as opened:
        return os.fstat(opened).st_uid
    return None


def lock_holder(path: str, directory: int | None = None) -> tuple[bool, int | None]:
    """Ask the kernel who holds a write lock on a file, without touching it: (tested, holder).

    A daemon holds the one on control_lock while it lives, also while it hangs (measured). The
    holder is 0 when its PID does not show here. Files that are no regular files are left alone.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        found = os.stat(path, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return False, None
        file = os.open(path, flags, dir_fd=directory)
    except (OSError, ValueError):
        return False, None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False, None
        answer = fcntl.fcntl(file, fcntl.F_GETLK, pack_lock_query(fcntl.F_WRLCK))
        return True, parse_lock_reply(answer, fcntl.F_UNLCK)
    except OSError:
        return False, None
    finally:
        os.close(file)


LEFT_FILES = ("control", "nvidia-cuda-mps-control.pid")
"""What a daemon has in its pipe directory, and leaves there when it is killed."""


def is_left_over(path: str) -> bool:
    """Whether a daemon has run in a directory, and surely none does: its lock is free."""
    try:
        tested, holder = lock_holder(f"{path}/{LOCK_FILE}")
        return tested and holder is None and any(Path(path, name).exists() for name in LEFT_FILES)
    except OSError:
        return False

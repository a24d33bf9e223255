"""Directories that other processes name, opened without being led out of what they may name.

A directory below ``/proc/PID/root`` lies in the mount namespace of that process. The kernel follows
an absolute link on that way from our own root, where it is the host's directory and so another
daemon's; and whoever may make mounts there may put any file of the host in the place of any other.
So: links are resolved below the process's root (openat2), links of procfs into other processes are
refused, mounts of a user namespace that an ordinary user made are not entered, and directories that
are masked from this program (systemd: InaccessiblePaths=, ProtectHome=) stay masked.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

MAX_PATH_BYTES = 4095
"""The kernel takes no longer path (PATH_MAX, with the byte that ends it)."""

_MAX_LINKS = 40
"""As many as the kernel follows."""
_MAX_STEPS = 96
"""Names and links that are looked at, at most, where the kernel has no openat2."""
_MAX_PARENTS = 128
_INACCESSIBLE = "/systemd/inaccessible/dir"
"""What systemd mounts over the directories of InaccessiblePaths= and ProtectHome=yes."""
_REMOTE = re.compile(
    r"nfs|fuse|cifs|smb|ceph|9p|afs|lustre|gpfs|mmfs|beegfs|autofs|wekafs|virtiofs"
)
"""File systems of which a look may not return."""

_INSIDE = re.compile(r"(\d+/root)(/.*|)", re.DOTALL)
"""A path in the mount namespace of a process, below procfs."""

_OPENAT2 = 437  # the same on every architecture
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def process_root(path: str, procfs: str = "/proc") -> tuple[str, str]:
    """Split a path into the root of the process that it leads through ("": none) and the rest."""
    below = path.removeprefix(f"{procfs}/")
    found = _INSIDE.fullmatch(below) if below != path else None
    return (f"{procfs}/{found[1]}", found[2] or "/") if found else ("", path)


@contextmanager
def opened_directory(path: str, procfs: str = "/proc") -> Iterator[int]:
    """Open a directory (O_PATH), and close it afterwards.

    Args:
        path: Absolute. Of ``/proc/PID/root/...`` the first part is entered, and the rest resolved
            below it; any other way into another process's file system is refused.
        procfs: Where procfs is mounted.

    Raises:
        OSError: It is not there, or not to be entered.
    """
    root, inside = process_root(path, procfs)
    with _opened_root(root) as base:
        descriptor = _open_below(base, inside)
        try:
            if root and _same_file(base, "/") and _is_masked(descriptor, root):
                raise PermissionError(errno.EACCES, "masked from this program")
            yield descriptor
        finally:
            os.close(descriptor)


def resolve_in_root(root: str, path: str) -> str:
    """Give a path below a root without links that would lead out; the path itself if it has none.

    Raises:
        OSError: It has too many links or names.
    """
    with _opened_root(root) as base:
        descriptor, names, leads_out = _walk(base, path)
        os.close(descriptor)
    return f"/{'/'.join(names)}" if leads_out else path


@contextmanager
def _opened_root(root: str) -> Iterator[int]:
    """Open a process's root, unless an ordinary user made the mounts below it."""
    if not root:
        base = os.open("/", _DIRECTORY)
    else:
        # By one descriptor: it stays with the process, also when another gets its number.
        process = os.open(root.removesuffix("/root"), _DIRECTORY)
        try:
            _require_trusted_mounts(process)
            base = os.open("root", _DIRECTORY, dir_fd=process)
        finally:
            os.close(process)
    try:
        yield base
    finally:
        os.close(base)


def _require_trusted_mounts(process: int) -> None:
    """Refuse a mount namespace that belongs to a user namespace which an ordinary user made.

    Raises:
        PermissionError: It does, or the right to know is missing.
    """
    with suppress(FileNotFoundError):  # no procfs of the kernel's
        mounts = os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        try:
            owner = _owner_of_namespace(mounts)
        finally:
            os.close(mounts)
        if owner not in (None, 0):
            raise PermissionError(errno.EACCES, f"its mounts were made by user {owner}")


def _owner_of_namespace(namespace: int) -> int | None:
    """Who made the user namespace that a namespace belongs to; None: it is ours, or above ours."""
    try:
        users = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except PermissionError:
        return None  # of a user namespace that contains ours: whoever made it made us
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL):
            return None  # a kernel before 4.9, or no namespace at all
        raise
    try:
        if os.path.samestat(os.fstat(users), os.stat("/proc/self/ns/user")):  # noqa: PTH116
            return None
        uid = array.array("I", [0])
        fcntl.ioctl(users, _NS_GET_OWNER_UID, uid)
        return uid[0]
    finally:
        os.close(users)


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _require(condition: bool, code: int) -> None:
    if not condition:
        raise _os_error(code)


def _same_file(descriptor: int, path: str) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))  # noqa: PTH116


# ---------------------------------------------------------------------- below a root


def _open_below(base: int, path: str) -> int:
    """Open a directory below a root, as a process sees it whose root that is."""
    raw = os.fsencode(path)
    if len(raw) > MAX_PATH_BYTES:
        raise _os_error(errno.ENAMETOOLONG)
    if b"\0" in raw:
        raise _os_error(errno.EINVAL)
    descriptor = _openat2(base, raw)
    if descriptor is None:
        descriptor, _, _ = _walk(base, path)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _os_error(errno.ENOTDIR)
    return descriptor


def _openat2(base: int, path: bytes) -> int | None:
    """Let the kernel do it (Linux 5.6); None: it has no such call, or a filter forbids it."""
    how = struct.pack("QQQ", _DIRECTORY, 0, _IN_ROOT | _NO_MAGICLINKS)
    found: int = _libc.syscall(_OPENAT2, base, path, how, len(how))
    if found >= 0:
        return found
    code = ctypes.get_errno()
    # ENOSYS from the kernel; a filter from before the call existed says EPERM, which the call never
    # says of a directory that is opened by O_PATH.
    if code in (errno.ENOSYS, errno.EPERM):
        return None
    raise _os_error(code)


def _walk(base: int, path: str) -> tuple[int, list[str], bool]:
    """Go down name by name, and read links instead of following them.

    Returns:
        A descriptor of what is there, the names without links, and whether one of the links would
        have led out of the root.

    Raises:
        OSError: What is there cannot be opened; ELOOP: too many names or links.
    """
    done: list[str] = []
    names = deque(path.split("/"))
    links = steps = 0
    leads_out = False
    descriptor = os.dup(base)
    try:
        while names:
            name = names.popleft()
            if name in {"", "."}:
                continue
            steps += 1
            _require(steps <= _MAX_STEPS and links <= _MAX_LINKS, errno.ELOOP)
            if name == "..":
                leads_out |= not done
                del done[-1:]
                descriptor = _replaced(descriptor, _reopened(base, done))
                continue
            below = os.open(name, _LINK, dir_fd=descriptor)
            if not stat.S_ISLNK(os.fstat(below).st_mode):
                descriptor = _replaced(descriptor, below)
                done.append(name)
                continue
            os.close(below)
            target = os.readlink(name, dir_fd=descriptor)
            links += 1
            if target.startswith("/"):
                leads_out = True
                done.clear()
                descriptor = _replaced(descriptor, os.dup(base))
            names.extendleft(reversed(target.split("/")))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, done, leads_out


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def _reopened(base: int, names: list[str]) -> int:
    descriptor = os.dup(base)
    for name in names:
        try:
            below = os.open(name, _LINK, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


# ---------------------------------------------------------------------- what is masked


def _is_masked(descriptor: int, root: str) -> bool:
    """Whether a directory of the host is, or lies in, one that is masked from this program."""
    hidden = masked_directories()
    if not hidden:
        return False
    mounted = {one.path: one for one in _mounts(f"{root.removesuffix('/root')}/mountinfo")}
    remote = {path for path in hidden if path in mounted and _REMOTE.match(mounted[path].kind)}
    # (On local ones, of btrfs, the device may be another one than that of the files.)
    devices = {mounted[path].device for path in remote}
    masked = set()
    for path in hidden:
        if path not in remote:
            with suppress(OSError):
                there = os.stat(f"{root}{path}")  # noqa: PTH116
                masked.add((there.st_dev, there.st_ino))
    here = os.dup(descriptor)
    try:
        for _ in range(_MAX_PARENTS):
            found = os.fstat(here)
            if found.st_dev in devices or (found.st_dev, found.st_ino) in masked:
                return True
            here = _replaced(here, os.open("..", _DIRECTORY, dir_fd=here))
            above = os.fstat(here)
            if (above.st_dev, above.st_ino) == (found.st_dev, found.st_ino):
                return False
    finally:
        os.close(here)
    return True  # so deep that it cannot be told


@lru_cache(maxsize=1)
def masked_directories() -> tuple[str, ...]:
    """Directories of this mount namespace over which systemd has mounted the one of no use.

    None of the mounts is looked at: with a single file server that is gone, each look at a
    directory would hang.
    """
    found = _mounts("/proc/self/mountinfo")
    return tuple(one.path for one in found if one.mounted.endswith(_INACCESSIBLE))


class _Mount(NamedTuple):
    path: str
    mounted: str
    """What of its file system."""
    device: int
    kind: str


def _mounts(path: str) -> Iterator[_Mount]:
    with suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
        for line in lines:
            _, _, device, root, point, *options = line.split()
            major, minor = map(int, device.split(":"))
            kind = options[options.index("-") + 1]
            yield _Mount(_unescaped(point), _unescaped(root), os.makedev(major, minor), kind)


def _unescaped(path: str) -> str:
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path)

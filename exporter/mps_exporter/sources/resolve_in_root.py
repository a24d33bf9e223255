"""Opens directories that other processes name, and nothing beyond what they may name.

A directory below ``/proc/PID/root`` lies in the mount namespace of that process. The kernel follows
an absolute link there from the exporter's own root, where it leads to a directory of the host and
so to another daemon; and a user who may mount there can put any file of the host in the place of
any other. Therefore links are resolved below the process's root (openat2), links of procfs into
other processes are refused, mount namespaces of a user namespace that an ordinary user made are not
entered, and directories that systemd masks from the exporter (InaccessiblePaths=, ProtectHome=)
stay masked. Kernels without openat2 (before Linux 5.6) do not enter other mount namespaces.
"""

import array
import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

MAX_PATH_BYTES = 4095  # Longest path that the kernel accepts (PATH_MAX without the final byte).

_INACCESSIBLE = "/systemd/inaccessible/dir"
"""The directory that systemd mounts over the directories of InaccessiblePaths= and ProtectHome=."""

_INSIDE = re.compile(r"(\d+/root)(/.*|)", re.DOTALL)  # A path below the root of a process.

_OPENAT2 = 437  # the same on every architecture
_NO_MAGICLINKS, _BENEATH, _IN_ROOT = 0x02, 0x08, 0x10
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def process_root(path: str, procfs: str = "/proc") -> tuple[str, str]:
    """Split a path after /proc/PID/root, the root of a process; "" and the path if elsewhere."""
    below = path.removeprefix(f"{procfs}/")
    found = _INSIDE.fullmatch(below) if below != path else None
    return (f"{procfs}/{found[1]}", found[2] or "/") if found else ("", path)


@contextmanager
def opened_directory(path: str, procfs: str = "/proc") -> Iterator[int]:
    """Yield an opened directory (O_PATH), then close it.

    The rest of ``/proc/PID/root/...`` is resolved below that root; any other way into another
    process's file system is refused.

    Raises:
        OSError: If the directory is missing or must not be entered.
    """
    root, inside = process_root(path, procfs)
    with _opened_root(root) as base:
        descriptor = _open_below(base, inside) if root else _open_on_host(base, inside)
        try:
            if root and os.path.samestat(os.fstat(base), os.stat("/")):  # noqa: PTH116
                path = f"{_path_of(descriptor)}/"
                if any(path.startswith(f"{masked}/") for masked in masked_directories()):
                    raise PermissionError(errno.EACCES, "masked from this program")
            yield descriptor
        finally:
            os.close(descriptor)


def resolve_in_root(root: str, path: str) -> str:
    """Return a path below a root without links that would lead out of the root.

    A path without such links is returned unchanged.

    Raises:
        OSError: If the path is not a directory that can be entered.
    """
    with _opened_root(root) as base:
        try:
            os.close(_open_below(base, path.lstrip("/") or ".", _BENEATH))
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return path
        descriptor = _open_below(base, path)
        try:
            return f"/{_path_of(descriptor).removeprefix(_path_of(base)).lstrip('/')}"
        finally:
            os.close(descriptor)


@contextmanager
def _opened_root(root: str) -> Iterator[int]:
    """Open a process's root ("": the exporter's), unless an ordinary user made its mounts."""
    if not root:
        base = os.open("/", _DIRECTORY)
    else:
        # A descriptor stays with the process when another process gets the PID.
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
        PermissionError: If the owner is an ordinary user, or cannot be read.
    """
    with suppress(FileNotFoundError):  # a procfs that is not the kernel's
        mounts = os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        try:
            owner = _owner_of_namespace(mounts)
        finally:
            os.close(mounts)
        if owner not in (None, 0):
            raise PermissionError(errno.EACCES, f"its mounts were made by user {owner}")


def _owner_of_namespace(namespace: int) -> int | None:
    """Return the user who made a namespace's user namespace; None if trusted, or not supported.

    The exporter trusts the makers of its own user namespace and of the namespaces above.
    """
    try:
        users = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except PermissionError:
        return None  # a user namespace above the exporter's
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL):
            return None  # a kernel before 4.9, or not a namespace
        raise
    try:
        if os.path.samestat(os.fstat(users), os.stat("/proc/self/ns/user")):  # noqa: PTH116
            return None
        uid = array.array("I", [0])
        fcntl.ioctl(users, _NS_GET_OWNER_UID, uid)
        return uid[0]
    finally:
        os.close(users)


def _open_below(base: int, path: str, resolution: int = _IN_ROOT) -> int:
    """Open a directory below a root, as a process with that root sees it."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    how = struct.pack("QQQ", _DIRECTORY, 0, resolution | _NO_MAGICLINKS)
    found: int = _libc.syscall(_OPENAT2, base, raw, how, len(how))
    if found >= 0:
        return found
    code = ctypes.get_errno()
    # ENOSYS is the kernel's. A filter of system calls from before openat2 returns EPERM, which
    # openat2 never returns for a directory that is opened with O_PATH.
    if code in (errno.ENOSYS, errno.EPERM):
        raise PermissionError(errno.EPERM, "openat2 is not available")
    raise OSError(code, os.strerror(code))


def _open_on_host(base: int, path: str) -> int:
    """Open a directory of the exporter's own mount namespace."""
    try:
        return _open_below(base, path)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
    # realpath() reads links of procfs as text, so it does not enter another namespace.
    return os.open(os.path.realpath(path), _DIRECTORY)


def _path_of(descriptor: int) -> str:
    """Return the path of a directory in its own mount namespace."""
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


@lru_cache(maxsize=1)
def masked_directories() -> tuple[str, ...]:
    """Return the directories that systemd has masked in the exporter's mount namespace.

    Only the list of mounts is read: access to a mount can hang on an unreachable file server.
    """
    masked = []
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        for line in mounts.rstrip("\n").split("\n"):
            _, _, _, mounted, point, *_ = line.split(" ")
            if mounted.endswith(_INACCESSIBLE):
                # The kernel writes blanks and backslashes as octal numbers.
                masked.append(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point))
    return tuple(masked)

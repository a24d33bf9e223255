"""A process whose memory stays locked: /proc/PID/cmdline, environ and maps of it never return.

Started as root with a directory, a user and a name. Its file system (FUSE) never answers the read
of one page. A child waits for that page; then the process maps the same file without the page
cache: the kernel waits for the page while it holds the lock of the process's memory.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_INIT, _LOOKUP, _GETATTR, _OPEN, _READ, _FORGET = 26, 1, 3, 14, 15, 2
_NO_SYSTEM_CALL = -38
_DIRECT_IO, _KEEP_CACHE = 1, 2


def _attributes(node: int) -> bytes:
    mode = 0o40755 if node == 1 else 0o100644
    return struct.pack("=6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(device: int, reads: int) -> None:
    """Answer as a file system with one file, and write a byte into `reads` for each lost read.

    The file is opened for the page cache the first time, and for direct I/O every other time.
    """
    opened = 0
    while True:
        request = os.read(device, 1 << 17)
        _, operation, unique, node = struct.unpack_from("=IIQQ", request)
        error, answer = 0, b""
        if operation == _INIT:
            answer = struct.pack("=4I2H2I4H6I", 7, 31, 0, 0, 8, 6, 4096, 1, *[0] * 10)
        elif operation == _LOOKUP:
            answer = struct.pack("=4Q2I", 2, 0, 3600, 3600, 0, 0) + _attributes(2)
        elif operation == _GETATTR:
            answer = struct.pack("=Q2I", 3600, 0, 0) + _attributes(node)
        elif operation == _OPEN:
            answer = struct.pack("=Q2I", opened, _KEEP_CACHE | (_DIRECT_IO if opened else 0), 0)
            opened += 1
        elif operation == _READ:
            os.write(reads, b".")
            continue
        elif operation == _FORGET:
            continue
        else:
            error = _NO_SYSTEM_CALL
        os.write(device, struct.pack("=IiQ", 16 + len(answer), error, unique) + answer)


def _lock(file: str, uid: int, name: bytes, reads: int) -> None:
    """Be a process of this user and name, whose memory is locked."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(15, name, 0, 0, 0)  # PR_SET_NAME
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    cached = os.open(file, os.O_RDONLY)
    if os.fork() == 0:
        libc.prctl(15, b"reader", 0, 0, 0)
        os.read(cached, 1)
    os.read(reads, 1)
    mmap.mmap(os.open(file, os.O_RDONLY), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)


def main() -> None:
    directory, uid, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fuse", directory.encode(), b"fuse", 0, data):
        sys.exit(os.strerror(ctypes.get_errno()))
    begun, reads = os.pipe()
    threading.Thread(target=_serve, args=(device, reads), daemon=True).start()
    with suppress(OSError):
        Path(directory).stat()
    if (locked := os.fork()) == 0:
        os.close(device)  # with its last descriptor, the file system and the locks end
        _lock(f"{directory}/file", uid, name.encode(), begun)
    while Path(f"/proc/{locked}/stat").read_text().rpartition(")")[2].split()[0] != "D":
        time.sleep(0.01)
    print(locked, flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()

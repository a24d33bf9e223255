"""What a child may do: nothing but what its user may, and for a bounded time.

The control tool meets sockets of other users. It runs as the daemon's user where this program may
change users, and without capabilities everywhere: whatever it is made to do, it does not do it with
the rights of the exporter.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from contextlib import suppress
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NO_GROUP = 65534
"""The group that belongs to nobody: a user's groups are not known here."""

CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE = 5, 6, 7, 19

_LIMITS = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, 10),
    (resource.RLIMIT_NOFILE, 64),
)

_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522

# Looked up now: between fork and exec no lock of the dynamic loader may be taken.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _capset = _libc.prctl, _libc.capset


def effective_capabilities() -> int:
    """Give this process's effective capabilities, a bit for each."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def may_change_user() -> bool:
    """Whether a child may be given another user, and be killed then."""
    needed = 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_KILL
    return os.geteuid() == 0 and effective_capabilities() & needed == needed


def give_up_rights(*kept: int) -> None:
    """Drop all capabilities but these, for good. Called in a child, between fork and exec.

    Whatever cannot be dropped (a filter of system calls forbids capset) is left: what an exec
    hands on is the ambient set, and that goes first.
    """
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    mask = sum(1 << one for one in kept)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    # (effective, permitted, inheritable), of the lower and the upper 32
    dropped = _capset(header, struct.pack("6I", low, low, low, high, high, high)) == 0
    for one in kept if dropped or kept else ():
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, one, 0, 0)
    # With it a program of root's gets no more than this at its start, either.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for limit, value in _LIMITS:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(limit)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (bound, bound))

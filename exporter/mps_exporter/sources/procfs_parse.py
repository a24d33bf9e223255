r"""What the files of /proc say: bytes in, facts out. Nothing here reads a file.

Names and arguments of processes are bytes that anybody may choose; what is no UTF-8 is kept as
``\xNN``. A file that does not look as it should gives None or an empty answer, never an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMM_LENGTH = 15
"""The kernel keeps so many bytes of a program's name."""

MPS_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"})
MPS_PREFIX = "CUDA_MPS_"
MAX_VARIABLES = 64
MAX_NAME_BYTES = 128
MAX_VALUE_BYTES = 4096
"""Of a longer value this much is kept: one byte more than the longest path."""


def text_of(raw: bytes) -> str:
    """Decode what ought to be UTF-8."""
    return raw.decode("utf-8", "backslashreplace")


class ProcessStat(NamedTuple):
    """/proc/PID/stat, as far as it is needed.

    457 (nvidia-cuda-mps) S 445 445 445 0 -1 4194560 …
    pid (comm) state ppid pgrp session … 22nd: start time in ticks since boot
    """

    comm: str
    state: str
    parent_pid: int
    start_ticks: int


def parse_stat(raw: bytes) -> ProcessStat | None:
    """Read it; comm may hold anything, also blanks, parentheses and line ends."""
    opening, closing = raw.find(b"("), raw.rfind(b")")
    fields = raw[closing + 1 :].split(None, 20) if 0 <= opening < closing else []
    if len(fields) < 20:
        return None
    try:
        return ProcessStat(
            comm=text_of(raw[opening + 1 : closing]),
            state=text_of(fields[0]),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
        )
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """/proc/PID/status, as far as it is needed."""

    uid: int | None = None
    """The effective one."""
    namespace_pids: tuple[int, ...] = ()
    parent_pid: int | None = None
    real_uid: int | None = None
    several_uids: bool = False
    """Real, effective and saved user differ: a set-user-ID program, whose arguments and environment
    are another's than the effective user's."""


def parse_status(raw: bytes) -> ProcessStatus:
    """Read the lines of numbers.

    These are "Uid: real effective saved filesystem", "NSpid: outermost … innermost" and "PPid:".
    """
    values: dict[bytes, list[int]] = {}
    for line in raw.split(b"\n"):
        key, colon, rest = line.partition(b":")
        if colon and key in (b"Uid", b"NSpid", b"PPid") and re.fullmatch(rb"[\d\s]*", rest):
            values.setdefault(key, [int(number) for number in rest.split()])
    uids = values.get(b"Uid", [])
    return ProcessStatus(
        uid=uids[1] if len(uids) > 1 else None,
        namespace_pids=tuple(values.get(b"NSpid", ())),
        parent_pid=next(iter(values.get(b"PPid", ())), None),
        real_uid=uids[0] if len(uids) > 1 else None,
        several_uids=len(set(uids[:3])) > 1,
    )


def parse_arguments(raw: bytes) -> tuple[str, ...]:
    """Read /proc/PID/cmdline; empty for kernel threads, zombies and those that erased theirs."""
    return tuple(text_of(part) for part in raw.split(b"\0")[:-1]) if raw else ()


def program_name(arguments: Sequence[str]) -> str:
    """Give the last part of the program's path."""
    return arguments[0].rstrip("/").rpartition("/")[2] if arguments else ""


def parse_mps_environment(raw: bytes) -> dict[str, str]:
    """Read the MPS variables of /proc/PID/environ, and nothing else of it.

    It is the environment that the program was started with; what it changed since does not show.
    Of a variable given twice the first counts, as it does for getenv().
    """
    found: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name.startswith(b"CUDA_") and len(name) <= MAX_NAME_BYTES:
            key = text_of(name)
            wanted = key.startswith(MPS_PREFIX) or key in MPS_VARIABLES
            if wanted and (key in found or len(found) < MAX_VARIABLES):
                found.setdefault(key, text_of(value[:MAX_VALUE_BYTES]))
    return found


def parse_boot_time(raw: bytes) -> float | None:
    """Read the line "btime" of /proc/stat: when the host started, Unix time."""
    found = re.search(rb"^btime (\d+)$", raw, re.MULTILINE)
    return float(found[1]) if found else None


def parse_hidepid(raw: bytes) -> bool:
    """Read from /proc/PID/mounts whether a procfs makes other users' processes invisible.

    It is so at a line like "proc /proc proc rw,nosuid,hidepid=invisible 0 0" (before Linux 5.8:
    hidepid=2), or hidepid=ptraceable (4).
    """
    options = re.findall(rb"^\S+ \S+ proc (\S+) ", raw, re.MULTILINE)
    return any(re.search(rb"\bhidepid=(?:2|4|invisible|ptraceable)\b", one) for one in options)


def parse_namespace(link: str) -> int | None:
    """Read the target of /proc/PID/ns/NAME, "pid:[4026531836]": its inode."""
    found = re.fullmatch(r"[a-z_]+:\[(\d+)\]", link)
    return int(found[1]) if found else None


def parse_control_sockets(raw: bytes) -> list[str]:
    """Read from /proc/net/unix the directories where a control daemon's socket may be bound.

        Num       RefCount Protocol Flags    Type St Inode Path
        ffff…:    00000002 00000000 00010000 0005 01 19357 /tmp/mps/control

    It listens (flag 00010000) for sequenced packets (type 0005) at a path that ends in "/control".
    """
    directories = []
    for line in raw.split(b"\n"):
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[3] == b"00010000" and fields[4] == b"0005":
            directory, slash, name = fields[7].rpartition(b"/")
            if slash and name == b"control" and directory.startswith(b"/"):
                directories.append(text_of(directory))
    return list(dict.fromkeys(directories))


def parse_passwd(raw: bytes) -> dict[int, str]:
    """Read /etc/passwd: user number -> name. Of a number given twice the first name counts."""
    names: dict[int, str] = {}
    for line in raw.split(b"\n"):
        fields = line.split(b":")
        if len(fields) >= 3 and re.fullmatch(rb"\d{1,10}", fields[2]) and fields[0]:
            names.setdefault(int(fields[2]), text_of(fields[0]))
    return names


@dataclass(frozen=True, slots=True)
class DaemonFlags:
    """The arguments of nvidia-cuda-mps-control."""

    daemon: bool = False
    """-d or -f: without one of them it is a run of the tool."""
    foreground: bool = False
    multiuser: bool = False
    static_partitioning: bool = False


_SHORT = re.compile(r"-[A-Za-z]+")


def parse_daemon_flags(arguments: tuple[str, ...]) -> DaemonFlags:
    """Read them; letters may share one dash, as in "-df".

    "forground" is the tool's own spelling up to driver 580.
    """
    words = {word.lstrip("-") for word in arguments[1:] if word.startswith("-")}
    long = {
        "multiuser-server",
        "multiuser",
        "static-partitioning",
        "daemon",
        "forground",
        "foreground",
    }
    letters = {
        letter
        for word in arguments[1:]
        if _SHORT.fullmatch(word) and word.lstrip("-") not in long
        for letter in word[1:]
    }
    foreground = "f" in letters or bool(words & {"forground", "foreground"})
    return DaemonFlags(
        daemon=foreground or "d" in letters or "daemon" in words,
        foreground=foreground,
        multiuser=bool(words & {"multiuser-server", "multiuser"} or letters & {"M", "m"}),
        static_partitioning="static-partitioning" in words or "S" in letters,
    )


# struct flock: type, whence, (padding) start, length, pid, (padding)
_FLOCK = struct.Struct("@hhqqi0q")


def pack_lock_query(write_lock: int) -> bytes:
    """Give the struct flock that asks F_GETLK who has a lock on any part of a file."""
    return _FLOCK.pack(write_lock, 0, 0, 0, 0)


def parse_lock_reply(raw: bytes, unlocked: int) -> int | None:
    """Read F_GETLK's answer: the holder, 0 when it cannot be named from here, None: nobody."""
    kind, _, _, _, pid = _FLOCK.unpack(raw)
    return None if kind == unlocked else max(pid, 0)

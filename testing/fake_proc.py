"""Builds a procfs of files: as much of it as the exporter reads."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

BOOT_TIME = 1_795_000_000
TICKS_PER_SECOND = 100
HOST_NAMESPACE = 4026531836
HOST_MOUNT = 22
INITIAL_USERS = "         0          0 4294967295\n"
ALL_CAPABILITIES = (1 << 41) - 1


class FakeProc:
    """A directory that looks like /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self" / "ns").mkdir(parents=True, exist_ok=True)
        (root / "stat").write_text(f"cpu  1 2 3 4\nbtime {BOOT_TIME}\nprocesses 9\n")
        self._tell_where(root / "1", HOST_MOUNT, INITIAL_USERS)  # hidden by some mounts
        if not (own := root / "self" / "ns" / "pid").is_symlink():
            own.symlink_to(f"pid:[{HOST_NAMESPACE}]")

    def add(
        self,
        pid: int,
        *,
        argv: Sequence[str | bytes] = (),
        comm: str | bytes | None = None,
        environ: Mapping[str, str] | None = None,
        uid: int | None = None,
        parent: int = 1,
        state: str = "S",
        started: float = 0.0,
        namespace_pids: Sequence[int] = (),
        pid_namespace: int | None = HOST_NAMESPACE,
        cgroup: str = "0::/\n",
        sees: Path = Path("/"),
        sockets: Sequence[str] = (),
        capabilities: int | None = None,
        real_uid: int | None = None,
        groups: Sequence[int] = (0,),
        mount: int = HOST_MOUNT,
        users: str = INITIAL_USERS,
        tracer: int = 0,
    ) -> Path:
        """Start a process, or replace it by another; return its directory.

        Args:
            uid: None: the user of the test.
            started: Seconds after BOOT_TIME.
            environ: None: not readable.
            sees: The root directory of its mount namespace.
            sockets: Listening sockets in its network namespace.
            real_uid: None: uid.
            groups: Its group, and its supplementary groups.
            capabilities: None: all of root, none of another user.
            mount: Number of its first mount.
            users: Its user namespace, as uid_map shows it.
            tracer: PID of its debugger.
        """
        uid = os.geteuid() if uid is None else uid
        real_uid = uid if real_uid is None else real_uid
        if capabilities is None:
            capabilities = ALL_CAPABILITIES if uid == 0 else 0
        arguments = [_bytes(argument) for argument in argv]
        name = arguments[0].rpartition(b"/")[2][:15] if arguments else b""
        name = name if comm is None else _bytes(comm)
        here = self.root / str(pid)
        self.remove(pid)
        (here / "ns").mkdir(parents=True)
        (here / "net").mkdir()
        (here / "root").symlink_to(sees)
        (here / "comm").write_bytes(name + b"\n")
        (here / "cmdline").write_bytes(b"".join(argument + b"\0" for argument in arguments))
        fields = [state, parent, pid, pid, *[0] * 15, round(started * TICKS_PER_SECOND)]
        tail = " ".join(str(field) for field in [*fields, *[0] * 30])
        (here / "stat").write_bytes(b"%d (%s) %s\n" % (pid, name, tail.encode()))
        inner = "\t".join(str(number) for number in (pid, *namespace_pids))
        (here / "status").write_text(
            f"Name:\tx\nUid:\t{real_uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{inner}\n"
            f"Gid:\t{groups[0]}\t{groups[0]}\t{groups[0]}\t{groups[0]}\n"
            f"Groups:\t{' '.join(map(str, groups[1:]))} \n"
            f"CapEff:\t{capabilities:016x}\nTracerPid:\t{tracer}\n"
        )
        self._tell_where(here, mount, users)
        (here / "cgroup").write_text(cgroup)
        if environ is not None:
            entries = "".join(f"{key}={value}\0" for key, value in environ.items())
            (here / "environ").write_bytes(entries.encode())
        if pid_namespace is not None:
            (here / "ns" / "pid").symlink_to(f"pid:[{pid_namespace}]")
        rows = [f"ffff: 00000002 00000000 00010000 0005 01 {n} {p}" for n, p in enumerate(sockets)]
        (here / "net" / "unix").write_text("\n".join(["Num RefCount Protocol", *rows, ""]))
        return here

    def _tell_where(self, base: Path, mount: int, users: str) -> None:
        base.mkdir(exist_ok=True)
        (base / "mountinfo").write_text(f"{mount} 1 0:21 / /proc rw - proc proc rw\n")
        (base / "uid_map").write_text(users)

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid), ignore_errors=True)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()

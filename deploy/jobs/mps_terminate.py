#!/usr/bin/env python3
"""``mps-terminate``: ends the CUDA work of chosen MPS clients through their control daemon.

A client that is killed while its kernels run leaves that work behind: about 0.2 s later the MPS
server meets a fatal fault, and every busy client on it dies (driver 580: 3 of 3 neighbours; with
this first: 0 of 3). Documentation: docs/slurm.md, "Ending jobs".

The exporter only reads, so this program is no part of it.
One file for the standard library of Python 3.9: a pod's preStop hook runs a copy of it.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAME = "mps-terminate"
PROC = Path("/proc")
SYS_ADMIN = 1 << 21  # CAP_SYS_ADMIN
INITIAL_PID_NAMESPACE = "4026531836"  # PROC_PID_INIT_INO, the same on every Linux
MAX_REPLY_BYTES = 1 << 20
NO_TOOL = 127  # exit status of a shell
MAX_TRIES = 6  # callers collide: nearly a third of calls with three others
PAUSE_SECONDS = 0.1
READ_SECONDS = 2.0
PROGRAM = b"nvidia-cuda-mps"  # the kernel keeps 15 characters of a name
FENCE = "get_default_active_thread_percentage"
"""A second command of a run, always answered with one decimal number. Without it, an empty reply
and a collision with another caller look the same."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # Slurm sets no PATH
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
COLUMNS, NO_SERVER = ["PID", "ID", "SERVER", "NAMESPACE"], ["Server", "not", "found"]
SERVERS_V3, CLIENTS_V3 = "server list --format=csv", "client list --all --format=csv"
V3_REFUSAL = re.compile(r"name, ?uid, ?pid, ?status|<module>|unknown module", re.IGNORECASE)
"""How a v3 daemon's tool refuses a command of the v2 interface (NVIDIA's manual, release 615)."""
EXIT_STATUS = """\
exit status:
  0  every client that was selected is terminated or gone, or there was none, or no daemon runs
  1  at least one selected client could not be terminated: killing it can end its neighbours
  2  wrong usage; nothing was done
  3  a daemon could not tell its clients (no answer in time, no tool): whether any of them was
     selected is not known"""


class NoDaemonError(Exception):
    """No daemon runs there."""


class RefusedError(Exception):
    """A daemon refused, or its reply is not understood; or the tool cannot be run."""


class SilentError(RefusedError):
    """No answer in time."""


class SpeaksV3Error(RefusedError):
    """The daemon takes commands of the v3 interface only."""


class Process(NamedTuple):
    """What /proc shows of a process."""

    name: bytes
    state: str
    parent: int
    started: int  # in ticks since boot
    owner: int  # its effective user
    real: int  # another user started a set-user-ID program


class ListedClient(NamedTuple):
    """A row of a daemon's list, as text. Other users choose the column behind these."""

    pid: str
    id: str
    server: str
    namespace: str  # inode of its PID namespace; "" of a v3 daemon, which does not tell it

    def is_known(self) -> bool:
        numbers = f"{self.pid} {self.server} {self.namespace}" if self.namespace else self.pid
        return re.fullmatch("[1-9][0-9]{0,9}( [0-9]{1,10})*", numbers) is not None


def visible(text: str) -> str:
    """Return text of others as one short line."""
    return re.sub(r"[^ -~]", " ", text)[:200]


# --------------------------------------------------------------------------------- processes


def look(pid: int | str) -> Process | None:
    """Return what /proc shows of a process; None if it is gone."""
    try:
        # The name before the last bracket can contain anything.
        start, _, end = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")
        name, words = start.partition(b"(")[2], end.split()
        status = (PROC / str(pid) / "status").read_bytes()
    except OSError:
        return None
    users = re.search(rb"\nUid:\s+(\d+)\s+(\d+)", status)
    if users is None or len(words) < 20:
        return None
    state, parent, started, real, owner = words[0].decode(), words[1], words[19], *users.groups()
    return Process(name, state, int(parent), int(started), int(owner), int(real))


def namespace_of(pid: int | str, kind: str = "pid") -> str:
    """Return the inode of a namespace; "" if it cannot be read."""
    try:
        link = (PROC / str(pid) / "ns" / kind).readlink()
        return link.name.partition("[")[2].rstrip("]")
    except OSError:
        return ""


def read(pid: int | str, name: str) -> bytes:
    """Return a file of a process; b"" if it cannot be read: some processes let a reader hang."""
    found: list[bytes] = []

    def work() -> None:
        with suppress(OSError):
            found.append((PROC / str(pid) / name).read_bytes())

    reader = threading.Thread(target=work, daemon=True)
    reader.start()
    reader.join(READ_SECONDS)
    return found[0] if found else b""


def is_hosts_root(pid: str) -> bool:
    """Return whether a process with UID 0 is no container's root, whose answers prove nothing.

    It has the user namespace of process 1, and CAP_SYS_ADMIN or its PID namespace and mounts.
    """
    status = read(pid, "status")
    rights = re.search(rb"\nCapEff:\s*([0-9a-f]+)\n", status)
    users, mounts = (
        [read(one, name).partition(first)[0] for one in (pid, "1")]
        for name, first in (("uid_map", b"\0"), ("mountinfo", b" "))
    )
    inside = mounts[0] == mounts[1] != b"" and re.search(rb"\nNSpid:\s*\d+\n", status) is not None
    administrates = rights is not None and bool(int(rights[1], 16) & SYS_ADMIN)
    return users[0] == users[1] != b"" and (administrates or inside)


def all_processes() -> list[str]:
    return [one.name for one in PROC.iterdir() if one.name.isdecimal()]


def now_in_ticks() -> int:
    seconds = float((PROC / "uptime").read_text("ascii").split()[0])
    return round(seconds * os.sysconf("SC_CLK_TCK"))


def is_descendant(pid: int, ancestor: int) -> bool:
    while pid != ancestor:
        process = look(pid) if pid > 1 else None
        if process is None:
            return False
        pid = process.parent
    return True


def is_in_group(pid: str, pattern: str) -> bool:
    """Return whether one of the control groups of a process matches, with a slash behind it."""
    lines = os.fsdecode(read(pid, "cgroup")).splitlines()
    return any(re.match(pattern, line.split(":", 2)[-1] + "/") for line in lines)


def stopped_with_cuda() -> bool:
    for pid in all_processes():
        process = look(pid)
        if process is not None and process.state in "Tt" and b"libcuda.so" in read(pid, "maps"):
            return True
    return False


# ----------------------------------------------------------------------------------- daemons


class Daemon:
    """A control daemon, asked through its tool."""

    def __init__(self, directory: str, options: argparse.Namespace, end: float) -> None:
        self.directory = directory
        self._options, self._end = options, end
        self._environment = {
            **os.environ,
            PIPE_VARIABLE: directory,
            "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}".lstrip(":"),
            "LC_ALL": "C",
        }

    def ask(self, *lines: str) -> str:
        """Return the reply to commands of the v2 interface."""
        return self._ask((), "".join(f"{line}\n" for line in lines))

    def ask_v3(self, command: str) -> str:
        return self._ask(command.split(), "")

    def _ask(self, arguments: Sequence[str], text: str) -> str:
        reply = ""
        for _ in range(MAX_TRIES):
            status, reply = self._run(arguments, text)
            if "Cannot find MPS control daemon" in reply:
                raise NoDaemonError("no daemon runs there")
            if text and V3_REFUSAL.search(reply):
                raise SpeaksV3Error(reply)
            if status == 0 and (reply or arguments):
                return reply
            time.sleep(PAUSE_SECONDS)
        raise RefusedError(reply or "an empty answer")

    def _run(self, arguments: Sequence[str], text: str) -> tuple[int, str]:
        left = self._end - time.monotonic()
        if left <= 0:
            raise SilentError("no time is left")
        size = (MAX_REPLY_BYTES, MAX_REPLY_BYTES)
        with os.fdopen(os.memfd_create("reply"), "r+b") as output:
            try:
                status = subprocess.run(
                    [self._options.control, *arguments],
                    env=self._environment,
                    input=text.encode(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=min(left, self._options.timeout),
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, size),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise SilentError("no answer in time") from None
            except OSError as error:
                status, reply = NO_TOOL, str(error)
            else:
                output.seek(0)
                reply = output.read().replace(b"\0", b"").decode("utf-8", "replace").strip()
        if status in (126, NO_TOOL) and not (Path(self.directory) / "control").is_socket():
            raise NoDaemonError("no daemon runs there")
        return status, reply

    def servers(self) -> list[str]:
        """Return the PIDs of the servers: all else a daemon passes to one, and may hang with it."""
        lines = self.ask("get_server_list", FENCE).split("\n")
        found = [line.strip() for line in lines if line.strip() and "." not in line]
        if len(found) == len([line for line in lines if line.strip()]) or not all(
            re.fullmatch("[0-9]{1,10}", one) for one in found
        ):
            raise RefusedError(f"the answer is not understood: {' '.join(lines)}")
        return found

    def clients(self) -> list[ListedClient]:
        reply = self.ask("ps", FENCE)
        lines = [words for words in map(str.split, reply.split("\n")) if words]
        table = [words for words in lines if len(words) > 1 or "." not in words[0]]
        fenced = len(table) < len(lines)
        header, *rows = [words for words in table if words != NO_SERVER] or [COLUMNS]
        if not fenced or not {*COLUMNS} <= {*header}:
            raise RefusedError(reply)
        found = [dict(zip(header, words)) for words in rows]  # noqa: B905
        return [ListedClient(*(one.get(name, "") for name in COLUMNS)) for one in found]

    def rows_v3(self, command: str, *wanted: str) -> list[tuple[str, ...]]:
        """Return these columns of a list of a v3 daemon, "" where a row is too short.

        They stand before the names that users choose, whose quotes must not hide further rows.
        """
        header, *lines = self.ask_v3(command).split("\n")
        names = [one.strip().lower() for one in header.split(",")]
        if not {*wanted} <= {*names}:
            raise RefusedError(header)
        rows = [dict(zip(names, map(str.strip, line.split(",")))) for line in lines]  # noqa: B905
        return [tuple(row.get(one, "") for one in wanted) for row in rows]


def can_be_asked(server: str) -> str:
    """Return "" if a server answers, else its state.

    A query to a stopped, dead or deaf server would block its daemon for every user.
    """
    for _ in range(10):
        process = look(server)
        if process is None or process.name != PROGRAM or process.state in "RS":
            return ""  # it answers, or cannot be seen from here
        if process.state != "D":  # mostly for a moment
            return process.state
        time.sleep(PAUSE_SECONDS)
    return "D"


def likely_directories(uid: int | None, until: float) -> Iterator[str]:
    """Yield pipe directories, root's first; read no process after this time.

    Daemons of other users and of containers' root are left out: they decide what is answered there,
    and when.
    """
    yield os.environ.get(PIPE_VARIABLE, "")
    users = {0, os.getuid(), uid}
    found = [
        (process.owner, pid)
        for pid in all_processes()
        if (process := look(pid)) is not None
        and process.name == PROGRAM
        and process.owner == process.real
        and process.owner in users
        and (process.owner or is_hosts_root(pid))
    ]
    for _, pid in sorted(found):
        if time.monotonic() > until:
            break
        if b"nvidia-cuda-mps-control" not in read(pid, "cmdline"):
            continue
        variables = os.fsdecode(read(pid, "environ")).split("\0")
        values = (one.partition("=") for one in variables)
        place = next((value for name, _, value in values if name == PIPE_VARIABLE), "").rstrip("/")
        mounts = namespace_of(pid, "mnt")
        if mounts and mounts != namespace_of("self", "mnt"):
            yield f"{PROC / pid / 'root'}{place or '/tmp/nvidia-mps'}"  # noqa: S108
        else:
            yield place
    for place in ("/tmp/nvidia-mps", "/run/nvidia-mps"):  # noqa: S108
        with suppress(OSError):
            control = Path(place) / "control"
            if control.is_socket() and {os.lstat(place).st_uid, control.lstat().st_uid} <= users:
                yield place


# ----------------------------------------------------------------------------------- clients


class Run:
    """One run of the program, and what became of the clients that were selected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + options.deadline
        self.failed = self.unknown = self.done = 0

    def say(self, text: str) -> None:
        if not self.options.quiet:
            complain(text)

    def run(self) -> int:
        """Terminate what is selected, and return the exit status."""
        half = self.end - self.options.deadline / 2
        found = self.options.pipe_directory or likely_directories(self.options.uid, half)
        directories = [one for one in dict.fromkeys(found) if one and "\n" not in one]
        for directory in directories:
            daemon = Daemon(directory, self.options, self.end)
            try:
                self.of_daemon(daemon)
            except NoDaemonError:
                self.say(f"no daemon runs at {visible(directory)}")
            except RefusedError as error:
                self.give_up(daemon, str(error))
        if not directories:
            self.say("no MPS control daemon was found")
        elif not (self.failed or self.unknown or self.done):
            self.say("no client is selected")
        return 1 if self.failed else 3 if self.unknown else 0

    def give_up(self, daemon: Daemon, why: str) -> None:
        self.unknown += 1
        complain(f"the clients of {visible(daemon.directory)} are not known: {visible(why)}")

    def of_daemon(self, daemon: Daemon) -> None:
        """Terminate the selected clients of a daemon. Raise if it does not list its clients."""
        own = self.options.own_pid_namespace
        found, listed_at = self.clients_of(daemon)
        hidden = [one for one in found if not one.is_known()]
        for client in found:
            if client in hidden or (own and client.namespace != namespace_of("self")):
                continue
            if not self.end_client(daemon, client, found, listed_at):
                break
        if hidden:
            text = "of them are in a PID namespace that the daemon cannot see"
            self.give_up(daemon, f"{len(hidden)} {text}; start it with the host's")

    def clients_of(self, daemon: Daemon) -> tuple[list[ListedClient], int]:
        """Return the clients of a daemon, and a moment before it listed them, in ticks."""
        own = self.options.own_pid_namespace
        try:
            servers, v3 = daemon.servers(), False
        except SpeaksV3Error:
            servers, v3 = [pid for (pid,) in daemon.rows_v3(SERVERS_V3, "pid") if pid != "-"], True
        for server in servers:
            if state := can_be_asked(server):
                text = f"server {server} does not run (state {state}); it was not asked"
                raise RefusedError(text)
        # A v3 daemon does not report the PID namespace of its PIDs: it is that of its servers.
        here = namespace_of("self")
        if v3 and (own or any(namespace_of(one) != here for one in servers)):
            raise RefusedError("a v3 daemon's PIDs cannot be compared with those seen from here")
        if own and servers and stopped_with_cuda():
            raise RefusedError("a stopped process here has CUDA in it; continue it first")
        listed_at = now_in_ticks()
        if v3 and servers:
            rows = daemon.rows_v3(CLIENTS_V3, "pid", "server")
            # A row for each GPU.
            return [ListedClient(pid, "", name, "") for pid, name in dict.fromkeys(rows)], listed_at
        return (daemon.clients() if servers else []), listed_at

    def selected(self, client: ListedClient, listed_at: int) -> Process | None:
        """Return the process of a client if it meets every condition, else None."""
        wanted, pid = self.options, client.pid
        job = rf".*/(([^/]*_)?slurmstepd\.scope|slurm|slurm/.*|slurm_.*)/job_{wanted.slurm_job}/"
        if (
            (wanted.pid is not None and int(pid) != wanted.pid)
            or (wanted.descendant_of and not is_descendant(int(pid), wanted.descendant_of))
            or (wanted.slurm_job is not None and not is_in_group(pid, job))
            or (wanted.cgroup and not is_in_group(pid, re.escape(wanted.cgroup) + "/"))
        ):
            return None
        process = look(pid)
        # A process that started later has the PID of a client that ended.
        if process is None or process.started > listed_at:
            return None
        return process if wanted.uid in (None, process.owner) else None

    def why_not(self, client: ListedClient, process: Process) -> str:
        """Return why a selected client must be left alone, or ""."""
        if client.namespace and not namespace_of(client.pid):
            return "its PID namespace cannot be read; run this as root or as its user"
        if process.state in "Tt":  # can block the daemon for every user
            return "its process is stopped; continue it first (kill -CONT)"
        return ""

    def end_client(
        self, daemon: Daemon, client: ListedClient, found: list[ListedClient], listed_at: int
    ) -> bool:
        """Terminate a client if it is selected. Return False to ask this daemon nothing more."""
        own = self.options.own_pid_namespace
        process, why = None, ""
        if own:
            # With a line break in its name, another user's program could make up rows.
            same = [one for one in found if one.pid == client.pid]
            if any(one._replace(id=client.id) != client for one in same):
                why = "the daemon lists its PID twice, differently"
        else:
            process = self.selected(client, listed_at)
            if process is None:
                return True
            why = self.why_not(client, process)
            # A daemon in another PID namespace means another process by the same number.
            if not why and client.namespace not in ("", namespace_of(client.pid)):
                return True
        where = f"client {client.pid} of server {client.server} at {daemon.directory}"
        if not why and self.options.dry_run:
            self.done += 1
            self.say(f"would terminate {visible(where)}")
            return True
        try:
            why = why or self.terminate(daemon, client, process, visible(where))
        except (NoDaemonError, RefusedError) as error:
            silent = isinstance(error, SilentError)
            why = visible(str(error)) + "; no other client of this daemon was tried" * silent
            self.leave(where, why)
            return not silent and not own
        if why:
            self.leave(where, why)
        return True

    def leave(self, where: str, why: str) -> None:
        self.failed += 1
        complain(f"{visible(where)} was not terminated: {why}")

    def terminate(
        self, daemon: Daemon, client: ListedClient, process: Process | None, where: str
    ) -> str:
        """Terminate a client; return why it was not, or ""."""
        # Check that this is the same client still. In a container its process cannot be seen, but
        # the server gives every client an ID of its own.
        if process is None:
            if client not in daemon.clients():
                return ""
        elif not is_same(client, process):
            return ""
        try:
            if client.namespace:
                answer = daemon.ask(f"terminate_client {client.server} {client.pid}")
            else:
                answer = daemon.ask_v3(f"client terminate {client.pid}") or "0"
        except NoDaemonError:
            answer = "201"
        except SilentError:
            raise
        except RefusedError as error:
            answer = str(error) or "1"
        if answer == "0":
            self.done += 1
            self.say(f"terminated {where}")
            return ""
        # CUDA_ERROR_INVALID_CONTEXT: it was terminated before, or has ended meanwhile.
        ended = answer == "201" or re.fullmatch("Server .* not found", answer)
        if not ended and (process is None or is_same(client, process)):
            return f"the daemon answered '{visible(answer)}'"
        self.say(f"{where} had ended")
        return ""


def is_same(client: ListedClient, process: Process) -> bool:
    now = look(client.pid)
    return now is not None and now.started == process.started


# ------------------------------------------------------------------------------ command line


def complain(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr)  # noqa: T201


def number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise argparse.ArgumentTypeError("must be a number")
    return int(text)


def above_zero(text: str) -> int:
    if number(text) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return int(text)


def group_path(text: str) -> str:
    if not re.fullmatch("/.+", text) or not text.strip("/"):
        raise argparse.ArgumentTypeError("must be a path below /")
    return text.rstrip("/")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        NAME,
        description="Terminates, through their control daemon, the MPS clients that meet every "
        "condition given. It sends no signal: kill the processes afterwards.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, kind, metavar, text in _CONDITIONS:
        made.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    made.add_argument(
        "--own-pid-namespace",
        action="store_true",
        help="it is in the PID namespace of this program: for a preStop hook, which runs in the "
        "container, where the daemon's PIDs cannot be looked up; stands alone",
    )
    made.add_argument(
        "--pipe-directory",
        action="append",
        metavar="DIR",
        help=f"a daemon's pipe directory; repeatable. Default: ${PIPE_VARIABLE}, those of daemons "
        "of root, the caller or --uid, and these users' default directories",
    )
    made.add_argument("--control", default="nvidia-cuda-mps-control", help="the control tool")
    for name, seconds, text in (("timeout", 3, "each answer"), ("deadline", 15, "everything")):
        help_text = f"seconds for {text} (default: {seconds})"
        made.add_argument(
            f"--{name}", type=above_zero, default=seconds, metavar="SECONDS", help=help_text
        )
    for name, text in (("dry-run", "only say what would be done"), ("quiet", "say only errors")):
        made.add_argument(f"--{name}", action="store_true", help=text)
    return made


_CONDITIONS = (
    ("slurm-job", number, "ID", "it is in the control group of this Slurm job"),
    ("cgroup", group_path, "PATH", "its control group is PATH, or below"),
    ("descendant-of", above_zero, "PID", "it is this process or a descendant of it"),
    ("pid", above_zero, "PID", "it is this process"),
    ("uid", number, "UID", "it runs as this user (a number)"),
)


def run_terminate(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    made = parser()
    options = made.parse_args(arguments)
    chosen = [getattr(options, name.replace("-", "_")) for name, *_ in _CONDITIONS]
    conditioned = chosen.count(None) < len(chosen)
    if not (conditioned or options.own_pid_namespace):
        made.error("nothing is selected")
    if any(not one or "\n" in one for one in options.pipe_directory or ()):
        made.error("--pipe-directory: must be a path on one line")
    if options.own_pid_namespace:
        if conditioned:
            made.error("--own-pid-namespace stands alone")
        if namespace_of("self") in ("", INITIAL_PID_NAMESPACE):
            made.error("--own-pid-namespace is for containers; here it would select the whole host")
    return Run(options).run()


if __name__ == "__main__":
    sys.exit(run_terminate())

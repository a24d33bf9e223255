import asyncio
import builtins
import errno
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import DaemonFacts
from mps_exporter.sources import daemon_discovery, daemon_programs_and_directories, resolve_in_root
from mps_exporter.sources import processes as processes_module
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.daemon_programs_and_directories import (
    DEFAULT_LOG_DIRECTORY,
    DaemonDirectories,
    Program,
    directory_status,
    lock_holder,
)
from mps_exporter.sources.processes import Processes
from testing.fake_host import held_lock
from testing.fake_proc import ALL_CAPABILITIES, BOOT_TIME, FakeProc
from testing.threads import allow_one_thread
from testing.waiting import PATIENCE_SECONDS

CONTROL = "/usr/bin/nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"


TENANT: dict[str, Any] = {
    "uid": 0,
    "capabilities": 0xA80425FB,
    "mount": 90,
    "namespace_pids": (7,),
    "pid_namespace": 4026532999,
}
"""Root of an unprivileged container, which has the pipe directory mounted."""


class Host(FakeProc):
    """A made-up /proc, and what discovery finds in it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.source = DaemonDiscovery(str(root))

    def found(
        self, configured: Sequence[tuple[str, str | None]] = (), *, search: bool = True
    ) -> tuple[DaemonFacts, ...]:
        return self.source.discover(configured, search=search)

    def pipes(self) -> list[str]:
        return [one.pipe_directory for one in self.found()]

    def daemon(self, pid: int, pipe: Path | str, *flags: str, **more: Any) -> None:
        self.add(pid, argv=[CONTROL, *(flags or ("-d",))], environ=environment(pipe), **more)

    def contained(
        self, pid: int, root: Path, pipe: str = "/mps/pipe", log: str = "/mps/log"
    ) -> None:
        """Start a daemon with a root of its own."""
        self.add(pid, argv=[CONTROL, "-f"], environ=environment(pipe, log), sees=root, started=pid)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    # The machine that runs the tests may have daemons of its own.
    defaults = (str(tmp_path / "tmp-mps"), str(tmp_path / "run-mps"))
    monkeypatch.setattr(policy, "DEFAULT_PIPE_DIRECTORIES", defaults)
    # On a busy machine a check may take longer than half a second.
    for name in ("DIRECTORY", "PROCESS", "USERS_PROCESS"):
        monkeypatch.setattr(policy, f"{name}_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    return Host(tmp_path / "proc")


def environment(pipe: Path | str, log: Path | str | None = None) -> dict[str, str]:
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    return variables if log is None else {**variables, "CUDA_MPS_LOG_DIRECTORY": str(log)}


# ------------------------------------------------------------------------------ daemons


def test_a_daemon_with_its_servers(host: Host, tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    flags = ["-f", "-S", "-p", "3"]
    host.add(413, argv=[CONTROL, *flags], environ=environment(pipe, log), started=20.5)
    host.add(468, argv=[SERVER, "-multiuser-server"], parent=413)
    host.add(469, comm="nvidia-cuda-mps", parent=413, state="Z")
    host.add(470, argv=[CONTROL, "-d"], parent=413, environ=environment(pipe))  # before its exec
    host.add(500, argv=[SERVER], parent=499)  # of another daemon
    (facts,) = host.found()
    assert (facts.pipe_directory, facts.log_directory, facts.root) == (str(pipe), str(log), "")
    assert facts.process is not None
    assert (facts.process.pid, facts.process.name) == (413, "nvidia-cuda-mps-control")
    assert facts.process.start_time_seconds == BOOT_TIME + 20.5
    assert [(server.pid, server.state) for server in facts.servers] == [(468, "S"), (469, "Z")]
    assert (facts.foreground, facts.static_partitioning, facts.protocol) == (True, True, "3")
    assert facts.multiuser
    assumed = facts.directories_assumed, facts.log_directory_assumed
    assert not any((*assumed, facts.configured, facts.limited))
    assert (facts.pipe_path, facts.log_path) == (str(pipe), str(log))


def test_the_tool_is_not_a_daemon(host: Host) -> None:
    host.add(5, argv=[CONTROL], environ=environment("/pipe"))
    host.add(6, argv=["sh", "-c", f"{CONTROL} -d"])
    host.add(7, argv=["/opt/nvidia-cuda-mps-controller", "-d"])
    host.add(8, comm="nvidia-cuda-mps", state="Z")
    assert host.found() == ()


def test_a_process_without_flags_is_a_daemon_while_it_holds_the_lock(
    host: Host, tmp_path: Path
) -> None:
    with held_lock(tmp_path / "pipe") as pid:
        host.add(pid, argv=[CONTROL], environ=environment(tmp_path / "pipe"))
        (facts,) = first = host.found()
        assert facts.process is not None
        assert facts.lock_holder_pid == facts.process.pid == pid
        assert host.found() == first
    assert host.found() == ()


@pytest.mark.parametrize("state", ["R", "Z"])
@pytest.mark.parametrize("named", [True, False])
def test_an_ending_daemon_is_in_no_other_directory(
    host: Host, tmp_path: Path, state: str, named: bool
) -> None:
    """It releases its lock some time before it is a zombie, and its parent may never reap it."""
    pipe = tmp_path / "tmp-mps"
    variables = environment(pipe) if named else {}
    with held_lock(pipe) as pid:
        host.add(pid, argv=[CONTROL, "-d"], environ=variables)
        assert host.pipes() == [str(pipe)]
    host.add(pid, argv=[CONTROL, "-d"], environ=variables, state=state)
    assert host.found() == ()


def test_a_daemon_in_a_container_that_ends_is_in_no_other_directory(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel removes its root directory before it is a zombie."""
    locate = DaemonDirectories.locate
    with held_lock(tmp_path / "container" / "boxed") as pid:
        host.daemon(pid, "/boxed", sees=tmp_path / "container")
        assert host.found()[0].root == f"{host.root}/{pid}/root"

    def locate_at_the_end(*arguments: Any) -> object:
        (host.root / str(pid) / "root").unlink()
        return locate(*arguments)

    monkeypatch.setattr(DaemonDirectories, "locate", locate_at_the_end)
    assert host.found() == ()


def test_the_lock_decides_between_two_processes_and_two_directories(
    host: Host, tmp_path: Path
) -> None:
    """A second daemon finds the lock taken and ends."""
    (tmp_path / "tmp-mps").mkdir()
    with held_lock(tmp_path / "run-mps") as default, held_lock(tmp_path / "pipe") as named:
        host.add(default, argv=[CONTROL, "-d"], environ={})
        host.add(4_000_001, argv=[CONTROL, "-d"], environ=environment(tmp_path / "run-mps"))
        host.daemon(2, tmp_path / "pipe")
        host.daemon(named, tmp_path / "pipe")
        host.daemon(4_000_000, tmp_path / "pipe")
        found = host.found()
    assert {one.pipe_directory: one.process and one.process.pid for one in found} == {
        str(tmp_path / "run-mps"): default,
        str(tmp_path / "pipe"): named,
    }


def test_configured_directories_are_checked_first_if_threads_run_out(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.daemon(500, "/one")
    (tmp_path / "two").mkdir()
    host.found()  # its process has been read
    allow_one_thread(monkeypatch)
    found = {one.pipe_directory: one for one in host.found([(str(tmp_path / "two"), None)])}
    assert found[str(tmp_path / "two")].owner_uid == os.getuid()


def test_of_a_crowd_some_daemons_are_shown_and_roots_always(host: Host) -> None:
    """The crowd of a user, and that of a container's root."""
    user, most = os.getuid() + 2001, policy.MAX_DAEMONS_PER_USER
    for number in range(20):
        host.daemon(100 + number, f"/user/{number}", uid=user)
        host.daemon(200 + number, f"/container/{number}", **TENANT)
    host.daemon(300, "/other", **{**TENANT, "pid_namespace": 4026533000})
    host.daemon(500, "/root")
    host.daemon(501, "/" + "x" * policy.MAX_PIPE_DIRECTORY_BYTES)  # longer than any socket's
    for _ in range(2):
        found = {one.pipe_directory: one.limited for one in host.found()}
        assert [pipe for pipe, limited in found.items() if not limited] == ["/root"]
        assert Counter(pipe.split("/")[1] for pipe in found) == {
            "user": most,
            "container": most,
            "other": 1,
            "root": 1,
        }
        assert host.source.observe([]).ignored_programs[user] == 20 - most


def test_what_is_left_out_is_not_read_again_until_its_pid_is_of_another(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_PROCESSES_PER_USER", 1)
    for pid in (100, 101):
        host.daemon(pid, f"/{pid}", uid=os.getuid() + 2001)
    host.add(102, argv=["/bin/sh"])
    assert host.pipes() == ["/100"]
    (host.root / "101" / "comm").unlink()  # it would be gone
    host.daemon(102, "/root")  # an exec
    assert host.pipes() == ["/100", "/root"]
    assert host.source.observe([]).ignored_programs == {os.getuid() + 2001: 1}
    (host.root / "101").rename(host.root / "old")
    host.add(101, argv=["/bin/sh"], uid=os.getuid() + 2001)  # has another inode
    assert host.pipes() == ["/100", "/root"]
    assert host.source.observe([]).ignored_programs == {}
    host.add(100, argv=["/bin/sh"])  # an exec of a process that is read
    assert host.pipes() == ["/root"]


def test_directories_of_ordinary_users_are_checked_rarely_and_new_ones_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.daemon(100, "/user", uid=os.getuid() + 2001)
    host.daemon(200, "/root")
    checked, locate = list[int](), DaemonDirectories.locate

    def located(self: DaemonDirectories, program: Program, *more: Any) -> Any:
        checked.append(program.pid)
        return locate(self, program, *more)

    monkeypatch.setattr(DaemonDirectories, "locate", located)
    host.found()
    host.daemon(101, "/new", uid=os.getuid() + 2001)
    host.found()
    monkeypatch.setattr(host.source, "_recheck_at", 0.0)
    host.found()
    assert Counter(checked) == {200: 3, 100: 2, 101: 2}


def test_a_slow_user_takes_no_check_from_another_user(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = [101, 102], 103
    for pid in slow:
        host.daemon(pid, f"/{pid}", uid=os.getuid() + 2001)
    host.daemon(other, "/other", uid=os.getuid() + 2002)
    checked, locate, gate = list[int](), DaemonDirectories.locate, threading.Event()
    gate.set()

    def located(self: DaemonDirectories, program: Program, *more: Any) -> Any:
        checked.append(program.pid)
        if program.pid in slow:
            gate.wait(PATIENCE_SECONDS)
        return locate(self, program, *more)

    monkeypatch.setattr(DaemonDirectories, "locate", located)
    monkeypatch.setattr(policy, "MAX_USERS_CALLS", len(slow))
    while len(host.found()) < 3:
        pass
    gate.clear()
    checked.clear()
    monkeypatch.setattr(host.source, "_recheck_at", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "DIRECTORY_TIMEOUT_SECONDS", 0.0)
        host.found()
    host.found()
    gate.set()
    assert other in checked


def test_a_new_daemon_that_does_not_hold_its_lock_is_checked_again_soon(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.daemon(100, "/user", uid=os.getuid() + 2001)
    checked = list[int]()

    def nowhere(_: DaemonDirectories, program: Program, *__: Any) -> str:
        checked.append(program.pid)
        return "none"

    monkeypatch.setattr(DaemonDirectories, "locate", nowhere)
    host.found()
    for now, checks in ((0.0, 2), (1e12, 2)):  # its process is new, and old
        monkeypatch.setattr(host.source, "_now", lambda now=now: now)
        monkeypatch.setattr(host.source, "_recheck_new_at", 0.0)
        host.found()
        host.found()
        assert len(checked) == checks


# ------------------------------------------------------------------------------ configured


def test_configured_directories_are_shown_when_nothing_runs(host: Host, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    for search in (True, False):
        (facts,) = host.found([(pipe, None), (pipe, "/twice")], search=search)
        owners = tuple(sorted({0, os.geteuid()}))
        assert facts == DaemonFacts(pipe, DEFAULT_LOG_DIRECTORY, configured=True, log_owners=owners)


def test_a_configured_daemon_that_runs(host: Host, tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    (tmp_path / "link").symlink_to(pipe)
    host.add(5, argv=[CONTROL, "-dM"], environ=environment(pipe, log))
    host.daemon(6, "/other")
    for configured, expected in ((None, str(log)), ("/given", "/given")):
        (facts,) = host.found([(str(tmp_path / "link"), configured)], search=False)
        assert (facts.configured, facts.multiuser, facts.foreground) == (True, True, False)
        assert facts.pipe_directory == str(tmp_path / "link")
        assert facts.log_directory == expected
        assert facts.process is not None
        assert facts.process.pid == 5


@pytest.mark.parametrize("search", [True, False])
def test_a_daemon_that_does_not_run_has_no_log_of_another(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: bool
) -> None:
    default = tmp_path / "log"
    for module in (daemon_programs_and_directories, daemon_discovery):
        monkeypatch.setattr(module, "DEFAULT_LOG_DIRECTORY", str(default))
    named = [(str(tmp_path / "mine"), None), (str(tmp_path / "named"), str(default))]

    def logs() -> dict[str, str]:
        daemons = host.found(named, search=search)
        return {Path(one.pipe_directory).name: one.log_directory for one in daemons}

    for name in ("log", "mine", "other"):
        (tmp_path / name).mkdir()
    host.daemon(412, tmp_path / "other", uid=os.getuid() + 2001)  # its word proves nothing
    alone = {"mine": str(default), "named": str(default)}
    assert logs().items() >= alone.items()
    host.daemon(413, tmp_path / "other")
    host.remove(412)
    assert logs() == alone | {"mine": ""} | ({"other": str(default)} if search else {})
    host.remove(413)
    assert logs() == alone | {"mine": ""}  # the lines in it are still the other's
    host.daemon(414, tmp_path / "mine")
    assert logs() == alone
    host.remove(414)
    assert logs() == alone


@pytest.mark.parametrize("configured", [False, True])
def test_a_daemon_whose_directory_cannot_be_checked_now_still_runs(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    names = [(str(tmp_path / "pipe"), None)] if configured else []
    with held_lock(tmp_path / "pipe") as pid:
        host.daemon(pid, tmp_path / "pipe")
        (before,) = host.found(names)
        monkeypatch.setattr(daemon_programs_and_directories, "opened_directory", fails)
        (facts,) = host.found(names)
        assert (facts.process, facts.pipe_directory) == (before.process, before.pipe_directory)
        assert "(too many open files)" in (host.source.observe([]).error or "")


# ------------------------------------------------------------------------------ mount namespaces


def test_a_daemon_with_its_own_root(host: Host, tmp_path: Path) -> None:
    root = tmp_path / "container"
    for name in ("pipe", "log"):
        (root / "mps" / name).mkdir(parents=True)
    host.contained(5, root)
    (facts,) = host.found()
    assert (facts.pipe_directory, facts.root) == ("/mps/pipe", f"{host.root}/5/root")
    assert Path(facts.pipe_path).samefile(root / "mps" / "pipe")
    assert Path(facts.log_path).samefile(root / "mps" / "log")
    # A directory that is mounted from the host has the name that was configured.
    pipe = str(root / "mps" / "pipe")
    (facts,) = host.found([(pipe, None)])
    assert (facts.pipe_directory, facts.root) == (pipe, "")
    assert facts.process is not None
    assert Path(facts.log_path).samefile(root / "mps" / "log")


def test_links_in_a_container_lead_to_directories_in_it(host: Host, tmp_path: Path) -> None:
    """The host has a directory of the name that the container's link has."""
    outside, root = tmp_path / "run", tmp_path / "container"
    inside = root / str(outside).lstrip("/")
    for folder in (outside / "mps", outside / "log", inside / "mps", inside / "log", root / "var"):
        folder.mkdir(parents=True)
    (root / "var" / "run").symlink_to(outside)  # /var/run -> /run
    (root / "var" / "log").symlink_to(f"../../../../../../../../../../../../..{outside}/log")
    host.contained(5, root, "/var/run/mps", "/var/log")
    (facts,) = host.found()
    assert (facts.pipe_directory, facts.root) == (f"{outside}/mps", f"{host.root}/5/root")
    assert Path(facts.pipe_path).samefile(inside / "mps")
    assert Path(facts.log_path).samefile(inside / "log")
    (root / "loop").symlink_to("/loop")
    host.remove(5)
    host.contained(6, root, "/loop")
    (facts,) = host.found()
    assert (facts.pipe_directory, facts.root) == ("/loop", "")


def test_without_openat2_only_directories_of_the_host_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_in_root, "_OPENAT2", 100_000)  # ENOSYS
    assert directory_status(f"/proc/self/root{tmp_path}", "/proc") is not None  # as text
    assert directory_status(f"/proc/{os.getpid()}/root{tmp_path}", "/proc") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("masked_directories", lambda: ("/elsewhere", f"{Path(__file__).parent}")),
        ("_owner_of_namespace", lambda _: 1001),
    ],
)
def test_masks_and_mounts_of_ordinary_users_close_the_root_of_a_process(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Callable[..., object]
) -> None:
    here, process = str(Path(__file__).parent), f"/proc/{os.getpid()}/root"
    assert directory_status(process + here, "/proc") is not None
    monkeypatch.setattr(resolve_in_root, name, value)
    assert directory_status(process + here, "/proc") is None
    assert directory_status(here, "/proc") is not None


def test_the_same_name_in_two_containers_is_distinguished_for_good(
    host: Host, tmp_path: Path
) -> None:
    for pid in (5, 6):
        (tmp_path / f"container{pid}" / "mps").mkdir(parents=True)
        host.contained(pid, tmp_path / f"container{pid}", "/mps", "/log")
    first, second = host.found()
    assert (first.pipe_directory, first.root) == ("/mps", f"{host.root}/5/root")
    assert (second.pipe_directory, second.root) == (f"{host.root}/6/root/mps", "")
    assert second.log_directory == f"{host.root}/6/root/log"
    host.remove(5)
    assert host.pipes() == [f"{host.root}/6/root/mps"]
    host.contained(7, tmp_path / "container5", "/mps", "/log")
    assert host.pipes() == ["/mps", f"{host.root}/6/root/mps"]


# ------------------------------------------------------------------------------ without rights


@contextmanager
def bound(directory: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "control"))
        yield


@pytest.mark.parametrize(
    ("others", "name"),
    [
        pytest.param(1, "{0}/control", id="one"),
        pytest.param(300, "{0}/control", id="many directories"),
        pytest.param(300, "other/control", id="many names of the daemon's user's"),
        pytest.param(30_000, "{0:0150}", id="a list of 5 MB"),
    ],
)
def test_sockets_and_the_lock_replace_an_unreadable_environment(
    host: Host, tmp_path: Path, others: int, name: str
) -> None:
    """The sockets of other users do not hide the daemon's own."""
    pipe, other = tmp_path / "somewhere", tmp_path / "other"
    other.mkdir()
    with held_lock(pipe) as pid, bound(pipe), bound(other):
        sockets = [f"{tmp_path}/{'./' * (n % 300)}{name.format(n)}" for n in range(others)]
        host.add(pid, argv=[CONTROL, "-d"], sockets=[*sockets, str(pipe / "control")])
        (facts,) = host.found()
        assert facts.lock_holder_pid == pid
        assert (facts.pipe_directory, facts.log_directory) == (str(pipe), "")
        assert (facts.directories_assumed, facts.log_directory_assumed) == (False, True)
        (host.root / str(pid) / "net" / "unix").unlink()  # they are not searched again
        assert host.found() == (facts,)
        (facts,) = host.found([(str(pipe), "/the/log")])
        assert facts.process is not None
        assert (facts.log_directory, facts.log_directory_assumed) == ("/the/log", False)


@pytest.mark.parametrize("age", [0, 3600])
def test_the_default_log_belongs_to_the_daemon_whose_pid_it_contains(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int
) -> None:
    """The environment is unreadable; a log from before the daemon is of another process."""
    monkeypatch.setattr(daemon_programs_and_directories, "DEFAULT_LOG_DIRECTORY", str(tmp_path))
    one, two, log = tmp_path / "one", tmp_path / "two", tmp_path / "control.log"
    with held_lock(one) as first, held_lock(two) as second:
        # The first daemon mentions the second; the lines are the first daemon's.
        stamp = f"[2026-11-21 08:55:22.019 Control {first:5d}]"
        log.write_text(f"{stamp} NEW CLIENT Control {second}] from user 0\n")
        os.utime(log, (BOOT_TIME, BOOT_TIME + 4000 - age))
        for pid, pipe in ((first, one), (second, two)):
            host.add(pid, argv=[CONTROL, "-d"], sockets=[str(pipe / "control")], started=3000)
        for _ in range(2):
            found = {facts.pipe_directory: facts.log_directory for facts in host.found()}
            assert found == {str(one): "" if age else str(tmp_path), str(two): ""}
            log.write_text("")  # later its lines are no longer at the end


def test_without_evidence_the_default_is_assumed_unless_its_lock_is_free(
    host: Host, tmp_path: Path
) -> None:
    (tmp_path / "tmp-mps").mkdir()
    host.add(5, argv=[CONTROL, "-d"])
    (facts,) = host.found()
    assert facts.pipe_directory == str(tmp_path / "tmp-mps")
    assert facts.directories_assumed
    assert facts.log_directory_assumed
    (tmp_path / "tmp-mps" / "control_lock").touch()
    assert host.found() == ()
    assert "PID 5" in (host.source.observe(()).error or "")


# ------------------------------------------------------------------------------ containers' root

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the directory must be root's")


@needs_root
@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("program", [[CONTROL, "-d"], ["/bin/tenant"]])
def test_root_of_a_container_does_not_take_the_place_of_roots_daemon(
    host: Host, tmp_path: Path, configured: bool, program: list[str]
) -> None:
    """Its process has a daemon's name, or merely holds the lock."""
    pipe = tmp_path / "pipe"
    places = [(str(pipe), None)] if configured else []
    with held_lock(pipe) as pid:
        host.daemon(pid, pipe)
        assert not host.found(places)[0].limited
        host.remove(pid)
    with held_lock(pipe) as pid:
        host.add(pid, argv=program, environ=environment(pipe, pipe), **TENANT)
        found = host.found(places)
        if configured:
            assert [(one.process, one.lock_holder_pid) for one in found] == [(None, None)]
        else:
            assert [one.limited for one in found] == [True] * (program[0] == CONTROL)


@pytest.mark.parametrize(
    ("process", "taken"),
    [
        pytest.param({}, True, id="root"),
        pytest.param({**TENANT, "capabilities": ALL_CAPABILITIES}, True, id="privileged container"),
        pytest.param(TENANT, False, id="container"),
    ],
)
@needs_root
def test_the_logs_of_a_configured_daemon_are_not_named_by_a_tenant(
    host: Host, tmp_path: Path, process: dict[str, Any], taken: bool
) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    with held_lock(pipe) as pid:
        host.add(pid, argv=[CONTROL, "-d"], environ=environment(pipe, log), **process)
        (facts,) = host.found([(str(pipe), None)])
        assert facts.process is not None
        assert facts.log_directory == (str(log) if taken else "")
        (facts,) = host.found([(str(pipe), "/configured")])
        assert facts.log_directory == "/configured"


@needs_root
def test_root_of_a_container_is_no_owner_of_a_users_directory(host: Host, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    with held_lock(pipe) as pid:
        os.chown(pipe, 2001, 2001)
        for process, holder in ((TENANT, None), ({"uid": 2001}, pid), ({}, pid)):
            host.add(pid, argv=[CONTROL, "-d"], environ=environment(pipe), **process)
            (facts,) = host.found([(str(pipe), None)])
            assert facts.lock_holder_pid == holder


# ------------------------------------------------------------------------------ locks


def test_the_lock_names_its_holder_and_nothing_is_written(tmp_path: Path) -> None:
    lock = tmp_path / "control_lock"
    with held_lock(tmp_path) as pid:
        before = lock.stat()
        assert lock_holder(str(lock)) == (True, pid)
        assert lock.stat() == before
    assert lock_holder(str(lock)) == (True, None)


def test_a_lock_of_an_open_file_description_is_no_daemons(tmp_path: Path) -> None:
    """The daemon takes a lock of its process; any user may take the other kind when it is free."""
    lock = tmp_path / "control_lock"
    with lock.open("w") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhlli", fcntl.F_WRLCK, 0, 0, 0, 0))
        assert lock_holder(str(lock)) == (True, None)


def test_only_regular_files_are_tested(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "link", "directory", "missing", "nul\0byte"):
        assert lock_holder(f"{tmp_path}/{name}") == (False, None)
    assert not (tmp_path / "missing").exists()


# ------------------------------------------------------------------------------ processes


def test_a_child_of_a_users_daemon_is_read_each_minute_and_when_its_parent_ends(host: Host) -> None:
    def pipes() -> list[str]:
        return [one.pipe_directory for one in source.discover((), search=True)]

    now = 0.0
    user: dict[str, Any] = {"argv": [CONTROL, "-d"], "uid": 4_000_000_001}
    source = DaemonDiscovery(str(host.root), clock=lambda: now)
    host.add(500, environ=environment("/absent/1"), **user)
    host.add(501, environ=environment("/absent/2"), parent=500, **user)
    assert pipes() == ["/absent/1"]
    unreadable = host.root / "501" / "stat"
    unreadable.unlink()
    unreadable.mkdir()
    assert pipes() == ["/absent/1"]
    now = policy.PROCESS_REFRESH_INTERVAL_SECONDS
    with pytest.raises(IsADirectoryError):
        pipes()
    unreadable.rmdir()
    host.add(501, environ=environment("/absent/2"), parent=500, **user)
    assert pipes() == ["/absent/1"]
    host.add(500, state="Z", environ=environment("/absent/1"), **user)
    host.add(501, environ=environment("/absent/2"), parent=1, **user)
    assert pipes() == ["/absent/2"]


def test_a_file_that_cannot_be_read_is_absent(host: Host) -> None:
    host.add(5, argv=["a"], pid_namespace=None)
    host.add(6, argv=["b"], environ={}, state="Z")
    (host.add(7, argv=["c"]) / "stat").unlink()  # hidden, or ended during the read
    for name in ("status", "cgroup"):
        (host.root / "5" / name).unlink()
    seen = DaemonDiscovery(str(host.root), now=lambda: 99.0).observe([5, 6, 7, 8, 0, -1])
    assert sorted(seen.processes) == [5, 6]
    assert seen.gone == (-1, 0, 7, 8)
    assert seen.at == 99.0
    five, six = seen.processes[5], seen.processes[6]
    assert (five.uid, five.cgroup, five.pid_namespace, five.mps_environment) == (None,) * 4
    assert six.mps_environment is None


def test_facts_are_read_again_after_a_minute_or_an_exec(host: Host) -> None:
    now = 0.0
    source = DaemonDiscovery(str(host.root), clock=lambda: now)
    host.add(5, argv=["a"], cgroup="0::/before\n")
    source.observe([5])
    host.add(5, argv=["a"], cgroup="0::/after\n", state="T", parent=9)
    now = policy.PROCESS_REFRESH_INTERVAL_SECONDS - 1.0
    facts = source.observe([5]).processes[5]
    assert (facts.cgroup, facts.state, facts.parent_pid) == ("0::/before\n", "T", 9)
    now += 1.0
    with no_reading(errno.EMFILE, "environ"):
        assert source.observe([5]).processes[5] == facts  # kept while they cannot be read
    assert source.observe([5]).processes[5].cgroup == "0::/after\n"
    host.add(5, argv=["another program"])
    assert source.observe([5]).processes[5].name == "another program"


def test_a_process_that_ended_keeps_its_facts(host: Host) -> None:
    host.add(5, argv=["a"], environ={"CUDA_MPS_X": "1"})
    host.source.observe([5])
    host.add(5, comm="a", environ={}, state="Z")
    facts = host.source.observe([5]).processes[5]
    assert facts.state == "Z"
    assert facts.mps_environment == {"CUDA_MPS_X": "1"}
    host.remove(5)
    host.found()
    assert not host.source._processes._known, "memory of ended processes would never be freed"


def test_after_the_clock_was_set_earlier_processes_have_the_earlier_time(host: Host) -> None:
    """A process that started before has log lines by that clock; small changes are ignored."""
    uptime, step = 2000.0, 0
    wall = lambda: BOOT_TIME + uptime + step  # noqa: E731
    source = DaemonDiscovery(str(host.root), now=wall, clock=lambda: uptime)

    def distance(pid: int, started: float, name: str = "a") -> float:
        host.add(pid, argv=[name], started=started)
        found = source.observe([pid]).processes[pid]
        return found.start_time_seconds - BOOT_TIME - started

    assert distance(5, 1000) == 0
    for step, before, after in ((1, 0, 0), (60, 0, 60), (-5, -5, -5)):
        (host.root / "stat").write_text(f"btime {BOOT_TIME + step}\n")
        assert distance(4, 1500 + step) == before
        uptime += 10
        assert distance(6, uptime - 5) == after
    assert distance(5, 1000, "another program") == 0


@contextmanager
def no_reading(code: int, *names: str) -> Iterator[None]:
    """Make files of these names fail to open."""

    def failing(real: Any, path: str, *more: Any, **options: Any) -> Any:
        if Path(path).name in names:
            raise OSError(code, os.strerror(code))
        return real(path, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", partial(failing, os.open))
        patch.setattr(builtins, "open", partial(failing, open))
        yield


@pytest.mark.parametrize(
    ("code", "why"), [(errno.EMFILE, "too many open files"), (errno.EIO, "input/output error")]
)
def test_a_process_that_cannot_be_read_is_not_gone(host: Host, code: int, why: str) -> None:
    for pid in (5, 6):
        host.add(pid, argv=["a"], started=1)
    before = host.source.observe([5]).processes[5]
    with no_reading(code, "stat"):
        seen = host.source.observe([5, 6])
    assert (seen.processes, seen.gone) == ({}, ())
    assert seen.error == f"2 processes cannot be read in /proc: {why}"
    after = host.source.observe([5, 6, 7])
    assert (after.processes[5], after.gone, after.error) == (before, (7,), None)


def test_a_hidden_process_is_neither_gone_nor_an_error(host: Host) -> None:
    """The mount option hidepid=1 forbids reads; hidepid=2 hides process 1, too."""
    host.add(5, argv=["a"])
    with no_reading(errno.EPERM, "stat", "comm"):
        seen = host.source.observe([5])
        assert host.found() == ()
    assert (seen.processes, seen.gone, seen.error) == ({}, (), None)
    assert host.source.observe([6]).gone == (6,)
    processes = Processes(str(host.root))
    assert not processes.hidden
    with no_reading(errno.EPERM, "uid_map"):
        assert "hidepid" in processes.hidden
    host.remove(1)
    assert "hidepid" in processes.hidden
    seen = host.source.observe([6])
    assert (seen.processes, seen.gone, seen.error) == ({}, (), None)


def test_the_exit_of_a_hidden_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    monkeypatch.setattr(processes_module, "_read_line", lambda *_: None)
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    never = 1 << 31  # A hostile daemon may name any PID.
    known = Processes().start_ticks([1, os.getpid(), ended.pid, never])
    assert known == {ended.pid: None, never: None}


@pytest.mark.parametrize("name", ["comm", "stat", "environ", "cmdline"])
def test_daemons_that_cannot_be_read_are_not_gone(host: Host, name: str) -> None:
    host.daemon(413, "/pipe")
    with no_reading(errno.EMFILE, name), pytest.raises(OSError, match="Too many open files"):
        host.found()


def test_a_missing_procfs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DaemonDiscovery(str(tmp_path / "nowhere")).discover((), search=True)
    with pytest.raises(FileNotFoundError, match="no process is listed"):
        DaemonDiscovery(str(tmp_path)).discover((), search=True)


# ------------------------------------------------------------------------------ locked memory


def lock_memory(directory: Path) -> None:
    """Make the files of a process that show its memory hang, as its user can."""
    for name in ("cmdline", "environ"):
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)


async def discovered(source: DaemonDiscovery, *configured: tuple[str, str | None]) -> list[str]:
    found = asyncio.to_thread(source.discover, configured, search=True)
    return [one.pipe_directory for one in await asyncio.wait_for(found, PATIENCE_SECONDS)]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("configured", [False, True])
async def test_a_process_that_hangs_hides_no_daemon(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, configured: bool
) -> None:
    """It has a daemon's name, and is known from before, or not; then others of hers hang."""
    monkeypatch.setattr(policy, "USERS_PROCESS_TIMEOUT_SECONDS", 0.01)
    alice, pipe = os.getuid() + 2001, tmp_path / "pipe"
    places = [(str(pipe), None)] if configured else []
    with held_lock(pipe) as pid:
        host.daemon(pid, pipe)
        if known:
            assert await discovered(host.source, *places) == [str(pipe)]
        for number in range(3, 3 + 2 * policy.MAX_HUNG_CALLS_PER_USER):
            lock_memory(host.add(number, argv=[CONTROL, "-d"], uid=alice))
            assert await discovered(host.source, *places) == [str(pipe)]
        host.daemon(2, "/later")
        assert await discovered(host.source, *places) == ["/later", str(pipe)]
        seen = await asyncio.to_thread(host.source.observe, [pid, 3, 999_999])
        assert (seen.error, seen.ignored_programs[alice]) == (None, number - 2)
        hung = seen.processes[3]
        assert (hung.uid, hung.name, hung.mps_environment) == (alice, "nvidia-cuda-mps", None)


async def test_a_process_of_root_that_hangs_is_an_error_and_known_by_its_lock(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "PROCESS_TIMEOUT_SECONDS", 0.01)
    pipe = tmp_path / "pipe"
    with held_lock(pipe) as pid:
        sockets = [str(pipe / "control")]
        lock_memory(host.add(pid, argv=[CONTROL, "-d"], sockets=sockets))
        for _ in range(2):
            assert await discovered(host.source) == [str(pipe)]
        error = host.source.observe([]).error or ""
        assert error.startswith(f"the memory of PID {pid}: ")

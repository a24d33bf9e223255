from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.observations import DaemonFacts
from mps_exporter.sources import daemon_directories, daemon_discovery, policy
from mps_exporter.sources.daemon_directories import (
    DEFAULT_LOG_DIRECTORY,
    DaemonDirectories,
    directory_status,
    lock_holder,
)
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.processes import Processes
from testing.fake_host import held_lock
from testing.fake_proc import BOOT_TIME, HOST_NAMESPACE, FakeProc
from testing.threads import allow_one_thread
from testing.waiting import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).parents[3]

CONTROL = "/usr/bin/nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    # The machine that runs the tests may have daemons of its own.
    defaults = (str(tmp_path / "tmp-mps"), str(tmp_path / "run-mps"))
    monkeypatch.setattr(daemon_directories, "DEFAULT_PIPE_DIRECTORIES", defaults)
    # A busy machine may not have looked at a directory within half a second.
    monkeypatch.setattr(policy, "DIRECTORY_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    return FakeProc(tmp_path / "proc")


def found(
    proc: FakeProc, configured: Sequence[tuple[str, str | None]] = (), *, search: bool = True
) -> tuple[DaemonFacts, ...]:
    return DaemonDiscovery(str(proc.root)).discover(configured, search=search)


def environment(pipe: Path, log: Path | None = None) -> dict[str, str]:
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    return variables if log is None else {**variables, "CUDA_MPS_LOG_DIRECTORY": str(log)}


def daemon(proc: FakeProc, pid: int, pipe: Path, *flags: str, **more: Any) -> None:
    proc.add(pid, argv=[CONTROL, *(flags or ("-d",))], environ=environment(pipe), **more)


# ------------------------------------------------------------------------------ daemons


def test_a_daemon_with_its_servers(proc: FakeProc, tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    proc.add(1, argv=["/sbin/init"])
    proc.add(413, argv=[CONTROL, "-d"], environ=environment(pipe, log), started=20.5)
    proc.add(468, argv=[SERVER, "-multiuser-server"], parent=413)
    proc.add(469, comm="nvidia-cuda-mps", parent=413, state="Z")
    proc.add(470, argv=[CONTROL, "-d"], parent=413, environ=environment(pipe))  # before its exec
    proc.add(500, argv=[SERVER], parent=499)  # of another daemon
    (facts,) = found(proc)
    assert (facts.pipe_directory, facts.log_directory, facts.root) == (str(pipe), str(log), "")
    assert facts.process is not None
    assert (facts.process.pid, facts.process.name) == (413, "nvidia-cuda-mps-control")
    assert facts.process.start_time_seconds == BOOT_TIME + 20.5
    assert [server.pid for server in facts.servers] == [468, 469]
    assert facts.servers[1].state == "Z"
    assert facts.multiuser
    assert not facts.configured
    assert not facts.directories_assumed
    assert not facts.log_directory_assumed
    assert (facts.pipe_path, facts.log_path) == (str(pipe), str(log))


@pytest.mark.parametrize(
    ("flags", "foreground", "multiuser", "static"),
    [
        (["-d"], False, False, False),
        (["-f"], True, False, False),
        (["--foreground", "-p", "3"], True, False, False),
        (["-d", "-multiuser-server"], False, True, False),
        (["-d", "-S"], False, False, True),
    ],
)
def test_how_it_was_started(
    proc: FakeProc,
    tmp_path: Path,
    flags: list[str],
    foreground: bool,
    multiuser: bool,
    static: bool,
) -> None:
    daemon(proc, 5, tmp_path / "pipe", *flags)
    (facts,) = found(proc)
    assert facts.foreground is foreground
    assert facts.multiuser is multiuser
    assert facts.static_partitioning is static


def test_which_protocol_it_was_started_with(proc: FakeProc, tmp_path: Path) -> None:
    daemon(proc, 5, tmp_path / "plain")
    daemon(proc, 6, tmp_path / "third", "-d", "-p", "3")
    named = {**environment(tmp_path / "variable"), "CUDA_MPS_PROTOCOL_VERSION": "3"}
    proc.add(7, argv=[CONTROL, "-d"], environ=named)
    protocols = {Path(one.pipe_directory).name: one.protocol for one in found(proc)}
    assert protocols == {"plain": None, "third": "3", "variable": "3"}


def test_the_tool_is_no_daemon(proc: FakeProc, tmp_path: Path) -> None:
    proc.add(5, argv=[CONTROL], environ=environment(tmp_path / "pipe"))
    proc.add(6, argv=["sh", "-c", f"{CONTROL} -d"])
    proc.add(7, argv=["/opt/nvidia-cuda-mps-controller", "-d"])
    proc.add(8, comm="nvidia-cuda-mps", state="Z")
    assert found(proc) == ()


def test_one_without_flags_that_holds_the_lock_is(proc: FakeProc, tmp_path: Path) -> None:
    with held_lock(tmp_path / "pipe") as pid:
        proc.add(pid, argv=[CONTROL], environ=environment(tmp_path / "pipe"))
        (facts,) = found(proc)
    assert facts.process is not None
    assert facts.lock_holder_pid == facts.process.pid == pid


def test_one_that_no_longer_holds_its_lock_is_no_daemon(proc: FakeProc, tmp_path: Path) -> None:
    source = DaemonDiscovery(str(proc.root))
    with held_lock(tmp_path / "pipe") as pid:
        proc.add(pid, argv=[CONTROL], environ=environment(tmp_path / "pipe"))
        first = source.discover([], search=True)
        assert len(first) == 1
        assert source.discover([], search=True) == first
    assert source.discover([], search=True) == ()


def test_without_variables_it_is_at_the_default_place(proc: FakeProc, tmp_path: Path) -> None:
    proc.add(5, argv=[CONTROL, "-d"], environ={})
    (facts,) = found(proc)
    assert facts.pipe_directory == str(tmp_path / "tmp-mps")
    assert facts.log_directory == DEFAULT_LOG_DIRECTORY
    assert not facts.directories_assumed


@pytest.mark.parametrize("state", ["R", "Z"])
@pytest.mark.parametrize("named", [True, False])
def test_one_that_ends_is_at_no_other_place(
    proc: FakeProc, tmp_path: Path, state: str, named: bool
) -> None:
    """It releases its lock some time before it is a zombie, and its parent may never reap it."""
    pipe = tmp_path / "tmp-mps"
    variables = environment(pipe) if named else {}
    source = DaemonDiscovery(str(proc.root))
    with held_lock(pipe) as pid:
        proc.add(pid, argv=[CONTROL, "-d"], environ=variables)
        assert [one.pipe_directory for one in source.discover([], search=True)] == [str(pipe)]
    proc.add(pid, argv=[CONTROL, "-d"], environ=variables, state=state)
    assert source.discover([], search=True) == ()


def test_one_that_ends_while_it_is_looked_at_is_at_no_other_place(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp-mps").mkdir()
    proc.add(5, argv=[CONTROL, "-d"], environ={})
    monkeypatch.setattr(Processes, "sole_user", lambda _processes, _pid: None)
    assert found(proc) == ()


@pytest.mark.parametrize("there_still", [True, False])
def test_one_in_a_container_that_ends_is_at_no_other_place(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_still: bool
) -> None:
    """The kernel takes its root directory from it before it is a zombie."""
    source, locate = DaemonDiscovery(str(proc.root)), DaemonDirectories.locate
    with held_lock(tmp_path / "container" / "boxed") as pid:
        argv, variables = [CONTROL, "-d"], environment(Path("/boxed"))
        proc.add(pid, argv=argv, environ=variables, sees=tmp_path / "container")
        (facts,) = source.discover([], search=True)
        assert facts.root == f"{proc.root}/{pid}/root"

    def look_at_its_end(*arguments: Any) -> object:
        if there_still:
            (proc.root / str(pid) / "root").unlink()
        else:
            proc.remove(pid)
        return locate(*arguments)

    monkeypatch.setattr(DaemonDirectories, "locate", look_at_its_end)
    assert source.discover([], search=True) == ()


def test_a_second_one_at_the_default_place_is_not_where_nothing_is(
    proc: FakeProc, tmp_path: Path
) -> None:
    """It finds the lock taken and ends."""
    with held_lock(tmp_path / "tmp-mps") as pid:
        proc.add(pid, argv=[CONTROL, "-d"], environ={})
        proc.add(pid + 1, argv=[CONTROL, "-d"], environ={}, started=5.0)
        (facts,) = found(proc)
    assert facts.process is not None
    assert (facts.process.pid, facts.pipe_directory) == (pid, str(tmp_path / "tmp-mps"))


def test_of_two_default_directories_the_lock_decides(proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "tmp-mps").mkdir()
    with held_lock(tmp_path / "run-mps") as pid:
        proc.add(pid, argv=[CONTROL, "-d"], environ={})
        (facts,) = found(proc)
    assert facts.pipe_directory == str(tmp_path / "run-mps")


def test_many_daemons(proc: FakeProc, tmp_path: Path) -> None:
    for number in range(5):
        daemon(proc, 100 + number, tmp_path / f"nvidia-mps_{number}")
    proc.add(200, argv=[SERVER], parent=103)
    facts = found(proc)
    assert [daemon.pipe_directory for daemon in facts] == [
        str(tmp_path / f"nvidia-mps_{number}") for number in range(5)
    ]
    assert [len(daemon.servers) for daemon in facts] == [0, 0, 0, 1, 0]


def test_directories_and_daemons_are_looked_at_at_the_same_time(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon(proc, 500, tmp_path / "one")
    source = DaemonDiscovery(str(proc.root))
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    look, look_at_place = source._directories.locate, source._check_configured

    def looking(*arguments: Any) -> Any:
        both.wait()
        return look(*arguments)

    def looking_at_place(*arguments: Any) -> Any:
        both.wait()
        return look_at_place(*arguments)

    monkeypatch.setattr(source._directories, "locate", looking)
    monkeypatch.setattr(source, "_check_configured", looking_at_place)
    names = {one.pipe_directory for one in source.discover([("/configured", None)], search=True)}
    assert names == {"/configured", str(tmp_path / "one")}


def test_what_was_configured_is_looked_at_first_where_threads_are_few(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon(proc, 500, tmp_path / "one")
    (tmp_path / "two").mkdir()
    allow_one_thread(monkeypatch)
    (facts,) = found(proc, [(str(tmp_path / "two"), None)])
    assert facts.owner_uid == os.getuid()


def test_of_a_users_crowd_a_few_are_looked_at_and_root_is_always(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is a thread and some dozen system calls; what is known stands until its turn comes."""
    for number in range(20):
        daemon(proc, 100 + number, tmp_path / str(number), uid=os.getuid() + 2001)
    daemon(proc, 500, tmp_path / "root")
    now = 0.0
    source = DaemonDiscovery(str(proc.root), clock=lambda: now)
    checks = list[int]()
    locate = source._directories.locate

    def counted(program: Any, *arguments: Any) -> Any:
        checks.append(program.pid)
        return locate(program, *arguments)

    monkeypatch.setattr(source._directories, "locate", counted)
    names = set()
    for _ in range(20):
        names.add(frozenset(one.pipe_directory for one in source.discover([], search=True)))
        now += 1.0 / policy.DIRECTORY_CHECKS_PER_SECOND
    (shown,) = names
    assert len(shown) == 1 + policy.MAX_DAEMONS_PER_USER
    assert checks.count(500) == 20
    assert len(checks) - 20 == policy.MAX_DAEMONS_PER_USER + 19
    assert {100 + number for number in range(20)} <= set(checks)  # the least recently checked


def test_of_two_daemons_in_one_directory_the_lock_decides(proc: FakeProc, tmp_path: Path) -> None:
    with held_lock(tmp_path / "pipe") as pid:
        daemon(proc, 2, tmp_path / "pipe")  # a second start, which will be refused
        daemon(proc, pid, tmp_path / "pipe")
        daemon(proc, 4_000_000, tmp_path / "pipe")
        (facts,) = found(proc)
    assert facts.process is not None
    assert facts.process.pid == pid


# ------------------------------------------------------------------------------ configured


def test_configured_directories_are_there_when_nothing_runs(proc: FakeProc, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    for search in (True, False):
        (facts,) = found(proc, [(pipe, None), (pipe, "/twice")], search=search)
        owners = tuple(sorted({0, os.geteuid()}))
        assert facts == DaemonFacts(pipe, DEFAULT_LOG_DIRECTORY, configured=True, log_owners=owners)


def test_a_configured_daemon_that_runs(proc: FakeProc, tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    (tmp_path / "link").symlink_to(pipe)
    proc.add(5, argv=[CONTROL, "-d"], environ=environment(pipe, log))
    for configured, expected in ((None, str(log)), ("/given", "/given")):
        (facts,) = found(proc, [(str(tmp_path / "link"), configured)])
        assert facts.configured
        assert facts.pipe_directory == str(tmp_path / "link")
        assert facts.log_directory == expected
        assert facts.process is not None


@pytest.mark.parametrize("search", [True, False])
def test_one_that_does_not_run_is_given_no_log_of_another(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, search: bool
) -> None:
    default = tmp_path / "log"
    for module in (daemon_directories, daemon_discovery):
        monkeypatch.setattr(module, "DEFAULT_LOG_DIRECTORY", str(default))
    default.mkdir()
    named = [(str(tmp_path / "mine"), None), (str(tmp_path / "told"), str(default))]
    source = DaemonDiscovery(str(proc.root))

    def logs() -> dict[str, str]:
        daemons = source.discover(named, search=search)
        return {Path(one.pipe_directory).name: one.log_directory for one in daemons}

    (tmp_path / "other").mkdir()
    proc.add(413, argv=[CONTROL, "-d"], environ=environment(tmp_path / "other"))
    alone = {"mine": str(default), "told": str(default)}
    assert logs() == alone | {"mine": ""} | ({"other": str(default)} if search else {})
    proc.remove(413)
    assert logs() == alone | {"mine": ""}  # the lines in it are still the other's
    (tmp_path / "mine").mkdir()
    proc.add(414, argv=[CONTROL, "-d"], environ=environment(tmp_path / "mine"))
    assert logs() == alone
    proc.remove(414)
    assert logs() == alone


def test_without_search_only_what_was_configured(proc: FakeProc, tmp_path: Path) -> None:
    daemon(proc, 5, tmp_path / "a")
    daemon(proc, 6, tmp_path / "b")
    (facts,) = found(proc, [(str(tmp_path / "b"), None)], search=False)
    assert facts.process is not None
    assert facts.process.pid == 6


def test_a_lock_without_a_visible_process(proc: FakeProc, tmp_path: Path) -> None:
    with held_lock(tmp_path / "pipe") as pid:
        (facts,) = found(proc, [(str(tmp_path / "pipe"), None)])
        assert (facts.process, facts.lock_holder_pid, facts.lock_tested) == (None, pid, True)
    (facts,) = found(proc, [(str(tmp_path / "pipe"), None)])
    assert (facts.lock_holder_pid, facts.lock_tested) == (None, True)


def test_who_held_the_lock_some_time_ago_says_nothing_of_now(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a slow directory that was begun before the daemon started, and ended after."""
    pipe = str(tmp_path / "pipe")
    may_return = threading.Event()
    check = DaemonDirectories.check

    def slow(*arguments: Any, **more: Any) -> Any:
        found = check(*arguments, **more)
        may_return.wait()
        return found

    with held_lock(tmp_path / "pipe"):
        pass  # the file is there, and nobody holds it
    monkeypatch.setattr(DaemonDirectories, "check", slow)
    source = DaemonDiscovery(str(proc.root))
    monkeypatch.setattr(policy, "DIRECTORY_TIMEOUT_SECONDS", 0.05)
    (facts,) = source.discover([(pipe, None)], search=True)
    assert not facts.lock_tested
    with held_lock(tmp_path / "pipe") as pid:
        under_way = source._calls._calls[pipe, None].future
        may_return.set()
        wait_for(under_way.done)
        monkeypatch.setattr(policy, "DIRECTORY_TIMEOUT_SECONDS", PATIENCE_SECONDS)
        (facts,) = source.discover([(pipe, None)], search=True)
        assert (facts.owner_uid, facts.lock_tested) == (os.getuid(), False)
        (facts,) = source.discover([(pipe, None)], search=True)
        assert (facts.lock_tested, facts.lock_holder_pid) == (True, pid)


@pytest.mark.parametrize("configured", [False, True])
def test_a_daemon_whose_directory_cannot_be_looked_at_now_is_still_there(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    names = [(str(tmp_path / "pipe"), None)] if configured else []
    source = DaemonDiscovery(str(proc.root))
    with held_lock(tmp_path / "pipe") as pid:
        daemon(proc, pid, tmp_path / "pipe")
        (before,) = source.discover(names, search=True)

        def fails(*_: Any) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(daemon_directories, "opened_directory", fails)
        (facts,) = source.discover(names, search=True)
        assert before.process is not None
        assert facts.process == before.process
        assert facts.pipe_directory == before.pipe_directory
        assert "(too many open files)" in (source.observe([]).error or "")


# ------------------------------------------------------------------------------ mount namespaces


def test_a_daemon_with_a_root_of_its_own(proc: FakeProc, tmp_path: Path) -> None:
    root = tmp_path / "container"
    (root / "mps" / "pipe").mkdir(parents=True)
    (root / "mps" / "log").mkdir()
    proc.add(
        5, argv=[CONTROL, "-f"], environ=environment(Path("/mps/pipe"), Path("/mps/log")), sees=root
    )
    (facts,) = found(proc)
    assert facts.pipe_directory == "/mps/pipe"
    assert facts.root == f"{proc.root}/5/root"
    assert Path(facts.pipe_path).samefile(root / "mps" / "pipe")
    assert Path(facts.log_path).samefile(root / "mps" / "log")


def test_its_directory_mounted_from_here_has_the_name_that_was_configured(
    proc: FakeProc, tmp_path: Path
) -> None:
    root = tmp_path / "container"
    pipe = root / "mps" / "pipe"
    pipe.mkdir(parents=True)
    (root / "mps" / "log").mkdir()
    variables = environment(Path("/mps/pipe"), Path("/mps/log"))
    proc.add(5, argv=[CONTROL, "-f"], environ=variables, sees=root)
    (facts,) = found(proc, [(str(pipe), None)])
    assert (facts.pipe_directory, facts.root) == (str(pipe), "")
    assert facts.process is not None
    assert Path(facts.log_path).samefile(root / "mps" / "log")


def test_the_same_directory_under_the_same_name_needs_no_prefix(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    root = tmp_path / "container"
    log = root / "inner-log"
    log.mkdir(parents=True)
    # As if it were mounted there, too.
    real, mirrored = directory_status, f"{proc.root}/5/root{pipe}"
    monkeypatch.setattr(
        daemon_directories,
        "directory_status",
        lambda path, procfs: real(str(pipe) if path == mirrored else path, procfs),
    )
    variables = environment(pipe, Path("/inner-log"))
    proc.add(5, argv=[CONTROL, "-d"], environ=variables, sees=root)
    (facts,) = found(proc)
    assert (facts.pipe_directory, facts.root) == (str(pipe), "")
    assert Path(facts.log_path).samefile(log)


def test_links_in_a_container_lead_to_what_is_in_it(proc: FakeProc, tmp_path: Path) -> None:
    """The host has a directory of the name that the container's link has."""
    outside, root = tmp_path / "run", tmp_path / "container"
    inside = root / str(outside).lstrip("/")
    for folder in (outside, inside):
        (folder / "mps").mkdir(parents=True)
        (folder / "log").mkdir()
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to(outside)  # /var/run -> /run
    (root / "var" / "log").symlink_to(f"../../../../../../../../../../../../..{outside}/log")
    variables = environment(Path("/var/run/mps"), Path("/var/log"))
    proc.add(5, argv=[CONTROL, "-d"], environ=variables, sees=root)
    (facts,) = found(proc)
    assert facts.root == f"{proc.root}/5/root"
    assert Path(facts.pipe_path).samefile(inside / "mps")
    assert Path(facts.log_path).samefile(inside / "log")


def test_links_that_stay_inside_keep_their_name(proc: FakeProc, tmp_path: Path) -> None:
    root = tmp_path / "container"
    (root / "run" / "mps").mkdir(parents=True)
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to("../run")
    proc.add(5, argv=[CONTROL, "-d"], environ=environment(Path("/var/run/mps")), sees=root)
    (facts,) = found(proc)
    assert facts.pipe_directory == "/var/run/mps"
    assert Path(facts.pipe_path).samefile(root / "run" / "mps")


def test_a_link_to_itself_leads_nowhere(proc: FakeProc, tmp_path: Path) -> None:
    root = tmp_path / "container"
    root.mkdir()
    (root / "mps").symlink_to("/mps")
    proc.add(5, argv=[CONTROL, "-d"], environ=environment(Path("/mps")), sees=root)
    (facts,) = found(proc)
    assert (facts.pipe_directory, facts.root) == ("/mps", "")


def test_the_same_name_in_two_containers_is_distinguished(proc: FakeProc, tmp_path: Path) -> None:
    for pid in (5, 6):
        root = tmp_path / f"container{pid}"
        (root / "mps").mkdir(parents=True)
        variables = environment(Path("/mps"), Path("/log"))
        proc.add(pid, argv=[CONTROL, "-f"], environ=variables, sees=root, started=pid)
    first, second = found(proc)
    assert (first.pipe_directory, first.root) == ("/mps", f"{proc.root}/5/root")
    assert (second.pipe_directory, second.root) == (f"{proc.root}/6/root/mps", "")
    assert second.log_directory == f"{proc.root}/6/root/log"


def test_a_daemon_is_not_taken_for_one_that_went_away(proc: FakeProc, tmp_path: Path) -> None:
    variables = environment(Path("/mps"), Path("/log"))
    for pid in (5, 6):
        root = tmp_path / f"container{pid}"
        (root / "mps").mkdir(parents=True)
        proc.add(pid, argv=[CONTROL, "-f"], environ=variables, sees=root, started=pid)
    source = DaemonDiscovery(str(proc.root))
    assert len(source.discover([], search=True)) == 2
    proc.remove(5)
    (left,) = source.discover([], search=True)
    assert left.pipe_directory == f"{proc.root}/6/root/mps"
    again = tmp_path / "container5"
    proc.add(7, argv=[CONTROL, "-f"], environ=variables, sees=again, started=7)
    names = [one.pipe_directory for one in source.discover([], search=True)]
    assert names == ["/mps", f"{proc.root}/6/root/mps"]


# ------------------------------------------------------------------------------ without rights


def test_an_unreadable_environment_the_sockets_and_the_lock(proc: FakeProc, tmp_path: Path) -> None:
    pipe = tmp_path / "somewhere"
    with held_lock(pipe) as pid:
        sockets = [str(tmp_path / "x" / "control"), str(pipe / "control")]
        proc.add(pid, argv=[CONTROL, "-d"], sockets=sockets)
        (facts,) = found(proc)
    assert facts.pipe_directory == str(pipe)
    assert facts.log_directory == ""
    assert not facts.directories_assumed
    assert facts.log_directory_assumed


def test_the_default_log_is_a_daemons_whose_pid_is_in_it(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment is closed; of two daemons, one has its log there, and not the other."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(daemon_directories, "DEFAULT_LOG_DIRECTORY", str(logs))
    one, two = tmp_path / "one", tmp_path / "two"
    with held_lock(one) as first, held_lock(two) as second:
        stamp = f"[2026-11-21 08:55:22.019 Control {first:5d}]"
        # The second is mentioned by the first; that is not the writer's place.
        (logs / "control.log").write_text(f"{stamp} NEW CLIENT Control {second}] from user 0\n")
        for pid, pipe in ((first, one), (second, two)):
            proc.add(pid, argv=[CONTROL, "-d"], sockets=[str(pipe / "control")])
        found_ones = {facts.pipe_directory: facts.log_directory for facts in found(proc)}
        assert found_ones == {str(one): str(logs), str(two): ""}


def test_a_log_from_before_the_daemon_is_not_its_own(
    proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(daemon_directories, "DEFAULT_LOG_DIRECTORY", str(logs))
    pipe = tmp_path / "pipe"
    with held_lock(pipe) as pid:
        log = logs / "control.log"
        log.write_text(f"[2026-11-21 08:55:22.019 Control {pid:5d}] UI closed\n")
        os.utime(log, (BOOT_TIME, BOOT_TIME))
        proc.add(pid, argv=[CONTROL, "-d"], sockets=[str(pipe / "control")], started=60)
        (facts,) = found(proc)
        assert facts.log_directory == ""


def test_without_its_environment_a_daemon_in_a_container_shows_by_its_lock(
    proc: FakeProc, tmp_path: Path
) -> None:
    """As with CAP_SYS_PTRACE alone: its root can be entered, its environment cannot be read."""
    root = tmp_path / "container"
    inside = root / str(tmp_path / "tmp-mps").lstrip("/")
    with held_lock(inside) as pid:
        proc.add(pid, argv=[CONTROL, "-d"], sees=root)
        (facts,) = found(proc)
        assert (facts.pipe_directory, facts.root) == (
            str(tmp_path / "tmp-mps"),
            f"{proc.root}/{pid}/root",
        )


def test_a_directory_with_a_free_lock_is_not_assumed(proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "tmp-mps").mkdir()
    (tmp_path / "tmp-mps" / "control_lock").touch()
    proc.add(5, argv=[CONTROL, "-d"])
    source = DaemonDiscovery(str(proc.root))
    assert source.discover((), search=True) == ()
    assert "PID 5" in (source.observe(()).error or "")


def test_with_a_configured_log_directory_nothing_is_assumed(proc: FakeProc, tmp_path: Path) -> None:
    pipe = tmp_path / "somewhere"
    with held_lock(pipe) as pid:
        proc.add(pid, argv=[CONTROL, "-d"])
        (facts,) = found(proc, [(str(pipe), "/the/log")])
    assert facts.process is not None
    assert facts.log_directory == "/the/log"
    assert not facts.log_directory_assumed


def test_without_evidence_the_default_is_assumed(proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "tmp-mps").mkdir()
    proc.add(5, argv=[CONTROL, "-d"])
    (facts,) = found(proc)
    assert facts.pipe_directory == str(tmp_path / "tmp-mps")
    assert facts.directories_assumed
    assert facts.log_directory_assumed


def test_one_that_cannot_be_placed_is_complained_about(proc: FakeProc, tmp_path: Path) -> None:
    with held_lock(tmp_path / "tmp-mps") as pid, held_lock(tmp_path / "run-mps"):
        proc.add(pid, argv=[CONTROL, "-d"])
        proc.add(7, argv=[CONTROL, "-d"])
        source = DaemonDiscovery(str(proc.root))
        (facts,) = source.discover((), search=True)
    assert facts.process is not None
    assert facts.process.pid == pid
    error = source.observe(()).error
    assert error is not None
    assert "PID 7" in error
    assert "--mps.pipe-directory" in error


# ------------------------------------------------------------------------------ locks


def test_the_lock_names_its_holder_and_nothing_is_written(tmp_path: Path) -> None:
    with held_lock(tmp_path) as pid:
        lock = tmp_path / "control_lock"
        before = lock.stat()
        assert lock_holder(str(lock)) == (True, pid)
        assert lock.stat() == before
    assert lock_holder(str(lock)) == (True, None)


def test_files_that_are_no_locks_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "link", "directory", "missing", "nul\0byte"):
        assert lock_holder(f"{tmp_path}/{name}") == (False, None)
    assert not (tmp_path / "missing").exists()


# ------------------------------------------------------------------------------ processes


def test_facts_of_a_process(proc: FakeProc) -> None:
    proc.add(
        443,
        argv=["/opt/bin/python3", "train.py"],
        environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "HOME": "/root"},
        uid=4_000_000_001,
        parent=1,
        state="T",
        started=12.34,
        namespace_pids=[3],
        cgroup="0::/system.slice/x.service\n",
    )
    facts = DaemonDiscovery(str(proc.root), str(proc.root / "passwd")).observe([443]).processes[443]
    assert facts.start_time_seconds == BOOT_TIME + 12.34
    assert (facts.uid, facts.user, facts.name) == (4_000_000_001, None, "python3")
    assert (facts.state, facts.parent_pid, facts.namespace_pids) == ("T", 1, (443, 3))
    assert facts.pid_namespace == HOST_NAMESPACE
    assert facts.cgroup == "0::/system.slice/x.service\n"
    assert facts.mps_environment == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}


def test_names_of_users_come_from_the_given_file(proc: FakeProc, tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("ann:x:1001:1001::/:/bin/sh\n")
    proc.add(5, argv=["a"], uid=1001)
    proc.add(6, argv=["b"], uid=0)
    facts = DaemonDiscovery(str(proc.root), str(passwd)).observe([5, 6]).processes
    assert [process.user for process in facts.values()] == ["ann", None]


def test_the_name_falls_back_to_what_the_kernel_keeps(proc: FakeProc) -> None:
    proc.add(5, comm=b"odd (name)\xff")
    assert DaemonDiscovery(str(proc.root)).observe([5]).processes[5].name == "odd (name)\\xff"


def test_what_cannot_be_read_is_not_there(proc: FakeProc) -> None:
    proc.add(5, argv=["a"], pid_namespace=None)
    proc.add(6, argv=["b"], environ={}, state="Z")
    (proc.add(7, argv=["c"]) / "stat").unlink()  # hidden, or gone meanwhile
    for name in ("status", "cgroup"):
        (proc.root / "5" / name).unlink()
    source = DaemonDiscovery(str(proc.root), now=lambda: 99.0)
    seen = source.observe([5, 6, 7, 8, 0, -1])
    assert sorted(seen.processes) == [5, 6]
    assert seen.gone == (-1, 0, 7, 8)
    assert seen.at == 99.0
    assert seen.unreadable_environments == 1
    five, six = seen.processes[5], seen.processes[6]
    assert (five.uid, five.cgroup, five.pid_namespace, five.mps_environment) == (None,) * 4
    assert six.mps_environment is None


def test_a_reused_pid_is_another_process(proc: FakeProc) -> None:
    source = DaemonDiscovery(str(proc.root))
    proc.add(5, argv=["old"], uid=1, started=1)
    old = source.observe([5]).processes[5]
    proc.add(5, argv=["new"], uid=2, started=2)
    new = source.observe([5]).processes[5]
    assert (old.name, old.uid) == ("old", 1)
    assert (new.name, new.uid) == ("new", 2)
    assert old.start_time_seconds != new.start_time_seconds
    proc.remove(5)
    assert source.observe([5]).processes == {}


def test_facts_are_kept_but_not_for_ever(proc: FakeProc) -> None:
    now = 0.0
    source = DaemonDiscovery(str(proc.root), clock=lambda: now)
    proc.add(5, argv=["a"], cgroup="0::/before\n")
    assert source.observe([5]).processes[5].state == "S"
    proc.add(5, argv=["a"], cgroup="0::/after\n", state="T", parent=9)
    now = 59.0
    facts = source.observe([5]).processes[5]
    assert (facts.cgroup, facts.state, facts.parent_pid) == ("0::/before\n", "T", 9)
    now = 60.0
    assert source.observe([5]).processes[5].cgroup == "0::/after\n"
    proc.add(5, argv=["another program"])
    assert source.observe([5]).processes[5].name == "another program"


def test_a_process_that_ended_keeps_what_was_known_of_it(proc: FakeProc) -> None:
    source = DaemonDiscovery(str(proc.root))
    proc.add(5, argv=["a"], environ={"CUDA_MPS_X": "1"})
    source.observe([5])
    proc.add(5, comm="a", environ={}, state="Z")
    facts = source.observe([5]).processes[5]
    assert facts.state == "Z"
    assert facts.mps_environment == {"CUDA_MPS_X": "1"}


def test_start_times_do_not_move_when_the_clock_does(proc: FakeProc) -> None:
    source = DaemonDiscovery(str(proc.root))
    proc.add(5, argv=["a"], started=1)
    before = source.observe([5]).processes[5].start_time_seconds
    (proc.root / "stat").write_text(f"btime {BOOT_TIME + 1}\n")
    proc.add(5, argv=["b"], started=1)
    assert source.observe([5]).processes[5].start_time_seconds == before


def test_after_the_clock_was_set_new_processes_have_its_time(proc: FakeProc) -> None:
    """As their log lines do; one that is known started when it was logged to have started."""
    source = DaemonDiscovery(str(proc.root))
    proc.add(5, argv=["a"], started=1000)
    assert source.observe([5]).processes[5].start_time_seconds == BOOT_TIME + 1000
    (proc.root / "stat").write_text(f"btime {BOOT_TIME - 5}\n")
    proc.add(6, argv=["b"], started=1060)
    seen = source.observe([5, 6]).processes
    assert seen[5].start_time_seconds == BOOT_TIME + 1000
    assert seen[6].start_time_seconds == BOOT_TIME - 5 + 1060
    proc.add(5, argv=["c"], started=1000)  # another program, the same process
    assert source.observe([5]).processes[5].start_time_seconds == BOOT_TIME + 1000


@contextmanager
def no_reading(code: int, *names: str) -> Iterator[None]:
    """Let files of these names fail to open."""

    def failing(real: Any, path: str, *more: Any, **options: Any) -> Any:
        if Path(path).name in names:
            raise OSError(code, os.strerror(code))
        return real(path, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", partial(failing, os.open))
        patch.setattr(builtins, "open", partial(failing, open))
        yield


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (errno.EMFILE, "too many open files"),
        (errno.ENFILE, "too many open files in system"),
        (errno.ENOMEM, "cannot allocate memory"),
        (errno.EIO, "input/output error"),
    ],
)
def test_who_cannot_be_looked_at_is_not_gone(proc: FakeProc, code: int, why: str) -> None:
    source = DaemonDiscovery(str(proc.root))
    for pid in (5, 6):
        proc.add(pid, argv=["a"], started=1)
    before = source.observe([5]).processes[5]
    with no_reading(code, "stat"):
        seen = source.observe([5, 6])
    assert (seen.processes, seen.gone) == ({}, ())
    assert seen.error == f"2 processes cannot be read in /proc: {why}"
    after = source.observe([5, 6, 7])
    assert (after.processes[5], after.gone, after.error) == (before, (7,), None)


def test_one_that_is_hidden_is_neither_gone_nor_a_failure(proc: FakeProc) -> None:
    """As by the mount option hidepid=1."""
    proc.add(5, argv=["a"])
    with no_reading(errno.EPERM, "stat", "comm"):
        seen = DaemonDiscovery(str(proc.root)).observe([5])
        assert found(proc) == ()
    assert (seen.processes, seen.gone, seen.error) == ({}, (), None)


def test_a_process_that_may_be_invisible_is_not_gone(proc: FakeProc) -> None:
    """The mount option hidepid hides process 1 from ordinary users, too."""
    assert DaemonDiscovery(str(proc.root)).observe([5]).gone == (5,)
    proc.remove(1)
    seen = DaemonDiscovery(str(proc.root)).observe([5])
    assert (seen.processes, seen.gone, seen.error) == ({}, (), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a procfs")
def test_a_real_procfs_that_hides() -> None:
    look = (
        "import os, sys; from mps_exporter.sources.daemon_discovery import DaemonDiscovery; "
        "source = DaemonDiscovery();"
        "os.setgroups([]); os.setresgid(*[1001] * 3); os.setresuid(*[1001] * 3);"
        "print(os.path.exists('/proc/' + sys.argv[1]), source.observe([int(sys.argv[1])]).gone)"
    )
    # In a PID namespace of its own: before Linux 5.8 the option is one for all of a namespace.
    script = 'mount -t proc -o hidepid=2 proc /proc && { sleep 60 & "$1" -c "$2" $!; kill $!; }'
    seen = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount", "sh", "-c", script, "sh", sys.executable, look],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
    )
    if seen.returncode and seen.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no procfs can be mounted here: {seen.stderr.strip()}")
    assert (seen.stdout, seen.stderr) == ("False ()\n", "")


@pytest.mark.parametrize("name", ["comm", "stat", "environ", "cmdline"])
def test_daemons_that_cannot_be_looked_at_are_not_gone(
    proc: FakeProc, tmp_path: Path, name: str
) -> None:
    daemon(proc, 413, tmp_path / "pipe")
    with no_reading(errno.EMFILE, name), pytest.raises(OSError, match="Too many open files"):
        found(proc)


def test_what_was_known_of_a_process_outlives_a_shortage(proc: FakeProc) -> None:
    now = 0.0
    source = DaemonDiscovery(str(proc.root), clock=lambda: now)
    proc.add(5, argv=["a"], environ={"CUDA_MPS_X": "1"})
    before = source.observe([5]).processes[5]
    now = 61.0  # time to read it all again
    with no_reading(errno.EMFILE, "environ"):
        assert source.observe([5]).processes[5] == before


def test_a_missing_procfs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DaemonDiscovery(str(tmp_path / "nowhere")).discover((), search=True)


# ------------------------------------------------------------------------------ the real one


def test_this_process() -> None:
    source = DaemonDiscovery()
    facts = source.observe([os.getpid()]).processes[os.getpid()]
    assert facts.uid == os.geteuid()
    assert facts.state in {"R", "S"}
    assert facts.parent_pid == os.getppid()
    assert facts.namespace_pids[-1] == os.getpid()
    assert 0 <= time.time() - facts.start_time_seconds < 86400 * 365
    assert facts.mps_environment is not None


def test_a_real_process_with_a_real_environment() -> None:
    variables = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G", "SECRET": "x"}
    with subprocess.Popen(
        [sys.executable, "-SE", "-c", "print(flush=True); input()"],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        facts = DaemonDiscovery().observe([child.pid]).processes[child.pid]
        child.kill()
        child.wait()
        assert DaemonDiscovery().observe([child.pid]).processes == {}
    assert facts.mps_environment == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}
    assert facts.parent_pid == os.getpid()
    assert abs(facts.start_time_seconds - time.time()) < 3600


def test_processes_of_a_program_are_those_that_have_its_name_now(proc: FakeProc) -> None:
    source = Processes(str(proc.root))
    proc.add(10, comm="sh")
    proc.add(11, comm="job")
    assert list(source.find_program(b"job")) == [11]
    assert source.facts(11) is not None
    proc.remove(11)
    proc.add(10, comm="job")  # its exec
    proc.add(12, comm="job")
    assert list(source.find_program(b"job")) == [10, 12]
    assert 11 not in source._known

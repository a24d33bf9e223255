"""Why a server could not start: said only where it is proved. On a real host and made-up ones."""

import subprocess
from pathlib import Path

import pytest

from mps_exporter.observations import ClosedFolder, DaemonConditions, DaemonFacts, ProcessFacts
from mps_exporter.sources import process_view
from mps_exporter.sources.process_view import view_daemon


def made_up_daemon(folder: Path) -> DaemonFacts:
    """A daemon in a made-up /proc, whose pipe directory is behind a folder of mode 0700."""
    base = folder / "proc" / "9"
    (base / "root" / "run" / "pipe").mkdir(parents=True)
    (base / "root" / "var" / "log").mkdir(parents=True)
    for way in ("run", "var"):  # the way to the logs may be closed
        (base / "root" / way).chmod(0o700)
    process = ProcessFacts(9, 0.0, cgroup="0::/pods/mps\n")
    return DaemonFacts("/run/pipe", "/var/log", process=process)


def test_the_way_of_a_server_and_its_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = made_up_daemon(tmp_path)
    group = tmp_path / "cgroup" / "pods" / "mps"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("52428800\n")
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr(process_view, "CGROUPS", str(tmp_path / "cgroup"))
    owner = (tmp_path / "proc").stat().st_uid
    view = view_daemon(facts, {owner, owner + 1}, str(tmp_path / "proc"))
    why = f"/run is closed to user {owner + 1} (mode 0700)"
    assert view.closed == {owner + 1: ClosedFolder("/run", why, owner)}
    assert (view.oom_kills, view.memory_limit_bytes) == (2, 50 << 20)
    (group / "memory.max").write_text("max\n")
    assert view_daemon(facts, (), str(tmp_path / "proc")).memory_limit_bytes is None


@pytest.mark.parametrize(
    ("mode", "ours", "supplementary", "closed"),
    [
        # Of the daemon's group, as measured on an H200.
        (0o701, True, False, True),
        (0o705, True, False, True),
        (0o710, True, False, False),
        (0o711, True, False, False),
        # Of another group: the client's own does not count.
        (0o710, False, False, True),
        (0o701, False, False, False),
        # Whether a server keeps the daemon's supplementary groups is not known.
        (0o710, False, True, False),
        (0o701, False, True, False),
        (0o700, False, True, True),
    ],
)
def test_a_server_has_the_group_of_its_daemon(
    tmp_path: Path, mode: int, ours: bool, supplementary: bool, closed: bool
) -> None:
    facts = made_up_daemon(tmp_path)
    folder = tmp_path / "proc" / "9" / "root" / "run"
    group = folder.stat().st_gid
    gid = group if ours else group + 1
    more = group if supplementary else ""
    status = tmp_path / "proc" / "9" / "status"
    status.write_text(f"Gid:\t{gid}\t{gid}\t{gid}\t{gid}\nGroups:\t{more} \n")
    folder.chmod(mode)
    user = folder.stat().st_uid + 1
    assert (user in view_daemon(facts, {user}, str(tmp_path / "proc")).closed) is closed


def test_an_access_list_may_let_a_user_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = made_up_daemon(tmp_path)
    user = (tmp_path / "proc").stat().st_uid + 1
    assert view_daemon(facts, {user}, str(tmp_path / "proc")).closed
    monkeypatch.setattr("os.listxattr", lambda _path, **_how: ["user.x", "system.posix_acl_access"])
    assert view_daemon(facts, {user}, str(tmp_path / "proc")).closed == {}


def test_a_daemon_that_is_gone() -> None:
    assert view_daemon(DaemonFacts("/x", ""), {1}) == DaemonConditions()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    facts = DaemonFacts("/x", "", process=ProcessFacts(process.pid, 0.0))
    assert view_daemon(facts, {1}) == DaemonConditions()

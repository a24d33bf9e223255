"""Why a server could not start: said only where it is proved. On a real host and made-up ones."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mps_exporter.findings import recent_incidents
from mps_exporter.observations import ClosedFolder, DaemonConditions, DaemonFacts, ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Snapshot
from mps_exporter.sources import process_view
from mps_exporter.sources.process_view import view_daemon
from testing.player import snapshot_at


def failed(**changes: object) -> Snapshot:
    """The host of the recording after six failed starts, with another daemon if need be."""
    snapshot = snapshot_at("crash-loop", 0.7)
    (daemon,) = snapshot.daemons
    return replace(snapshot, daemons=(replace(daemon, **changes),))  # type: ignore[arg-type]


def told(snapshot: Snapshot, view: DaemonConditions | None = None) -> tuple[str, str]:
    """Evidence and remedy of the failed start."""
    (daemon,) = snapshot.daemons
    views = {daemon.pipe_directory: view} if view is not None else None
    (one,) = (
        one
        for one in recent_incidents(snapshot, views=views)
        if one.advice.name == "server_start_failed"
    )
    return one.evidence, one.remedy


def unexplained(daemon: ControlDaemon) -> dict[str, object]:
    """The same daemon, run by root, whose log has no reason."""
    incidents = tuple(replace(one, detail="exit status 1") for one in daemon.incidents)
    return {"uid": 0, "incidents": incidents}


def made_up(**changes: object) -> Snapshot:
    (daemon,) = (failed()).daemons
    return failed(**{**unexplained(daemon), **changes})


def test_without_proof_no_cause_is_named() -> None:
    evidence, remedy = told(made_up())
    assert evidence.endswith(
        "Its cause could not be seen. The last lines of server.log show what it did."
    )
    assert remedy


@pytest.mark.parametrize(
    ("view", "words", "remedy"),
    [
        (
            DaemonConditions(closed={0: ClosedFolder("/run/x", "/run/x is closed to user 0")}),
            "Cause: in the daemon's root, /run/x is closed",
            "pass that folder",
        ),
        (
            DaemonConditions(oom_kills=2, memory_limit_bytes=50 << 20),
            "Possible: the kernel has ended 2 processes of the daemon's control group, since its "
            "host memory of 50.0 MiB ran out",
            "Raise the memory limit",
        ),
        (
            DaemonConditions(
                closed={1002: ClosedFolder("/run/x", "/run/x is closed")}, oom_kills=0
            ),
            "not be seen",
            "",
        ),
    ],
)
def test_what_the_daemon_itself_shows(view: DaemonConditions, words: str, remedy: str) -> None:
    evidence, said = told(made_up(), view)
    assert words in evidence
    assert remedy in said


@pytest.mark.parametrize(
    ("user", "closed", "root", "command"),
    [
        (0, {0: ClosedFolder("/run/a b", "/run/a b is closed", 0)}, "", "chmod a+x '/run/a b'"),
        (None, {0: ClosedFolder("/run/a b", "/run/a b is closed", 0)}, "", ""),
        (0, {0: ClosedFolder("/run/x", "/run/x is closed", 1001)}, "", ""),
        (0, {0: ClosedFolder("/run/x", "/run/x is closed", 0)}, "/proc/9/root", ""),
        (0, {0: ClosedFolder("/run/\x1b", "/run/ is closed", 0)}, "", ""),
        (0, {1002: ClosedFolder("/run/x", "/run/x is closed", 0)}, "", ""),
        (0, {}, "", ""),
    ],
)
def test_the_command_that_opens_a_folder_of_this_host(
    user: int | None, closed: dict[int, ClosedFolder], root: str, command: str
) -> None:
    snapshot = made_up(facts=DaemonFacts("/run/x/mps", "/log", root=root, owner_uid=0))
    (daemon,) = snapshot.daemons
    incidents = tuple(replace(one, uid=user) for one in daemon.incidents)
    snapshot = replace(snapshot, daemons=(replace(daemon, incidents=incidents),))
    views = {daemon.pipe_directory: DaemonConditions(closed)}
    (one,) = recent_incidents(snapshot, views=views)
    assert [one.command for one in one.actions] == ([command] if command else [])
    assert user is not None or "Cause:" not in one.evidence


def test_the_devices_and_the_modes_of_the_gpus() -> None:
    evidence, remedy = told(made_up(visible_devices="97"))
    assert "its CUDA_VISIBLE_DEVICES is '97', which names no GPU of this host" in evidence
    assert "UUIDs" in remedy
    snapshot = made_up(visible_devices="0")
    (gpu,) = snapshot.gpus
    for mode, pids, words in (
        ("prohibited", (), "Cause: the compute mode of GPU 0 is prohibited"),
        ("exclusive_process", (77,), "Cause: process 77 has GPU 0"),
        ("exclusive_process", (), "could not be seen"),
    ):
        changed = replace(
            gpu, observation=replace(gpu.observation, compute_mode=mode), direct_pids=pids
        )
        assert words in told(replace(snapshot, gpus=(changed,)))[0]


def test_what_only_may_be_the_cause_is_called_so() -> None:
    facts = DaemonFacts("/x", "", process=ProcessFacts(9, 0.0, namespace_pids=(9, 1)))
    snapshot = made_up(facts=facts)
    (gpu,) = snapshot.gpus
    old = replace(gpu, observation=replace(gpu.observation, compute_capability=(6, 1)))
    evidence, remedy = told(replace(snapshot, gpus=(old,)))
    assert "could not be seen" in evidence
    assert "Possible: the daemon has a PID namespace of its own" in evidence
    assert "GPU 0 is older than Volta" in evidence
    assert "hostPID" in remedy
    volta = replace(gpu, observation=replace(gpu.observation, compute_capability=(7, 0)))
    assert "older than Volta" not in told(replace(snapshot, gpus=(volta,)))[0]


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

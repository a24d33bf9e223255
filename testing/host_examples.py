"""Examples of what the doctor finds on a host, beyond one host for each finding.

tests/golden/doctor-host.txt contains the texts, also of testing/finding_hosts.py;
`python -m testing.golden` writes them again.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mps_exporter.commands.doctor_report_and_status import (
    Diagnosis,
    diagnosis_exit_status,
    diagnosis_lines,
)
from mps_exporter.findings import recent_incidents
from mps_exporter.observations import (
    ClosedFolder,
    DaemonConditions,
    DaemonFacts,
    Leftovers,
    LogState,
    MpsDirectory,
    OpenFiles,
    ProcessFacts,
    Reading,
)
from mps_exporter.snapshot import Client, ClientState, ControlDaemon, Handover, Server, Snapshot
from testing.finding_hosts import DAEMON, PIPE, SYNTHETIC, client, daemon, gpu, host, job
from testing.player import snapshot_at

GIB = 1 << 30
FOUR: dict[str, Any] = {"default_pinned_memory_limit_bytes": {"GPU-a": 4 * GIB}}
HALF: dict[str, Any] = {"default_active_thread_ratio": 0.5}

STATES: tuple[tuple[ClientState, float], ...] = (
    *(("connecting", 1000.0), ("creating_context", 29.0), ("creating_context", 31.0)),
    *(("active", 1000.0), ("torn_down", 1.0)),
)
"""States of a client, and seconds in them."""

LIMITS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"active_thread_ratio": 1.0}, HALF),
    ({"active_thread_ratio": 0.5}, HALF),
    ({"active_thread_ratio": 0.25}, HALF),
    ({}, HALF),
    ({"limit_source": "server"}, FOUR),
    ({"limit_source": "server", "memory_limit_bytes": {"GPU-a": 8 * GIB}}, FOUR),
    ({"limit_source": "server", "memory_limit_bytes": {"GPU-a": 4 * GIB}}, FOUR),
    ({"limit_source": "unknown"}, FOUR),
    ({"limit_source": "server", "contexts": {"GPU-b": 1}}, FOUR),
)
"""Limits of a client with a context on GPU-a, and defaults of its daemon."""

THREE = job(0.2, 0.2, memory_limit_bytes={"GPU-a": 3 * GIB})
JOBS = (
    *(job(0.5, 0.5), job(0.25, 0.25), job(0.5), replace(THREE, **FOUR)),
    replace(job(1.0, 1.0), default_active_thread_ratio=1.0),
)
IDLE = ((0.25, 0.24, ()), (0.25, 0.1, ()), (0.9, 0.89, ()), (None, 0.2, ()), (0.25, 0.24, (9,)))
"""SMs that the limits allow, the active part of all SMs, and processes without MPS."""


def examples() -> Iterator[tuple[str, Snapshot]]:
    yield from SYNTHETIC.items()
    for state, seconds in STATES:
        running = client(state=state, state_since=1000.0 - seconds)
        yield f"a client in state {state} for {seconds:.0f} s", host(running, at=1000.0)
    hit = Client(30, 20, state="torn_down", state_since=1.0), Client(31, 20, state="active")
    for number in (2, 1):
        server = Server(20, state="FAULT", clients_connected=2, clients=hit[-number:])
        yield f"a fault; {number} of 2 clients are known", host(daemon(servers=(server,)), at=9.0)
    for own, default in LIMITS:
        limited = replace(client(**{"contexts": {"GPU-a": 1}, **own}), **default)
        yield f"limits {own} of a client, {default}", host(limited)
    for number, one in enumerate(JOBS):
        yield f"shares of a job ({number})", host(one)
    for allowed, activity, direct in IDLE:
        card = replace(gpu(readings=(Reading("sm_activity", activity),)), direct_pids=direct)
        title = f"{allowed} of the SMs are allowed, {activity} active, {len(direct)} without MPS"
        yield title, Snapshot(1.0, gpus=(replace(card, sm_committed_ratio=allowed),))
    for asked in ("answering", None):
        yield f"a daemon in state {asked}", host(daemon(asked, logs=READ, servers_count=0))
    process = ProcessFacts(
        5, 1.0, cgroup="0::/system.slice/m.service", mps_environment={"CUDA_VISIBLE_DEVICES": "1;x"}
    )
    last = DaemonFacts(PIPE, "/l", process=process, multiuser=True)
    for limited_ in (False, True):
        gone = daemon(state="absent", pid=None, last=replace(last, limited=limited_))
        yield f"an absent daemon whose last process was a user's: {limited_}", host(gone)


READ = tuple(LogState(PIPE, log, f"/l/{log}.log", readable=True) for log in ("control", "server"))
GROUP = f"/sys/fs/cgroup/system.slice/docker-{'0a' * 32}.scope"


def hung() -> Iterator[tuple[str, Snapshot]]:
    """Yield hosts whose daemon 10 does not answer; client 30 of its server 952 works."""
    its = ProcessFacts(952, 2.0, 1001, "ann", "nvidia-cuda-mps-server", "S", 10)
    busy = Server(952, state="ACTIVE", ghost=False, clients_connected=1)
    busy = replace(busy, clients=(Client(30, 952, state="active"),))
    for title, control, server, more in (
        ("the daemon is stopped", replace(DAEMON, state="T"), its, {}),
        ("the server is stopped", DAEMON, replace(its, state="T"), {}),
        ("the server is traced", DAEMON, replace(its, state="t", tracer="77 (gdb)"), {}),
        ("the daemon's container is frozen", replace(DAEMON, frozen_group=GROUP), its, {}),
        ("a group in it is frozen", replace(DAEMON, frozen_group=f"{GROUP}/init"), its, {}),
        ("a group is frozen", DAEMON, replace(its, frozen_group="/sys/fs/cgroup/a b"), {}),
        ("a ghost", DAEMON, its, {"servers": (replace(busy, ghost=True, clients=()),)}),
        ("nothing else is seen", DAEMON, its, {}),
        ("no log is read", DAEMON, its, {"logs": ()}),
    ):
        facts = DaemonFacts(PIPE, "/l", process=control, servers=(server,))
        last: dict[str, Any] = {"logs": READ, "handover": Handover(0.5, 40, 1002)}
        seen = {"facts": facts, "servers": (busy,), **last, **more}
        yield f"a daemon that hangs: {title}", host(daemon("unresponsive", **seen))


CLOSED = ClosedFolder("/run/x", "/run/x is closed to user 0", 0)


def failed_starts() -> Iterator[tuple[str, Snapshot, DaemonConditions]]:
    """Yield hosts where a server for root could not start, and the conditions of the daemon."""
    recorded, nothing = snapshot_at("crash-loop", 0.7), DaemonConditions()
    yield "a failed start of another user's daemon", recorded, nothing
    (its,), (card,) = recorded.daemons, recorded.gpus
    silent = tuple(replace(one, detail="exit status 1") for one in its.incidents)
    facts = DaemonFacts("/run/x/mps", "/log", owner_uid=0)
    its = replace(its, uid=0, incidents=silent, facts=facts)

    def of(one: ControlDaemon, **more: Any) -> Snapshot:
        return replace(recorded, daemons=(one,), **more)

    inner = replace(facts, process=ProcessFacts(9, 0.0, namespace_pids=(9, 1)))
    no_user = replace(its, incidents=tuple(replace(one, uid=None) for one in silent))
    elsewhere = replace(its, facts=replace(facts, root="/proc/9/root"))
    yield "a failed start without a known cause", of(its), nothing
    for title, one, closed in (
        ("a folder is closed", its, CLOSED),
        ("a folder with a space is closed", its, replace(CLOSED, path="/run/a b")),
        ("a folder that cannot be printed", its, replace(CLOSED, path="/run/\x1b")),
        ("another user's folder is closed", its, replace(CLOSED, owner_uid=1001)),
        ("a folder is closed in the daemon's root", elsewhere, CLOSED),
        ("a folder is closed to root, and the user is not known", no_user, CLOSED),
    ):
        yield f"a failed start: {title}", of(one), DaemonConditions({0: closed})
    yield (
        "a failed start: a folder is closed to another user",
        of(its),
        DaemonConditions({1002: CLOSED}),
    )
    memory = DaemonConditions(oom_kills=2, memory_limit_bytes=50 << 20)
    yield "a failed start: host memory ran out", of(its), memory
    yield (
        "a failed start: CUDA_VISIBLE_DEVICES names no GPU",
        of(replace(its, visible_devices="97")),
        nothing,
    )
    yield "a failed start: a PID namespace of its own", of(replace(its, facts=inner)), nothing
    for title, seen, pids in (
        ("prohibited", {"compute_mode": "prohibited"}, ()),
        ("a process has the GPU", {"compute_mode": "exclusive_process"}, (77,)),
        ("nobody has the GPU", {"compute_mode": "exclusive_process"}, ()),
        ("Pascal", {"compute_capability": (6, 1)}, ()),
        ("Volta", {"compute_capability": (7, 0)}, ()),
    ):
        changed: Any = replace(card.observation, **seen)
        gpus = (replace(card, observation=changed, direct_pids=pids),)
        yield f"a failed start: {title}", of(its, gpus=gpus), nothing


LEFT = Leftovers(
    zombies=(ProcessFacts(12, 0.0, parent_pid=10, state="Z"),),
    orphans=(ProcessFacts(13, 0.0, uid=1001),),
    directories=(
        MpsDirectory("/tmp/nvidia-mps", 1001),
        MpsDirectory("/tmp/of-root", 0),
        MpsDirectory("/srv/mps", 0, "the enabled unit mps.service"),
    ),
    open_files=(OpenFiles(20, PIPE, 72, 70), OpenFiles(21, PIPE, 72, 60), OpenFiles(22, PIPE, 72)),
    holders=(ProcessFacts(10, 0.0, name="x\x1b[2J"),),
)


def diagnoses() -> Iterator[tuple[str, Diagnosis]]:
    made = (*examples(), *hung())
    hosts = [(title, snapshot, DaemonConditions()) for title, snapshot in made]
    for title, snapshot, conditions in (*hosts, *failed_starts()):
        views = {one.pipe_directory: conditions for one in snapshot.daemons}
        yield title, Diagnosis(snapshot, recent_incidents(snapshot, views=views))
    found, file = Snapshot(1.0), Path("/var/lib/x/incident-fault.rec.gz")
    yield "leftovers", Diagnosis(found, traces=LEFT)
    two = Leftovers(zombies=LEFT.zombies * 2, directories=LEFT.directories[1:2])
    yield "leftovers: two processes, and a directory of root", Diagnosis(found, traces=two)
    yield (
        "what is not read in time, and a recording",
        Diagnosis(found, unread=("/a\x1b", "what MPS left on the host"), recording=file),
    )


def doctor_host_text() -> str:
    lines = list[str]()
    for title, seen in diagnoses():
        lines += [f"== {title}: status {diagnosis_exit_status(seen)}", *diagnosis_lines(seen), ""]
    return "\n".join(lines)

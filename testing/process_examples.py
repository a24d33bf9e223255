"""Examples for `doctor --pid` and `doctor --before-kill`: recorded hosts, and hosts made by hand.

tests/golden/doctor-pid.txt and doctor-before-kill.txt contain the texts; `python -m testing.golden`
writes them again.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mps_exporter.commands.doctor_report_and_status import (
    checks_as_text,
    checks_exit_status,
    status_of_ends,
)
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.findings.before_kill import before_kill
from mps_exporter.findings.doctor_pid import check_process
from mps_exporter.observations import ContainerName, DaemonFacts, ProcessFacts, ProcessView
from mps_exporter.snapshot import CollectorName, CollectorResult, Snapshot, Wait
from testing.player import snapshot_at
from testing.snapshots import NOW, client, daemon, process_using, server, snapshot

Example = tuple[str, Snapshot, ProcessView | int]
"""What it shows, the host, and the process: its facts, or the PID of a recorded one."""

NEWCOMER = 77  # A process that is not recorded: it uses the daemon, and has made no context.

RECORDED = (
    *(("wait-served", 0.6, 705), ("deaf-server", 9.1, 6421), ("deaf-with-clients", 30.0, NEWCOMER)),
    *(("fault-held", 2.9, 1168), ("fault-held", 2.9, 1201), ("ending-jobs", 54.1, 2172)),
    *(("ending-jobs", 54.1, 2192), ("ending-jobs", 4.8, 1663), ("server-killed", 2.9, 744)),
    *(("memory-ordinals", 0.6, 3989), ("containers", 11.0, 976), ("draining", 1.7, 1073)),
    *(("tour", 40.0, 663), ("three-users", 3.0, 1078), ("three-users", 3.0, 1083)),
    *(("deaf-server", 20.0, 6476), ("wait-abandoned-sigkill", 12.0, 871)),
    *(("stopped", 5.8, 948), ("context-limit", 12.0, NEWCOMER), ("percentages", 0.9, 1797)),
)

ELSEWHERE = {"pipe_directory": "/srv/m p", "daemon_directory": None}
CLIENT: dict[str, dict[str, Any]] = {
    "nothing is wrong": {},
    "not reaped": {"state": "Z", "parent_pid": 9},
    "gone": {"present": False},
    "inside the kernel": {"state": "D"},
    "traced": {"state": "t", "tracer": "9 (gdb)"},
    "a path that is too long": {"pipe_directory": "/" + "p" * 100},
    "a closed path": {"path_error": "/a is closed to user 1001 (mode 0700)"},
    "a library is missing": {"debug_variables": ("A_PATH", "B"), "missing_libraries": ("A_PATH",)},
    "debugging": {"debug_variables": ("CUDA_INJECTION64_PATH",)},
    "host memory ran out": {"oom_kills": 2},
    "the environment cannot be read": {"pipe_directory": None},
    "the path to the directory hangs": {"pipe_directory": None, "reading_hangs": True},
    "no GPU is visible, but it has a context": {"mps_environment": {"CUDA_VISIBLE_DEVICES": ""}},
}
NEW: dict[str, dict[str, Any]] = {
    "it has named the directory": {},
    "a profile names the directory": {"profile": "/etc/profile.d/a.sh"},
    "the default directory is mounted": {"names_directory": False, "default_mounted": True},
    "the default directory": {"names_directory": False},
    "the /proc of another namespace": {"own_proc": False},
    "a container hides the host": {**ELSEWHERE, "hidden": "all"},
    "no daemon has the directory": ELSEWHERE,
    "its daemon is gone; a user chose the directory": {**ELSEWHERE, "leftover": True},
    "its daemon is gone; root chose the directory": {**ELSEWHERE, "leftover": True, "uid": 0},
    "the directory is not in its container": {"daemon_directory": None},
    "its files in /proc cannot be read": {**ELSEWHERE, "state": "", "pipe_directory": None},
    "it has started others": {"children": (78, 79)},
}
VARIABLES = (
    *(("PINNED_DEVICE_MEM_LIMIT", "0=100M,1=4G"), ("PINNED_DEVICE_MEM_LIMIT", "0=1G")),
    *(("VISIBLE_DEVICES", text) for text in ("", "1", "-1", "GPU-f", "0", "MIG-7")),
)


def examples() -> Iterator[Example]:
    for recording, at, pid in RECORDED:
        host = snapshot_at(recording, at)
        yield f"{recording} at {at} s", host, _newcomer(host) if pid == NEWCOMER else pid
    host = snapshot_at("percentages", 0.9)
    old, new = replace(_newcomer(host), pid=1797), _newcomer(host)
    for title, changes in CLIENT.items():
        yield f"client: {title}", host, replace(old, **changes)
    for title, changes in NEW.items():
        yield f"newcomer: {title}", host, replace(new, **changes)
    few = replace(new, mps_environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1"})
    for model, capability in (("Hopper", (9, 0)), ("Ampere", (8, 0))):
        card = replace(host.gpus[0].observation, compute_capability=capability)
        its_gpus = (replace(host.gpus[0], observation=card),)
        yield f"newcomer: 1 % of {model}", replace(host, gpus=its_gpus), few
    for name, text in VARIABLES:
        variable = f"CUDA_{'MPS_' if name.startswith('PINNED') else ''}{name}"
        yield f"newcomer: {variable}={text}", host, replace(new, mps_environment={variable: text})
    yield from _with_another_daemon(host, old, new)
    yield from _without_daemon(host, new)
    waits = snapshot_at("wait-served", 0.6)
    pods = tuple(
        ContainerName("containerd://6", "team-a", pod, "main", (pid,))
        for pod, pid in (("training", 705), ("holder", 694))
    )
    yield "wait-served with the names of pods", replace(waits, containers=pods), 705
    inner = DaemonFacts("/d", "/l", process=ProcessFacts(9, 0.0, namespace_pids=(9, 1)))
    for title, queue in (("it may wait", waits.daemons[0].waits), ("nobody waits", ())):
        nameless = tuple(replace(wait, pid=0) for wait in queue)
        daemon = replace(waits.daemons[0], facts=inner, waits=nameless)
        yield (
            f"container's daemon: {title}",
            replace(waits, daemons=(daemon,)),
            replace(_newcomer(waits), uid=1002),
        )


def _newcomer(host: Snapshot) -> ProcessView:
    running = next(one for one in host.daemons if one.state != "absent")
    return process_using(running.pipe_directory, NEWCOMER)


def _with_another_daemon(host: Snapshot, old: ProcessView, new: ProcessView) -> Iterator[Example]:
    (its,) = (one for one in host.daemons if one.servers)
    (only,) = its.servers
    shut = tuple(replace(log, readable=False) for log in its.logs)
    mapped = replace(its.facts, process=ProcessFacts(9, 0.0, shared_memory="0:2"))
    by_file = {"facts": mapped, "servers": (replace(only, shares_by_file=True),)}

    def with_client(**changes: Any) -> dict[str, Any]:
        clients = (replace(one, state_since=1.0, **changes) for one in only.clients)
        return {"servers": (replace(only, clients=tuple(clients)),)}

    changed: tuple[tuple[str, dict[str, Any], ProcessView], ...] = (
        ("client: a limiter", with_client(limiter="HAMi-core"), old),
        ("client: it connects", with_client(state="connecting", contexts={}), old),
        ("client: unknown limits", with_client(environment_readable=False), old),
        ("newcomer: the daemon is gone", {"state": "absent", "servers": ()}, new),
        ("newcomer: the daemon is another user's", {"uid": 1001}, replace(new, uid=1002)),
        ("newcomer: MPS v3 shows no queue", {"protocol": "3"}, new),
        ("newcomer: control.log is closed", {"logs": shut}, new),
        (
            "newcomer: the log directory is not known",
            {"logs": shut, "facts": replace(its.facts, log_directory_assumed=True)},
            new,
        ),
        ("newcomer: a /dev/shm of its own", by_file, replace(new, shared_memory="0:9")),
        ("newcomer: the daemon's /dev/shm", by_file, replace(new, shared_memory="0:2")),
        (
            "newcomer: a /dev/shm of its own, and memory without a name",
            {"facts": mapped},
            replace(new, shared_memory="0:9"),
        ),
    )
    for title, changes, view in changed:
        yield title, replace(host, daemons=(replace(its, **changes),)), view


def _without_daemon(host: Snapshot, new: ProcessView) -> Iterator[Example]:
    alone = replace(host, daemons=())
    lost = replace(new, names_directory=False, daemon_directory=None)
    gpus = (replace(host.gpus[0], direct_pids=(NEWCOMER,)),)
    failed = CollectorResult("nvml", False, 0.1, error="libnvidia-ml.so.1 was not found")
    yield "no daemon: nothing was meant for MPS", alone, lost
    yield "no daemon: it has a context", replace(alone, gpus=gpus), lost
    yield "no daemon: an earlier one has left files", alone, replace(lost, leftover=True)
    yield "the GPUs cannot be read", replace(host, gpus=(), collectors=(failed,)), new
    stranded = snapshot_at("stranded", 0.9, 2.0)
    (pid,) = stranded.gpus[0].stranded_pids or ()
    its = replace(_newcomer(stranded), pid=pid, daemon_directory=None)
    yield "stranded: the daemon runs", stranded, its
    yield "stranded: the daemon is gone, too", replace(stranded, daemons=()), its


def doctor_pid_text() -> str:
    lines = list[str]()
    for title, host, process in examples():
        pid, view = (process, None) if isinstance(process, int) else (process.pid, process)
        found = (*findings(host), *recent_incidents(host))
        checks = {pid: check_process(pid, host, found, view)}
        lines += [f"== {title}: status {checks_exit_status(checks)}", checks_as_text(checks), ""]
    return "\n".join(lines)


OTHER_GPU = "GPU-00000002-0000-4000-8000-000000000002"
BUSY = client(11)
CLIENTS = (
    BUSY,
    client(12, uid=1002, user="bob"),
    client(13, contexts={OTHER_GPU: 1}),
    client(14, state="torn_down"),
    client(15, contexts={}),
)
SHARED: Snapshot = snapshot(daemon(server(*CLIENTS)))
"""Two busy clients on one GPU."""


def ends() -> Iterator[tuple[str, Snapshot, int, dict[str, Any]]]:
    """Yield what is shown, the host, the process that is to end, and what else is known of it."""
    hung = client(11, state="connecting", contexts={})
    queued = Wait(700, 1002, NOW - 10, 1001)
    yield "it shares a GPU", SHARED, 11, {}
    pod = ContainerName("containerd://6", "team-a", "training", "main", (11,))
    yield "its pod is known", replace(SHARED, containers=(pod,)), 11, {}
    yield "the only one on its GPU", snapshot(daemon(server(BUSY))), 11, {}
    yield "MPS v3", snapshot(daemon(server(*CLIENTS), protocol="3")), 11, {}
    yield "the daemon", SHARED, 600, {}
    yield "its server", SHARED, 634, {}
    yield "exited", SHARED, 99, {"gone": True}
    yield "no client", SHARED, 99, {}
    yield "no client, but not all is visible", SHARED, 99, {"hidden": "a host"}
    yield "no client, but no log is readable", snapshot(daemon(server(), logs=())), 99, {}
    sources: tuple[CollectorName, ...] = ("control", "nvml")
    for name in sources:
        failed = (CollectorResult(name, success=False, duration_seconds=1.0),)
        yield f"no client; {name} could not be read", replace(SHARED, collectors=failed), 99, {}
    for text, of_client, of_daemon in (
        ("no log is readable", {}, {"logs": ()}),
        ("not all are shown", {}, {"dropped_clients": 1}),
        ("one on an unknown GPU", {"": 1}, {}),
    ):
        its = daemon(server(client(11, contexts=of_client)), **of_daemon)
        yield f"a client, {text}", snapshot(its), 11, {}
    lost = server(client(11, contexts={}), ghost=None)
    yield "a client without a context, of what may be a ghost", snapshot(daemon(lost)), 11, {}
    yield "it waits", snapshot(daemon(server(BUSY), waits=(queued,))), 700, {}
    nameless = snapshot(daemon(server(BUSY), waits=(replace(queued, pid=0),)))
    for uid in (1001, 1002):
        yield f"user 1002 waits in a container; of user {uid}", nameless, 77, {"uid": uid}
    yield "a daemon of MPS v3", snapshot(daemon(server(BUSY), protocol="3")), 77, {}
    for text, one in (
        ("a ghost", server(hung, ghost=True)),
        ("a ghost whose process was not seen", server(hung, ghost=True, confirmed=False)),
        ("a ghost with a busy client", server(BUSY, ghost=True)),
        ("a server with a client that hangs", server(hung)),
        ("a server without clients", replace(server(), clients_connected=0)),
        ("a server with unknown clients", replace(server(), clients_connected=None)),
        ("a server, whose clients are not shown", replace(server(), clients_connected=2)),
    ):
        yield text, snapshot(daemon(one)), 634, {}


def before_kill_text() -> str:
    lines = list[str]()
    for title, host, pid, known in ends():
        end = before_kill(pid, host, **known)
        status, text = status_of_ends([end], as_json=False, many=False)
        lines += [f"== {title}: status {status}", text, ""]
    return "\n".join(lines)

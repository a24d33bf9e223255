"""Checks of one process that hangs, fails or runs without MPS, in the order of a CUDA start.

Pure: the input is a snapshot of the host and, on a live host, the /proc facts of the process. The
conclusion is the first problem, else the first warning (see conclusion()).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Literal

from mps_exporter import humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings import (
    daemons_and_servers,
    gpus,
    incidents_and_leftovers,
    limits,
    visibility,
)
from mps_exporter.findings.daemons_and_servers import WITHOUT_MPS, halt_of
from mps_exporter.findings.finding import (
    Action,
    Finding,
    FindingType,
    HostFacts,
    clients_of,
    open_folder,
    permitted,
    quoted_path,
    shown_path,
)
from mps_exporter.findings.incidents_and_leftovers import nameable_gpus
from mps_exporter.findings.limits import NO_EFFECT, gpu_name
from mps_exporter.humanize import UserNames, memory, printable
from mps_exporter.mps import client_limits
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.mps.tool_commands import SOCKET_PATH_BYTES, path_bytes
from mps_exporter.observations import DaemonFacts, ProcessFacts, ProcessView
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Snapshot, Wait

HOPPER = (9, 0)

_REFUSED = "cuda-error-805-mps-connection-failed"
_HANGS_IN_INIT = "a-program-hangs-in-cuinit"
_LOST = "all-programs-died-at-once"
_LOST_SERVER = "cuda-error-806-mps-rpc-failure"
_BAD_POINTER = "cuda-error-700-illegal-address-under-mps"
_NO_MEMORY = "cuda-error-2-out-of-memory-under-mps"
_UNAVAILABLE = "cuda-error-46-devices-unavailable"
_TOO_MANY = "cuda-error-808-809-mps-max-clients-reached"
_NO_VISIBLE_GPU = "invalid-cuda-visible-devices"
_REFUSALS = {
    "context_limit": _TOO_MANY,
    "server_not_ready": "cuda-error-807-mps-server-not-ready",
    "invalid_device": _NO_VISIBLE_GPU,
}
_HISTORY = {
    "unfinished_work": _LOST,
    "fault": _BAD_POINTER,
    "server_crashed": _LOST_SERVER,
    "daemon_died": _LOST_SERVER,
    "client_terminated": "cuda-error-810-mps-client-terminated",
    "client_rejected": _UNAVAILABLE,
}
"""Incidents that deprive a process of its GPU -> page about the CUDA error."""

_UNSEEN = "its files in /proc cannot be read (exited, or hidden)"

Outcome = Literal["ok", "problem", "warning", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    outcome: Outcome
    text: str
    remedy: str = ""
    page: str = ""  # See page_url().
    command: str = ""
    """The remedy as one line of a shell; "" if there is no such command. A command that sets
    or unsets a variable is for the shell from which the process is restarted."""
    run_as: str = ""  # Users that may run the command; "" for any user.


Checks = Iterator[Check]
# check_process() sets the names.
ok, problem = partial(Check, "", "ok"), partial(Check, "", "problem")
warning, unknown = partial(Check, "", "warning"), partial(Check, "", "unknown")


_QUEUED = daemons_and_servers.several_users_one_daemon
_BLOCKING = (
    daemons_and_servers.ghost_server,
    daemons_and_servers.daemon_unresponsive,
    daemons_and_servers.daemon_draining,
    daemons_and_servers.server_starting_long,
)
_REFUSING = (
    daemons_and_servers.server_in_fault,
    incidents_and_leftovers.server_start_failed,
    incidents_and_leftovers.server_out_of_descriptors,
)
_CONNECTION = {
    gpus.stranded_client: _LOST_SERVER,
    daemons_and_servers.queued_client_dead: "",
    _QUEUED: "",
    daemons_and_servers.shared_memory_not_mapped: "",
    daemons_and_servers.client_stuck: "",
    gpus.process_bypasses_mps: NO_EFFECT,
    gpus.pipe_directory_mismatch: NO_EFFECT,
    gpus.daemon_not_reached: NO_EFFECT,
    gpus.daemon_missing: NO_EFFECT,
}
"""Findings about a process itself, and the pages about its error; "" for the finding's own."""
_LIMITS = (
    limits.percentage_ignored,
    limits.memory_limit_ignored,
    limits.limit_looser_than_default,
    limits.sm_partition_mismatch,
    limits.limiter_under_mps,
    visibility.environment_unreadable,
)


@dataclass(frozen=True)
class Subject:
    """A process and its role in MPS."""

    pid: int
    snapshot: Snapshot
    found: tuple[Finding, ...]  # Findings of the snapshot, and its recent incidents.
    view: ProcessView
    recorded: bool  # The view is empty: a recording has no /proc files of the process.

    @cached_property
    def alone(self) -> HostFacts:
        """The host with only this process as client, in queues and on GPUs."""
        daemons, devices = [], []
        for daemon in self.snapshot.daemons:
            servers = tuple(
                replace(server, clients=tuple(one for one in server.clients if one.pid == self.pid))
                for server in daemon.servers
            )
            daemons.append(replace(daemon, servers=servers, waits=_waits_of(self.pid, daemon)))
        for gpu in self.snapshot.gpus:
            direct = tuple(one for one in gpu.direct_processes if one.pid == self.pid)
            lost = tuple(one for one in gpu.stranded_pids or () if one == self.pid)
            alone = replace(gpu, stranded_pids=lost, stranded_clients=len(lost))
            devices.append(replace(alone, direct_processes=direct))
        host = replace(self.snapshot, daemons=tuple(daemons), gpus=tuple(devices))
        return HostFacts(replace(host, unreadable_environments=None), UserNames(self.snapshot))

    @cached_property
    def daemon(self) -> ControlDaemon | None:
        """Its daemon, without other clients and waits."""
        named = []
        for one in self.alone.daemons:
            last = one.handover is not None and one.handover.pid == self.pid
            if clients_of(one) or one.waits or last:
                return one
            if one.pipe_directory == self.view.daemon_directory:
                named.append(one)
        return named[0] if named else None

    @property
    def ended(self) -> bool:
        return not self.view.present or self.view.state == "Z"

    @property
    def unseen(self) -> bool:
        """Whether nothing of it can be read: /proc hides it, or is not there."""
        return not (self.recorded or self.ended or self.view.state)

    @property
    def client(self) -> Client | None:
        return next((one for each in self.alone.daemons for one in clients_of(each)), None)

    @property
    def in_queue(self) -> HostFacts:
        """The host with all clients, the waits of dead clients, and the process's own waits."""
        queues = tuple(
            replace(one, waits=(*(w for w in one.waits if w.dead), *_waits_of(self.pid, one)))
            for one in self.snapshot.daemons
        )
        return replace(self.alone, snapshot=replace(self.snapshot, daemons=queues))

    @property
    def direct_on(self) -> list[Gpu]:
        return [gpu for gpu in self.snapshot.gpus if self.pid in gpu.direct_pids]

    @property
    def stranded(self) -> bool:
        """Whether it has memory on a GPU and no server any more."""
        return any(gpu.stranded_clients for gpu in self.alone.snapshot.gpus)

    @property
    def working(self) -> bool:
        return bool(self.direct_on or (self.client is not None and self.client.contexts))

    @property
    def environment(self) -> Mapping[str, str]:
        return self.view.mps_environment or {}

    @property
    def running(self) -> list[ControlDaemon]:
        return [one for one in self.snapshot.daemons if one.state != "absent"]

    @property
    def command_to_use_daemon(self) -> str:
        """The command that sets the host's only daemon's directory; "" if several or forbidden."""
        running = [one for one in self.running if not one.facts.root]
        return _first(gpus.use_daemon(running)).get("command", "")

    def facts_at(self, directory: str | None) -> DaemonFacts | None:
        daemons = (one for one in self.snapshot.daemons if one.pipe_directory == directory)
        return next((one.facts for one in daemons), None)


def _first(actions: Iterable[Action]) -> dict[str, str]:
    """Return the first command, and its users, as fields of a check; {} if none."""
    return next(({"command": one.command, "run_as": one.run_as} for one in actions), {})


def _waits_of(pid: int, daemon: ControlDaemon) -> tuple[Wait, ...]:
    """Return a process's waits; an ordinary user's log can claim that any process waits."""
    owner = daemon.facts.user if daemon.facts.limited else None
    return tuple(one for one in daemon.waits if one.pid == pid and owner in (None, one.uid))


def _found_with(one: Subject, daemon: ControlDaemon, advice: FindingType) -> Checks:
    """Yield a finding on the host with this as its only daemon."""
    snapshot = replace(one.alone.snapshot, daemons=(daemon,))
    yield from map(_as_check, advice.found(replace(one.alone, snapshot=snapshot)))


def _as_check(found: Finding, outcome: Outcome = "problem", page: str = "") -> Check:
    healing = _first(one for one in found.actions if one.heals or found.advice is _QUEUED)
    outcome = "unknown" if found.advice.kind == "blindness" else outcome
    return Check("", outcome, found.evidence, found.remedy, page or found.advice.page, **healing)


def _process_checks(one: Subject) -> Checks:
    view, name = one.view, printable(one.view.command or "?")
    if one.recorded:
        yield unknown("a recording has no files of the process itself.")
    elif one.ended:
        text = f"No process {one.pid} is there"
        if view.present:
            parent = f"its parent (process {view.parent_pid}) has not reaped it (state Z)"
            text = f"It ({name}) has ended; {parent}"
        yield warning(f"{text}.")
        yield from map(_as_check, daemons_and_servers.queued_client_dead.found(one.alone))
    elif one.unseen:
        yield unknown(f"whether it runs is not known: {_UNSEEN}.")
    elif (halt := halt_of(view)) is not None:
        text, remedy, commands = halt
        allowed = permitted(commands, one.daemon.facts if one.daemon else None)
        yield problem(f"It ({name}) is {text}.", remedy, **_first(allowed))
    elif view.state == "D":
        yield warning(
            f"It ({name}) is inside the kernel and cannot be interrupted (state D): in the driver, "
            "or on a file system that does not answer.",
            f"cat /proc/{one.pid}/stack, as root, twice: the same function says where.",
        )
    else:
        yield ok(f"It ({name}) runs as user {view.uid}.")


def _directory_checks(one: Subject) -> Checks:
    view, page = one.view, _REFUSED if one.daemon else WITHOUT_MPS
    if one.recorded or one.unseen:
        return
    if view.pipe_directory is None:
        why = "cannot be read (only its user and root may)"
        if view.reading_hangs:
            why = "or its directory could not be read in time (the read hangs)"
        yield unknown(
            f"the environment of the process {why}, so which pipe directory it uses is not known."
        )
        return
    shown = shown_path(view.pipe_directory)
    if (length := path_bytes(f"{view.pipe_directory}/control")) > SOCKET_PATH_BYTES:
        yield problem(
            f"The path of its control socket has {length} bytes, of at most {SOCKET_PATH_BYTES}.",
            "A shorter CUDA_MPS_PIPE_DIRECTORY, for the daemon and its clients.",
            WITHOUT_MPS,
            one.command_to_use_daemon,
        )
    elif view.path_error is not None:
        remedy = "Set a daemon's directory, or mount it into the container; then start it again."
        command = {"command": one.command_to_use_daemon}
        if view.closed_folder is not None:
            # The server runs as the process's user, but with the daemon's group (see view_daemon).
            # No command if no daemon has the directory: the process chose it.
            remedy = "Let its user and the daemon's group pass the folder, and start it again."
            facts = one.facts_at(view.pipe_directory)
            command = _first(open_folder(view.closed_folder, facts))
        yield problem(f"It cannot use {shown}: {view.path_error}.", remedy, page, **command)
    elif view.closed_socket:
        facts = one.facts_at(view.daemon_directory)
        path = quoted_path(f"{facts.pipe_path}/control") if facts is not None else None
        opening = Action(f"chmod a+w {path}", "root, or the daemon's user", "opens the socket")
        yield problem(
            f"Its user {view.uid} may not connect to {shown}/control (mode {view.closed_socket}): "
            "CUDA runs without MPS.",
            "The daemon's user has to allow all users to write to that socket (chmod a+w), or "
            "start the daemon again with a umask that does; then start the process again.",
            WITHOUT_MPS,
            **_first(permitted([opening] if path else (), facts)),
        )
    else:
        source = "the default"
        if view.names_directory:
            setter = f", which {view.profile} sets" if view.profile else ""
            source = f"CUDA_MPS_PIPE_DIRECTORY{setter}"
        elif view.default_mounted:
            source = "the default, which is mounted for it"
        yield ok(f"It uses {shown} ({source}).")


def _foreign_proc_checks(one: Subject) -> Checks:
    if one.view.own_proc is False and not one.working:
        yield problem(
            "It has a PID namespace of its own, and sees the /proc of another: CUDA fails with "
            "error 304 (cudaErrorOperatingSystem).",
            "Mount its own /proc (unshare --mount-proc), or share the PID namespace.",
            "cuda-error-304-operating-system",
        )


def _variable_checks(one: Subject) -> Checks:
    visible = one.environment.get("CUDA_VISIBLE_DEVICES")
    known = nameable_gpus(one.snapshot, one.daemon)
    # A context proves that the process changed the variable.
    if visible is not None and not one.working and client_limits.visible_gpus(visible, known) == ():
        yield problem(
            f"Its CUDA_VISIBLE_DEVICES is {printable(repr(visible))}, which names no GPU.",
            "A UUID of nvidia-smi -L, or an ordinal among the GPUs of its daemon; or unset it for "
            "all GPUs. Then start it again.",
            _NO_VISIBLE_GPU,
            "unset CUDA_VISIBLE_DEVICES",
        )
    if missing := one.view.missing_libraries:
        yield warning(
            f"Its environment has {', '.join(missing)}, which names a file that is not there.",
            "Unset it, and start the process again.",
            command=f"unset {' '.join(missing)}",
        )
    elif slow := one.view.debug_variables:
        yield warning(
            f"Its environment has {', '.join(slow)}: debugging or profiling slows it down or makes "
            "its kernels run one after the other.",
            "Unset them, unless that is meant, and start the process again.",
            "no-speed-up-with-mps",
            f"unset {' '.join(slow)}",
        )


def _daemon_checks(one: Subject) -> Checks:
    view, own = one.view, one.daemon
    if one.stranded:
        return  # no daemon helps it
    if own is None:
        if view.pipe_directory is None:
            yield unknown("which daemon it would use is not known.")
        elif view.path_error is None and not view.closed_socket:
            yield _no_daemon_check(one, view.pipe_directory)
        return
    shown = shown_path(own.pipe_directory)
    if own.state == "absent":
        remedy = "Start it, then the process again."
        yield problem(f"The daemon at {shown} is gone.", remedy, WITHOUT_MPS)
    elif view.uid is not None and own.uid not in (None, 0, view.uid):
        yield problem(
            f"The daemon at {shown} was started by user {own.uid}, and cannot start a server for "
            f"user {view.uid}: the process gets error 805.",
            "Run the daemon as root, or give the process a directory without a daemon.",
            _REFUSED,
        )
    else:
        yield ok(f"The daemon at {shown} is {own.state or 'there'}.")


def _no_daemon_check(one: Subject, directory: str) -> Check:
    view, others = one.view, one.running
    if view.hidden:
        act = "Do not end the process; name its daemon (doctor --pid N --mps.pipe-directory=DIR "
        act += "--mps.log-directory=DIR), or run the doctor as root on the host"
        return unknown(f"{view.hidden} cannot be seen, nor whether a daemon runs. {act}.")
    unsure = bool(visibility.unknowns(one.snapshot))
    if not (others or view.names_directory or view.leftover or one.working):
        # Most processes of a host without a daemon are not meant for MPS.
        text = "no control daemon was seen on this host: nothing shows that it waits for MPS."
        return unknown(text) if unsure else ok("No control daemon runs: it does not wait for MPS.")
    there = f"No control daemon {'was seen' if unsure else 'runs'} on this host."
    if others:
        paths = humanize.join_some([printable(each.pipe_directory) for each in others])
        there = f"Daemons run at {paths}."
    text, act = "No control daemon serves its pipe directory", "start one"
    if view.leftover:
        text, act = "A daemon has run at its pipe directory, and is gone", "start it again"
    # An ordinary user may have chosen the directory: no command for root.
    path = quoted_path(directory) if view.uid == 0 else None
    start = f"CUDA_MPS_PIPE_DIRECTORY={path} nvidia-cuda-mps-control -d" if path else ""
    remedy = humanize.capitalize(act) if view.uid == 0 else f"Ask an administrator to {act}"
    if any(each.pipe_directory == directory for each in others):
        remedy, start = "Mount the host's directory into its container", ""
    elif others and not view.leftover:
        remedy, start = "Set the directory of one that runs", one.command_to_use_daemon
    check = problem if view.names_directory or others else warning
    runs = "runs" if one.working else "would run"
    text += f": it {runs} without MPS, without sharing and without limits. {there}"
    return check(text, f"{remedy}, then start the process again.", WITHOUT_MPS, start)


def _service_checks(one: Subject) -> Checks:
    """Yield its daemon's findings because of which it waits or is refused."""
    if one.daemon is None or one.stranded:
        return
    served = one.client is not None and one.client.state in ("active", "torn_down")
    types = _BLOCKING if served else (*_BLOCKING, *_REFUSING)
    # Without descriptors the daemon hangs as well: this cause comes first.
    none_left = incidents_and_leftovers.server_out_of_descriptors
    for found in sorted(one.found, key=lambda each: each.advice is not none_left):
        if found.advice in types and found.daemon == one.daemon.pipe_directory:
            yield _as_check(found, "warning" if served else "problem")


def _connection_checks(one: Subject) -> Checks:
    fallen = one.client is not None and one.client.state == "torn_down"
    found = [
        _as_check(each, page=_BAD_POINTER if fallen else page)
        for advice, page in _CONNECTION.items()
        for each in advice.found(one.in_queue if advice is _QUEUED else one.alone)
    ]
    if found:
        yield from found
    elif one.client is not None:
        yield _connected(one, one.client)
    elif one.direct_on:
        indexes = ", ".join(gpu.index for gpu in one.direct_on)
        yield problem(
            f"It has a context on GPU {indexes} and is no client of a running MPS server: it "
            "started without MPS, or its server has gone.",
            "Start it again with the daemon's CUDA_MPS_PIPE_DIRECTORY.",
            NO_EFFECT,
            one.command_to_use_daemon,
        )
    elif check := next(_causes_without_context(one), None):
        yield check
    elif one.unseen or one.view.hidden:
        why = _UNSEEN if one.unseen else f"{one.view.hidden} cannot be seen"
        yield unknown(f"whether it is a client, or waits, is not known: {why}.")
    elif one.daemon is None or one.daemon.handover is None:
        context = "It has no context on a GPU: it has made no CUDA call yet, has got an error from "
        context, level = f"{context}it, or hangs elsewhere.", warning
        results = [each for each in one.snapshot.collectors if each.name == "nvml"]
        unread = [gpu.index for gpu in one.snapshot.gpus if gpu.observation.processes is None]
        if unread or not all(each.success for each in results):
            why = f"the processes of GPU {', '.join(unread)} were not read"
            if not unread:
                why = f"no GPU was read ({printable(results[0].error or 'no answer', 400)})"
            context, level = f"Whether it has a context on a GPU is not known: {why}.", unknown
        yield level(
            f"It is no client of a daemon that was seen, and waits for none. {context}",
            f"{_started(one)}See what it printed, and cat /proc/{one.pid}/wchan; py-spy dump --pid "
            f"{one.pid} (root; or its user, if kernel.yama.ptrace_scope is 0).",
        )


def _started(one: Subject) -> str:
    started = humanize.processes(one.view.children)
    return f"It has started {started}: try --pid with these. " if started else ""


def _connected(one: Subject, client: Client) -> Check:
    since = client.state_since and one.snapshot.taken_at - client.state_since
    age = f" for {humanize.age(since)}" if since is not None else ""
    if client.state in ("connecting", "creating_context"):
        text = f"It is connected to server {client.server_pid}, and has had no context{age}."
        if since is None or since < policy.MAX_CONTEXT_CREATION_SECONDS:
            return ok(text)
        # In state creating_context it is found as client_stuck.
        text += " It may have called cuInit only, as a launcher does, or hang: not known."
        remedy = "See the last lines of server.log, and whether the server is in state T or D."
        return unknown(text, f"{_started(one)}{remedy}", "a-client-is-connected-and-hangs")
    return ok(f"It has been a client of server {client.server_pid}{age}.")


def _causes_without_context(one: Subject) -> Checks:
    """Yield checks of causes that no finding about the process shows."""
    daemon, own = one.daemon, ProcessFacts(one.pid, 0.0, shared_memory=one.view.shared_memory)
    process = daemon.facts.process if daemon is not None else None
    if daemon is not None and process is not None and own.has_own_shared_memory(process):
        # The finding is about clients: assume that the process is one.
        me = (Client(one.pid, 0, one.view.uid, own_shared_memory=True, command=one.view.command),)
        servers = tuple(replace(server, clients=me) for server in daemon.servers)
        shared = daemons_and_servers.shared_memory_not_mapped
        yield from _found_with(one, replace(daemon, servers=servers), shared)
    for server in daemon.servers if daemon is not None else ():
        for uuid, limit in server.contexts_limit.items():
            if server.contexts.get(uuid, 0) >= limit:
                yield problem(
                    f"Server {server.pid} has {limit} of at most {limit} contexts on "
                    f"{gpu_name(uuid, one.snapshot)}: a new one is refused (error 46 or 808).",
                    "Let some of its clients end, or start a second daemon with a directory of "
                    "its own; then start the process again.",
                    _TOO_MANY,
                )
    if daemon is not None or one.view.pipe_directory is None:
        for each in one.running:
            if daemon is None or each.pipe_directory == daemon.pipe_directory:
                yield from _hidden_waits(one, each)


def _hidden_waits(one: Subject, daemon: ControlDaemon) -> Checks:
    """Yield checks of waits that may be the process's, but do not show its PID."""
    if daemon.facts.has_own_pid_namespace:
        # In its queue a process has no host PID, but its user shows.
        waits = (wait for wait in daemon.waits if not wait.pid and wait.uid == one.view.uid)
        yield from _found_with(one, replace(daemon, waits=tuple(waits)), _QUEUED)
    if daemon.facts.has_own_pid_namespace or not daemon.shows_waits:
        yield _unknown_wait(one, daemon)


def _unknown_wait(one: Subject, daemon: ControlDaemon) -> Check:
    why = visibility.why_waits_are_unknown(daemon)
    text, remedy, uid = f"whether it waits is not known: {why}.", "", one.view.uid
    if not daemon.follows("control"):
        remedy = "mps-exporter doctor shows why; root may read closed logs: ask, or run it as root."
    if remedy and daemon.facts.log_directory_assumed:
        named = quoted_path(one.environment.get("CUDA_MPS_LOG_DIRECTORY", ""))
        pipe = quoted_path(daemon.pipe_directory)
        remedy = (
            f"Name the log directory: mps-exporter doctor --mps.log-directory={named or 'DIR'} "
            f"--mps.pipe-directory={pipe or 'DIR'}; or ask root."
        )
    holders = {server.uid for server in daemon.servers if server.uid is not None}
    if uid is not None and holders and uid not in holders and not daemon.multiuser:
        text += (
            f" The daemon serves {one.alone.user(min(holders))} now: a process of "
            f"{one.alone.user(uid)} waits until all clients of that user have left. Do not kill it."
        )
    return unknown(text, remedy, _HANGS_IN_INIT)


def _limit_checks(one: Subject) -> Checks:
    client = one.client
    if client is not None:
        for found in chain.from_iterable(each.found(one.alone) for each in _LIMITS):
            yield _as_check(found, "warning" if found.severity == "info" else "problem")
        for uuid, limit in client.memory_limit_bytes.items():
            used = client.memory_used_bytes.get(uuid)
            if used is not None and limit and used >= policy.NEAR_LIMIT_RATIO * limit:
                yield warning(
                    f"It uses {memory(used)} of at most {memory(limit)} on "
                    f"{gpu_name(uuid, one.snapshot)}: the next allocation can fail.",
                    "A higher limit, before it starts.",
                    _NO_MEMORY,
                )
        if client.sm_limit:
            sms = ", ".join(f"{count} SMs" for count in client.sm_limit.values())
            yield ok(f"It may use at most {sms}.")
        else:
            yield unknown("how many SMs it may use is not known.")
    if one.daemon is not None and not (one.working or one.recorded):
        yield from _limits_before_context(one, one.daemon)


def _limits_before_context(one: Subject, daemon: ControlDaemon) -> Checks:
    """Yield the limits of the process that are too small for a context."""
    allowed = client_limits.parse_pinned_memory_limit(
        one.environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    )
    if allowed and (least := min(allowed.values())) <= policy.CONTEXT_BYTES:
        yield problem(
            f"Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT allows {memory(least)}; on an H200 no context "
            f"could be made with {memory(policy.CONTEXT_BYTES)} (error 2).",
            "A higher limit, and start the process again.",
            _NO_MEMORY,
        )
    text = one.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    own = client_limits.parse_active_thread_percentage(text)
    default = daemon.default_active_thread_ratio
    ratio = min(own.ratio, 1.0 if default is None else default)
    for gpu in one.snapshot.gpus:
        sms = gpu.observation.sm_count
        old = (gpu.observation.compute_capability or HOPPER) < HOPPER
        if ratio and sms and old and gpu.uuid in daemon.gpu_uuids and ratio * sms < policy.MIN_SMS:
            yield warning(
                f"Its percentage is {humanize.percent(ratio, exact=True)} of {sms} SMs, less than "
                f"{policy.MIN_SMS}: reported to fail with error 46.",
                "A higher percentage, or fewer replicas.",
                _UNAVAILABLE,
            )


def _host_memory_checks(one: Subject) -> Checks:
    if kills := one.view.oom_kills:
        yield warning(
            f"The kernel has ended {humanize.count(kills, 'process', 'processes')} of its control "
            "group because host memory ran out.",
            "Raise the memory limit of the job or pod. If a client is ended like this while it "
            "computes, other clients on its GPU are lost.",
            _LOST,
        )


def _history_checks(one: Subject) -> Checks:
    for daemon in one.snapshot.daemons:
        for incident in daemon.incidents:
            if one.pid in incident.pids + incident.caused_by_pids and incident.kind in _HISTORY:
                page = _REFUSALS.get(incident.detail, _HISTORY[incident.kind])
                yield problem(one.alone.incident(incident), page=page)


_CHECKS: tuple[tuple[str, Callable[[Subject], Checks]], ...] = (
    ("process", _process_checks),
    ("directory", _directory_checks),
    ("process", _foreign_proc_checks),
    ("variables", _variable_checks),
    ("daemon", _daemon_checks),
    ("service", _service_checks),
    ("connection", _connection_checks),
    ("limits", _limit_checks),
    ("memory", _host_memory_checks),
    ("history", _history_checks),
)


def check_process(
    pid: int, snapshot: Snapshot, found: tuple[Finding, ...], view: ProcessView | None
) -> list[Check]:
    """Return the checks of a process; of an ended process, only two kinds.

    `found` has recent incidents, too; `view` is None for a recording.
    """
    one = Subject(pid, snapshot, found, view or ProcessView(pid), view is None)
    return [
        replace(check, name=name)
        for name, checks in _CHECKS
        if not one.ended or checks in (_process_checks, _history_checks)
        for check in checks(one)
    ]


def conclusion(checks: list[Check]) -> Check:
    """Return the first problem, else the first warning, an unknown fact, or that all is well."""
    for outcome in ("problem", "warning"):
        for check in checks:
            if check.outcome == outcome:
                return check
    open_checks = [check for check in checks if check.outcome == "unknown"]
    for check in open_checks:
        if check.name == "connection":
            return replace(check, text=humanize.sentence(check.text))
    if open_checks:
        text = open_checks[0].text
        text = f"Nothing wrong was seen, but {text[:1].lower()}{text[1:]}"
        return Check("conclusion", "unknown", text)
    return Check("conclusion", "ok", "Nothing is wrong with this process as far as MPS goes.")


def pids_of(
    snapshot: Snapshot, *, uid: int | None, job: str | None, waiting: Iterable[ProcessFacts] = ()
) -> list[int]:
    """Return the PIDs of a user's or a job's clients, waits and processes without MPS.

    A job is a Slurm job's number, or a pod's UID, name or namespace/name. `waiting`: facts of the
    processes that wait, whose jobs the snapshot lacks.
    """
    clients = [one for daemon in snapshot.daemons for one in clients_of(daemon)]
    direct = [one for gpu in snapshot.gpus for one in gpu.direct_processes]
    waits = [wait for daemon in snapshot.daemons for wait in daemon.waits]
    members: list[Client | Wait | ProcessFacts] = [*clients, *waits, *direct]
    if job is not None:
        named = {pid for pid, pod in snapshot.pods.items() if job in (pod, pod.partition("/")[2])}
        found = named & {one.pid for one in members}
        found |= {one.pid for one in clients if job in (one.slurm_job_id, one.pod_uid)}
        places = ((one.pid, parse_cgroup(one.cgroup)) for one in (*direct, *waiting))
        return sorted(found | {pid for pid, at in places if job in (at.slurm_job_id, at.pod_uid)})
    return sorted({one.pid for one in members if one.uid == uid})

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.merge import DaemonInputs, control_state, merge, pids_of_interest
from mps_exporter.merge.clients import PER_CONTEXT_VARIABLE
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.server_queries import ServerAnswers
from mps_exporter.mps.tool_commands import ProbeReply, ServerReply
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    Exchange,
    GpuObservation,
    GpuProcess,
    LogState,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcessList,
    ProcfsObservation,
)
from mps_exporter.snapshot import Client, Snapshot, Wait
from testing.logged import LoggedServer, logged, logged_client

PIPE = "/tmp/nvidia-mps"
GIB = 1 << 30
READABLE = (
    LogState(PIPE, "control", "/l/control.log", readable=True, size_bytes=1),
    LogState(PIPE, "server", "/l/server.log", readable=True, size_bytes=1),
)
PROCESS = ProcessFacts(10, 1.0, 0, "root", "nvidia-cuda-mps-control", "S", 1, (10,))
RUNNING = DaemonFacts(PIPE, "/l", process=PROCESS, lock_tested=True, lock_holder_pid=10)
GONE = DaemonFacts(PIPE, "/l", lock_tested=True)
UNKNOWN = DaemonFacts(PIPE, "/l")
SEEN = DaemonFacts(PIPE, "/l", process=PROCESS)
LOCKED = DaemonFacts(PIPE, "/l", lock_tested=True, lock_holder_pid=10)


def probe(outcome: Outcome, *exchanges: Exchange) -> ControlObservation:
    return ControlObservation(1.0, PIPE, "probe", outcome, exchanges)


RAN = Exchange(
    ("get_server_list",),
    Outcome.REFUSED,
    return_code=1,
    stderr="Cannot authenticate or connect to MPS control daemon process\n",
)
CANNOT_SEND = replace(RAN, stderr="Cannot send command to MPS control daemon process\n")
ANSWERED = Exchange(("get_server_list",), Outcome.OK, return_code=0, stdout="20\n")
NOTHING = Exchange(("get_server_list",), Outcome.UNPARSABLE, return_code=0)
NO_TOOL = Exchange(("get_server_list",), Outcome.ABSENT)


@pytest.mark.parametrize(
    ("facts", "output", "hung", "quitting", "state"),
    [
        (RUNNING, probe(Outcome.OK, RAN), False, False, "answering"),
        (RUNNING, probe(Outcome.UNPARSABLE, RAN), False, False, "refused"),
        (RUNNING, probe(Outcome.SKIPPED), True, False, "unresponsive"),
        (RUNNING, probe(Outcome.REFUSED, RAN), False, True, "draining"),
        (SEEN, probe(Outcome.ABSENT, RAN), False, False, "refused"),
        (LOCKED, None, False, False, None),
        (GONE, probe(Outcome.REFUSED, RAN), False, True, "refused"),
        (UNKNOWN, probe(Outcome.ABSENT, RAN), False, False, "absent"),
        (UNKNOWN, probe(Outcome.ABSENT, NO_TOOL), False, False, None),
    ],
)
def test_why_a_daemon_is_up_or_not(
    facts: DaemonFacts,
    output: ControlObservation | None,
    hung: bool,
    quitting: bool,
    state: str | None,
) -> None:
    known = logged(quit_requested_at=0.5 if quitting else None)
    assert control_state(DaemonInputs(facts, output, state=known, hung=hung)) == state


@pytest.mark.parametrize(
    "output",
    [
        probe(Outcome.REFUSED, CANNOT_SEND),
        probe(Outcome.UNPARSABLE, NOTHING),
        # Told to quit between two queries.
        probe(Outcome.REFUSED, ANSWERED, CANNOT_SEND),
    ],
)
def test_a_daemon_that_may_drain_is_refused_only_where_its_log_says_that_it_does_not(
    output: ControlObservation,
) -> None:
    assert control_state(DaemonInputs(RUNNING, output)) is None
    assert control_state(DaemonInputs(RUNNING, output, logs=READABLE)) == "refused"
    quitting = logged(quit_requested_at=0.5)
    assert control_state(DaemonInputs(RUNNING, output, state=quitting, logs=READABLE)) == "draining"


def gpu(
    *processes: tuple[int, str, int | None],
    uuid: str = "GPU-a",
    unread: tuple[ProcessList, ...] = (),
) -> GpuObservation:
    return GpuObservation(
        index=0,
        uuid=uuid,
        sm_count=132,
        compute_capability=(9, 0),
        unread_lists=unread,
        processes=tuple(GpuProcess(pid, kind, used) for pid, kind, used in processes),  # type: ignore[arg-type]
    )


def merged(
    *daemons: DaemonInputs,
    gpus: Sequence[GpuObservation] | None = None,
    processes: Iterable[ProcessFacts] = (),
    confidential: bool = False,
    **more: Any,
) -> Snapshot:
    observation = None
    if gpus is not None:
        observation = NvmlObservation(
            9.0, Outcome.OK, driver_version="580.1", confidential=confidential, gpus=tuple(gpus)
        )
    identified = ProcfsObservation(9.0, processes={one.pid: one for one in processes})
    return merge(taken_at=9.0, gpus=observation, processes=identified, daemons=daemons, **more)


SERVER = ProcessFacts(20, 2.0, 1001, "ann", "nvidia-cuda-mps-server", "S", 10, (20,))


def client_facts(pid: int, **environment: str) -> ProcessFacts:
    return ProcessFacts(
        pid,
        3.0,
        1001,
        "ann",
        "train",
        "S",
        1,
        (pid,),
        4026531836,
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        environment,
    )


LOGGED = LoggedServer(clients=(logged_client(30, "GPU-a"),))
SAID = ServerReply(20, "FAULT", 0.5, (31,), {0: {31: 2}}, {0: "GPU-a"}, {0: GIB})
ANSWERS = ServerAnswers(ProbeReply((20,), 1.0), {20: SAID}, 8.0)


def one_daemon(
    *processes: ProcessFacts,
    logs: tuple[LogState, ...] = READABLE,
    answers: ServerAnswers | None = None,
    facts: DaemonFacts = RUNNING,
    listed: tuple[tuple[int, str, int | None], ...] | None = None,
    unread: tuple[ProcessList, ...] = (),
    server: LoggedServer = LOGGED,
    waits: tuple[Wait, ...] = (),
    read_until: float = 9.0,
    others: Sequence[GpuObservation] = (),
    **more: Any,
) -> Snapshot:
    state = logged(server, devices={0: "GPU-a"}, waits=waits, read_until=read_until)
    inputs = DaemonInputs(
        facts, probe(Outcome.OK, RAN), answers or ServerAnswers(), state, logs, was_readable=True
    )
    gpus = None if listed is None else [gpu(*listed, unread=unread), *others]
    return merged(inputs, gpus=gpus, processes=processes, **more)


def snapshot(
    *clients: ProcessFacts,
    processes: tuple[tuple[int, str, int | None], ...],
    server: LoggedServer | None = None,
    **more: Any,
) -> Snapshot:
    """A host with a visible server, to which these clients are connected."""
    if server is None:
        connected = tuple(logged_client(one.pid, "GPU-a") for one in clients)
        server = LoggedServer(clients=connected, attributes={"thread_ratio": 1.0})
    facts = replace(RUNNING, servers=(SERVER,))
    return one_daemon(SERVER, *clients, facts=facts, listed=processes, server=server, **more)


ALL = ((20, "compute", GIB), (30, "compute", GIB), (30, "mps", GIB))


@pytest.mark.parametrize(
    ("unread", "reported"),
    [
        # Without the MPS list a client looks like a process without MPS: both are unknown.
        (("mps",), {"mps_server": 1, "graphics": 1}),
        (("compute",), {"graphics": 1}),
        (("graphics",), {"mps_client": 1, "mps_server": 1, "direct": 1}),
        (("mps", "graphics"), {"mps_server": 1}),
    ],
)
def test_an_unreadable_list_changes_no_process_kind(
    unread: tuple[ProcessList, ...], reported: dict[str, int]
) -> None:
    # 31 is in the MPS list alone: a client of another GPU, a phantom here.
    whole = (*ALL, (31, "mps", 0), (40, "compute", 5), (50, "graphics", None))
    found = snapshot(
        client_facts(30),
        processes=tuple(one for one in whole if one[1] not in unread),
        unread=unread,
    ).gpus[0]
    assert found.processes_by_kind == reported
    assert found.direct_pids == ((40,) if "direct" in reported else ())
    assert found.stranded_clients == (0 if "mps_client" in reported else None)


@pytest.mark.parametrize("server", [(), ((20, "compute", GIB),)])
def test_a_client_in_the_queue_is_not_stranded(server: tuple[tuple[int, str, int], ...]) -> None:
    queued = ((32, "compute", 5), (32, "mps", 5))
    neighbour = ((33, "compute", 5), (33, "mps", 5))
    waits = (Wait(32, 1002, 5.0, 1001),)
    found = snapshot(processes=(*server, *queued, *neighbour), waits=waits).gpus[0]
    assert (found.stranded_pids, found.stranded_clients) == ((33,), 1)


@pytest.mark.parametrize(
    ("value", "of_server", "expected"),
    [
        ("1", 1.0, (None, {}, "per_context")),
        ("0", 1.0, (0.5, {"GPU-a": 66}, "client")),
        ("", 0.5, (0.5, {"GPU-a": 66}, "server")),
        ("", None, (None, {}, "unknown")),
    ],
)
def test_the_share_of_a_client(value: str, of_server: float | None, expected: object) -> None:
    variables = {PER_CONTEXT_VARIABLE: value, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    attributes = {"thread_ratio": of_server}
    server = LoggedServer(clients=(logged_client(30, "GPU-a"),), attributes=attributes)
    found = snapshot(client_facts(30, **variables), processes=ALL, server=server)
    (one,) = found.daemons[0].servers[0].clients
    assert (one.active_thread_ratio, one.sm_limit, one.limit_source) == expected


@pytest.mark.parametrize(
    ("variables", "mounted", "reason"),
    [
        ({"CUDA_MPS_PIPE_DIRECTORY": "/p"}, True, "variable"),
        ({}, True, "mount"),
        ({}, False, "default"),
    ],
)
def test_why_a_process_is_a_client(variables: dict[str, str], mounted: bool, reason: str) -> None:
    facts = replace(client_facts(30, **variables), default_mounted=mounted)
    server = LoggedServer(clients=(logged_client(30, "GPU-a"),))
    (one,) = snapshot(facts, processes=ALL, server=server).daemons[0].servers[0].clients
    assert one.joined_by == reason


@pytest.mark.parametrize(
    ("own", "theirs", "differs"), [("0:25", "0:9", True), ("0:9", "0:9", False), ("", "0:9", False)]
)
def test_a_client_with_a_dev_shm_of_its_own(own: str, theirs: str, differs: bool) -> None:
    server = LoggedServer(clients=(logged_client(30),), attributes={"shares_by_file": True})
    facts = replace(RUNNING, process=replace(PROCESS, shared_memory=theirs), servers=(SERVER,))
    inputs = DaemonInputs(facts, probe(Outcome.OK, RAN), state=logged(server), logs=READABLE)
    client = replace(client_facts(30), shared_memory=own)
    (found,) = merged(inputs, processes=(SERVER, client)).daemons[0].servers
    assert (found.shares_by_file, found.clients[0].own_shared_memory) == (True, differs)


@pytest.mark.parametrize(
    ("connections", "confidential", "limit"),
    [("2", False, 48), ("8", False, None), ("x", False, 48), ("2", True, None)],
)
def test_the_context_limit_is_not_known_with_more_connections_or_confidential_computing(
    connections: str, confidential: bool, limit: int | None
) -> None:
    facts = client_facts(30, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    server = LoggedServer(clients=(logged_client(30, "GPU-a"),))
    host = snapshot(facts, processes=ALL, server=server, confidential=confidential)
    (found,) = host.daemons[0].servers
    assert found.contexts_limit.get("GPU-a") == limit


@pytest.mark.parametrize(
    ("models", "environment", "limits", "ignored", "source"),
    [
        # Measured: the daemon's own order (its CUDA_VISIBLE_DEVICES is 1,0) does not count.
        (("H200", "H200"), {}, {"GPU-a": GIB}, False, "server"),
        (("H200", "H200"), {"CUDA_VISIBLE_DEVICES": "1"}, {"GPU-b": GIB}, False, "server"),
        (("H200", "H200"), {"CUDA_VISIBLE_DEVICES": "GPU-b"}, {"GPU-b": GIB}, False, "server"),
        # The driver's order of GPUs of different models cannot be seen.
        (("H200", "L4"), {}, {}, False, "unknown"),
        ((None, None), {}, {}, False, "unknown"),
        (("H200", "H200 MIG"), {}, {}, False, "unknown"),
        (("H200", "H200"), {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "2=1G"}, {}, True, "server"),
    ],
)
def test_a_memory_limit_is_for_the_gpu_that_cuda_takes(
    models: tuple[str | None, str | None],
    environment: dict[str, str],
    limits: dict[str, int],
    ignored: bool,
    source: str,
) -> None:
    names = ("GPU-a", "GPU-b")
    gpus = tuple(
        replace(
            gpu(uuid=uuid),
            index=index,
            name=model and model.removesuffix(" MIG"),
            parent_uuid="GPU-whole" if model == "H200 MIG" else None,
        )
        for index, (uuid, model) in enumerate(zip(names, models, strict=True))
    )
    on = names if "CUDA_VISIBLE_DEVICES" not in environment else ("GPU-b",)
    server = LoggedServer(clients=(logged_client(30, *on),), attributes={"thread_ratio": 1.0})
    reply = ServerReply(20, "ACTIVE", 1.0, (30,), devices={0: "GPU-b", 1: "GPU-a"})
    answers = ServerAnswers(ProbeReply((20,), 1.0), {20: reply}, 8.0)
    facts = client_facts(30, **{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G", **environment})
    running = replace(RUNNING, servers=(SERVER,))
    inputs = DaemonInputs(running, None, answers, logged(server), READABLE)
    found = merged(inputs, gpus=gpus, processes=(SERVER, facts))
    (client,) = found.daemons[0].servers[0].clients
    assert client.memory_limit_bytes == limits
    assert (client.memory_limit_ignored is not None, client.limit_source) == (ignored, source)
    assert client.active_thread_ratio == 1.0


def test_an_ordinal_means_no_gpu_while_the_daemon_may_have_others() -> None:
    """Without the control tool the log names the GPUs that were used, not all of the daemon."""
    state = logged(LOGGED, devices={0: "GPU-a"})
    inputs = DaemonInputs(replace(RUNNING, servers=(SERVER,)), state=state, logs=READABLE)
    limited = client_facts(30, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")
    for others, limits in (([], {"GPU-a": GIB}), ([gpu(uuid="GPU-b")], {})):
        found = merged(inputs, gpus=[gpu(), *others], processes=(SERVER, limited))
        assert found.daemons[0].servers[0].clients[0].memory_limit_bytes == limits


def test_unreadable_limits_are_omitted_and_reported() -> None:
    secret = replace(client_facts(30), mps_environment=None)
    found = snapshot(secret, processes=ALL)
    (client,) = found.daemons[0].servers[0].clients
    assert client.limit_source == "unknown"
    assert (client.active_thread_ratio, client.sm_limit, client.priority) == (None, {}, None)
    assert client.memory_used_bytes == {"GPU-a": GIB}
    assert found.gpus[0].sm_committed_ratio is None
    assert found.unreadable_environments == 2  # the server's is not readable here either


def test_an_ordinary_users_clients_are_bounded_over_all_daemons_and_counted_by_uid() -> None:
    def inputs(name: str, uid: int, clients: int, unfollowed: int = 0) -> DaemonInputs:
        connected = tuple(logged_client(pid, uid=uid) for pid in range(100, 100 + clients))
        server = LoggedServer(clients=connected, uid=uid, unfollowed=unfollowed)
        return DaemonInputs(
            replace(RUNNING, pipe_directory=name, owner_uid=uid, limited=uid > 0),
            state=logged(server),
            logs=READABLE,
        )

    alice = [inputs(f"/alice/{number}", 2001, 200, 3) for number in range(2)]
    others = [inputs("/bob", 2002, 200), inputs("/root", 0, 600)]
    found = merged(*alice, *others)
    shown = {
        daemon.pipe_directory: sum(len(server.clients) for server in daemon.servers)
        for daemon in found.daemons
    }
    assert shown == {"/alice/0": 200, "/alice/1": 56, "/bob": 200, "/root": 600}
    assert found.ignored_processes == {2001: 2 * 200 - 256 + 2 * 3}


def test_without_any_source_there_are_no_numbers() -> None:
    (daemon,) = merged(DaemonInputs(UNKNOWN)).daemons
    assert daemon.state is None
    assert (daemon.servers, daemon.servers_count, daemon.counters) == ((), None, None)
    hung = merged(DaemonInputs(RUNNING, answers=ServerAnswers(protocol="3")))
    assert hung.daemons[0].servers_count is None, "without a reply they are not 0"


# ------------------------------------------------------------------------------ one source missing


@pytest.mark.parametrize(
    ("logs", "said", "count", "clients"),
    [
        (READABLE, False, 1, [30]),
        (READABLE[:1], False, 1, []),
        (READABLE[:1], True, 1, [31]),
        ((), True, 1, [31]),
        ((), False, None, None),
    ],
)
def test_servers_and_clients_are_those_of_the_log_or_of_the_tool(
    logs: tuple[LogState, ...], said: bool, count: int | None, clients: list[int] | None
) -> None:
    (daemon,) = one_daemon(logs=logs, answers=ANSWERS if said else None).daemons
    assert daemon.servers_count == count
    found = [[client.pid for client in server.clients] for server in daemon.servers]
    assert found == ([] if clients is None else [clients])
    connected = [server.clients_connected for server in daemon.servers]
    assert connected == ([] if clients is None else [1 if clients else None])
    early = DaemonInputs(RUNNING, answers=ANSWERS)  # the state gets the reply after the logs
    assert pids_of_interest(None, [early]) == {20, 31}


@pytest.mark.parametrize("other", [(), (ProcessFacts(20, 7.0, 1002, "bob", "python", "S"),)])
def test_a_number_that_was_given_to_another_program_is_not_the_server(
    other: tuple[ProcessFacts, ...],
) -> None:
    (server,) = one_daemon(*other).daemons[0].servers
    assert (server.start_time_seconds, server.uid, server.confirmed) == (2.0, 1001, False)
    own = replace(SERVER, pid=20, start_time_seconds=7.0)
    (server,) = one_daemon(own).daemons[0].servers
    assert (server.start_time_seconds, server.user, server.confirmed) == (7.0, "ann", True)


NEIGHBOUR = (*ALL, (32, "compute", 5), (32, "mps", 5))


def test_a_client_without_a_number_or_beyond_the_bound_leaves_strangers_in_doubt() -> None:
    known = client_facts(30)
    assert snapshot(known, processes=NEIGHBOUR).gpus[0].stranded_clients == 1
    assert snapshot(known, processes=NEIGHBOUR, clients_max=0).gpus[0].stranded_clients is None


@pytest.mark.parametrize("most", [0, 1])
def test_no_ghost_is_shown_whose_clients_at_work_are_only_counted(most: int) -> None:
    for at_work, verdict in (("GPU-a",), True if most else None), ((), True):
        ghost = replace(LOGGED, clients=(logged_client(30, *at_work),), attributes={"ghost": True})
        (server,) = one_daemon(SERVER, server=ghost, clients_max=most).daemons[0].servers
        assert (server.ghost, len(server.clients)) == (verdict, most)
    nameless = replace(LOGGED, clients=(*LOGGED.clients, logged_client(0)))
    found = one_daemon(SERVER, listed=(*NEIGHBOUR, (33, "compute", 1), (33, "mps", 1)))
    assert found.gpus[0].stranded_clients == 2
    more = one_daemon(SERVER, listed=NEIGHBOUR, server=nameless)
    assert more.gpus[0].stranded_clients is None


def test_the_reply_of_an_earlier_server_hides_no_client_that_it_left_behind() -> None:
    earlier = ServerReply(19, contexts={0: {32: 1}})
    answers = ServerAnswers(ProbeReply((19,), 1.0), {19: earlier}, 8.0)
    found = one_daemon(SERVER, listed=NEIGHBOUR, answers=answers).gpus[0]
    assert found.stranded_pids == (32,)


STRANGER = replace(SERVER, pid=60)  # A server of a daemon that was not found.


@pytest.mark.parametrize(("uid", "stranded"), [(1001, None), (0, None), (None, None), (2001, 1)])
def test_a_server_of_a_daemon_that_was_not_found_may_serve_the_clients_of_its_user(
    uid: int | None, stranded: int | None
) -> None:
    processes = (replace(STRANGER, uid=uid), client_facts(30), client_facts(32))
    listed = (*NEIGHBOUR, (60, "compute", GIB))
    found = one_daemon(SERVER, *processes, listed=listed).gpus[0]
    assert found.stranded_clients == stranded
    unread = one_daemon(*processes[1:], listed=listed, facts=replace(RUNNING, servers=(SERVER,)))
    assert unread.gpus[0].stranded_clients is None


@pytest.mark.parametrize("hidden", [False, True])
def test_without_a_known_daemon_no_client_of_a_server_is_stranded(hidden: bool) -> None:
    listed = ((60, "compute", GIB), (32, "compute", 5), (32, "mps", 5))
    processes = (client_facts(32),) if hidden else (client_facts(32), STRANGER)
    found = merged(gpus=[gpu(*listed)], processes=processes).gpus[0]
    assert (found.stranded_clients, found.stranded_pids) == (None, None)


def with_users_daemon(logs: tuple[LogState, ...], server: LoggedServer, *waits: Wait) -> Snapshot:
    """Root's daemon with a stranded client 32, and a daemon of user 2001 that claims its GPU."""
    state = logged(LOGGED, devices={0: "GPU-a"})
    roots = DaemonInputs(replace(RUNNING, servers=(SERVER,)), state=state, logs=READABLE)
    own = replace(PROCESS, pid=50, uid=2001)
    facts = replace(RUNNING, process=own, pipe_directory="/alice", owner_uid=2001, limited=True)
    claims = logged(server, devices={0: "GPU-a"}, waits=waits)
    users = DaemonInputs(facts, state=claims, logs=logs)
    strangers = (client_facts(32), client_facts(40), replace(client_facts(33), uid=2001))
    listed = (*NEIGHBOUR, (40, "compute", 1), (33, "compute", 1), (33, "mps", 1))
    processes = (SERVER, client_facts(30), *strangers)
    return merged(roots, users, gpus=[gpu(*listed)], processes=processes)


OF_USER = LoggedServer(60, (logged_client(33, uid=2001),), uid=2001)


@pytest.mark.parametrize(
    ("logs", "server", "waits"),
    [
        (READABLE, OF_USER, ()),
        ((), OF_USER, ()),  # its clients are not known
        (READABLE, replace(OF_USER, clients=(*OF_USER.clients, logged_client(0))), ()),
        (READABLE, replace(OF_USER, clients=(*OF_USER.clients, logged_client(32))), ()),
        (READABLE, OF_USER, (Wait(32, 1002, 5.0, 1001),)),
        (READABLE, replace(OF_USER, pid=40), ()),  # 40 uses the GPU without MPS
    ],
)
def test_no_claim_of_an_ordinary_users_daemon_hides_a_process_of_another_user(
    logs: tuple[LogState, ...], server: LoggedServer, waits: tuple[Wait, ...]
) -> None:
    (found,) = with_users_daemon(logs, server, *waits).gpus
    assert (found.stranded_pids, found.direct_pids) == ((32,), (40,))
    assert found.sm_committed_ratio == one_daemon(SERVER, listed=ALL).gpus[0].sm_committed_ratio


def test_an_ordinary_users_client_is_stranded_only_if_that_daemon_shows_it() -> None:
    alone = replace(OF_USER, clients=())
    assert with_users_daemon(READABLE, alone).gpus[0].stranded_pids == (32, 33)
    assert with_users_daemon((), alone).gpus[0].stranded_pids == (32,)


@pytest.mark.parametrize(("has_all_lines", "stranded"), [(True, 1), (False, None)])
def test_where_lines_of_a_server_may_be_missing_no_client_is_stranded(
    has_all_lines: bool, stranded: int | None
) -> None:
    server = replace(LOGGED, attributes={"has_all_lines": has_all_lines})
    found = one_daemon(SERVER, listed=NEIGHBOUR, server=server)
    assert found.gpus[0].stranded_clients == stranded


def test_no_client_is_stranded_while_a_read_of_the_logs_hangs() -> None:
    found = one_daemon(SERVER, listed=NEIGHBOUR, stranded_since={32: 8.0}, read_until=7.9)
    assert (found.gpus[0].seems_stranded, found.gpus[0].stranded_clients) == (None, None)


@pytest.mark.parametrize(("since", "stranded"), [({32: 8.0}, 1), ({32: 8.1}, None), ({}, None)])
def test_a_client_is_stranded_once_it_has_looked_so_for_a_second(
    since: dict[int, float], stranded: int | None
) -> None:
    (found,) = one_daemon(SERVER, listed=NEIGHBOUR, stranded_since=since).gpus
    assert (found.seems_stranded, found.stranded_clients) == ((32,), stranded)
    assert found.stranded_pids == ((32,) if stranded else None)


IN_CONTAINER = replace(SERVER, namespace_pids=(20, 3), pid_namespace=77)


def clients_of_container(
    clients: Iterable[TrackedClient],
    *processes: ProcessFacts,
    more: tuple[tuple[int, str, int | None], ...] = (),
    second: tuple[ProcessFacts, ...] = (),
) -> tuple[Client, ...]:
    """The clients of a daemon in its own PID namespace; these processes are MPS clients by NVML.

    `second`: processes on the second GPU.
    """
    own = replace(PROCESS, namespace_pids=(10, 1), pid_namespace=77)
    facts = replace(RUNNING, process=own, servers=(IN_CONTAINER,))
    on_gpus = [
        [(pid, kind, 1) for pid in (20, *(one.pid for one in those)) for kind in ("compute", "mps")]
        for those in (processes, second)
    ]
    known: dict[str, Any] = {"facts": facts, "server": LoggedServer(3, tuple(clients))}
    others = [gpu(*on_gpus[1], uuid="GPU-b")]
    everybody = IN_CONTAINER, *processes, *second
    found = one_daemon(*everybody, listed=(*on_gpus[0], *more), others=others, **known)
    (server_found,) = found.daemons[0].servers
    return server_found.clients


@pytest.mark.parametrize(
    ("more", "pids"),
    [
        ((), [800]),
        (((810, "compute", 1),), [800]),  # a process without MPS
        (((820, "mps", 0),), [800]),  # a client of another GPU
        (((830, "compute", 1), (830, "mps", 1)), [0]),  # one of two, ambiguous
    ],
)
def test_the_only_client_that_nvml_lists_is_the_one_without_a_number(
    more: tuple[tuple[int, str, int | None], ...], pids: list[int]
) -> None:
    found = clients_of_container([logged_client(0)], client_facts(800), more=more)
    assert [one.pid for one in found] == pids
    assert found[0].contexts == ({"GPU-a": 1} if pids == [800] else {})


def test_a_client_without_a_number_is_no_process_of_another_user() -> None:
    strangers = replace(client_facts(77), uid=1002), replace(client_facts(78), uid=None)
    for stranger in strangers:
        assert [one.pid for one in clients_of_container([logged_client(0)], stranger)] == [0]
    found = clients_of_container([logged_client(0)], client_facts(800), strangers[0])
    assert [one.pid for one in found] == [800]


def test_a_process_is_not_called_torn_down_for_a_client_without_a_number() -> None:
    torn_down = logged_client(0, "GPU-a", torn_down_at=5.0, had_context=True)
    (found,) = clients_of_container([torn_down], client_facts(77))
    assert (found.pid, found.state, found.state_since) == (0, "torn_down", 5.0)


@pytest.mark.parametrize("differs", ["connected_at", "active_since", "thread_ratio", ""])
def test_clients_without_numbers_on_one_gpu_have_only_what_is_equal_in_all(differs: str) -> None:
    facts = {"connected_at": 3.0, "active_since": 4.0, "thread_ratio": 0.9}
    first, second = (logged_client(0, "GPU-a", had_context=True, key=key) for key in (-1, -2))
    for name, value in facts.items():
        setattr(first, name, value)
        setattr(second, name, value / 2 if name == differs else value)
    for client in clients_of_container([first, second], client_facts(90), client_facts(50)):
        known = (client.connected_at, client.state_since, client.active_thread_ratio)
        shown = (None if name == differs else value for name, value in facts.items())
        assert (client.state, known) == ("active", tuple(shown))


def test_clients_without_numbers_are_known_by_their_gpus() -> None:
    first = logged_client(0, "GPU-a", at=1.0, had_context=True, key=-1)
    hung = logged_client(0, "GPU-b", at=3.0, creating={1: 4.0}, key=-2)
    found = clients_of_container([first, hung], client_facts(90), second=(client_facts(50),))
    assert {one.pid: (one.connected_at, one.state) for one in found} == {
        90: (1.0, "active"),
        50: (3.0, "creating_context"),
    }


def test_a_client_with_a_number_keeps_it_and_its_facts() -> None:
    inner = replace(client_facts(90), pid_namespace=77, namespace_pids=(90, 5))
    named, nameless = logged_client(5, "GPU-a", at=1.0), logged_client(0, "GPU-a", at=3.0)
    found = clients_of_container([named, nameless], inner, client_facts(50))
    assert {one.pid: one.connected_at for one in found} == {90: 1.0, 50: 3.0}

"""The state between collections, and collections that run at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from mps_exporter import policy
from mps_exporter.daemon_registry import DaemonRegistry
from mps_exporter.mps.server_queries import has_resumed
from mps_exporter.observations import (
    DaemonFacts,
    GpuObservation,
    GpuProcess,
    LogsObservation,
    NvmlObservation,
    Observation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources import policy as sources_policy
from mps_exporter.sources.host import SourceTimeoutError
from testing.mps_logs import EIGHT, PIPE, observation, script
from testing.mps_script import HOLDER, arrives, client, pending, server_starts
from testing.scripted_host import ScriptedHost, look
from testing.waiting import PATIENCE_SECONDS, until

UUID = "GPU-00000000-1111-2222-3333-444444444444"


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


# ---------------------------------------------------------------- which replies are valid


async def test_a_reply_from_the_future_is_not_valid(host: ScriptedHost) -> None:
    collector = host.collector()
    assert (await look(collector)).state == "answering"
    host.wall -= 7200  # the clock is set back
    host.hangs_on = "get_server_list"
    host.passes(30)
    assert (await look(collector)).state == "unresponsive"


@pytest.mark.parametrize("interval", [5, 15, 30])
async def test_a_daemon_that_hangs_on_a_query_hangs_until_it_replies(
    host: ScriptedHost, interval: int
) -> None:
    collector = host.collector(mps_reconcile_interval=60.0)
    await look(collector)
    host.hangs_on = "get_server_status"
    states = []
    for _ in range(300 // interval):
        host.passes(interval)
        states.append((await look(collector)).state)
        if "unresponsive" in states:
            host.hangs_on = "get_"  # a blocked daemon answers nothing
    first = states.index("unresponsive")
    assert set(states[first:]) == {"unresponsive"}


@pytest.mark.parametrize("searched", [True, False])
async def test_a_search_that_fails_is_shown_whatever_is_switched_off(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    collector = host.collector(collector_process=searched, mps_discovery=False)
    names = {"nvml", "control", "logs"} | ({"process"} if searched else set())
    assert {one.name for one in (await collector.collect()).collectors} == names

    async def hangs(_deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        raise SourceTimeoutError("procfs did not answer")

    monkeypatch.setattr(host, "discover", hangs)
    results = {one.name: one.success for one in (await collector.collect()).collectors}
    assert results["process"] is False


STUCK = {
    "a shutdown attempt without an outcome": pending("02:15.000", 300, 1003)
    + "02:15.000 C630 Try shutting down server 110, backoff is disabled\n",
    "a queued client and nothing more": pending("02:15.000", 300, 1003),
    "a client sent to a server that says nothing": arrives("02:15.000", 300, 1001),
}


@pytest.mark.parametrize("lines", STUCK.values(), ids=STUCK.keys())
async def test_a_wedge_shows_within_three_seconds_and_so_does_its_end(
    host: ScriptedHost, lines: str
) -> None:
    collector = host.collector()
    host.wall = EIGHT + 134.0
    assert (await look(collector)).state == "answering"  # good for 25 s, were it not for the logs
    host.passes(1.0)
    wedged_at = host.wall
    host.write(script(lines))
    host.hangs_on = "get_"
    host.passes(0.4)
    assert (await look(collector)).state == "unresponsive"
    assert host.wall - wedged_at <= 3.0
    for _ in range(6):
        host.passes(0.5)
        assert (await look(collector)).state == "unresponsive"
    host.hangs_on = ""
    host.answers["servers"] = []
    host.write(script("02:20.400 C630 Server 110 exited with status 0\n"))
    host.passes(0.3)
    assert host.wall < EIGHT + 140.4 + 1.0
    assert (await look(collector)).state == "answering"


ALIVE = {
    "a shutdown attempt that is declined": STUCK["a shutdown attempt without an outcome"]
    + "02:15.001 C630 Server 110 has 2 active worker threads. Server will not shutdown.\n"
    "02:15.001 C630 Control will try shutting down server 110 again in at most 51200ms\n",
    "a client that connects": arrives("02:15.000", 300, 1001)
    + "02:15.001 S110 Client {PID: 300, Context ID: 0} connected\n",
    "a client that connects in the same millisecond": arrives("02:15.000", 300, 1001)
    + "02:15.000 S110 Client {PID: 300, Context ID: 0} connected\n",
    "a daemon that drains": "02:14.900 C630 Cmd:quit\n"
    "02:15.000 C630 Try shutting down server 110, backoff is disabled\n",
}


@pytest.mark.parametrize("lines", ALIVE.values(), ids=ALIVE.keys())
async def test_normal_lines_do_not_make_a_daemon_seem_stuck(host: ScriptedHost, lines: str) -> None:
    collector = host.collector()
    await look(collector)
    host.passes(15.0)
    host.write(script(lines))
    host.passes(3.0)
    await collector.poll_logs()
    (record,) = collector._daemons.values()
    assert record.tracker.silent_since is None


async def test_a_stuck_daemon_that_replies_is_queried_once(host: ScriptedHost) -> None:
    collector = host.collector()
    host.write(script(STUCK["a queued client and nothing more"]))
    host.passes(15.4)
    for _ in range(5):
        assert (await look(collector)).state == "answering"
        host.passes(1.0)
    assert [run[0] for run in host.runs].count("get_server_list") == 1


async def test_two_scrapes_of_different_collectors_both_know_the_state(host: ScriptedHost) -> None:
    collector = host.collector()
    identify = host.identify
    reads, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        reads.set()
        await may_go_on.wait()
        return await identify(pids, deadline_seconds)

    host.identify = slow  # type: ignore[method-assign]
    first = asyncio.create_task(look(collector))
    await reads.wait()  # it has its answer, and reads /proc
    host.passes(30)
    host.gate, before = asyncio.Event(), len(host.runs)
    second = asyncio.create_task(look(collector, collectors=("control",)))
    await until(lambda: len(host.runs) > before)  # it asks
    may_go_on.set()
    whole = await first
    host.gate.set()
    assert (whole.state, (await second).state) == ("answering", "answering")


async def test_changed_settings_are_queried_again(host: ScriptedHost) -> None:
    collector = host.collector()
    await look(collector)
    before = host.server_query_count
    host.passes(15)
    await look(collector)
    assert host.server_query_count == before
    host.write(script("02:20.000 C630 Cmd:set_default_device_pinned_mem_limit 0 20G\n"))
    host.answers["default_memory_limits"] = {"0": "20G"}
    host.passes(15)
    await look(collector)
    assert host.server_query_count == before + 1


async def test_replies_of_a_replaced_daemon_are_dropped(host: ScriptedHost) -> None:
    collector = host.collector()
    assert (await look(collector)).gpu_uuids == (UUID,)
    other = UUID.replace("4444", "9999")
    host.daemon = replace(host.daemon, pid=640, start_time_seconds=host.wall)
    host.facts = replace(host.facts, process=host.daemon)
    host.answers["devices"] = [{**host.answers["devices"][0], "uuid": other}]
    host.write(script(HOLDER.replace("00:0", "02:1")))
    host.passes(15)
    assert (await look(collector)).gpu_uuids == (other,)


async def test_old_replies_are_not_shown_as_current(host: ScriptedHost) -> None:
    host.readable = ()
    collector = host.collector()
    (server,) = (await look(collector)).servers
    assert (server.state, [one.pid for one in server.clients]) == ("ACTIVE", [100])
    host.server = replace(host.server, state="T")  # stopped: it is not queried
    host.facts = replace(host.facts, servers=(host.server,))
    for _ in range(4):
        host.passes(15)
        (server,) = (await look(collector)).servers
    assert (server.state, server.clients_connected) == (None, None)


# ---------------------------------------------------------------- between collections


async def test_a_waiter_that_ends_between_two_scrapes_is_dead_within_two_seconds(
    host: ScriptedHost,
) -> None:
    host.wall = EIGHT + 120.0
    collector = host.collector()
    await look(collector)
    host.write(script(pending("02:01.000", 300, 1003)))
    host.passes(2.0)
    await collector.poll_logs()
    await collector.watch_processes()
    assert sorted(host.watched) == [110, 300, 630]
    died_at = host.wall
    host.ended_at[300] = died_at
    while host.wall < died_at + 1.8:  # as run_between_collections() does it
        host.passes(0.2)
        await collector.poll_logs()
        await collector.watch_processes()
    (record,) = collector._daemons.values()
    view = record.state
    assert [(wait.pid, wait.dead) for wait in view.waits] == [(300, True)]
    (incident,) = [one for one in view.incidents.snapshot() if one.kind == "wait_abandoned"]
    assert (incident.at, incident.seconds) == (died_at, 1.0)
    assert record.published_incidents >= 1
    assert 300 not in host.watched


async def test_a_daemon_that_ends_between_two_scrapes_is_gone(host: ScriptedHost) -> None:
    seen: list[Observation] = []
    collector = host.collector()
    await look(collector)
    collector._on_observation = seen.append
    host.passes(5.0)
    died_at = host.wall
    host.facts = replace(host.facts, process=None, servers=(), lock_holder_pid=None)
    host.ended_at[630] = died_at
    for _ in range(8):
        host.passes(0.2)
        await collector.poll_logs()
        await collector.watch_processes()
    (record,) = collector._daemons.values()
    assert record.state.daemon.ended_at == died_at
    looks = [one for one in seen if isinstance(one, ProcfsObservation)]
    assert looks[0].at == died_at  # a recording has it


async def test_processes_of_another_pid_namespace_are_not_watched(host: ScriptedHost) -> None:
    host.daemon = replace(host.daemon, pid=5630, namespace_pids=(5630, 630))
    host.facts = replace(host.facts, process=host.daemon)
    collector = host.collector()
    await look(collector)
    await collector.watch_processes()
    assert host.watched == [5630]  # here 110 may be any process


async def test_without_the_process_collector_no_process_is_watched(host: ScriptedHost) -> None:
    collector = host.collector(collector_process=False)
    await look(collector)
    host.watched = [1]
    await collector.watch_processes()
    assert host.watched == [1]


# ---------------------------------------------------------------- at the same time


async def test_a_short_deadline_does_not_apply_to_others(host: ScriptedHost) -> None:
    """A shared collection has at least --collector.timeout."""
    host.gpus = NvmlObservation(host.wall, Outcome.OK)
    read_gpus = host.read_gpus
    answers = asyncio.Event()

    async def slow(deadline_seconds: float) -> NvmlObservation:
        await answers.wait()
        return await read_gpus(deadline_seconds)

    host.read_gpus = slow  # type: ignore[method-assign]
    collector = host.collector(collector_timeout=PATIENCE_SECONDS)
    hurried = asyncio.create_task(collector.collect(0.001))
    await asyncio.sleep(0)
    patient = asyncio.create_task(collector.collect(PATIENCE_SECONDS))
    assert "nvml" in [one.name for one in (await hurried).collectors if one.timed_out]
    answers.set()
    assert [one.name for one in (await patient).collectors if one.timed_out] == []


async def test_callers_of_one_collection_share_the_snapshot(host: ScriptedHost) -> None:
    """Which is merged once, and rendered once."""
    host.gpus = NvmlObservation(host.wall, Outcome.OK)
    collector = host.collector()
    crowd = await asyncio.gather(*(collector.collect(PATIENCE_SECONDS) for _ in range(5)))
    assert all(one is crowd[0] for one in crowd)
    assert await collector.collect(PATIENCE_SECONDS) is not crowd[0]


async def test_a_collection_with_a_hung_source_is_joined_only_for_a_while(
    host: ScriptedHost,
) -> None:
    """A scraper with a timeout of minutes does not delay the data of others."""
    hangs = asyncio.Event()
    reads = 0

    async def hung(deadline_seconds: float) -> NvmlObservation:
        nonlocal reads
        reads += 1
        await hangs.wait()
        raise AssertionError(deadline_seconds)

    host.read_gpus = hung  # type: ignore[method-assign]
    collector = host.collector(collector_timeout=0.05)
    long = asyncio.create_task(collector.collect(PATIENCE_SECONDS))
    await until(lambda: reads)
    await asyncio.sleep(0.05)
    snapshot = await collector.collect(0.1)
    assert reads == 2
    assert "nvml" in [one.name for one in snapshot.collectors if one.timed_out]
    long.cancel()


async def test_a_scrape_without_nvml_leaves_the_stranded_clients(host: ScriptedHost) -> None:
    processes = (GpuProcess(777, "compute", 1), GpuProcess(777, "mps", 1))
    gpu = GpuObservation(index=0, uuid=UUID, processes=processes)
    host.gpus = NvmlObservation(host.wall, Outcome.OK, gpus=(gpu,))
    collector = host.collector()
    seen = []
    for _ in range(3):
        seen.append((await collector.collect()).gpus[0].stranded_clients)
        await collector.collect(collectors=("control", "logs"))
        host.passes(15)
    assert seen == [0, 1, 1]


async def test_slow_proc_does_not_hide_a_crash(host: ScriptedHost) -> None:
    collector = host.collector()
    await look(collector)
    host.passes(15)

    def crash() -> None:
        host.passes(4)
        host.alive = set()
        host.answers["servers"] = []

    host.while_identifying = crash
    await look(collector)
    host.while_identifying = lambda: None
    await collector.poll_logs()
    second = host.wall - EIGHT - 60 * 2
    host.write(script(f"02:{second:06.3f} C630 Server 110 exited with status 0\n"))
    for _ in range(8):
        host.passes(0.5)
        await collector.poll_logs()
    counters = (await look(collector)).counters
    assert counters is not None
    assert counters["mps_server_exits_total"]["crashed",] == 1
    assert counters["mps_client_losses_total"][1001, "server_crashed"] == 1


# ---------------------------------------------------------------- daemons that are gone


async def test_a_daemon_from_before_a_reboot_is_absent(host: ScriptedHost) -> None:
    host.facts = replace(
        host.facts,
        process=None,
        servers=(),
        configured=True,
        lock_tested=False,
        lock_holder_pid=None,
    )
    host.more_facts = (host.facts,)
    host.answers["absent"] = True
    host.edit = lambda _answer: ""
    collector = host.collector()
    run = host.control._run

    async def nobody(*arguments: object) -> object:
        result = await run(*arguments)  # type: ignore[arg-type]
        return replace(result, return_code=1, stderr=b"Cannot find MPS control daemon process\n")

    host.control._run = nobody  # type: ignore[assignment]
    for _ in range(5):
        await look(collector)
        host.passes(15)
        await collector.poll_logs()
    daemon = await look(collector)
    assert daemon.state == "absent"
    assert daemon.servers == ()
    assert daemon.counters is not None


async def test_a_daemon_of_a_job_ends_with_it(host: ScriptedHost) -> None:
    job = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n"
    host.daemon = replace(host.daemon, cgroup=job)
    host.facts = replace(host.facts, process=host.daemon)
    collector = host.collector()
    await look(collector)
    host.facts = replace(host.facts, process=None)
    host.passes(15)
    assert (await look(collector)).state == "absent"
    host.passes(180)
    assert (await collector.collect()).daemons == ()


async def test_a_host_without_daemons_is_searched_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_policy, "LOG_POLL_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(policy, "DAEMON_SEARCH_INTERVAL_SECONDS", 2 * PATIENCE_SECONDS)
    host = ScriptedHost(script(""))
    host.facts = replace(host.facts, process=None)
    following = asyncio.create_task(host.collector().run_between_collections())
    await until(lambda: host.looks_at_logs > 5)
    following.cancel()
    assert host.discoveries == 1


async def test_the_exit_of_a_server_does_not_date_the_death_of_its_daemon(
    host: ScriptedHost,
) -> None:
    collector = host.collector()
    await look(collector)
    host.passes(10)
    host.facts, host.alive = replace(host.facts, process=None, servers=()), set()
    host.ended_at = {110: host.wall - 0.4, 630: host.wall - 0.1}
    died_at = host.ended_at[630]
    await collector.watch_processes()
    host.passes(10)
    died = [one for one in (await look(collector)).incidents if one.kind == "daemon_died"]
    assert [one.at for one in died] == [died_at]


# ---------------------------------------------------------------- one log directory for two


async def test_two_daemons_that_share_a_log_directory_are_distinguished(host: ScriptedHost) -> None:
    collector = host.collector()
    await look(collector)
    second = ProcessFacts(900, host.wall + 10, name="nvidia-cuda-mps-control", state="S")
    host.more_facts = (replace(host.facts, pipe_directory="/tmp/mps1", process=second, servers=()),)
    host.write(
        script(
            "02:10.000 C900 Starting control daemon using socket /tmp/mps1/control\n"
            "02:11.000 C900 NEW CLIENT 300 from user 1002: "
            "Server is not ready, push client to pending list\n"
            "02:11.001 C900 Starting new server 310 for user 1002\n"
            "02:11.001 O310 Startup\n"
            "02:11.200 C900 NEW SERVER 310: Ready\n" + client("02:11.300", 300, 310)
        )
    )
    host.passes(15)
    await collector.poll_logs()  # the tail is there before the next scrape
    snapshot = await collector.collect()
    first = next(one for one in snapshot.daemons if one.pid == 630)
    assert [server.pid for server in first.servers] == [110]
    assert first.waits == ()
    assert first.counters is not None
    assert first.counters["mps_server_exits_total"]["daemon_died",] == 0


# ---------------------------------------------------------------- a line that was lost


async def test_a_server_whose_exit_line_was_lost_is_replaced_by_the_next(
    host: ScriptedHost,
) -> None:
    """In a container /proc cannot tell: the daemon numbers processes as it likes."""

    def inside(process: ProcessFacts, pid: int, inner: int) -> ProcessFacts:
        return replace(process, pid=pid, namespace_pids=(pid, inner))

    daemon = inside(host.daemon, 5630, 630)
    host.facts = replace(host.facts, process=daemon, servers=(inside(host.server, 5110, 110),))
    collector = host.collector()
    await look(collector)
    host.passes(30)
    host.facts = replace(host.facts, servers=(inside(host.server, 5120, 120),))
    host.answers["servers"] = [{"pid": 120, "clients": [{"pid": 200, "contexts": {"0": [1]}}]}]
    host.write(
        script(
            pending("02:20.000", 200, 1001)
            + server_starts("02:20.001", "02:20.200", 120, 1001)
            + client("02:20.300", 200, 120)
        )
    )
    before = host.server_query_count
    for _ in range(60):
        host.passes(15)
        await collector.poll_logs()
        await look(collector)
    assert [server.pid for server in (await look(collector)).servers] == [5120]
    assert host.server_query_count - before <= 4


async def test_logs_that_arrive_after_the_first_reply_show_no_exit(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the daemon has answered when its logs have not been read once."""
    collector = host.collector()
    poll_logs = host.poll_logs

    async def late(daemons: Sequence[DaemonFacts], deadline_seconds: float) -> LogsObservation:
        raise SourceTimeoutError("the logs were not read")

    monkeypatch.setattr(host, "poll_logs", late)
    with contextlib.suppress(SourceTimeoutError):
        await look(collector)
    monkeypatch.setattr(host, "poll_logs", poll_logs)
    host.passes(1.0)
    daemon = await look(collector)
    assert [server.pid for server in daemon.servers] == [110]
    (record,) = collector._daemons.values()
    view = record.state
    assert view.counters.snapshot()["mps_server_last_exit_timestamp_seconds"] == {}
    assert "daemon_died" not in {incident.kind for incident in view.incidents.snapshot()}


def test_a_daemon_with_a_new_name_has_a_new_state(host: ScriptedHost) -> None:
    """One in a container has the short name until one of the host has the same directory."""
    inside = replace(host.facts, root="/proc/630/root")
    registry = DaemonRegistry()
    registry.refresh([inside], host.wall)
    registry[PIPE].tracker.add_logs(observation(host.wall, script(HOLDER).data))
    assert tuple(registry[PIPE].state.servers)
    renamed = replace(inside, pipe_directory=inside.pipe_path, root="")
    own = replace(host.facts, process=replace(host.daemon, pid=700), servers=())
    registry.refresh([renamed, own], host.wall)
    assert set(registry) == {PIPE, f"/proc/630/root{PIPE}"}
    for record in registry.values():
        assert tuple(record.state.servers) == ()  # until its own logs are read


async def test_slow_daemons_of_users_do_not_delay_a_collection(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next collection shows a late reply; meanwhile the last reply stands."""
    monkeypatch.setattr(policy, "USERS_QUERY_WAIT_SECONDS", PATIENCE_SECONDS)
    collector = host.collector()
    host.facts = replace(host.facts, owner_uid=2001, limited=True)
    assert (await look(collector)).state == "answering"
    monkeypatch.setattr(policy, "USERS_QUERY_WAIT_SECONDS", 0.01)
    host.gate = asyncio.Event()
    for _ in range(2):  # the query of the first collection is still in progress in the second
        host.passes(30.0)
        assert (await look(collector)).state == "answering"
    assert [run[0] for run in host.runs].count("get_server_list") == 2
    host.gate.set()
    tasks = collector._users_queries
    await until(lambda: all(task.done() for task in tasks.values()))
    assert (await look(collector)).state == "answering"


def test_root_of_a_container_is_no_writer_of_roots_logs(host: ScriptedHost) -> None:
    """In its PID namespace it gives a process any number: that of a server to come."""
    registry = DaemonRegistry()
    root = replace(host.facts, pipe_directory="/root", owner_uid=0, servers=())
    inner = replace(host.daemon, pid=900, namespace_pids=(900, 7001))
    tenant = replace(root, pipe_directory="/tenant", process=inner, limited=True)
    registry.refresh([root, tenant], host.wall)
    assert registry["/root"].tracker.foreign_pids == frozenset()
    assert registry["/tenant"].tracker.foreign_pids == {host.daemon.pid}
    registry.refresh([root, replace(tenant, limited=False)], host.wall)
    assert registry["/root"].tracker.foreign_pids == {7001}


def test_absent_daemons_of_users_do_not_replace_roots(host: ScriptedHost) -> None:
    """Root's daemon died; she starts and ends any number of hers, and it is still shown."""
    registry = DaemonRegistry()
    root = replace(host.facts, pipe_directory="/root", owner_uid=0, configured=False)
    registry.refresh([root], host.wall)
    registry.refresh([], host.wall)
    for number in range(100):
        hers = replace(
            root, pipe_directory=f"/alice/{number}", owner_uid=2001 + number % 10, limited=True
        )
        registry.refresh([hers], host.wall + number)
        registry.refresh([], host.wall + number)
    kept = Counter(record.facts.user for record in registry.values() if record.facts.limited)
    assert "/root" in registry
    assert kept.total() == policy.MAX_ABSENT_DAEMONS
    for number in range(100):
        hers = replace(root, pipe_directory=f"/bob/{number}", owner_uid=3000, limited=True)
        registry.refresh([hers], host.wall + 100 + number)
        registry.refresh([], host.wall + 100 + number)
    kept = Counter(record.facts.user for record in registry.values() if record.facts.limited)
    assert kept[3000] == policy.MAX_ABSENT_DAEMONS // policy.USERS_PER_LIMIT
    assert kept.total() > policy.MAX_ABSENT_DAEMONS // policy.USERS_PER_LIMIT
    assert "/root" in registry


@pytest.mark.parametrize("between", [[], [()]])
def test_a_user_does_not_succeed_roots_daemon_that_ended(
    host: ScriptedHost, between: list[tuple[DaemonFacts, ...]]
) -> None:
    assert host.facts.process is not None
    root = replace(host.facts, owner_uid=0, configured=False)
    successor = replace(root, process=replace(host.facts.process, start_time_seconds=1.0))
    registry = DaemonRegistry()
    for found in [(root,), *between, (replace(successor, owner_uid=2001, limited=True),)]:
        registry.refresh(found, host.wall)
    (record,) = registry.values()
    assert record.facts == replace(root, process=None, servers=(), lock_holder_pid=None)
    registry.refresh([successor], host.wall)
    assert record.facts == successor


def test_pids_from_logs_of_users_are_limited_and_come_last(host: ScriptedHost) -> None:
    """Her log names any number of clients; descriptors and looks into /proc are few."""
    registry = DaemonRegistry()
    lines = script(HOLDER).data
    many = "".join(
        f"01:00.000 C730 NEW CLIENT {pid} from user 2001: "
        "Server is not ready, push client to pending list\n"
        for pid in range(10_000, 10_300)
    )
    hers = [
        replace(
            host.facts,
            pipe_directory=f"/alice/{number}",
            process=replace(host.daemon, pid=700 + number),
            owner_uid=2001,
            limited=True,
        )
        for number in range(8)
    ]
    root = replace(host.facts, pipe_directory="/tmp/root", owner_uid=0)
    registry.refresh([*hers, root], host.wall)
    for name, record in registry.items():
        text = lines if name == "/tmp/root" else script(many.replace("1000", f"{name[-1]}000")).data
        found = observation(host.wall, text)
        chunks = tuple(replace(one, pipe_directory=name) for one in found.chunks)
        states = tuple(replace(one, pipe_directory=name) for one in found.states)
        record.tracker.add_logs(replace(found, chunks=chunks, states=states))
    assert registry.pids_to_watch()[:2] == [630, 110]
    assert {100, 110} <= set(registry.pids_to_look_up())
    assert len(registry.pids_to_watch()) <= policy.MAX_LOGGED_PIDS // policy.USERS_PER_LIMIT + 2
    assert len(registry.pids_to_look_up()) <= policy.MAX_LOGGED_PIDS // policy.USERS_PER_LIMIT + 2


def test_the_same_process_continues_after_a_stop() -> None:
    def facts(server: ProcessFacts, state: str = "S") -> DaemonFacts:
        return DaemonFacts(
            "/mps", "/log", process=ProcessFacts(10, 1.0, state=state), servers=(server,)
        )

    running, stopped = ProcessFacts(20, 2.0, state="S"), ProcessFacts(20, 2.0, state="T")
    younger = ProcessFacts(20, 3.0, state="S")
    assert has_resumed(facts(stopped), facts(running))
    assert has_resumed(facts(running, "T"), facts(running))
    for before, after in ((running, running), (stopped, stopped), (stopped, younger)):
        assert not has_resumed(facts(before), facts(after))


async def test_counters_of_a_log_appear_once_it_was_readable(host: ScriptedHost) -> None:
    host.readable = ("control",)
    collector = host.collector()

    async def counted() -> set[str]:
        (daemon,) = (await collector.collect()).daemons
        return set(daemon.counters or ())

    first = await counted()
    assert "mps_server_exits_total" in first
    host.readable = ("control", "server")
    appeared = await counted() - first
    host.readable = ("control",)
    assert "mps_server_fault_recovery_seconds" in appeared
    assert appeared <= await counted()

"""The state between collections, and collections that run at the same time."""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from bench.host import FullHost
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.collector import Collector
from mps_exporter.daemon_registry import DaemonRegistry
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    Exchange,
    GpuObservation,
    GpuProcess,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources import SourceTimeoutError
from testing.mps_logs import EIGHT, PIPE, observation, script
from testing.mps_script import HOLDER, arrives, pending
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


async def test_processes_of_another_pid_namespace_are_not_watched(host: ScriptedHost) -> None:
    host.daemon = replace(host.daemon, pid=5630, namespace_pids=(5630, 630))
    host.facts = replace(host.facts, process=host.daemon)
    collector = host.collector()
    await look(collector)
    await collector.watch_processes()
    assert host.watched == [5630]  # here 110 may be any process


# ---------------------------------------------------------------- at the same time


async def test_a_short_deadline_does_not_apply_to_others(host: ScriptedHost) -> None:
    """A shared collection has at least --collector.timeout."""
    host.gpus = NvmlObservation(host.wall, Outcome.OK)
    read_gpus = host.read_gpus
    answers, given = asyncio.Event(), list[float]()

    async def slow(deadline_seconds: float) -> NvmlObservation:
        given.append(deadline_seconds)
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
    assert min(given) > 1.0


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
    assert seen == [None, 1, 1]


def finds(host: ScriptedHost, monkeypatch: pytest.MonkeyPatch, *found: DaemonFacts) -> None:
    async def discover(_deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        return found

    monkeypatch.setattr(host, "discover", discover)


@pytest.mark.parametrize("readable", [True, False])
async def test_a_daemon_from_before_a_reboot_is_absent(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Its logs show clients, and no process has them. Without logs, no death was seen."""
    host.readable = ("control", "server") if readable else ()
    none = Exchange(("get_server_list",), Outcome.ABSENT, return_code=1)

    async def probe(*_: object) -> ControlObservation:
        return ControlObservation(host.wall, PIPE, "probe", Outcome.ABSENT, (none,))

    monkeypatch.setattr(host.control, "probe", probe)
    gone = replace(host.facts, process=None, servers=(), configured=True, lock_tested=False)
    finds(host, monkeypatch, replace(gone, lock_holder_pid=None))
    collector = host.collector()
    for _ in range(5):
        await look(collector)
        host.passes(15)
        await collector.poll_logs()
    daemon = await look(collector)
    assert (daemon.state, daemon.servers) == ("absent", ())
    assert ("daemon_died" in {one.kind for one in daemon.incidents}) == readable


async def test_two_daemons_that_share_a_log_directory_are_distinguished(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = host.collector()
    await look(collector)
    second = ProcessFacts(900, host.wall + 10, name="nvidia-cuda-mps-control", state="S")
    other = replace(host.facts, pipe_directory="/tmp/mps1", process=second, servers=())
    finds(host, monkeypatch, host.facts, other)
    host.write(
        script(
            "02:10.000 C900 Starting control daemon using socket /tmp/mps1/control\n"
            "02:11.001 C900 Starting new server 310 for user 1002\n"
            "02:11.200 C900 NEW SERVER 310: Ready\n"
        )
    )
    host.passes(15)
    await collector.poll_logs()  # the tail is there before the next scrape
    first = next(one for one in (await collector.collect()).daemons if one.pid == 630)
    assert [server.pid for server in first.servers] == [110]
    assert "daemon_died" not in {one.kind for one in first.incidents}


async def test_a_daemon_that_hangs_delays_no_other(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries of all daemons run at the same time."""
    process = replace(host.daemon, pid=631)
    other = replace(host.facts, pipe_directory="/other", process=process, lock_holder_pid=631)
    finds(host, monkeypatch, host.facts, other)
    host.gate = asyncio.Event()
    collection = asyncio.create_task(host.collector().collect())
    await until(lambda: len(host.runs) == 2)
    host.gate.set()
    await collection


async def test_counters_of_a_log_appear_once_it_was_readable(host: ScriptedHost) -> None:
    collector, counted = host.collector(), list[set[str]]()
    for host.readable in (("control",), ("control", "server"), ("control",)):
        counted.append(set((await look(collector)).counters or ()))
    assert "mps_server_exits_total" in counted[0]
    assert ["mps_server_fault_recovery_seconds" in one for one in counted] == [False, True, True]


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

    def come_and_go(start: int, *users: int) -> Counter[int | None]:
        for number in range(start, start + 100):
            uid = users[number % len(users)]
            hers = replace(root, pipe_directory=f"/home/{number}", owner_uid=uid, limited=True)
            registry.refresh([hers], host.wall + number)
            registry.refresh([], host.wall + number)
        return Counter(record.facts.user for record in registry.values() if record.facts.limited)

    assert come_and_go(0, *range(2001, 2011)).total() == policy.MAX_ABSENT_DAEMONS
    assert "/root" in registry
    kept = come_and_go(100, 3000)
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
    assert len(registry.pids_to_watch()) == policy.MAX_LOGGED_PIDS // policy.USERS_PER_LIMIT + 2
    assert len(registry.pids_to_look_up()) <= policy.MAX_LOGGED_PIDS // policy.USERS_PER_LIMIT + 2


# ---------------------------------------------------------------- interned strings

JOB = 4711


def clients(snapshot: Snapshot) -> set[int]:
    """The clients that were found in /proc."""
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    return {client.pid for server in servers for client in server.clients if client.confirmed}


async def test_pids_and_names_are_not_interned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other users choose: Python 3.12.0 to 3.12.6 keep interned strings."""
    interned: list[str] = []

    def intern(text: str) -> str:
        interned.append(text)
        return text

    with FullHost(tmp_path, 4, gpus=2, daemons=1, other_processes=2) as full:
        host = full.live()
        collector = Collector(host, full.settings)
        await collector.collect()
        job = full.start_job(JOB)
        came = full.connect(full.daemons[0], [0, 1])
        full.tell()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "intern", intern)
            snapshot = await collector.collect()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not clients(snapshot).issuperset(came):
                    await asyncio.sleep(0.05)
                    snapshot = await collector.collect()
        await host.close()

    assert str(job.pipe) in {daemon.pipe_directory for daemon in snapshot.daemons}
    assert [text for text in interned if text.isdecimal() or str(JOB) in text] == []


async def test_without_a_thread_for_a_wait_the_logs_are_followed_later(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    left = iter(range(2))

    async def wait() -> None:
        if next(left, None) is not None:
            raise RuntimeError("can't start new thread")
        await asyncio.sleep(0)

    monkeypatch.setattr(host, "wait_for_next_poll", wait)
    following = asyncio.create_task(host.collector().run_between_collections())
    await until(lambda: following.done() or "the logs are followed again" in caplog.messages)
    assert not following.done()
    assert caplog.messages.count("cannot follow the logs") == 1
    following.cancel()


async def test_nvml_is_read_between_collections_although_the_logs_cannot_be_followed(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0

    async def wait() -> None:
        nonlocal waits
        waits += 1

    async def fail() -> None:
        raise RuntimeError("no such process")

    monkeypatch.setattr(host, "wait_for_next_poll", wait)
    collector = host.collector()
    monkeypatch.setattr(collector, "watch_processes", fail)
    following = asyncio.create_task(collector.run_between_collections())
    await until(lambda: following.done() or waits > 1)
    following.cancel()


async def test_each_reason_of_nvml_is_logged(
    host: ScriptedHost, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = iter(["no driver", "no driver", "no permission"])

    async def refused(deadline_seconds: float) -> NvmlObservation:
        del deadline_seconds
        return NvmlObservation(host.wall, Outcome.ABSENT, next(reasons))

    host.read_gpus = refused  # type: ignore[method-assign]
    collector = host.collector()
    for _ in range(3):
        await collector.collect(PATIENCE_SECONDS)
    logged = [vars(one)["fields"] for one in caplog.records if one.message == "collector failed"]
    found = [one["err"] for one in logged if one["collector"] == "nvml"]
    assert found == ["no driver", "no permission"]

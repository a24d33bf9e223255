"""Worlds of fixed seeds, played through the real collector."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from testing.mps_logs import summary
from testing.player import Player
from testing.world.checks import counters
from testing.world.defects import put_back
from testing.world.drive import Play, play, record
from testing.world.model import START_MS, World
from testing.world.script import Action, generate, shrink

WORLDS = (
    *((seed, 5) for seed in range(12)),
    (6036, 10),  # the first line of a daemon that died soon was read in pieces
    (1447, 10),  # a process without a context connected again, with the same PID
    (550166, 10),  # without control.log, a new daemon had the GPUs of the last one
    (602748, 10),  # a server without a free descriptor is a ghost whose clients work
    (3016, 10),  # the clock was set between an event and the moment from which on it is known
    (650765, 10),  # the clock was set while a server started: the lines are an hour apart
    (603123, 10),  # the clock was set before the daemon's death was certain
    (603736, 10),  # a dead client waited until its death was certain
    (701170, 10),  # the same, in a fault
    (801572, 10),  # a client left work while the cause of another GPU's fault was not decided
    (805640, 10),  # a client died in the queue before its line had been read
    (806687, 10),  # a client was queued and connected in the millisecond of its server's start
    (807728, 10),  # a PID came back before the server had reported the end of its last client
    (800482, 10),  # a daemon died, and another one started before its exit was read
    (605138, 10),  # twenty-eight clients overtook one that had died half a second before
)
"""Seed and minutes."""
DENSE = (
    (9300001, 5, 4),  # an ordinary user's logs were not read at first, by a rounding error
    (9330121, 5, 4),  # a user's daemon started again before its end was read, and was called dead
    (7500029, 5, 3),  # server.log was truncated while a client was connected, and read from then on
    (7600369, 5, 3),  # MPS v3: a daemon hung before it had replied, and its protocol was not known
    (9330025, 5, 4),  # the clock was set between a client's line and the first look at its process
    (9500033, 5, 6),  # an ordinary user's log claimed that root's client waits there
    (9600013, 5, 1),  # a GPU was called unserved before its daemon had had a server
    (9900119, 5, 6),  # a client left work while the cause of an earlier fault was not decided
    (9910035, 5, 4),  # a fault on the GPU of a client with PID 0 was shown at another client
    (7954091, 5, 5),  # the server had no free descriptor, and server.log had been truncated
)
"""The same, with the actions of some minutes in one."""


@pytest.mark.parametrize(("seed", "minutes", "pace"), [*((*one, 1) for one in WORLDS), *DENSE])
async def test_nothing_is_violated_in_this_world(seed: int, minutes: int, pace: int) -> None:
    result = await play(seed, minutes, pace=pace)
    assert result.violations == ()
    assert result.moments > 5


async def test_a_daemon_that_continues_answers_at_once() -> None:
    """It logs the callers that did not wait (seed 40672)."""
    stop = Action(40.0, "stop_daemon", "d0", {"seconds": 20})
    played = Play(1, (Action(0.0, "start_daemon", "d0", {}), stop))
    states = []
    for second in (35, 42, 50, 58, 62):
        await played.until(START_MS + second * 1000)
        (daemon,) = (await played.collect())[0].daemons
        states.append(daemon.state)
    assert states == ["answering", *["unresponsive"] * 3, "answering"]


async def test_a_wrong_wait_is_shrunk_to_its_history() -> None:
    async def fails(actions: Sequence[Action]) -> bool:
        found = (await play(3, 3.0, actions, checks=(counters,))).violations
        return any("waits is" in text for text in found)

    actions = generate(3, 3.0)
    with put_back("a wait ends 2 ms after the server is ready"):
        shortest = await shrink(actions, fails)
    assert len(shortest) < len(actions)
    starts = [one for one in shortest if one.kind == "start_client"]
    assert len({one.values["uid"] for one in starts}) == len(starts) == 2


async def test_the_demo_replays_a_world(tmp_path: Path) -> None:
    file, actions = tmp_path / "world.rec.gz", generate(5, 3.0)
    await record(5, 3.0, actions, "three minutes of three users", file)
    replayed = (await Player(file).to_end()).snapshot
    world = World(5, actions)
    world.advance(round(replayed.taken_at * 1000))
    for daemon in replayed.daemons:
        true = world.daemons[daemon.pipe_directory].truth.numbers
        assert summary(daemon.counters or {})["connections"] == true["connections"]

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.sources import SourceTimeoutError
from mps_exporter.sources.blocking import BlockingCalls
from testing.threads import is_under_way
from testing.waiting import PATIENCE_SECONDS, until, wait_for

T = TypeVar("T")

ALICE, BOB = 2001, 2002

RoundCalls = dict[Hashable, tuple[int | None, Callable[[], str]]]


class Gate:
    """RoundCalls that hang until the gate is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started = 0

    def __call__(self) -> str:
        self.started += 1
        self.open.wait()
        return "late"


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def at_once() -> str:
    return "now"


def run_round(
    calls: BlockingCalls[T],
    calls_of_round: Mapping[Hashable, tuple[int | None, Callable[[], T]]],
    seconds: float = PATIENCE_SECONDS,
) -> dict[Hashable, T]:
    calls.start(calls_of_round)
    calls.wait(seconds)
    return calls.results(calls_of_round)


def test_a_hanging_call_is_not_repeated_or_waited_for(gate: Gate) -> None:
    some = BlockingCalls[str]()
    run_round(some, {"a": (ALICE, gate)}, 0.01)
    assert run_round(some, {"a": (ALICE, gate), "b": (None, at_once)}) == {"b": "now"}
    assert gate.started == 1


def test_a_user_with_a_hanging_call_is_not_waited_for(gate: Gate) -> None:
    """The user may name another directory of the same file server each time."""
    some = BlockingCalls[str]()
    run_round(some, {"a": (ALICE, gate)}, 0.01)
    calls_of_round: RoundCalls = dict.fromkeys(range(100), (ALICE, gate))
    assert run_round(some, {**calls_of_round, "b": (BOB, at_once)}) == {"b": "now"}
    assert gate.started <= policy.MAX_HUNG_CALLS_PER_USER + 1


def test_a_crowd_of_hanging_calls_has_a_bounded_number_of_threads(gate: Gate) -> None:
    some = BlockingCalls[str]()
    crowd: RoundCalls = {number: (ALICE + number % 3, gate) for number in range(1000)}
    root: RoundCalls = {"root": (None, at_once)}
    assert run_round(some, {**crowd, **root}, 0.01) == {"root": "now"}
    assert gate.started <= policy.MAX_USERS_CALLS
    many: RoundCalls = dict.fromkeys(range(1000), (BOB, at_once))
    assert len(run_round(BlockingCalls[str](), many)) > policy.MAX_USERS_CALLS


def test_a_later_round_returns_a_late_result_and_marks_it(gate: Gate) -> None:
    some = BlockingCalls[str]()
    run_round(some, {"a": (ALICE, gate)}, 0.01)
    gate.open.set()
    wait_for(some._calls["a"].future.done)
    for result, old in (("late", {"a"}), ("now", set())):
        both: RoundCalls = {"a": (ALICE, at_once), "b": (BOB, at_once)}
        assert run_round(some, both) == {"a": result, "b": "now"}
        assert some.old == old


def test_an_error_does_not_affect_other_results_and_a_bug_is_raised() -> None:
    failing, other = raises(OSError(24, "Too many open files")), (BOB, lambda: 1)
    some = BlockingCalls[int]()
    assert run_round(some, {"a": (ALICE, failing), "b": other}) == {"b": 1}
    assert [str(error) for error in some.errors.values()] == ["[Errno 24] Too many open files"]
    with pytest.raises(KeyError, match="a bug"):
        run_round(some, {"c": (None, raises(KeyError("a bug")))})


# ---------------------------------------------------------------- one call


async def test_one_call_gives_its_result_or_its_error() -> None:
    calls = BlockingCalls[int]()
    for error in (ValueError("no"), OSError("gone")):
        with pytest.raises(type(error)) as caught:
            await calls.call("x", raises(error), seconds=PATIENCE_SECONDS)
        assert caught.value is error
    assert await calls.call("x", len, "abc", seconds=PATIENCE_SECONDS) == 3


def raises(error: Exception) -> Callable[[], int]:
    def fail() -> int:
        raise error

    return fail


async def test_one_call_that_hangs_costs_its_deadline_and_then_nothing(gate: Gate) -> None:
    calls = BlockingCalls[str]()
    with pytest.raises(SourceTimeoutError, match=r"disk did not answer within 0\.05 s"):
        await calls.call("disk", gate, seconds=0.05)
    with pytest.raises(SourceTimeoutError, match="disk has been busy with one call for"):
        await calls.call("disk", at_once, seconds=PATIENCE_SECONDS)
    assert await calls.call("other", at_once, seconds=PATIENCE_SECONDS) == "now"
    gate.open.set()
    wait_for(lambda: not is_under_way(calls, "disk"))
    assert await calls.call("disk", at_once, seconds=PATIENCE_SECONDS) == "now"  # not what is late


async def test_a_cancelled_caller_leaves_the_call_inside(gate: Gate) -> None:
    calls = BlockingCalls[str]()
    caller = asyncio.ensure_future(calls.call("disk", gate, seconds=PATIENCE_SECONDS))
    await until(lambda: is_under_way(calls, "disk"))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert is_under_way(calls, "disk")

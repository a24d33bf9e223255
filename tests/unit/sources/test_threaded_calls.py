from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import pytest

from mps_exporter.sources import threaded_calls
from mps_exporter.sources.threaded_calls import ThreadedCalls
from testing.threads import allow_one_thread
from testing.waiting import PATIENCE_SECONDS, wait_for

T = TypeVar("T")

ALICE, BOB = 2001, 2002


class Gate:
    """Questions that hang until the gate is opened."""

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


def ask(
    calls: ThreadedCalls[T], questions: Mapping[Hashable, tuple[int | None, Callable[[], T]]]
) -> dict[Hashable, T]:
    calls.start(questions)
    return calls.answers(questions)


def asked(user: int | None, function: Callable[[], str]) -> tuple[int | None, Callable[[], str]]:
    return user, function


def test_one_that_hangs_costs_its_own_answer(gate: Gate) -> None:
    found = ask(ThreadedCalls[str](0.05), {"a": asked(ALICE, gate), "b": asked(0, at_once)})
    assert found == {"b": "now"}


def test_nobody_waits_for_it_again_and_it_is_not_asked_twice(gate: Gate) -> None:
    some = ThreadedCalls[str](0.05)
    ask(some, {"a": asked(ALICE, gate)})
    some._wait_seconds = PATIENCE_SECONDS * 10  # whoever waited now would never return
    assert ask(some, {"a": asked(ALICE, gate), "b": asked(0, at_once)}) == {"b": "now"}
    assert gate.started == 1


def test_what_comes_late_is_given_by_a_later_call(gate: Gate) -> None:
    some = ThreadedCalls[str](0.05)
    ask(some, {"a": asked(ALICE, gate)})
    waiting = some._asked["a"].done
    gate.open.set()
    assert waiting.wait(PATIENCE_SECONDS)
    assert ask(some, {"a": asked(ALICE, gate)}) == {"a": "late"}
    some._wait_seconds = PATIENCE_SECONDS
    assert ask(some, {"a": asked(ALICE, at_once)}) == {"a": "now"}


def test_a_user_whose_question_hangs_is_waited_for_no_more(gate: Gate) -> None:
    """She may name another directory of the same file server each time."""
    some = ThreadedCalls[str](0.05)
    ask(some, {"a": asked(ALICE, gate)})
    some._wait_seconds = PATIENCE_SECONDS * 10
    questions: dict[Hashable, tuple[int | None, Callable[[], str]]] = {
        number: asked(ALICE, gate) for number in range(100)
    }
    assert ask(some, {**questions, "b": asked(BOB, at_once)}) == {"b": "now"}
    assert gate.started <= threaded_calls.MAX_HUNG_PER_USER + 1


def test_what_an_earlier_call_asked_is_told_apart(gate: Gate) -> None:
    some = ThreadedCalls[str](0.05)
    ask(some, {"a": asked(ALICE, gate)})
    waiting = some._asked["a"].done
    gate.open.set()
    assert waiting.wait(PATIENCE_SECONDS)
    some._wait_seconds = PATIENCE_SECONDS
    assert ask(some, {"a": asked(ALICE, gate), "b": asked(BOB, at_once)})
    assert some.old == {"a"}
    assert ask(some, {"a": asked(ALICE, at_once), "b": asked(BOB, at_once)})
    assert some.old == frozenset()


def test_a_thread_that_is_free_is_asked_again() -> None:
    some = ThreadedCalls[int](PATIENCE_SECONDS)
    threads = {ask(some, {number: (0, threading.get_ident)})[number] for number in range(5)}
    assert len(threads) == 1


def test_free_threads_are_few_and_end_with_who_asked() -> None:
    some = ThreadedCalls[threading.Thread](PATIENCE_SECONDS)
    begun = threading.Barrier(threaded_calls.MAX_IDLE + 2)

    def at_the_same_time() -> threading.Thread:
        begun.wait()
        return threading.current_thread()

    names = range(threaded_calls.MAX_IDLE + 2)
    threads = ask(some, dict.fromkeys(names, (0, at_the_same_time))).values()
    assert len(set(threads)) == len(names)
    wait_for(lambda: sum(one.is_alive() for one in threads) == threaded_calls.MAX_IDLE)
    del some
    wait_for(lambda: not any(one.is_alive() for one in threads))


def test_an_error_is_no_answer_and_stops_nobody() -> None:
    def fails() -> str:
        raise OSError(24, "Too many open files")

    some = ThreadedCalls[str](PATIENCE_SECONDS)
    assert ask(some, {"a": asked(ALICE, fails), "b": asked(BOB, at_once)}) == {"b": "now"}
    assert [str(error) for error in some.errors.values()] == ["[Errno 24] Too many open files"]


def test_a_bug_is_raised() -> None:
    def fails() -> str:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        ask(ThreadedCalls[str](PATIENCE_SECONDS), {"a": asked(0, fails)})


def test_without_a_free_thread_the_first_ones_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_one_thread(monkeypatch)
    monkeypatch.setattr(threaded_calls, "MAX_IDLE", 0)
    some = ThreadedCalls[str](PATIENCE_SECONDS)
    assert ask(some, {"a": asked(0, at_once), "b": asked(ALICE, at_once)}) == {"a": "now"}

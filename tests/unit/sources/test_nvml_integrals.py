"""Laws of the arithmetic behind counters of seconds and bytes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.sources.nvml.accumulators import (
    COUNTER_32,
    LONGEST_PERIOD_SECONDS,
    Activity,
    BusyTime,
    unwrapped_increment,
)

STEPS = st.lists(
    st.tuples(st.integers(1, int(LONGEST_PERIOD_SECONDS * 1e6)), st.integers(0, 100)),
    min_size=1,
    max_size=60,
)
START = 1_700_000_000_000_000


def stamped(steps: list[tuple[int, int]]) -> list[tuple[int, float]]:
    samples, at = [], START
    for step, percent in steps:
        at += step
        samples.append((at, float(percent)))
    return samples


def started() -> BusyTime:
    integral = BusyTime()
    integral.skip([(START - 1000, 50.0), (START, 50.0)], now=0)
    return integral


@given(STEPS)
def test_without_a_gap_the_integral_is_the_sum(steps: list[tuple[int, int]]) -> None:
    integral = started()
    integral.add(stamped(steps), now=1e9)
    assert integral.seconds == pytest.approx(sum(step * part for step, part in steps) / 1e8)
    assert integral.unobserved_seconds == 0


@given(STEPS, st.lists(st.integers(0, 60)), st.randoms())
def test_portions_order_and_repetition_do_not_matter(
    steps: list[tuple[int, int]], cuts: list[int], random: object
) -> None:
    """Samples that remain in the buffer are read several times, and count once."""
    samples = stamped(steps)
    whole, portions = started(), started()
    whole.add(samples, now=1e9)
    for cut in sorted(cuts):
        seen = samples[:cut]
        random.shuffle(seen)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
        portions.add(seen, now=1e9)
    portions.add(samples, now=1e9)
    assert portions.seconds == pytest.approx(whole.seconds)
    assert portions.last_timestamp == whole.last_timestamp


@given(
    st.lists(st.tuples(st.integers(1, 40_000_000), st.integers(0, 100)), min_size=1, max_size=40)
)
def test_busy_and_unobserved_never_exceed_the_time(steps: list[tuple[int, int]]) -> None:
    integral = started()
    elapsed = sum(step for step, _ in steps) / 1e6
    integral.add(stamped(steps), now=elapsed)
    assert 0 <= integral.seconds + integral.unobserved_seconds <= elapsed + 1e-6


def test_a_gap_is_at_most_the_time_without_samples() -> None:
    """The clock was set forward by 20 s, and no sample is missing."""
    integral = started()
    steps = [(20_000_000, 100.0), *((20_000_000 + n * 200_000, 100.0) for n in range(1, 25))]
    integral.add([(START + at, percent) for at, percent in steps], now=5)
    assert integral.seconds == pytest.approx(5, abs=0.1)
    assert integral.unobserved_seconds <= 0.1


def test_a_sample_that_is_not_a_number_is_ignored() -> None:
    integral = started()
    steps = [(200_000, math.nan), (400_000, 50.0), (600_000, math.inf), (800_000, 100.0)]
    integral.add([(START + at, percent) for at, percent in steps], now=1)
    assert integral.seconds == pytest.approx(0.6)


def test_an_interval_without_one_of_the_ratios_is_unobserved() -> None:
    active = Activity()
    active.add(0.0, None)
    active.add(10.0, {"sm": 0.5, "tensor": 0.1})
    active.add(20.0, {"sm": 0.5})
    assert active.seconds == {"sm": 10.0, "tensor": 1.0}
    assert active.unobserved_seconds == 10


@given(st.integers(0, COUNTER_32 - 1), st.integers(0, 2**45), st.integers(-(2**31) + 1, 2**31 - 1))
def test_unwrapping_is_exact_within_half_a_turn(before: int, moved: int, error: int) -> None:
    now = (before + moved) % COUNTER_32
    assert unwrapped_increment(before, now, max(0, moved + error)) == moved


@given(st.integers(0, COUNTER_32 - 1), st.integers(0, COUNTER_32 - 1), st.floats(0, 1e15))
def test_unwrapping_never_goes_back_and_always_fits_the_counter(
    before: int, now: int, expected: float
) -> None:
    increment = unwrapped_increment(before, now, expected)
    assert increment >= 0
    assert (before + increment) % COUNTER_32 == now

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.client_limits import (
    ThreadPercentage,
    effective_ratio,
    parse_active_thread_percentage,
    sms_of_ratio,
)

HOPPER = (9, 0)

# What clients read from CUDA on an H200 (132 SMs, driver 580) with this percentage.
MEASURED = """
0.0001:8 0.5:8 1:8 5:8 7:8 8:10 9:10 10:12 10.6:12 10.61:14 12.1:14 12.2:16 12.5:16 13.6:16
13.7:18 16.6:20 16.7:22 18.18:22 18.19:24 20:26 21.2:26 21.3:28 24.24:30 24.25:32 25:32
30.3:38 30.31:40 33.3:42 33.33:42 35:46 36.36:46 36.37:48 40:52 42.4:54 42.5:56 45.45:58
45.46:60 48.4:62 48.5:64 49.99:64 50:66 51.5:66 51.6:68 60:78 60.6:78 60.7:80 66.6:86
66.7:88 75:98 80:104 90:118 90.9:118 91:120 95:124 98:128 98.4:128 98.5:130 99:130
99.999:130 100:132 100.0:132 100.1:132 1000:132 0:132
"""
READ_AS_C_DOES = {
    132: ("-0", "-5", "", "abc50", "nan", "inf"),
    66: ("50%", "50abc", " 50", "50 ", "+50", "5e1", "0x32", "50,5", ".5e2", "50."),
    20: ("0x10",),
    8: ("1e-3",),
    32: ("\t25",),
}
CASES = [pair.partition(":")[::2] for pair in MEASURED.split()]
CASES += [(text, str(sms)) for sms, texts in READ_AS_C_DOES.items() for text in texts]


@pytest.mark.parametrize(("text", "sms"), CASES)
def test_sms_as_measured(text: str, sms: str) -> None:
    ratio = parse_active_thread_percentage(text).ratio
    assert sms_of_ratio(1.0 if ratio is None else ratio, 132, HOPPER) == int(sms)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ThreadPercentage()),
        ("100", ThreadPercentage()),
        ("25", ThreadPercentage(0.25)),
        ("0", ThreadPercentage(ignored=True)),
        ("100.1", ThreadPercentage(ignored=True)),
        ("200", ThreadPercentage(ignored=True)),
        ("", ThreadPercentage(ignored=True)),
        ("half", ThreadPercentage(ignored=True)),
    ],
)
def test_ignored_percentages_differ_from_those_that_do_not_limit(
    text: str | None, expected: ThreadPercentage
) -> None:
    assert parse_active_thread_percentage(text) == expected


@pytest.mark.parametrize("capability", [None, (7, 0), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_rounding_of_other_architectures_is_not_known(capability: tuple[int, int] | None) -> None:
    assert sms_of_ratio(0.5, 108, capability) is None
    assert sms_of_ratio(1.0, 108, capability) == 108


@given(st.floats(0, 1), st.floats(0, 1), st.integers(8, 200))
def test_more_percent_never_means_fewer_sms(first: float, second: float, sms: int) -> None:
    low, high = sorted((first, second))
    fewer, more = sms_of_ratio(low, sms, HOPPER), sms_of_ratio(high, sms, HOPPER)
    assert fewer is not None
    assert more is not None
    assert 0 < fewer <= more <= sms


@given(st.text())
def test_any_text_is_a_fraction_or_none(text: str) -> None:
    ratio = parse_active_thread_percentage(text).ratio
    assert ratio is None or 0 < ratio < 1


def test_the_lower_of_client_and_server_counts() -> None:
    assert effective_ratio(0.9, 0.5) == 0.5
    assert effective_ratio(0.1, 0.5) == 0.1
    assert effective_ratio(None, 0.5) == 0.5
    assert effective_ratio(None, None) is None

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.mps.limits import (
    ThreadLimit,
    context_limit,
    effective_ratio,
    names_missing_device,
    parse_active_thread_percentage,
    parse_client_priority,
    parse_memory,
    parse_pinned_memory_limit,
    pinned_memory_limit_of,
    sm_limit,
)

GIB = 1 << 30
MIB = 1 << 20
HOPPER = (9, 0)
UUID = "GPU-cd18ce24-f68b-0d05-0661-2061f87bf9c3"

# What clients read from CUDA on an H200 (132 SMs, driver 580) with this percentage.
MEASURED = {
    "0.0001": 8, "0.5": 8, "1": 8, "5": 8, "7": 8, "8": 10, "9": 10, "10": 12, "10.6": 12,
    "10.61": 14, "12.1": 14, "12.2": 16, "12.5": 16, "13.6": 16, "13.7": 18, "16.6": 20,
    "16.7": 22, "18.18": 22, "18.19": 24, "20": 26, "21.2": 26, "21.3": 28, "24.24": 30,
    "24.25": 32, "25": 32, "30.3": 38, "30.31": 40, "33.3": 42, "33.33": 42, "35": 46,
    "36.36": 46, "36.37": 48, "40": 52, "42.4": 54, "42.5": 56, "45.45": 58, "45.46": 60,
    "48.4": 62, "48.5": 64, "49.99": 64, "50": 66, "51.5": 66, "51.6": 68, "60": 78, "60.6": 78,
    "60.7": 80, "66.6": 86, "66.7": 88, "75": 98, "80": 104, "90": 118, "90.9": 118, "91": 120,
    "95": 124, "98": 128, "98.4": 128, "98.5": 130, "99": 130, "99.999": 130,
    # How it reads the text:
    "100": 132, "100.0": 132, "100.1": 132, "1000": 132, "0": 132, "-0": 132, "-5": 132,
    "": 132, "abc50": 132, "nan": 132, "inf": 132, "50%": 66, "50abc": 66, " 50": 66, "50 ": 66,
    "+50": 66, "5e1": 66, "0x32": 66, "0x10": 20, "50,5": 66, ".5e2": 66, "50.": 66, "1e-3": 8,
    "\t25": 32,
}  # fmt: skip


@pytest.mark.parametrize(("text", "sms"), MEASURED.items())
def test_sms_as_measured(text: str, sms: int) -> None:
    ratio = parse_active_thread_percentage(text).ratio
    assert sm_limit(1.0 if ratio is None else ratio, 132, HOPPER) == sms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ThreadLimit()),
        ("100", ThreadLimit()),
        ("25", ThreadLimit(0.25)),
        ("0", ThreadLimit(ignored=True)),
        ("200", ThreadLimit(ignored=True)),
        ("", ThreadLimit(ignored=True)),
        ("half", ThreadLimit(ignored=True)),
    ],
)
def test_ignored_percentages_are_told_from_those_that_do_not_limit(
    text: str | None, expected: ThreadLimit
) -> None:
    assert parse_active_thread_percentage(text) == expected


@pytest.mark.parametrize("capability", [None, (7, 0), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_rounding_of_other_architectures_is_not_known(capability: tuple[int, int] | None) -> None:
    assert sm_limit(0.5, 108, capability) is None
    assert sm_limit(1.0, 108, capability) == 108


@given(st.floats(0, 1), st.floats(0, 1), st.integers(8, 200))
def test_more_percent_never_means_fewer_sms(first: float, second: float, sms: int) -> None:
    low, high = sorted((first, second))
    fewer, more = sm_limit(low, sms, HOPPER), sm_limit(high, sms, HOPPER)
    assert fewer is not None
    assert more is not None
    assert 0 < fewer <= more <= sms


@given(st.text())
def test_any_text_is_a_limit_or_none(text: str) -> None:
    limit = parse_active_thread_percentage(text)
    assert limit.ratio is None or 0 < limit.ratio < 1
    assert all(value > 0 for value in parse_pinned_memory_limit(text).values())
    parse_memory(text)
    parse_client_priority(text)


def test_the_lower_of_client_and_server_counts() -> None:
    assert effective_ratio(0.9, 0.5) == 0.5
    assert effective_ratio(0.1, 0.5) == 0.1
    assert effective_ratio(None, 0.5) == 0.5
    assert effective_ratio(None, None) is None


# What a client was allowed on a host with one GPU; None: no limit.
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0=1G", GIB),
        ("0=1g", GIB),
        ("0=1GB", GIB),
        ("0=1024M", GIB),
        ("0=1024m", GIB),
        ("0=1024MB", GIB),
        ("0=1024MiB", GIB),
        ("0 = 1G", GIB),
        ("0=1G;", GIB),
        ("0=1G,", GIB),
        ("0=1", MIB),
        ("0=1 G", MIB),
        ("0=1.5G", MIB),
        ("0=1X", MIB),
        ("0=1T", MIB),
        ("0=1073741824", 1073741824 * MIB),
        ("0=1048576K", 1048576 * MIB),
        ("0=1G,0=2G", GIB),
        ("0=2G,0=1G", GIB),
        (f"{UUID}=1G", GIB),
        (f"{UUID[:12]}=1G", GIB),
        (f"0=2G,{UUID}=1G", GIB),
        (f"0=1G,{UUID}=2G", GIB),
        (f"{UUID.lower()}=1G", None),
        (" 0=1G", None),
        ("1=1G", None),
        ("0:1G", None),
        ("1G", None),
        ("0=G", None),
        ("0=-1G", None),
        ("0=0G", None),
        ("0=0x400M", None),
        ("", None),
        (None, None),
    ],
)
def test_memory_limits_as_measured(text: str | None, limit: int | None) -> None:
    assert pinned_memory_limit_of(parse_pinned_memory_limit(text), 0, UUID) == limit


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("0=1G", False),
        (f"{UUID[:9]}=1G", False),
        ("", False),
        ("1=1G", True),
        ("0=1G,1=1G", True),
        ("1=1G,0=1G", True),
    ],
)
def test_a_missing_device_voids_the_limits_of_all(text: str, ignored: bool) -> None:
    assert names_missing_device(parse_pinned_memory_limit(text), {0: UUID}) is ignored


def test_replies_of_the_control_tool() -> None:
    assert [parse_memory(text) for text in ("10G", "512M", "2 GiB", "3 gb")] == [
        10 * GIB, 512 * MIB, 2 * GIB, 3 * GIB,
    ]  # fmt: skip
    assert [parse_memory(text) for text in ("10", "", "G", "-1G", "1.5G")] == [None] * 5


def test_priorities() -> None:
    assert [parse_client_priority(text) for text in ("0", "1", " 1 ", "2", "", None)] == [
        0, 1, 1, None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "driver", "limit"),
    [
        ((6, 0), None, 16),
        ((7, 0), "470.57.02", 48),
        ((9, 0), "580.159.04", 48),
        ((9, 0), "590.44", 60),
        ((12, 0), "615.1", 60),
        ((9, 0), None, None),
        ((9, 0), "unknown", None),
        (None, "580.1", None),
    ],
)
def test_context_limits(
    capability: tuple[int, int] | None, driver: str | None, limit: int | None
) -> None:
    assert context_limit(capability, driver) == limit

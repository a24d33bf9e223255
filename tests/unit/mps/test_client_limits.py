import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.client_limits import (
    DaemonGpus,
    MemoryLimits,
    client_memory_limits,
    context_limit,
    parse_active_thread_percentage,
    parse_client_priority,
    parse_memory,
    parse_pinned_memory_limit,
    sms_of_ratio,
    visible_gpus,
)
from testing.each import each

GIB = 1 << 30
MIB = 1 << 20
UUID = "GPU-cd18ce24-f68b-0d05-0661-2061f87bf9c3"
ONE = DaemonGpus(frozenset({UUID}), complete=True, order=(UUID,))


# What a client was allowed on a host with one GPU; None: no limit.
LIMITS = {
    GIB: "0=1G|0=1g|0=1GB|0=1024M|0=1024m|0=1024MB|0=1024MiB|0 = 1G|0=1G;|0=1G,|0=1G,0=2G|0=2G,0=1G"
    f"|{UUID}=1G|{UUID[:12]}=1G|0=2G,{UUID}=1G|0=1G,{UUID}=2G",
    MIB: "0=1|0=1 G|0=1.5G|0=1X|0=1T",
    1073741824 * MIB: "0=1073741824",
    1048576 * MIB: "0=1048576K",
    None: f"{UUID.lower()}=1G| 0=1G|1=1G|0:1G|1G|0=G|0=-1G|0=0G|0=0x400M|",
}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (None, None),
        *((text, limit) for limit, texts in LIMITS.items() for text in texts.split("|")),
    ],
)
def test_memory_limits_as_measured(text: str | None, limit: int | None) -> None:
    found = client_memory_limits(text, (UUID,), [UUID], ONE).bytes_by_uuid
    assert found == ({} if limit is None else {UUID: limit})


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        (f"{UUID[:9]}=1G", False),
        ("0=1G,1=1G", True),
        ("GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893=1G", True),
    ],
)
def test_a_missing_device_voids_the_limits_of_all(text: str, ignored: bool) -> None:
    found = client_memory_limits(text, (UUID,), [UUID], ONE)
    assert found.ignored is ignored
    assert not ignored or found.bytes_by_uuid == {}


A, B = "GPU-aaaa1111-2222-3333-4444-555566667777", "GPU-abbb1111-2222-3333-4444-555566667777"
BOTH = DaemonGpus(frozenset({A, B}), complete=True, order=(A, B))
ONLY_B = DaemonGpus(frozenset({B}), complete=True, order=(B,))
MIXED = DaemonGpus(frozenset({A, B}), complete=True)
PARTLY = DaemonGpus(frozenset({A}))
IGNORED = MemoryLimits(ignored=True)
UNKNOWN = MemoryLimits(None)


def limited(**gpus: int) -> MemoryLimits:
    return MemoryLimits({{"a": A, "b": B}[name]: size * GIB for name, size in gpus.items()})


# Two H200, driver 580: a daemon with both GPUs (in whatever order it lists them itself), a client
# with this CUDA_VISIBLE_DEVICES and this limit.
@pytest.mark.parametrize(
    ("visible", "text", "expected"),
    [
        # Measured:
        *((None, "0=1G", limited(a=1)), ("1", "0=1G", limited(b=1)), ("1", "1=1G", IGNORED)),
        *(("1,0", "0=1G", limited(b=1)), (None, f"{B}=1G", limited(b=1))),
        # It follows from the rule:
        *((None, "0=1G,1=2G", limited(a=1, b=2)), ("0", "0=1G", limited(a=1))),
        *(("1,0", "0=1G,1=2G", limited(b=1, a=2)), ("1,0", f"0=2G,{B}=1G", limited(b=1))),
        *(("1,0", "2=1G", IGNORED), (B, "0=1G", limited(b=1)), (B[:8], "0=1G", limited(b=1))),
        *((B, "1=1G", IGNORED), ("1,0", f"{A[:9]}=1G", limited(a=1))),
        # CUDA's documentation: the first entry that names no device ends the list.
        ("0,7,1", "1=1G", IGNORED),
        ("1,NoDevFiles", "0=1G", limited(b=1)),
        # Nobody measured it:
        *((f"1,{A}", "0=1G", UNKNOWN), ("1,1", "0=1G", UNKNOWN), ("GPU-a", "0=1G", UNKNOWN)),
        *(("MIG-5a1f0b4c", "0=1G", UNKNOWN), ("1", f"{A}=1G", UNKNOWN)),
    ],
)
def test_an_ordinal_counts_among_the_gpus_that_the_client_sees(
    visible: str | None, text: str, expected: MemoryLimits
) -> None:
    assert client_memory_limits(text, visible_gpus(visible, BOTH), (), BOTH) == expected


@pytest.mark.parametrize(
    ("gpus", "visible", "text", "expected"),
    [
        # The daemon has only the second GPU: it is the client's first.
        (ONLY_B, None, "0=1G", limited(b=1)),
        # GPUs of different models: the driver's order cannot be seen. UUIDs need none.
        (MIXED, None, "0=1G", UNKNOWN),
        (MIXED, B, "0=1G", limited(b=1)),
        (MIXED, None, f"{A}=1G", UNKNOWN),
        # Not all GPUs of the daemon are known.
        (PARTLY, None, f"{B}=1G", UNKNOWN),
    ],
)
def test_unknown_gpus_of_the_daemon_give_no_limit(
    gpus: DaemonGpus, visible: str | None, text: str, expected: MemoryLimits
) -> None:
    assert client_memory_limits(text, visible_gpus(visible, gpus), (), gpus) == expected


def test_a_context_on_a_gpu_proves_that_the_client_sees_it() -> None:
    assert client_memory_limits(f"{A}=1G", None, [A], MIXED) == limited(a=1)
    # Its environment at the start says otherwise: the program has changed it since.
    assert client_memory_limits("0=1G", visible_gpus("1", BOTH), [A], BOTH) == UNKNOWN
    assert client_memory_limits("0=1G", visible_gpus("", BOTH), [A], BOTH) == UNKNOWN


@pytest.mark.parametrize(
    ("capability", "driver", "limit"),
    [
        *(((6, 0), None, 16), ((7, 0), "470.57.02", 48), ((9, 0), "580.159.04", 48)),
        *(((9, 0), "590.44", 60), ((12, 0), "615.1", 60), ((9, 0), None, None)),
        *(((9, 0), "unknown", None), (None, "580.1", None)),
    ],
)
def test_context_limits(
    capability: tuple[int, int] | None, driver: str | None, limit: int | None
) -> None:
    assert context_limit(capability, driver) == limit


# ------------------------------------------------------------------ percentages

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
CASES = [
    *(pair.partition(":")[::2] for pair in MEASURED.split()),
    *((text, str(sms)) for sms, texts in READ_AS_C_DOES.items() for text in texts),
]


@each(CASES)
def test_sms_as_measured(case: tuple[str, str]) -> None:
    text, sms = case
    ratio = parse_active_thread_percentage(text).ratio
    assert sms_of_ratio(ratio, 132, HOPPER) == int(sms)


def test_rounding_of_other_architectures_is_not_known() -> None:
    for capability in (None, (8, 9), (10, 0)):
        assert sms_of_ratio(0.5, 108, capability) is None
        assert sms_of_ratio(1.0, 108, capability) == 108


@given(st.floats(0, 1), st.floats(0, 1), st.integers(8, 200))
def test_more_percent_never_means_fewer_sms(first: float, second: float, sms: int) -> None:
    low, high = sorted((first, second))
    fewer, more = sms_of_ratio(low, sms, HOPPER), sms_of_ratio(high, sms, HOPPER)
    assert fewer is not None
    assert more is not None
    assert 0 < fewer <= more <= sms


@given(st.text() | st.none(), st.text())
def test_any_text_is_a_limit_or_none(visible: str | None, text: str) -> None:
    assert all(value > 0 for value in parse_pinned_memory_limit(text).values())
    assert parse_client_priority(text) in (0, 1, None)
    parse_memory(text)
    assert 0 < parse_active_thread_percentage(text).ratio <= 1
    seen = visible_gpus(visible, BOTH)
    assert seen is None or set(seen) <= BOTH.uuids
    found = client_memory_limits(text, seen, (), BOTH)
    assert found.bytes_by_uuid is None or found.bytes_by_uuid.keys() <= BOTH.uuids


def test_replies_of_the_control_tool() -> None:
    sizes = {"10G": 10 * GIB, "512M": 512 * MIB, "2 GiB": 2 * GIB}
    unknown = dict.fromkeys(("10", "", "G", "-1G", "1.5G", "3GB"))
    assert {text: parse_memory(text) for text in (*sizes, *unknown)} == sizes | unknown

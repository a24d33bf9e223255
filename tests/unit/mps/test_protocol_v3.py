import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mps_exporter.mps.protocol_v3 import (
    CLIENTS,
    DEVICES,
    FEATURES,
    NAMESPACES,
    PARTITIONS,
    READ_ONLY_V3,
    SERVERS,
    V2_PARTITIONS,
    named_protocol,
    parse_lists,
)
from mps_exporter.mps.tool_commands import (
    ForbiddenCommandError,
    failure_of,
    invocation,
    other_interface,
)
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from mps_exporter.snapshot import NamespaceClient, Partitioning, SmPartition
from testing import fake_mps_v3 as published

LARGE = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"


def read(query: str, text: str, error: str | None = None) -> Partitioning:
    """What this reply says."""
    exchange = Exchange((query,), Outcome.OK, text, return_code=0, error=error)
    return parse_lists(ControlObservation(1.0, "/mps", "probe", Outcome.OK, (exchange,)))


def rows(found: Partitioning) -> tuple[Any, ...] | None:
    """Its only list; None if that is not known."""
    return next(iter(found.lists.values()), None)


def listed(query: str, text: str) -> Partitioning:
    """What these rows say below the manual's header."""
    return read(query, f"{published.MANUAL[query].splitlines()[0]}\n{text}\n")


# ------------------------------------------------------------------------------ what is sent


def test_queries_are_arguments_of_the_tool_and_change_nothing() -> None:
    assert invocation((SERVERS,)) == (
        ("server", "list", "--format=csv"),
        b"",
        {"CUDA_MPS_PROTOCOL_VERSION": "3"},
    )
    for query in READ_ONLY_V3:
        module, verb, *options = query.split(" ")
        assert verb in ("list", "describe")
        modules = ("server", "namespace", "client", "sm-partition", "device", "feature", "memacct")
        assert module in modules
        assert set(options) <= {"--all", "--format=csv"}


@pytest.mark.parametrize(
    "commands",
    [
        ("server delete training --force",),
        ("server create training",),
        ("server set training --active-thread-percentage=10",),
        ("client terminate 51023",),
        ("sm-partition delete large --server=training --device=0",),
        ("namespace set small --server=shared --active-thread-percentage=10",),
        ("feature disable memacct",),
        ("-q",),
        ("server list",),
        (SERVERS, NAMESPACES),
        (SERVERS, "get_server_list"),
    ],
)
def test_nothing_else_is_ever_given_as_arguments(commands: tuple[str, ...]) -> None:
    with pytest.raises(ForbiddenCommandError):
        invocation(commands)


# ------------------------------------------------------------------------------ which interface


@pytest.mark.parametrize(
    ("arguments", "environment", "found"),
    [
        ((), {}, None),
        (("-d",), {}, None),
        (("-d", "-p", "3"), {}, "3"),
        (("-d", "-p3"), {}, "3"),
        (("-d", "--protocol", "3"), None, "3"),
        (("-f", "--protocol=3"), None, "3"),
        (("-d", "-p", "2"), {}, "2"),
        (("-d", "-p", "3"), {"CUDA_MPS_PROTOCOL_VERSION": "2"}, "2"),
        (("-d",), {"CUDA_MPS_PROTOCOL_VERSION": "3"}, "3"),
        (("-d", "-p"), {}, None),
        (("-d", "-p", "4"), {}, None),
        (("-d",), {"CUDA_MPS_PROTOCOL_VERSION": "nonsense"}, None),
    ],
)
def test_a_daemon_names_its_protocol(
    arguments: tuple[str, ...], environment: dict[str, str] | None, found: str | None
) -> None:
    assert named_protocol(("nvidia-cuda-mps-control", *arguments), environment) == found


USAGE = "nvidia-cuda-mps-control <module> <verb> [positional-args] [--key=value ...] [--flag ...]"


@pytest.mark.parametrize(
    ("command", "outcome", "text", "other"),
    [
        ("get_server_list", Outcome.REFUSED, USAGE, "3"),
        ("get_server_list", Outcome.UNPARSABLE, "Unknown module 'get_server_list'", "3"),
        ("get_server_list", Outcome.UNPARSABLE, "what is this", None),
        ("get_server_list", Outcome.OK, USAGE, None),
        (SERVERS, Outcome.UNPARSABLE, 'Unknown command "server"', "2"),
        (SERVERS, Outcome.REFUSED, "invalid option -- 'server'", "2"),
        (SERVERS, Outcome.REFUSED, "Cannot send command to MPS control daemon process", None),
        (SERVERS, Outcome.OK, 'Unknown command "server"', None),
    ],
)
def test_a_refusal_may_tell_of_the_other_interface(
    command: str, outcome: Outcome, text: str, other: str | None
) -> None:
    assert other_interface(Exchange((command,), outcome, stderr=text)) == other


def test_its_answer_to_a_v3_query_leads_back_to_the_older_interface() -> None:
    """The text is what the tool of driver 580 printed on an H200."""
    text = Path(published.__file__).with_name("mps_580_versions.txt").read_text("utf-8")
    title = "nvidia-cuda-mps-control client list --format=csv <<< ''\nrc=0\n--stdout\n"
    output = text.partition(title)[2].partition("--stderr\n")[0]
    failure = failure_of(Exchange((CLIENTS,), Outcome.OK, output, return_code=0))
    assert failure is not None
    assert failure.kind == "unparsable"
    assert other_interface(Exchange((CLIENTS,), Outcome.UNPARSABLE, output)) == "2"


# ------------------------------------------------------------------------------ what is left out


@pytest.mark.parametrize(
    ("query", "row"),
    [
        (SERVERS, "-,1000,48201,Ready,/run/nvidia-mps/x,-,-"),
        (NAMESPACES, "-,shared,Ready,10G,50.00,0,/x"),
        (NAMESPACES, "small,-,Ready,10G,50.00,0,/x"),
        (NAMESPACES, published.NAMESPACE_HEADER),  # a header is the first line
        (CLIENTS, "-,srv,0,default,python"),
        (CLIENTS, "51023,-,0,default,python"),
        (CLIENTS, published.CLIENT_HEADER),
        (PARTITIONS, f"-,{LARGE},large,4,34,false,created,Kp8A"),
        (PARTITIONS, "training,-,large,4,34,false,created,Kp8A"),
        (PARTITIONS, f"training,{LARGE},large,4,34,false,-,Kp8A"),
        (DEVICES, "0,training,0000:02:00.0,-,NVIDIA H200,132,16,-"),
        (FEATURES, "-,enabled (default),memacct,-"),
        (FEATURES, "memacct,-,memacct,-"),
        (FEATURES, "memacct,perhaps,memacct,-"),
    ],
)
def test_a_row_without_what_tells_what_it_is_about_is_refused(query: str, row: str) -> None:
    text = published.MANUAL[query]
    known, found = read(query, text), read(query, f"{text}{row}\n")
    assert rows(found) == rows(known)
    assert rows(known)
    assert [n for (_, part), n in found.not_understood.items() if part == "row"] == [1]


@pytest.mark.parametrize(
    ("query", "row", "name", "value"),
    [
        (SERVERS, "s,{},1,Ready,/x,-,-", "uid", 2**32 - 2),
        (SERVERS, "s,1000,{},Ready,/x,-,-", "pid", 1 << 22),
        (CLIENTS, "{},srv,0,default,python", "pid", 1 << 22),
        (NAMESPACES, "small,shared,Ready,-,-,{},/x", "client_priority", 1),
        (PARTITIONS, f"t,{LARGE},large,{{}},-,-,created,-", "chunks", 99_999),
        (DEVICES, f"0,t,-,{LARGE},-,{{}},-,-", "sms", 99_999),
    ],
)
def test_a_number_that_cannot_be_is_absent_and_counted(
    query: str, row: str, name: str, value: int
) -> None:
    (one,) = rows(listed(query, row.format(value))) or ()
    assert getattr(one, name) == value
    found = listed(query, row.format(value + 1))
    assert all(getattr(one, name) is None for one in rows(found) or ())
    assert sum(found.not_understood.values()) == 1


@pytest.mark.parametrize(
    ("limit", "share", "expected"),
    [
        *((text, "50", (17 << 30, 0.5)) for text in ("17G", "17 G", "17GiB", "17408M")),
        *(("2T", "37.5%", (2 << 40, 0.375)), ("2048k", "100", (2 << 20, 1.0))),
        *(("unlimited", "0.25", (math.inf, 0.0025)), ("-", "unlimited", (None, math.inf))),
        *((text, "50", (None, 0.5)) for text in ("1023GB", "1023", "0G", "-4G", "1.5G", "1e3G")),
        *((text, "50", (None, 0.5)) for text in ("88888888T", "9P", "infinite", "...")),
        *(("17G", text, (17 << 30, None)) for text in ("0", "100.5", "-9", "3e1", "inf", "nan")),
        *(("17G", text, (17 << 30, None)) for text in ('"33,5"', "1/3", "12.5%%", "\u0663")),
    ],
)
def test_units_of_memory_and_percentages(limit: str, share: str, expected: tuple[Any, Any]) -> None:
    found = listed(NAMESPACES, f"small,shared,Ready,{limit},{share},0,/x")
    (one,) = rows(found) or ()
    assert (one.pinned_memory_limit_bytes, one.active_thread_ratio) == expected
    assert bool(found.not_understood) == (None in expected and limit != "-")


def test_a_process_on_two_gpus_is_one_client() -> None:
    found = listed(CLIENTS, "7,srv,0,default,a\n7,srv,1,default,a")
    assert rows(found) == (NamespaceClient(7, "srv", "default", ("0", "1"), "a"),)


def test_a_refused_list_is_counted() -> None:
    found = read(PARTITIONS, "", error="exit status 1, said nothing")
    assert (rows(found), found.not_understood) == (None, {("sm_partition_list", "reply"): 1})


def test_a_column_that_is_not_known_is_shown_as_text() -> None:
    found = read(CLIENTS, "PID,SERVER,Linux-NS,CMD\n7,srv,4026531836,a\n8,srv,4026531836,b\n")
    assert found.unknown_columns == {("client_list", "linux_ns"): ("4026531836",)}
    assert found.not_understood == {("client_list", "column"): 1}


# ------------------------------------------------------------------------------ v2 partitions


@pytest.mark.parametrize(
    "row", ["GPU-aa 5 10", "GPU-a...", "GPU-aa Dx - x - 1 Yes", "0 5 10 52 80", "GPU-aa \x1b 1 2"]
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_other_rows_of_lspart_and_a_cut_one_are_refused(row: str, end: str) -> None:
    found = read(V2_PARTITIONS, f"GPU-bb 5 10 52 80\n{row}{end}")
    assert [one.device for one in found.rows(SmPartition)] == ["GPU-bb"]
    assert found.not_understood == {("lspart", "row"): 1}


@given(st.lists(st.sampled_from([*published.LSPART_CAPTURE.split(" "), "\n", "٣", "-"])))
def test_no_reply_to_lspart_raises(words: list[str]) -> None:
    assert read(V2_PARTITIONS, " ".join(words)).protocol == "2"


# ------------------------------------------------------------------------------ laws


LISTS = st.sampled_from(sorted(published.MANUAL))


def _said(value: Any) -> set[str]:
    """All the texts and numbers that something holds."""
    if isinstance(value, str | int | float):
        text = "unlimited" if value == math.inf else str(value)
        return set() if isinstance(value, bool) else {text}
    if isinstance(value, tuple):
        return {one for part in value for one in _said(part)}
    fields = getattr(type(value), "__dataclass_fields__", {})
    return {one for name in fields for one in _said(getattr(value, name))}


def _text(cells: Sequence[Sequence[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in cells)


ODD_CELLS = st.sampled_from(
    [
        *("...", "31...", "NaN", "nan", "inf", "-1", "-5.0", "1e9", "0x10", "9" * 30, "A B", " "),
        *("99999999999999999999G", "999999999999999T", "8Q", "8 GiBs", "0G", "0.00", "100.01"),
        *("50,00", "٣", "\x1b[31m7\x1b[0m", "7\x00", "7\ufffd", "\udcff7", 'a"b', '"a', "a\nb"),
        *('x"} 1\nmps_up 9', "../x", "é", "\u202e7"),
    ]
)


@settings(max_examples=400)
@given(LISTS, ODD_CELLS, st.data())
def test_an_odd_cell_is_shown_as_it_is_or_left_out_and_counted(
    query: str, odd: str, data: st.DataObject
) -> None:
    """Never is it a number, a name or a word that the cell does not say."""
    # If the last column may contain commas, a comma in another cell is ambiguous.
    assume("," not in odd or query in (SERVERS, NAMESPACES, PARTITIONS))
    cells = [line.split(",") for line in published.MANUAL[query].splitlines()]
    number = data.draw(st.integers(1, len(cells) - 1))
    column = data.draw(st.integers(0, len(cells[0]) - 1))
    cells[number][column] = odd
    found, good = read(query, _text(cells)), read(query, published.MANUAL[query])
    new = _said(rows(found)) - _said(rows(good)) - {""}
    if new:  # of it, nothing but its own text may be there
        assert all(value in odd and value.isprintable() for value in new), new
    elif rows(found) != rows(good):
        assert found.not_understood or odd.strip() in ("", "-")


@given(LISTS, st.data())
def test_a_cut_reply_says_nothing_that_the_whole_one_does_not(
    query: str, data: st.DataObject
) -> None:
    text = published.MANUAL[query]
    cut = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.sampled_from(["", "...", "...\n"]))
    assert _said(rows(read(query, text[:cut] + end))) <= _said(rows(read(query, text))) | {""}

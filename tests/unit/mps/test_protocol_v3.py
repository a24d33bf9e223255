from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mps_exporter.mps.control_protocol import (
    ForbiddenCommandError,
    failure_of,
    invocation,
    other_interface,
)
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
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from mps_exporter.snapshot import (
    Feature,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    ServerDevice,
    SmPartition,
)
from testing import fake_mps_v3 as published

LARGE = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"


def replied(**replies: str) -> ControlObservation:
    """An observation with these replies, by the names of the constants."""
    queries = {
        "servers": SERVERS,
        "namespaces": NAMESPACES,
        "clients": CLIENTS,
        "partitions": PARTITIONS,
        "devices": DEVICES,
        "features": FEATURES,
        "lspart": V2_PARTITIONS,
    }
    exchanges = tuple(
        Exchange((queries[name],), Outcome.OK, text, return_code=0)
        for name, text in replies.items()
    )
    return ControlObservation(1.0, "/run/nvidia-mps", "probe", Outcome.OK, exchanges)


def read(**replies: str) -> Partitioning:
    return parse_lists(replied(**replies))


KINDS: Mapping[str, type] = {
    "servers": NamedServer,
    "namespaces": Namespace,
    "clients": NamespaceClient,
    "partitions": SmPartition,
    "devices": ServerDevice,
    "features": Feature,
}


HEADERS = {
    "servers": published.SERVER_HEADER,
    "namespaces": published.NAMESPACE_HEADER,
    "clients": published.CLIENT_HEADER,
    "partitions": published.PARTITIONS_TABLE.splitlines()[0].replace(" ", ","),
    "devices": published.DEVICE_HEADER,
    "features": published.FEATURES_CSV.splitlines()[0],
}


def listed(**rows: str) -> Partitioning:
    """What these rows say below the manual's header."""
    return read(**{name: f"{HEADERS[name]}\n{text.strip()}\n" for name, text in rows.items()})


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
        assert module in ("server", "namespace", "client", "sm-partition", "device", "feature")
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


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (published.SERVER_DOCS, None),
        ("", None),
        ("No servers", None),
        ('Unknown command "server"', "unparsable"),
        ("Cannot find MPS control daemon process", "absent"),
        ("Cannot send command to MPS control daemon process", "refused"),
        ("Insufficient privileges for UID 60000.", "refused"),
    ],
)
def test_a_run_is_judged_by_what_the_tool_says(text: str, kind: str | None) -> None:
    failure = failure_of(Exchange((SERVERS,), Outcome.OK, text, return_code=0))
    assert (failure.kind if failure is not None else None) == kind


# ------------------------------------------------------------------------------ what is left out


@pytest.mark.parametrize(
    ("query", "row"),
    [
        ("servers", "-,1000,48201,Ready,/run/nvidia-mps/x,-,-"),
        ("namespaces", "-,shared,Ready,10G,50.00,0,/x"),
        ("namespaces", "small,-,Ready,10G,50.00,0,/x"),
        ("clients", "-,srv,0,default,python"),
        ("clients", "51023,-,0,default,python"),
        ("clients", published.CLIENT_HEADER),  # a header is the first line
        ("partitions", f"-,{LARGE},large,4,34,false,created,Kp8A"),
        ("partitions", "training,-,large,4,34,false,created,Kp8A"),
        ("partitions", f"training,{LARGE},large,4,34,false,-,Kp8A"),
        ("devices", "0,training,0000:02:00.0,-,NVIDIA H200,132,16,-"),
        ("features", "-,enabled (default),memacct,-"),
        ("features", "memacct,-,memacct,-"),
        ("features", "memacct,perhaps,memacct,-"),
    ],
)
def test_a_row_without_what_tells_what_it_is_about_is_refused(query: str, row: str) -> None:
    first = {
        "servers": published.SERVER_DOCS.strip(),
        "namespaces": "small,shared,Ready,20G,30.00,0,/x",
        "clients": published.CLIENTS_DOCS.strip(),
        "partitions": f"training,{LARGE},large,4,34,false,created,Kp8AAAA",
        "devices": f"0,training,0000:02:00.0,{LARGE},NVIDIA H200,132,16,-",
        "features": "context-share,enabled (default),context-share,-",
    }[query]
    known, found = listed(**{query: first}), listed(**{query: f"{first}\n{row}"})
    assert _list(found, query) == _list(known, query)
    assert _list(known, query)
    (count,) = (count for (_, part), count in found.not_understood.items() if part == "row")
    assert count == 1


@pytest.mark.parametrize(
    ("query", "row", "name", "value"),
    [
        ("servers", "s,{},1,Ready,/x,-,-", "uid", 2**32 - 2),
        ("servers", "s,1000,{},Ready,/x,-,-", "pid", 1 << 22),
        ("clients", "{},srv,0,default,python", "pid", 1 << 22),
        ("namespaces", "small,shared,Ready,-,-,{},/x", "client_priority", 1),
        ("partitions", f"t,{LARGE},large,{{}},-,-,created,-", "chunks", 99_999),
        ("partitions", f"t,{LARGE},large,-,{{}},-,created,-", "sms", 99_999),
        ("devices", f"{{}},t,-,{LARGE},-,-,-,-", "ordinal", 99_999),
        ("devices", f"0,t,-,{LARGE},-,{{}},-,-", "sms", 99_999),
        ("devices", f"0,t,-,{LARGE},-,-,{{}},-", "chunks", 99_999),
    ],
)
def test_a_number_that_cannot_be_is_absent_and_counted(
    query: str, row: str, name: str, value: int
) -> None:
    (one,) = _list(listed(**{query: row.format(value)}), query) or ()
    assert getattr(one, name) == value
    found = listed(**{query: row.format(value + 1)})
    assert all(getattr(one, name) is None for one in _list(found, query) or ())
    assert sum(found.not_understood.values()) == 1


def test_a_process_on_two_gpus_is_one_client() -> None:
    found = listed(clients="7,srv,0,default,a\n7,srv,1,default,a\n")
    assert found.rows(NamespaceClient) == (NamespaceClient(7, "srv", "default", ("0", "1"), "a"),)


def test_several_gpus_of_a_server() -> None:
    row = "training,1000,48201,Ready,/run/nvidia-mps/training,GPU-abcd-1234,GPU-efgh-5678,-"
    (server,) = listed(servers=row).rows(NamedServer)
    assert server.allowed_devices == ("GPU-abcd-1234", "GPU-efgh-5678")
    # It is ambiguous which of the ordinals belong to the last column.
    found = listed(servers="training,1000,48201,Ready,/run/nvidia-mps/training,0,1,2")
    assert (_list(found, "servers"), found.not_understood) == ((), {("server_list", "row"): 1})


def test_a_refused_list_is_counted() -> None:
    refused = Exchange((PARTITIONS,), Outcome.OK, error="exit status 1, said nothing")
    observation = ControlObservation(1.0, "/mps", "reconciliation", Outcome.OK, (refused,))
    found = parse_lists(observation)
    assert (_list(found, "partitions"), found.not_understood) == (
        None,
        {("sm_partition_list", "reply"): 1},
    )


# ------------------------------------------------------------------------------ v2 partitions


def test_a_last_row_of_lspart_that_may_be_cut_is_not_believed() -> None:
    found = parse_lists(replied(lspart="GPU-bb 5 10 52 80\nGPU-bb Dx4AAA 10 8"))
    assert [one.sms for one in found.rows(SmPartition)] == [52]
    assert found.not_understood == {("lspart", "row"): 1}


@pytest.mark.parametrize(
    "row", ["GPU-aa 5 10", "GPU-a...", "GPU-aa Dx - x - 1 Yes", "0 5 10 52 80", "GPU-aa \x1b 1 2"]
)
def test_other_rows_of_lspart_are_refused(row: str) -> None:
    found = parse_lists(replied(lspart=f"GPU-bb 5 10 52 80\n{row}\n"))
    assert [one.device for one in found.rows(SmPartition)] == ["GPU-bb"]
    assert found.not_understood == {("lspart", "row"): 1}


# ------------------------------------------------------------------------------ laws


@given(st.lists(st.sampled_from([*published.LSPART_CAPTURE.split(" "), "\n", "٣", "-"])))
def test_no_reply_to_lspart_raises(words: list[str]) -> None:
    assert parse_lists(replied(lspart=" ".join(words))) is not None


def _said(value: Any) -> Sequence[Any]:
    """All the texts and numbers that something holds."""
    if isinstance(value, str | int | float):
        return [value]
    if isinstance(value, tuple | frozenset):
        return [one for part in value for one in _said(part)]
    fields = getattr(type(value), "__dataclass_fields__", {})
    return [one for name in fields for one in _said(getattr(value, name))]


_OWN_WORDS = {"2", "3", "unallocated", "created", "active_threads", "pinned_memory"}


# ------------------------------------------------------------------------------ tables


TABLES: Mapping[str, str] = {
    "servers": f"{published.SERVER_HEADER}\n{published.SERVER_DOCS}\n",
    "namespaces": published.MANUAL[NAMESPACES],
    "clients": f"{published.CLIENT_HEADER}\n{published.CLIENTS_CAPTURE}",
    "partitions": published.csv_of(published.PARTITIONS_TABLE),
    "devices": published.MANUAL[DEVICES],
    "features": published.FEATURES_CSV,
}
LISTS = st.sampled_from(sorted(TABLES))


def _cells(query: str) -> list[list[str]]:
    return [line.split(",") for line in TABLES[query].splitlines()]


def _text(rows: Sequence[Sequence[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def _list(found: Partitioning, query: str) -> tuple[object, ...] | None:
    return found.lists.get(KINDS[query])


@given(LISTS, st.data())
def test_a_column_that_is_there_twice_makes_the_list_unknown(
    query: str, data: st.DataObject
) -> None:
    rows = _cells(query)
    column = data.draw(st.integers(0, len(rows[0]) - 1))
    at = data.draw(st.integers(0, len(rows[0])))
    other = data.draw(st.sampled_from(["7", "other", "-"]))
    doubled = [
        [*row[:at], row[column] if number == 0 else other, *row[at:]]
        for number, row in enumerate(rows)
    ]
    found = read(**{query: _text(doubled)})
    assert _list(found, query) is None
    assert [part for _, part in found.not_understood] == ["reply"]


ODD_CELLS = st.sampled_from(
    [
        *("...", "31...", "NaN", "nan", "inf", "-1", "-5.0", "1e9", "0x10", "9" * 30, "A B", " "),
        *("99999999999999999999G", "999999999999999T", "8Q", "8 GiBs", "0G", "0.00", "100.01"),
        *("50,00", "٣", "\x1b[31m7\x1b[0m", "7\x00", "7\ufffd", "\udcff7", 'a"b', '"a', "a\nb"),
        *('x"} 1\nmps_up 9', "../x", "é", "\u202e7"),
    ]
)


def _values(found: object) -> set[str]:
    return {str(one) for one in _said(found) if not isinstance(one, bool)}


@settings(max_examples=400)
@given(LISTS, ODD_CELLS, st.data())
def test_an_odd_cell_is_shown_as_it_is_or_left_out_and_counted(
    query: str, odd: str, data: st.DataObject
) -> None:
    """Never is it a number, a name or a word that the cell does not say."""
    # If the last column may contain commas, a comma in another cell is ambiguous.
    assume("," not in odd or query in ("servers", "namespaces", "partitions"))
    rows = _cells(query)
    number = data.draw(st.integers(1, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[0]) - 1))
    rows[number][column] = odd
    found = read(**{query: _text(rows)})
    good = read(**{query: TABLES[query]})
    new = _values(_list(found, query)) - _values(_list(good, query)) - _OWN_WORDS - {""}
    if new:  # of it, nothing but its own text may be there
        assert all(value in odd and value.isprintable() for value in new), new
    elif _list(found, query) != _list(good, query):
        assert found.not_understood or odd.strip() in ("", "-")


@given(LISTS, st.data())
def test_a_cut_reply_says_nothing_that_the_whole_one_does_not(
    query: str, data: st.DataObject
) -> None:
    text = TABLES[query]
    cut = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.sampled_from(["", "...", "...\n"]))
    said = _values(_list(read(**{query: text[:cut] + end}), query))
    assert said <= _values(_list(read(**{query: text}), query)) | {""}


# ------------------------------------------------------------------------------ driver 580


@cache
def measured() -> dict[str, Exchange]:
    """What the tool of driver 580 printed on an H200: "arguments <<< standard input" -> its run."""
    text = Path(published.__file__).with_name("mps_580_versions.txt").read_text("utf-8")
    found = {}
    for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = part.partition("\n")
        match = re.fullmatch(r"rc=(\d+)\n--stdout\n(.*)--stderr\n(.*)", rest, re.DOTALL)
        assert match is not None
        what = title.partition("nvidia-cuda-mps-control ")[2]
        found[what] = Exchange(
            (), Outcome.OK, match[2], match[3].strip(), return_code=int(match[1])
        )
    return found


def test_its_answer_to_a_v3_query_leads_back_to_the_older_interface() -> None:
    run = replace(measured()["client list --format=csv <<< ''"], commands=(CLIENTS,))
    failure = failure_of(run)
    assert failure is not None
    assert failure.kind == "unparsable"
    assert other_interface(replace(run, outcome=Outcome.UNPARSABLE)) == "2"

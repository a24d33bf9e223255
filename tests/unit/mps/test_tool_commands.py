from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.protocol_v3 import SERVERS, V2_PARTITIONS
from mps_exporter.mps.tool_commands import (
    PROBE,
    Failure,
    ForbiddenCommandError,
    ProbeReply,
    ServerReply,
    failure_of,
    limit_commands,
    parse_probe,
    parse_server,
    server_commands,
    server_replies,
    shorten,
    stdin_text,
)
from mps_exporter.observations import ControlObservation, Exchange, Outcome
from testing import fake_mps_v3

GIB = 1 << 30
H200 = {0: "GPU-cd18ce24-f68b-0d05-0661-2061f87bf9c3"}

# Output of driver 580: four clients, one of them with two contexts.
FIRST = """0
ACTIVE
100.0
1135
1132
1133
1134
[0] 00:00.0, NVIDIA H200
1135.1
1132.2
1134.1
1132.1
1133.1
Default
Device Ordinal,PCI IDs,UUID,Name,Attributes
0,0000:00.06.00,GPU-cd18ce24-f68b-0d05-0661-2061f87bf9c3,NVIDIA H200,N/A

Server 468
Device Ordinal,PCI IDs,UUID,Name,Attributes
0,0000:00.06.00,GPU-cd18ce24-f68b-0d05-0661-2061f87bf9c3,NVIDIA H200,N/A
"""


def exchange(commands: tuple[str, ...], stdout: str, **more: Any) -> Exchange:
    return Exchange(commands, Outcome.OK, stdout, **{"return_code": 0, **more})


def asked(stdout: str, devices: tuple[int, ...] = (), *, map_devices: bool = False) -> Exchange:
    return exchange(server_commands(468, devices, map_devices=map_devices), stdout)


# ------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize(
    "command",
    [
        *("quit", "quit -t 5", "start_server -uid 0", "shutdown_server 468"),
        *("shutdown_server 468 -f", "terminate_client 468 1132"),
        *("set_default_active_thread_percentage 10", "set_active_thread_percentage 468 10"),
        *("set_default_device_pinned_mem_limit 0 1G", "set_device_pinned_mem_limit 468 0 1G"),
        *("set_default_client_priority 1", "sm_partition add GPU-0 2"),
        *("get_server_status 468\nquit", "get_server_status 468 ", "get_server_list\n"),
        *("get_server_status -1", "get_server_status ٣", "get_client_list", "", "ps"),
    ],
)
def test_nothing_but_the_commands_that_read_is_ever_sent(command: str) -> None:
    with pytest.raises(ForbiddenCommandError):
        stdin_text(("get_server_list", command))


@given(st.text())
def test_no_other_text_is_sent(text: str) -> None:
    try:
        sent = stdin_text((text,))
    except ForbiddenCommandError:
        return
    assert sent.startswith((b"get_", b"device_query ", b"lspart\n"))
    assert sent.count(b"\n") == 1


# ------------------------------------------------------------------------------ the probe

CANNOT_SEND = "Cannot send command to MPS control daemon process\n"


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        ("100.0\n", ProbeReply((), 1.0)),
        ("468\n33.3\n", ProbeReply((468,), 0.333)),
        ("468\n469\n0.5\n", ProbeReply((468, 469), 0.005)),
        ("468\r\n100.0\r\n", ProbeReply((468,), 1.0)),
    ],
)
def test_probe_replies(stdout: str, expected: ProbeReply) -> None:
    reply = parse_probe(exchange(PROBE, stdout))
    assert isinstance(reply, ProbeReply)
    assert reply.server_pids == expected.server_pids
    assert reply.default_active_thread_ratio == pytest.approx(expected.default_active_thread_ratio)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"stderr": "Cannot find MPS control daemon process\n", "return_code": 1}, "absent"),
        ({"stdout": "Cannot find MPS control daemon process\n", "return_code": 1}, "absent"),
        ({"stderr": CANNOT_SEND, "return_code": 1}, "refused"),
        ({"stderr": "Cannot authenticate or connect to MPS control daemon process\n"}, "refused"),
        ({"stdout": "Insufficient privileges for UID 1001. Control deamon …\n"}, "refused"),
        ({"return_code": 139}, "refused"),
        ({"stdout": ""}, "unparsable"),
        ({"stdout": "100.0\n468\n"}, "unparsable"),
    ],
)
def test_failed_probes(more: dict[str, Any], kind: str) -> None:
    probe = exchange(PROBE, more.pop("stdout", ""), **more)
    for failure in (parse_probe(probe), failure_of(probe)):
        assert isinstance(failure, Failure)
        assert failure.kind == kind


@pytest.mark.parametrize(
    ("command", "stdout", "stderr", "kind"),
    [
        ("get_server_status 468", "ACTIVE\n", "", None),
        # That a server is gone is an answer of the daemon.
        ("get_server_status 468", "Server 468 not found\n", "", None),
        ("get_server_status 468", "hello\n", "", "unparsable"),
        (V2_PARTITIONS, fake_mps_v3.LSPART_CAPTURE, "", None),
        (V2_PARTITIONS, "", "", "unparsable"),
        (V2_PARTITIONS, "", CANNOT_SEND, "refused"),
        (SERVERS, fake_mps_v3.SERVER_DOCS, "", None),
        *((SERVERS, text, "", None) for text in ("", "No servers")),
        (SERVERS, 'Unknown command "server"', "", "unparsable"),
        (SERVERS, CANNOT_SEND, "", "refused"),
    ],
)
def test_the_failure_of_another_query(
    command: str, stdout: str, stderr: str, kind: str | None
) -> None:
    failure = failure_of(exchange((command,), stdout, stderr=stderr))
    assert (None if failure is None else failure.kind) == kind


# ------------------------------------------------------------------------------ servers


def test_queries_that_an_older_daemon_does_not_support() -> None:
    reply = parse_server(
        asked('Unknown command "get_default_client_priority"\nUnknown command "x"\n50.0\n12\n')
    )
    assert reply == ServerReply(
        server_pid=468, active_thread_ratio=0.5, client_pids=(12,), contexts={}
    )


@pytest.mark.parametrize(
    ("stdout", "kind"),
    [
        ("0\n" + "Server 468 not found\n" * 4, "server_not_found"),
        ("0\nACTIVE\n50.0\n12\n[0] x, y\n12.1\nServer 468 not found\n", "server_not_found"),
        ("0\nACTIVE\n", "unparsable"),
        ("0\nACTIVE\n50.0\nhello\n", "unparsable"),
        ("ACTIVE\n50.0\n", "unparsable"),
        ("0\nactive\n50.0\n", "unparsable"),
        ("0\nACTIVE\n50.0\n10GB\n100.0\n12\n", "unparsable"),
    ],
)
def test_what_is_not_the_state_of_a_server(stdout: str, kind: str) -> None:
    """A server may end before the last query."""
    reply = parse_server(asked(stdout, (0,) if "GB" in stdout else ()))
    assert isinstance(reply, Failure)
    assert reply.kind == kind


@pytest.mark.parametrize(
    ("stdout", "own", "default"),
    [
        ("3G\n100.0\n1G\n", {0: 3 * GIB}, {0: GIB}),
        ("3G\n100.0\n", {0: 3 * GIB}, {}),
        ("100.0\n1G\n", {}, {0: GIB}),
        ("100.0\n", {}, {}),
    ],
)
def test_a_reconciliation_puts_the_exchanges_of_a_server_together(
    stdout: str, own: dict[int, int], default: dict[int, int]
) -> None:
    """Without a limit, the tool prints no line."""
    limits = exchange(limit_commands(468, (0,)), stdout)
    other = exchange(server_commands(9, map_devices=False), "0\n" + "Server 9 not found\n" * 4)
    hung = Exchange(server_commands(10, map_devices=False), Outcome.TIMEOUT)
    observation = ControlObservation(
        at=1.0,
        pipe_directory="/tmp/mps",
        kind="reconciliation",
        outcome=Outcome.TIMEOUT,
        exchanges=(asked(FIRST, map_devices=True), limits, other, hung),
    )
    assert server_replies(observation) == [
        ServerReply(
            *(468, "ACTIVE", 1.0, (1135, 1132, 1133, 1134)),
            contexts={0: {1135: 1, 1132: 2, 1134: 1, 1133: 1}},
            devices=H200,
            pinned_memory_limit_bytes=own,
            default_pinned_memory_limit_bytes=default,
            default_active_thread_ratio=1.0,
            default_client_priority=0,
        )
    ]


# ------------------------------------------------------------------------------ laws

LINES = st.lists(st.sampled_from(FIRST.split("\n")) | st.text(max_size=20), max_size=12).map(
    "\n".join
)


@given(LINES, LINES, st.sampled_from([None, 0, 1, -9]))
def test_no_text_is_too_strange(stdout: str, stderr: str, return_code: int | None) -> None:
    for commands in (PROBE, server_commands(468, (0, 1), map_devices=True), ("quit",), ()):
        strange = exchange(commands, stdout, stderr=stderr, return_code=return_code)
        assert isinstance(parse_probe(strange), ProbeReply | Failure)
        assert isinstance(parse_server(strange), ServerReply | Failure)


@given(st.text(), st.integers(1, 50))
def test_quotations_are_one_short_line(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert len(short.splitlines()) <= 1

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter import humanize
from mps_exporter.humanize import MPS_NAMES
from mps_exporter.snapshot import EndedBefore, Incident, IncidentKind


@pytest.mark.parametrize(
    ("show", "number", "expected"),
    [
        *((humanize.duration, -1, "0 ms"), (humanize.duration, 0.025, "25 ms")),
        *((humanize.duration, 4.21, "4.2 s"), (humanize.duration, 90, "2 min")),
        *((humanize.duration, 7500, "2 h 5 min"), (humanize.duration, 273_600, "3 d 4 h")),
        *((humanize.memory, 0, "0 B"), (humanize.memory, 608_174_080, "580 MiB")),
        (humanize.memory, 1.5 * 2**30, "1.5 GiB"),
    ],
)
def test_quantities(show: Callable[[float], str], number: float, expected: str) -> None:
    assert show(number) == expected


FAULT = Incident(0, "fault", 634, 1001, (641, 642), proof="address")
ERROR = "A fatal GPU error in alice's server 634: "
LOST = "2 clients were lost (processes 641 and 642)"
ENDED = (EndedBefore(640, 0.163), EndedBefore(0, 0.2))


@pytest.mark.parametrize(
    ("incident", "expected"),
    [
        (Incident(0, "daemon_died"), "The daemon died; no client was connected."),
        (
            Incident(0, "daemon_died", detail="why is not known"),
            "The daemon ended; no client was connected; why is not known.",
        ),
        (
            Incident(0, "server_crashed", 634, None, (0, 0)),
            "The server 634 crashed; 2 clients were lost.",
        ),
        (Incident(0, "fault"), "A fatal GPU error in a server."),
        (
            replace(FAULT, pids=(642,), proof="unknown", ended_before=ENDED),
            f"{ERROR}which client caused it is not known; 1 client was lost (process 642); "
            "possible, but not proved: process 640 (ended 0.2 s before); a client (ended 0.2 s "
            "before).",
        ),
        (
            replace(FAULT, proof="unit"),
            f"{ERROR}a client that was running used a bad pointer, and which one is not known; "
            f"{LOST}.",
        ),
        (
            replace(FAULT, blamed_pid=641, caused_by_pids=(641,)),
            f"{ERROR}process 641 used a bad pointer (proved by the kernel log); 1 other client was "
            "lost (process 642).",
        ),
        (
            replace(FAULT, kind="unfinished_work", blamed_pid=641, caused_by_pids=(640,)),
            "Process 640 left GPU work unfinished, which caused a fatal GPU error in alice's "
            f"server 634 (proved by the kernel log); {LOST}; MPS names process 641, {MPS_NAMES}.",
        ),
        (
            Incident(0, "client_rejected", detail="novelty"),
            "A client of an unknown user was refused: novelty.",
        ),
    ],
)
def test_incident(incident: Incident, expected: str) -> None:
    shown = humanize.describe_incident(
        incident, lambda uid: humanize.user_name(uid, "alice" if uid == 1001 else None)
    )
    assert shown == expected


def test_every_kind_has_a_sentence() -> None:
    assert set(humanize._SENTENCES) == set(get_args(IncidentKind))


@given(st.text(st.characters(codec=None)))
def test_names_become_one_visible_line(name: str) -> None:
    shown = humanize.printable(name)

    shown.encode("utf-8")
    assert "\n" not in shown
    assert len(shown) <= humanize.MAX_NAME_CHARACTERS + 1
    assert not any(ord(character) < 32 or ord(character) == 127 for character in shown)


def test_plain_names_stay_as_they_are() -> None:
    assert humanize.printable("python3: trän.py") == "python3: trän.py"
    assert humanize.printable("a" * 200) == "a" * 120 + "…"

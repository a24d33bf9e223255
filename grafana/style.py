"""Colours, units and thresholds: each said once, for all dashboards."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

RULES = Path(__file__).parent.parent / "prometheus" / "rules"

GOOD, NOTICE, WARN, BAD = "green", "yellow", "orange", "red"
USED, REAL, QUIET = "blue", "green", "#8e8e8e"
# Not the grey of what is not known: that there is no MPS, or no client, is known.
UNUSED, IDLE = "#4f6d9a", "#8ab8ff"
# Nor is a host that was taken off the list of targets one that does not answer.
GONE = "#6a4f7a"

# A user's colour goes by the last digit of the uid: the same in every panel, in whatever order
# users come. No red and no green: those say something. All are seen on white and on black.
BY_LAST_DIGIT = (
    "#5794f2",
    "#b877d9",
    "#c2841a",
    "#2f9fb8",
    "#d65db1",
    "#9c9328",
    "#7d73e6",
    "#b0753c",
    "#e07a1f",
    "#7890ab",
)
OF_CAUSES = {
    "server_crashed": "red",
    "daemon_died": "dark-red",
    "own_fault": "purple",
    "neighbour_fault": "orange",
    "unfinished_work": "yellow",
    "unattributed_fault": "#8e8e8e",
    "terminated": "blue",
    "context_limit": "orange",
    "server_not_ready": "purple",
    "invalid_device": "blue",
    "credentials": "yellow",
}

# Units as Grafana names them. Counts are whole numbers: 1050, not 1.05 K.
COUNT, SHARE, SECONDS, BYTES = "none", "percentunit", "s", "bytes"
BYTES_PER_SECOND, WATTS, CELSIUS, HERTZ = "Bps", "watt", "celsius", "hertz"
AGO, WORDS = "dateTimeFromNow", "string"
# 1:26 of a wait, in words 1.44 mins.
DURATION = "dtdhms"


@dataclass(frozen=True, slots=True)
class Steps:
    """Colours of a value: from which number on it has which."""

    steps: tuple[tuple[float | None, str], ...]

    def json(self) -> Json:
        """Return Grafana's form."""
        return {
            "mode": "absolute",
            "steps": [{"value": value, "color": color} for value, color in self.steps],
        }

    def only_bad(self) -> Steps:
        """Return the steps without green and grey: for cells, most of which are healthy."""
        return Steps(
            tuple(
                (at, "transparent" if color in {GOOD, QUIET} else color) for at, color in self.steps
            )
        )


PLAIN = Steps(((None, "text"),))
UNCOLORED = Steps(((None, QUIET),))
CLEAR = Steps(((None, "transparent"),))


def at_most(warn: float, bad: float | None = None) -> Steps:
    """Good from 0 to warn; bad from there on where no second step is given.

    Below 0 is where Grafana puts a missing value: it is grey, because nothing is known.
    """
    known: tuple[tuple[float | None, str], ...] = ((None, QUIET), (0, GOOD))
    if bad is None:
        return Steps((*known, (warn, BAD)))
    return Steps((*known, (warn, WARN), (bad, BAD)))


def noticed_from(warn: float) -> Steps:
    """Good below `warn`, a notice from there on; grey if unknown."""
    return Steps(((None, QUIET), (0, GOOD), (warn, WARN)))


@dataclass(frozen=True, slots=True)
class State:
    """What a number stands for, and how it looks."""

    code: int
    text: str
    color: str


def mappings(*states: State) -> list[Json]:
    """Grafana's value mappings of states."""
    options = {
        str(state.code): {"text": state.text, "color": state.color, "index": index}
        for index, state in enumerate(states)
    }
    return [{"type": "value", "options": options}]


def not_known(text: str, color: str) -> Json:
    """Return Grafana's value mapping of a missing value."""
    result = {"text": text, "color": color}
    return {"type": "special", "options": {"match": "null+nan", "result": result}}


# Codes of all state sets differ, because timelines show several of them. Within a set the greatest
# is the worst: it wins where several are shown as one.
NO_MPS = State(-1, "no MPS", UNUSED)  # The state of tiles that otherwise have a number.
DAEMON_STATES = (
    State(-1, "unreachable", QUIET),
    State(0, "no MPS", UNUSED),
    State(1, "answering", GOOD),
    State(2, "draining", NOTICE),
    State(3, "refused", WARN),
    State(4, "absent", BAD),
    State(5, "unresponsive", "dark-red"),
)
SERVER_STATES = (
    State(8, "Ready", GOOD),
    State(10, "other", QUIET),
    State(11, "ACTIVE", GOOD),
    State(12, "INITIALIZING", NOTICE),
    State(13, "FAULT", BAD),
    State(14, "ghost", "dark-red"),
)
HOLDER_STATES = (
    State(21, "server idle", IDLE),
    State(22, "waiting", WARN),
    State(23, "connected", USED),
    State(24, "idle, others wait", BAD),
    State(25, "dead in queue", "dark-red"),
)
HOST_STATES = (
    State(0, "no MPS", UNUSED),
    State(1, "healthy, no alert", GOOD),
    State(2, "advice", USED),
    State(3, "monitoring incomplete", NOTICE),
    State(4, "daemon draining", NOTICE),
    State(5, "gone", GONE),
    State(6, "warning fires", WARN),
    State(7, "clients waiting", WARN),
    State(8, "daemon refuses", WARN),
    State(9, "clients lost", BAD),
    State(10, "critical alert", BAD),
    State(11, "dead in queue", BAD),
    State(12, "server in FAULT", BAD),
    State(13, "GPU unhealthy", BAD),
    State(14, "daemon absent", BAD),
    State(15, "ghost server", "dark-red"),
    State(16, "daemon hangs", "dark-red"),
    State(17, "unreachable", QUIET),
)
USER_STATES = (
    State(0, "not connected", UNUSED),
    State(21, "server idle", IDLE),
    State(22, "waiting", WARN),
    State(23, "connected", USED),
    State(25, "dead in queue", "dark-red"),
    State(26, "torn down", BAD),
)


def codes(states: tuple[State, ...], *names: str) -> dict[str, int]:
    """State -> code, of those states that the exporter has a word for."""
    return {state.text: state.code for state in states if not names or state.text in names}


@functools.cache
def _rules() -> tuple[Json, ...]:
    documents = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(RULES.glob("*.yml"))]
    groups = [group for document in documents for group in document["groups"]]
    return tuple(rule for group in groups for rule in group["rules"])


@functools.cache
def recorded(name: str) -> str:
    """Return the expression of a recording rule."""
    (expr,) = (rule["expr"] for rule in _rules() if rule.get("record") == name)
    return str(expr)


@functools.cache
def first_steps() -> dict[str, str]:
    """Alert -> what its description says to do first, a sentence; labels are named in capitals."""
    found: dict[str, str] = {}
    for rule in _rules():
        if "alert" not in rule:
            continue
        _, _, step = rule["annotations"]["description"].partition("First: ")
        step = re.sub(r" \([^()]*\)(?=[ .,;])", "", step)
        step = re.sub(r"\{\{-?\s*\$labels\.(\w+)\s*-?\}\}", lambda name: name[1].upper(), step)
        # What depends on more than labels is in the runbook only; a cell has room for a sentence.
        sentence = step.split(". ")[0].rstrip(".") + "."
        if "{{" in sentence:
            sentence = "See the runbook."
        sentence = " ".join(sentence.split())
        found.setdefault(rule["alert"], sentence[0].upper() + sentence[1:])
    return found


def alert_threshold(alert: str, metric: str) -> float:
    """Return the number that an alert compares an expression with this metric to.

    Panels turn red exactly when the alert fires.
    """
    (rule,) = (rule for rule in _rules() if rule.get("alert") == alert)
    found = re.search(rf"{metric}\b[^<>]* [<>]=? ([\d.]+)(?: ([*^]) (\d+))?", rule["expr"])
    if found is None:
        raise LookupError(f"{alert} does not compare {metric} with a number")
    number, operator, other = float(found[1]), found[2], float(found[3] or 1)
    return number**other if operator == "^" else number * other

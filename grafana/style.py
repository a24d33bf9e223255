"""Colours, units and thresholds: each said once, for all dashboards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

Json = dict[str, Any]

RULES = Path(__file__).parent.parent / "prometheus" / "rules"

GOOD, NOTICE, WARN, BAD = "green", "yellow", "orange", "red"
USED, REAL, QUIET, DEMO = "blue", "green", "#8e8e8e", "purple"

# A user's colour goes by the last digit of the uid: the same in every panel, in whatever order
# users come. No red and no green: those say something. All are seen on white and on black.
BY_LAST_DIGIT = (
    "#5794f2", "#b877d9", "#c2841a", "#2f9fb8", "#d65db1",
    "#9c9328", "#7d73e6", "#b0753c", "#e07a1f", "#7890ab",
)  # fmt: skip
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

# Units as Grafana names them.
COUNT, SHARE, SECONDS, BYTES = "short", "percentunit", "s", "bytes"
BYTES_PER_SECOND, WATTS, CELSIUS, HERTZ = "Bps", "watt", "celsius", "hertz"
PER_SECOND, AGO, WORDS = "cps", "dateTimeFromNow", "string"


@dataclass(frozen=True, slots=True)
class Steps:
    """Colours of a value: from which number on it has which."""

    steps: tuple[tuple[float | None, str], ...]

    def json(self) -> Json:
        """Give Grafana's form."""
        return {
            "mode": "absolute",
            "steps": [{"value": value, "color": color} for value, color in self.steps],
        }


PLAIN = Steps(((None, "text"),))
CALM = Steps(((None, USED),))


def at_most(warn: float, bad: float | None = None) -> Steps:
    """Good below warn; bad from there on where no second step is given."""
    if bad is None:
        return Steps(((None, GOOD), (warn, BAD)))
    return Steps(((None, GOOD), (warn, WARN), (bad, BAD)))


def noticed_from(warn: float) -> Steps:
    """Good below, worth a look from there on."""
    return Steps(((None, GOOD), (warn, WARN)))


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


NO_YES = mappings(State(0, "no", GOOD), State(1, "yes", BAD))

# The daemon's states, from well to worst: the greatest code wins where several are shown as one.
DAEMON_STATES = (
    State(1, "answering", GOOD),
    State(2, "draining", NOTICE),
    State(3, "refused", WARN),
    State(4, "absent", BAD),
    State(5, "unresponsive", "dark-red"),
)
# Their codes differ from those of daemons: a timeline shows both.
SERVER_STATES = (
    State(10, "other", QUIET),
    State(11, "ACTIVE", GOOD),
    State(12, "INITIALIZING", NOTICE),
    State(13, "FAULT", BAD),
    State(14, "ghost", "dark-red"),
)
HOLDER_STATES = (
    State(1, "server idle", QUIET),
    State(2, "waits", WARN),
    State(3, "holds the GPU", USED),
    State(4, "idle, others wait", BAD),
)


def codes(states: tuple[State, ...], *names: str) -> dict[str, int]:
    """State -> code, of those states that the exporter has a word for."""
    return {state.text: state.code for state in states if not names or state.text in names}


@functools.cache
def alert_threshold(alert: str, metric: str) -> float:
    """Give the number that an alert compares an expression with this metric to.

    Panels turn red where somebody is called, not a little before or after.
    """
    for path in sorted(RULES.glob("*.yml")):
        document = yaml.safe_load(path.read_text("utf-8"))
        for group in document["groups"]:
            for rule in group["rules"]:
                if rule.get("alert") == alert:
                    for limit in _limits(promql_parser.parse(rule["expr"]), metric):
                        return limit
    raise LookupError(f"no alert {alert} compares {metric} with a number")


def _limits(node: Any, metric: str) -> Iterator[float]:
    if isinstance(node, promql_parser.ParenExpr):
        yield from _limits(node.expr, metric)
    elif isinstance(node, promql_parser.BinaryExpr):
        limit = _number(node.rhs)
        if limit is not None and str(node.op) in {">", ">=", "<", "<="}:
            if metric in str(node.lhs):
                yield limit
        else:
            yield from _limits(node.lhs, metric)
            yield from _limits(node.rhs, metric)


def _number(node: Any) -> float | None:
    if isinstance(node, promql_parser.NumberLiteral):
        return float(node.val)
    if isinstance(node, promql_parser.ParenExpr):
        return _number(node.expr)
    if isinstance(node, promql_parser.BinaryExpr):
        left, right = _number(node.lhs), _number(node.rhs)
        if left is None or right is None:
            return None
        return {"*": left * right, "^": left**right, "/": left / (right or 1)}.get(str(node.op))
    return None

"""Metrics that a PromQL expression uses, and labels that its result can have.

Follows the syntax tree upwards from the catalogue. Errors are: a label that no series has, a rate
of a gauge, a join that can match nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import promql_parser as parser

from grafana import promql
from mps_exporter.metrics import CATALOGUE

Kind = Literal["counter", "gauge"]

TARGET_LABELS = frozenset({"job", "instance", "environment"})
"""Labels that Prometheus adds to a scraped series. `environment` represents all labels that a site
may add: an alert that loses it cannot be routed by it."""


@dataclass(frozen=True)
class Series:
    """A metric as Prometheus stores it: the meaning of its values, and its possible labels."""

    kind: Kind
    labels: frozenset[str]


_POD = ("namespace", "pod", "uid")
_KUBE_STATE_METRICS = {
    "kube_pod_container_info": "container container_id image image_id image_spec",
    "kube_pod_info": "host_ip pod_ip node created_by_kind created_by_name priority_class"
    " host_network",
}
"""Series of kube-state-metrics, version 2: their labels besides _POD."""


def _series() -> dict[str, Series]:
    names = [
        f"{spec.name}{suffix}"
        for spec in CATALOGUE.values()
        for suffix in (("_bucket", "_count", "_sum") if spec.kind == "histogram" else ("",))
    ]
    labels = {name: promql.labels_of(name) for name in (*names, *promql.FOREIGN)}
    for name, words in _KUBE_STATE_METRICS.items():
        labels[name] = (*_POD, *words.split())
    counters = ("_total", "_bucket", "_count", "_sum")
    return {
        name: Series("counter" if name.endswith(counters) else "gauge", TARGET_LABELS | {*found})
        for name, found in labels.items()
    }


OVER_COUNTERS = {"rate", "increase", "resets"}
OVER_BOTH = {"last_over_time", "min_over_time"}
"""The least value of a counter that is not reset is its first."""
OVER_GAUGES = {"avg_over_time", "max_over_time", "sum_over_time"}
KEEPS_LABELS = {"timestamp", "round", "clamp_min", "clamp_max", "sort_desc"}
SET_OPERATORS = {"and", "or", "unless"}
COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


class PromqlError(AssertionError):
    """An expression that cannot have the result that it is written for."""


def parse(expr: str) -> Any:
    """Return the syntax tree. Raises ValueError if it is not PromQL."""
    return parser.parse(expr)


def walk(node: Any) -> Iterator[Any]:
    yield node
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in (*below, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from walk(child)


def selectors(node: Any) -> Iterator[Any]:
    return (found for found in walk(node) if isinstance(found, parser.VectorSelector))


def matchers(selector: Any) -> list[tuple[str, str, str]]:
    """Return (label, operator, value) of a selector, without the name of the metric."""
    operators = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    return [
        (matcher.name, operators[str(matcher.op).rsplit(".", 1)[-1]], matcher.value)
        for matcher in selector.matchers.matchers
        if matcher.name != "__name__"
    ]


def _require(labels: frozenset[str], known: frozenset[str], complaint: str) -> None:
    if unknown := labels - known:
        raise PromqlError(f"{complaint} {', '.join(sorted(unknown))}")


class Schema:
    """All series: of the catalogue, of other programs, and those that rules record."""

    def __init__(self, recorded: Mapping[str, str]) -> None:
        self._recorded = dict(recorded)
        self._known = _series()

    def series(self, name: str) -> Series:
        """Return the series of this name; a recorded series has the labels of its expression."""
        if name not in self._known:
            if name not in self._recorded:
                raise PromqlError(f"no such metric: {name}")
            expr = self._recorded.pop(name)  # a rule that needs itself finds nothing
            self._known[name] = Series("gauge", self.labels(parse(expr)) or frozenset())
        return self._known[name]

    def labels(self, node: Any) -> frozenset[str] | None:
        """Return the labels that the result can have; None for a scalar. Raises PromqlError."""
        match node:
            case parser.NumberLiteral() | parser.StringLiteral():
                return None
            case parser.VectorSelector() if node.name is None:  # by a pattern of names
                return TARGET_LABELS
            case parser.VectorSelector():
                known = self.series(str(node.name)).labels
                _require(
                    frozenset(name for name, _, _ in matchers(node)),
                    known,
                    f"{node.name} has no label",
                )
                return known
            case parser.MatrixSelector():
                return self.labels(node.vector_selector)
            case parser.AggregateExpr():
                return self._aggregate(node)
            case parser.BinaryExpr():
                return self._binary(node)
            case parser.Call():
                return self._call(node)
            case _:
                return self.labels(node.expr)

    def _vector(self, node: Any) -> frozenset[str]:
        labels = self.labels(node)
        if labels is None:
            raise PromqlError(f"a scalar where a vector is needed: {node.prettify()}")
        return labels

    def _aggregate(self, node: Any) -> frozenset[str]:
        inner = self._vector(node.expr)
        if str(node.op) == "topk":
            return inner
        if str(node.op) == "count_values":
            return frozenset({cast("str", node.param.val)})
        if node.modifier is None:
            return frozenset()
        named = frozenset(node.modifier.labels)
        _require(named, inner, f"{node.op} by or without labels that are not there:")
        return named if _is(node.modifier.type, "By") else inner - named

    def _binary(self, node: Any) -> frozenset[str] | None:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        operator = str(node.op)
        if left is None or right is None:
            if operator in SET_OPERATORS:
                raise PromqlError(f"{operator} needs two vectors")
            return right if left is None else left
        matching = node.modifier.matching if node.modifier is not None else None
        named = frozenset[str](matching.labels) if matching is not None else frozenset[str]()
        if matching is not None and _is(matching.type, "Include"):
            _require(named, left & right, f"{operator} on labels that one side lacks:")
            reduced = named
        else:
            reduced = left - named
            if operator != "or" and (odd := reduced ^ (right - named)):
                raise PromqlError(f"{operator} can match nothing: one side lacks {sorted(odd)}")
        if operator in SET_OPERATORS:
            return left | right if operator == "or" else left
        card = str(node.modifier.card) if node.modifier is not None else ""
        for name, many, one in (("ManyToOne", left, right), ("OneToMany", right, left)):
            if name in card:
                included = frozenset(group_labels(node))
                _require(included, one, "group_left or group_right of labels that are not there:")
                return many | included
        return reduced if matching is not None else left

    def _over_time(self, name: str, over: Any) -> frozenset[str]:
        if isinstance(over, parser.MatrixSelector) and name not in OVER_BOTH:
            metric = str(over.vector_selector.name)
            wanted = "counter" if name in OVER_COUNTERS else "gauge"
            if self.series(metric).kind != wanted:
                raise PromqlError(f"{name}() of {metric}, which is no {wanted}")
        return self._vector(over)

    def _call(self, node: Any) -> frozenset[str] | None:
        name = str(node.func.name)
        arguments = list(node.args)
        if name in {"time", "scalar"}:
            return None
        if name in OVER_COUNTERS | OVER_GAUGES | OVER_BOTH:
            return self._over_time(name, arguments[-1])
        if name in {"vector", "absent"}:
            here = matchers(arguments[0]) if name == "absent" else ()
            return frozenset(label for label, op, _ in here if op == "=")
        if name == "histogram_quantile":
            inner = self._vector(arguments[1])
            _require(frozenset({"le"}), inner, "histogram_quantile() without")
            return inner - {"le"}
        if name in {"label_replace", "label_join"}:
            inner = self._vector(arguments[0])
            target, *_ = texts = [cast("str", each.val) for each in arguments[1:]]
            # Behind the target and the replacement: the source; behind the separator: all sources.
            sources = frozenset(texts[2:3] if name == "label_replace" else texts[2:]) - {""}
            _require(sources, inner, f"{name}() of labels that are not there:")
            return inner | {target}
        if name in KEEPS_LABELS:
            return self._vector(arguments[0])
        raise PromqlError(f"{name}() is unknown to this test: describe it in testing/promql.py")


def group_labels(node: Any) -> list[str]:
    return list(node.modifier.group_labels or ())


def _is(kind: Any, name: str) -> bool:
    return str(kind).rsplit(".", 1)[-1] == name

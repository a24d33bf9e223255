"""Metrics that a PromQL expression uses, and labels that its result can have.

Follows the syntax tree upwards from the catalogue. Errors are: a label that no series has, a rate
of a gauge, a join that can match nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import promql_parser as parser

from mps_exporter.metrics import CATALOGUE

Kind = Literal["counter", "gauge"]

TARGET_LABELS = frozenset({"job", "instance", "environment"})
"""What Prometheus adds to a scraped series. `environment` stands for all the labels that a site
may add: an alert that loses it cannot be routed by it."""


@dataclass(frozen=True)
class Series:
    """A metric as Prometheus stores it: what its values mean, which labels it can have."""

    kind: Kind
    labels: frozenset[str]


def _catalogue() -> dict[str, Series]:
    series: dict[str, Series] = {}
    for spec in CATALOGUE.values():
        labels = TARGET_LABELS | set(spec.labels)
        if spec.kind == "histogram":
            series[f"{spec.name}_bucket"] = Series("counter", labels | {"le"})
            series[f"{spec.name}_count"] = Series("counter", labels)
            series[f"{spec.name}_sum"] = Series("counter", labels)
        elif spec.kind == "stateset":
            series[spec.name] = Series("gauge", labels | {spec.name})
        else:
            series[spec.name] = Series("counter" if spec.kind == "counter" else "gauge", labels)
    return series


_POD = frozenset({"namespace", "pod", "uid"})
_ALERT = {"alertname", "alertstate", "severity", "daemon", "server", "gpu", "uid"}
_CONTAINER = {"container", "container_id", "image", "image_id", "image_spec"}
_POD_INFO = {
    "host_ip",
    "pod_ip",
    "node",
    "created_by_kind",
    "created_by_name",
    "priority_class",
    "host_network",
}
FOREIGN = {
    # Prometheus's own, and what the exporter says of its process.
    "up": Series("gauge", TARGET_LABELS),
    "process_start_time_seconds": Series("gauge", TARGET_LABELS),
    "process_cpu_seconds_total": Series("counter", TARGET_LABELS),
    "process_resident_memory_bytes": Series("gauge", TARGET_LABELS),
    "process_open_fds": Series("gauge", TARGET_LABELS),
    "process_max_fds": Series("gauge", TARGET_LABELS),
    "scrape_duration_seconds": Series("gauge", TARGET_LABELS),
    "scrape_samples_scraped": Series("gauge", TARGET_LABELS),
    # Alerts carry the labels of what they are about.
    "ALERTS": Series("gauge", TARGET_LABELS | _ALERT),
    "ALERTS_FOR_STATE": Series("gauge", TARGET_LABELS | _ALERT),
    # kube-state-metrics, version 2.
    "kube_pod_container_info": Series("gauge", TARGET_LABELS | _POD | _CONTAINER),
    "kube_pod_info": Series("gauge", TARGET_LABELS | _POD | _POD_INFO),
}

OVER_COUNTERS = {"rate", "irate", "increase", "resets"}
OVER_GAUGES = {
    "avg_over_time",
    "min_over_time",
    "max_over_time",
    "sum_over_time",
    "delta",
    "deriv",
    "predict_linear",
    "quantile_over_time",
    "stddev_over_time",
    "changes",
}
OVER_BOTH = {"last_over_time"}
KEEPS_LABELS = {"round", "abs", "ceil", "floor", "clamp_min", "clamp_max", "sort", "sort_desc"}
SET_OPERATORS = {"and", "or", "unless"}
COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


class PromqlError(AssertionError):
    """An expression that cannot have the result it is written for."""


def parse(expr: str) -> Any:
    """The syntax tree; raises ValueError for what is no PromQL."""
    return parser.parse(expr)


def children(node: Any) -> Iterator[Any]:
    match node:
        case parser.BinaryExpr():
            yield from (node.lhs, node.rhs)
        case parser.Call():
            yield from node.args
        case parser.MatrixSelector():
            yield node.vector_selector
        case parser.AggregateExpr() | parser.ParenExpr() | parser.UnaryExpr():
            yield node.expr
        case parser.SubqueryExpr():
            yield node.expr
        case _:
            return


def walk(node: Any) -> Iterator[Any]:
    yield node
    for child in children(node):
        yield from walk(child)


def selectors(node: Any) -> Iterator[Any]:
    """Every mention of a metric."""
    return (found for found in walk(node) if isinstance(found, parser.VectorSelector))


def matchers(selector: Any) -> list[tuple[str, str, str]]:
    """(label, operator, value) of a selector, the name of the metric left out."""
    operators = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    return [
        (matcher.name, operators[str(matcher.op).rsplit(".", 1)[-1]], matcher.value)
        for matcher in selector.matchers.matchers
        if matcher.name != "__name__"
    ]


class Schema:
    """All series that there are: of the catalogue, of others, and those that rules record."""

    def __init__(self, recorded: Mapping[str, str]) -> None:
        self._recorded = dict(recorded)
        self._series = _catalogue() | FOREIGN

    def series(self, name: str) -> Series:
        """The series of this name; of a recorded one, as its expression makes it."""
        if name not in self._series:
            if name not in self._recorded:
                raise PromqlError(f"no such metric: {name}")
            expr = self._recorded.pop(name)  # a rule that needs itself finds nothing
            self._series[name] = Series("gauge", self.labels(parse(expr)) or frozenset())
        return self._series[name]

    def labels(self, node: Any) -> frozenset[str] | None:
        """The labels that the result can have; None for a scalar. Raises PromqlError."""
        match node:
            case parser.NumberLiteral() | parser.StringLiteral():
                return None
            case parser.VectorSelector():
                return self._selector(node)
            case parser.MatrixSelector():
                return self._selector(node.vector_selector)
            case parser.AggregateExpr():
                return self._aggregate(node)
            case parser.BinaryExpr():
                return self._binary(node)
            case parser.Call():
                return self._call(node)
            case _:
                return self.labels(node.expr)

    def _selector(self, node: Any) -> frozenset[str]:
        series = self.series(node.name)
        for label, _, _ in matchers(node):
            if label not in series.labels:
                raise PromqlError(f"{node.name} has no label {label}")
        return series.labels

    def _vector(self, node: Any) -> frozenset[str]:
        labels = self.labels(node)
        if labels is None:
            raise PromqlError(f"a scalar where a vector is needed: {node.prettify()}")
        return labels

    def _aggregate(self, node: Any) -> frozenset[str]:
        inner = self._vector(node.expr)
        if str(node.op) in {"topk", "bottomk"}:
            return inner
        if node.modifier is None:
            return frozenset()
        named = frozenset(node.modifier.labels)
        if extra := named - inner:
            raise PromqlError(f"{node.op} by or without labels that are not there: {sorted(extra)}")
        return named if _is(node.modifier.type, "By") else inner - named

    def _binary(self, node: Any) -> frozenset[str] | None:
        left, right = self.labels(node.lhs), self.labels(node.rhs)
        if left is None or right is None:
            if str(node.op) in SET_OPERATORS:
                raise PromqlError(f"{node.op} needs two vectors")
            return right if left is None else left
        matching = node.modifier.matching if node.modifier is not None else None
        key: frozenset[str]
        if matching is not None and _is(matching.type, "Include"):
            key = frozenset(matching.labels)
            for side in (left, right):
                if extra := key - side:
                    raise PromqlError(f"{node.op} on labels that one side lacks: {sorted(extra)}")
            reduced = key
        else:
            ignored = frozenset(matching.labels) if matching is not None else frozenset()
            key = left - ignored
            if str(node.op) != "or" and key != right - ignored:
                odd = sorted(key ^ (right - ignored))
                raise PromqlError(f"{node.op} can match nothing, since one side lacks {odd}")
            reduced = key
        if str(node.op) in SET_OPERATORS:
            return left | right if str(node.op) == "or" else left
        card = str(node.modifier.card) if node.modifier is not None else ""
        if "ManyToOne" in card:
            return left | self._included(node, right)
        if "OneToMany" in card:
            return right | self._included(node, left)
        return reduced if matching is not None else left

    @staticmethod
    def _included(node: Any, one_side: frozenset[str]) -> frozenset[str]:
        included = frozenset(group_labels(node))
        if extra := included - one_side:
            raise PromqlError(f"group_left or group_right of labels not there: {sorted(extra)}")
        return included

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
        if name in {"time", "scalar", "pi"}:
            return None
        if name in OVER_COUNTERS | OVER_GAUGES | OVER_BOTH:
            return self._over_time(name, arguments[-1])
        if name in {"vector", "absent"}:
            here = matchers(arguments[0]) if name == "absent" else ()
            return frozenset(label for label, op, _ in here if op == "=")
        if name == "histogram_quantile":
            inner = self._vector(arguments[1])
            if "le" not in inner:
                raise PromqlError("histogram_quantile() without le")
            return inner - {"le"}
        if name == "label_replace":
            inner = self._vector(arguments[0])
            source = cast("str", arguments[3].val)
            if source and source not in inner:
                raise PromqlError(f"label_replace() from {source}, which is not there")
            return inner | {cast("str", arguments[1].val)}
        if name in KEEPS_LABELS:
            return self._vector(arguments[0])
        raise PromqlError(f"{name}() is not known to this test: say in promql.py what it does")


def group_labels(node: Any) -> list[str]:
    """The labels in group_left(...) or group_right(...)."""
    return list(node.modifier.group_labels or ())


def _is(kind: Any, name: str) -> bool:
    return str(kind).rsplit(".", 1)[-1] == name

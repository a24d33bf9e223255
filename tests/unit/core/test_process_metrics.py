"""process_* metrics are those of prometheus-client."""

from __future__ import annotations

import resource

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector

from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.process_metrics import ProcessMetrics


def of_the_library() -> dict[str, Metric]:
    return {metric.name: metric for metric in ProcessCollector(registry=None).collect()}


def ours() -> dict[str, Metric]:
    page = Encoder().encode(ProcessMetrics().families(), TEXT_0_0_4).decode()
    return {metric.name: metric for metric in text_string_to_metric_families(page)}


def test_names_types_and_help_are_the_library_s() -> None:
    def words(found: dict[str, Metric]) -> list[tuple[str, str, str, list[str]]]:
        return [
            (name, metric.type, metric.documentation, [sample.name for sample in metric.samples])
            for name, metric in found.items()
        ]

    assert words(ours()) == words(of_the_library())


def test_values_are_the_library_s() -> None:
    before, found, after = of_the_library(), ours(), of_the_library()
    assert found.keys() == before.keys()
    for name, metric in found.items():
        (sample,) = metric.samples
        low, high = sorted(one[name].samples[0].value for one in (before, after))
        spread = 0.02 * high if "memory" in name else 1e-6  # memory may change meanwhile
        assert low - spread <= sample.value <= high + spread, name


def test_without_a_limit_on_descriptors_it_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _limit: (infinity, infinity))
    page = Encoder().encode(ProcessMetrics().families(), TEXT_0_0_4)
    assert b"\nprocess_max_fds +Inf\n" in page


def test_what_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    names = [family.spec.name for family in ProcessMetrics().families()]
    assert names == ["process_open_fds", "process_max_fds"]

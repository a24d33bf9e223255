"""Metrics in prometheus-client's form, printed by its encoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest as text_encoder
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_encoder

from mps_exporter.metrics.content_format import ContentFormat, Escaping, Syntax


class _Prepared:
    """A registry-like thing that holds finished metrics: no collection happens in the encoder."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def encode_metrics(metrics: Iterable[Metric], form: ContentFormat) -> bytes:
    """Give a page of these, made by prometheus-client's encoder."""
    encoder = openmetrics_encoder if form.syntax is Syntax.OPENMETRICS else text_encoder
    # The scheme "values" leaves names like ours alone; that encoder changes half of them.
    values = form.escaping is Escaping.VALUES
    return encoder(_Prepared(metrics), Escaping.UNDERSCORES if values else form.escaping)

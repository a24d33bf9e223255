"""What the catalogue says of every metric."""

from __future__ import annotations

import pytest

from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.spec import MetricSpec

OPEN = {
    "daemon", "gpu", "uuid", "server", "pid", "uid", "user", "fan", "xid",
}  # fmt: skip
"""Labels that name something of the host, in every metric but info."""


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: spec.name)
def test_a_label_is_a_name_or_has_its_values_documented(spec: MetricSpec) -> None:
    assert spec.values.keys() <= set(spec.labels)
    if spec.kind != "info":
        assert set(spec.labels) - OPEN == spec.values.keys()
    for values in spec.values.values():
        assert values
        assert len(values) == len(set(values))

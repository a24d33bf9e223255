from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.metrics.content_format import Escaping
from mps_exporter.web.negotiation import OFFERED, accepts_gzip, choose_format

TEXT = "text/plain; version=0.0.4; charset=utf-8"
TEXT1 = "text/plain; version=1.0.0; charset=utf-8; escaping="
OM = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping="
OM0 = "application/openmetrics-text; version=0.0.1; charset=utf-8"

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        (BROWSER, TEXT),
        ("text/*", TEXT),
        ("text/plain", TEXT),
        ("application/*", OM + "underscores"),
        ("application/json", TEXT),
        (PROMETHEUS_3, OM + "allow-utf-8"),
        (PROMETHEUS_2, OM + "underscores"),
        ("application/openmetrics-text", OM + "underscores"),
        ("Application/OpenMetrics-Text; Version=1.0.0", OM + "underscores"),
        ('application/openmetrics-text; version="1.0.0"; escaping="values"', OM + "values"),
        ("application/openmetrics-text;version=1.0.0;escaping=dots", OM + "dots"),
        ("application/openmetrics-text;version=1.0.0;escaping=nonsense", OM + "underscores"),
        ("application/openmetrics-text;version=0.0.1", OM0),
        ("application/openmetrics-text;version=2.0.0", TEXT),
        ("application/openmetrics-text;version=9.9.9", TEXT),
        ("application/openmetrics-text;version=abc", TEXT),
        (
            "application/openmetrics-text;version=2.0.0,text/plain;version=1.0.0;q=0.1",
            TEXT1 + "underscores",
        ),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", TEXT1 + "allow-utf-8"),
        ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.9", TEXT),
        (
            "text/plain;version=0.0.4;q=0.2,application/openmetrics-text;version=1.0.0;q=0.9",
            OM + "underscores",
        ),
        ("application/openmetrics-text;q=0, */*", TEXT),
        ("text/plain;q=0, */*;q=0.5", OM + "underscores"),
        ("application/openmetrics-text;q=2", TEXT),
        ("application/openmetrics-text;q=-1", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        ("application/openmetrics-text;q=1e400", TEXT),
        ("application/openmetrics-text;q=", TEXT),
        (
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;"
            "encoding=delimited;q=0.7,text/plain;version=0.0.4;q=0.3",
            TEXT,
        ),
        ('application/openmetrics-text;x="a,b;q=0";version=1.0.0', OM + "underscores"),
        (";;;,,,===", TEXT),
        ('"', TEXT),
        ('application/openmetrics-text;version="1.0', TEXT),
        ("," * 8000, TEXT),
        ("a/b," * 2000 + "application/openmetrics-text", TEXT),
    ],
)
def test_format(accept: str | None, expected: str) -> None:
    assert choose_format(accept).content_type == expected


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain;version=0.0.4;escaping=dots",
        "text/plain;escaping=dots",
        "application/openmetrics-text;version=0.0.1;escaping=dots",
    ],
)
def test_versions_without_escaping_are_not_escaped(accept: str) -> None:
    """Their Content-Type could not tell the reader of it."""
    assert choose_format(accept).escaping is Escaping.UNDERSCORES


@given(st.text(alphabet=st.sampled_from('text/plain*;,=q".0159\\ \tversion\x00é')))
def test_garbage_gives_a_format_we_have(accept: str) -> None:
    chosen = choose_format(accept)

    assert (chosen.syntax, chosen.version) in {(one.syntax, one.version) for one in OFFERED}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("gzip, deflate, br", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("gzip;q=0.000", False),
        ("identity", False),
        ("identity;q=1, gzip;q=0.5", False),
        ("identity;q=0.5, gzip", True),
        ("*", True),
        ("*;q=0", False),
        ("deflate", False),
        ("gzip;q=x", False),
    ],
)
def test_gzip(header: str | None, expected: bool) -> None:
    assert accepts_gzip(header) is expected

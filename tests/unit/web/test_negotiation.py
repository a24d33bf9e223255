import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.web.handlers import choose_format

TEXT = "text/plain; version=0.0.4; charset=utf-8"
TEXT1 = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"
OM = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"

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
        ("", TEXT),
        ("*/*", TEXT),
        (BROWSER, TEXT),
        (PROMETHEUS_3, OM),
        (PROMETHEUS_2, OM),
        ("application/openmetrics-text", OM),
        ("application/openmetrics-text;version=1.0.0;escaping=dots", OM),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;version=2.0.0", OM),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", TEXT1),
        ("a/b," * 2000 + "application/openmetrics-text", OM),
    ],
)
def test_format(accept: str, expected: str) -> None:
    assert choose_format(accept) == expected


@given(st.text(alphabet=st.sampled_from('text/plain*;,=q".0159\\ \tversion\x00é')))
def test_garbage_gives_a_format_we_have(accept: str) -> None:
    for start in ("", "text/plain;version=", "application/openmetrics-text;version="):
        assert choose_format(start + accept).startswith((TEXT, TEXT1, OM))

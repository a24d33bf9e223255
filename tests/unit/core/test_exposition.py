"""Our encoder says byte for byte what prometheus-client's encoders say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector

from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.content_format import (
    OPENMETRICS_0_0_1,
    OPENMETRICS_1_0_0,
    TEXT_0_0_4,
    TEXT_1_0_0,
    ContentFormat,
    Escaping,
    Syntax,
)
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.spec import Family, HistogramValue, MetricSpec
from testing.library_form import encode_metrics, to_metric

FORMATS = (TEXT_0_0_4, TEXT_1_0_0, OPENMETRICS_1_0_0, OPENMETRICS_0_0_1)
SCHEMES = (Escaping.ALLOW_UTF8, Escaping.UNDERSCORES, Escaping.DOTS)
EVERY_FORM = [
    ContentFormat(form.syntax, form.version, scheme) for form in FORMATS for scheme in SCHEMES
]

nasty = ['"', "\\", "\n", 'a\\n"b\\\\', "größe", "日本", "🦆"]
words = st.text(max_size=12) | st.sampled_from(nasty)
# UTF-8 has no lone surrogates; render() makes them visible before they come here.
words = words.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
numbers = (
    st.floats()
    | st.integers(-(2**70), 2**70)
    | st.floats(1e5, 1e8)
    | st.booleans()
    | st.sampled_from([0.0, -0.0, 1e6, 999999.5, 1e15, 1e16, 1e17, 1e-5, 2.5e9, 1795000000.123])
)


def buckets(bounds: list[float], counts: list[int]) -> tuple[tuple[str, int], ...]:
    printed = [*(repr(bound) for bound in sorted(bounds)), "+Inf"]
    return tuple(zip(printed, sorted(counts), strict=False))


histograms = st.builds(
    HistogramValue,
    st.builds(
        buckets,
        st.lists(st.floats(0, 1e9), max_size=4, unique=True),
        st.lists(st.integers(0, 10**12), min_size=5, max_size=5),
    ),
    st.floats(0),
)


@st.composite
def values(draw: st.DrawFn, spec: MetricSpec) -> float | HistogramValue | Mapping[str, bool]:
    if spec.kind == "histogram":
        return draw(histograms)
    if spec.kind == "stateset":
        known = st.sampled_from(spec.states or ("ACTIVE",))
        return draw(st.dictionaries(known | words.filter(bool), st.booleans(), max_size=3))
    return draw(numbers)


@st.composite
def families(draw: st.DrawFn, specs: st.SearchStrategy[MetricSpec]) -> Family:
    spec = draw(specs)
    labels = st.tuples(*(words for _ in spec.labels))
    count = draw(st.integers(0, 3))
    return Family(spec, tuple((draw(labels), draw(values(spec))) for _ in range(count)))


catalogued = st.sampled_from(list(CATALOGUE.values()))
invented = st.builds(
    MetricSpec,
    name=st.from_regex(r"x_[a-z_]{0,9}(_seconds|_bytes)?", fullmatch=True),
    kind=st.sampled_from(["gauge", "histogram", "stateset"]),
    help=words,
    labels=st.lists(
        st.sampled_from(["a", "b_c", "le_", "zz", "Z", "gpu"]), unique=True, max_size=4
    ).map(tuple),
    states=st.lists(words.filter(bool), unique=True, max_size=2).map(tuple),
) | st.builds(
    lambda stem, kind, words: MetricSpec(
        f"x_{stem}{'_total' if kind == 'counter' else '_info'}", kind, words, ("b", "a")
    ),
    st.from_regex(r"[a-z_]{0,5}[a-z]", fullmatch=True),
    st.sampled_from(["counter", "info"]),
    words,
)


def by_the_library(pages: list[Family], form: ContentFormat) -> bytes:
    return encode_metrics([to_metric(family) for family in pages], form)


@pytest.mark.parametrize("form", EVERY_FORM, ids=lambda form: f"{form.version}-{form.escaping}")
@settings(max_examples=30, deadline=None)
@given(pages=st.lists(families(catalogued | invented), max_size=4))
def test_every_page_is_the_library_s_page(form: ContentFormat, pages: list[Family]) -> None:
    assert Encoder().encode(pages, (), form) == by_the_library(pages, form)


@pytest.mark.parametrize("form", EVERY_FORM, ids=lambda form: f"{form.version}-{form.escaping}")
def test_everything_that_the_catalogue_can_say_is_the_library_s(form: ContentFormat) -> None:
    def value(spec: MetricSpec) -> float | HistogramValue | Mapping[str, bool]:
        if spec.kind == "histogram":
            return HistogramValue((("0.5", 1), ("10.0", 2_000_000), ("+Inf", 3_000_000)), 1e7)
        if spec.kind == "stateset":
            return {**dict.fromkeys(spec.states, False), 'new "state"': True}
        return 1_795_000_000.25

    def labels(spec: MetricSpec, number: int) -> tuple[str, ...]:
        return tuple(nasty[(place + number) % len(nasty)] for place in range(len(spec.labels)))

    page = [
        Family(spec, tuple({labels(spec, number): value(spec) for number in range(3)}.items()))
        for spec in CATALOGUE.values()
    ]
    assert Encoder().encode(page, (), form) == by_the_library(page, form)


def test_names_like_ours_are_left_alone_by_the_scheme_values() -> None:
    family = Family(CATALOGUE["mps_control_up"], ((("/a",), 1.0),))
    form = ContentFormat(Syntax.OPENMETRICS, "1.0.0", Escaping.VALUES)
    assert Encoder().encode([family], (), form) == Encoder().encode([family], (), OPENMETRICS_1_0_0)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_metrics_of_the_library_stand_at_the_end(form: ContentFormat) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    own = list(registry.collect())
    family = Family(CATALOGUE["mps_control_up"], ((("/a",), 1.0),))
    expected = encode_metrics([to_metric(family), *own], form)
    assert Encoder().encode([family], own, form) == expected
    assert expected.count(b"# EOF") == (form.syntax is Syntax.OPENMETRICS)


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    spec = CATALOGUE["mps_client_start_time_seconds"]
    encoder = Encoder()
    for pid in range(1000):
        samples = ((("/a", "1", str(pid)), 1.0), (("/a", "2", "7"), 2.0))
        page = encoder.encode([Family(spec, samples)], (), TEXT_0_0_4)
        assert f'pid="{pid}",server="1"}} 1.0'.encode() in page
    ((_, keys, beginnings),) = encoder._kept.values()
    assert (len(keys), len(beginnings)) == (2, 2)


@pytest.mark.parametrize("form", EVERY_FORM)
@given(pages=st.lists(st.lists(families(catalogued), max_size=2), min_size=2, max_size=4))
@settings(max_examples=20)
def test_earlier_replies_change_nothing(form: ContentFormat, pages: list[list[Family]]) -> None:
    encoder = Encoder()
    for page in [*pages, *pages]:
        assert encoder.encode(page, (), form) == by_the_library(page, form)


def test_both_zeros_of_a_page_are_printed() -> None:
    spec = CATALOGUE["mps_control_servers"]
    family = Family(spec, ((("a",), -0.0), (("b",), 0.0), (("c",), -0.0)))
    page = Encoder().encode([family], (), TEXT_0_0_4)
    assert page == by_the_library([family], TEXT_0_0_4)
    assert [line.split()[-1] for line in page.splitlines()[2:]] == [b"-0.0", b"0.0", b"-0.0"]


@pytest.mark.parametrize("name", ["mps_client_session_seconds", "mps_server_state"])
def test_a_value_of_the_wrong_kind_is_a_mistake_of_ours(name: str) -> None:
    spec = CATALOGUE[name]
    family = Family(spec, ((tuple("x" for _ in spec.labels), 1.0),))
    with pytest.raises(TypeError, match=name):
        Encoder().encode([family], (), TEXT_0_0_4)

"""No reading breaks a page, and readings that no metric shows are omitted and counted."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import mps_exporter
from mps_exporter.commands import doctor_report_and_status
from mps_exporter.metrics import Build, render
from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, TEXT_0_0_4, encode
from mps_exporter.metrics.gpus import BY_QUANTITY, STATE, label_values
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.snapshot import Gpu, Snapshot
from mps_exporter.web import status_page
from mps_exporter.web.status_api import make_status, to_json
from testing.snapshots import NASTY

PROGRAM = Path(mps_exporter.__file__).parent
UUID = "GPU-00000000-1111-2222-3333-444444444444"

known_labels = sorted({label for spec in BY_QUANTITY.values() for label in (*spec.labels, STATE)})
known_values = sorted(
    {
        value
        for spec in BY_QUANTITY.values()
        for values in (*spec.values.values(), spec.states)
        for value in values
    }
)
texts = st.text(st.characters(), max_size=300)  # lone surrogates, line ends, quotes ...
pairs = st.tuples(st.sampled_from(known_labels) | texts, st.sampled_from(known_values) | texts)
readings = st.builds(
    Reading,
    st.sampled_from(sorted(BY_QUANTITY)) | texts,
    st.floats() | st.integers(-(2**64), 2**64),
    st.lists(pairs, max_size=4).map(tuple),
)


@st.composite
def fitting(draw: st.DrawFn) -> Reading:
    """Return a reading with the labels of its metric, and any values."""
    quantity = draw(st.sampled_from(sorted(BY_QUANTITY)))
    spec = BY_QUANTITY[quantity]
    names = [*spec.labels[2:], *([STATE] if spec.kind == "stateset" else [])]
    labels = tuple((name, draw(texts)) for name in draw(st.permutations(names)))
    return Reading(quantity, draw(st.floats()), labels)


def snapshot(given_readings: Iterable[Reading]) -> Snapshot:
    seen = GpuObservation(0, UUID, readings=tuple(given_readings))
    # With two processes that bypass MPS, findings depend on the readings.
    return Snapshot(1.0, gpus=(Gpu(seen, "0", UUID, direct_pids=(1, 2)),))


def text_page(given_readings: Iterable[Reading]) -> str:
    families = render(snapshot(given_readings), Build("", "", ""))
    return encode(families, (), TEXT_0_0_4).decode()


def all_of_them(value: float) -> list[Reading]:
    """Return a reading of each quantity with this value."""
    sensor = (("sensor", "gpu"),)
    return [*(Reading(one, value) for one in BY_QUANTITY), Reading("temperature", value, sensor)]


@settings(deadline=None)
@given(st.lists(readings | fitting(), max_size=8))
@example([Reading("fabric_state", 1.0, ((STATE, NASTY),))])
@example([Reading(NASTY, 1.0), Reading("clock", 1.0, (("clock", NASTY),))])
@example(all_of_them(math.nan))
@example(all_of_them(math.inf))
@example(all_of_them(-1e308))
@example(all_of_them(5e-324))
def test_no_reading_breaks_a_page(several: list[Reading]) -> None:
    seen = snapshot(several)
    families = render(seen, Build("", "", ""))
    encode(families, (), OPENMETRICS_1_0_0)
    found = {one.name for one in text_string_to_metric_families(text_page(several))}
    assert "mps_exporter_build" in {name.removesuffix("_info") for name in found}
    status = make_status(seen)
    to_json(status)
    status_page.render_page(status).encode()
    "\n".join(
        doctor_report_and_status.diagnosis_lines(doctor_report_and_status.Diagnosis(seen))
    ).encode()
    doctor_report_and_status.diagnosis_as_json(doctor_report_and_status.Diagnosis(seen)).encode()


@settings(deadline=None)
@given(st.lists(readings, max_size=4))
def test_unknown_readings_do_not_affect_the_others(several: list[Reading]) -> None:
    unknown = [one for one in several if label_values(one.quantity, one.labels) is None]
    known = [Reading("power", 195.4), Reading("clock", 1.98e9, (("clock", "sm"),))]
    assert text_page([*unknown, *known, *unknown]) == text_page(known)


KIND, SCOPE, LOCATION = ("kind", "corrected"), ("scope", "volatile"), ("location", "dram")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((KIND, SCOPE, LOCATION), True),
        ((LOCATION, SCOPE, KIND), True),
        ((KIND, SCOPE), False),
        ((KIND, SCOPE, LOCATION, ("bank", "1")), False),
        ((KIND, SCOPE, ("place", "dram")), False),
        ((KIND, SCOPE, KIND), False),
        ((KIND, SCOPE, LOCATION, LOCATION), False),
        ((), False),
    ],
)
def test_a_reading_with_other_labels_has_no_metric(
    labels: tuple[tuple[str, str], ...], expected: bool
) -> None:
    shown = ("corrected", "volatile", "dram")
    assert label_values("ecc_errors", labels) == (shown if expected else None)


def test_all_quantities_that_the_exporter_uses_exist() -> None:
    source = "".join(path.read_text("utf-8") for path in PROGRAM.rglob("*.py"))
    requested = set(re.findall(r'\.reading\(\s*"(\w+)"', source))
    assert requested >= {"sm_activity", "power"}
    assert requested <= BY_QUANTITY.keys()

"""The picture of the benchmark is well-formed, and its line the right one."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.plot import Line, fit, svg


def test_a_straight_line_is_found() -> None:
    slope, start, straight = fit([(x, 3.0 * x + 2.0) for x in range(5)])
    assert (slope, start, straight) == pytest.approx((3.0, 2.0, 1.0))


def test_noise_makes_it_less_straight() -> None:
    assert fit([(0, 0), (1, 5), (2, 0), (3, 5)])[2] < 0.5


def test_the_picture_has_every_point() -> None:
    text = svg("cost", [Line("CPU", "#000", [(1, 1.0), (400, 50.0)])], 60.0)
    circles = ET.fromstring(text).findall("{http://www.w3.org/2000/svg}circle")  # noqa: S314 - ours
    assert len(circles) == 2
    assert all(0 <= float(circle.attrib["cy"]) <= 400 for circle in circles)

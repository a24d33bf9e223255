"""Our encoder beside prometheus-client's, on the page of a full host.

python -m bench.exposition
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.rules import host
from exporter.metrics.content_format import OPENMETRICS_1_0_0, TEXT_0_0_4, ContentFormat
from exporter.metrics.exposition import encode
from exporter.metrics.library_form import encode_metrics, to_metric
from exporter.metrics.render import Build, render

RUNS = 9
BUILD = Build("bench", "", "")


def cpu_ms(work: Callable[[], object], runs: int = RUNS) -> float:
    """Give the median CPU time of a call, in milliseconds."""
    found = []
    for _ in range(runs):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return 1000 * statistics.median(found)


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of CPU for the same page."""

    form: ContentFormat
    lines: int
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.theirs / self.ours


def compare(form: ContentFormat) -> Comparison:
    """Measure both, by turns: what else the machine does hits both."""
    families = render(host(), BUILD)
    page = encode(families, (), form)
    if page != encode_metrics([to_metric(family) for family in families], form):
        raise AssertionError("the pages differ")
    ours, theirs = [], []
    for _ in range(RUNS):
        ours.append(cpu_ms(lambda: encode(families, (), form), 3))
        theirs.append(
            cpu_ms(lambda: encode_metrics([to_metric(family) for family in families], form), 1)
        )
    return Comparison(form, page.count(b"\n"), statistics.median(ours), statistics.median(theirs))


def report(found: Sequence[Comparison]) -> list[str]:
    """Tell it in words."""
    return [
        f"exposition of {one.lines} lines, {one.form.syntax} {one.form.version}: "
        f"{one.ours:.1f} ms, prometheus-client {one.theirs:.0f} ms: {one.ratio:.1f} times"
        for one in found
    ]


def main() -> None:
    """Measure and print."""
    print("\n".join(report([compare(form) for form in (TEXT_0_0_4, OPENMETRICS_1_0_0)])))


if __name__ == "__main__":
    main()

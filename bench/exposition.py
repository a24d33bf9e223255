"""Our encoder beside prometheus-client's, on the pages of a full host.

    python -m bench.exposition

From page to page the same things change as on a busy host: readings, memory in use, counters.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.rules import host
from mps_exporter.metrics.content_format import OPENMETRICS_1_0_0, TEXT_0_0_4, ContentFormat
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, render
from mps_exporter.metrics.spec import Family, HistogramValue
from mps_exporter.snapshot import Snapshot
from testing.library_form import encode_metrics, to_metric

RUNS = 15
ENCODER = Encoder()
BUILD = Build("bench", "", "")


STEADY = ("_info", "_limit_bytes", "_limit", "_priority", "_contexts", "_start_time_seconds")
"""Ends of the names of metrics that say the same for as long as nobody comes or goes."""


def cpu_ms(
    encoder: Callable[[Iterable[Family], ContentFormat], bytes],
    families: Sequence[Family],
    form: ContentFormat,
) -> tuple[float, bytes]:
    """Give the CPU time of an encoder, in milliseconds, and its page."""
    began = time.thread_time()
    page = encoder(families, form)
    return 1000 * (time.thread_time() - began), page


def _ours(families: Iterable[Family], form: ContentFormat) -> bytes:
    return ENCODER.encode(families, (), form)


def _theirs(families: Iterable[Family], form: ContentFormat) -> bytes:
    return encode_metrics(map(to_metric, families), form)


def crowd() -> Snapshot:
    """A full host whose clients came at moments of their own, each with its own memory."""
    chance = random.Random(0)
    full = host()
    daemons = []
    for daemon in full.daemons:
        servers = [
            replace(
                server,
                clients=tuple(
                    replace(
                        client,
                        connected_at=round(full.taken_at - chance.uniform(0, 86_400), 3),
                        memory_used_bytes={
                            uuid: chance.randrange(1 << 20, 1 << 34, 1 << 20)
                            for uuid in client.memory_used_bytes
                        },
                    )
                    for client in server.clients
                ),
            )
            for server in daemon.servers
        ]
        daemons.append(replace(daemon, servers=tuple(servers)))
    return replace(full, daemons=tuple(daemons))


def next_page(families: Sequence[Family], chance: random.Random) -> list[Family]:
    """The same metrics a scrape later."""

    def later(value: object) -> object:
        if (
            isinstance(value, HistogramValue)
            or not isinstance(value, int | float)
            or value in {0, 1}
        ):
            return value
        moved = value * chance.uniform(0.9, 1.1)
        return float(round(moved)) if value > 1000 else round(moved, 3)

    return [
        family
        if family.spec.name.endswith(STEADY)
        else Family(family.spec, tuple((labels, later(value)) for labels, value in family.samples))  # type: ignore[misc]
        for family in families
    ]


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
    chance = random.Random(1)
    families = render(crowd(), BUILD)
    ours, reference, lines = [], [], 0
    for _ in range(RUNS):
        families = next_page(families, chance)
        milliseconds, page = cpu_ms(_ours, families, form)
        ours.append(milliseconds)
        milliseconds, same = cpu_ms(_theirs, families, form)
        reference.append(milliseconds)
        if page != same:
            raise AssertionError("the pages differ")
        lines = page.count(b"\n")
    # The first run is that of a first scrape: it makes what the others use again.
    return Comparison(form, lines, statistics.median(ours[1:]), statistics.median(reference[1:]))


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

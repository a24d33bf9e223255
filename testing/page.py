"""A page of metrics, as a scrape gets it."""

from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from mps_exporter.metrics import Build, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, encode
from mps_exporter.snapshot import Snapshot


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Page(dict[str, list[Sample]]):
    """The samples of one scrape, by name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))

    def all(self, name: str, **labels: object) -> list[Sample]:
        """Samples of this metric that have these labels."""
        wanted = {key: str(label) for key, label in labels.items()}
        return [one for one in self.get(name, ()) if wanted.items() <= one.labels.items()]

    def value(self, name: str, **labels: object) -> float | None:
        """The sum of the samples that match; None where there are none."""
        found = self.all(name, **labels)
        return sum(one.value for one in found) if found else None

    def labels(self, name: str, **labels: object) -> dict[str, str]:
        """Return all labels of the one sample with these labels."""
        (found,) = self.all(name, **labels)
        return found.labels


def text_of(snapshot: Snapshot, **settings: Any) -> str:
    """Return the page that shows a snapshot, rendered with these settings."""
    families = render(snapshot, Build("test", "", ""), **settings)
    return encode(families, [], TEXT_0_0_4).decode()

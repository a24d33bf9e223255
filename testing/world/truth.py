"""What really happened in a simulated world: computed from the model's events, never from logs."""

from dataclasses import dataclass, field
from typing import Any

from mps_exporter.observations import LogName


@dataclass(frozen=True)
class FaultTruth:
    """A fatal GPU error and the client that caused it."""

    at_ms: int
    culprit_pid: int
    left_work: bool  # The culprit ended with GPU work in flight; else it used a wrong pointer.
    victim_pids: tuple[int, ...]
    """The clients that it took down, in a fault by its own pointer the culprit, too."""


@dataclass(frozen=True)
class WaitTruth:
    pid: int
    uid: int
    since_ms: int
    dead: bool


@dataclass
class Truth:
    """One daemon's counters in the words of samples/truth.json; times in milliseconds."""

    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    histograms: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    lines: dict[LogName, int] = field(default_factory=dict)
    """Lines of each log before the last collection, whose queries add more."""
    slack: dict[str, int] = field(default_factory=dict)
    """Counter -> greatest difference that is allowed because nothing shows the truth in time. For
    losses: as many may be counted as `unattributed_fault`."""
    faults: list[FaultTruth] = field(default_factory=list)
    unknowable: set[str] = field(default_factory=set)
    """Why the counters cannot be known from outside: lines were lost, a log was hidden, ..."""

    def count(self, name: str, label: object = "", by: int = 1) -> None:
        values = self.numbers.setdefault(name, {})
        values[str(label)] = values.get(str(label), 0) + by

    def observe(self, name: str, milliseconds: int, label: object = "") -> None:
        values = self.histograms.setdefault(name, {})
        count, total = values.get(str(label), (0, 0))
        values[str(label)] = (count + 1, total + milliseconds)

    def allow(self, name: str, by: int) -> None:
        self.slack[name] = self.slack.get(name, 0) + by

    def summary(self) -> dict[str, Any]:
        """Return the counters as mps_logs.summary does."""
        found: dict[str, Any] = {}
        for name, values in self.numbers.items():
            shown = {
                label: value / 1000 if name.endswith("_seconds") else value
                for label, value in values.items()
                if value
            }
            if shown:
                found[name] = shown.get("", shown)
        for name, spans in self.histograms.items():
            seen = {label: [count, total / 1000] for label, (count, total) in spans.items()}
            found[name] = seen.get("", seen)
        return found

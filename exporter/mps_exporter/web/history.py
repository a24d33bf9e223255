"""What the page shows of the last ten minutes, remembered from one collection to the next.

Nothing is read for it: every snapshot that a scrape or a reader of the page asked for is noted.
Memory is bounded: at most ``MAX_SAMPLES`` for each of ``MAX_GPUS`` GPUs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mps_exporter import findings
from mps_exporter.snapshot import Snapshot

WINDOW_SECONDS = 600.0
STEP_SECONDS = 2.0
"""Of two collections that are closer, the second is not kept."""
MAX_SAMPLES = round(WINDOW_SECONDS / STEP_SECONDS) + 1
MAX_GPUS = 128
"""GPUs and MIG instances: eight GPUs in seven instances each are 64."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The activity of a GPU at one collection; None: it could not be read."""

    at: float
    utilization_ratio: float | None
    sm_active_ratio: float | None


FindingKey = tuple[str, str, str]
"""Name, daemon, GPU."""


class History:
    """The activity of each GPU, when each source was last read, since when a finding is seen."""

    def __init__(self) -> None:
        self.began_at: float | None = None
        """The first collection."""
        self._last_at, self._loop = 0.0, 0
        self._samples: dict[str, deque[Sample]] = {}
        self._read_at: dict[str, float] = {}
        self._first_seen: dict[FindingKey, float] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Note a collection. A replay that starts again begins a new history."""
        now = snapshot.taken_at
        loop = snapshot.recording.loop if snapshot.recording is not None else 0
        if self.began_at is None or now < self._last_at - 1.0 or loop != self._loop:
            self.began_at = now
            for memory in (self._samples, self._read_at, self._first_seen):
                memory.clear()
        self._last_at, self._loop = now, loop
        for result in snapshot.collectors:
            if result.success:
                self._read_at[result.name] = now
        if not any(result.name == "nvml" for result in snapshot.collectors):
            return  # a scrape of chosen collectors: what it did not read is not missing
        self._note_findings(snapshot)
        for gpu in snapshot.gpus[:MAX_GPUS]:
            samples = self._samples.setdefault(gpu.uuid, deque(maxlen=MAX_SAMPLES))
            if not samples or now - samples[-1].at >= STEP_SECONDS:
                reading = gpu.reading("gpu_utilization"), gpu.reading("sm_activity")
                samples.append(Sample(now, *reading))
        while len(self._samples) > MAX_GPUS:
            del self._samples[next(iter(self._samples))]

    def _note_findings(self, snapshot: Snapshot) -> None:
        self._first_seen = {
            key: self._first_seen.get(key, snapshot.taken_at)
            for key in map(key_of, findings.findings(snapshot))
        }

    def samples(self, uuid: str, now: float) -> tuple[Sample, ...]:
        """The samples of the last ten minutes, oldest first."""
        begin = now - WINDOW_SECONDS
        return tuple(one for one in self._samples.get(uuid, ()) if one.at >= begin)

    def read_at(self, collector: str) -> float | None:
        """When this source was last read without an error."""
        return self._read_at.get(collector)

    def first_seen(self, finding: findings.Finding) -> float | None:
        """Since when every collection has had this finding."""
        return self._first_seen.get(key_of(finding))


def key_of(finding: findings.Finding) -> FindingKey:
    """What tells a finding from another."""
    return finding.advice.name, finding.daemon, finding.uuid

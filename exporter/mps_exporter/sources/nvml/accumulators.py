"""Values computed from two samples of a device: busy seconds, active seconds, PCIe bytes.

An accumulator takes at most ten samples a second, however many scrapes there are, and computes what
happened since its last sample; so several Prometheus servers do not disturb each other. In a
running exporter, ticks sample every 1 s or 5 s, and a collection renews old samples.

Accumulators count since the start of the exporter: they outlive the NVML session.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.pynvml_api import (
    NEVER_AGAIN,
    DeviceQueries,
    GpuGoneError,
    NvmlApi,
    NvmlError,
)

COUNTER_32 = 1 << 32

LONGEST_PERIOD_SECONDS = 1.5
"""Maximum distance of two samples without a gap: NVML's sampling period is 1/6 s to 1 s."""

GPU_UTILIZATION_SAMPLES = 1  # nvmlSamplingType_t.

GPM_RATIOS = {
    1: "graphics_activity",
    2: "sm_activity",
    3: "sm_occupancy",
    4: "integer_activity",
    5: "tensor_activity",
    10: "dram_activity",
    11: "fp64_activity",
    12: "fp32_activity",
    13: "fp16_activity",
}
"""nvmlGpmMetricId_t -> quantity."""
GPM_COUNTED = ("graphics", "sm", "tensor", "dram")  # Units with a counter of seconds.
GPM_PCIE = {"transmit": 20, "receive": 21}  # nvmlGpmMetricId_t of the traffic in MiB/s.
PCIE_FIELDS = {"transmit": 197, "receive": 198}
"""NVML_FI_DEV_PCIE_COUNT_..._BYTES: 32-bit counters of bytes."""
GPM_ALL = (*GPM_RATIOS, *GPM_PCIE.values())
MEBI = 1 << 20


@dataclass(slots=True)
class BusyTime:
    """Adds up the driver's buffered samples of "percent busy since the sample before".

    Samples may be added twice, or in other portions, with the same result: every sample counts
    once, by its timestamp. In a new NVML session, the time before the oldest buffered sample is a
    gap.
    """

    seconds: float = 0.0  # Busy time.
    unobserved_seconds: float = 0.0
    """Gaps: samples were overwritten or not taken, or the clock changed."""
    last_timestamp: int | None = None  # Timestamp in µs of the newest sample that was counted.
    counted_at: float | None = None  # Monotonic time when samples were last counted, if ever.
    _period: float = 1 / 6  # Last distance of two samples without a gap.
    _sampled_at: float | None = None
    """Time of the session's last read of samples; None before the first, and if the last failed."""

    def add(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Count the new pairs among these (timestamp in µs, percent).

        The time since samples were last counted bounds a gap: the timestamps follow the host's
        clock, which may jump.
        """
        elapsed_seconds = self._uncounted_seconds(now)
        self.counted_at = now
        covered = gap = 0.0
        for timestamp, percent in sorted(samples):
            if not math.isfinite(percent):
                continue
            if self.last_timestamp is None:
                self.last_timestamp = timestamp
                continue
            between = (timestamp - self.last_timestamp) / 1e6
            if between <= 0:
                continue
            of_sample = between
            if between > LONGEST_PERIOD_SECONDS:
                of_sample = self._period
                gap += between - of_sample
            else:
                self._period = min(between, 1.0)
            covered += of_sample
            self.seconds += of_sample * min(max(percent, 0.0), 100.0) / 100
            self.last_timestamp = timestamp
        self.unobserved_seconds += max(0.0, min(gap, elapsed_seconds - covered))

    def skip(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Count only after the newest of these samples. The time before is unobserved."""
        self.unobserved_seconds += self._uncounted_seconds(now)
        self.last_timestamp = max((timestamp for timestamp, _ in samples), default=None)
        self.counted_at = now

    def _uncounted_seconds(self, now: float) -> float:
        return 0.0 if self.counted_at is None else now - self.counted_at

    def sample(self, queries: DeviceQueries, now: float, min_interval: float) -> None:
        """Read and count samples, if due."""
        if self._sampled_at is not None and now - self._sampled_at < min_interval:
            return
        self._sampled_at = None
        samples = _samples(queries, now, self.last_timestamp or 0)
        if samples is None:
            return
        if self.counted_at is None:
            self.skip(samples, now)
        elif samples:
            self.add(samples, now)
        elif self._uncounted_seconds(now) > policy.MAX_SECONDS_WITHOUT_SAMPLE:
            whole_buffer = _samples(queries, now, 0)
            if not whole_buffer:
                return
            self.skip(whole_buffer, now)
        self._sampled_at = now

    def close(self, _api: NvmlApi) -> None:
        """Prepare for another NVML session."""
        self._sampled_at = None

    def readings(self) -> Iterator[Reading]:
        """Yield the counters if the last read worked."""
        if self._sampled_at is not None:
            yield Reading("busy_time", self.seconds)
            yield _unobserved("busy", self.unobserved_seconds)


def _samples(queries: DeviceQueries, now: float, since: int) -> list[tuple[int, float]] | None:
    return queries.get(
        "nvmlDeviceGetSamples",
        lambda: queries.api.samples(queries.device, GPU_UTILIZATION_SAMPLES, since),
        now,
    )


@dataclass(slots=True)
class Activity:
    """Compares two samples of GPU Performance Monitoring (Hopper and later).

    The hardware counts all the time and a sample is a copy of its counters, so the interval between
    two samples has no gap, however long it is. The hardware counts cycles: the ratio is a share of
    time only while the clock rate stays the same. Samples end with the NVML session: the time
    between the last sample of a session and the first of the next is unobserved.
    """

    seconds: dict[str, float] = field(default_factory=dict)  # Unit -> active time.
    pcie_bytes: dict[str, float] = field(default_factory=dict)
    unobserved_seconds: float = 0.0
    _seen_until: float | None = None
    """Monotonic time up to which every second is active, idle or unobserved; None at first."""
    _base: object | None = None  # The last sample.
    _spare: object | None = None  # Memory for the next sample.
    _base_at: float | None = None
    _base_pcie: dict[str, int] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)
    _observed: set[str] = field(default_factory=set)  # Counters to show after the last sample.

    def add(self, now: float, ratios: Mapping[str, float] | None) -> None:
        """Count the time since the last call; `ratios`: active part of it, by unit.

        The time is a gap if there are no ratios, or a unit counted before has none.
        """
        interval = 0.0 if self._seen_until is None else now - self._seen_until
        self._seen_until = now
        if ratios is None or self.seconds.keys() - ratios.keys():
            self.unobserved_seconds += interval
        for name, ratio in (ratios or {}).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + interval * ratio

    def sample(self, queries: DeviceQueries, now: float, min_interval: float) -> None:
        """Take a sample if due, and count the interval since the last."""
        if self._base_at is not None and now - self._base_at < min_interval:
            return
        self._ratios, self._observed = {}, set()
        try:
            if not _supports_gpm(queries, now):
                self.close(queries.api)
                return
            taken = queries.get("nvmlGpmSampleGet", lambda: self._take(queries), now)
            if taken is not None:
                self._advance(queries, taken, now)
        except GpuGoneError:
            self.close(queries.api)
            raise

    def _take(self, queries: DeviceQueries) -> object:
        if self._spare is None:
            self._spare = queries.api.call("nvmlGpmSampleAlloc")
        if queries.instance is None:
            queries.api.call("nvmlGpmSampleGet", queries.device, self._spare)
        else:
            queries.api.call("nvmlGpmMigSampleGet", *queries.instance, self._spare)
        return self._spare

    def _advance(self, queries: DeviceQueries, sample: object, now: float) -> None:
        pcie = _pcie_counters(queries, now)
        base, base_at, base_pcie = self._base, self._base_at, self._base_pcie
        self._base, self._base_at, self._base_pcie = sample, now, pcie
        self._spare = base
        if base is None or base_at is None:
            self.add(now, None)
            self._observed = {*self.seconds, *self.pcie_bytes}
            return
        metrics = queries.get(
            "nvmlGpmMetricsGet", lambda: queries.api.gpm_metrics(base, sample, GPM_ALL), now
        )
        if metrics is None:
            self.add(now, None)
            return
        self._ratios = {
            quantity: min(max(metrics[metric] / 100, 0.0), 1.0)
            for metric, quantity in GPM_RATIOS.items()
            if math.isfinite(metrics.get(metric, math.nan))
        }
        found = {unit: self._ratios.get(f"{unit}_activity") for unit in GPM_COUNTED}
        counted = {unit: ratio for unit, ratio in found.items() if ratio is not None}
        self.add(now, counted)
        self._observed |= counted.keys()
        for direction, metric in GPM_PCIE.items():
            rate = metrics.get(metric, -1.0)
            if math.isfinite(rate) and rate >= 0:
                increment = rate * MEBI * (now - base_at)
                before, after = base_pcie.get(direction), pcie.get(direction)
                if before is not None and after is not None:
                    increment = unwrapped_increment(before, after, increment)
                self.pcie_bytes[direction] = self.pcie_bytes.get(direction, 0.0) + increment
                self._observed.add(direction)

    def age_seconds(self, now: float) -> float | None:
        """Return the age of the last sample; None if the SMs' activity is not counted."""
        counted = self._base_at is not None and "sm" in self._observed
        return now - self._base_at if counted and self._base_at is not None else None

    def close(self, api: NvmlApi) -> None:
        """Free the samples, before the NVML session ends."""
        for sample in (self._base, self._spare):
            if sample is not None:
                try:
                    api.call("nvmlGpmSampleFree", sample)
                except NvmlError:
                    continue
        self._base = self._spare = self._base_at = None
        self._base_pcie = {}

    def readings(self) -> Iterator[Reading]:
        """Yield the ratios over the last interval, and the counters that are current."""
        for quantity, ratio in self._ratios.items():
            yield Reading(quantity, ratio)
        for name, seconds in self.seconds.items():
            if name in self._observed:
                yield Reading(f"{name}_active_time", seconds)
        for direction, count in self.pcie_bytes.items():
            if direction in self._observed:
                yield Reading(f"pcie_{direction}_bytes", count)
        if self._observed:
            yield _unobserved("active", self.unobserved_seconds)


def _supports_gpm(queries: DeviceQueries, now: float) -> bool:
    device = queries.device if queries.instance is None else queries.instance[0]
    supported = queries.get(
        "nvmlGpmQueryDeviceSupport",
        lambda: queries.api.call("nvmlGpmQueryDeviceSupport", device).isSupportedDevice,
        now,
        every=NEVER_AGAIN,
    )
    return bool(supported) and queries.is_due("nvmlGpmMetricsGet", now)


def _pcie_counters(queries: DeviceQueries, now: float) -> dict[str, int]:
    if queries.instance is not None:
        return {}
    fields = [(field, 0) for field in PCIE_FIELDS.values()]
    replies = queries.get(
        "nvmlDeviceGetFieldValues(PCIE_COUNT_BYTES)",
        lambda: queries.api.fields(queries.device, fields),
        now,
    )
    return {
        direction: int(reply.value)
        for direction, reply in zip(PCIE_FIELDS, replies or (), strict=False)
        if reply.code == 0
    }


def unwrapped_increment(before: int, now: int, expected: float) -> int:
    """Return the increment of a 32-bit counter, given the approximate increment.

    The counter alone shows the increment only modulo 2**32: it wraps in 90 ms at 50 GB/s. A second,
    coarser measurement of the same traffic shows how often it wrapped: the result is the possible
    increment nearest to that measurement, exact if its error is less than 2 GiB.
    """
    increment = (now - before) % COUNTER_32
    turns = round((expected - increment) / COUNTER_32)
    return increment + max(0, turns) * COUNTER_32


def _unobserved(counter: str, seconds: float) -> Reading:
    return Reading("unobserved_time", seconds, (("counter", counter),))


@dataclass(slots=True)
class Accumulators:
    """The accumulators of one device, and what is known of its counters."""

    busy: BusyTime = field(default_factory=BusyTime)
    activity: Activity = field(default_factory=Activity)
    link_errors: dict[str, set[int]] = field(default_factory=dict)
    """Kind of NVLink error -> links that have ever reported a count."""

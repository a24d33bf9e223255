"""Values computed from two samples of a device: busy seconds, active seconds, PCIe bytes.

An accumulator takes at most ten samples a second, however many scrapes there are, and computes what
happened since its last sample; so several Prometheus servers do not disturb each other. In a
running exporter, ticks sample every 1 s or 5 s, and a collection renews old samples.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.pynvml_api import (
    NEVER_AGAIN,
    Device,
    DeviceQueries,
    GpuGoneError,
    NvmlError,
)

COUNTER_32 = 1 << 32

LONGEST_PERIOD_SECONDS = 1.5
"""Maximum distance of two samples without a gap: NVML's sampling period is 1/6 s to 1 s."""


@dataclass(slots=True)
class SampleIntegral:
    """Adds up samples of "percent busy since the sample before".

    Samples may be added twice, or in other portions, with the same result: every sample counts
    once, by its timestamp.
    """

    seconds: float = 0.0  # Busy time.
    unobserved_seconds: float = 0.0
    """Gaps: samples were overwritten or not taken, or the clock changed."""
    last_timestamp: int | None = None  # Timestamp in µs of the newest sample that was counted.
    counted_at: float | None = None  # Monotonic time when samples were last counted, if ever.
    _period: float = 1 / 6  # Last distance of two samples without a gap.

    def add(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Count the new pairs among these (timestamp in µs, percent).

        The time since samples were last counted bounds a gap: the timestamps follow the host's
        clock, which may jump.
        """
        elapsed_seconds = self.uncounted_seconds(now)
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
        self.unobserved_seconds += self.uncounted_seconds(now)
        self.last_timestamp = max((timestamp for timestamp, _ in samples), default=None)
        self.counted_at = now

    def uncounted_seconds(self, now: float) -> float:
        return 0.0 if self.counted_at is None else now - self.counted_at


@dataclass(slots=True)
class RatioIntegral:
    """Adds up ratios that hold for a whole interval each: GPM's two-sample differences."""

    seconds: dict[str, float] = field(default_factory=dict)  # Unit -> active time.
    unobserved_seconds: float = 0.0
    seen_until: float | None = None
    """Monotonic time up to which every second is active, idle or unobserved; None at first."""

    def add(self, now: float, ratios: Mapping[str, float]) -> None:
        """Count the time since the last call: a gap if a unit counted before has no ratio."""
        interval = self._reach(now)
        if self.seconds.keys() - ratios.keys():
            self.unobserved_seconds += interval
        for name, ratio in ratios.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + interval * ratio

    def skip(self, now: float) -> None:
        self.unobserved_seconds += self._reach(now)

    def _reach(self, now: float) -> float:
        interval = 0.0 if self.seen_until is None else now - self.seen_until
        self.seen_until = now
        return interval


def unwrapped_increment(before: int, now: int, expected: float) -> int:
    """Return the increment of a 32-bit counter, given the approximate increment.

    The counter alone shows the increment only modulo 2**32: it wraps in 90 ms at 50 GB/s. A second,
    coarser measurement of the same traffic shows how often it wrapped: the result is the possible
    increment nearest to that measurement, exact if its error is less than 2 GiB.
    """
    increment = (now - before) % COUNTER_32
    turns = round((expected - increment) / COUNTER_32)
    return increment + max(0, turns) * COUNTER_32


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
class CounterTotals:
    """Counters of one device since the exporter started; they outlive a driver reload."""

    busy: SampleIntegral = field(default_factory=SampleIntegral)
    active: RatioIntegral = field(default_factory=RatioIntegral)
    pcie_bytes: dict[str, float] = field(default_factory=dict)
    link_errors: dict[str, set[int]] = field(default_factory=dict)
    """Kind of NVLink error -> links that have ever reported a count."""


class BusyAccumulator:
    """Integrates the driver's buffer of utilization samples.

    The timestamp of the last counted sample outlives the NVML session: a new session continues
    there. Time before the oldest buffered sample is then a gap.
    """

    def __init__(self, queries: DeviceQueries, total: SampleIntegral) -> None:
        self._queries = queries
        self._total = total
        self._sampled_at: float | None = None
        """Time of the last read of samples; None before the first, and if the last read failed."""

    def sample(self, now: float, min_interval: float) -> None:
        if self._sampled_at is not None and now - self._sampled_at < min_interval:
            return
        self._sampled_at = None
        total = self._total
        samples = self._samples(now, total.last_timestamp or 0)
        if samples is None:
            return
        if total.counted_at is None:
            total.skip(samples, now)
        elif samples:
            total.add(samples, now)
        elif total.uncounted_seconds(now) > policy.MAX_SECONDS_WITHOUT_SAMPLE:
            whole_buffer = self._samples(now, 0)
            if not whole_buffer:
                return
            total.skip(whole_buffer, now)
        self._sampled_at = now

    def _samples(self, now: float, since: int) -> list[tuple[int, float]] | None:
        api, device = self._queries.api, self._queries.device
        return self._queries.get(
            "nvmlDeviceGetSamples", lambda: api.samples(device, GPU_UTILIZATION_SAMPLES, since), now
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the counters if the last read worked."""
        if self._sampled_at is not None:
            yield Reading("busy_time", self._total.seconds)
            yield _unobserved("busy", self._total.unobserved_seconds)


class GpmAccumulator:
    """Compares two samples of GPU Performance Monitoring (Hopper and later).

    The hardware counts all the time and a sample is a copy of its counters, so the interval between
    two samples has no gap, however long it is. The hardware counts cycles: the ratio is a share of
    time only while the clock rate stays the same. Samples end with the NVML session: the time
    between the last sample of a session and the first of the next is unobserved.
    """

    def __init__(
        self,
        queries: DeviceQueries,
        totals: CounterTotals,
        instance: tuple[Device, int | None] | None = None,
    ) -> None:
        """Sample the device, or `instance`: its GPU and its GPU instance ID."""
        self._queries = queries
        self._api = queries.api
        self._totals = totals
        self._device, self._gpu_instance = instance or (queries.device, None)
        self._base: object | None = None
        self._spare: object | None = None
        self._base_at: float | None = None
        self._base_pcie: dict[str, int] = {}
        self._ratios: dict[str, float] = {}
        self._observed: set[str] = set()  # Counters to show after the last sample.

    def sample(self, now: float, min_interval: float) -> None:
        """Take a sample if due, and count the interval since the last."""
        if self._base_at is not None and now - self._base_at < min_interval:
            return
        self._ratios, self._observed = {}, set()
        try:
            if not self._supported(now):
                self.close()
                return
            taken = self._take(now)
            if taken is not None:
                self._advance(taken, now)
        except GpuGoneError:
            self.close()
            raise

    def _supported(self, now: float) -> bool:
        supported = self._queries.get(
            "nvmlGpmQueryDeviceSupport",
            lambda: self._api.call("nvmlGpmQueryDeviceSupport", self._device).isSupportedDevice,
            now,
            every=NEVER_AGAIN,
        )
        return bool(supported) and self._queries.is_due("nvmlGpmMetricsGet", now)

    def _take(self, now: float) -> object | None:
        def read() -> object:
            if self._spare is None:
                self._spare = self._api.call("nvmlGpmSampleAlloc")
            if self._gpu_instance is None:
                self._api.call("nvmlGpmSampleGet", self._device, self._spare)
            else:
                instance = self._device, self._gpu_instance
                self._api.call("nvmlGpmMigSampleGet", *instance, self._spare)
            return self._spare

        return self._queries.get("nvmlGpmSampleGet", read, now)

    def _advance(self, sample: object, now: float) -> None:
        pcie = self._pcie_counters(now)
        base, base_at, base_pcie = self._base, self._base_at, self._base_pcie
        self._base, self._base_at, self._base_pcie = sample, now, pcie
        self._spare = base
        active = self._totals.active
        if base is None or base_at is None:
            active.skip(now)
            self._observed = {*active.seconds, *self._totals.pcie_bytes}
            return
        metrics = self._queries.get(
            "nvmlGpmMetricsGet", lambda: self._api.gpm_metrics(base, sample, GPM_ALL), now
        )
        if metrics is None:
            active.skip(now)
            return
        self._ratios = {
            quantity: min(max(metrics[metric] / 100, 0.0), 1.0)
            for metric, quantity in GPM_RATIOS.items()
            if math.isfinite(metrics.get(metric, math.nan))
        }
        found = {unit: self._ratios.get(f"{unit}_activity") for unit in GPM_COUNTED}
        counted = {unit: ratio for unit, ratio in found.items() if ratio is not None}
        active.add(now, counted)
        self._observed |= counted.keys()
        for direction, metric in GPM_PCIE.items():
            rate = metrics.get(metric, -1.0)
            if math.isfinite(rate) and rate >= 0:
                increment = rate * MEBI * (now - base_at)
                before, after = base_pcie.get(direction), pcie.get(direction)
                if before is not None and after is not None:
                    increment = unwrapped_increment(before, after, increment)
                total = self._totals.pcie_bytes
                total[direction] = total.get(direction, 0.0) + increment
                self._observed.add(direction)

    def _pcie_counters(self, now: float) -> dict[str, int]:
        if self._gpu_instance is not None:
            return {}
        fields = [(field, 0) for field in PCIE_FIELDS.values()]
        replies = self._queries.get(
            "nvmlDeviceGetFieldValues(PCIE_COUNT_BYTES)",
            lambda: self._api.fields(self._device, fields),
            now,
        )
        return {
            direction: int(reply.value)
            for direction, reply in zip(PCIE_FIELDS, replies or (), strict=False)
            if reply.code == 0
        }

    def age_seconds(self, now: float) -> float | None:
        """Return the age of the last sample; None if the SMs' activity is not counted."""
        counted = self._base_at is not None and "sm" in self._observed
        return now - self._base_at if counted and self._base_at is not None else None

    def close(self) -> None:
        for sample in (self._base, self._spare):
            if sample is not None:
                try:
                    self._api.call("nvmlGpmSampleFree", sample)
                except NvmlError:
                    continue
        self._base = self._spare = self._base_at = None
        self._base_pcie = {}

    def readings(self) -> Iterator[Reading]:
        """Yield the ratios over the last interval, and the counters that are current."""
        for quantity, ratio in self._ratios.items():
            yield Reading(quantity, ratio)
        for name, seconds in self._totals.active.seconds.items():
            if name in self._observed:
                yield Reading(f"{name}_active_time", seconds)
        for direction, count in self._totals.pcie_bytes.items():
            if direction in self._observed:
                yield Reading(f"pcie_{direction}_bytes", count)
        if self._observed:
            yield _unobserved("active", self._totals.active.unobserved_seconds)


def _unobserved(counter: str, seconds: float) -> Reading:
    return Reading("unobserved_time", seconds, (("counter", counter),))

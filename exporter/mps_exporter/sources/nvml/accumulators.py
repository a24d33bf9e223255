"""What is computed from two looks at a device: busy seconds, active seconds, PCIe bytes.

A meter looks at most every half second, however many scrapes there are, and works by itself out
what happened since it last looked; so several Prometheus servers do not disturb each other. In a
running exporter a tick looks once a second, and a collection shows what that one saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.integrals import (
    RatioIntegral,
    SampleIntegral,
    percent_to_ratio,
    unwrapped_increment,
)
from mps_exporter.sources.nvml.pynvml_api import Device, NvmlApi, NvmlError
from mps_exporter.sources.nvml.query_cache import NEVER_AGAIN, GpuGoneError, QueryCache
from mps_exporter.sources.nvml.readings import PCIE_RECEIVE_FIELD, PCIE_TRANSMIT_FIELD

MIN_SAMPLE_INTERVAL_SECONDS = 0.5
GPU_UTILIZATION_SAMPLES = 1
"""nvmlSamplingType_t."""
SILENCE_SECONDS = 5.0
"""NVML samples at least once a second: no new sample for so long means that its clock was set."""

GPM_SM_OCCUPANCY = 3
GPM_RATIOS = {
    1: "graphics",
    2: "sm",
    4: "integer",
    5: "tensor",
    10: "dram",
    11: "fp64",
    12: "fp32",
    13: "fp16",
}
"""nvmlGpmMetricId_t -> what is active."""
GPM_COUNTED = ("graphics", "sm", "tensor", "dram")
"""Those that have a counter of seconds beside the ratio."""
GPM_PCIE = {"transmit": 20, "receive": 21}
"""MiB/s over the interval."""
GPM_ALL = (*GPM_RATIOS, GPM_SM_OCCUPANCY, *GPM_PCIE.values())
MEBI = 1 << 20


@dataclass(slots=True)
class CounterTotals:
    """What was counted for one device since the exporter started; outlives a driver reload."""

    busy: SampleIntegral = field(default_factory=SampleIntegral)
    active: RatioIntegral = field(default_factory=RatioIntegral)
    pcie_bytes: dict[str, float] = field(default_factory=dict)
    link_errors: dict[str, set[int]] = field(default_factory=dict)
    """Kind of NVLink error -> links that ever reported a count."""


class BusyAccumulator:
    """Integrates the driver's buffer of utilization samples.

    The timestamp up to which it was counted outlives the NVML session: a meter of a new one goes on
    there. As far as the buffer does not reach back so far, the time between is a hole.
    """

    def __init__(
        self, api: NvmlApi, device: Device, answers: QueryCache, total: SampleIntegral
    ) -> None:
        self._api = api
        self._device = device
        self._queries = answers
        self._total = total
        self._sampled_at = 0.0
        self._observed = False
        """The last look saw something: what the counter says is true now."""

    def sample(self, now: float, min_interval: float = MIN_SAMPLE_INTERVAL_SECONDS) -> None:
        """Count the samples since the last look."""
        if self._observed and now - self._sampled_at < min_interval:
            return
        self._observed = False
        total = self._total
        samples = self._samples(now, total.last_timestamp or 0)
        if samples is None:
            return
        if total.counted_at is None:
            total.start(samples, now)
        elif samples:
            total.add(samples, now)
        elif total.unseen_for(now) > SILENCE_SECONDS:
            whole_buffer = self._samples(now, 0)
            if not whole_buffer:
                return
            total.skip(whole_buffer, now)
        self._sampled_at = now
        self._observed = True

    def _samples(self, now: float, since: int) -> list[tuple[int, float]] | None:
        return self._queries.get(
            "nvmlDeviceGetSamples",
            lambda: self._api.samples(self._device, GPU_UTILIZATION_SAMPLES, since),
            now,
        )

    def readings(self) -> Iterator[Reading]:
        """The counters, while they are sampled."""
        if self._observed:
            yield Reading("busy_time", self._total.seconds)
            yield _unobserved("busy", self._total.unobserved_seconds)


class GpmAccumulator:
    """Compares two samples of GPU Performance Monitoring (Hopper and later).

    The hardware counts all the time and a sample is a copy of its counters, so the interval between
    two samples has no hole, however long it was. It counts cycles: the ratio is one of time only as
    far as the clock stayed the same. Samples end with the NVML session: what lies between the last
    of one and the first of the next is unobserved.
    """

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        answers: QueryCache,
        totals: CounterTotals,
        gpu_instance: int | None = None,
    ) -> None:
        self._api = api
        self._device = device
        self._queries = answers
        self._totals = totals
        self._gpu_instance = gpu_instance
        self._base: object | None = None
        self._spare: object | None = None
        self._base_at: float | None = None
        self._base_pcie: dict[str, int] = {}
        self._ratios: dict[str, float] = {}
        self._occupancy: float | None = None
        self._observed: set[str] = set()
        """The counters of which the last look says that they are true now."""

    def sample(self, now: float, min_interval: float = MIN_SAMPLE_INTERVAL_SECONDS) -> None:
        """Take a sample, and count the interval since the one before."""
        if self._base_at is not None and now - self._base_at < min_interval:
            return
        self._ratios, self._occupancy, self._observed = {}, None, set()
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
            self._api.gpm_take(self._device, self._spare, self._gpu_instance)
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
            name: ratio
            for metric, name in GPM_RATIOS.items()
            if metric in metrics and (ratio := percent_to_ratio(metrics[metric])) is not None
        }
        occupancy = metrics.get(GPM_SM_OCCUPANCY)
        self._occupancy = None if occupancy is None else percent_to_ratio(occupancy)
        counted = {name: self._ratios[name] for name in GPM_COUNTED if name in self._ratios}
        active.add(now, counted)
        self._observed |= counted.keys()
        for direction, metric in GPM_PCIE.items():
            rate = metrics.get(metric, -1.0)
            if math.isfinite(rate) and rate >= 0:
                expected = rate * MEBI * (now - base_at)
                before, after = base_pcie.get(direction), pcie.get(direction)
                self._count_pcie(direction, before, after, expected)
                self._observed.add(direction)

    def _count_pcie(
        self, direction: str, before: int | None, after: int | None, expected: float
    ) -> None:
        increment = expected
        if before is not None and after is not None:
            increment = unwrapped_increment(before, after, expected)
        total = self._totals.pcie_bytes
        total[direction] = total.get(direction, 0.0) + increment

    def _pcie_counters(self, now: float) -> dict[str, int]:
        if self._gpu_instance is not None:
            return {}
        fields = ((PCIE_TRANSMIT_FIELD, 0), (PCIE_RECEIVE_FIELD, 0))
        answers = self._queries.get(
            "nvmlDeviceGetFieldValues(PCIE_COUNT_BYTES)",
            lambda: self._api.fields(self._device, fields),
            now,
        )
        if answers is None:
            return {}
        return {
            direction: int(answer.value)
            for direction, answer in zip(("transmit", "receive"), answers, strict=True)
            if answer.code == 0
        }

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._base, self._spare):
            if sample is not None:
                try:
                    self._api.call("nvmlGpmSampleFree", sample)
                except NvmlError:
                    continue
        self._base = self._spare = self._base_at = None
        self._base_pcie = {}

    def readings(self) -> Iterator[Reading]:
        """The ratios over the last interval, and the counters, while they are sampled."""
        for name, ratio in self._ratios.items():
            yield Reading(f"{name}_activity", ratio)
        if self._occupancy is not None:
            yield Reading("sm_occupancy", self._occupancy)
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

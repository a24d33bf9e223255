"""The MIG instances of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter.sources.nvml.accumulators import CounterTotals
from mps_exporter.sources.nvml.device import DeviceLocation, DeviceReader, MigDeviceReader
from mps_exporter.sources.nvml.pynvml_api import SESSION_GONE, Device, NvmlApi, NvmlError


class MigInstances:
    """The compute instances of each GPU, looked for again every `refresh_seconds`."""

    def __init__(self, api: NvmlApi, refresh_seconds: float) -> None:
        self._api = api
        self._refresh_seconds = refresh_seconds
        self._readers: dict[str, list[MigDeviceReader]] = {}
        """By the UUID of the GPU."""
        self._refresh_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[MigDeviceReader]:
        return (reader for readers in self._readers.values() for reader in readers)

    def clear(self) -> None:
        """The NVML session is over. The readers are closed already."""
        self._readers, self._refresh_at = {}, {}

    def of(
        self, gpu: DeviceReader, now: float, totals: dict[str, CounterTotals]
    ) -> list[MigDeviceReader]:
        """Return the instances of a GPU.

        Args:
            gpu: The GPU.
            now: Monotonic time in seconds.
            totals: By UUID; an instance that is new is added.
        """
        uuid = gpu.location.uuid
        if not gpu.mig_enabled:
            for reader in self._readers.pop(uuid, []):
                reader.close()
            return []
        if now >= self._refresh_at.get(uuid, 0.0):
            self._refresh_at[uuid] = now + self._refresh_seconds
            self._refresh(gpu, totals)
        return self._readers.get(uuid, [])

    def _refresh(self, gpu: DeviceReader, totals: dict[str, CounterTotals]) -> None:
        before = {one.location.uuid: one for one in self._readers.get(gpu.location.uuid, [])}
        present: list[MigDeviceReader] = []
        for device, location in self._found(gpu):
            reader = before.pop(location.uuid, None)
            if reader is None:
                own_totals = totals.setdefault(location.uuid, CounterTotals())
                reader = MigDeviceReader(
                    self._api, device, gpu.device, location, own_totals, gpu.shortest
                )
            present.append(reader)
        for gone in before.values():
            gone.close()
        self._readers[gpu.location.uuid] = present

    def _found(self, gpu: DeviceReader) -> Iterator[tuple[Device, DeviceLocation]]:
        """Slots without an instance answer NOT_FOUND."""
        try:
            slots = self._api.number("nvmlDeviceGetMaxMigDeviceCount", gpu.device)
        except NvmlError as error:
            gpu.queries.session_gone |= error.code in SESSION_GONE
            return
        for slot in range(slots):
            try:
                yield self._in_slot(gpu, slot)
            except NvmlError as error:
                gpu.queries.session_gone |= error.code in SESSION_GONE

    def _in_slot(self, gpu: DeviceReader, slot: int) -> tuple[Device, DeviceLocation]:
        api = self._api
        device = Device(api.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.device, slot))
        return device, DeviceLocation(
            index=gpu.location.index,
            uuid=api.text("nvmlDeviceGetUUID", device),
            parent_uuid=gpu.location.uuid,
            gpu_instance=api.number("nvmlDeviceGetGpuInstanceId", device),
            compute_instance=api.number("nvmlDeviceGetComputeInstanceId", device),
        )

"""The GPUs that a daemon's logs and replies name: device ordinals and UUIDs."""

from __future__ import annotations

from collections.abc import Collection

MAX_GPUS = 64


class GpuNames:
    """Which device ordinal of the daemon is which GPU."""

    def __init__(self) -> None:
        self._ordinals: dict[int, str] = {}
        self._uuids: set[str] = set()

    def add_gpu(self, uuid: str) -> None:
        """A client was associated with a GPU, or the control tool listed it."""
        if len(self._uuids) < MAX_GPUS:
            self._uuids.add(uuid)

    def add_ordinal(self, device: int, uuid: str) -> None:
        """A device ordinal was shown with the UUID of its GPU."""
        if device in self._ordinals or len(self._ordinals) < MAX_GPUS:
            self._ordinals[device] = uuid

    def clear_ordinals(self) -> None:
        """Another daemon may number its devices differently."""
        self._ordinals.clear()

    def uuid_of(self, device: int, server_devices: Collection[int]) -> str:
        """Return the UUID of a device of a server, "" if the logs do not show it."""
        known = self._ordinals.get(device)
        if known is not None:
            return known
        return self._only_gpu() if len(server_devices) <= 1 else ""

    def by_ordinal(self, used_devices: Collection[int]) -> dict[int, str]:
        """Return ordinal -> UUID. One GPU and device 0 alone are the same."""
        if self._ordinals:
            return dict(self._ordinals)
        only = self._only_gpu()
        return {0: only} if only and set(used_devices) == {0} else {}

    def _only_gpu(self) -> str:
        return next(iter(self._uuids)) if len(self._uuids) == 1 else ""

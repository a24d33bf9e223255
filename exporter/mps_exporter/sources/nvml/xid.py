"""Xid errors, as the driver reports them: counted by code on a thread of their own.

An Xid is the driver's word for "something went wrong on this GPU" (13: a program's exception, 31:
its illegal memory access, 48: double-bit ECC error, 79: the GPU has fallen off the bus). NVML hands
them out once, as events, to those who wait for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.pynvml_api import (
    SESSION_GONE,
    Device,
    NvmlApi,
    NvmlError,
    code_name,
    device_key,
)

log = logging.getLogger(__name__)

XID_CRITICAL_ERROR = 0x8
"""nvmlEventTypeXidCriticalError."""
WAIT_MILLISECONDS = 500
PAUSE_SECONDS = 1.0

USUAL_CODES = (13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120, 140)
"""Exported as 0 from the start: a counter that appears at 1 has no increase."""


@dataclass(slots=True)
class XidCount:
    """How often one code came, and when last."""

    count: int = 0
    last_at: float | None = None


class XidCounts:
    """Xids by GPU since the exporter started. Safe for two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[int, XidCount]] = {}
        self._watched: frozenset[str] = frozenset()

    def watch(self, uuids: Iterable[str]) -> None:
        """From now on the absence of Xids of these GPUs, and of no others, means something."""
        with self._lock:
            self._watched = frozenset(uuids)
            for uuid in self._watched:
                self._counts.setdefault(uuid, {code: XidCount() for code in USUAL_CODES})

    def add(self, uuid: str, xid: int, at: float) -> None:
        """One more."""
        with self._lock:
            counted = self._counts.setdefault(uuid, {}).setdefault(xid, XidCount())
            counted.count += 1
            counted.last_at = at

    def readings(self, uuid: str) -> Iterator[Reading]:
        """What is known of one GPU.

        Counters only while events are awaited: a constant one would say that nothing happened. The
        time of the last Xid stays true, and is needed most for a GPU that is lost.
        """
        with self._lock:
            watched = uuid in self._watched
            counts = sorted(self._counts.get(uuid, {}).items())
            readings = [one for xid, count in counts for one in _readings(xid, count, watched)]
        return iter(readings)


def _readings(xid: int, counted: XidCount, watched: bool) -> Iterator[Reading]:
    labels = (("xid", str(xid)),)
    if watched:
        yield Reading("xid_errors", counted.count, labels)
    if counted.last_at is not None:
        yield Reading("last_xid_at", counted.last_at, labels)


class XidWatcher:
    """Waits for Xid events of some devices, as long as NVML stays initialized."""

    def __init__(self, api: NvmlApi, counts: XidCounts, wall_clock: Callable[[], float]) -> None:
        self._api = api
        self._counts = counts
        self._wall_clock = wall_clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()

    @property
    def started(self) -> bool:
        """Whether a thread waits for events."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, devices: Sequence[tuple[Device, str]]) -> None:
        """Watch these (device, UUID) pairs; those that report no events are left out."""
        try:
            events = self._api.call("nvmlEventSetCreate")
        except NvmlError as error:
            self._log_once(f"Xid errors cannot be watched: {error}")
            return
        watched: dict[int, str] = {}
        for device, uuid in devices:
            try:
                self._api.call("nvmlDeviceRegisterEvents", device, XID_CRITICAL_ERROR, events)
                watched[device_key(device)] = uuid
            except NvmlError as error:
                why = code_name(error.code)
                self._log_once(f"GPU {uuid}: Xid errors cannot be watched: {why}")
        self._counts.watch(watched.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(events, watched, self._stop), name="nvml-xid", daemon=True
        )
        self._thread.start()

    def _run(self, events: object, watched: dict[int, str], stop: threading.Event) -> None:
        while watched and not stop.is_set():
            try:
                event = self._api.wait_event(events, WAIT_MILLISECONDS)
            except NvmlError as error:
                if error.code in SESSION_GONE:
                    self._counts.watch(())
                    break
                # A lost GPU makes the wait fail at once, every time.
                stop.wait(PAUSE_SECONDS)
                continue
            if event is None or not event.type & XID_CRITICAL_ERROR:
                continue
            uuid = watched.get(event.device_key)
            if uuid is not None:
                log.warning("GPU %s: Xid %d", uuid, event.data)
                self._counts.add(uuid, event.data, self._wall_clock())
        try:
            self._api.call("nvmlEventSetFree", events)
        except NvmlError as error:
            log.debug("%s", error)

    def stop(self, timeout_seconds: float) -> bool:
        """Stop waiting, before NVML is shut down.

        Returns:
            Whether no thread is inside NVML. To shut it down under the waiting thread would
            end the process.
        """
        self._stop.set()
        self._counts.watch(())
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

"""Asking one device, and remembering what it does not have.

Every question to NVML about a device goes through :class:`QueryCache`, so that one rule decides
what a refusal means: never here, not this time, this GPU is gone, or NVML as a whole is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mps_exporter.sources.nvml.pynvml_api import (
    GPU_GONE,
    MAY_CHANGE,
    SESSION_GONE,
    UNSUPPORTED,
    Code,
    NvmlError,
    code_name,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

NEVER_AGAIN = float("inf")

RETRY_REFUSED_SECONDS = 600.0
"""How often to put a question again whose refusal may be lifted."""

DEFECTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What arithmetic raises on an unexpected answer: infinity, a list too short. It costs the
reading, never the source."""
DEFECT = -1
"""Stands for them among NVML's codes."""


class GpuGoneError(Exception):
    """The GPU has fallen off the bus or must be reset."""


class QueryCache:
    """What one device answered, and what it never will."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name
        self.session_gone = False
        """NVML must be initialized again."""
        self._refused: dict[str, float] = {}
        """Question -> when it is worth putting again; ONCE: never."""
        self._logged: set[tuple[str, int]] = set()
        self._cached: dict[str, tuple[float, Any]] = {}

    def get(
        self,
        name: str,
        read: Callable[[], T],
        now: float = 0.0,
        every: float = 0.0,
        ahead: float = 0.0,
    ) -> T | None:
        """Ask, unless the answer is still good or there will never be one.

        Args:
            name: Identifies the query: those with the same name are the same.
            read: Asks NVML; whatever else it raises than NvmlError is a defect, and is logged once.
            now: Monotonic time in seconds.
            every: Seconds for which an answer is good.
            ahead: Ask also when the answer will be good for less than this.

        Returns:
            The answer, or None where there is none: never one, or not this time.

        Raises:
            GpuGoneError: The GPU is not there any more.
        """
        if now + ahead < self._refused.get(name, 0.0):
            return None
        cached = self._cached.get(name)
        if cached is not None and now + ahead < cached[0]:
            return cached[1]  # type: ignore[no-any-return]  # put there below, under the same name
        self._cached.pop(name, None)
        try:
            answer = read()
        except NvmlError as error:
            self.record_refusal(name, error.code, now)
            return None
        except DEFECTS as error:
            self.record_defect(name, error)
            return None
        self.record_answer(name)
        if every:
            self._cached[name] = (now + every, answer)
        return answer

    def record_answer(self, name: str) -> None:
        """Note that the question has an answer."""
        self._refused.pop(name, None)

    def record_refusal(self, name: str, code: int, now: float) -> None:
        """Note what a refusal means for the question."""
        if code in GPU_GONE:
            raise GpuGoneError(f"{name}: {code_name(code)}")
        if code in SESSION_GONE:
            self.session_gone = True
        elif code in UNSUPPORTED:
            self._refused[name] = now + RETRY_REFUSED_SECONDS if code in MAY_CHANGE else NEVER_AGAIN
            level = logging.INFO if code == Code.NO_PERMISSION else logging.DEBUG
            self._log_once(name, code, level, "not available here", code_name(code))
        else:
            self._log_once(name, code, logging.DEBUG, "left out this time", code_name(code))

    def record_defect(self, name: str, error: Exception) -> None:
        """Note that this program could make nothing of the answer."""
        self._log_once(name, DEFECT, logging.WARNING, "left out: a defect", repr(error))

    def _log_once(self, name: str, code: int, level: int, what: str, why: str) -> None:
        if (name, code) not in self._logged:
            self._logged.add((name, code))
            log.log(level, "%s: %s: %s: %s", self.device_name, what, name, why)

    def is_supported(self, name: str) -> bool:
        """Whether it has not been refused for good, as far as is known now."""
        return name not in self._refused

    def is_due(self, name: str, at: float) -> bool:
        """Whether it is worth asking at this moment: it was not refused, or long ago."""
        return at >= self._refused.get(name, 0.0)

    def clear(self) -> None:
        """Query everything again: the device behaves differently now."""
        self._refused.clear()
        self._logged.clear()
        self._cached.clear()

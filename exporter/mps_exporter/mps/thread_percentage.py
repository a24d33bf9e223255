"""From an active thread percentage to SMs: what a client's and its server's percentage leave it.

"Measured" means: on an H200 (132 SMs), driver 580. Where nothing was measured or documented
the answer is None, never a guess.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_HOPPER = (9, 0)
_HOPPER_SM_STEP = 2
_HOPPER_SM_FLOOR = 8


@dataclass(frozen=True, slots=True)
class ThreadPercentage:
    """What a client's CUDA_MPS_ACTIVE_THREAD_PERCENTAGE does."""

    ratio: float | None = None
    """The share of the SMs, above 0 and below 1; None: no limit of the client's own."""
    ignored: bool = False
    """The variable is set, but CUDA silently makes nothing of its value."""


_DECIMAL = re.compile(r"\s*([+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?)", re.ASCII)
_HEXADECIMAL = re.compile(r"\s*([+-]?0[xX][0-9a-fA-F]{1,16})", re.ASCII)


def parse_active_thread_percentage(text: str | None) -> ThreadPercentage:
    """Read CUDA_MPS_ACTIVE_THREAD_PERCENTAGE as CUDA does.

    Measured: it takes the number that the text begins with, as C's strtod does ("50%", "50,5" and
    "0x32" are 50). Numbers above 0 and below 100 limit, however small; 100 is no limit; with any
    other number or text all SMs are left, without a word.
    """
    if text is None:
        return ThreadPercentage()
    percentage = _leading_number(text)
    if percentage == 100.0:
        return ThreadPercentage()
    if percentage is None or not 0.0 < percentage < 100.0:
        return ThreadPercentage(ignored=True)
    return ThreadPercentage(ratio=percentage / 100.0)


def _leading_number(text: str) -> float | None:
    if found := _HEXADECIMAL.match(text):
        return float.fromhex(found[1])
    found = _DECIMAL.match(text)
    return float(found[1]) if found else None


def effective_ratio(client: float | None, server: float | None) -> float | None:
    """Return the share of the SMs in force: the lower of the client's and the server's.

    The server's is the one when the client connected. Measured: server 50 %, client 90 % -> 50 %.
    None: neither is known.
    """
    known = [ratio for ratio in (client, server) if ratio is not None]
    return min(known) if known else None


def sms_of_ratio(
    ratio: float, sm_count: int, compute_capability: tuple[int, int] | None
) -> int | None:
    """Return the SMs that a ratio (0-1) leaves a client on a GPU with sm_count SMs.

    Measured on Hopper (compute capability 9.0) with 132 SMs, at 70 percentages: rounded down to an
    even number, at least 8. A ratio of 1 is all of them on any GPU. None: how other architectures
    round was not measured.
    """
    if ratio >= 1.0:
        return sm_count
    if compute_capability != _HOPPER:
        return None
    # The nudge keeps a product that is whole in decimals from falling below it in binary.
    steps = math.floor(ratio * sm_count / _HOPPER_SM_STEP + 1e-9)
    return min(max(steps * _HOPPER_SM_STEP, _HOPPER_SM_FLOOR), sm_count)

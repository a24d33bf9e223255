"""What MPS's limits come to: percentages in SMs, memory limits in bytes, how many clients fit.

"Measured" means: on an H200 (132 SMs), driver 580. Where nothing was measured or documented
the answer is None, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_HOPPER = (9, 0)
_HOPPER_SM_STEP = 2
_HOPPER_SM_FLOOR = 8

_VOLTA = (7, 0)
_CONTEXTS_BEFORE_VOLTA = 16
_CONTEXTS_SINCE_VOLTA = 48
_CONTEXTS_SINCE_R590 = 60


@dataclass(frozen=True, slots=True)
class ThreadLimit:
    """What a client's CUDA_MPS_ACTIVE_THREAD_PERCENTAGE does."""

    ratio: float | None = None
    """The share of the SMs, above 0 and below 1; None: no limit of the client's own."""
    ignored: bool = False
    """The variable is set, but CUDA silently makes nothing of its value."""


_DECIMAL = re.compile(r"\s*([+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?)", re.ASCII)
_HEXADECIMAL = re.compile(r"\s*([+-]?0[xX][0-9a-fA-F]{1,16})", re.ASCII)


def parse_active_thread_percentage(text: str | None) -> ThreadLimit:
    """Read CUDA_MPS_ACTIVE_THREAD_PERCENTAGE as CUDA does.

    Measured: it takes the number that the text begins with, as C's strtod does ("50%", "50,5" and
    "0x32" are 50). Numbers above 0 and below 100 limit, however small; 100 is no limit; with any
    other number or text all SMs are left, without a word.
    """
    if text is None:
        return ThreadLimit()
    percentage = _leading_number(text)
    if percentage == 100.0:
        return ThreadLimit()
    if percentage is None or not 0.0 < percentage < 100.0:
        return ThreadLimit(ignored=True)
    return ThreadLimit(ratio=percentage / 100.0)


def _leading_number(text: str) -> float | None:
    if found := _HEXADECIMAL.match(text):
        return float.fromhex(found[1])
    found = _DECIMAL.match(text)
    return float(found[1]) if found else None


def effective_ratio(client: float | None, server: float | None) -> float | None:
    """Give the share of the SMs in force: the lower of the client's and the server's.

    The server's is the one when the client connected. Measured: server 50 %, client 90 % -> 50 %.
    None: neither is known.
    """
    known = [ratio for ratio in (client, server) if ratio is not None]
    return min(known) if known else None


def sm_limit(ratio: float, sm_count: int, compute_capability: tuple[int, int] | None) -> int | None:
    """Give the SMs that a ratio (0-1) leaves a client on a GPU with sm_count SMs.

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


_MEMORY = re.compile(r"(\d{1,15}) ?([KMGT])(?:i?B)?", re.IGNORECASE | re.ASCII)
_MEMORY_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def parse_memory(text: str) -> int | None:
    """Read "10G" or "512M", as the control tool prints limits, into bytes. None: no such text."""
    match = _MEMORY.fullmatch(text.strip())
    return None if match is None else int(match[1]) << _MEMORY_SHIFTS[match[2].upper()]


_DEVICE_LIMIT = re.compile(
    r"(?P<device>\d{1,4}|GPU-[0-9a-zA-Z-]+)\s*=\s*(?P<amount>\d{1,12})(?P<giga>[gG]?)", re.ASCII
)


def parse_pinned_memory_limit(text: str | None) -> dict[str, int]:
    """Read CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, "0=1G,GPU-…=512MB": device as written -> bytes.

    Measured: "G" (or "g") means 2^30; whatever else follows the number, or nothing, means 2^20
    ("1T" and "1.5G" are one MiB). A part that begins with a blank, or has no number above 0, says
    nothing. Of a device that is named twice the lower limit counts.
    """
    limits: dict[str, int] = {}
    for part in (text or "").split(","):
        found = _DEVICE_LIMIT.match(part)
        limit = int(found["amount"]) << (30 if found["giga"] else 20) if found else 0
        if found and limit:
            device = found["device"]
            limits[device] = min(limit, limits.get(device, limit))
    return limits


def pinned_memory_limit_of(limits: Mapping[str, int], ordinal: int | None, uuid: str) -> int | None:
    """Find the limit of one device: the lowest under its ordinal or the beginning of its UUID.

    Measured, the case of the letters counts.
    """
    named = [limit for device, limit in limits.items() if _names(device, ordinal, uuid)]
    return min(named) if named else None


def names_missing_device(limits: Mapping[str, int], devices: Mapping[int, str]) -> bool:
    """Whether a limit is for a device that a client does not see (its ordinals -> UUIDs).

    Measured: then CUDA silently ignores all of them, also those of devices that are there.
    """
    return any(
        not any(_names(device, ordinal, uuid) for ordinal, uuid in devices.items())
        for device in limits
    )


def _names(device: str, ordinal: int | None, uuid: str) -> bool:
    if device.startswith("GPU-"):
        return uuid.startswith(device)
    return ordinal is not None and int(device) == ordinal


def parse_client_priority(text: str | None) -> int | None:
    """Read CUDA_MPS_CLIENT_PRIORITY: 0 normal, 1 below normal; None: unset, or no such value."""
    return {"0": 0, "1": 1}.get((text or "").strip())


def context_limit(
    compute_capability: tuple[int, int] | None, driver_version: str | None
) -> int | None:
    """Give how many client contexts one server takes on one GPU.

    16 before Volta; 48 since (measured, also on driver 580); 60 since driver 590 (CUDA 13.1), all
    with the default CUDA_DEVICE_MAX_CONNECTIONS of 2: raising that lowers them. Smaller on MIG.
    """
    if compute_capability is None:
        return None
    if compute_capability < _VOLTA:
        return _CONTEXTS_BEFORE_VOLTA
    major = re.match(r"\d+", driver_version or "")
    if major is None:
        return None
    return _CONTEXTS_SINCE_R590 if int(major[0]) >= 590 else _CONTEXTS_SINCE_VOLTA

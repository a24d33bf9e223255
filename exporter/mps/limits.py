"""What MPS's limits come to: percentages in SMs, memory limits in bytes, how many clients fit.

"Measured" means: on H100 and H200 (132 SMs), driver 580. Where nothing was measured or documented
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


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def parse_active_thread_percentage(text: str | None) -> ThreadLimit:
    """Read CUDA_MPS_ACTIVE_THREAD_PERCENTAGE as CUDA does.

    Measured: from 0.5 to 99 it limits; 100 or more, negative, empty and non-numeric values leave
    all SMs, without a word.
    """
    if text is None:
        return ThreadLimit()
    number = text.strip()
    percentage = float(number) if _NUMBER.fullmatch(number) else None
    if percentage == 100.0:
        return ThreadLimit()
    if percentage is None or not 0.0 < percentage < 100.0:
        return ThreadLimit(ignored=True)
    return ThreadLimit(ratio=percentage / 100.0)


def effective_ratio(client: float | None, server: float | None) -> float | None:
    """Give the share of the SMs in force: the lower of the client's and the server's.

    The server's is the one when the client connected. Measured: server 50 %, client 90 % -> 50 %.
    None: neither is known.
    """
    known = [ratio for ratio in (client, server) if ratio is not None]
    return min(known) if known else None


def sm_limit(ratio: float, sm_count: int, compute_capability: tuple[int, int] | None) -> int | None:
    """Give the SMs that a ratio (0-1) leaves a client on a GPU with sm_count SMs.

    Measured on Hopper (compute capability 9.0): rounded down to an even number, at least 8. A ratio
    of 1 is all of them on any GPU. None: how other architectures round was not measured.
    """
    if ratio >= 1.0:
        return sm_count
    if compute_capability != _HOPPER:
        return None
    # The nudge keeps a product that is whole in decimals from falling below it in binary.
    steps = math.floor(ratio * sm_count / _HOPPER_SM_STEP + 1e-9)
    return min(max(steps * _HOPPER_SM_STEP, _HOPPER_SM_FLOOR), sm_count)


_MEMORY = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MEMORY_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_memory(text: str) -> int | None:
    """Read "10G" or "512MB" into bytes; the units are powers of 1024. None: no such text."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        return None
    return int(match[1]) << _MEMORY_SHIFTS[match[2].upper()]


def parse_pinned_memory_limit(text: str | None) -> dict[str, int]:
    """Read CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, "0=1G,GPU-…=512MB": device -> bytes.

    Devices are ordinals ("0") or UUIDs, as written. Parts that are no such pair are left out; a
    device named twice has the last value.
    """
    limits: dict[str, int] = {}
    for part in (text or "").split(","):
        device, equals, amount = part.partition("=")
        limit = parse_memory(amount)
        if equals and device.strip() and limit is not None:
            limits[device.strip()] = limit
    return limits


def pinned_memory_limit_of(limits: Mapping[str, int], ordinal: int | None, uuid: str) -> int | None:
    """Find the limit of one device, named by its ordinal or by its UUID; the lower of the two."""
    named = [limit for key, limit in limits.items() if _names(key, ordinal, uuid)]
    return min(named) if named else None


def _names(key: str, ordinal: int | None, uuid: str) -> bool:
    return key.lower() == uuid.lower() or (ordinal is not None and key == str(ordinal))


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

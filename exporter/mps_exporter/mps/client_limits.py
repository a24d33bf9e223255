"""Effects of MPS's limits: percentages in SMs, memory in bytes, priorities, contexts of a server.

"Measured" means: on an H200 (132 SMs), driver 580. The functions return None, never a guess, for
what was not measured or documented.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_MEMORY = re.compile(r"(\d{1,15}) ?([KMGT])(?:iB)?", re.IGNORECASE | re.ASCII)
_MEMORY_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def parse_memory(text: str) -> int | None:
    """Return the bytes of a text like "10G"; None if malformed, or ambiguous like "10GB"."""
    match = _MEMORY.fullmatch(text.strip())
    return None if match is None else int(match[1]) << _MEMORY_SHIFTS[match[2].upper()]


_DEVICE_LIMIT = re.compile(
    r"(?P<device>\d{1,4}|GPU-[0-9a-zA-Z-]+)\s*=\s*(?P<amount>\d{1,12})(?P<giga>[gG]?)", re.ASCII
)


def parse_pinned_memory_limit(text: str | None) -> dict[str, int]:
    """Parse CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, "0=1G,GPU-…=512MB": device as written -> bytes.

    Measured: "G" (or "g") means 2^30; any other text after the number, or none, means 2^20 ("1T"
    and "1.5G" are one MiB). A part that begins with a blank, or has no number above 0, has no
    effect. If a device is named twice, the lower limit counts.
    """
    limits: dict[str, int] = {}
    for part in (text or "").split(","):
        found = _DEVICE_LIMIT.match(part)
        limit = int(found["amount"]) << (30 if found["giga"] else 20) if found else 0
        if found and limit:
            device = found["device"]
            limits[device] = min(limit, limits.get(device, limit))
    return limits


@dataclass(frozen=True, slots=True)
class DaemonGpus:
    """The GPUs that a daemon serves, by UUID."""

    uuids: frozenset[str] = frozenset()
    complete: bool = False  # Whether `uuids` is the whole set.
    order: tuple[str, ...] | None = None  # The GPUs in the driver's order, None if unknown.


_ORDINAL = re.compile(r"\d{1,4}", re.ASCII)
_UUID = re.compile(r"GPU-[0-9a-zA-Z-]*", re.ASCII)
_NO_DEVICE = re.compile(r"-\d+|[A-FH-LN-Za-z]\w*", re.ASCII)
"""Entries that name no device: negative numbers, and words that do not begin like a UUID."""


@lru_cache(maxsize=1024)
def visible_gpus(text: str | None, gpus: DaemonGpus) -> tuple[str, ...] | None:
    """Return the GPUs that a client with this CUDA_VISIBLE_DEVICES sees, in its order.

    Measured with two GPUs of one model: a client counts the daemon's GPUs in the driver's order,
    whatever the daemon's own CUDA_VISIBLE_DEVICES is, and picks from these. The first entry that
    names no device ends the list (CUDA's documentation). None if unknown, as for entries of MIG,
    of mixed kinds, or that appear twice.
    """
    if text is None:
        return gpus.order
    found: list[str] = []
    kinds = set()
    for entry in text.split(",") if text else ():
        if _NO_DEVICE.fullmatch(entry):
            break
        if _ORDINAL.fullmatch(entry) and gpus.order is not None:
            kinds.add("ordinal")
            named = gpus.order[int(entry) : int(entry) + 1]
        elif _UUID.fullmatch(entry) and gpus.complete:
            kinds.add("uuid")
            named = tuple(uuid for uuid in gpus.uuids if uuid.startswith(entry))
        else:
            return None
        if not named:
            break
        if len(named) > 1 or named[0] in found or len(kinds) > 1:
            return None
        found += named
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The effect of a client's CUDA_MPS_PINNED_DEVICE_MEM_LIMIT."""

    bytes_by_uuid: Mapping[str, int] | None = field(default_factory=dict)
    """None if the GPU of an entry is unknown."""
    ignored: bool = False
    """Whether CUDA silently ignores all entries, because the GPU of an entry is missing."""


def client_memory_limits(
    text: str | None, visible: tuple[str, ...] | None, used: Collection[str], gpus: DaemonGpus
) -> MemoryLimits:
    """Return the limits that a client set for itself, by GPU.

    Measured: an ordinal counts in the list of the GPUs that the client sees. A UUID, which may be
    cut short, is case-sensitive. If a GPU has two limits, the lower limit holds. An entry for a
    missing GPU voids all entries. A GPU that is used and not visible proves that the environment
    has changed since it was read.
    """
    if not text:
        return MemoryLimits()
    if visible is not None and not set(used) <= set(visible):
        visible = None
    seen = {*used, *(visible or ())}
    found: dict[str, int] = {}
    certain = True
    for device, limit in parse_pinned_memory_limit(text).items():
        if device.startswith("GPU-"):
            named = [uuid for uuid in gpus.uuids | set(used) if uuid.startswith(device)]
            missing = not named and gpus.complete
        else:
            named = list(visible or ())[int(device) : int(device) + 1]
            missing = not named and visible is not None
        if missing:
            return MemoryLimits(ignored=True)
        # The effect of a UUID that is invisible to the client was not measured.
        if len(named) != 1 or named[0] not in seen:
            certain = False
            continue
        found[named[0]] = min(limit, found.get(named[0], limit))
    return MemoryLimits(found if certain else None)


def parse_client_priority(text: str | None) -> int | None:
    """Parse CUDA_MPS_CLIENT_PRIORITY: 0 normal, 1 below normal; None if unset or invalid."""
    return {"0": 0, "1": 1}.get((text or "").strip())


def context_limit(
    compute_capability: tuple[int, int] | None, driver_version: str | None
) -> int | None:
    """Return the maximum client contexts per server and GPU; None if unknown.

    16 before Volta; 48 since (measured, also on driver 580); 60 since driver 590 (CUDA 13.1), all
    with the default CUDA_DEVICE_MAX_CONNECTIONS of 2: a higher value lowers the limits. They are
    smaller on MIG, and in confidential computing.
    """
    if compute_capability is None:
        return None
    if compute_capability < (7, 0):
        return 16
    major = re.match(r"\d+", driver_version or "")
    return None if major is None else 60 if int(major[0]) >= 590 else 48


@dataclass(frozen=True, slots=True)
class ThreadPercentage:
    """The effect of a client's CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""

    ratio: float = 1.0  # Fraction (above 0) of the SMs; 1 if unlimited.
    ignored: bool = False  # The variable is set, and CUDA silently ignores its value.


_HEXADECIMAL = r"0[xX][0-9a-fA-F]{1,16}"
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"\s*([+-]?(?:(?P<hex>{_HEXADECIMAL})|{_DECIMAL}))", re.ASCII)


def parse_active_thread_percentage(text: str | None) -> ThreadPercentage:
    """Parse CUDA_MPS_ACTIVE_THREAD_PERCENTAGE as CUDA does.

    Measured: CUDA reads the number at the start of the text, as C's strtod does ("50%", "50,5" and
    "0x32" are 50). A number above 0 and below 100 is a limit, however small. For 100, other numbers
    and other text, all SMs are allowed without a message. The lower of the client's limit and
    the server's limit at the time of the connection holds (server 50 %, client 90 %: 50 %).
    """
    found = _NUMBER.match("100" if text is None else text)
    if found is None:
        return ThreadPercentage(ignored=True)
    percentage = float.fromhex(found[1]) if found["hex"] else float(found[1])
    if not 0.0 < percentage <= 100.0:
        return ThreadPercentage(ignored=True)
    return ThreadPercentage(percentage / 100.0)


def sms_of_ratio(
    ratio: float, sm_count: int, compute_capability: tuple[int, int] | None
) -> int | None:
    """Return the SMs that a ratio (0-1) leaves a client on a GPU with sm_count SMs.

    Measured on Hopper (compute capability 9.0) with 132 SMs, at 70 percentages: rounded down to an
    even number, at least 8. A ratio of 1 means all SMs of any GPU. None for other architectures,
    whose rounding was not measured.
    """
    if ratio >= 1.0:
        return sm_count
    if compute_capability != (9, 0):
        return None
    # Without the addend, a product that is an integer in decimals may be less in binary.
    return min(max(math.floor(ratio * sm_count / 2 + 1e-9) * 2, 8), sm_count)

"""What MPS's limits come to: percentages in SMs, memory in bytes, priorities, how many clients fit.

"Measured" means: on an H200 (132 SMs), driver 580. Where nothing was measured or documented the
answer is None, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_HOPPER = (9, 0)
_HOPPER_SM_STEP = 2
_HOPPER_SM_FLOOR = 8

_VOLTA = (7, 0)
_CONTEXTS_BEFORE_VOLTA = 16
_CONTEXTS_SINCE_VOLTA = 48
_CONTEXTS_SINCE_R590 = 60

_MEMORY = re.compile(r"(\d{1,15}) ?([KMGT])(?:iB)?", re.IGNORECASE | re.ASCII)
_MEMORY_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def parse_memory(text: str) -> int | None:
    """Read "10G" or "512M", as the control tool prints limits, into bytes. None: no such text.

    NVIDIA's manual knows G and M. Whether "10GB" would be 10^10 or 10 x 2^30 is not said.
    """
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


@dataclass(frozen=True, slots=True)
class DaemonGpus:
    """The GPUs that a daemon serves, by UUID."""

    uuids: frozenset[str] = frozenset()
    complete: bool = False
    """There are no others."""
    order: tuple[str, ...] | None = None
    """As the driver numbers them; None: not known."""


_ORDINAL = re.compile(r"\d{1,4}", re.ASCII)
_UUID = re.compile(r"GPU-[0-9a-zA-Z-]*", re.ASCII)
_NO_DEVICE = re.compile(r"-\d+|[A-FH-LN-Za-z]\w*", re.ASCII)
"""Entries that surely name no device: negative numbers, and words that begin no UUID."""


def visible_gpus(text: str | None, gpus: DaemonGpus) -> tuple[str, ...] | None:
    """Return the GPUs that a client with this CUDA_VISIBLE_DEVICES sees, in its order.

    Measured with two GPUs of one model: a client counts the daemon's GPUs in the driver's order,
    whatever the daemon's own CUDA_VISIBLE_DEVICES says, and picks from these. The first entry that
    names no device ends the list (CUDA's documentation). None: it is not known, as for entries
    of MIG, of mixed kinds, or that appear twice.
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
    """What a client's CUDA_MPS_PINNED_DEVICE_MEM_LIMIT does."""

    bytes_by_uuid: Mapping[str, int] | None = field(default_factory=dict)
    """None: it is not known which GPU an entry is for."""
    ignored: bool = False
    """One entry is for a GPU that the client does not see: CUDA silently ignores all of them."""


def client_memory_limits(
    text: str | None, visible: tuple[str, ...] | None, used: Collection[str], gpus: DaemonGpus
) -> MemoryLimits:
    """Assign the limits that a client set for itself to the GPUs that they hold for.

    Measured: an ordinal counts in the list of the GPUs that the client sees; a UUID, of which the
    beginning is enough, is taken as written, and the case of the letters counts. Of two limits for
    one GPU the lower holds. One entry for a GPU that is not there voids all.

    Args:
        text: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT.
        visible: The GPUs that the client sees, in its order; None: not known.
        used: The GPUs on which it has a context. One that it should not see proves that its
            environment has changed since it was read.
        gpus: Those of its daemon.
    """
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
        # A UUID of a GPU that the daemon serves and this client does not see was not measured.
        if len(named) != 1 or named[0] not in seen:
            certain = False
            continue
        found[named[0]] = min(limit, found.get(named[0], limit))
    return MemoryLimits(found if certain else None)


def parse_client_priority(text: str | None) -> int | None:
    """Read CUDA_MPS_CLIENT_PRIORITY: 0 normal, 1 below normal; None: unset, or no such value."""
    return {"0": 0, "1": 1}.get((text or "").strip())


def context_limit(
    compute_capability: tuple[int, int] | None, driver_version: str | None
) -> int | None:
    """Return how many client contexts one server takes on one GPU.

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


# ---------------------------------------------------------------------------------- percentages


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

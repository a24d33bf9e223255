"""How much is kept of one daemon: whoever writes its logs can name any number of things."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """How many of each are followed; of the others only some totals are kept."""

    servers: int = 64
    clients: int = 2048
    """Of one server. The hardware serves 48 or 60 contexts a GPU."""
    queued: int = 1024
    """More than a GPU host has ever had; the oldest are dropped beyond it."""
    users: int = 512
    """Every user may write into the daemon's log pipe, so a log can name any number of them."""
    gpus: int = 512


FULL = Quota()

OF_ORDINARY_USER = Quota(servers=2, clients=256, queued=256, users=8, gpus=64)
"""Of a daemon that is an ordinary user's and not configured. It serves that user only, with one
server at a time. Its log can be forged: 22 MB of lines cost 141 MB of memory with the full quota,
and 3 MB with this one."""

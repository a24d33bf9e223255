"""The daemon's queue: clients that were told to wait until a server is ready for their user.

A *UID wait* is a place in the queue behind another user's server; waiting for one's own server to
start is not. Nothing is logged when a queued client goes away: its entry stays in the daemon's
queue, and so here, marked as dead once its process is known to be gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_QUEUED = 1024
"""More than a GPU host has ever had; the oldest are forgotten beyond."""


@dataclass(slots=True)
class QueuedClient:
    """A client in the daemon's queue."""

    pid: int
    uid: int
    since: float
    blocked: bool = False
    """A UID wait: another user's server holds the GPU, or did while this client waited."""
    behind_uid: int | None = None
    missing_since: float | None = None
    """Its process was first seen to be gone; true only once the log up to then is read."""
    dead: bool = False


class ClientQueue:
    """Queued clients, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[int, QueuedClient] = {}
        self._unnamed_key = 0

    def __iter__(self) -> Iterator[QueuedClient]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, pid: int, uid: int, at: float) -> tuple[QueuedClient, QueuedClient | None]:
        """Add a client; gives its entry, and the one it took the place of, if any.

        Clients with PID 0 cannot be told apart: each has a place of its own. A PID that is there
        already, for the same user, is the same client; for another user, it has been given to a
        new process, so the older client is dead.
        """
        if pid == 0:
            self._unnamed_key -= 1
            key = self._unnamed_key
        else:
            key = pid
        known = self._entries.get(key)
        if known is not None and known.uid == uid and not known.dead:
            return known, None
        if known is not None:
            del self._entries[key]
        elif len(self._entries) >= MAX_QUEUED:
            del self._entries[next(iter(self._entries))]
        entry = QueuedClient(pid, uid, at)
        self._entries[key] = entry
        return entry, known

    def pop_user(self, uid: int) -> list[QueuedClient]:
        """Remove a user's clients: their server is ready."""
        keys = [key for key, entry in self._entries.items() if entry.uid == uid]
        return [self._entries.pop(key) for key in keys]

    def pop_client(self, pid: int, uid: int | None) -> QueuedClient | None:
        """Remove one client: it is served. Of those with PID 0, the user's oldest."""
        if pid:
            entry = self._entries.get(pid)
            if entry is None or entry.uid != uid:
                return None
            return self._entries.pop(pid)
        for key, entry in self._entries.items():
            if entry.pid == 0 and entry.uid == uid:
                return self._entries.pop(key)
        return None

    def pop_all(self) -> list[QueuedClient]:
        """Remove everybody: the daemon is gone."""
        entries = list(self._entries.values())
        self._entries.clear()
        return entries

    def for_user(self, uid: int) -> list[QueuedClient]:
        """Give a user's clients."""
        return [entry for entry in self._entries.values() if entry.uid == uid]

    def mark_blocked(self, uid: int | None) -> list[QueuedClient]:
        """Put everybody else behind a user's server; gives those for whom that is new."""
        newly_blocked = []
        for entry in self._entries.values():
            if entry.uid != uid:
                if not entry.blocked:
                    entry.blocked = True
                    newly_blocked.append(entry)
                entry.behind_uid = uid
        return newly_blocked

    def has_blocked_clients(self) -> bool:
        """Whether a living client waits behind another user's server."""
        return any(e.blocked and not e.dead for e in self._entries.values())

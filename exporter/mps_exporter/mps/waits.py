"""The daemon's queue: clients that wait until a server for their user is ready.

A *UID wait* is a place in the queue behind another user's server; waiting for one's own server to
start is not. Nothing is logged when a queued client exits: its entry stays in the daemon's queue,
and so here, marked as dead once its process is known to be gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mps_exporter.mps.record import FULL, Moment, Quota


@dataclass(slots=True, eq=False)
class QueuedClient:
    """A client in the daemon's queue."""

    pid: int
    uid: int
    since: float
    blocked: bool = False
    """A UID wait: another user's server holds the GPU, or did while this client waited."""
    behind_uid: int | None = None
    missing_since: float | None = None
    """When its process was first seen to be gone."""
    dead: bool = False
    """Its process is gone, and the logs have been read up to then."""

    def block(self, behind_uid: int | None, when: Moment) -> None:
        """Another user's server holds the GPU."""
        self.behind_uid = behind_uid
        if not self.blocked:
            self.blocked = True
            when.counters.see_user(self.uid)
            when.add_incident("wait_started", at=self.since, uid=self.uid, pids=(self.pid,))

    def serve(self, server_ready_at: float | None, when: Moment) -> bool:
        """The client has a context; its wait ended when the server was ready.

        Returns whether it was a UID wait.
        """
        if not self.blocked or self.dead:
            return False
        waited_until = when.at if server_ready_at is None else server_ready_at
        seconds = max(waited_until - self.since, 0.0)
        when.observe("mps_uid_wait_seconds", seconds, uid=self.uid)
        when.add_incident("wait_served", uid=self.uid, pids=(self.pid,), seconds=seconds)
        return True

    def abandon(self, when: Moment, detail: str = "") -> None:
        """The client is gone, or will never be served."""
        if self.dead or not self.blocked:
            return
        self.dead = True
        when.increment("mps_uid_waits_abandoned_total", uid=self.uid)
        when.add_incident(
            "wait_abandoned",
            uid=self.uid,
            pids=(self.pid,),
            seconds=when.at - self.since,
            detail=detail,
        )


class ClientQueue:
    """Queued clients, oldest first."""

    def __init__(self, quota: Quota = FULL) -> None:
        self._quota = quota
        self._entries: dict[int, QueuedClient] = {}
        self._unnamed_key = 0

    def __iter__(self) -> Iterator[QueuedClient]:
        return iter(self._entries.values())

    def push(self, pid: int, uid: int, when: Moment) -> QueuedClient:
        """Add a client.

        Clients with PID 0 cannot be distinguished: each has an entry of its own. A PID that is
        queued already, for the same user, is the same client; for another user, it belongs to a new
        process, so the older client is dead.
        """
        if pid == 0:
            self._unnamed_key -= 1
        key = pid or self._unnamed_key
        known = self._entries.get(key)
        if known is not None:
            if known.uid == uid and not known.dead:
                return known
            del self._entries[key]
            known.abandon(when)
        elif len(self._entries) >= self._quota.queued:
            del self._entries[next(iter(self._entries))]
        entry = self._entries[key] = QueuedClient(pid, uid, when.at)
        return entry

    def pop_user(self, uid: int) -> list[QueuedClient]:
        """Remove a user's clients: their server is ready, or will never be."""
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

    def abandon_all(self, when: Moment) -> None:
        """The daemon is gone, and its queue with it."""
        for entry in self:
            entry.abandon(when)
        self._entries.clear()

    def block_others(self, uid: int, when: Moment) -> None:
        """A server of this user starts: the clients of all others wait behind it."""
        for entry in self:
            if entry.uid != uid:
                entry.block(uid, when)

    def has_blocked_clients(self) -> bool:
        """Whether a living client waits behind another user's server."""
        return any(entry.blocked and not entry.dead for entry in self)

    def count_overtake(self, uid: int, when: Moment) -> None:
        """A client of the running user is admitted; an overtake if another user's client waits."""
        if self.has_blocked_clients():
            when.increment("mps_uid_overtakes_total", uid=uid)

"""How the users of this host are called."""

from __future__ import annotations

from mps_exporter import humanize
from mps_exporter.snapshot import Client, ControlDaemon, Server, Snapshot

MAX_REMEMBERED_USERS = 1000


def user_names(snapshot: Snapshot) -> dict[int, str]:
    """The users that anything on this host named."""
    holders: list[ControlDaemon | Server | Client] = []
    for daemon in snapshot.daemons:
        holders.append(daemon)
        for server in daemon.servers:
            holders.extend((server, *server.clients))
    named = {one.uid: one.user for one in holders if one.uid is not None and one.user}
    return {**snapshot.user_names, **named}


class UserNames:
    """The users of this host; those who have left are remembered."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._names: dict[int, str] = {}
        if snapshot is not None:
            self.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Remember the names of those who are here."""
        for uid, user in user_names(snapshot).items():
            self._names.pop(uid, None)
            self._names[uid] = user
        while len(self._names) > MAX_REMEMBERED_USERS:
            del self._names[next(iter(self._names))]

    def __call__(self, uid: int | None) -> str:
        """What to call a user."""
        return humanize.user_name(uid, None if uid is None else self._names.get(uid))

"""The state of a daemon as its logs would leave it, for tests that need no lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.state import DaemonState
from mps_exporter.snapshot import Wait


def logged_client(
    pid: int, *gpus: str, uid: int = 1001, at: float = 3.0, **more: Any
) -> TrackedClient:
    """A client with a context on each of these GPUs."""
    return TrackedClient(pid, uid, at, contexts=dict(enumerate(gpus)), **more)


@dataclass(frozen=True)
class LoggedServer:
    """A server that is ready."""

    pid: int = 20
    clients: tuple[TrackedClient, ...] = ()
    uid: int = 1001
    started_at: float = 2.0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    unfollowed: int = 0


def logged(
    *servers: LoggedServer,
    devices: Mapping[int, str] | None = None,
    waits: Iterable[Wait] = (),
    read_until: float = 9.0,
    **daemon: Any,
) -> DaemonState:
    """The state of a daemon whose two logs can be read."""
    state = DaemonState()
    state.readable["control"] = state.readable["server"] = True
    state.advance_to(read_until)
    for ordinal, uuid in (devices or {}).items():
        state.gpus.add_ordinal(ordinal, uuid, 0.0)
    for wait in waits:
        entry = state.queue.push(wait.pid, wait.uid, state.moment(wait.since))
        entry.block(wait.behind_uid, state.moment(wait.since))
    for name, value in daemon.items():
        setattr(state.daemon, name, value)
    for one in servers:
        server = state.servers.adopt(one.pid, one.started_at)
        known = {"uid": one.uid, "ready_at": 2.5, "start_unknown": False, "has_all_lines": True}
        for name, value in (known | dict(one.attributes)).items():
            setattr(server, name, value)
        for connected in one.clients:
            server.clients._add(connected)
        server.clients.unfollowed = one.unfollowed
    return state

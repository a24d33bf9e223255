"""Bounds of each client's use of the SMs.

Under MPS no tool measures the use of one client: the driver's samples contain one process for all
clients of a server. But the use of the whole GPU is measured (GPM), and the limits of the clients
bound each share: a client uses at most its limit, and at least what the others' limits leave over.
A process without a known limit may use all SMs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mps_exporter.snapshot import ClientKey, ControlDaemon, Gpu, SmUse, Snapshot

SAME_SAMPLE_SECONDS = 0.01  # Maximum difference of the computed times of one sample.


@dataclass(frozen=True, slots=True)
class _Seen:
    """A GPU in one collection."""

    sampled_at: float
    active_seconds: float  # Integral of the active share of the SMs.
    unobserved_seconds: float
    members: object
    """Processes with a context, without MPS servers; a unique object if not all are known."""
    changes: tuple[object, ...]  # Differs from an earlier value if a client has connected.


class SmUseCounter:
    """Adds up the bounds from collection to collection."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[_Seen]] = {}  # GPU UUID -> the last three samples.
        self._use: dict[ClientKey, dict[str, SmUse]] = {}

    def count(self, snapshot: Snapshot, at: float) -> Mapping[ClientKey, Mapping[str, SmUse]]:
        """Count the time up to `at`, when the GPUs were read; return the bounds of the clients."""
        servers = [(daemon, server) for daemon in snapshot.daemons for server in daemon.servers]
        clients = {
            (daemon.pipe_directory, server.pid, client.pid): client
            for daemon, server in servers
            for client in server.clients
        }
        changes = tuple(map(_change, snapshot.daemons))
        totals: dict[ClientKey, dict[str, SmUse]] = {}
        for gpu in snapshot.gpus:
            sms, found = gpu.observation.sm_count or 0, gpu.observation.processes
            on_gpu = [key for key, one in clients.items() if gpu.uuid in one.contexts]
            limits = {key[2]: clients[key].sm_limit.get(gpu.uuid, sms) for key in on_gpu}
            members: object = object()
            if found is not None and not gpu.observation.unread_lists:
                others = {one.pid for one in found} - {server.pid for _, server in servers}
                limits = dict.fromkeys(others, sms) | limits
                members = frozenset(limits)
            now = _sample(gpu, at, members, changes)
            if now is None:
                self._seen.pop(gpu.uuid, None)
                continue
            seen = self._seen.setdefault(gpu.uuid, deque(maxlen=3))
            is_new = not seen or now.sampled_at - seen[-1].sampled_at > SAME_SAMPLE_SECONDS
            if is_new:
                seen.append(now)
            elif now.members != seen[-1].members:
                seen[-1] = replace(seen[-1], members=object())
            for key in on_gpu:
                use = self._use.get(key, {}).get(gpu.uuid, SmUse())
                if is_new and len(seen) > 1:
                    use = _added(use, sms, key[2], limits, seen)
                totals.setdefault(key, {})[gpu.uuid] = use
        self._use = totals
        return totals


def _change(daemon: ControlDaemon) -> object:
    """Return a value that changes when a client connects; unique without logs."""
    if daemon.counters is None or not daemon.follows("server"):
        return object()
    counts = daemon.counters.get("mps_client_connections_total", {})
    return tuple(sorted(counts.items(), key=str))


def _sample(gpu: Gpu, at: float, members: object, changes: tuple[object, ...]) -> _Seen | None:
    """Return the GPU's values for the bounds; None without SM activity."""
    seen, active = gpu.observation, gpu.reading("sm_active_time")
    if active is None or seen.sm_count is None or seen.activity_age_seconds is None:
        return None
    unobserved = gpu.reading("unobserved_time", counter="active") or 0.0
    return _Seen(at - seen.activity_age_seconds, active, unobserved, members, changes)


def _added(
    use: SmUse, sms: int, pid: int, limits: Mapping[int, int], seen: Sequence[_Seen]
) -> SmUse:
    """Add the time between the last two samples; `limits` are the maximum SMs by process."""
    before, now = seen[-2], seen[-1]
    seconds = now.sampled_at - before.sampled_at
    unobserved = max(0.0, now.unobserved_seconds - before.unobserved_seconds)
    active = max(0.0, now.active_seconds - before.active_seconds) * sms
    high = min(active + unobserved * sms, max(0.0, limits[pid] * seconds))
    use = replace(use, high=use.high + high, sampled_at=now.sampled_at)
    seconds -= unobserved
    # A sample is up to a second older than its collection: the same processes must have been
    # on the GPU in the collection before, too.
    same = len({(one.members, one.changes) for one in seen}) == 1
    if len(seen) < 3 or not same or seconds <= 0:
        return use
    others = sum(limits.values()) - limits[pid]
    alone = len(limits) == 1
    return replace(
        use,
        low=use.low + min(high, max(0.0, active - others * seconds)),
        alone_seconds=use.alone_seconds + alone * seconds,
        alone_sm_seconds=use.alone_sm_seconds + alone * active,
    )

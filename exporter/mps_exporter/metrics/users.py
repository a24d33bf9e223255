"""Metrics of users whose clients wait for another user's server."""

from __future__ import annotations

from collections.abc import Sequence

from mps_exporter.metrics.spec import PROC, Page, Rows, Scope, Section, daemon_rows
from mps_exporter.mps.log_metrics import CONTROL_LOG
from mps_exporter.snapshot import Wait


def _user_rows(page: Page) -> Rows[Sequence[Wait]]:
    """Return the queued clients of each user.

    A user who has waited before has 0, so that a graph falls to 0 instead of ending.
    """
    for daemon in page.snapshot.daemons:
        uids: set[int | None] = {wait.uid for wait in daemon.waits}
        known = (daemon.counters or {}).get("mps_uid_wait_seconds", {})
        uids |= {uid for (uid,) in known if not isinstance(uid, str)}
        for uid in sorted(uids, key=lambda uid: -1 if uid is None else uid):
            queued = [wait for wait in daemon.waits if wait.uid == uid]
            yield (daemon.pipe_directory, uid), queued


SECTION = Section("Waits caused by UID serialisation")
USER = Scope(SECTION, "daemon uid", _user_rows)
DAEMON = Scope(SECTION, "daemon", daemon_rows)

USER.number("mps_uid_waiting_clients", CONTROL_LOG, len).means(
    "Clients now queued behind another user's server, and those that a ghost does not serve."
)
USER.number(
    "mps_uid_waiting_since_timestamp_seconds",
    CONTROL_LOG,
    lambda waits: min((wait.since for wait in waits), default=None),
).means("When the user's oldest queued client began to wait, as a Unix timestamp.")
USER.number(
    "mps_uid_waiting_dead_clients",
    f"{CONTROL_LOG}, {PROC}",
    lambda waits: sum(wait.dead for wait in waits),
).means("Queued clients whose process is gone: the daemon hangs when their turn comes.")
SECTION.counted("mps_uid_wait", "mps_uid_overtake", "mps_uid_handover")
DAEMON.number(
    "mps_uid_handover_backoff_seconds", CONTROL_LOG, lambda d: d.handover_backoff_seconds
).means("The daemon's current interval between attempts to stop the running user's server.")
SECTION.counted("mps_uid_")

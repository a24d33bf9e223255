"""Follows the logs of one daemon: merges them in order and applies them to its ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.ledger import Ledger
from mps_exporter.mps.log_merger import LogEntry, LogMerger
from mps_exporter.mps.tracking_quota import FULL, Quota
from mps_exporter.observations import LogsObservation

RECONCILE_WAIT_SECONDS = 5.0
"""How long a reply of the control tool waits until the logs are read up to its time."""

SILENCE_SECONDS = 0.25
"""A daemon goes on with what it began within 0.1 s (driver 580), or it is stuck."""

MAX_FOREIGN_SERVERS = 64


class DaemonTracker:
    """The logs of one daemon."""

    def __init__(self, pipe_directory: str, quota: Quota = FULL) -> None:
        self.pipe_directory = pipe_directory
        self.ledger = Ledger(pipe_directory, quota)
        self._merger = LogMerger(pipe_directory)
        self._pending_reconcile: (
            tuple[float, Collection[int] | None, tuple[ServerReply, ...]] | None
        ) = None
        self.foreign_pids: frozenset[int] = frozenset()
        """Other daemons that write to the same logs, and their servers, as these number them."""
        self._foreign_servers: dict[int, None] = {}

    def add_logs(self, observation: LogsObservation) -> None:
        """Add what this daemon's logs gained; the rest of the observation is skipped.

        A log that is readable and brought no bytes had gained nothing when it was looked at.
        """
        merger, ledger = self._merger, self.ledger
        own_directory = self.pipe_directory
        chunks = [chunk for chunk in observation.chunks if chunk.pipe_directory == own_directory]
        busy = {chunk.log for chunk in chunks if chunk.log == "control"}
        busy_servers = {chunk.server_name for chunk in chunks if chunk.log == "server"}
        for state in observation.states:
            if state.pipe_directory == own_directory:
                merger.set_readable(state.log, state.readable)
                ledger.set_readable(state.log, state.readable)
                if state.readable and state.log not in busy:
                    merger.mark_idle(state.log, observation.at, busy_servers)
        for chunk in chunks:
            if chunk.history:
                ledger.count_from(chunk.at)
            elif chunk.log == "server" and (chunk.restarted or chunk.lost_bytes):
                ledger.note_lost_lines(chunk.at)
            merger.add_chunk(chunk)
        self.advance(observation.at)

    def advance(self, now: float) -> None:
        """Apply the lines whose place in the order is certain by now."""
        ledger = self.ledger
        for entry in self._merger.pop_ready(now):
            if self._pending_reconcile is not None and entry.at > self._pending_reconcile[0]:
                self._apply_reconcile_now()  # in its place among the lines
            if not self._is_foreign(entry):
                ledger.apply(entry)
        complete_until = self._merger.complete_until
        if complete_until is not None:
            ledger.advance_to(complete_until)
        self._apply_pending_reconcile(now)

    @property
    def silent_since(self) -> float | None:
        """Since when the daemon seems stuck, by its logs; None: it does not, or it is too early.

        It is no proof: only a query of the daemon is.
        """
        since, complete_until = self.ledger.silent_since, self._merger.complete_until
        if since is None or complete_until is None or complete_until < since + SILENCE_SECONDS:
            return None
        return since

    def reconcile(
        self,
        now: float,
        at: float,
        listed: Collection[int] | None,
        replies: Iterable[ServerReply],
    ) -> None:
        """Apply the control tool's replies, as soon as the logs have been read up to then.

        A server that the tool lists before the log line of its start is applied would be taken for
        an older one; so the reply waits. See Ledger.reconcile.

        Args:
            now: Unix time. A recording may contain its first reply before its time.
            at: When the daemon was queried.
            listed: The servers that the daemon named; None: it did not say.
            replies: What it replied about each of its servers.
        """
        self._pending_reconcile = at, listed, tuple(replies)
        self._apply_pending_reconcile(now)

    def _apply_pending_reconcile(self, now: float) -> None:
        if self._pending_reconcile is None:
            return
        at = self._pending_reconcile[0]
        complete_until = self._merger.complete_until
        known = complete_until is not None and complete_until >= at
        no_readable_log = now >= at and not self._merger.any_readable
        if known or no_readable_log or now - at > RECONCILE_WAIT_SECONDS:
            self._apply_reconcile_now()

    def _apply_reconcile_now(self) -> None:
        if self._pending_reconcile is not None:
            at, listed, replies = self._pending_reconcile
            self._pending_reconcile = None
            self.ledger.reconcile(at, listed, replies)

    def _is_foreign(self, entry: LogEntry) -> bool:
        """Whether another daemon that shares the log directory wrote this line, or its server."""
        name, values = entry.event
        started = int(values[0]) if name == "server_starting" else None
        if entry.pid in self.foreign_pids:
            if started is not None:
                self._foreign_servers[started] = None
                self.ledger.drop_foreign_server(started)
                while len(self._foreign_servers) > MAX_FOREIGN_SERVERS:
                    del self._foreign_servers[next(iter(self._foreign_servers))]
            return True
        if started is not None:
            self._foreign_servers.pop(started, None)
        return entry.pid in self._foreign_servers

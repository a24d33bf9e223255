"""From what the tails bring to the ledger: one daemon's logs, put in order and entered."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from exporter.mps.control_text import ServerReply
from exporter.mps.ledger import Ledger
from exporter.mps.log_events import ServerStarting
from exporter.mps.sequence import Entry, Sequencer
from exporter.observations import LogsObservation

PATIENCE_SECONDS = 5.0
"""So long an answer of the control tool waits for the logs to come as far as it."""

SILENCE_SECONDS = 0.25
"""A daemon goes on with what it began within 0.1 s (driver 580), or it is stuck."""

MAX_FOREIGN_SERVERS = 64


class Fold:
    """The logs of one daemon, followed."""

    def __init__(self, pipe_directory: str) -> None:
        self.pipe_directory = pipe_directory
        self.ledger = Ledger(pipe_directory)
        self._sequencer = Sequencer(pipe_directory)
        self._said: tuple[float, Collection[int] | None, tuple[ServerReply, ...]] | None = None
        self.foreign: frozenset[int] = frozenset()
        """Other daemons that write to the same logs, and their servers, as these number them."""
        self._foreign_servers: dict[int, None] = {}

    def take(self, observation: LogsObservation) -> None:
        """Take in what this daemon's logs gained; the rest of the observation is skipped.

        A log that is readable and brought no bytes had gained nothing when it was looked at.
        """
        sequencer, ledger = self._sequencer, self.ledger
        mine = self.pipe_directory
        chunks = [chunk for chunk in observation.chunks if chunk.pipe_directory == mine]
        busy = {chunk.log for chunk in chunks}
        for state in observation.states:
            if state.pipe_directory == mine:
                sequencer.readable(state.log, state.readable)
                ledger.readable(state.log, state.readable)
                if state.readable and state.log not in busy:
                    sequencer.idle(state.log, observation.at)
        for chunk in chunks:
            if chunk.history:
                ledger.count_from(chunk.at)
            sequencer.feed(chunk)
        self.advance(observation.at)

    def advance(self, now: float) -> None:
        """Enter the lines whose place in the order is certain by now."""
        ledger = self.ledger
        for entry in self._sequencer.release(now):
            if self._said is not None and entry.at > self._said[0]:
                self._enter_what_was_said()  # in its place among the lines
            if not self._is_foreign(entry):
                ledger.apply(entry)
        settled = self._sequencer.settled_until
        if settled is not None:
            ledger.settle(settled)
        self._take_what_was_said(now)

    @property
    def silent_since(self) -> float | None:
        """Since when the daemon seems stuck, by its logs; None: it does not, or it is too early.

        It is no proof: who wants to know must ask the daemon.
        """
        since, settled = self.ledger.silent_since, self._sequencer.settled_until
        if since is None or settled is None or settled < since + SILENCE_SECONDS:
            return None
        return since

    def reconcile(
        self,
        now: float,
        at: float,
        listed: Collection[int] | None,
        replies: Iterable[ServerReply],
    ) -> None:
        """Take in what the control tool said, as soon as the logs have been read up to then.

        A server that the tool names before the log's line of its start has been entered would be
        taken for one from before; so the answer waits. See Ledger.reconcile.

        Args:
            now: Unix time. A recording may give its first answer before its time.
            at: When the tool was asked.
            listed: The servers that the daemon named; None: it did not say.
            replies: What each of its servers said.
        """
        self._said = at, listed, tuple(replies)
        self._take_what_was_said(now)

    def _take_what_was_said(self, now: float) -> None:
        if self._said is None:
            return
        at = self._said[0]
        settled = self._sequencer.settled_until
        known = settled is not None and settled >= at
        in_vain = now >= at and not self._sequencer.followed
        if known or in_vain or now - at > PATIENCE_SECONDS:
            self._enter_what_was_said()

    def _enter_what_was_said(self) -> None:
        if self._said is not None:
            at, listed, replies = self._said
            self._said = None
            self.ledger.reconcile(at, listed, replies)

    def _is_foreign(self, entry: Entry) -> bool:
        """Whether another daemon that shares the log directory wrote this line, or its server."""
        event = entry.event
        if entry.pid in self.foreign:
            if isinstance(event, ServerStarting):
                self._foreign_servers[event.pid] = None
                self.ledger.disown(event.pid)
                while len(self._foreign_servers) > MAX_FOREIGN_SERVERS:
                    del self._foreign_servers[next(iter(self._foreign_servers))]
            return True
        if isinstance(event, ServerStarting):
            self._foreign_servers.pop(event.pid, None)
        return entry.pid in self._foreign_servers

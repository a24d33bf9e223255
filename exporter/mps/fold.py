"""From what the tails bring to the ledger: one daemon's logs, put in order and entered."""

from __future__ import annotations

from exporter.mps.ledger import Ledger
from exporter.mps.sequence import Sequencer
from exporter.observations import LogsObservation


class Fold:
    """The logs of one daemon, followed."""

    def __init__(self, pipe_directory: str) -> None:
        self.pipe_directory = pipe_directory
        self.ledger = Ledger(pipe_directory)
        self._sequencer = Sequencer(pipe_directory)

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
            ledger.apply(entry)
        settled = self._sequencer.settled_until
        if settled is not None:
            ledger.settle(settled)

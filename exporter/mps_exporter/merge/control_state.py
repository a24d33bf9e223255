"""Whether a daemon answers, and if not why: mps_control_up and mps_control_state."""

from __future__ import annotations

from mps_exporter.merge.daemon_inputs import DaemonInputs
from mps_exporter.mps.control_protocol import CANNOT_SEND
from mps_exporter.observations import ControlObservation, Outcome
from mps_exporter.snapshot import ControlState


def control_state(inputs: DaemonInputs) -> ControlState | None:
    """Why a daemon answers or not; None when no query was sent and /proc does not show it."""
    probe = inputs.probe
    alive = _is_running(inputs)
    unasked: ControlState | None = "absent" if inputs.facts.lock_tested and not alive else None
    if probe is None:
        return unasked
    if probe.outcome is Outcome.OK:
        return "answering"
    if inputs.state.daemon.quit_requested_at is not None and alive:
        # While it drains, the tool is refused, or gets an empty answer, or waits (driver 580).
        return "draining"
    if probe.outcome is Outcome.ABSENT:
        if not _tool_ran(probe):
            return unasked
        return "refused" if alive else "absent"
    if inputs.hung:
        return "unresponsive"
    if probe.outcome in (Outcome.SKIPPED, Outcome.TIMEOUT):
        return None  # no query was sent, or it has served a client since
    if alive and _may_drain(inputs, probe):
        return None
    return "refused"


def _is_running(inputs: DaemonInputs) -> bool:
    return inputs.facts.process is not None or inputs.facts.lock_holder_pid is not None


def _tool_ran(probe: ControlObservation) -> bool:
    """Whether a query was sent: the tool itself may be missing."""
    return any(exchange.return_code is not None for exchange in probe.exchanges)


def _may_drain(inputs: DaemonInputs, probe: ControlObservation) -> bool:
    """Whether this may be a daemon that was asked to quit, which only control.log proves.

    While it drains, the tool says that it cannot send the command, or nothing (driver 580).
    """
    if inputs.log_readable("control"):
        return False
    return all(
        exchange.outcome is Outcome.OK
        or CANNOT_SEND in exchange.stderr + exchange.stdout
        or not (exchange.stderr + exchange.stdout).strip()
        for exchange in probe.exchanges
    )

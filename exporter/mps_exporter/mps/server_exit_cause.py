"""Why a server ended: in order, by a crash, before it was ready, or as a ghost that was killed.

The exit status in control.log proves nothing: it is 0 after SIGKILL, too (driver 580).
"""

from __future__ import annotations

from mps_exporter.mps.servers import TrackedServer


def exit_cause(
    server: TrackedServer,
    status: int | None,
    at: float,
    *,
    had_to_end: bool | None,
    log_lost: bool = False,
) -> tuple[str, str]:
    """Give why a server ended (the label `cause` of mps_server_exits_total), and how that is known.

    Args:
        server: The server.
        status: Its exit status in control.log; None: it cannot be seen.
        at: When it ended.
        had_to_end: Whether the daemon was asked to quit, or another user waited: where the daemon
            does not log that it asks a server to end. None: it does.
        log_lost: Whether lines of server.log were lost in the seconds before.
    """
    seen = "its exit status cannot be seen" if status is None else f"exit status {status}"
    if server.exiting or (server.finishing and not server.occupied):
        return "requested", ""
    if server.ghost:
        return "ghost_ended", seen  # most often killed, as it must be
    if server.failed_to_start:
        return "start_failed", f"{seen}, {server.failure}" if server.failure else seen
    orderly = server.agreed_to_end(at) if had_to_end is None else had_to_end
    if log_lost and orderly and not server.occupied:
        return "requested", ""
    if server.logs_exit:
        seen += ", no orderly end in server.log"
        seen += ", of which lines were lost" if log_lost else ""
        return "crashed", f"{seen}, although it had been asked to end" if orderly else seen
    cause = "crashed" if status or not orderly else "requested"
    return cause, seen if status is None else f"{seen}, judged by control.log alone"

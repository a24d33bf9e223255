"""Which clients are too slow: their connections are closed."""

from __future__ import annotations

REQUEST_TIMEOUT_SECONDS = 10.0
"""Time to send a complete request, from the connection or from its first byte."""

SEND_TIMEOUT_SECONDS = 60.0
"""Time to take an answer."""

SWEEP_INTERVAL_SECONDS = 1.0
"""How often connections of slow clients are searched for."""


def is_too_slow(
    now: float,
    waiting_since: float | None,
    unsent_since: float | None,
    *,
    request_timeout: float,
    send_timeout: float,
) -> bool:
    """Whether the client has taken too long to send a request, or to take an answer.

    Args:
        now: The event loop's time, as all others.
        waiting_since: Since when a request is being received; None: none is.
        unsent_since: Since when an answer, or a part of one, waits to be taken; None: none does.
        request_timeout: Seconds to send a request.
        send_timeout: Seconds to take an answer.
    """
    return (waiting_since is not None and now - waiting_since > request_timeout) or (
        unsent_since is not None and now - unsent_since > send_timeout
    )

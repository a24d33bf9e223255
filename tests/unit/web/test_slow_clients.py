from __future__ import annotations

import pytest

from mps_exporter.web.options import WebOptions
from mps_exporter.web.slow_clients import is_too_slow


@pytest.mark.parametrize(
    ("waiting_since", "unsent_since", "expected"),
    [
        (None, None, False),
        (90.0, None, False),
        (89.9, None, True),
        (None, 40.0, False),
        (None, 39.9, True),
        (95.0, 39.9, True),
        (89.9, 95.0, True),
    ],
)
def test_ten_seconds_to_send_a_request_and_sixty_to_take_an_answer(
    waiting_since: float | None, unsent_since: float | None, *, expected: bool
) -> None:
    options = WebOptions()
    assert expected is is_too_slow(
        100.0,
        waiting_since,
        unsent_since,
        request_timeout=options.request_timeout,
        send_timeout=options.send_timeout,
    )

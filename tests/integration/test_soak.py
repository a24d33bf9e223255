"""The soak notices when the exporter loses an event now and then."""

import pytest

from bench.soak import soak


def test_lost_events_are_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.soak.SETTLE_SECONDS", 8.0)  # what is lost never comes
    assert soak(6.0, 384, drop_one_in=20) == 1
    assert "a counter is not what happened: pipe" in capsys.readouterr().out

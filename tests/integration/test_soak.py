"""The soak notices when the exporter has not counted what happened."""

from collections.abc import Iterable

import pytest

from bench.host import Daemon, FullHost
from bench.soak import soak


def test_lost_events_are_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.soak.SETTLE_SECONDS", 8.0)  # what is lost never comes
    connect = FullHost.connect

    def one_more(self: FullHost, daemon: Daemon, gpus: Iterable[int]) -> list[int]:
        daemon.caused["mps_client_connections_total", str(daemon.user)] += 1
        return connect(self, daemon, gpus)

    monkeypatch.setattr(FullHost, "connect", one_more)
    assert soak(6.0, 384) == 1
    assert "a counter is not what happened: pipe" in capsys.readouterr().out

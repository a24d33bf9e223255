"""The benchmarks that judge: all attacks at once, and the soak with an event that was lost."""

from collections.abc import Iterable

import pytest

from bench.attacks import main
from bench.host import Daemon, FullHost
from bench.soak import soak

MEASURED = """
scrapes before the attacks|scrapes attacked|scrapes of the calm host meanwhile|attacked to calm
failed scrapes|verdict on the node|root's crash is at a webhook
N8 crashes counted in a truncated log|N1 new daemon is found|N3 dead daemon is absent
N4 dead daemon is absent|N5 commands with her text|N6 clients in another's job
N9 ticket about her daemon|N9 pages about her daemons, or without her UID
N10 nested configuration
"""

NOT_JUDGED = {"attacked to calm", "failed scrapes"}
"""How long scrapes take says more of the machine than of the code."""


def test_all_attacks_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--scrapes=3", "--fakes=20"])
    lines = capsys.readouterr().out.splitlines()
    for name in MEASURED.replace("\n", "|").strip("|").split("|"):
        (line,) = (one for one in lines if f"{name}:" in one)
        assert line.startswith("met") or name in NOT_JUDGED, line


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

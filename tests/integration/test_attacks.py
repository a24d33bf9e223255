"""The benchmark with all attacks at once acts each of them, and measures what each would do."""

import pytest

from bench.attacks import main

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

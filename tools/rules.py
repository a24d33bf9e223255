"""Writes the alert and recording rules with links that lead somewhere.

    python3 tools/rules.py FOLDER [--runbooks URL] [--grafana URL]

In prometheus/rules each alert has links to this project's repository and to a Grafana on localhost.
Here they lead to the addresses that are given; where none is given, the alert has no such link.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

RULES = Path(__file__).parents[1] / "prometheus" / "rules"
RUNBOOKS = "https://github.com/mps-exporter/mps-exporter/blob/main/prometheus/runbooks"
GRAFANA = "http://localhost:3000"


def usual_severity(label: str) -> str:
    """Return the severity for daemons that no ordinary user owns, if the label is a template."""
    return label.rpartition("{{ else }}")[2].removesuffix("{{ end }}")


def linked(text: str, *, runbooks: str | None, grafana: str | None) -> str:
    """Return a file of rules with these addresses; a link without an address is removed."""
    for name, shipped, address in (
        ("runbook_url", RUNBOOKS, runbooks),
        ("dashboard_url", GRAFANA, grafana),
    ):
        line = re.compile(rf"^( *{name}: ){re.escape(shipped)}(.*\n)", re.MULTILINE)
        given = None if address is None else rf"\g<1>{address.rstrip('/')}\g<2>"
        text = line.sub(given or "", text)
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--runbooks", metavar="URL", help="where prometheus/runbooks is published")
    parser.add_argument("--grafana", metavar="URL", help="the root of your Grafana")
    chosen = parser.parse_args(arguments)
    for name in ("runbooks", "grafana"):
        address = getattr(chosen, name)
        if address is not None and not re.fullmatch(r"https?://[^\s{}\\]+", address):
            parser.error(f"--{name} {address}: not a URL")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(RULES.glob("*.yml")):
        text = path.read_text("utf-8")
        text = linked(text, runbooks=chosen.runbooks, grafana=chosen.grafana)
        (chosen.folder / path.name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()

"""Write the dashboards: python -m grafana.

With --export FOLDER they are written there as grafana.com wants them.
"""

import argparse
import json
from pathlib import Path

from grafana.board import Board
from grafana.boards import BOARDS
from grafana.style import Json

DASHBOARDS = Path(__file__).parent / "dashboards"
IN_CHART = Path(__file__).parents[1] / "deploy" / "helm" / "mps-exporter" / "files" / "dashboards"
"""Copies: a chart with links would lose them where it is fetched by git."""


def text_of(dashboard: Json) -> str:
    """Return the content of its file."""
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


INPUT = "DS_PROMETHEUS"
OLDEST_GRAFANA = "10.0.0"
PANEL_NAMES = {
    "bargauge": "Bar gauge",
    "stat": "Stat",
    "state-timeline": "State timeline",
    "status-history": "Status history",
    "table": "Table",
    "timeseries": "Time series",
}


def exported(board: Board) -> Json:
    """Return a dashboard as grafana.com and the form for imports require it.

    It asks for the data source, names its requirements, and can be edited.
    """
    dashboard = board.json()
    kinds = sorted({panel.kind for row in board.rows for panel in row.panels})
    needed = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": OLDEST_GRAFANA},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *(
            {"type": "panel", "id": kind, "name": PANEL_NAMES[kind], "version": ""}
            for kind in kinds
        ),
    ]
    chosen = f"${{{INPUT}}}"
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"text": chosen, "value": chosen}
    return {
        "__inputs": [
            {
                "name": INPUT,
                "label": "Prometheus",
                "description": "It scrapes the exporters.",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            }
        ],
        "__requires": needed,
        "id": None,
        **dashboard,
        "editable": True,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m grafana", description=__doc__)
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="write them there for grafana.com and for imports by hand, and nothing else",
    )
    folder = parser.parse_args(arguments).export
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        dashboard = board.json() if folder is None else exported(board)
        for place in (DASHBOARDS, IN_CHART) if folder is None else (folder,):
            (place / f"{board.uid}.json").write_text(text_of(dashboard), "utf-8")


if __name__ == "__main__":
    main()

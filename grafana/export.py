"""Dashboards as grafana.com and the form for imports want them.

They ask for the data source, name what they need, and can be edited at once.
"""

from __future__ import annotations

from grafana.board import Board
from grafana.style import Json

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
    """Return a dashboard with __inputs and __requires."""
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

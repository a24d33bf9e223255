"""Write the dashboards: python -m grafana.

--check only says whether they are current. --export FOLDER writes them as grafana.com wants them.
"""

import argparse
import json
import sys
from pathlib import Path

from grafana.board import Board
from grafana.boards import BOARDS
from grafana.style import Json

DASHBOARDS = Path(__file__).parent / "dashboards"
IN_CHART = Path(__file__).parents[1] / "deploy" / "helm" / "mps-exporter" / "files" / "dashboards"
"""Copies: a chart with links would lose them where it is fetched by git."""


def text_of(board: Board) -> str:
    """Return the file's content."""
    return json.dumps(board.json(), indent=2, ensure_ascii=False) + "\n"


def stale() -> list[Path]:
    """Files that differ from what would be written, are missing, or belong to no dashboard."""
    folders = (DASHBOARDS, IN_CHART)
    wanted = {
        folder / f"{board.uid}.json": text_of(board) for folder in folders for board in BOARDS
    }
    found = {path: path.read_text("utf-8") for folder in folders for path in folder.glob("*.json")}
    return sorted(
        path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)
    )


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


def export(folder: Path) -> None:
    """Write every dashboard with __inputs and __requires."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        text = json.dumps(exported(board), indent=2, ensure_ascii=False) + "\n"
        (folder / f"{board.uid}.json").write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 where a check found something stale."""
    parser = argparse.ArgumentParser(prog="python -m grafana", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is not current"
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="write them there for grafana.com and for imports by hand, and nothing else",
    )
    chosen = parser.parse_args(arguments)
    if chosen.export is not None:
        export(chosen.export)
        return 0
    check = chosen.check
    for path in stale():
        if check:
            print(f"{path.name} is not current; run: python -m grafana", file=sys.stderr)
        elif (board := next((each for each in BOARDS if each.uid == path.stem), None)) is None:
            path.unlink()
            print(f"removed {path.name}")
        else:
            path.write_text(text_of(board), "utf-8")
            print(f"wrote {path.name}")
    return int(check and bool(stale()))


if __name__ == "__main__":
    sys.exit(main())

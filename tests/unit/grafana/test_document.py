from grafana.boards import BOARDS
from tests.unit.grafana.subjects import questions, subjects


def test_every_panel_is_in_the_document_in_its_place() -> None:
    panels = [(board.uid, panel) for board in BOARDS for row in board.rows for panel in row.panels]
    wanted = [(uid, name) for uid, panel in panels for name in panel.tiles or (panel.title,)]
    assert [(dashboard, panel) for dashboard, panel, _ in subjects()] == wanted
    assert len(panels) <= 90, "nobody looks at more"


def test_every_question_is_in_the_document() -> None:
    wanted = [
        (board.uid, row.question.replace("$gpu", "0").replace("$daemon", "/tmp/mps"))
        for board in BOARDS
        for row in board.rows
    ]
    assert questions() == wanted

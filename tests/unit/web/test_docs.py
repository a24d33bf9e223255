from dataclasses import fields
from pathlib import Path
from typing import get_args

from mps_exporter.findings.finding import Action
from mps_exporter.snapshot import CONTROL_STATES, IncidentKind, TimelineKind
from mps_exporter.web import status_api_fields
from mps_exporter.web.status_api import Sample, make_status
from mps_exporter.web.webconfig.config import HEADERS, TLSConfig
from testing import snapshots as hosts

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_field_of_the_api_is_documented() -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    names = {one.name for kind in (Sample, Action) for one in fields(kind)}
    status = make_status(hosts.healthy())
    names.update(status, status.totals, status.exporter)
    names.update(*(words.split() for words in status_api_fields.FIELDS.values()))

    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_word_of_the_api_is_documented() -> None:
    text = (DOCS / "api.md").read_text("utf-8")

    words = (
        *get_args(IncidentKind),
        *get_args(TimelineKind),
        *CONTROL_STATES,
        *get_args(status_api_fields.Severity),
    )
    assert [word for word in words if f"`{word}`" not in text] == []


def test_every_key_of_the_web_configuration_is_documented() -> None:
    text = (DOCS / "web-config.md").read_text("utf-8")

    keys = [*(one.name for one in fields(TLSConfig)), *HEADERS]
    assert [key for key in keys if key not in text] == []

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from mps_exporter.diagnostics.safe_commands import Action
from mps_exporter.snapshot import CONTROL_STATES, IncidentKind, TimelineKind
from mps_exporter.web import status_api
from mps_exporter.web.history import Sample
from mps_exporter.web.webconfig.config import HEADERS, TLSConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(
    "kind",
    [
        status_api.HostStatus,
        status_api.ExporterView,
        status_api.TotalsView,
        status_api.SourceView,
        status_api.SpanView,
        Sample,
        Action,
        status_api.FindingView,
        status_api.GpuView,
        status_api.DaemonView,
        status_api.ServerView,
        status_api.ClientView,
        status_api.WaitView,
        status_api.IncidentView,
    ],
)
def test_every_field_of_the_api_is_documented(kind: Any) -> None:
    text = (DOCS / "api.md").read_text("utf-8")

    assert [one.name for one in fields(kind) if f"`{one.name}`" not in text] == []


def test_every_word_of_the_api_is_documented() -> None:
    text = (DOCS / "api.md").read_text("utf-8")

    words = (
        *get_args(IncidentKind),
        *get_args(TimelineKind),
        *CONTROL_STATES,
        *get_args(status_api.Severity),
    )
    assert [word for word in words if f"`{word}`" not in text] == []


def test_every_key_of_the_web_configuration_is_documented() -> None:
    text = (DOCS / "web-config.md").read_text("utf-8")

    keys = [*(one.name for one in fields(TLSConfig)), *HEADERS]
    assert [key for key in keys if key not in text] == []

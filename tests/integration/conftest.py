"""In which order the files come."""

from __future__ import annotations

from pathlib import Path

import pytest

LONGEST_FIRST = ("test_alerts_e2e", "test_dashboards_queries")
"""Files that take longest: they begin first, whatever the order of the day, so that no worker is
left alone with one at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the rest keeps its random order."""

    def rank(item: pytest.Item) -> int:
        name = Path(str(item.path)).stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=rank)

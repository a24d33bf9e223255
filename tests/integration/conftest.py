"""A host of a test's own, and in which order the files come."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.own_host import OwnHost, own_host

LONGEST_FIRST = (
    "test_no_healthy_client_is_ended",
    "test_hostile_users",
    "test_alerts_promtool",
    "test_alerts_e2e",
)
"""Files that take longest: they begin first, whatever the order of the day, so that no worker is
left alone with one at the end."""


@pytest.fixture
def host() -> Iterator[OwnHost]:
    """Processes, mounts and users that end with the test."""
    with own_host() as made:
        yield made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; the rest keeps its random order."""

    def rank(item: pytest.Item) -> int:
        name = Path(str(item.path)).stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=rank)

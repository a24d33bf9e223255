"""One test for all items of a table: pytest's own work for a test costs more than a small check."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def each(items: Iterable[T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Make a test of one item a test of all these items. A failure names its item."""

    def of_all(test: Callable[[T], None]) -> Callable[[], None]:
        def tested() -> None:
            for item in items:
                try:
                    test(item)
                except Exception as error:
                    error.add_note(f"The item: {item}")
                    raise

        tested.__name__ = test.__name__
        tested.__doc__ = test.__doc__
        return tested

    return of_all

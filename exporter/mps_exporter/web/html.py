"""HTML in which nothing can be forgotten to be escaped: text is escaped, always."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"link", "meta", "rect", "br"})


class Markup(str):
    """HTML that is finished."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]


def join(children: Child) -> Markup:
    """Children, one after another; strings that are not Markup are escaped, None is nothing."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int):
        return Markup(escape(str(children)))
    return Markup("".join(join(child) for child in children))


def h(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """An element. ``class_`` is class, ``aria_label`` is aria-label; None and False: left out."""
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = "viewBox" if name == "viewBox" else name.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    if tag in _VOID:
        return Markup(start if tag != "rect" else f"{start[:-1]}/>")
    return Markup(f"{start}{join(children)}</{tag}>")

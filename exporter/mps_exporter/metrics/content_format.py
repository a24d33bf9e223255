"""The forms in which metrics can be sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Syntax(StrEnum):
    """Which grammar the lines follow."""

    TEXT = "text/plain"
    OPENMETRICS = "application/openmetrics-text"


class Escaping(StrEnum):
    """What becomes of names with characters beyond [a-zA-Z0-9_:].

    No metric here has such a name: the choice is echoed, as the protocol demands. In the body only
    DOTS changes anything: it doubles the underscores of every name.
    """

    ALLOW_UTF8 = "allow-utf-8"
    UNDERSCORES = "underscores"
    DOTS = "dots"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """A syntax in one of its versions."""

    syntax: Syntax = Syntax.TEXT
    version: str = "0.0.4"
    escaping: Escaping = Escaping.UNDERSCORES

    @property
    def knows_escaping(self) -> bool:
        """Versions before 1.0.0 know none, whatever was asked for."""
        return not self.version.startswith("0.")

    @property
    def content_type(self) -> str:
        plain = f"{self.syntax}; version={self.version}; charset=utf-8"
        return f"{plain}; escaping={self.escaping}" if self.knows_escaping else plain


TEXT_0_0_4 = ContentFormat(Syntax.TEXT, "0.0.4")
TEXT_1_0_0 = ContentFormat(Syntax.TEXT, "1.0.0")
OPENMETRICS_1_0_0 = ContentFormat(Syntax.OPENMETRICS, "1.0.0")
OPENMETRICS_0_0_1 = ContentFormat(Syntax.OPENMETRICS, "0.0.1")

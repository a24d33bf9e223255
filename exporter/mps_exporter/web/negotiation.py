"""What a client's Accept headers ask for, and which of the forms we have suits it best.

Nothing that a client sends can fail here: what cannot be understood is passed over, and who asks
for nothing that we have gets the oldest text format, as the protocol wants it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mps_exporter.metrics.content_format import (
    OPENMETRICS_0_0_1,
    OPENMETRICS_1_0_0,
    TEXT_0_0_4,
    TEXT_1_0_0,
    ContentFormat,
    Escaping,
)

OFFERED = (TEXT_0_0_4, TEXT_1_0_0, OPENMETRICS_1_0_0, OPENMETRICS_0_0_1)
"""In our order of preference where a client leaves the choice to us."""

MAX_RANGES = 64
"""Entries of one header that are looked at; an honest client sends five."""

HEADERS_KEPT = 8
"""A scraper always sends the same ones, of 8 KiB at most; so many are not read again."""

_ENTRY = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_PART = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*"?)+')
_QVALUE = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")


@dataclass(frozen=True, slots=True)
class _Range:
    """One entry of an Accept header."""

    name: str
    quality: float
    parameters: Mapping[str, str]

    def specificity(self, offer: ContentFormat) -> int | None:
        """How exactly this entry means the offer; None when it does not."""
        if self.name == "*/*":
            return 0
        if self.name == f"{offer.syntax.partition('/')[0]}/*":
            return 1
        if self.name != offer.syntax:
            return None
        version = self.parameters.get("version")
        if version is None:
            return 2
        return 3 if version == offer.version else None


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


def _entries(header: str) -> Iterator[_Range]:
    for count, match in enumerate(_ENTRY.finditer(header)):
        if count == MAX_RANGES:
            return
        name, *rest = [part.strip() for part in _PART.findall(match[0])] or [""]
        parameters: dict[str, str] = {}
        for part in rest:
            key, equals, value = part.partition("=")
            if equals:
                parameters.setdefault(key.strip().lower(), _unquoted(value.strip()))
        quality = parameters.pop("q", "1")
        if _QVALUE.fullmatch(quality):
            yield _Range(name.lower(), float(quality), parameters)


@lru_cache(maxsize=HEADERS_KEPT)
def choose_format(accept: str | None) -> ContentFormat:
    """The offered format that the Accept header wants most; text 0.0.4 when it wants none."""
    ranges = tuple(_entries(accept or ""))
    best: tuple[tuple[float, int, int], ContentFormat] | None = None
    for offer in OFFERED:
        match: tuple[tuple[int, int], _Range] | None = None
        for position, entry in enumerate(ranges):
            specificity = entry.specificity(offer)
            if specificity is not None and (match is None or (specificity, -position) > match[0]):
                match = (specificity, -position), entry
        if match is None or match[1].quality == 0:
            continue
        rank = (match[1].quality, *match[0])
        if best is None or rank > best[0]:
            escaping = _escaping(match[1]) if offer.knows_escaping else offer.escaping
            best = rank, replace(offer, escaping=escaping)
    return best[1] if best else TEXT_0_0_4


def _escaping(entry: _Range) -> Escaping:
    try:
        return Escaping(entry.parameters.get("escaping", ""))
    except ValueError:
        return Escaping.UNDERSCORES


@lru_cache(maxsize=HEADERS_KEPT)
def accepts_gzip(accept_encoding: str | None) -> bool:
    """Whether the answer may be compressed: gzip is named, not with q=0, and not below identity."""
    qualities = {entry.name: entry.quality for entry in _entries(accept_encoding or "")}
    gzip = qualities.get("gzip", qualities.get("x-gzip", qualities.get("*", 0.0)))
    return gzip > 0 and gzip >= qualities.get("identity", 0.0)

"""Rows of the logs' wording: what a line says, and the method that applies it.

control_log and server_log have the rows, each beside the method that it names. A placeholder of a
wording is a value of the event; the rest is a regular expression without groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

MAX_QUOTED = 120
"""Maximum characters that are kept of a text."""

MESSAGE = "<message>"
"""Constant value of a row that stands for the message itself."""

KNOWN = "known"
"""Event of a known line that changes nothing."""


class Event(NamedTuple):
    """What a line says. Equal lines share an event."""

    name: str
    """The method that applies it, KNOWN, or one of log_parser's."""
    values: tuple[int | float | str, ...] = ()


def _uid(text: str) -> int:
    """Read a user's number; some print those from 2^31 on as negative ones."""
    uid = int(text)
    if not -(2**31) <= uid < 2**32:
        raise ValueError(text)
    return uid % 2**32


def _gpu_uuid(text: str) -> str:
    """Write a GPU's UUID the usual way: GPU-afc3ccca-c336-5689-2ed8-f0e14233036f."""
    digits = text.replace("0x", "").replace("-", "")
    if not text.startswith("0x") or len(digits) != 32:
        return text
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


_VALUES: dict[str, tuple[str, Callable[[str], int | float | str]]] = {
    "pid": (r"\d{1,7}", int),
    "num": (r"\d{1,10}", int),
    "status": (r"-?\d{1,10}", int),
    "uid": (r"-?\d{1,10}", _uid),
    "hex": (r"[0-9a-f]{1,16}", lambda text: int(text, 16)),
    "percent": (r"\d{1,3}(?:\.\d{1,9})?", lambda text: float(text) / 100.0),
    "text": (r".*", lambda text: text.removesuffix(".")[:MAX_QUOTED]),
    "version": (r"[\w.-]{1,32}", str),
    "uuid": (r"[0-9A-Za-z/-]{1,96}", _gpu_uuid),
    "name": (r"(?: \(.{0,96}\))?", lambda text: text[2:-1]),
}
# {PID: 632, Context ID: 1} on 580, {PID: 991, Context: 1} there in one line, {11661, 1} in 2022
_WHO = r"\{(?:PID: )?<pid>, (?:Context(?: ID)?: )?<num>\}"
_PLACEHOLDER = re.compile(r"<(\w+)>")


class _Shape(NamedTuple):
    hint: str
    """Text that must be in the message, in small letters: searching is faster than matching."""
    pattern: re.Pattern[str]
    name: str
    values: tuple[Callable[[str], int | float | str], ...]
    constants: tuple[str, ...]


class Shapes:
    """The rows of one log, compiled, by the first word of a message."""

    def __init__(self, *rows: tuple[str, ...]) -> None:
        """Compile rows of (method or KNOWN, wording, constant values after the others)."""
        self.by_first_word: dict[str, list[_Shape]] = {}
        self.names = {name for name, *_ in rows} - {KNOWN}
        for name, wording, *constants in rows:
            whole = wording.replace("<who>", _WHO)
            kinds = _PLACEHOLDER.findall(whole)
            pattern = _PLACEHOLDER.sub(lambda found: f"({_VALUES[found[1]][0]})", whole)
            shape = _Shape(
                _required_text(whole),
                re.compile(pattern, re.ASCII | re.IGNORECASE),
                name,
                tuple(_VALUES[kind][1] for kind in kinds),
                tuple(constants),
            )
            first = wording.partition(" ")[0].replace("\\", "").lower()
            self.by_first_word.setdefault(first, []).append(shape)

    def event(self, message: str) -> Event | None:
        """Return what a message says; None: no row has its wording."""
        lower, shown = message.lower(), message.removesuffix(".")[:MAX_QUOTED]
        for shape in self.by_first_word.get(lower.partition(" ")[0], ()):
            found = shape.pattern.fullmatch(message) if shape.hint in lower else None
            if found is not None:
                try:
                    values = [
                        convert(text)
                        for convert, text in zip(shape.values, found.groups(), strict=True)
                    ]
                except ValueError:
                    return None  # a number that cannot be what it stands for
                constants = [shown if one == MESSAGE else one for one in shape.constants]
                return Event(shape.name, (*values, *constants))
        return None


def _required_text(wording: str) -> str:
    """Return the longest plain text of a wording."""
    plain = wording
    while (
        inner := re.sub(r"\([^()]*\)[?*]?", "\n", plain.replace(r"\(", "\n").replace(r"\)", "\n"))
    ) != plain:
        plain = inner
    parts = re.split(r"<\w+>|\\.[+*]?|.[?*+]|\.|\[[^]]*\]|\n|[{}]", plain)
    return max(parts, key=len).lower()

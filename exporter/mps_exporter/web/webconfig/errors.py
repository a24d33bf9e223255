"""What is wrong with a configuration file."""

from __future__ import annotations


class WebConfigError(Exception):
    """A file that cannot be used; the message names the file, the key and the reason."""

    def __init__(self, reason: str, *, key: str = "", line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.key = key
        self.line = line
        self.path = ""

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.reason) if part)

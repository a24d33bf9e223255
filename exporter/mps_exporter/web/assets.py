"""The page's own files: read once, served from memory, so that no path leads anywhere else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    content_type: str

    @property
    def fingerprint(self) -> str:
        """Changes with the content: part of the address, so that no browser keeps an old one."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def _load() -> dict[str, Asset]:
    folder = resources.files("mps_exporter.web") / "static"
    return {
        entry.name: Asset(entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


PAGE_ASSETS = _load()


def address(name: str) -> str:
    """Where a page finds one of the files, relative to /."""
    return f"static/{name}?{PAGE_ASSETS[name].fingerprint}"

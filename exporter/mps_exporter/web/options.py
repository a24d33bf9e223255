"""Options of the web server."""

from dataclasses import dataclass, field

from mps_exporter.flags import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Flags, and texts that pages show."""

    settings: Settings = field(default_factory=Settings)
    host: str = ""  # Title of the page: the Kubernetes node or the host's name.
    version: str = ""
    revision: str = ""

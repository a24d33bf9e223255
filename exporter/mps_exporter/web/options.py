"""The settings of a server, and its titles."""

from dataclasses import dataclass, field

from mps_exporter.flags import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """The settings of a server, and its titles."""

    settings: Settings = field(default_factory=Settings)
    host: str = ""  # Title of the page: the Kubernetes node or the host's name.
    version: str = ""
    revision: str = ""

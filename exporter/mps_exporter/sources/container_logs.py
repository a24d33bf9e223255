"""Names of containers, from the folder of links that the kubelet keeps to their logs.

A link is called ``<pod>_<namespace>_<container>-<id>.log``, whatever the container runtime. Only
the folder is listed; no log is opened, and no API is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from mps_exporter.observations import ContainerName

MAX_ENTRIES = 20_000
"""A node has 110 pods by default; links of ended containers stay until their pods are removed."""

_LINK = re.compile(
    r"(?P<pod>[a-z0-9][a-z0-9.-]{0,252})_(?P<namespace>[a-z0-9-]{1,63})_"
    r"(?P<container>[a-z0-9-]{1,63})-(?P<id>[0-9a-f]{64})\.log"
)


class ContainerLogs:
    """The folder of links, listed again when it has changed. May block.

    Args:
        folder: /var/log/containers of the host.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._changed: int | None = None
        self._names: dict[str, tuple[str, str, str]] = {}

    def names(self, container_ids: Iterable[str]) -> tuple[ContainerName, ...]:
        """Name those of the containers ("containerd://<id>") that the kubelet has a link for."""
        self._list()
        if not self._names:
            return ()
        return tuple(
            ContainerName(container_id, *found)
            for container_id in sorted(set(container_ids))
            if (found := self._names.get(container_id.rpartition("/")[2])) is not None
        )

    def _list(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - see processes.py
            if changed == self._changed:
                return
            with os.scandir(self._folder) as entries:
                links = [entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)]
        except OSError:
            self._changed, self._names = None, {}
            return
        self._changed = changed
        self._names = {
            link["id"]: (link["namespace"], link["pod"], link["container"])
            for link in map(_LINK.fullmatch, links)
            if link is not None
        }

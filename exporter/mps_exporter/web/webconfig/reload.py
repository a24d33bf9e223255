"""The configuration that is in force, read anew when its files change."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .config import WebConfig, WebConfigError, parse_web_config
from .tls import make_context, read_files

_log = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with what was made of it."""

    config: WebConfig
    context: ssl.SSLContext | None
    digest: bytes
    """Of all files. Sizes and times would not do: an editor may keep both."""


def load_web_config(path: str, before: Loaded | None = None) -> Loaded:
    """Read the file and everything it names; gives ``before`` when nothing has changed.

    Raises:
        WebConfigError: Something is wrong with it.
    """
    try:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise WebConfigError(f"cannot be read: {error.strerror}") from error
        config = parse_web_config(content, Path(path).parent)
        files = read_files(config.tls) if config.tls.enabled else {}
        digest = _digest(content, *files.values())
        if before is not None and digest == before.digest:
            return before
        context = make_context(config.tls, files) if config.tls.enabled else None
    except WebConfigError as error:
        error.path = path
        raise
    except Exception as error:  # whatever else: a file that nobody foresaw ends no program
        unforeseen = WebConfigError(f"cannot be used: {type(error).__name__}: {error}")
        unforeseen.path = path
        raise unforeseen from error
    return Loaded(config, context, digest)


def _digest(*contents: bytes) -> bytes:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()


class WebConfigWatch:
    """Gives the configuration in force; looks at the files at most once a second."""

    def __init__(self, path: str, loaded: Loaded) -> None:
        self.path = path
        self.error: WebConfigError | None = None
        """Why the file as it is now could not be used; None while it could."""
        self._loaded = loaded
        self._checked_at = time.monotonic()
        self._checking = asyncio.Lock()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="web-config")

    @classmethod
    def start(cls, path: str) -> WebConfigWatch:
        """Load for the first time.

        Raises:
            WebConfigError: The file cannot be used: do not start.
        """
        return cls(path, load_web_config(path))

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted; fixed at the start."""
        return self._loaded.context is not None

    @property
    def current(self) -> WebConfig:
        """The configuration in force, without a look at the file."""
        return self._loaded.config

    async def config(self) -> WebConfig:
        """The configuration for the next request."""
        await self._refresh()
        return self._loaded.config

    async def tls_context(self) -> ssl.SSLContext | None:
        """The context for the next connection; None: plain HTTP."""
        await self._refresh()
        return self._loaded.context

    async def _refresh(self) -> None:
        # While one request has the files looked at, the others get what is in force.
        due = time.monotonic() - self._checked_at >= CHECK_INTERVAL_SECONDS
        if due and not self._checking.locked():
            await self.check_files()

    async def check_files(self) -> None:
        """Look at the files now, after a look that is under way; never fails."""
        async with self._checking:
            if self._closed:
                return
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._check_files)
            self._checked_at = time.monotonic()

    def _check_files(self) -> None:
        try:
            new = load_web_config(self.path, self._loaded)
            if (new.context is None) != (self._loaded.context is None):
                error = WebConfigError(
                    "TLS cannot be switched on or off while the program runs: restart it",
                    key="tls_server_config",
                )
                error.path = self.path
                raise error
        except WebConfigError as error:
            if str(error) != str(self.error):
                _log.error(
                    "the web configuration cannot be used; the one before stays in force",
                    extra={"fields": {"err": error}},
                )
            self.error = error
        else:
            if new is self._loaded and self.error is None:
                return
            self.error = None
            self._loaded = new
            _log.info("the web configuration was reloaded", extra={"fields": {"file": self.path}})

    def close(self) -> None:
        """Let go of the thread."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

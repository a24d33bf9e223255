"""The active configuration, reloaded when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mps_exporter.web.policy import CONFIG_CHECK_INTERVAL_SECONDS, CONFIG_WAIT_TIMEOUT_SECONDS

from .config import TLS_KEY, WebConfig, WebConfigError, parse_web_config
from .tls import make_context, read_file, read_files

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and its SSL context."""

    config: WebConfig
    context: ssl.SSLContext | None
    contents: tuple[bytes, ...]
    """All files, the configuration first. An editor may keep size and time of a changed file."""


def load_web_config(path: str, before: Loaded | None = None) -> Loaded:
    """Load the file and the files that it names. Return ``before`` if their content is the same."""
    try:
        try:
            content = read_file(path)
        except OSError as error:
            raise WebConfigError(f"cannot be read: {error.strerror}") from error
        if before is not None and content == before.contents[0]:
            config = before.config
        else:
            config = parse_web_config(content)
        tls = config.tls_server_config
        files = read_files(tls, Path(path).parent) if tls.enabled else {}
        contents = (content, *files.values())
        if before is not None and contents == before.contents:
            return before
        context = make_context(tls, files) if tls.enabled else None
    except WebConfigError as error:
        error.path = path
        raise
    except Exception as error:  # unforeseen content must not end the program
        reason = f"cannot be used: {type(error).__name__}: {error}"
        raise WebConfigError(reason, path=path) from error
    return Loaded(config, context, contents)


class WebConfigWatch:
    """The active configuration. The files are checked at most once a second."""

    def __init__(self, path: str, loaded: Loaded) -> None:
        self.path = path
        self.error: WebConfigError | None = None
        """Why the present file cannot be used; None if it can."""
        self._loaded = loaded
        self._checked_at = time.monotonic()
        self._checking = asyncio.Lock()
        self._check: asyncio.Task[None] | None = None
        """The last check. A task without a reference could be garbage collected."""
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="web-config")

    @classmethod
    def start(cls, path: str) -> WebConfigWatch:
        return cls(path, load_web_config(path))

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted; fixed at the start."""
        return self._loaded.context is not None

    @property
    def current(self) -> WebConfig:
        """The active configuration. Does not check the file."""
        return self._loaded.config

    async def config(self) -> WebConfig:
        await self._refresh()
        return self._loaded.config

    async def tls_context(self) -> ssl.SSLContext | None:
        """Return the context for the next connection; None for plain HTTP."""
        await self._refresh()
        return self._loaded.context

    async def _refresh(self) -> None:
        # While a request waits for the check, the others get the active configuration. So does that
        # request if the files are on an unreachable file server.
        due = time.monotonic() - self._checked_at >= CONFIG_CHECK_INTERVAL_SECONDS
        if due and not self._checking.locked():
            self._check = asyncio.create_task(self.check_files())
            await asyncio.wait((self._check,), timeout=CONFIG_WAIT_TIMEOUT_SECONDS)

    async def check_files(self) -> None:
        """Check the files now, after a check in progress. Log errors."""
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
                reason = "TLS cannot be switched on or off while the program runs: restart it"
                error = WebConfigError(reason, key=TLS_KEY, path=self.path)
                raise error
        except WebConfigError as error:
            if str(error) != str(self.error):
                _log.error(
                    "the web configuration cannot be used; the previous one stays in force",
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
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

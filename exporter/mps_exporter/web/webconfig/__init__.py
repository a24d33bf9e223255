"""The web configuration file of Prometheus programs (``--web.config.file``), for aiohttp.

TLS, client certificates, basic authentication and response headers, in the format of Prometheus'
exporter-toolkit. The file and the certificates are reloaded when they change. If a changed file is
invalid, the active configuration stays, and the error is logged.
"""

import asyncio
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mps_exporter.limits_without_a_flag import CONFIG_CHECK_INTERVAL_SECONDS

from .config import TLS_KEY, WebConfig, WebConfigError, parse_web_config
from .tls import make_context, read_file, read_pems

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and its SSL context."""

    config: WebConfig
    context: ssl.SSLContext | None
    contents: tuple[bytes, ...]
    """Contents of all files, configuration first: an edit may keep a file's size and time."""


def load_web_config(path: str, before: Loaded | None = None) -> Loaded:
    """Load the file and the files that it names. Return ``before`` if their content is the same."""
    try:
        return _load(path, before)
    except WebConfigError as error:
        error.path = path
        raise
    except Exception as error:  # unforeseen content must not end the program
        reason = f"cannot be used: {type(error).__name__}: {error}"
        raise WebConfigError(reason, path=path) from error


def _load(path: str, before: Loaded | None) -> Loaded:
    try:
        content = read_file(path)
    except OSError as error:
        raise WebConfigError(f"cannot be read: {error.strerror}") from error
    if before is not None and content == before.contents[0]:
        config = before.config
    else:
        config = parse_web_config(content)
    tls = config.tls_server_config
    pems = read_pems(tls, Path(path).parent) if tls.enabled else ()
    contents = (content, *(pem.content for pem in pems))
    if before is not None and contents == before.contents:
        return before
    context = make_context(tls, *pems) if tls.enabled else None
    if before is not None and (context is None) != (before.context is None):
        reason = "TLS cannot be switched on or off while the program runs: restart it"
        raise WebConfigError(reason, key=TLS_KEY)
    return Loaded(config, context, contents)


class WebConfigWatch:
    """The active configuration. A thread checks the files: they may be on a hung file server."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: WebConfigError | None = None  # Why the present file is unusable, else None.
        self.active = load_web_config(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="web-config")

    async def follow(self) -> None:
        """Check the files once a second, until cancelled."""
        while True:
            await asyncio.sleep(CONFIG_CHECK_INTERVAL_SECONDS)
            await self.check_files()

    async def check_files(self) -> None:
        """Load changed files, after a check in progress. Log errors."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._check_files)

    def _check_files(self) -> None:
        try:
            new = load_web_config(self.path, self.active)
        except WebConfigError as error:
            if str(error) != str(self.error):
                _log.error(
                    "the web configuration cannot be used; the previous one stays in force",
                    extra={"fields": {"err": error}},
                )
            self.error = error
        else:
            if new is self.active and self.error is None:
                return
            self.error = None
            self.active = new
            _log.info("the web configuration was reloaded", extra={"fields": {"file": self.path}})

"""The web configuration file of Prometheus programs (``--web.config.file``), for aiohttp.

TLS, client certificates, basic authentication and response headers, in the format of Prometheus'
exporter-toolkit. The file and the certificates are reloaded when they change. If a changed file is
invalid, the active configuration stays, and the error is logged.
"""

from .auth import install
from .config import WebConfigError
from .reload import WebConfigWatch

__all__ = ["WebConfigError", "WebConfigWatch", "install"]

"""The web configuration file of Prometheus programs (``--web.config.file``), for aiohttp.

TLS, client certificates, basic authentication, response headers and a rate limit, in the format
that Prometheus' exporter-toolkit defines. This package stands alone: it needs aiohttp, PyYAML and
bcrypt, and nothing of the program around it::

    watch = WebConfigWatch.start("web.yml")          # raises WebConfigError
    app = web.Application()
    install(app, watch)
    context = await watch.tls_context()              # for the next connection; None: plain HTTP

The file and the certificates are read anew when they change. A file that breaks while the program
runs changes nothing: what was in force stays in force, and the log says so.
"""

from .auth import install
from .config import WebConfig, WebConfigError
from .reload import WebConfigWatch

__all__ = ["WebConfig", "WebConfigError", "WebConfigWatch", "install"]

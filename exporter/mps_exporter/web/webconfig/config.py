"""The configuration file -> a checked :class:`WebConfig`."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .document import Value


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


TLS13_SUITES = frozenset(
    {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
)
"""Always on with TLS 1.3, here as in Go: neither can choose among them."""

TLS12_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
}
"""Go's name -> OpenSSL's: those that Go 1.26 does not call insecure, and the only ones ever on."""

HTTP2_SUITES = frozenset(
    {"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}
)
"""Without one of them Go does not serve HTTP/2, and the program does not start."""

CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}

VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}

CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

CLIENT_AUTH_IMPOSSIBLE = frozenset(
    {"RequestClientCert", "RequireAnyClientCert", "RequireClientCert"}
)
"""They take certificates without verifying them: Python's ssl module cannot, and nobody should."""

HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""The headers that may be set, each with its allowed values; (): any."""

_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_MAX_NANOSECONDS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """``tls_server_config``. Paths are absolute or relative to the working directory."""

    cert: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    client_ca: str = field(default="", repr=False)
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] | None = None
    """None: any. Empty: nobody."""
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether anything here asks for TLS."""
        return bool(
            self.cert
            or self.key
            or self.client_ca
            or self.cert_file
            or self.key_file
            or self.client_ca_file
            or self.client_auth_type
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The files it names."""
        return tuple(path for path in (self.cert_file, self.key_file, self.client_ca_file) if path)


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file."""

    tls: TLSConfig = TLSConfig()
    http2: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> bcrypt hash."""
    rate_interval_seconds: float = 0.0
    """Time between two requests; 0: no limit."""
    rate_burst: int = 0


def parse_web_config(content: bytes, directory: Path) -> WebConfig:
    """Read the file's content; relative paths in it are relative to ``directory``.

    Raises:
        WebConfigError: Something in it is wrong, or cannot be done by Python.
    """
    from .document import (
        read_document,
    )  # and YAML: most hosts have no such file, and it costs memory

    top = read_document(content).fields(
        ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
    )
    http = top["http_server_config"].fields(("http2", "headers"))
    interval, burst = _rate(top["rate_limit"])
    http2 = http["http2"].flag(default=True)
    return WebConfig(
        tls=_tls(top["tls_server_config"], directory, http2=http2),
        http2=http2,
        headers=dict(_response_header(name, value) for name, value in http["headers"].members()),
        users=dict(_user(name, value) for name, value in top["basic_auth_users"].members()),
        rate_interval_seconds=interval,
        rate_burst=burst,
    )


def _tls(section: Value, directory: Path, *, http2: bool) -> TLSConfig:
    names = tuple(TLSConfig.__dataclass_fields__)
    fields = section.fields(names)

    def path(name: str) -> str:
        text = fields[name].text()
        if "\0" in text:
            raise fields[name].error("no file has a NUL in its name")
        return str(directory / text) if text else ""

    sans = fields["client_allowed_sans"]
    config = TLSConfig(
        cert=fields["cert"].text(),
        key=fields["key"].text(),
        client_ca=fields["client_ca"].text(),
        cert_file=path("cert_file"),
        key_file=path("key_file"),
        client_ca_file=path("client_ca_file"),
        client_auth_type=fields["client_auth_type"].text(),
        client_allowed_sans=(
            None if sans.is_null else tuple(value.text() for value in sans.items())
        ),
        min_version=_known(fields["min_version"], VERSIONS, "TLS version", "TLS12"),
        max_version=_known(fields["max_version"], VERSIONS, "TLS version", "TLS13"),
        cipher_suites=tuple(
            _known(value, {*TLS12_SUITES, *TLS13_SUITES}, "cipher suite")
            for value in fields["cipher_suites"].items()
        ),
        prefer_server_cipher_suites=fields["prefer_server_cipher_suites"].flag(default=True),
        curve_preferences=tuple(
            _known(value, CURVES, "curve") for value in fields["curve_preferences"].items()
        ),
    )
    if config.enabled:
        _check_tls(config, fields, section)
        _check_suites(config, fields["cipher_suites"], http2=http2)
    return config


def _check_suites(config: TLSConfig, suites: Value, *, http2: bool) -> None:
    chosen = set(config.cipher_suites)
    if not chosen:
        return
    if chosen <= TLS13_SUITES and config.max_version != "TLS13":
        raise suites.error(
            "only suites of TLS 1.3, but max_version is below it: no client could connect"
        )
    if http2 and config.min_version != "TLS13" and chosen.isdisjoint(HTTP2_SUITES):
        raise suites.error(
            f"HTTP/2 needs {' or '.join(sorted(HTTP2_SUITES))}: add one, or set "
            "http_server_config.http2: false"
        )


def _check_tls(config: TLSConfig, fields: Mapping[str, Value], section: Value) -> None:
    if not (config.cert or config.cert_file):
        raise section.error("TLS needs a certificate: cert_file (or cert) is missing")
    if not (config.key or config.key_file):
        raise section.error("TLS needs the certificate's key: key_file (or key) is missing")
    auth = fields["client_auth_type"]
    if config.client_auth_type in CLIENT_AUTH_IMPOSSIBLE:
        raise auth.error(
            f"{config.client_auth_type} accepts unverified certificates, which Python "
            "cannot; use RequireAndVerifyClientCert or VerifyClientCertIfGiven"
        )
    _known(auth, CLIENT_AUTH, "client auth type")
    verifies = config.client_auth_type not in ("", "NoClientCert")
    if (config.client_ca or config.client_ca_file) and not verifies:
        raise section.error(
            "there is a client CA, but no client_auth_type that asks for certificates"
        )
    if config.client_allowed_sans is not None and not verifies:
        raise fields["client_allowed_sans"].error(
            "has no effect without a client_auth_type that asks for certificates"
        )
    order = tuple(VERSIONS)
    if order.index(config.min_version) > order.index(config.max_version):
        raise fields["min_version"].error("is above max_version: no client could connect")
    if verifies and config.min_version in ("TLS10", "TLS11"):
        raise fields["min_version"].error(
            "is below TLS12 with client certificates: OpenSSL would take those with SHA-1 or short "
            "keys, too"
        )


def _known(
    value: Value, known: Mapping[str, object] | set[str], what: str, default: str = ""
) -> str:
    name = value.text(default)
    if name not in known:
        words = ", ".join(sorted(one for one in known if one))
        raise value.error(f"unknown {what} {name!r}; known: {words}")
    return name


def _response_header(name: str, value: Value) -> tuple[str, str]:
    if name not in HEADERS:
        raise value.error(f"this header cannot be set; those that can: {', '.join(HEADERS)}")
    text = value.text()
    if HEADERS[name] and text not in HEADERS[name]:
        raise value.error(f"must be {' or '.join(HEADERS[name])}")
    if not text.isprintable():
        raise value.error("must be one line of printable characters")
    return name, text


def _user(name: str, value: Value) -> tuple[str, str]:
    if not _HASH.fullmatch(value.text()):
        raise value.error(
            "must be a bcrypt hash ($2y$, $2b$ or $2a$, cost 4 to 31), such as the command "
            "'htpasswd -nBC 10 NAME' prints after the colon"
        )
    return name, value.text()


def _rate(section: Value) -> tuple[float, int]:
    fields = section.fields(("interval", "burst"))
    burst = fields["burst"].integer()
    interval = _go_duration(fields["interval"])
    if interval and burst < 1:
        raise fields["burst"].error("must be at least 1, or every request would be refused")
    return interval, burst


def _go_duration(value: Value) -> float:
    """Go's durations, "1s", "1m30s", "1.5h", in seconds."""
    text = value.text("0")
    parts = _DURATION_PART.findall(text)
    if text == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise value.error('must be a duration with its unit, such as "1s" or "500ms", or 0')
    nanoseconds = sum(Decimal(number) * _NANOSECONDS[unit] for number, unit in parts)
    if nanoseconds > _MAX_NANOSECONDS:
        raise value.error("is longer than 292 years")
    return float(nanoseconds) / 1e9

"""The web configuration file as dataclasses, and what is checked beyond the types."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

TLS_KEY = "tls_server_config"


class WebConfigError(Exception):
    """A file that cannot be used; the message contains the file, the key and the reason."""

    def __init__(self, reason: str, *, key: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.key = key
        self.path = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, self.key, self.reason) if part)


TLS13_SUITES = frozenset(
    {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
)
"""Suites of TLS 1.3, which are always on, here as in Go."""

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
"""Go's name -> OpenSSL's, for the suites that Go 1.26 does not call insecure."""

HTTP2_SUITES = frozenset(
    {"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}
)
"""Without one of these a Go program does not serve HTTP/2 and does not start."""

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
"""Types that accept unverified certificates, which Python's ssl module cannot."""

HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""The headers that may be set, with their allowed values; (): any."""

_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """``tls_server_config``."""

    cert: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    client_ca: str = field(default="", repr=False)
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] | None = None
    """None: any name. Empty: no name."""
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether a key that asks for TLS is set."""
        names = ("cert", "key", "client_ca")
        return bool(
            self.client_auth_type
            or any(getattr(self, name) or getattr(self, f"{name}_file") for name in names)
        )


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """``http_server_config``."""

    http2: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """``rate_limit``: a token every ``interval`` seconds (0: no limit), ``burst`` at most."""

    interval: float = 0.0
    burst: int = 0


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file. Paths in it are relative to the file."""

    tls_server_config: TLSConfig = TLSConfig()
    http_server_config: HTTPConfig = field(default_factory=HTTPConfig)
    basic_auth_users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> bcrypt hash."""
    rate_limit: RateLimit = RateLimit()


def check(config: WebConfig) -> None:
    """Check the values.

    Raises:
        WebConfigError: A value is unknown, impossible in Python, or contradicts another.
    """
    tls = config.tls_server_config
    for name, value in (("min_version", tls.min_version), ("max_version", tls.max_version)):
        _check_known(name, value, VERSIONS, "TLS version")
    for suite in tls.cipher_suites:
        _check_known("cipher_suites", suite, {*TLS12_SUITES, *TLS13_SUITES}, "cipher suite")
    for curve in tls.curve_preferences:
        _check_known("curve_preferences", curve, CURVES, "curve")
    if any("\0" in path for path in (tls.cert_file, tls.key_file, tls.client_ca_file)):
        raise WebConfigError("no file has a NUL in its name", key=TLS_KEY)
    if tls.enabled:
        _check_certificate(tls)
        _check_clients(tls)
        _check_suites(tls, http2=config.http_server_config.http2)
    for name, value in config.http_server_config.headers.items():
        _check_header(name, value)
    for name, hashed in config.basic_auth_users.items():
        if not _HASH.fullmatch(hashed):
            raise WebConfigError(
                "must be a bcrypt hash ($2y$, $2b$ or $2a$, cost 4 to 31), such as the command "
                "'htpasswd -nBC 10 NAME' prints after the colon",
                key=f"basic_auth_users.{name}",
            )
    if config.rate_limit.interval and config.rate_limit.burst < 1:
        raise WebConfigError(
            "must be at least 1, or every request would be refused", key="rate_limit.burst"
        )


def _check_known(key: str, value: str, known: Collection[str], what: str) -> None:
    if value not in known:
        names = ", ".join(sorted(name for name in known if name))
        raise WebConfigError(f"unknown {what} {value!r}; known: {names}", key=f"{TLS_KEY}.{key}")


def _check_certificate(tls: TLSConfig) -> None:
    if not (tls.cert or tls.cert_file):
        raise WebConfigError("TLS needs a certificate: cert_file (or cert) is missing", key=TLS_KEY)
    if not (tls.key or tls.key_file):
        raise WebConfigError(
            "TLS needs the certificate's key: key_file (or key) is missing", key=TLS_KEY
        )
    order = tuple(VERSIONS)
    if order.index(tls.min_version) > order.index(tls.max_version):
        raise WebConfigError(
            "is above max_version: no client could connect", key=f"{TLS_KEY}.min_version"
        )


def _check_clients(tls: TLSConfig) -> None:
    key = f"{TLS_KEY}.client_auth_type"
    if tls.client_auth_type in CLIENT_AUTH_IMPOSSIBLE:
        raise WebConfigError(
            f"{tls.client_auth_type} accepts unverified certificates, which Python cannot; use "
            "RequireAndVerifyClientCert or VerifyClientCertIfGiven",
            key=key,
        )
    _check_known("client_auth_type", tls.client_auth_type, CLIENT_AUTH, "client auth type")
    if CLIENT_AUTH[tls.client_auth_type] != ssl.CERT_NONE:
        if tls.min_version in ("TLS10", "TLS11"):
            raise WebConfigError(
                "is below TLS12 with client certificates: OpenSSL would take those with SHA-1 or "
                "short keys, too",
                key=f"{TLS_KEY}.min_version",
            )
    elif tls.client_ca or tls.client_ca_file:
        raise WebConfigError(
            "there is a client CA, but no client_auth_type that asks for certificates", key=TLS_KEY
        )
    elif tls.client_allowed_sans is not None:
        raise WebConfigError(
            "has no effect without a client_auth_type that asks for certificates",
            key=f"{TLS_KEY}.client_allowed_sans",
        )


def _check_suites(tls: TLSConfig, *, http2: bool) -> None:
    chosen, key = set(tls.cipher_suites), f"{TLS_KEY}.cipher_suites"
    if not chosen:
        return
    if chosen <= TLS13_SUITES and tls.max_version != "TLS13":
        raise WebConfigError(
            "only suites of TLS 1.3, but max_version is below it: no client could connect", key=key
        )
    if http2 and tls.min_version != "TLS13" and chosen.isdisjoint(HTTP2_SUITES):
        raise WebConfigError(
            f"HTTP/2 needs {' or '.join(sorted(HTTP2_SUITES))}: add one, or set "
            "http_server_config.http2: false",
            key=key,
        )


def _check_header(name: str, value: str) -> None:
    key = f"http_server_config.headers.{name}"
    allowed = HEADERS.get(name)
    if allowed is None:
        known = ", ".join(HEADERS)
        raise WebConfigError(f"this header cannot be set; those that can: {known}", key=key)
    if allowed and value not in allowed:
        raise WebConfigError(f"must be {' or '.join(allowed)}", key=key)
    if not value.isprintable():
        raise WebConfigError("must be one line of printable characters", key=key)

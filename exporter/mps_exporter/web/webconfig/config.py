"""The web configuration file: its keys as dataclasses, its YAML, and the checks of its values."""

import re
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar, get_type_hints

import yaml

from mps_exporter.flags import StartError

TLS_KEY = "tls_server_config"
_T = TypeVar("_T")


class WebConfigError(StartError):
    """A file that cannot be used; the message contains the file, the key and the reason."""

    def __init__(self, reason: str, *, key: str = "", path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.key = key
        self.path = path

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

CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Go's types that Python's ssl module supports: it cannot request certificates unverified."""

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
    client_allowed_sans: tuple[str, ...] | None = None  # None allows any name, an empty tuple none.
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether a key that requires TLS is set."""
        files = self.cert_file, self.key_file, self.client_ca_file
        return any((self.client_auth_type, self.cert, self.key, self.client_ca, *files))


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """``http_server_config``."""

    http2: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file. Paths in it are relative to the file."""

    tls_server_config: TLSConfig = TLSConfig()
    http_server_config: HTTPConfig = field(default_factory=HTTPConfig)
    basic_auth_users: Mapping[str, str] = field(default_factory=dict, repr=False)  # Name -> hash.


# ------------------------------------------------------------------------------------ YAML

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL = f"{_TAG}null", f"{_TAG}bool"
_MAX_DEPTH = 20  # Maximum number of nested collections; a valid file has 3.


class _Loader(yaml.SafeLoader):
    """Stops at the first token that is nested too deeply: the time grows with the depth."""

    def fetch_more_tokens(self) -> None:
        if self.flow_level + len(self.indents) > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply")
        super().fetch_more_tokens()


def parse_web_config(content: bytes) -> WebConfig:
    try:
        node = _Loader(content).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise WebConfigError(f"no valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # OverflowError: "\UFFFFFFFF"
        raise WebConfigError(f"no valid YAML: {' '.join(str(error).split())}") from error
    config = WebConfig() if node is None or node.tag == _NULL else _section(WebConfig, node)
    for key, reason in _problems(config):
        raise WebConfigError(reason, key=key)
    return config


def _section(kind: type[_T], node: yaml.Node) -> _T:
    """Return a dataclass with the given fields. A key without a value has its default."""
    hints, given = get_type_hints(kind), dict[str, Any]()
    values = _to_mapping(node)
    if unknown := sorted(values.keys() - hints.keys()):
        raise WebConfigError(f"unknown key {', '.join(unknown)}")
    for name, value in values.items():
        try:
            if value.tag != _NULL:
                given[name] = _CONVERTERS[hints[name]](value)
        except WebConfigError as error:
            error.key = f"{name}.{error.key}".rstrip(".")
            raise
    return kind(**given)


def _to_mapping(node: yaml.Node) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise WebConfigError("must be a mapping of keys to values")
    found: dict[str, yaml.Node] = {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise WebConfigError("a key must be a plain word")
        if name.value in found:
            raise WebConfigError(f"the key {name.value} is there twice")
        found[name.value] = value
    return found


def _to_string(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise WebConfigError("must be a string")
    return "" if node.tag == _NULL else str(node.value)


def _to_strings(node: yaml.Node) -> tuple[str, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise WebConfigError("must be a list")
    return tuple(map(_to_string, node.value))


def _to_flag(node: yaml.Node) -> bool:
    if node.tag != _BOOL:
        raise WebConfigError("must be true or false")
    return _Loader.bool_values[_to_string(node).lower()]


_CONVERTERS: Mapping[object, Callable[[yaml.Node], object]] = {
    TLSConfig: partial(_section, TLSConfig),
    HTTPConfig: partial(_section, HTTPConfig),
    str: _to_string,
    bool: _to_flag,
    tuple[str, ...]: _to_strings,
    tuple[str, ...] | None: _to_strings,
    Mapping[str, str]: lambda node: {k: _to_string(v) for k, v in _to_mapping(node).items()},
}


# ---------------------------------------------------------------------------------- checks


Problem = tuple[str, str]  # Key and reason of a refusal.


def _problems(config: WebConfig) -> Iterator[Problem]:
    """Yield the refusals of values that are unknown, impossible in Python, or contradictory."""
    yield from _tls_problems(config.tls_server_config)
    for name, value in config.http_server_config.headers.items():
        key, allowed = f"http_server_config.headers.{name}", HEADERS.get(name)
        if allowed is None:
            yield key, f"this header cannot be set; those that can: {', '.join(HEADERS)}"
        elif allowed and value not in allowed:
            yield key, f"must be {' or '.join(allowed)}"
        elif not value.isprintable():
            yield key, "must be one line of printable characters"
    if config.basic_auth_users and find_spec("bcrypt") is None:
        yield "basic_auth_users", "needs the Python package bcrypt, which is not installed"
    for name, hashed in config.basic_auth_users.items():
        if not _HASH.fullmatch(hashed):
            reason = (
                "must be a bcrypt hash ($2y$, $2b$ or $2a$, cost 4 to 31), such as the command "
                "'htpasswd -nBC 10 NAME' prints after the colon"
            )
            yield f"basic_auth_users.{name}", reason


def _tls_problems(tls: TLSConfig) -> Iterator[Problem]:
    yield from _unknown("min_version", [tls.min_version], VERSIONS, "TLS version")
    yield from _unknown("max_version", [tls.max_version], VERSIONS, "TLS version")
    suites = {*TLS12_SUITES, *TLS13_SUITES}
    yield from _unknown("cipher_suites", tls.cipher_suites, suites, "cipher suite")
    yield from _unknown("curve_preferences", tls.curve_preferences, CURVES, "curve")
    if not tls.enabled:
        return
    if not (tls.cert or tls.cert_file):
        yield TLS_KEY, "TLS needs a certificate: cert_file (or cert) is missing"
    if not (tls.key or tls.key_file):
        yield TLS_KEY, "TLS needs the certificate's key: key_file (or key) is missing"
    if VERSIONS[tls.min_version] > VERSIONS[tls.max_version]:
        yield f"{TLS_KEY}.min_version", "is above max_version: no client could connect"
    yield from _client_problems(tls)
    key, chosen = f"{TLS_KEY}.cipher_suites", set(tls.cipher_suites)
    if chosen and chosen <= TLS13_SUITES and tls.max_version != "TLS13":
        yield key, "only suites of TLS 1.3, but max_version is below it: no client could connect"


def _client_problems(tls: TLSConfig) -> Iterator[Problem]:
    kind = tls.client_auth_type
    yield from _unknown("client_auth_type", [kind], CLIENT_AUTH, "or unverified client auth type")
    if CLIENT_AUTH[kind] != ssl.CERT_NONE:
        return
    if tls.client_ca or tls.client_ca_file:
        reason = "there is a client CA, but no client_auth_type that asks for certificates"
        yield TLS_KEY, reason
    elif tls.client_allowed_sans is not None:
        reason = "has no effect without a client_auth_type that asks for certificates"
        yield f"{TLS_KEY}.client_allowed_sans", reason


def _unknown(
    key: str, values: Iterable[str], known: Collection[str], what: str
) -> Iterator[Problem]:
    for value in values:
        if value not in known:
            names = ", ".join(sorted(name for name in known if name))
            yield f"{TLS_KEY}.{key}", f"unknown {what} {value!r}; known: {names}"

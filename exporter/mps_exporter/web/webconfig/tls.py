"""``tls_server_config`` -> an SSL context."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .config import TLSConfig
from .errors import WebConfigError
from .names import CLIENT_AUTH, CURVES, TLS12_SUITES, VERSIONS

_KEY = "tls_server_config"


def make_context(config: TLSConfig) -> ssl.SSLContext:
    """Load certificates and set everything.

    Raises:
        WebConfigError: A file cannot be read, or does not hold what it should.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    with _refusals("cipher_suites"):
        _versions_and_ciphers(context, config)
    with _refusals("curve_preferences"):
        _curves(context, config)
    _certificate(context, config)
    _clients(context, config)
    return context


@contextlib.contextmanager
def _refusals(key: str) -> Iterator[None]:
    """OpenSSL refuses what the policy of the host (FIPS, crypto-policies) does not allow."""
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise WebConfigError(
            f"OpenSSL on this host refuses it: {reason}", key=f"{_KEY}.{key}"
        ) from error


def _versions_and_ciphers(context: ssl.SSLContext, config: TLSConfig) -> None:
    minimum = config.min_version
    ciphers = [TLS12_SUITES[name] for name in config.cipher_suites if name in TLS12_SUITES]
    if config.cipher_suites and not ciphers:
        if config.max_version != "TLS13":
            raise WebConfigError(
                "only suites of TLS 1.3, but max_version is below it: no client could connect",
                key=f"{_KEY}.cipher_suites",
            )
        minimum = "TLS13"
    with warnings.catch_warnings():
        # TLS 1.0 and 1.1 are deprecated; who asks for them by name knows.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.maximum_version = VERSIONS[config.max_version]
        context.minimum_version = VERSIONS[minimum]
    if minimum in ("TLS10", "TLS11"):
        ciphers = [*(ciphers or ["DEFAULT"]), "@SECLEVEL=0"]
    if ciphers:
        context.set_ciphers(":".join(ciphers))


def _curves(context: ssl.SSLContext, config: TLSConfig) -> None:
    names = [CURVES[name] for name in config.curve_preferences]
    set_groups = getattr(context, "set_groups", None)
    if set_groups is not None and names:  # Python 3.15
        set_groups(":".join(names))
    elif len(names) > 1:
        raise WebConfigError(
            "this version of Python can set one curve only; name one, or leave the key out for all",
            key=f"{_KEY}.curve_preferences",
        )
    elif names:
        context.set_ecdh_curve(names[0])


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError of a name that cannot be encoded
        reason = getattr(error, "strerror", None) or error
        raise WebConfigError(f"cannot read {path!r}: {reason}", key=f"{_KEY}.{key}") from error


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A name for bytes, since OpenSSL takes certificates and keys from files only.

    In memory on Linux, so that no key that stands in the configuration reaches a disk.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("web-config")
        path = f"/proc/self/fd/{descriptor}"
    else:  # pragma: no cover - not on Linux
        descriptor, path = tempfile.mkstemp()
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield path
    finally:
        os.close(descriptor)
        if not path.startswith("/proc/"):  # pragma: no cover - not on Linux
            Path(path).unlink()


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted, and a passphrase cannot be entered")


def _certificate(context: ssl.SSLContext, config: TLSConfig) -> None:
    cert = _read(config.cert_file, "cert_file") if config.cert_file else config.cert.encode()
    key = _read(config.key_file, "key_file") if config.key_file else config.key.encode()
    place = f"{_KEY}.cert_file" if config.cert_file else f"{_KEY}.cert"
    try:
        with _as_file(cert) as cert_path, _as_file(key) as key_path:
            context.load_cert_chain(cert_path, key_path, password=_no_passphrase)
    except ValueError as error:
        raise WebConfigError(str(error), key=place.replace("cert", "key")) from error
    except ssl.SSLError as error:
        reason = error.reason or "no PEM data in one of them"
        if reason == "KEY_VALUES_MISMATCH":
            reason = "the key does not belong to the certificate"
        raise WebConfigError(f"certificate and key cannot be used: {reason}", key=place) from error


def _clients(context: ssl.SSLContext, config: TLSConfig) -> None:
    context.verify_mode = CLIENT_AUTH[config.client_auth_type]
    if context.verify_mode == ssl.CERT_NONE:
        return
    if not (config.client_ca or config.client_ca_file):
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # the host's, as Go does
        return
    key = "client_ca_file" if config.client_ca_file else "client_ca"
    content = (
        _read(config.client_ca_file, key) if config.client_ca_file else config.client_ca.encode()
    )
    try:
        context.load_verify_locations(cadata=content.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:  # a ValueError where it is empty
        reason = getattr(error, "reason", None) or error
        raise WebConfigError(f"no certificate in it: {reason}", key=f"{_KEY}.{key}") from error


def alternative_names(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """The subject alternative names of a verified client certificate, as Go prints them."""
    names = set()
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI"):
            names.add(value)
        elif kind == "IP Address":
            with contextlib.suppress(ValueError):
                names.add(str(ipaddress.ip_address(value.strip())))
    return frozenset(names)

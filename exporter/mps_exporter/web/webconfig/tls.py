"""``tls_server_config`` -> an SSL context."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import ssl
import stat
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mps_exporter.web.policy import MAX_CERTIFICATE_BYTES

from .config import CLIENT_AUTH, CURVES, TLS12_SUITES, TLS_KEY, VERSIONS, TLSConfig, WebConfigError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_GO_KEYS = tuple(
    bytes.fromhex(oid)
    for oid in (
        "06092a864886f70d010101",  # RSA
        "06032b6570",  # Ed25519
        "06072a8648ce3d0201 06052b81040021",  # ECDSA with P-224,
        "06072a8648ce3d0201 06082a8648ce3d030107",  # P-256,
        "06072a8648ce3d0201 06052b81040022",  # P-384,
        "06072a8648ce3d0201 06052b81040023",  # P-521
    )
)
"""Keys that Go supports: algorithm and curve as encoded in a certificate (RFC 5480)."""


def read_files(config: TLSConfig, directory: Path) -> dict[str, bytes]:
    """Return the content of the named files (relative to ``directory``), by key."""
    files = {key: getattr(config, key) for key in ("cert_file", "key_file", "client_ca_file")}
    return {key: _read_pem(str(directory / path), key) for key, path in files.items() if path}


def make_context(config: TLSConfig, files: Mapping[str, bytes]) -> ssl.SSLContext:
    """Return a context with the certificates in ``files`` (see read_files)."""
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
    _certificate(context, config, files)
    _verify_clients(context, config, files)
    return context


@contextlib.contextmanager
def _refusals(key: str) -> Iterator[None]:
    """Report settings that OpenSSL refuses by the policy of the host (FIPS, crypto-policies)."""
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise WebConfigError(
            f"OpenSSL on this host refuses it: {reason}", key=f"{TLS_KEY}.{key}"
        ) from error


def _versions_and_ciphers(context: ssl.SSLContext, config: TLSConfig) -> None:
    minimum = config.min_version
    chosen = config.cipher_suites or TLS12_SUITES
    ciphers = [TLS12_SUITES[name] for name in chosen if name in TLS12_SUITES]
    if not ciphers:
        minimum = "TLS13"
    with warnings.catch_warnings():
        # TLS 1.0 and 1.1 are deprecated, and configured explicitly here.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.maximum_version = VERSIONS[config.max_version]
        context.minimum_version = VERSIONS[minimum]
    if minimum in ("TLS10", "TLS11"):
        ciphers.append("@SECLEVEL=0")
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
            key=f"{TLS_KEY}.curve_preferences",
        )
    elif names:
        context.set_ecdh_curve(names[0])


def read_file(path: str) -> bytes:
    """Read a regular file, or raise OSError: a FIFO would block, and /dev/zero is endless."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size > MAX_CERTIFICATE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_CERTIFICATE_BYTES} bytes")
        return file.read(MAX_CERTIFICATE_BYTES)


def _read_pem(path: str, key: str) -> bytes:
    try:
        return read_file(path)
    except (OSError, ValueError) as error:  # ValueError: the name cannot be encoded
        reason = getattr(error, "strerror", None) or error
        raise WebConfigError(f"cannot read {path!r}: {reason}", key=f"{TLS_KEY}.{key}") from error


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: OpenSSL reads certificates and keys from files only."""
    descriptor = os.memfd_create("web-config")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted, and a passphrase cannot be entered")


def _certificate(context: ssl.SSLContext, config: TLSConfig, files: Mapping[str, bytes]) -> None:
    cert = files.get("cert_file", config.cert.encode())
    key = files.get("key_file", config.key.encode())
    place = f"{TLS_KEY}.cert_file" if config.cert_file else f"{TLS_KEY}.cert"
    for name, content in ((place, cert), (place.replace("cert", "key"), key)):
        _refuse_byte_order_mark(content, name)
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
    certificate = _first_certificate(cert)
    if not any(key in certificate for key in _GO_KEYS):
        raise WebConfigError(
            "the certificate's key must be RSA, Ed25519, or ECDSA with P-224 to P-521", key=place
        )


def _refuse_byte_order_mark(content: bytes, key: str) -> None:
    if content.startswith(_BYTE_ORDER_MARK):
        raise WebConfigError("begins with a byte order mark: no PEM data", key=key)


def _first_certificate(pem: bytes) -> bytes:
    """Return the first certificate of a file that OpenSSL could read, in DER."""
    text = pem.decode("latin-1")
    start = text.index("-----BEGIN CERTIFICATE-----")
    end = text.index("-----END CERTIFICATE-----", start) + len("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(text[start:end])


def _verify_clients(context: ssl.SSLContext, config: TLSConfig, files: Mapping[str, bytes]) -> None:
    context.verify_mode = CLIENT_AUTH[config.client_auth_type]
    if context.verify_mode == ssl.CERT_NONE:
        return
    if not (config.client_ca or config.client_ca_file):
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # the host's, as Go does
        return
    key = "client_ca_file" if config.client_ca_file else "client_ca"
    content = files.get("client_ca_file", config.client_ca.encode())
    _refuse_byte_order_mark(content, f"{TLS_KEY}.{key}")
    # An intermediate authority may be trusted alone, as in Go: many PKIs provide only that.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:  # ValueError: it is empty
        reason = getattr(error, "reason", None) or error
        raise WebConfigError(f"no certificate in it: {reason}", key=f"{TLS_KEY}.{key}") from error


def alternative_names(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the subject alternative names of a verified certificate in the form that Go prints."""
    names = set()
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI"):
            names.add(value)
        elif kind == "IP Address":
            with contextlib.suppress(ValueError):
                names.add(str(ipaddress.ip_address(value.strip())))
    return frozenset(names)

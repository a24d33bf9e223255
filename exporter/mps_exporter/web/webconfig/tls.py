"""``tls_server_config`` -> an SSL context."""

import contextlib
import errno
import ipaddress
import os
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mps_exporter.limits_without_a_flag import MAX_CERTIFICATE_BYTES

from .config import CLIENT_AUTH, CURVES, TLS12_SUITES, TLS_KEY, VERSIONS, TLSConfig, WebConfigError


class Pem(NamedTuple):
    """PEM data (may be empty), and the key of the configuration for it."""

    key: str
    content: bytes


def read_pems(config: TLSConfig, directory: Path) -> tuple[Pem, ...]:
    """Return the certificate, its key and the client CA. Files are relative to ``directory``."""
    return tuple(
        _pem(f"{name}_file", read_file, str(directory / path))
        if (path := getattr(config, f"{name}_file"))
        else _pem(name, str.encode, getattr(config, name))
        for name in ("cert", "key", "client_ca")
    )


def _pem(name: str, read: Callable[[str], bytes], source: str) -> Pem:
    key = f"{TLS_KEY}.{name}"
    try:
        content = read(source)
    except (OSError, ValueError) as error:  # ValueError: the name cannot be encoded
        reason = getattr(error, "strerror", None) or error
        raise WebConfigError(f"cannot read {source!r}: {reason}", key=key) from error
    return Pem(key, content)


def make_context(config: TLSConfig, cert: Pem, key: Pem, client_ca: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _versions_and_ciphers(context, config)
    _curves(context, config)
    _load_certificate(context, cert, key)
    context.verify_mode = CLIENT_AUTH[config.client_auth_type]
    if context.verify_mode != ssl.CERT_NONE:
        _load_authority(context, client_ca)
    return context


def _versions_and_ciphers(context: ssl.SSLContext, config: TLSConfig) -> None:
    chosen = config.cipher_suites or TLS12_SUITES
    ciphers = [TLS12_SUITES[name] for name in chosen if name in TLS12_SUITES]
    context.maximum_version = VERSIONS[config.max_version]
    context.minimum_version = VERSIONS[config.min_version if ciphers else "TLS13"]
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


def _load_certificate(context: ssl.SSLContext, cert: Pem, key: Pem) -> None:
    try:
        with _as_file(cert.content) as cert_path, _as_file(key.content) as key_path:
            context.load_cert_chain(cert_path, key_path, password=_no_passphrase)
    except ValueError as error:
        raise WebConfigError(str(error), key=key.key) from error
    except ssl.SSLError as error:
        reason = error.reason or "no PEM data in one of them"
        if reason == "KEY_VALUES_MISMATCH":
            reason = "the key does not belong to the certificate"
        reason = f"certificate and key cannot be used: {reason}"
        raise WebConfigError(reason, key=cert.key) from error


def _load_authority(context: ssl.SSLContext, client_ca: Pem) -> None:
    if client_ca.key == f"{TLS_KEY}.client_ca" and not client_ca.content:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # the host's, as Go does
        return
    # An intermediate authority may be trusted alone, as in Go: many PKIs provide only that.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=client_ca.content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:  # ValueError: it is empty
        reason = getattr(error, "reason", None) or error
        raise WebConfigError(f"no certificate in it: {reason}", key=client_ca.key) from error


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

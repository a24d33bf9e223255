"""Certificates, good and bad, that the web configurations of toolkit_verdicts.json name.

Their texts hold @FOLDER@, where the certificates are, and @NAME@ for the content of one of them.
"""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def _certificate(key: Key, *, days: int = 3650) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(PEM)
    )


def write_certificates(folder: Path) -> None:
    """Write all files that the configurations name."""
    server = rsa.generate_private_key(65537, 2048)
    keys: dict[str, Key] = {
        "server": server,
        "other": ec.generate_private_key(ec.SECP256R1()),
        "rsa1024": rsa.generate_private_key(65537, 1024),  # noqa: S505 - to see it refused
    }
    contents = {
        "expired.crt": _certificate(server, days=1),
        "sealed.key": server.private_bytes(
            PEM, PKCS8, serialization.BestAvailableEncryption(b"secret")
        ),
        "junk.pem": b"not a certificate\n",
        "broken.pem": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "empty.pem": b"",
    }
    for name, key in keys.items():
        contents[f"{name}.crt"] = _certificate(key)
        contents[f"{name}.key"] = key.private_bytes(PEM, PKCS8, serialization.NoEncryption())
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def filled_in(text: str, folder: Path) -> str:
    """Put folder and certificates into a text."""
    text = text.replace("@FOLDER@", str(folder))

    def content(match: re.Match[str]) -> str:
        lines = (folder / match[1]).read_text("utf-8").splitlines()
        return "\n".join(f"    {line}" for line in lines)

    return re.sub(r"@([a-z0-9.-]+)@", content, text)

"""Certificates, good and bad, that the web configurations of toolkit_verdicts.json name.

Their texts hold @FOLDER@, where the certificates are, and @NAME@ for the content of one of them.
"""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

Key = (
    rsa.RSAPrivateKey
    | ec.EllipticCurvePrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
)


def _certificate(key: Key, *, days: int = 3650) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    edwards = ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
    algorithm = None if isinstance(key, edwards) else hashes.SHA256()
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
        .sign(key, algorithm)
    )


def write_certificates(folder: Path) -> None:
    """Write all files that the configurations name."""
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    keys: dict[str, Key] = {
        "server": rsa.generate_private_key(65537, 2048),
        "other": ec.generate_private_key(ec.SECP256R1()),
        "p384": ec.generate_private_key(ec.SECP384R1()),
        "p521": ec.generate_private_key(ec.SECP521R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate(),
        "k256": ec.generate_private_key(ec.SECP256K1()),
        "rsa1024": rsa.generate_private_key(65537, 1024),  # noqa: S505 - to see it refused
        "brainpool": ec.generate_private_key(ec.BrainpoolP256R1()),
        "ed448": ed448.Ed448PrivateKey.generate(),
    }
    for name, key in keys.items():
        crt = _certificate(key).public_bytes(pem)
        (folder / f"{name}.crt").write_bytes(crt)
        secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        (folder / f"{name}.key").write_bytes(secret)
    server = keys["server"]
    old = server.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    sealed = server.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    crt, key_pem = (folder / "server.crt").read_bytes(), (folder / "server.key").read_bytes()
    contents = {
        "expired.crt": _certificate(server, days=1).public_bytes(pem),
        "pkcs1.key": old,
        "sealed.key": sealed,
        "der.crt": _certificate(server).public_bytes(serialization.Encoding.DER),
        "bom.crt": b"\xef\xbb\xbf" + crt,
        "bom.key": b"\xef\xbb\xbf" + key_pem,
        "crlf.crt": crt.replace(b"\n", b"\r\n"),
        "text.crt": b"Certificate:\n    Data:\n" + crt,
        "text.key": b"A key.\n" + key_pem,
        "both.pem": crt + key_pem,
        "both-reversed.pem": key_pem + crt,
        "chain.crt": crt + (folder / "other.crt").read_bytes(),
        "chain-reversed.crt": (folder / "other.crt").read_bytes() + crt,
        "blanks.crt": b"\n\n" + crt + b"\n\n",
        "indented.crt": b"".join(b"  " + line for line in crt.splitlines(keepends=True)),
        "tail.crt": crt + b"junk\n",
        "half.crt": crt[: len(crt) // 2],
        "nul.crt": crt + b"\0",
        "junk.pem": b"not a certificate\n",
        "broken.pem": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "half-broken.pem": crt + b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "empty.pem": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def filled_in(text: str, folder: Path) -> str:
    """Put folder and certificates into a text."""
    text = text.replace("@FOLDER@", str(folder))

    def content(match: re.Match[str]) -> str:
        lines = (folder / match[1]).read_text("utf-8").splitlines()
        return "\n".join(f"    {line}" for line in lines)

    return re.sub(r"@([a-z0-9.-]+)@", content, text)

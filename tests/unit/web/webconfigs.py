"""A web configuration file with TLS, and the certificates that it and toolkit_verdicts.json name.

The texts of toolkit_verdicts.json have @FOLDER@ for the folder of the certificates, and @NAME@ for
the content of one of them.
"""

import re
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


def write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    for name in ("server", "other"):
        cert = authority.issue_cert("localhost", "127.0.0.1")
        (folder / f"{name}.crt").write_bytes(cert.cert_chain_pems[0].bytes())
        (folder / f"{name}.key").write_bytes(cert.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "sealed.key").write_bytes(sealed)
    (folder / "junk.pem").write_text("not a certificate\n")
    broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    (folder / "broken.pem").write_text(broken)
    (folder / "empty.pem").write_text("")


def filled_in(text: str, folder: Path) -> str:
    """Put folder and certificates into a text."""
    text = text.replace("@FOLDER@", str(folder))

    def content(match: re.Match[str]) -> str:
        lines = (folder / match[1]).read_text("utf-8").splitlines()
        return "\n".join(f"    {line}" for line in lines)

    return re.sub(r"@([a-z0-9.-]+)@", content, text)

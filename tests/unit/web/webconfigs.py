"""A web configuration file with TLS, and the certificates that it names."""

from pathlib import Path

import trustme

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


def write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    for name in ("server", "other"):
        cert = authority.issue_cert("localhost", "127.0.0.1")
        (folder / f"{name}.crt").write_bytes(cert.cert_chain_pems[0].bytes())
        (folder / f"{name}.key").write_bytes(cert.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "junk.pem").write_text("not a certificate\n")
    (folder / "empty.pem").write_text("")

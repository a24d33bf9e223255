"""Web configuration files, good and bad, for a comparison with Prometheus' exporter-toolkit.

Texts may hold @FOLDER@, where the certificates are, and @NAME@ for the content of one of them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

BODY = "AAAAAAAAAAAAAAAAAAAAAOl.gQzbFHgGCDsB4c7O1Cc0T0F3tc2LS"
HASH = f"$2y$04${BODY}"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n"
HTTP = "http_server_config:\n"
USERS = "basic_auth_users:\n"

SUITES = (
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_MADE_OF_SAND",
    "tls_aes_128_gcm_sha256",
)
VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")

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


def configurations() -> dict[str, str]:
    """All texts by name."""
    found: dict[str, str] = {}
    for family in (_documents, _tls, _files, _versions, _clients, _http, _users, _rates, _yaml):
        for name, text in family().items():
            found[f"{family.__name__[1:]}-{name}"] = text
    return found


def _documents() -> dict[str, str]:
    return {
        "empty": "",
        "comment": "# nothing\n",
        "null": "~\n",
        "braces": "{}",
        "dashes": "---\n",
        "end": "{}\n...\n",
        "no-values": "tls_server_config:\nhttp_server_config:\nbasic_auth_users:\nrate_limit:\n",
        "junk": "abcdef\nghijkl\n",
        "word": "abcdef\n",
        "number": "5\n",
        "list": "- tls_server_config\n",
        "unclosed": "tls_server_config: [\n",
        "unknown": "tls_config: {}\n",
        "unknown-null": "tls_config:\n",
        "case": "TLS_server_config: {}\n",
        "twice": TLS + TLS,
        "section-text": "tls_server_config: on\n",
        "section-empty-text": "tls_server_config: ''\n",
        "section-number": "tls_server_config: 0\n",
        "section-list": "http_server_config: [http2]\n",
        "section-empty-list": "http_server_config: []\n",
        "users-list": "basic_auth_users: [alice]\n",
        "users-text": "basic_auth_users: alice\n",
        "rate-list": "rate_limit: [1s]\n",
        "second-document": "{}\n---\n{}\n",
        "second-junk": "{}\n---\n[\n",
        "nul": "\0",
        "control": "# \x01\n{}\n",
        "bom": "\ufeff{}\n",
        "latin1": "# \udce9\n{}\n",
        "crlf": TLS.replace("\n", "\r\n"),
        "tab-indent": "tls_server_config:\n\tcert_file: a\n",
        "tab-after-colon": "http_server_config:\n  http2:\ttrue\n",
        "tab-comment": "{}\t# nothing\n",
    }


def _tls() -> dict[str, str]:
    found = {
        "files": TLS,
        "absolute": "tls_server_config: {cert_file: @FOLDER@/server.crt, "
        "key_file: @FOLDER@/server.key}",
        "quoted": "tls_server_config:\n  'cert_file': 'server.crt'\n  key_file: \"server.key\"\n",
        "dot": "tls_server_config:\n  cert_file: ./server.crt\n  key_file: ././server.key\n",
        "through-missing": "tls_server_config:\n  cert_file: sub/../server.crt\n"
        "  key_file: server.key\n",
        "cert-only": "tls_server_config:\n  cert_file: server.crt\n",
        "key-only": "tls_server_config:\n  key_file: server.key\n",
        "cert-blank": "tls_server_config:\n  cert_file: ''\n  key_file: server.key\n",
        "cert-null": "tls_server_config:\n  cert_file: ~\n  key_file: server.key\n",
        "cert-list": "tls_server_config:\n  cert_file: [server.crt]\n  key_file: server.key\n",
        "cert-mapping": "tls_server_config:\n  cert_file: {a: b}\n  key_file: server.key\n",
        "cert-nul": 'tls_server_config:\n  cert_file: "a\\0b"\n  key_file: server.key\n',
        "cert-long": f"tls_server_config:\n  cert_file: {'a' * 300}\n  key_file: server.key\n",
        "all-blank": "tls_server_config:\n  cert_file: ''\n  key_file: ''\n",
        "inline": "tls_server_config:\n  cert: |\n@server.crt@\n  key: |\n@server.key@\n",
        "inline-cert": "tls_server_config:\n  cert: |\n@server.crt@\n  key_file: server.key\n",
        "inline-key": "tls_server_config:\n  cert_file: server.crt\n  key: |\n@server.key@\n",
        "inline-folded": "tls_server_config:\n  cert: >\n@server.crt@\n  key_file: server.key\n",
        "inline-junk": "tls_server_config:\n  cert: junk\n  key: junk\n",
        "inline-other-key": "tls_server_config:\n  cert: |\n@server.crt@\n  key: |\n@other.key@\n",
        "file-before-inline": TLS + "  cert: junk\n  key: junk\n",
        "unknown-key": TLS + "  cert_path: a\n",
        "key-twice": TLS + "  cert_file: other.crt\n",
        "order-true": TLS + "  prefer_server_cipher_suites: true\n",
        "order-false": TLS + "  prefer_server_cipher_suites: false\n",
        "order-null": TLS + "  prefer_server_cipher_suites:\n",
        "order-yes": TLS + "  prefer_server_cipher_suites: yes\n",
        "order-number": TLS + "  prefer_server_cipher_suites: 1\n",
        "order-maybe": TLS + "  prefer_server_cipher_suites: maybe\n",
        "suites-none": TLS + "  cipher_suites: []\n",
        "suites-null": TLS + "  cipher_suites:\n",
        "suites-of-null": TLS + "  cipher_suites: [~]\n",
        "suites-of-blank": TLS + "  cipher_suites: ['']\n",
        "suites-text": TLS + "  cipher_suites: TLS_AES_128_GCM_SHA256\n",
        "suites-mapping": TLS + "  cipher_suites: {a: b}\n",
        "suites-several": TLS + "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_AES_128_GCM_SHA256]\n",
        "suites-wrong-family": TLS + "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n",
        "suites-without-tls": "tls_server_config:\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n",
        "suites-alone-unknown": "tls_server_config:\n  cipher_suites: [SAND]\n",
        "curve-unknown": TLS + "  curve_preferences: [CurveP257]\n",
        "curve-openssl": TLS + "  curve_preferences: [prime256v1]\n",
        "curve-blank": TLS + "  curve_preferences: ['']\n",
        "curve-null": TLS + "  curve_preferences: [~]\n",
        "curve-none": TLS + "  curve_preferences: []\n",
        "curve-text": TLS + "  curve_preferences: X25519\n",
        "curve-two": TLS + "  curve_preferences: [X25519, CurveP256]\n",
        "curve-twice": TLS + "  curve_preferences: [X25519, X25519]\n",
    }
    for curve in ("CurveP256", "CurveP384", "CurveP521", "X25519", "X25519MLKEM768"):
        found[f"curve-{curve}"] = TLS + f"  curve_preferences: [{curve}]\n"
    for suite in SUITES:
        found[f"suite-{suite}"] = TLS + f"  cipher_suites: [{suite}]\n"
        found[f"suite-http1-{suite}"] = TLS + f"  cipher_suites: [{suite}]\n{HTTP}  http2: false\n"
    return found


def _files() -> dict[str, str]:
    pairs = {
        "missing-cert": ("none.crt", "server.key"),
        "missing-key": ("server.crt", "none.key"),
        "swapped": ("server.key", "server.crt"),
        "folder": (".", "server.key"),
        "key-of-another": ("server.crt", "other.key"),
        "ecdsa": ("other.crt", "other.key"),
        "p384": ("p384.crt", "p384.key"),
        "p521": ("p521.crt", "p521.key"),
        "ed25519": ("ed25519.crt", "ed25519.key"),
        "secp256k1": ("k256.crt", "k256.key"),
        "brainpool": ("brainpool.crt", "brainpool.key"),
        "ed448": ("ed448.crt", "ed448.key"),
        "rsa1024": ("rsa1024.crt", "rsa1024.key"),
        "expired": ("expired.crt", "server.key"),
        "pkcs1": ("server.crt", "pkcs1.key"),
        "sealed": ("server.crt", "sealed.key"),
        "der": ("der.crt", "server.key"),
        "bom-cert": ("bom.crt", "server.key"),
        "bom-key": ("server.crt", "bom.key"),
        "crlf": ("crlf.crt", "server.key"),
        "text-before": ("text.crt", "server.key"),
        "text-before-key": ("server.crt", "text.key"),
        "both": ("both.pem", "both.pem"),
        "both-reversed": ("both-reversed.pem", "both-reversed.pem"),
        "chain": ("chain.crt", "server.key"),
        "chain-reversed": ("chain-reversed.crt", "server.key"),
        "blank-lines": ("blanks.crt", "server.key"),
        "indented": ("indented.crt", "server.key"),
        "tail": ("tail.crt", "server.key"),
        "half": ("half.crt", "server.key"),
        "nul": ("nul.crt", "server.key"),
        "junk-cert": ("junk.pem", "server.key"),
        "junk-key": ("server.crt", "junk.pem"),
        "broken": ("broken.pem", "server.key"),
        "second-broken": ("half-broken.pem", "server.key"),
        "empty-cert": ("empty.pem", "server.key"),
        "empty-key": ("server.crt", "empty.pem"),
        "device": ("/dev/null", "server.key"),
    }
    return {
        name: f"tls_server_config:\n  cert_file: {cert}\n  key_file: {key}\n"
        for name, (cert, key) in pairs.items()
    }


def _versions() -> dict[str, str]:
    found = {
        "unknown": TLS + "  min_version: TLS14\n",
        "number": TLS + "  min_version: 1.2\n",
        "old": TLS + "  max_version: SSL30\n",
        "case": TLS + "  min_version: tls12\n",
        "null": TLS + "  min_version:\n",
        "blank": TLS + "  min_version: ''\n",
        "list": TLS + "  min_version: [TLS12]\n",
        "without-tls": "tls_server_config:\n  min_version: TLS12\n",
        "without-tls-unknown": "tls_server_config:\n  max_version: SSL30\n",
        "max-12-suites-13": TLS + "  max_version: TLS12\n"
        f"  cipher_suites: [TLS_AES_128_GCM_SHA256]\n{HTTP}  http2: false\n",
        "min-13-suites-12": TLS + "  min_version: TLS13\n"
        "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n",
    }
    for low in VERSIONS:
        for high in VERSIONS:
            found[f"{low}-{high}"] = TLS + f"  min_version: {low}\n  max_version: {high}\n"
    for low in ("TLS10", "TLS11"):
        found[f"{low}-mutual"] = MUTUAL + f"  client_ca_file: server.crt\n  min_version: {low}\n"
    return found


def _clients() -> dict[str, str]:
    required = MUTUAL + "  client_ca_file: "
    found = {
        "without-cert": "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n",
        "invented": TLS + "  client_auth_type: TrustEverybody\n",
        "case": TLS + "  client_auth_type: requireandverifyclientcert\n",
        "list": TLS + "  client_auth_type: [NoClientCert]\n",
        "null": TLS + "  client_auth_type:\n",
        "host-roots": MUTUAL,
        "ca-without-type": TLS + "  client_ca_file: server.crt\n",
        "ca-inline-without-type": TLS + "  client_ca: |\n@server.crt@\n",
        "ca-with-none": TLS + "  client_auth_type: NoClientCert\n  client_ca_file: server.crt\n",
        "ca-only": "tls_server_config:\n  client_ca_file: server.crt\n",
        "ca-inline": MUTUAL + "  client_ca: |\n@server.crt@\n",
        "ca-inline-junk": MUTUAL + "  client_ca: junk\n",
        "ca-file-before-inline": required + "server.crt\n  client_ca: junk\n",
        "sans": required + "server.crt\n  client_allowed_sans: [one, 10.0.0.1]\n",
        "sans-none": required + "server.crt\n  client_allowed_sans: []\n",
        "sans-null": required + "server.crt\n  client_allowed_sans:\n",
        "sans-of-null": required + "server.crt\n  client_allowed_sans: [~]\n",
        "sans-text": required + "server.crt\n  client_allowed_sans: one\n",
        "sans-mapping": required + "server.crt\n  client_allowed_sans: {one: two}\n",
        "sans-without-type": TLS + "  client_allowed_sans: [one]\n",
        "sans-none-without-type": TLS + "  client_allowed_sans: []\n",
        "sans-without-tls": "tls_server_config:\n  client_allowed_sans: [one]\n",
    }
    for name in (
        "none.pem",
        "junk.pem",
        "empty.pem",
        "broken.pem",
        "half-broken.pem",
        "der.crt",
        "bom.crt",
        "chain.crt",
        "expired.crt",
        "rsa1024.crt",
        "k256.crt",
        "text.crt",
        "server.key",
        ".",
    ):
        found[f"ca-{name}"] = required + name + "\n"
    for kind in (
        "''",
        "NoClientCert",
        "RequestClientCert",
        "RequireAnyClientCert",
        "RequireClientCert",
        "VerifyClientCertIfGiven",
        "RequireAndVerifyClientCert",
    ):
        found[f"type-{kind}"] = TLS + f"  client_auth_type: {kind}\n"
        found[f"type-ca-{kind}"] = (
            TLS + f"  client_auth_type: {kind}\n  client_ca_file: server.crt\n"
        )
    return found


def _http() -> dict[str, str]:
    headers = HTTP + "  headers:\n    "
    found = {
        "unknown": HTTP + "  http3: true\n",
        "headers-none": HTTP + "  headers:\n",
        "headers-braces": HTTP + "  headers: {}\n",
        "headers-list": HTTP + "  headers: [X-Frame-Options]\n",
        "headers-all": headers + "Strict-Transport-Security: max-age=1\n"
        "    X-Content-Type-Options: nosniff\n    X-Frame-Options: deny\n"
        "    X-XSS-Protection: '0'\n    Content-Security-Policy: default-src 'self'\n",
        "header-number": headers + "X-XSS-Protection: 0\n",
        "header-null": headers + "X-XSS-Protection:\n",
        "header-null-fixed": headers + "X-Frame-Options:\n",
        "header-sameorigin": headers + "X-Frame-Options: sameorigin\n",
        "header-allow": headers + "X-Frame-Options: allow\n",
        "header-upper": headers + "X-Frame-Options: DENY\n",
        "header-sniff": headers + "X-Content-Type-Options: sniff\n",
        "header-case": headers + "x-frame-options: deny\n",
        "header-other": headers + "X-Powered-By: us\n",
        "header-list": headers + "X-XSS-Protection: [a]\n",
        "header-twice": headers + "X-XSS-Protection: a\n    X-XSS-Protection: b\n",
        "header-lines": headers + '"X-XSS-Protection": "a\\nSet-Cookie: b"\n',
        "header-control": headers + 'X-XSS-Protection: "a\\u0007"\n',
        "header-unicode": headers + "X-XSS-Protection: é\n",
        "header-block": headers + "Content-Security-Policy: |\n      default-src 'self'\n",
    }
    for value in (
        "true",
        "True",
        "TRUE",
        "yes",
        "Yes",
        "on",
        "y",
        "Y",
        "false",
        "no",
        "off",
        "n",
        "N",
        "~",
        "''",
        "'true'",
        "!!bool true",
        "!!str true",
        "1",
        "0",
        "tRUE",
        "sometimes",
        "[]",
        "{}",
    ):
        found[f"http2-{value}"] = HTTP + f"  http2: {value}\n"
    found["http2-off-tls"] = TLS + HTTP + "  http2: false\n"
    return found


def _users() -> dict[str, str]:
    found = {
        "none": "basic_auth_users: {}\n",
        "two": USERS + f"  alice: {HASH}\n  bob: {HASH}\n",
        "flow": f"{{basic_auth_users: {{alice: '{HASH}'}}}}",
        "anchor": USERS + f"  alice: &hash {HASH}\n  bob: *hash\n",
        "twice": USERS + f"  alice: {HASH}\n  alice: {HASH}\n",
        "hash-null": USERS + "  alice:\n",
        "hash-list": USERS + f"  alice: [{HASH}]\n",
        "hash-plain": USERS + "  alice: secret\n",
        "hash-short": USERS + f"  alice: {HASH[:50]}\n",
        "hash-59": USERS + f"  alice: {HASH[:-1]}\n",
        "hash-61": USERS + f"  alice: {HASH}A\n",
        "hash-alphabet": USERS + f"  alice: '{HASH[:-1]}!'\n",
        "hash-blank-before": USERS + f"  alice: ' {HASH}'\n",
        "hash-blank-after": USERS + f"  alice: '{HASH} '\n",
        "hash-block": USERS + f"  alice: |\n    {HASH}\n",
        "hash-block-strip": USERS + f"  alice: |-\n    {HASH}\n",
        "hash-binary": USERS + f"  alice: !!binary {HASH}\n",
        "second-bad": USERS + f"  alice: {HASH}\n  bob: secret\n",
        "with-tls": TLS + USERS + f"  alice: {HASH}\n",
    }
    for kind in ("2", "2a", "2b", "2x", "2y", "2z", "2A", "2Y", "1", "5", "6", "3a", "", "2ay"):
        found[f"kind-{kind}"] = USERS + f"  alice: '${kind}$04${BODY}'\n"
    for cost in ("00", "03", "04", "4", "05", "10", "12", "15", "31", "32", "99", "-4", "0x", " 4"):
        found[f"cost-{cost}"] = USERS + f"  alice: '$2y${cost}${BODY}'\n"
    for user in (
        "''",
        "~",
        "null",
        "1234",
        "0x10",
        "1.5",
        "true",
        "'a b'",
        '"a:b"',
        "é",
        '"a\\nb"',
        '"\\0"',
        "!!binary YWxpY2U=",
        "!!str 1",
        "? [a]",
        "{a: b}",
        "2026-01-01",
        ".inf",
        "=",
    ):
        found[f"name-{user}"] = USERS + f"  {user} : {HASH}\n"
    return found


def _rates() -> dict[str, str]:
    found = {
        "empty": "rate_limit: {}\n",
        "burst-alone": "rate_limit: {burst: 5}\n",
        "interval-alone": "rate_limit: {interval: 1s}\n",
        "unknown": "rate_limit: {every: 1s}\n",
        "twice": "rate_limit: {burst: 1, burst: 2}\n",
    }
    for interval in (
        "1s",
        "500ms",
        "1m1.5s",
        "1h",
        "1us",
        "1µs",
        "1ns",
        "0",
        "0s",
        "0.0",
        "00",
        "+0",
        "-0",
        "1",
        "5",
        "1.0",
        "1e9",
        "-1s",
        "+1s",
        "1 s",
        "s",
        "1d",
        "1S",
        ".5s",
        "1.s",
        "1.5h",
        "9999999h",
        "2562047h",
        "2562048h",
        "1e3s",
        "''",
        "~",
        "[]",
        "1s1s",
        "'1s'",
        "true",
        "1 fortnight",
        "0x1s",
        "1_000s",
        "9223372036854775807",
        "9223372036854775808ns",
    ):
        found[f"interval-{interval}"] = f"rate_limit: {{interval: {interval}, burst: 5}}\n"
    for burst in (
        "1",
        "20",
        "0",
        "-1",
        "+1",
        "1.0",
        "1.5",
        ".5",
        "1e3",
        "0x10",
        "0o10",
        "010",
        "0b11",
        "1_000",
        "1:30",
        "many",
        "''",
        "'5'",
        "~",
        "[]",
        "true",
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "100000000000000000000",
        "!!int '5'",
        "!!float 5",
        "1e400",
        ".inf",
        ".nan",
    ):
        found[f"burst-{burst}"] = f"rate_limit: {{interval: 1s, burst: {burst}}}\n"
        found[f"burst-unused-{burst}"] = f"rate_limit: {{burst: {burst}}}\n"
    return found


def _yaml() -> dict[str, str]:
    merged = f"x: &x\n  alice: {HASH}\n"
    return {
        "directive-11": "%YAML 1.1\n---\n{}\n",
        "directive-12": "%YAML 1.2\n---\n{}\n",
        "directive-20": "%YAML 2.0\n---\n{}\n",
        "directive-tag": "%TAG ! tag:example.com,2026:\n---\n{}\n",
        "directive-unknown": "%WHAT 1\n---\n{}\n",
        "merge-unknown": merged + "basic_auth_users: *x\n",
        "merge": USERS + f"  <<: {{alice: {HASH}}}\n  bob: {HASH}\n",
        "merge-same": USERS + f"  <<: {{alice: {HASH}}}\n  alice: {HASH}\n",
        "merge-same-before": USERS + f"  alice: {HASH}\n  <<: {{alice: {HASH}}}\n",
        "merge-twice": USERS + f"  <<: {{alice: {HASH}}}\n  <<: {{bob: {HASH}}}\n",
        "merge-list": USERS + f"  <<: [{{alice: {HASH}}}, {{bob: {HASH}}}]\n",
        "merge-list-same": USERS + f"  <<: [{{alice: {HASH}}}, {{alice: {HASH}}}]\n",
        "merge-text": USERS + "  <<: alice\n",
        "merge-null": USERS + "  <<: ~\n",
        "merge-tls": "tls_server_config:\n  <<: {cert_file: server.crt}\n  key_file: server.key\n",
        "merge-tls-same": "tls_server_config:\n  <<: {cert_file: none.crt}\n"
        "  cert_file: server.crt\n  key_file: server.key\n",
        "merge-top": f"<<: {{basic_auth_users: {{alice: {HASH}}}}}\n",
        "anchor-unknown": "basic_auth_users: *x\n",
        "anchor-self": "basic_auth_users: &x\n  alice: *x\n",
        "anchor-twice": USERS + f"  alice: &h {HASH}\n  bob: &h {HASH}\n  eve: *h\n",
        "tag-str": "tls_server_config:\n  cert_file: !!str server.crt\n  key_file: server.key\n",
        "tag-own": "tls_server_config:\n  cert_file: !x server.crt\n  key_file: server.key\n",
        "tag-int": "tls_server_config:\n  cert_file: !!int server.crt\n  key_file: server.key\n",
        "tag-binary": "tls_server_config:\n  cert_file: !!binary c2VydmVyLmNydA==\n"
        "  key_file: server.key\n",
        "tag-map": "tls_server_config: !!map {cert_file: server.crt, key_file: server.key}\n",
        "tag-set": "basic_auth_users: !!set {alice}\n",
        "escape": 'tls_server_config:\n  cert_file: "server\\x2ecrt"\n  key_file: server.key\n',
        "escape-bad": 'tls_server_config:\n  cert_file: "server\\qcrt"\n  key_file: server.key\n',
        "escape-large": 'tls_server_config:\n  cert_file: "\\U00110000"\n  key_file: server.key\n',
        "complex-key": "? tls_server_config\n: {}\n",
        "deep": "basic_auth_users: " + "[" * 200 + "]" * 200 + "\n",
        "deeper": "basic_auth_users: " + "[" * 20000 + "\n",
        "trailing-comma": "rate_limit: {burst: 1,}\n",
        "no-space": "rate_limit:{burst: 1}\n",
        "json": '{"rate_limit":{"burst":1,"interval":"1s"}}',
        "comment-after": "rate_limit: {} # nothing\n",
        "hash-in-word": "tls_server_config:\n  cert_file: server.crt#x\n  key_file: server.key\n",
        "multi-line": "tls_server_config:\n  cert_file: server\n    .crt\n  key_file: server.key\n",
        "bad-indent": "tls_server_config:\n    cert_file: server.crt\n  key_file: server.key\n",
    }

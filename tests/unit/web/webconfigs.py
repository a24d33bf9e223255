"""Web configuration files, good and bad, and the certificates that they name."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

ALICE = "$2y$04$AAAAAAAAAAAAAAAAAAAAAOl.gQzbFHgGCDsB4c7O1Cc0T0F3tc2LS"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"


def write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    for name in ("server", "other"):
        cert = authority.issue_cert("localhost", "127.0.0.1")
        (folder / f"{name}.crt").write_bytes(
            b"".join(blob.bytes() for blob in cert.cert_chain_pems)
        )
        (folder / f"{name}.key").write_bytes(cert.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "junk.pem").write_text("not a certificate\n")
    (folder / "empty.pem").write_text("")


def indented(path: Path) -> str:
    return "".join(f"    {line}\n" for line in path.read_text().splitlines())


def agreed(folder: Path) -> dict[str, tuple[bool, str]]:
    """Files on which promtool and we must be of one mind: name -> (good, content)."""
    good = {
        "empty": "",
        "comment": "# nothing\n",
        "no-values": "tls_server_config:\nhttp_server_config:\nbasic_auth_users:\n",
        "braces": "{}",
        "tls": TLS,
        "tls-absolute": f"tls_server_config: {{cert_file: {folder}/server.crt, "
        f"key_file: {folder}/server.key}}",
        "tls-quoted": "tls_server_config:\n  'cert_file': 'server.crt'\n"
        '  key_file: "server.key"\n',
        "tls-versions-only": "tls_server_config:\n  min_version: TLS12\n",
        "tls-versions": TLS + "  min_version: TLS10\n  max_version: TLS12\n",
        "tls-13": TLS + "  min_version: TLS13\n",
        "tls-ciphers": TLS + "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_RSA_WITH_AES_256_CBC_SHA, "
        "TLS_AES_128_GCM_SHA256]\n",
        "tls-cipher-13": TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]\n",
        "tls-no-ciphers": TLS + "  cipher_suites: []\n",
        "tls-no-order": TLS + "  prefer_server_cipher_suites: false\n",
        "tls-order-word": TLS + "  prefer_server_cipher_suites: yes\n",
        "tls-curve": TLS + "  curve_preferences: [CurveP256]\n",
        "tls-x25519": TLS + "  curve_preferences:\n  - X25519\n",
        "auth-none": TLS + "  client_auth_type: NoClientCert\n",
        "auth-blank": TLS + '  client_auth_type: ""\n',
        "auth-required": TLS
        + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n",
        "auth-host-roots": TLS + "  client_auth_type: RequireAndVerifyClientCert\n",
        "http2": "http_server_config:\n  http2: true\n",
        "no-http2": TLS + "http_server_config:\n  http2: false\n",
        "headers": "http_server_config:\n  headers:\n    Strict-Transport-Security: max-age=1\n"
        "    X-Content-Type-Options: nosniff\n    X-Frame-Options: deny\n"
        "    X-XSS-Protection: '0'\n    Content-Security-Policy: default-src 'self'\n",
        "header-number": "http_server_config:\n  headers:\n    X-XSS-Protection: 0\n",
        "header-frame": "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n",
        "no-headers": "http_server_config:\n  headers:\n",
        "users": f"basic_auth_users:\n  alice: {ALICE}\n  bob: {ALICE.replace('2y', '2b')}\n",
        "users-2a": f"basic_auth_users:\n  alice: {ALICE.replace('2y', '2a')}\n",
        "user-number": f"basic_auth_users:\n  1234: {ALICE}\n",
        "user-blank": f"basic_auth_users:\n  '': {ALICE}\n",
        "no-users": "basic_auth_users: {}\n",
        "anchors": f"basic_auth_users:\n  alice: &hash {ALICE}\n  bob: *hash\n",
        "flow": f"{{basic_auth_users: {{alice: '{ALICE}'}}}}",
    }
    bad = {
        "junk": "abcdef\nghijkl\n",
        "list": "- tls_server_config\n",
        "no-yaml": "tls_server_config: [\n",
        "tab": "tls_server_config:\n\tcert_file: a\n",
        "unknown": "tls_config: {}\n",
        "unknown-tls": TLS + "  cert_path: a\n",
        "unknown-http": "http_server_config:\n  http3: true\n",
        "case": "TLS_server_config: {}\n",
        "twice": TLS + TLS,
        "key-twice": TLS + "  cert_file: other.crt\n",
        "user-twice": f"basic_auth_users:\n  alice: {ALICE}\n  alice: {ALICE}\n",
        "section-is-text": "tls_server_config: on\n",
        "section-is-list": "http_server_config: [http2]\n",
        "cert-only": "tls_server_config:\n  cert_file: server.crt\n",
        "key-only": "tls_server_config:\n  key_file: server.key\n",
        "cert-blank": "tls_server_config:\n  cert_file: ''\n  key_file: server.key\n",
        "cert-missing": "tls_server_config:\n  cert_file: none.crt\n  key_file: server.key\n",
        "key-missing": "tls_server_config:\n  cert_file: server.crt\n  key_file: none.key\n",
        "cert-junk": "tls_server_config:\n  cert_file: junk.pem\n  key_file: server.key\n",
        "cert-empty": "tls_server_config:\n  cert_file: empty.pem\n  key_file: server.key\n",
        "key-junk": "tls_server_config:\n  cert_file: server.crt\n  key_file: junk.pem\n",
        "key-of-another": "tls_server_config:\n  cert_file: server.crt\n  key_file: other.key\n",
        "swapped": "tls_server_config:\n  cert_file: server.key\n  key_file: server.crt\n",
        "cert-folder": "tls_server_config:\n  cert_file: .\n  key_file: server.key\n",
        "cert-list": "tls_server_config:\n  cert_file: [server.crt]\n  key_file: server.key\n",
        "auth-without-cert": "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n",
        "auth-invented": TLS + "  client_auth_type: TrustEverybody\n",
        "auth-case": TLS + "  client_auth_type: requireandverifyclientcert\n",
        "ca-without-auth": TLS + "  client_ca_file: ca.pem\n",
        "ca-with-none": TLS + "  client_auth_type: NoClientCert\n  client_ca_file: ca.pem\n",
        "ca-missing": TLS
        + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: none.pem\n",
        "version": TLS + "  min_version: TLS14\n",
        "version-number": TLS + "  min_version: 1.2\n",
        "version-alone": "tls_server_config:\n  max_version: SSL30\n",
        "cipher": TLS + "  cipher_suites: [TLS_MADE_OF_SAND]\n",
        "cipher-openssl": TLS + "  cipher_suites: [ECDHE-RSA-AES128-GCM-SHA256]\n",
        "cipher-weak": TLS + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n",
        "cipher-text": TLS + "  cipher_suites: {a: b}\n",
        "curve": TLS + "  curve_preferences: [CurveP257]\n",
        "order": TLS + "  prefer_server_cipher_suites: maybe\n",
        "http2": "http_server_config:\n  http2: sometimes\n",
        "header": "http_server_config:\n  headers:\n    X-Powered-By: us\n",
        "header-case": "http_server_config:\n  headers:\n    x-frame-options: deny\n",
        "header-frame": "http_server_config:\n  headers:\n    X-Frame-Options: allow\n",
        "header-sniff": "http_server_config:\n  headers:\n    X-Content-Type-Options: sniff\n",
        "headers-list": "http_server_config:\n  headers: [X-Frame-Options]\n",
        "hash-plain": "basic_auth_users:\n  alice: secret\n",
        "hash-none": "basic_auth_users:\n  alice:\n",
        "hash-short": f"basic_auth_users:\n  alice: {ALICE[:50]}\n",
        "hash-cost": f"basic_auth_users:\n  alice: {ALICE.replace('$04$', '$03$')}\n",
        "hash-cost-high": f"basic_auth_users:\n  alice: {ALICE.replace('$04$', '$32$')}\n",
        "hash-version": f"basic_auth_users:\n  alice: {ALICE.replace('$2y$', '$6$x')}\n",
        "users-list": "basic_auth_users: [alice]\n",
    }
    return {f"good-{name}": (True, text) for name, text in good.items()} | {
        f"bad-{name}": (False, text) for name, text in bad.items()
    }


def stricter() -> dict[str, tuple[str, str]]:
    """Files that promtool passes and we refuse, with words of our reason."""
    files = {
        "request": (TLS + "  client_auth_type: RequestClientCert\n", "which Python cannot"),
        "any": (TLS + "  client_auth_type: RequireAnyClientCert\n", "which Python cannot"),
        "old-name": (TLS + "  client_auth_type: RequireClientCert\n", "which Python cannot"),
        "ca-junk": (
            TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: junk.pem\n",
            "no certificate in it",
        ),
        "ca-empty": (
            TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: empty.pem\n",
            "client_ca_file: no certificate in it",
        ),
        "no-version-left": (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "no client"),
        "no-cipher-left": (
            TLS + "  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n",
            "no client could connect",
        ),
        "hash-alphabet": (
            f"basic_auth_users:\n  alice: '{ALICE[:-1]}!'\n", "must be a bcrypt hash",
        ),
        "header-lines": (
            'http_server_config:\n  headers:\n    X-XSS-Protection: "a\\nSet-Cookie: b"\n',
            "one line",
        ),
    }  # fmt: skip
    if not hasattr(ssl.SSLContext, "set_groups"):
        files["curves"] = (TLS + "  curve_preferences: [X25519, CurveP256]\n", "one curve only")
    return files


def newer(folder: Path) -> dict[str, tuple[bool, str]]:
    """Files with keys that the promtool of Debian 12 is too old to know: name -> (good, content).

    They are the inline certificates, client_allowed_sans and rate_limit.
    """
    crt, key, ca = (indented(folder / name) for name in ("server.crt", "server.key", "ca.pem"))
    required = TLS + "  client_auth_type: RequireAndVerifyClientCert\n"
    return {
        "good-inline": (True, f"tls_server_config:\n  cert: |\n{crt}  key: |\n{key}"),
        "good-cert-inline": (True, f"tls_server_config:\n  cert: |\n{crt}  key_file: server.key\n"),
        "good-file-before-inline": (True, TLS + "  cert: junk\n  key: junk\n"),
        "good-ca-inline": (True, required + f"  client_ca: |\n{ca}"),
        "good-sans": (True, required + "  client_allowed_sans: [one, 10.0.0.1]\n"),
        "bad-inline": (False, "tls_server_config:\n  cert: junk\n  key: junk\n"),
        "bad-ca-inline": (False, TLS + f"  client_ca: |\n{ca}"),
        "bad-sans": (False, required + "  client_allowed_sans: {one: two}\n"),
        "good-rate": (True, "rate_limit:\n  interval: 1s\n  burst: 20\n"),
        "good-rate-compound": (True, "rate_limit: {interval: 1m1.5s, burst: 1}\n"),
        "good-rate-off": (True, "rate_limit:\n  interval: 0\n  burst: 0\n"),
        "bad-rate-unit": (False, "rate_limit: {interval: 1 fortnight, burst: 1}\n"),
        "bad-rate-burst": (False, "rate_limit: {interval: 1s, burst: many}\n"),
        "bad-rate-key": (False, "rate_limit: {every: 1s}\n"),
    }


def stricter_than_newer() -> dict[str, tuple[str, str]]:
    """Files with new keys that promtool passes and we refuse, with words of our reason."""
    return {
        "sans-alone": (TLS + "  client_allowed_sans: [one]\n", "has no effect without"),
        "rate-nothing": ("rate_limit: {interval: 1s, burst: 0}\n", "every request would be"),
        "rate-no-unit": ("rate_limit: {interval: 5, burst: 1}\n", "a duration with its unit"),
    }

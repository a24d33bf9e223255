"""Our reader of web configuration files beside Prometheus' own, the exporter-toolkit.

toolkit_verdicts.json holds the toolkit's verdicts.
"""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.web.webconfig import WebConfigError
from mps_exporter.web.webconfig.reload import load_web_config
from testing.web_configurations import filled_in, write_certificates

TABLE = Path(__file__).with_name("toolkit_verdicts.json")

STRICTER = {
    "another document": ("documents-second-document", "documents-second-junk"),
    "cannot start any token": ("documents-tab-after-colon", "documents-tab-comment"),
    "No such file or directory": ("tls-through-missing",),
    "unknown curve ''": ("tls-curve-null",),
    "one curve only": ("tls-curve-two", "tls-curve-twice"),
    "EE_KEY_TOO_SMALL": ("files-rsa1024",),
    "no PEM data in one of them": ("files-second-broken",),
    "only suites of TLS 1.3": ("versions-max-12-suites-13",),
    "is above max_version": (
        "versions-TLS11-TLS10",
        "versions-TLS12-TLS10",
        "versions-TLS12-TLS11",
        "versions-TLS13-TLS10",
        "versions-TLS13-TLS11",
        "versions-TLS13-TLS12",
    ),
    "is below TLS12 with client certificates": ("versions-TLS10-mutual", "versions-TLS11-mutual"),
    "no certificate in it": (
        "clients-ca-inline-junk",
        "clients-ca-junk.pem",
        "clients-ca-broken.pem",
        "clients-ca-der.crt",
        "clients-ca-server.key",
        "clients-ca-empty.pem",
        "clients-ca-half-broken.pem",
    ),
    "has no effect without a client_auth_type": (
        "clients-sans-without-type",
        "clients-sans-none-without-type",
    ),
    "begins with a byte order mark": ("clients-ca-bom.crt",),
    "which Python cannot": (
        "clients-type-RequestClientCert",
        "clients-type-ca-RequestClientCert",
        "clients-type-RequireAnyClientCert",
        "clients-type-ca-RequireAnyClientCert",
        "clients-type-RequireClientCert",
        "clients-type-ca-RequireClientCert",
    ),
    "one line of printable characters": (
        "http-header-lines",
        "http-header-control",
        "http-header-block",
    ),
    "must be true or false": ("http-http2-y", "http-http2-Y", "http-http2-n", "http-http2-N"),
    "must be a bcrypt hash": (
        "users-hash-59",
        "users-hash-61",
        "users-hash-alphabet",
        "users-hash-blank-after",
        "users-hash-block",
        "users-kind-2",
        "users-kind-2x",
        "users-kind-2z",
        "users-kind-2A",
        "users-kind-2Y",
        "users-kind-1",
    ),
    "a key must be a plain word": (
        "users-name-~",
        "users-name-null",
        "users-name-!!binary YWxpY2U=",
    ),
    "must be at least 1": (
        "rates-interval-alone",
        "rates-burst-0",
        "rates-burst--1",
        "rates-burst-~",
    ),
    "a duration with its unit": (
        "rates-interval-0.0",
        "rates-interval-00",
        "rates-interval-+0",
        "rates-interval--0",
        "rates-interval-1",
        "rates-interval-5",
        "rates-interval-1.0",
        "rates-interval-1e9",
        "rates-interval--1s",
        "rates-interval-+1s",
        "rates-interval-9223372036854775807",
    ),
    "must be a whole number": (
        "rates-burst-1.0",
        "rates-burst-unused-1.0",
        "rates-burst-1.5",
        "rates-burst-unused-1.5",
        "rates-burst-.5",
        "rates-burst-unused-.5",
        "rates-burst-1e3",
        "rates-burst-unused-1e3",
        "rates-burst-0o10",
        "rates-burst-unused-0o10",
    ),
    "directives (%)": ("yaml-directive-11", "yaml-directive-tag"),
    "merge keys (<<)": (
        "yaml-merge",
        "yaml-merge-twice",
        "yaml-merge-list",
        "yaml-merge-tls",
        "yaml-merge-tls-same",
        "yaml-merge-top",
    ),
    "second occurrence": ("yaml-anchor-twice",),
    "has a tag": (
        "rates-burst-!!float 5",
        "rates-burst-unused-!!float 5",
        "yaml-tag-own",
        "yaml-tag-binary",
    ),
}
"""What the toolkit takes and we refuse: words of our reason -> configurations. The reasons stand in
docs/web-config.md."""


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(TABLE.read_text())
    return read


@pytest.fixture(scope="module")
def refusals(table: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Configuration -> why we refuse it; "": we do not."""
    folder = tmp_path_factory.mktemp("web")
    write_certificates(folder)
    path = folder / "web.yml"
    found = {}
    for name, verdict in table["verdicts"].items():
        text = filled_in(verdict["text"], folder)
        path.write_text(text, "utf-8", "surrogateescape", newline="")
        try:
            load_web_config(str(path))
        except WebConfigError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def test_nothing_is_taken_that_the_toolkit_refuses(
    table: dict[str, Any], refusals: dict[str, str]
) -> None:
    looser = {
        name: verdict["error"]
        for name, verdict in table["verdicts"].items()
        if verdict["error"] and not refusals[name]
    }
    assert looser == {}


def test_what_is_refused_beyond_the_toolkit_is_listed(
    table: dict[str, Any], refusals: dict[str, str]
) -> None:
    stricter = {
        name: refusals[name]
        for name, verdict in table["verdicts"].items()
        if refusals[name] and not verdict["error"]
    }
    listed = {name: words for words, names in STRICTER.items() for name in names}
    if hasattr(ssl.SSLContext, "set_groups"):  # Python 3.15
        listed = {name: words for name, words in listed.items() if words != "one curve only"}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve("X25519")
    except ssl.SSLError:  # Python 3.11.2, that of Debian 12
        listed["tls-curve-X25519"] = "OpenSSL on this host refuses it"
    assert stricter.keys() == listed.keys()
    for name, reason in stricter.items():
        assert listed[name] in reason

"""Files that no honest operator writes, but that a rotation or a slip of a tool leaves."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest

from mps_exporter.web.webconfig import WebConfigError, WebConfigWatch
from mps_exporter.web.webconfig import reload as watching
from mps_exporter.web.webconfig.reload import load
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.web.webconfigs import TLS, write_certificates

MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_certificates(tmp_path)
    return tmp_path


def refused(folder: Path, text: str) -> str:
    path = folder / "web.yml"
    path.write_text(text)
    with pytest.raises(WebConfigError) as error:
        load(str(path))
    assert str(error.value).startswith(str(path))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MUTUAL.replace("ca.pem", "empty.pem"), "client_ca_file: no certificate in it"),
        ("[" * 3000, "nested too deeply"),
        (TLS.replace("server.crt", '"a\\0b"'), "cert_file: no file has a NUL in its name"),
        (TLS.replace("server.crt", '"\\ud800"'), "cert_file: cannot read"),
        ('basic_auth_users: {a: "\\UFFFFFFFF"}', "no valid YAML"),
    ],
    ids=["empty-ca", "deep", "nul", "surrogate", "beyond-unicode"],
)
def test_each_is_refused_with_the_reason(folder: Path, text: str, reason: str) -> None:
    assert reason in refused(folder, text)


def test_what_the_policy_of_the_host_forbids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ssl.SSLError(1, "[SSL: NO_CIPHER_MATCH] no cipher match")

    monkeypatch.setattr(ssl.SSLContext, "set_ciphers", refuse)
    suite = "TLS_RSA_WITH_AES_128_CBC_SHA"
    words = refused(folder, TLS + f"  cipher_suites: [{suite}]\n")
    assert "cipher_suites: OpenSSL on this host refuses it" in words
    assert "no cipher match" in words


async def test_a_rotation_that_truncates_first_changes_nothing_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "CHECK_INTERVAL_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "mps_exporter.web.webconfig")
    (folder / "web.yml").write_text(MUTUAL)
    authority = (folder / "ca.pem").read_bytes()
    watch = WebConfigWatch.start(str(folder / "web.yml"))
    before = await watch.tls_context()

    (folder / "ca.pem").write_bytes(b"")
    during = [await asyncio.wait_for(watch.tls_context(), PATIENCE_SECONDS) for _ in range(3)]
    (folder / "ca.pem").write_bytes(authority)
    after = await watch.tls_context()

    watch.close()
    assert during == [before] * 3
    assert after not in {None, before}
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert await watch.tls_context() is after  # also when the program is just ending

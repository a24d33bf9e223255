"""Files that no honest operator writes, but that a rotation or a slip of a tool leaves."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from pathlib import Path

import pytest

from mps_exporter.web.webconfig import WebConfigError, WebConfigWatch
from mps_exporter.web.webconfig import reload as watching
from mps_exporter.web.webconfig.reload import Loaded, load
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.web.webconfigs import (
    TLS,
    agreed,
    newer,
    stricter,
    stricter_than_newer,
    write_certificates,
)

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
        ("rate_limit: {interval: 1s, burst: 0}", "rate_limit.burst: must be at least 1"),
    ],
    ids=["empty-ca", "deep", "nul", "surrogate", "beyond-unicode", "no-burst"],
)
def test_each_is_refused_with_the_reason(folder: Path, text: str, reason: str) -> None:
    assert reason in refused(folder, text)


def test_files_that_promtool_knows_are_judged_the_same_without_it(folder: Path) -> None:
    files = {**agreed(folder), **{f"{name}-newer": one for name, one in newer(folder).items()}}
    for name, (good, text) in files.items():
        (folder / f"{name}.yml").write_text(text)
        try:
            load(str(folder / f"{name}.yml"))
        except WebConfigError:
            assert not good, name
        else:
            assert good, name
    for text, reason in (*stricter().values(), *stricter_than_newer().values()):
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


def test_no_client_may_make_the_server_negotiate_again(folder: Path) -> None:
    # Each time costs the server a private-key operation, and the client nothing.
    (folder / "web.yml").write_text(TLS)
    context = load(str(folder / "web.yml")).context
    assert context is not None
    assert context.options & ssl.OP_NO_RENEGOTIATION


async def test_while_the_files_are_read_others_get_what_is_in_force(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "CHECK_INTERVAL_SECONDS", 0.0)
    path = folder / "web.yml"
    path.write_text("rate_limit: {interval: 1s, burst: 5}\n")
    watch = WebConfigWatch.start(str(path))
    path.write_text("rate_limit: {interval: 1s, burst: 10}\n")
    entered, released = threading.Event(), threading.Event()
    looks = []

    def slow(path: str) -> Loaded:
        looks.append(path)
        entered.set()
        released.wait(PATIENCE_SECONDS)
        return load(path)

    monkeypatch.setattr(watching, "load", slow)
    first = asyncio.create_task(watch.config())
    assert await asyncio.to_thread(entered.wait, PATIENCE_SECONDS)
    others = [asyncio.create_task(watch.config()) for _ in range(3)]
    answered, _ = await asyncio.wait(others, timeout=PATIENCE_SECONDS)
    reading = not first.done()
    released.set()
    assert answered == set(others)
    assert reading
    assert [other.result().rate_burst for other in others] == [5] * 3
    assert (await first).rate_burst == 10
    assert len(looks) == 1
    watch.close()

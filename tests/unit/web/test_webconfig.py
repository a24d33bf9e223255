"""Configuration files: invalid, changed while the program runs, unreachable; and passwords."""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_exporter.web.guard import network_of
from mps_exporter.web.webconfig import WebConfigWatch, load_web_config
from mps_exporter.web.webconfig.auth import Passwords
from mps_exporter.web.webconfig.config import TLS12_SUITES, WebConfigError
from testing.waiting import PATIENCE_SECONDS, until
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import connected, served
from tests.unit.web.webconfigs import MUTUAL, TLS, write_certificates

HEADERS = "http_server_config: {headers: {X-XSS-Protection: '0'}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_certificates(tmp_path)
    return tmp_path


def refused(folder: Path, text: str) -> str:
    path = folder / "web.yml"
    path.write_text(text)
    with pytest.raises(WebConfigError) as error:
        load_web_config(str(path))
    assert str(error.value).startswith(str(path))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MUTUAL.replace("ca.pem", "empty.pem"), "client_ca_file: no certificate in it"),
        ("[" * 25, "nested too deeply"),
        ("\n".join(" " * n + "a:" for n in range(25)), "nested too deeply"),
        ("? [a]\n: b", "a key must be a plain word"),
        ("a: &a [1]\n" + "".join(f"{n}: &{n} [*a, *a]\n" for n in range(99)), "unknown key"),
        ("basic_auth_users: &a {b: [*a]}", "basic_auth_users: must be a string"),
        ("http_server_config: {http3: true}", "http_server_config: unknown key http3"),
        ("tls_server_config: {cipher_suites: [a, [b]]}", "cipher_suites: must be a string"),
        (TLS.replace("server.crt", '"a\\0b"'), "cert_file: cannot read"),
        (TLS.replace("server.crt", '"\\ud800"'), "cert_file: cannot read"),
        ('basic_auth_users: {a: "\\UFFFFFFFF"}', "no valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(folder: Path, text: str, reason: str) -> None:
    assert reason in refused(folder, text)


async def test_a_truncated_file_keeps_the_active_configuration(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mps_exporter.web.webconfig")
    (folder / "web.yml").write_text(MUTUAL)
    authority = (folder / "ca.pem").read_bytes()
    watch = WebConfigWatch(str(folder / "web.yml"))
    before = watch.active

    (folder / "ca.pem").write_bytes(b"")
    for _ in range(3):
        await watch.check_files()
        assert watch.active is before
    (folder / "ca.pem").write_bytes(authority)
    await watch.check_files()

    assert watch.active is before
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


async def test_tls_that_is_switched_on_while_the_program_runs_is_an_error_of_this_file(
    folder: Path,
) -> None:
    path = folder / "web.yml"
    path.write_text("")
    watch = WebConfigWatch(str(path))
    path.write_text(TLS)
    await watch.check_files()
    assert str(watch.error).startswith(f"{path}: tls_server_config: TLS cannot be switched on")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        make_huge,
    ],
)
async def test_what_is_no_file_of_a_useful_size_is_refused_at_once(
    folder: Path, make: Callable[[Path], object]
) -> None:
    path = folder / "web.yml"
    path.write_text(HEADERS)
    watch = WebConfigWatch(str(path))
    path.unlink()
    make(path)
    await asyncio.wait_for(watch.check_files(), PATIENCE_SECONDS)
    assert watch.error is not None
    assert watch.active.config.http_server_config.headers == {"X-XSS-Protection": "0"}


async def test_a_change_that_keeps_size_and_time_is_seen(folder: Path) -> None:
    path = folder / "web.yml"
    path.write_text(HEADERS)
    watch = WebConfigWatch(str(path))
    stat = path.stat()
    path.write_text(HEADERS.replace("0", "1"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    await watch.check_files()
    assert watch.active.config.http_server_config.headers == {"X-XSS-Protection": "1"}


def test_only_suites_that_go_has_are_on(folder: Path) -> None:
    (folder / "web.yml").write_text(TLS)
    context = load_web_config(str(folder / "web.yml")).context
    assert context is not None
    names = {suite["name"] for suite in context.get_ciphers() if "TLS_" not in suite["name"]}
    assert names == set(TLS12_SUITES.values())
    # Each negotiation costs the server a private-key operation, and the client nothing.
    assert context.options & ssl.OP_NO_RENEGOTIATION


async def test_a_connection_is_encrypted(folder: Path) -> None:
    (folder / "web.yml").write_text(TLS)
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    async with (
        served(FakeBackend(), web_config_file=str(folder / "web.yml")) as (addresses, _),
        connected(addresses[0], ssl=trust) as (_reader, writer),
    ):
        assert writer.get_extra_info("cipher")


# ------------------------------------------------------------------------------ passwords


USERS = {"alice": "$2b$04$" + "." * 53}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stands in for bcrypt: the passwords that were checked."""
    order: list[bytes] = []

    def check(_: str, password: bytes) -> bool:
        order.append(password)
        return password == b"right"

    monkeypatch.setattr("mps_exporter.web.webconfig.auth.has_hash", check)
    return order


async def test_a_right_password_passes_a_flood_from_another_address(asked: list[bytes]) -> None:
    passwords = Passwords()
    flood = [
        asyncio.create_task(passwords.verify(USERS, "alice", b"wrong %d" % n, "192.0.2.1"))
        for n in range(200)
    ]
    await until(lambda: asked)
    assert await passwords.verify(USERS, "alice", b"right", "192.0.2.2")
    assert asked.index(b"right") <= 2
    assert await passwords.verify(USERS, "alice", b"right", "192.0.2.1")  # it is known now
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_wrong_password_delays_the_next_one(
    asked: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mps_exporter.web.webconfig.auth.WRONG_PASSWORD_SECONDS", 0.2)
    passwords = Passwords()
    began = asyncio.get_running_loop().time()
    wrong = (passwords.verify(USERS, "alice", b"wrong %d" % n, "192.0.2.1") for n in range(3))
    assert not any(await asyncio.gather(*wrong))
    assert asyncio.get_running_loop().time() - began >= 0.6
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("address", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("", "", True),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, other: str, same: bool) -> None:
    assert (network_of(address) == network_of(other)) == same

"""The active web configuration of a live server: TLS, client certificates, passwords, limits."""

import asyncio
import base64
import gc
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
from aiohttp import ClientConnectorError, ClientError, ClientSession

from mps_exporter.flags import Settings
from mps_exporter.web.app import create_app
from mps_exporter.web.webconfig.config import WebConfigError
from testing.waiting import PATIENCE_SECONDS, until_awaited
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served
from tests.unit.web.webconfigs import MUTUAL, TLS

HTTP1 = "http_server_config:\n  http2: false\n"
LONG = "p" * 72


def hashed(password: str, rounds: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds)).decode()


class Site:
    """A folder with certificates and a configuration file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        self.issue("server", "localhost", "127.0.0.1")
        self.config = folder / "web.yml"

    def issue(self, name: str, *identities: str, expires: datetime | None = None) -> None:
        cert = self.authority.issue_cert(*identities, not_after=expires)
        chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
        # The key first, then the certificate: for a moment they do not belong together.
        replaced(self.folder / f"{name}.key", cert.private_key_pem.bytes())
        replaced(self.folder / f"{name}.crt", chain)

    def write(self, text: str) -> None:
        replaced(self.config, text.encode())

    def client(self, name: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if name is not None:
            context.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return context


def replaced(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the files a hundred times a second."""
    monkeypatch.setattr("mps_exporter.web.webconfig.CONFIG_CHECK_INTERVAL_SECONDS", 0.01)


@asynccontextmanager
async def visited(site: Site, text: str) -> AsyncIterator[str]:
    site.write(text)
    async with served(FakeBackend(), web_config_file=str(site.config)) as (shown, _):
        yield shown[0]


async def get(
    address: str,
    context: ssl.SSLContext | None = None,
    login: tuple[str, str] | None = None,
    path: str = "/metrics",
    **headers: str,
) -> tuple[int, str, Mapping[str, str]]:
    """Send one request on a new connection; return status, body and headers."""
    if login is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(":".join(login).encode()).decode()
    scheme = "http" if context is None else "https"
    async with (
        ClientSession() as session,
        session.get(f"{scheme}://{address}{path}", ssl=context or True, headers=headers) as reply,
    ):
        return reply.status, await reply.text(), dict(reply.headers)


async def status(*arguments: Any, **more: Any) -> int:
    return (await get(*arguments, **more))[0]


async def until_status(expected: int, *arguments: Any, **more: Any) -> None:
    """Wait until a changed file is active, which such a request shows."""

    async def is_active() -> bool:
        with suppress(ClientError):
            return await status(*arguments, **more) == expected
        return False

    await until_awaited(is_active)


# ------------------------------------------------------------------------------------ TLS


async def test_tls(site: Site) -> None:
    async with visited(site, TLS) as address:
        assert (await get(address, site.client()))[:2] == (200, "mps_control_up 1\n")
        with pytest.raises(ClientError):
            await get(address)  # no TLS
        with pytest.raises(ClientConnectorError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(address, ssl.create_default_context())  # its authority is unknown


SUITE = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"


@pytest.mark.parametrize(
    "settings", ["  min_version: TLS13\n", f"  max_version: TLS12\n  cipher_suites: [{SUITE}]\n"]
)
async def test_allowed_versions_and_cipher_suites(site: Site, settings: str) -> None:
    async with visited(site, TLS + settings + HTTP1) as address:
        other = site.client()
        other.maximum_version = ssl.TLSVersion.TLSv1_2
        other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        with pytest.raises(ClientError):
            await get(address, other)
        assert await status(address, site.client()) == 200


async def test_a_rotated_certificate_is_taken_up(site: Site, quick: None) -> None:
    async with visited(site, TLS) as address:
        assert await status(address, site.client()) == 200
        site.issue("server", "elsewhere.example")

        async def has_other_name() -> bool:
            try:
                await get(address, site.client())
            except ClientConnectorError as error:
                return "IP address mismatch" in str(error)
            return False

        await until_awaited(has_other_name)
        site.issue("server", "127.0.0.1")
        await until_status(200, address, site.client())


# ------------------------------------------------------------------- client certificates


async def test_client_certificates(site: Site) -> None:
    site.issue("client", "scraper.example")
    site.issue("late", "scraper.example", expires=datetime.now(UTC) - timedelta(days=1))
    other = trustme.CA().issue_cert("scraper.example")
    (site.folder / "stranger.key").write_bytes(other.private_key_pem.bytes())
    (site.folder / "stranger.crt").write_bytes(other.cert_chain_pems[0].bytes())
    async with visited(site, MUTUAL) as address:
        assert await status(address, site.client("client")) == 200
        for name in (None, "late", "stranger"):
            with pytest.raises(ClientError):
                await get(address, site.client(name))


async def test_names_of_clients(site: Site) -> None:
    site.issue("dns", "scraper.example")
    site.issue("ip", "2001:db8::1")
    site.issue("mail", "ops@example.com")
    site.issue("wrong", "other.example")
    text = MUTUAL + '  client_allowed_sans: [scraper.example, "2001:db8::1", ops@example.com]\n'
    async with visited(site, text) as address:
        for name in ("dns", "ip", "mail"):
            assert await status(address, site.client(name)) == 200
        refused = await get(address, site.client("wrong"))
        assert (refused[0], refused[1].split(":")[0]) == (403, "403 Forbidden")
    async with visited(site, MUTUAL + "  client_allowed_sans: []\n") as address:
        assert await status(address, site.client("dns")) == 403


async def test_an_intermediate_authority_may_be_trusted_alone(site: Site) -> None:
    issuing = site.authority.create_child_ca()
    client = issuing.issue_cert("scraper.example")
    client.private_key_and_cert_chain_pem.write_to_path(str(site.folder / "client.pem"))
    issuing.cert_pem.write_to_path(str(site.folder / "issuing.pem"))
    async with visited(site, MUTUAL.replace("ca.pem", "issuing.pem")) as address:
        context = site.client()
        context.load_cert_chain(site.folder / "client.pem")
        assert await status(address, context) == 200


async def test_a_certificate_if_there_is_one(site: Site) -> None:
    site.issue("client", "scraper.example")
    optional = TLS + "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem\n"
    async with visited(site, optional) as address:
        assert await status(address, site.client()) == 200
        assert await status(address, site.client("client")) == 200
    async with visited(site, optional + "  client_allowed_sans: [scraper.example]\n") as address:
        assert await status(address, site.client()) == 403
        assert await status(address, site.client("client")) == 200


# ------------------------------------------------------------------------------ passwords


ALICE = f"basic_auth_users:\n  alice: {hashed('right')}\n"
RAW = ["", "Basic", "Basic !!!", "Basic YWxpY2U=", "Basic  YWxpY2U6cmlnaHQ=", "Bearer x"]
PATHS = ("/", "/metrics", "/api/v1/status", "/api/v1/events", "/static/status.css")


async def test_passwords(site: Site) -> None:
    """Only 72 bytes of a password count, as in Go."""
    text = f"{ALICE}  léa: {hashed('pässwörd:x')}\n  long: {hashed(LONG)}\n"
    right = ("alice", "right"), ("léa", "pässwörd:x"), ("long", LONG), ("long", f"{LONG}more")
    wrong = ("alice", "wrong"), ("bob", "right"), ("", ""), ("léa", "right"), ("long", LONG[:-1])
    async with visited(site, text) as address:
        for login in right:
            assert await status(address, login=login) == 200
        for login in wrong:
            assert await status(address, login=login) == 401
        assert await status(address, login=("alice", "x" * 4000)) == 401
        for raw in (*RAW, "Basic " + "A" * 999):
            assert await status(address, Authorization=raw) == 401


async def test_every_path_needs_the_password(site: Site) -> None:
    async with visited(site, ALICE) as address:
        for path in (*PATHS, "/-/healthy", "/-/ready", "/nothing"):
            code, _, headers = await get(address, path=path)
            assert (code, headers["WWW-Authenticate"]) == (401, "Basic")
            if path != "/nothing":
                assert await status(address, path=path, Expect="x") == 401
        assert await status(address, login=("alice", "right"), Expect="x") == 200


async def test_timing_reveals_no_user_names(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown user costs what a wrong password costs: one check of a hash of the same cost."""
    checked: list[str] = []

    def checkpw(password: bytes, of: bytes) -> bool:
        checked.append(of.decode()[:7])
        return bool(bcrypt_checkpw(password, of))

    bcrypt_checkpw = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", checkpw)
    async with visited(site, f"basic_auth_users:\n  alice: {hashed('right', 5)}\n") as address:
        for user in ("alice", "mallory"):
            assert await status(address, login=(user, "wrong")) == 401
    assert checked == ["$2b$05$", "$2b$05$"]


async def test_users_come_and_go(site: Site, quick: None) -> None:
    async with visited(site, f"basic_auth_users:\n  alice: {hashed('one')}\n") as address:
        assert await status(address, login=("alice", "one")) == 200
        site.write(f"basic_auth_users:\n  alice: {hashed('two')}\n")
        await until_status(401, address, login=("alice", "one"))
        assert await status(address, login=("alice", "two")) == 200
        site.write("{}\n")
        await until_status(200, address)


# ------------------------------------------------------------------------------- headers


async def test_headers(site: Site) -> None:
    text = (
        "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
        "    Strict-Transport-Security: max-age=60\n    Content-Security-Policy: default-src *\n"
    )
    wanted = {
        "X-Frame-Options": "deny",
        "Strict-Transport-Security": "max-age=60",
        "Content-Security-Policy": "default-src *",
    }
    async with visited(site, text) as address:
        for path in ("/metrics", "/nothing"):
            assert wanted.items() <= (await get(address, path=path))[2].items()


# ------------------------------------------------------------------------- broken files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read: No such file or directory"),
        (TLS.replace("server.crt", "none"), "tls_server_config.cert_file: cannot read"),
        (f"basic_auth_users:\n  alice: not-a-hash\n  bob: {hashed('x')}\n", "alice"),
    ],
)
def test_a_broken_file_is_fatal_at_the_start(site: Site, text: str, words: str) -> None:
    if text:
        site.write(text)
    with pytest.raises(WebConfigError) as error:
        create_app(FakeBackend(settings=Settings(web_config_file=str(site.config))))
    assert str(error.value).startswith(f"{site.config}: ")
    assert words in str(error.value)
    assert "not-a-hash" not in str(error.value)


async def test_an_internal_error_leaves_no_client_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with visited(site, TLS) as address:
        assert await status(address, site.client()) == 200

        async def fail(*_: object, **__: object) -> None:
            raise ValueError("unforeseen")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "connect_accepted_socket", fail, raising=False)
        with pytest.raises(ClientError):
            await asyncio.wait_for(get(address, site.client()), PATIENCE_SECONDS)
        monkeypatch.undo()
        assert await status(address, site.client()) == 200
    assert [one.getMessage() for one in caplog.records] == ["a connection failed"]


async def test_a_handshake_that_is_never_finished(site: Site) -> None:
    site.write(TLS)
    options = {"web_config_file": str(site.config), "REQUEST_TIMEOUT_SECONDS": 0.5}
    async with served(FakeBackend(), **options) as (shown, _):
        host, _, port = shown[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01")
        assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        writer.close()
        assert await status(shown[0], site.client()) == 200


async def test_idle_connections_cost_no_tls(site: Site) -> None:
    def tls_connections() -> int:
        return sum(isinstance(one, SSLProtocol) for one in gc.get_objects())

    async with visited(site, TLS) as address:
        host, port = address.rsplit(":", 1)
        before = tls_connections()
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        assert await status(address, site.client()) == 200  # accepted after them
        assert tls_connections() - before < 10
        for _, writer in idle:
            writer.close()

"""Prometheus itself, at the locked door."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
from aiohttp import ClientError, ClientSession

from testing.ports import free_port
from testing.waiting import until_awaited
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served


def tool(name: str) -> str:
    here = Path(__file__).resolve().parents[2] / ".tools" / "bin" / name
    found = str(here) if here.exists() else shutil.which(name)
    assert found, f"{name} is missing: tools/install-system.sh servers brings it"
    return found


CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 900ms}}
scrape_configs:
- job_name: right
  scheme: https
  tls_config: {{ca_file: ca.pem, cert_file: client.crt, key_file: client.key}}
  basic_auth: {{username: prometheus, password: secret}}
  static_configs: [{{targets: ["{address}"]}}]
- job_name: wrong-password
  scheme: https
  tls_config: {{ca_file: ca.pem, cert_file: client.crt, key_file: client.key}}
  basic_auth: {{username: prometheus, password: guess}}
  static_configs: [{{targets: ["{address}"]}}]
- job_name: no-certificate
  scheme: https
  tls_config: {{ca_file: ca.pem}}
  basic_auth: {{username: prometheus, password: secret}}
  static_configs: [{{targets: ["{address}"]}}]
"""

EXPECTED = {"right": ("up", ""), "wrong-password": ("down", "401"), "no-certificate": ("down", "")}
"""The health of each target, and a word of its last error."""


async def targets(session: ClientSession, url: str) -> dict[str, dict[str, Any]]:
    try:
        async with session.get(f"{url}/api/v1/targets") as answer:
            found = (await answer.json())["data"]["activeTargets"]
    except ClientError:
        return {}
    return {target["labels"]["job"]: target for target in found}


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
async def test_prometheus_scrapes_through_tls_and_basic_auth(tmp_path: Path, name: str) -> None:
    program = tool(name)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name_of, identity in (("server", "127.0.0.1"), ("client", "prometheus.example")):
        cert = authority.issue_cert(identity)
        (tmp_path / f"{name_of}.key").write_bytes(cert.private_key_pem.bytes())
        (tmp_path / f"{name_of}.crt").write_bytes(cert.cert_chain_pems[0].bytes())
    password = bcrypt.hashpw(b"secret", bcrypt.gensalt(6)).decode()
    (tmp_path / "web.yml").write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
        "  client_allowed_sans: [prometheus.example]\n"
        f"basic_auth_users:\n  prometheus: {password}\n"
    )
    port = free_port()
    backend = FakeBackend()
    async with served(backend, config_file=str(tmp_path / "web.yml")) as (shown, _):
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(address=shown[0]))
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/db",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with ClientSession() as session:

                async def as_expected() -> bool:
                    found = await targets(session, f"http://127.0.0.1:{port}")
                    return len(found) == len(EXPECTED) and all(
                        found[job]["health"] == health and words in found[job]["lastError"]
                        for job, (health, words) in EXPECTED.items()
                    )

                await until_awaited(as_expected)
        finally:
            process.terminate()
            await process.wait()

    timeout, collectors = backend.collections[0]
    assert timeout is not None
    assert 0.81 / 2 <= timeout <= 0.81, "at most half of it may pass in the queue"
    assert collectors is None
    assert all(gzip for _, gzip in backend.renderings)

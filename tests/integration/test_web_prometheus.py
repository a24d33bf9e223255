"""Prometheus itself, at the locked door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
from aiohttp import ClientError, ClientSession

from tests.integration.test_web_config_conformance import tool
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served

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


async def targets(session: ClientSession, url: str) -> dict[str, dict[str, Any]]:
    try:
        async with session.get(f"{url}/api/v1/targets") as answer:
            found = (await answer.json())["data"]["activeTargets"]
    except ClientError:
        return {}
    return {target["labels"]["job"]: target for target in found}


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
async def test_prometheus_scrapes_through_tls_and_basic_auth(
    tmp_path: Path, name: str, unused_tcp_port_factory: Callable[[], int]
) -> None:
    program = tool(name)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for who, identity in (("server", "127.0.0.1"), ("client", "prometheus.example")):
        cert = authority.issue_cert(identity)
        (tmp_path / f"{who}.key").write_bytes(cert.private_key_pem.bytes())
        (tmp_path / f"{who}.crt").write_bytes(cert.cert_chain_pems[0].bytes())
    password = bcrypt.hashpw(b"secret", bcrypt.gensalt(6)).decode()
    (tmp_path / "web.yml").write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
        "  client_allowed_sans: [prometheus.example]\n"
        f"basic_auth_users:\n  prometheus: {password}\n"
    )
    port = unused_tcp_port_factory()
    backend = FakeBackend()
    async with served(backend, config_file=str(tmp_path / "web.yml")) as (shown, _):
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(address=shown[0]))
        process = await asyncio.create_subprocess_exec(
            program, f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/db", f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            found: dict[str, dict[str, Any]] = {}
            end = time.monotonic() + 30
            async with ClientSession() as session:
                while time.monotonic() < end:
                    found = await targets(session, f"http://127.0.0.1:{port}")
                    if found and all(one["health"] != "unknown" for one in found.values()):
                        break
                    await asyncio.sleep(0.2)
        finally:
            process.terminate()
            await process.wait()

    assert {job: one["health"] for job, one in found.items()} == {
        "right": "up",
        "wrong-password": "down",
        "no-certificate": "down",
    }, {job: one["lastError"] for job, one in found.items()}
    assert "401" in found["wrong-password"]["lastError"]
    timeout, collectors = backend.collections[0]
    assert timeout == pytest.approx(0.81)
    assert collectors is None
    assert all(gzip for _, gzip in backend.renderings)

"""Real Prometheus servers scrape the real program, which replays a real host."""

import re
import shutil
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from testing.commands import output_of
from testing.page import text_of
from testing.player import RECORDINGS, Player
from testing.program import running
from testing.prometheus_programs import TREE, program, prometheus
from testing.waiting import until
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served
from tests.unit.web.webconfigs import MUTUAL, write_certificates

INCIDENTS = ("limits", "wait-served", "fault-held", "server-killed")
EACH_PROMETHEUS = pytest.mark.parametrize("name", ["prometheus", "prometheus3"])


@pytest.mark.parametrize("incident", INCIDENTS)
async def test_promtool_finds_nothing_in_a_page(incident: str) -> None:
    player = Player(RECORDINGS / f"{incident}.rec.gz")
    text = text_of((await player.to_end()).snapshot)
    assert "mps_server_startup_seconds_count" in text
    checked = output_of(program("promtool"), "check", "metrics", input=text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def scrape_of(port: int) -> dict[str, Any]:
    """Return a configuration that scrapes this port of the loopback every second."""
    targets = [{"targets": [f"127.0.0.1:{port}"]}]
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "mps", "static_configs": targets}],
    }


@EACH_PROMETHEUS
async def test_prometheus_scrapes_without_an_error(tmp_path: Path, name: str) -> None:
    recording = str(RECORDINGS / "limits.rec.gz")
    async with running(tmp_path, "demo", recording) as exporter:
        with prometheus(tmp_path, scrape_of(exporter.port), name=name) as server:
            await until(lambda: server.moment("sum(mps_server_clients) == 5"))

            def is_scraped() -> bool:
                error = server.targets()["mps"]["lastError"]
                # If the machine has no time for a scrape, another follows.
                assert not error or "deadline exceeded" in error
                return not error

            await until(is_scraped)
            page = await exporter.page()
            metadata = server.api("metadata")
    assert page.value("mps_exporter_recording_info") == 1
    assert metadata["mps_server_clients"][0]["type"] == "gauge"
    assert metadata["mps_gpu_memory_total_bytes"][0]["unit"] == "bytes"


@EACH_PROMETHEUS
async def test_the_job_of_dcgm_exporter_continues_as_in_the_compatibility_page(
    tmp_path: Path, name: str
) -> None:
    text = (TREE / "docs" / "compatibility.md").read_text("utf-8")
    (snippet,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert snippet.count("localhost:9400") == 1
    shutil.copy(TREE / "prometheus" / "dcgm-compat.rules.yml", tmp_path)
    async with running(tmp_path, "demo", str(RECORDINGS / "limits.rec.gz")) as exporter:
        config = snippet.replace("localhost:9400", f"127.0.0.1:{exporter.port}")
        with prometheus(tmp_path, config.replace("15s", "1s"), name=name) as server:
            ((labels, _), *_) = await until(lambda: server.moment("DCGM_FI_DEV_GPU_UTIL"))
            shown = (labels["job"], labels["gpu"], labels["modelName"])
            assert shown == ("gpu", "0", "NVIDIA H200")
            assert labels["UUID"].startswith("GPU-")
            await until(lambda: server.moment("DCGM_FI_DEV_FB_USED > 0"))


JOB = """
- job_name: {name}
  scheme: https
  tls_config: {{ca_file: ca.pem{tls}}}
  basic_auth: {{username: prometheus, password: {password}}}
  static_configs: [{{targets: ["{address}"]}}]
"""
WITH_CERTIFICATE = ", cert_file: other.crt, key_file: other.key"
EXPECTED = {
    "right": (WITH_CERTIFICATE, "secret", "up", ""),
    "wrong-password": (WITH_CERTIFICATE, "guess", "down", "401"),
    "no-certificate": ("", "secret", "down", ""),
}
"""Job -> certificate, password, health of the target, and a part of its last error."""


@EACH_PROMETHEUS
async def test_prometheus_scrapes_through_tls_and_basic_auth(tmp_path: Path, name: str) -> None:
    write_certificates(tmp_path)
    password = bcrypt.hashpw(b"secret", bcrypt.gensalt(6)).decode()
    (tmp_path / "web.yml").write_text(
        f"{MUTUAL}  client_allowed_sans: [localhost]\nbasic_auth_users:\n  prometheus: {password}\n"
    )
    backend = FakeBackend()
    async with served(backend, web_config_file=str(tmp_path / "web.yml")) as (shown, _):
        jobs = [
            JOB.format(name=job, tls=tls, password=word, address=shown[0])
            for job, (tls, word, *_) in EXPECTED.items()
        ]
        config = "global: {scrape_interval: 1s, scrape_timeout: 900ms}\nscrape_configs:"
        with prometheus(tmp_path, config + "".join(jobs), name=name) as server:

            def is_as_expected() -> bool:
                found = server.targets()
                return found.keys() == EXPECTED.keys() and all(
                    found[job]["health"] == health and words in found[job]["lastError"]
                    for job, (_, _, health, words) in EXPECTED.items()
                )

            await until(is_as_expected)
    timeout, collectors = backend.collections[0]
    assert timeout is not None
    assert 0.81 / 2 <= timeout <= 0.81, "at most half of it may pass in the queue"
    assert collectors is None
    assert all(gzip for _, gzip in backend.renderings)

"""docs/scenarios.md: its snippet of configuration works."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from testing.ports import free_port
from testing.program import running
from testing.prometheus_programs import program
from testing.waiting import until_awaited

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scenarios.md").read_text("utf-8")


@pytest.mark.parametrize("server", ["prometheus", "prometheus3"])
async def test_the_job_of_dcgm_exporter_goes_on(tmp_path: Path, server: str) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    shutil.copy(ROOT / "prometheus" / "dcgm-compat.rules.yml", tmp_path)
    recording = ROOT / "tests" / "recordings" / "limits.rec.gz"
    async with running(tmp_path, "demo", str(recording)) as exporter:
        assert snippet.count("localhost:9400") == 1
        config = snippet.replace("localhost:9400", f"127.0.0.1:{exporter.port}")
        (tmp_path / "prometheus.yml").write_text(config.replace("15s", "1s"))
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            program(server),
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            cwd=tmp_path,
        )
        try:
            labels = await _until_there(exporter.session, port, "DCGM_FI_DEV_GPU_UTIL")
            assert (labels["job"], labels["gpu"], labels["modelName"]) == (
                "gpu",
                "0",
                "NVIDIA H200",
            )
            assert labels["UUID"].startswith("GPU-")
            await _until_there(exporter.session, port, "DCGM_FI_DEV_FB_USED > 0")
        finally:
            process.terminate()
            await process.wait()


async def _until_there(session: aiohttp.ClientSession, port: int, query: str) -> dict[str, str]:
    """The labels of a series, once there is one."""
    url = f"http://127.0.0.1:{port}/api/v1/query"

    async def there() -> dict[str, str] | None:
        with suppress(aiohttp.ClientError):
            async with session.get(url, params={"query": query}) as answer:
                found = (await answer.json())["data"]["result"]
            labels: dict[str, str] | None = found[0]["metric"] if found else None
            return labels
        return None

    return await until_awaited(there)

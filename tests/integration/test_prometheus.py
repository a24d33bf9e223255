"""Real Prometheus servers scrape the real program, which replays a real host."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from testing.player import RECORDINGS
from testing.ports import free_port
from testing.program import Page, Program, running
from testing.waiting import until_awaited

INCIDENTS = ("limits", "wait-served", "fault-held", "server-killed")


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: run the tests with make, which installs it"
    return found


async def with_a_server(program: Program, **headers: str) -> Page | None:
    """A scrape, if the replay has come to where a server is there and its log has been read.

    The daemon can tell of a server before a line of its log is read.
    """
    page = await program.page(**headers)
    started = page.value("mps_server_startup_seconds_count") is not None
    return page if started and page.value("mps_server_info") is not None else None


@pytest.mark.parametrize("incident", INCIDENTS)
async def test_promtool_has_nothing_to_say(tmp_path: Path, incident: str) -> None:
    promtool = tool("promtool")
    recording = RECORDINGS / f"{incident}.rec.gz"
    async with running(tmp_path, "demo", str(recording), "--speed=5") as program:
        page = await until_awaited(lambda: with_a_server(program))
        assert page.value("mps_exporter_recording_info") == 1
        check = await asyncio.create_subprocess_exec(
            promtool,
            "check",
            "metrics",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await check.communicate(page.text.encode())
        assert (check.returncode, output.decode()) == (0, "")


@pytest.mark.parametrize("server", ["prometheus", "prometheus3"])
async def test_prometheus_scrapes_without_an_error(tmp_path: Path, server: str) -> None:
    binary = tool(server)
    recording = RECORDINGS / "limits.rec.gz"
    async with running(tmp_path, "demo", str(recording)) as program:
        port = free_port()
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n"
            f"  - {{job_name: mps, static_configs: [{{targets: ['127.0.0.1:{program.port}']}}]}}\n"
        )
        process = await asyncio.create_subprocess_exec(
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _scraped(program, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            await process.wait()


async def _scraped(program: Program, prometheus: str) -> None:
    async def sees_the_clients() -> bool:
        with suppress(aiohttp.ClientError):
            clients = await _query(program.session, prometheus, "sum(mps_server_clients)")
            return clients == 5
        return False

    async def complaint() -> str:
        async with program.session.get(f"{prometheus}/api/v1/targets") as answer:
            (target,) = (await answer.json())["data"]["activeTargets"]
        return str(target["lastError"])

    async def is_content() -> bool:
        error = await complaint()
        # Where the machine has no time for a scrape, there will be another.
        assert not error or "deadline exceeded" in error
        return not error

    await until_awaited(sees_the_clients)
    await until_awaited(is_content)
    metadata = await _metadata(program.session, prometheus)
    assert metadata["mps_server_clients"]["type"] == "gauge"
    assert metadata["mps_gpu_memory_total_bytes"]["unit"] == "bytes"


async def _query(session: aiohttp.ClientSession, prometheus: str, text: str) -> float | None:
    async with session.get(f"{prometheus}/api/v1/query", params={"query": text}) as answer:
        result = (await answer.json())["data"]["result"]
    return float(result[0]["value"][1]) if result else None


async def _metadata(session: aiohttp.ClientSession, prometheus: str) -> dict[str, dict[str, str]]:
    async with session.get(f"{prometheus}/api/v1/metadata") as answer:
        data = (await answer.json())["data"]
    return {name: entries[0] for name, entries in data.items()}

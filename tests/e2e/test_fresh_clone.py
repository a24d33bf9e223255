"""The README's first command on a machine that has git, make and Python, and nothing of ours."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import aiohttp
import pytest

from testing.waiting import PATIENCE_SECONDS, until_awaited

ROOT = Path(__file__).parents[2]
PORT = 9400
MINUTES = 15


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.timeout(60 * MINUTES + 60)
async def test_make_demo_as_the_readme_says(tmp_path: Path) -> None:
    assert _is_free(PORT), f"something listens on :{PORT} already; the README's command needs it"
    clone, home = tmp_path / "mps-exporter", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    log = tmp_path / "output"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_shell(
            "make demo",
            cwd=clone,
            env={"PATH": "/usr/bin:/bin", "HOME": str(home)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        await _serves(process, log)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
        await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
    printed = log.read_text("utf-8")
    # Progress on all that takes its time, and where to look.
    for step in ("making .venv", "installing what the exporter needs", "installing mps-exporter"):
        assert re.search(rf"^==> {step}.*: done in \d+ s$", printed, re.MULTILINE), printed
    assert f"http://127.0.0.1:{PORT}/" in printed


async def _serves(process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait for metrics of the recorded host."""

    async def is_there() -> bool:
        assert process.returncode is None, log.read_text("utf-8")
        await asyncio.sleep(0.5)
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"http://localhost:{PORT}/metrics") as reply:
                text = await reply.text()
            return (
                re.search(r"^mps_exporter_recording_info\{.*\} 1", text, re.MULTILINE) is not None
            )
        return False

    async with aiohttp.ClientSession() as session:
        await until_awaited(is_there, 60 * MINUTES)

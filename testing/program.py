"""Runs mps-exporter as a user does: a process of its own, asked over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from testing.page import Page
from testing.ports import free_port
from testing.waiting import PATIENCE_SECONDS, until_awaited


@dataclass
class Program:
    process: asyncio.subprocess.Process
    port: int
    session: aiohttp.ClientSession
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str = "/metrics", **headers: str) -> tuple[int, str]:
        """Status and body."""
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.text()

    async def page(self, path: str = "/metrics", **headers: str) -> Page:
        status, text = await self.get(path, **headers)
        assert status == 200, text
        return Page(text)

    def messages(self) -> list[str]:
        return self.log.read_text("utf-8").splitlines()


@asynccontextmanager
async def running(folder: Path, *flags: str, **environment: str) -> AsyncIterator[Program]:
    """Start it, wait until it listens, and end it."""
    port = free_port()
    log = folder / f"exporter-{port}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mps_exporter",
            *flags,
            f"--web.listen-address=127.0.0.1:{port}",
            stderr=output,
            env={**os.environ, **environment},
            cwd=Path(__file__).parents[1],
        )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_SECONDS)) as session:
        program = Program(process, port, session, log)
        try:
            await _listening(program)
            yield program
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)


async def _listening(program: Program) -> None:
    async def listens() -> bool | None:
        if program.process.returncode is not None:
            raise AssertionError("it ended:\n" + "\n".join(program.messages()))
        with suppress(aiohttp.ClientError):
            await program.get("/-/healthy")
            return True
        return False

    await until_awaited(listens)

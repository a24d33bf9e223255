"""Runs mps-exporter as a user does: a process of its own, asked over HTTP."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from testing import prometheus_programs
from testing.page import Page
from testing.ports import free_port
from testing.waiting import PATIENCE_SECONDS


@dataclass
class Program:
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def page(self) -> Page:
        async with self.session.get(f"{self.url}/metrics") as answer:
            assert answer.status == 200, await answer.text()
            return Page(await answer.text())


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[Program]:
    """Start it, wait until it listens, and end it."""
    port = free_port()
    listen = f"--web.listen-address=127.0.0.1:{port}"
    command = (sys.executable, "-m", "mps_exporter", *flags, listen)
    timeout = aiohttp.ClientTimeout(PATIENCE_SECONDS)
    with prometheus_programs.running(folder, f"exporter-{port}", *command) as process:
        prometheus_programs.until_ready(f"http://127.0.0.1:{port}/-/healthy", process)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Program(port, session)

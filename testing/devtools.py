"""Chromium, driven through its own DevTools protocol: no driver program, no further dependency."""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from testing.waiting import PATIENCE_SECONDS, until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "chromium is missing: tools/install-system.sh chromium installs it"
    return found


class NavigatedError(Exception):
    """The page gave way to another page during a call."""


class Page:
    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        """Errors and warnings of the console."""
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                break
            event = message.json()
            if "id" in event:
                if reply := self._replies.pop(event["id"], None):
                    reply.set_result(event)
            else:
                self._note(event["method"], event.get("params", {}))

    def _note(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                output = details.get("exception", {}).get("description", details["text"])
                self.complaints.append(f"exception: {output}")
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                self.complaints.append(f"console: {[a.get('value') for a in about['args']]}")
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                entry = about["entry"]
                self.complaints.append(f"log: {entry['text']} {entry.get('url', '')}".rstrip())
            case "Audits.issueAdded":
                self.complaints.append(f"issue: {about['issue']}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        event = await asyncio.wait_for(reply, PATIENCE_SECONDS)
        if "navigated" in event.get("error", {}).get("message", ""):
            raise NavigatedError
        assert "error" not in event, event["error"]
        result: dict[str, Any] = event["result"]
        return result

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            await self.call(f"{domain}.enable")

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the screen in pixels, and the preferred colours."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer["errorText"]
        await asyncio.wait_for(self._loaded.wait(), PATIENCE_SECONDS)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def screenshot(self, path: Path, height: float | None = None) -> None:
        """Take a picture of the page: in full, or of the window down to this height in pixels.

        In full, the page is laid out and drawn again: what draws itself late is missing.
        """
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        bottom = size["height"] if height is None else height
        clip = {"x": 0, "y": 0, "width": size["width"], "height": bottom, "scale": 1}
        capture = {"format": "png", "captureBeyondViewport": height is None, "clip": clip}
        picture = await self.call("Page.captureScreenshot", **capture)
        path.write_bytes(base64.b64decode(picture["data"]))

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A fresh Chromium with one empty tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium(),
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with ClientSession() as session:
                port = await _port(Path(profile) / "DevToolsActivePort", process)
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json()
                tab = next(tab for tab in tabs if tab["type"] == "page")
                socket = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                await page.start()
                yield page
                await page.close()
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    def is_written() -> bool:
        assert process.returncode is None, "chromium ended at once"
        return file.exists() and file.read_text().count("\n") > 0

    await until(is_written)
    return int(file.read_text().splitlines()[0])

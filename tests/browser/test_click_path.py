"""The way through the demo that docs/scenarios.md describes, step by step, in a real browser."""

import json
import re
from contextlib import suppress
from pathlib import Path

from testing.devtools import NavigatedError, Page, browser
from testing.program import running
from testing.waiting import until_awaited
from tests.browser.test_status_page import violations

SPEED = 1
"""The wait lasts for 51 seconds: enough to click through all of it, also on a busy machine."""


async def text_of(page: Page, selector: str) -> str:
    found = await page.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''")
    return str(found)


async def until(page: Page, selector: str, pattern: str) -> str:
    """What an element says, once it says what is wanted."""

    async def output() -> str | None:
        with suppress(NavigatedError):
            text = await text_of(page, selector)
            return text if re.search(pattern, text) else None
        return None

    return await until_awaited(output)


async def click(page: Page, words: str) -> None:
    """Click the link with these words, once it is there."""
    link = f"[...document.querySelectorAll('a')].find(a => a.innerText === {words!r})"
    await until_awaited(lambda: page.evaluate(f"{link} !== undefined"))
    await page.evaluate(f"{link}.click()")


async def test_which_user_waits_behind_which_since_when(tmp_path: Path) -> None:
    async with running(tmp_path, "demo", f"--speed={SPEED}") as program, browser() as page:
        # 1. The page, and that it is a recording.
        await page.open(f"{program.url}/")
        assert (await text_of(page, ".demo")).startswith("Demo. This is a recording of another")
        await page.look(390, 844)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert await page.evaluate("document.querySelectorAll('.chapter').length") == 7
        assert await violations(page) == []
        await page.look(1200, 900)
        # 2. The answer, as the page keeps itself fresh.
        answer = await until(page, "h2 #headline", r"^Bob has waited")
        assert await text_of(page, "h2 .legend") == ""
        assert re.fullmatch(r"Bob has waited \d+ s behind alice's server 607\.", answer)
        assert "Do not kill process" in await text_of(page, ".remedy")
        # 3. All who wait.
        row = await until(page, ".waits li", "bob")
        assert re.search(r"bob process 663\s+has waited \d+ s behind alice server 607", row)
        # 4. The programs behind which they wait.
        assert "Alice's server 607" in await text_of(page, ".daemon")
        await page.evaluate("document.querySelector('.group summary').click()")
        assert re.search(r"59\d\s+for \d+ s", await text_of(page, ".group"))
        # 5. When it began.
        began = await until(page, ".incidents li", "process 663 was queued behind")
        assert re.search(r"(just now|\d+ s ago)", began)
        moment = await page.evaluate("document.querySelector('.incidents time').title")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", moment)
        assert page.complaints == []
        # 6. The same for programs.
        await click(page, "JSON")
        status = json.loads(await until(page, "body", r'"waits": ?\[\{'))
        (wait,) = status["daemons"][0]["waits"]
        assert (wait["uid"], wait["behind_uid"], wait["behind_server_pid"]) == (1002, 1001, 607)
        assert 0 < status["taken_at"] - wait["since"] < 60 * SPEED
        await page.open(f"{program.url}/")
        await click(page, "Metrics")
        metrics = await until(page, "body", "mps_uid_waiting_clients")
        assert re.search(r'mps_uid_waiting_clients\{.*uid="1002".*\} 1', metrics)
        assert re.search(r'mps_uid_waiting_since_timestamp_seconds\{.*uid="1002"', metrics)

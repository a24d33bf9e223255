"""The status page in a real browser."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.snapshot import Incident
from testing import snapshots as hosts
from testing import waiting
from testing.devtools import Page, browser
from tests.browser.axe import script as axe_script
from tests.unit.web.fakes import ROOTS, FakeBackend
from tests.unit.web.serving import served

PHONE = (360, 740)
DESK = (1200, 900)

TEXT = r"document.getElementById('status').textContent.replace(/\s+/g, ' ')"
"""The text of the page, folded parts included."""


OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser() as opened:
        yield opened


async def violations(page: Page) -> list[str]:
    """Return the violations that axe finds."""
    await page.evaluate(axe_script() + ";0")
    found = json.loads(
        await page.evaluate("axe.run(document).then(r => JSON.stringify(r.violations))")
    )
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in found
    ]


async def assert_well_made(page: Page, url: str) -> None:
    """Check each screen: no complaint, no foreign request, no sideways scrolling, no barrier."""
    for width, height in (PHONE, DESK):
        for dark in (False, True):
            await page.look(width, height, dark=dark)
            await page.open(url)
            await page.evaluate(OPEN_ALL)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await violations(page) == []
    assert page.complaints == []
    assert {request.split("/")[2] for request in page.requests} == {url.split("/")[2]}


@pytest.mark.parametrize(
    "make",
    [
        hosts.waiting,
        hosts.healthy,
        hosts.fault,
        hosts.blind,
        hosts.nasty,
        hosts.snapshot,
        hosts.full,
        hosts.without_gpu,
    ],
)
async def test_the_page_is_well_made(page: Page, make: Any) -> None:
    async with served(FakeBackend(snapshot=make())) as (shown, _):
        await assert_well_made(page, f"http://{shown[0]}/")


async def test_names_with_markup_are_text(page: Page) -> None:
    async with served(FakeBackend(snapshot=hosts.nasty())) as (shown, _):
        await page.open(f"http://{shown[0]}/")
        text = await page.evaluate(TEXT)

    assert (
        "<script>alert(1)</script>\"'&\\n\\x1b[31m\\u202egpj.exe\N{REPLACEMENT CHARACTER}" in text
    )
    assert page.complaints == []


async def until(page: Page, expression: str) -> None:
    await waiting.until_awaited(lambda: page.evaluate(expression))


@pytest.mark.parametrize("blocked", [False, True])
async def test_an_incident_is_shown(page: Page, blocked: bool) -> None:
    """Through the event stream; without it, by fetching every few seconds."""
    backend = FakeBackend(snapshot=hosts.healthy())
    async with served(backend) as (shown, _):
        if blocked:
            await page.call("Network.setBlockedURLs", urls=["*/api/v1/events"])
        await page.open(f"http://{shown[0]}/")
        how = "Fetched every 5 s" if blocked else "Live"
        await until(page, f"document.getElementById('freshness').textContent.startsWith('{how}')")
        backend.snapshot = hosts.crashed()
        happened = Incident(at=hosts.NOW - 40, kind="server_crashed", uid=1001)
        backend.publish(ROOTS, happened)
        await until(page, f"{TEXT}.includes('crashed; 2 clients were lost')")


SET_UP = """(() => {
  const group = [...document.querySelectorAll('.group')][3];
  group.open = true;
  group.querySelector('.sort').click();
  group.querySelector('.sort').click();
  group.querySelector('.scroll').scrollTop = 10;
  group.querySelector('summary').focus();
  group.scrollIntoView({block: 'center'});
  window.kept = group;
  window.row = group.querySelector('tbody tr');
})()"""


async def test_what_the_reader_did_stays(page: Page) -> None:
    """Opened rows, the order of a table, focus and scroll position."""
    backend = FakeBackend(snapshot=hosts.full())
    async with served(backend) as (shown, _):
        await page.look(*DESK)
        await page.open(f"http://{shown[0]}/")
        await page.evaluate(SET_UP)
        order = "[...window.kept.querySelectorAll('tbody th')].map(c => Number(c.dataset.v))"
        before = await page.evaluate(order)
        top = "window.kept.querySelector('summary').getBoundingClientRect().top"
        scrolled = "window.kept.querySelector('.scroll').scrollTop"
        place = await page.evaluate(top)
        assert before == sorted(before, reverse=True)
        assert len(before) > 1
        within = await page.evaluate(scrolled)
        # The last client of the table has exited, and a server has crashed.
        again = hosts.full()
        (server,) = again.daemons[0].servers
        left = tuple(one for one in server.clients if one.pid != before[-1])
        crash = Incident(at=hosts.NOW, kind="server_crashed", uid=1, server_pid=9)
        changed = replace(
            again.daemons[0], servers=(replace(server, clients=left),), incidents=(crash,)
        )
        backend.snapshot = replace(again, daemons=(changed, *again.daemons[1:]))
        await until(page, f"{TEXT}.includes('server 9 crashed')")

        assert await page.evaluate(order) == before[:-1]
        assert await page.evaluate("window.kept.isConnected && window.row.isConnected")
        assert await page.evaluate("window.kept.open")
        assert await page.evaluate(scrolled) == within
        assert await page.evaluate(
            "document.activeElement === window.kept.querySelector('summary')"
        )
        assert abs(await page.evaluate(top) - place) < 2  # though the page above it has grown
        assert page.complaints == []


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
async def test_a_full_host_is_two_screens_high(page: Page, width: int, height: int) -> None:
    async with served(FakeBackend(snapshot=hosts.full())) as (shown, _):
        await page.look(width, height)
        await page.open(f"http://{shown[0]}/")
        assert await page.evaluate("document.documentElement.scrollHeight") < 2 * height


async def test_a_command_is_copied(page: Page) -> None:
    async with served(FakeBackend(snapshot=hosts.waiting())) as (shown, _):
        await page.open(f"http://{shown[0]}/")
        await page.call("Page.bringToFront")
        await page.call(
            "Runtime.evaluate",
            userGesture=True,  # nothing is copied for a script alone
            expression="document.addEventListener('copy', () => {"
            " window.copied = String(getSelection()); });"
            "navigator.clipboard.writeText = async () => { throw new Error('not allowed'); };"
            "document.querySelector('.copy').click()",
        )
        await until(page, "document.querySelector('.copy').textContent === 'Copied'")
        assert await page.evaluate("window.copied") == "ps -o pid,user,stat,etime,args -p 641"


async def test_everything_is_reached_by_keyboard(page: Page) -> None:
    async with served(FakeBackend(snapshot=hosts.full())) as (shown, _):
        await page.look(*DESK)
        await page.open(f"http://{shown[0]}/")
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for element, done in (
            (".group summary", "document.querySelector('.group').open"),
            (".group .sort", "document.querySelector('.group th').ariaSort === 'ascending'"),
        ):
            await page.evaluate(f"document.querySelector('{element}').focus()")
            for kind in ("keyDown", "keyUp"):
                await page.call("Input.dispatchKeyEvent", type=kind, **key)
            await until(page, done)


async def test_the_page_keeps_itself_fresh(page: Page) -> None:
    backend = FakeBackend(snapshot=hosts.healthy())
    async with served(backend) as (shown, stop):
        await page.open(f"http://{shown[0]}/")
        await page.evaluate("window.mark = 1")
        assert "All is well" in await page.evaluate(TEXT)
        backend.snapshot = hosts.waiting()
        await until(page, f"{TEXT}.includes('Bob has waited 4 min')")
        assert await page.evaluate("document.title") == "▲ MPS on gpu-host"
        announced = "document.getElementById('announcement').textContent"
        assert "Bob has waited" in await page.evaluate(announced)
        assert await page.evaluate("window.mark") == 1  # the same page, not reloaded
        assert page.complaints == []
        stop.set()
        await until(page, "document.body.classList.contains('stale')")
        freshness = await page.evaluate("document.getElementById('freshness').textContent")
        assert freshness.startswith("The exporter does not answer.")


async def test_a_strict_policy_is_in_force(page: Page) -> None:
    """The browser runs no script that was smuggled in."""
    async with served(FakeBackend(snapshot=hosts.healthy())) as (shown, _):
        await page.open(f"http://{shown[0]}/")
        await page.evaluate(
            "document.body.insertAdjacentHTML('beforeend',"
            '\'<img src=x onerror="window.stolen=1"><p style="color:red">x</p>\')'
        )
        await waiting.until(
            lambda: any("Content Security Policy" in one for one in page.complaints)
        )
        assert await page.evaluate("window.stolen") is None

"""``mps-exporter top``: who holds MPS, who waits, and what the clients use, in a terminal."""

import asyncio
import io
import json
import os
import signal
import sys
import termios
import tty
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from mps_exporter import humanize
from mps_exporter.collector import Collector
from mps_exporter.commands import on_signals
from mps_exporter.flags import Settings, StartError
from mps_exporter.logging import print_output
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.web.status_api import make_status

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise StartError(
        "top needs the library rich: pip install rich (from packages and the image, it does not "
        "run). The status page and mps-exporter doctor show the same"
    ) from error

DEFAULT_URL = "http://127.0.0.1:9400"
INTERVAL_SECONDS = 1.0  # Interval between two states on the screen.
COLUMNS = ("PID", "USER", "PROGRAM", "STATE", "SINCE", "SMs", "MEMORY", "SERVER")
RIGHT = ("PID", "SINCE", "SMs", "MEMORY", "SERVER")

Row = dict[str, Any]
"""A client or a waiting process: values of the columns before they are printed, None if unknown."""

ORDERS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "s": ("state", lambda row: (row["waits"] is None, row["from"] or 0.0)),
    "m": ("memory", lambda row: -(row["MEMORY"] or 0)),
    "t": ("time", lambda row: row["from"] or 0.0),
    "u": ("user", lambda row: row["USER"]),
    "p": ("PID", lambda row: row["PID"]),
}
"""Key -> name and sort key of an order. Waiting processes come first in the default order."""


async def top(settings: Settings) -> int:
    """Show the status each second until q or a signal; without a terminal once."""
    console, keys = Console(), asyncio.Queue[str]()
    order = "s"
    async with aclosing(_statuses(settings)) as statuses:
        if not (console.is_terminal and sys.stdin.isatty()):
            text, shown = io.StringIO(), screen(await anext(statuses), order)
            Console(file=text, force_terminal=console.is_terminal).print(shown)
            print_output(text.getvalue().removesuffix("\n"))
            return 0
        on_signals(lambda: keys.put_nowait("q"), signal.SIGINT, signal.SIGTERM)
        with _key_presses(keys), Live(console=console, screen=True, auto_refresh=False) as live:
            async for status in statuses:
                live.update(screen(status, order), refresh=True)
                try:
                    async with asyncio.timeout(INTERVAL_SECONDS):
                        while (key := (await keys.get()).lower()) != "q":
                            order = key if key in ORDERS else order
                            live.update(screen(status, order), refresh=True)
                        return 0
                except TimeoutError:
                    continue
    return 0


async def _statuses(settings: Settings) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the exporter's status; this host's if no URL is given and the default has no reply."""
    url = settings.top_url or DEFAULT_URL
    while (status := await asyncio.to_thread(_read_status, url, settings)) is not None:
        yield {**status, "source": url}
    host = LiveHost(settings)
    collector = Collector(host, settings)
    following = asyncio.create_task(collector.run_between_collections())
    try:
        while True:
            yield {**make_status(await collector.collect()), "source": "this host"}
    finally:
        following.cancel()
        await host.close()


def _read_status(url: str, settings: Settings) -> dict[str, Any] | None:
    """Return the status of the exporter; None if the default URL does not have one."""
    address = f"{url.rstrip('/')}/api/v1/status"
    try:
        # http or https: the flag accepts no other scheme.
        with urllib.request.urlopen(address, timeout=settings.collector_timeout) as reply:  # noqa: S310
            status = json.load(reply)
        return {name: status[name] for name in ("taken_at", "headline", "gpus", "daemons")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        if settings.top_url is None:
            return None
        raise StartError(f"cannot read {address}: {str(error) or 'no status'}") from error


@contextmanager
def _key_presses(keys: asyncio.Queue[str]) -> Iterator[None]:
    """Add each pressed key to the queue."""
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: keys.put_nowait(os.read(number, 1).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def rows(status: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the clients and the waiting processes of a status."""
    for daemon in status["daemons"]:
        for wait in daemon["waits"]:
            behind = f"waits behind {wait['behind_user']}"
            state = "waits, but is dead" if wait["dead"] else behind
            yield _table_row(wait, wait["since"], waits=state, STATE=state)
        for server in daemon["servers"]:
            for client in server["clients"]:
                yield _table_row(
                    client,
                    client["connected_at"],
                    PROGRAM=client["program"] or "",
                    STATE=client["state"] or "",
                    SMs=", ".join(map(str, sorted({*client["sm_limit"].values()}))) or None,
                    MEMORY=sum(client["memory_used_bytes"].values()) or None,
                    SERVER=server["pid"],
                )


def _table_row(one: Mapping[str, Any], since: float | None, **known: Any) -> Row:
    first = {"waits": None, "from": since, "PID": one["pid"], "USER": one["user"]}
    return dict.fromkeys(COLUMNS) | first | known


def screen(status: Mapping[str, Any], order: str) -> Group:
    now, (name, key) = status["taken_at"], ORDERS[order]
    table = Table(box=None, expand=True, header_style="reverse")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
    for row in sorted(rows(status), key=key):
        began, memory = row["from"], row["MEMORY"]
        shown = row | {
            "SINCE": None if began is None else humanize.age(max(0.0, now - began)),
            "MEMORY": None if memory is None else humanize.memory(memory),
        }
        cells = (Text("-" if shown[one] is None else str(shown[one])) for one in COLUMNS)
        table.add_row(*cells, style="yellow" if row["waits"] else "")
    help_ = ", ".join(f"{letter} {one}" for letter, (one, _) in ORDERS.items())
    lines = [f"{status['source']}: {status['headline']['text']}", *map(_gpu_line, status["gpus"])]
    footer = f"ordered by {name}; keys: {help_}, q quit"
    return Group(*map(Text, lines), "", table, "", Text(footer, style="dim"))


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    active, used, size = gpu["sm_active_ratio"], gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    sms = "not reported" if active is None else humanize.percent(active)
    known = used is not None and size is not None
    memory = f"{humanize.memory(used)} of {humanize.memory(size)}" if known else "not reported"
    return f"GPU {gpu['index']} {gpu['name']}: SM activity {sms}, memory {memory}"

"""The status page: the template's environment, and the functions that the template calls.

The template is templates/status.html. All text is escaped (autoescape), and an unknown name is an
error (StrictUndefined). Drawings are inline SVG with coordinates that are computed here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING

from mps_exporter import humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.finding import DOCS
from mps_exporter.manual_search import name_of
from mps_exporter.web.status_api import Sample
from mps_exporter.web.status_api_fields import View

if TYPE_CHECKING:
    import jinja2

ASSET_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
ASSETS = {
    entry.name: entry.read_bytes()
    for entry in (resources.files("mps_exporter.web") / "static").iterdir()
    if entry.name.rpartition(".")[2] in ASSET_TYPES
}
"""The page's files, read once: a request for such a file reads none."""

_CLIENT_STATES = {
    "connecting": "connected, without a context",
    "creating_context": "creating its context",
    "torn_down": "torn down by a fatal GPU error",
}
"""Client states to show; an active client is the normal case, and a waiting client is queued."""
_SPANS = {
    "held": ("held", "clients connected"),
    "waited": ("waited", "waited"),
    "idle": ("idle, others waited", "server idle while others waited"),
    "ghost": ("ghost server", "ghost server"),
}
"""Kind of a span -> its words in the sum of a lane, and in the title of a bar."""
_MARKED = ("server_crashed", "daemon_died", "fault", "unfinished_work", "server_start_failed")
"""Kinds of incidents that mark the lanes."""


def render_page(status: View, metrics_path: str = "/metrics") -> str:
    return (
        templates()
        .get_template("status.html")
        .render(status=status, metrics_path=metrics_path)
        .lstrip()
    )


def age_of(moment: float, status: View) -> float:
    """Return the age of a moment; in a replay in recorded time, as in the findings."""
    speed: float = status.recording.speed if status.recording else 1.0
    return (float(status.taken_at) - moment) * speed


def asset_address(name: str) -> str:
    """Return a file's address relative to /, which changes with the file's content."""
    return f"static/{name}?{hashlib.sha256(ASSETS[name]).hexdigest()[:12]}"


@cache
def templates() -> jinja2.Environment:
    import jinja2  # late: it takes 3 MiB, and most exporters serve no page

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mps_exporter.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters = (
        *(humanize.age, humanize.ago, humanize.count, humanize.duration, humanize.iso_timestamp),
        *(humanize.memory, humanize.percent, humanize.printable, humanize.sentence),
    )
    functions = (
        *(age_of, asset_address, contexts, groups, lane_window, lanes),
        *(memory_of, sm_limit_of, sparkline),
    )
    environment.filters.update({one.__name__: one for one in filters})
    environment.filters["upper_first"] = humanize.capitalize
    environment.filters["served"] = lambda url: f"docs/{name}" if (name := name_of(url)) else url
    environment.globals.update({one.__name__: one for one in functions})
    environment.globals.update(
        DOCS=DOCS, NO_GPU=NO_GPU, policy=policy, client_states=_CLIENT_STATES
    )
    return environment


# ---------------------------------------------------------------------- who held, who waited


def lane_window(status: View) -> float:
    """Return the period of the lanes: ten minutes, or less if no daemon is known that long."""
    known = [one.timeline_since for one in status.daemons if one.timeline_since is not None]
    age = status.taken_at - min(known, default=0.0)
    return next(
        (window for window in policy.LANE_WINDOWS_SECONDS if window >= age), policy.HISTORY_SECONDS
    )


def lanes(status: View, daemon: View) -> list[View]:
    """Return a lane for each user who held the GPU or waited, the latest change first.

    Its bars have x and width in thousandths of the lane's width.
    """
    now, window = status.taken_at, lane_window(status)
    begin, scale = now - window, 1000 / window
    found: dict[str, View] = {}
    for span in daemon.timeline:
        start, end = max(span.start, begin), min(span.end, now)
        if end <= start:
            continue
        empty = View(user=span.user, bars=[], seconds=dict.fromkeys(_SPANS, 0.0), ends_at=0.0)
        lane = found.setdefault(span.user, empty)
        seconds = age_of(span.start, status) - age_of(span.end, status)
        title = f"{span.user}: {_SPANS[span.kind][1]} for {humanize.age(seconds)}"
        x, width = (start - begin) * scale, (end - start) * scale
        lane.bars.append(View(kind=span.kind, x=x, width=width, title=title))
        lane.seconds[span.kind] += age_of(start, status) - age_of(end, status)
        lane["ends_at"] = max(lane.ends_at, end)
    users = {span.uid: span.user for span in daemon.timeline}
    for one in status.incidents:
        if one.daemon == daemon.pipe_directory and one.at > begin and one.kind in _MARKED:
            hit = [found[user]] if (user := users.get(one.uid)) in found else found.values()
            for lane in hit:
                x = (one.at - begin) * scale
                lane.bars.append(View(kind="mark", x=x, width=4.0, title=one.text))
    for lane in found.values():
        lane["summary"] = " · ".join(
            f"{_SPANS[kind][0]} {humanize.age(seconds)}"
            for kind, seconds in lane.seconds.items()
            if seconds >= 0.5
        )
    return sorted(found.values(), key=lambda lane: -lane.ends_at)


# ---------------------------------------------------------------------- activity of a GPU


def sparkline(samples: Sequence[Sample], name: str, status: View) -> str:
    """Return the path of a line, 600 wide and 20 high, with gaps between distant samples."""
    gaps = sorted(after.at - before.at for before, after in pairwise(samples))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    path, last = "", -math.inf
    for sample in samples:
        ratio: float | None = getattr(sample, name)
        if ratio is None:
            last = -math.inf
            continue
        x = max(0.0, policy.HISTORY_SECONDS - age_of(sample.at, status))
        y = 19 - 18 * max(0.0, min(1.0, ratio))
        begins = sample.at - last > max(policy.GAP_SECONDS, 2.5 * usual)
        # A line begins with a dot: the next sample may be behind a gap.
        path += f"M{x:.0f} {y:.1f}h1" if begins else f"L{x:.0f} {y:.1f}"
        last = sample.at
    return path


# ---------------------------------------------------------------------- clients


NO_GPU = View(uuid="", sm_count=None, memory_total_bytes=None)
"""Placeholder GPU of clients whose GPU is not shown."""


def _cards_of(client: View, daemon: View, shown: Collection[str]) -> Collection[str]:
    """Return a client's shown GPUs (if it has none, its daemon's first), else NO_GPU."""
    used = {uuid for uuid, count in client.contexts.items() if count}
    used.update(client.memory_used_bytes, client.gpu_uuids)
    first = [uuid for uuid in daemon.gpu_uuids if uuid in shown][:1]
    return (used.intersection(shown) if used else first) or (NO_GPU.uuid,)


def contexts(server: View) -> str:
    """Return the contexts in use on a server's fullest GPU as text, or ""."""
    counts = [
        (server.contexts[uuid], limit)
        for uuid, limit in server.contexts_limit.items()
        if uuid in server.contexts
    ]
    if not counts:
        return ""
    used, limit = max(counts)
    return f"{used} of {limit} contexts{' on the fullest GPU' if len(counts) > 1 else ''}"


def groups(status: View, gpu: View, of_daemon: View | None = None) -> list[View]:
    """Return the groups of clients on a GPU, or of a daemon's clients without a shown GPU.

    The clients of a group are of one server, and run the same program for the same user.
    """
    found: dict[tuple[str, int, str, str | None], tuple[View, View, list[View]]] = {}
    shown = {one.uuid for one in status.gpus}
    for daemon in status.daemons:
        if daemon is not of_daemon and gpu.uuid not in daemon.gpu_uuids:
            continue
        for server in daemon.servers:
            for client in server.clients:
                if gpu.uuid in _cards_of(client, daemon, shown):
                    key = (daemon.pipe_directory, server.pid, client.user, client.program)
                    found.setdefault(key, (daemon, server, []))[2].append(client)
    made = [
        _group(f"{gpu.uuid}-{number}", gpu, *parts) for number, parts in enumerate(found.values())
    ]
    return sorted(made, key=lambda group: (not group.alarm, -len(group.clients)))


def _group(key: str, gpu: View, daemon: View, server: View, clients: Sequence[View]) -> View:
    """Return a group: ratios are fractions of the GPU's SMs and memory, None if one is unknown."""
    total, count = gpu.memory_total_bytes, len(clients)
    ratios = [ratio for one in clients if (ratio := _sm_ratio(one, gpu)) is not None]
    used = [one.memory_used_bytes.get(gpu.uuid) for one in clients]
    sizes = [size for size in used if size is not None]
    odd = [_CLIENT_STATES[one.state] for one in clients if one.state in _CLIENT_STATES]
    return View(
        key=key,
        daemon=daemon,
        server=server,
        user=clients[0].user,
        program=clients[0].program or "unknown program",
        clients=clients,
        limit=_limit_text(ratios, gpu, clients),
        memory=_memory_text(sizes, count),
        sm_ratios=(min(ratios), max(ratios)) if len(ratios) == count else None,
        memory_ratio=sum(sizes) / total if total and len(sizes) == count else None,
        state=f"{len(odd)} {' or '.join(sorted({*odd}))}" if odd else "",
        alarm=any(one.state == "torn_down" for one in clients) or server.ghost,
    )


def _sm_ratio(client: View, gpu: View) -> float | None:
    """Return the SM limit as a fraction of the GPU's SMs; 1 without a limit; None if unknown."""
    ratio: float | None = client.active_thread_ratio
    if gpu.sm_count and gpu.uuid in client.sm_limit:
        ratio = min(1.0, client.sm_limit[gpu.uuid] / gpu.sm_count)
    return ratio


def _limit_text(known: Sequence[float], gpu: View, clients: Sequence[View]) -> str:
    """Return the SM limits of a group. They are not added up: each client has its own."""
    if len(known) < len(clients):
        return "SM limit not known" if not known else "some SM limits not known"
    low, high = min(known), max(known)
    if low >= 1:
        return "no SM limit"
    total = gpu.sm_count
    # The rounding of the hardware is not known for every architecture: then show percentages.
    rounded = total and all(gpu.uuid in client.sm_limit for client in clients)
    shares = [
        f"{ratio * total:.0f}" if rounded else humanize.percent(ratio, exact=True)
        for ratio in dict.fromkeys((low, high))
    ]
    return f"at most {' to '.join(shares)} of {total or 'the'} SMs"


def _memory_text(sizes: Sequence[int], count: int) -> str:
    if len(sizes) < count:
        return "memory not known" if not sizes else "some memory not known"
    low, high = humanize.memory(min(sizes)), humanize.memory(max(sizes))
    if low != high:
        return f"{low} to {high}"
    return f"{low} each" if count > 1 else low


def _amount(
    text: str, value: float = -1, used: float | None = None, limit: float | None = None
) -> View:
    """Return a quantity of a client: `value` sorts (-1: unknown), the rest is shown.

    `used` and `limit` are fractions of the GPU's total.
    """
    return View(text=text, value=value, used=used, limit=limit)


def sm_limit_of(client: View, gpu: View) -> View:
    """Return the SM limit. The SMs that a client uses cannot be measured."""
    ratio = _sm_ratio(client, gpu)
    if ratio is None:
        return _amount("not known")
    # "At most": a program may lower its limits at its start, which is not visible from outside.
    text = "no limit" if ratio >= 1 else _limit_text([ratio], gpu, [client])
    return _amount(text, ratio, limit=ratio)


def memory_of(client: View, gpu: View) -> View:
    used = client.memory_used_bytes.get(gpu.uuid)
    limit, total = client.memory_limit_bytes.get(gpu.uuid), gpu.memory_total_bytes
    bound = limit / total if limit is not None and total else None
    if used is None:
        text = f"at most {humanize.memory(limit)}" if limit else "not known"
        return _amount(text, limit=bound)
    if limit:
        text = f"{humanize.memory(used)} of at most {humanize.memory(limit)}"
    else:
        no_limit = "limit not known" if client.limit_source == "unknown" else "no limit seen"
        text = f"{humanize.memory(used)}, {no_limit}"
    return _amount(text, used, used / total if total else None, bound)

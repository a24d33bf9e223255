"""The status page: the answer first, then who uses which GPU, then what happened."""

from __future__ import annotations

from collections.abc import Sequence

from mps_exporter import humanize
from mps_exporter.web import status_cards
from mps_exporter.web.assets import address
from mps_exporter.web.html import Markup, h, join
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_api import FindingView, IncidentView, WaitView
from mps_exporter.web.status_report import HostStatus

SHOWN_INCIDENTS = 25


def render(status: HostStatus, options: WebOptions, host: str) -> str:
    """The whole page."""
    title = f"{_mark(status.headline)}MPS on {humanize.printable(host)}"
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("link", rel="icon", type="image/svg+xml", href=address("icon.svg")),
        h("link", rel="stylesheet", href=address("status.css")),
        h("script", src=address("status.js"), defer=True),
        h("noscript", h("meta", http_equiv="refresh", content="10")),
    )
    body = h(
        "body",
        _header(status, options, host),
        h("main", _main(status), id="status"),
        _footer(status, options),
        h("p", "", id="announcement", class_="unseen", role="status"),
    )
    return f"<!doctype html>\n{h('html', head, body, lang='en')}\n"


def _mark(headline: FindingView) -> str:
    return {"trouble": "✖ ", "warning": "▲ "}.get(headline.severity, "")


def _header(status: HostStatus, options: WebOptions, host: str) -> Markup:
    return h(
        "header",
        h(
            "div",
            h("h1", "MPS on ", h("span", humanize.printable(host), class_="host")),
            h("p", _versions(status), class_="quiet"),
        ),
        h(
            "nav",
            h("a", "Metrics", href=options.telemetry_path.lstrip("/")),
            h("a", "JSON", href="api/v1/status"),
            h("a", "Debug", href="debug/collect") if options.enable_debug else None,
            aria_label="Other views",
        ),
        class_="top",
    )


def _versions(status: HostStatus) -> str:
    parts = []
    if status.driver_version:
        parts.append(f"driver {humanize.printable(status.driver_version)}")
    if status.cuda_version:
        parts.append(f"CUDA {humanize.printable(status.cuda_version)}")
    return " · ".join(parts)


def _main(status: HostStatus) -> Markup:
    return join(
        (
            _demo(status),
            _headline(status.headline, [one for one in status.findings if one != status.headline]),
            _queue(status),
            h("section", h("h2", "GPUs and clients"), status_cards.cards(status), class_="gpus"),
            _blind_spots(status.blind_spots),
            _incidents(status),
        )
    )


def _demo(status: HostStatus) -> Markup | None:
    recording = status.recording
    if recording is None:
        return None
    speed = "" if recording.speed == 1 else f", at {recording.speed:g} times its speed"
    return h(
        "aside",
        h("strong", "Demo. "),
        "This is a recording of another host, not this one: ",
        humanize.sentence(humanize.printable(recording.scenario, 300)),
        h(
            "span",
            f" Recorded on {humanize.printable(recording.machine, 200)}, "
            f"{humanize.printable(recording.recorded_at)}{speed}; it repeats "
            f"(round {recording.loop}).",
            class_="quiet",
        ),
        class_="demo",
        aria_label="Demo",
    )


def _remedy(finding: FindingView) -> Markup | None:
    return h("p", finding.remedy, class_="remedy") if finding.remedy else None


_SIGNS = {"trouble": "✖", "warning": "▲", "notice": "●", "ok": "✔"}
_SIGN_WORDS = {"trouble": "Trouble:", "warning": "Warning:", "notice": "Note:", "ok": "Fine:"}


def sign(severity: str) -> Markup:
    """A severity as a sign and, for those who do not see it, as a word."""
    return join(
        (
            h("span", _SIGNS[severity], class_=f"sign {severity}", aria_hidden="true"),
            h("span", f"{_SIGN_WORDS[severity]} ", class_="unseen"),
        )
    )


def _headline(first: FindingView, others: Sequence[FindingView]) -> Markup:
    more = [h("li", sign(one.severity), h("div", h("p", one.text), _remedy(one))) for one in others]
    return h(
        "section",
        h(
            "div",
            sign(first.severity),
            h("div", h("p", first.text, class_="answer", id="headline"), _remedy(first)),
            class_="first",
        ),
        h("ul", more, class_="findings") if more else None,
        class_=f"headline {first.severity}",
        aria_label="Summary",
    )


def _queue(status: HostStatus) -> Markup | None:
    waits = [(daemon, wait) for daemon in status.daemons for wait in daemon.waits]
    if not waits:
        return None
    several = len(status.daemons) > 1
    rows = [
        h(
            "tr",
            h("th", wait.user, h("span", f" process {wait.pid}", class_="quiet"), scope="row"),
            h("td", _behind(wait), data_label="behind"),
            h("td", humanize.age(wait.seconds), data_label="for", class_="number"),
            h("td", h("code", daemon.pipe_directory), data_label="at") if several else None,
            class_="dead" if wait.dead else None,
        )
        for daemon, wait in waits
    ]
    return h(
        "section",
        h("h2", "Who waits for whom"),
        h(
            "table",
            h(
                "thead",
                h(
                    "tr",
                    h("th", "Waiting", scope="col"),
                    h("th", "Behind", scope="col"),
                    h("th", "For", scope="col", class_="number"),
                    h("th", "Daemon", scope="col") if several else None,
                ),
            ),
            h("tbody", rows),
            class_="queue",
        ),
    )


def _behind(wait: WaitView) -> Markup:
    if wait.dead:
        return join("none: it is dead, and still queued")
    server = "" if wait.behind_server_pid is None else f" server {wait.behind_server_pid}"
    return join((wait.behind_user, h("span", server, class_="quiet")))


def _blind_spots(found: Sequence[FindingView]) -> Markup | None:
    if not found:
        return None
    return h(
        "section",
        h("h2", "What cannot be seen"),
        h(
            "ul",
            [
                h("li", sign(one.severity), h("div", h("p", one.text), _remedy(one)))
                for one in found
            ],
            class_="findings",
        ),
    )


def _incidents(status: HostStatus) -> Markup:
    found, now, several = status.incidents, status.taken_at, len(status.daemons) > 1
    if not found:
        seen = all(daemon.logs_readable for daemon in status.daemons)
        text = "No events yet." if seen else "No event was seen, but not all logs can be read."
        content = h("p", text, class_="quiet")
    else:
        content = h("ol", [_incident(one, now, several) for one in found[:SHOWN_INCIDENTS]],
                    class_="incidents")  # fmt: skip
    rest = len(found) - SHOWN_INCIDENTS
    return h(
        "section",
        h("h2", "What happened"),
        content,
        h("p", f"… and {rest} earlier, in the ", h("a", "JSON", href="api/v1/status"), ".",
          class_="quiet") if rest > 0 else None,
    )  # fmt: skip


def _incident(one: IncidentView, now: float, several: bool) -> Markup:
    moment = humanize.iso_timestamp(one.at)
    return h(
        "li",
        h("time", humanize.ago(now - one.at), datetime=moment, title=moment),
        sign(one.severity),
        h(
            "span",
            one.text,
            h("span", f" {one.daemon}", class_="quiet") if several else None,
        ),
    )


def _footer(status: HostStatus, options: WebOptions) -> Markup:
    revision = f" ({options.revision[:12]})" if options.revision else ""
    moment = humanize.iso_timestamp(status.taken_at)
    return h(
        "footer",
        h("p", "As of ", h("time", moment[:19].replace("T", " "), " UTC", datetime=moment),
          id="freshness"),
        h("p", f"{options.name} {options.version}{revision}", class_="quiet"),
    )  # fmt: skip

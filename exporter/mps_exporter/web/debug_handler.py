"""/debug/collect: one collection with all that went in and came out, for who looks for a fault."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from mps_exporter import humanize
from mps_exporter.web.backend import DebugReport, DebugSource
from mps_exporter.web.limiter import ConcurrencyLimiter, LimitExceededError
from mps_exporter.web.metrics_handler import selected_collectors
from mps_exporter.web.responses import text_response
from mps_exporter.web.state import BACKEND, OPTIONS

MAX_RAW_CHARACTERS = 200_000
"""Of one input; the middle is left out."""


def printable_lines(raw: str) -> str:
    """Text of any origin, with nothing in it that could act on a terminal; lines stay lines."""
    if len(raw) > MAX_RAW_CHARACTERS:
        half = MAX_RAW_CHARACTERS // 2
        omitted = len(raw) - 2 * half
        raw = f"{raw[:half]}\n[... {omitted} characters left out ...]\n{raw[-half:]}"
    return "\n".join(humanize.printable(line, MAX_RAW_CHARACTERS) for line in raw.split("\n"))


def _source_lines(source: DebugSource) -> Iterator[str]:
    outcome = "success" if source.success else "FAILED"
    yield f"=== {source.name}: {outcome} in {source.duration_seconds * 1000:.1f} ms"
    if source.error:
        yield f"error: {printable_lines(source.error)}"
    yield "--- log"
    yield from (printable_lines(line) for line in source.log)
    for origin, raw in source.raw:
        yield f"--- read from {printable_lines(origin)}"
        yield printable_lines(raw)
    yield ""


def report_text(report: DebugReport) -> str:
    """The report, to read."""
    lines = [
        f"One collection at {humanize.iso_timestamp(report.taken_at)}, "
        f"in {report.duration_seconds * 1000:.1f} ms",
        "",
    ]
    for source in report.sources:
        lines.extend(_source_lines(source))
    lines += ["=== metrics", report.metrics]
    return "\n".join(lines)


DEBUG_LIMITER = web.AppKey[ConcurrencyLimiter]("COLLECTIONS")


async def collect(request: web.Request) -> web.Response:
    """Collect now and tell everything, where the operator allowed it."""
    if not request.app[OPTIONS].enable_debug:
        return text_response(
            "404 Not Found: this page shows raw inputs and names of processes, and is off. "
            "Start the exporter with --web.enable-debug to have it.",
            status=404,
        )
    backend = request.app[BACKEND]
    try:
        collectors = selected_collectors(request, backend.enabled_collectors)
    except ValueError as error:
        return text_response(f"400 Bad Request: {error}", status=400)
    try:
        with request.app[DEBUG_LIMITER].acquire(""):
            report = await backend.debug(collectors)
    except LimitExceededError:
        return text_response("503 Service Unavailable: one at a time", status=503)
    return text_response(report_text(report))

"""What the status page of a full host costs: 8 GPUs, 384 clients, beside its JSON.

    python -m bench.page

The bar is 50 ms on a core of its own. A busy machine makes everything slower, so the time is also
told as a multiple of that of json.dumps of the same status.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

from mps_exporter.web.history import History
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_findings import make_status
from mps_exporter.web.status_page import render_page
from testing.snapshots import full

RUNS = 25
BAR_MS = 50.0


def cpu_ms(work: Callable[[], object]) -> float:
    """The median CPU time of a piece of work."""
    work()  # the first compiles the template
    times = []
    for _ in range(RUNS):
        began = time.thread_time()
        work()
        times.append(1000 * (time.thread_time() - began))
    return statistics.median(times)


def main() -> None:
    """Measure and tell."""
    snapshot, options, history = full(), WebOptions(host="bench"), History()
    history.add(snapshot)
    status = make_status(snapshot, options, history=history)
    views = cpu_ms(lambda: make_status(snapshot, options, history=history))
    page = cpu_ms(lambda: render_page(status, options))
    encoded = cpu_ms(lambda: json.dumps(asdict(status)))
    note = cpu_ms(lambda: history.add(snapshot))
    size = len(render_page(status, options).encode())
    print(
        f"status {views:.1f} ms, page {page:.1f} ms ({size / 1000:.0f} kB), JSON {encoded:.1f} ms"
    )
    print(f"noting a collection for the history: {note:.2f} ms")
    met = "met" if views + page <= BAR_MS else "NOT MET"
    print(f"{met}: page of 384 clients {views + page:.1f} ms (at most {BAR_MS:g} ms)")
    print(f"page / JSON: {page / encoded:.2f}")


if __name__ == "__main__":
    main()

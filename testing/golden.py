"""What every recording shows, as text to compare line by line: python -m testing.golden [NAME]

Of each recording and five of its moments: the metrics, /api/v1/status, and the doctor's JSON. After
the first moment only what changed is written. One more text has the doctor's words on processes.
Without arguments all files of tests/golden are made again; `git diff tests/golden` then shows what
a change of the code does.
"""

import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mps_exporter.commands.doctor_report_and_status import Diagnosis, diagnosis_as_json
from mps_exporter.findings import recent_incidents
from mps_exporter.snapshot import Histogram, Snapshot
from mps_exporter.sources.recording import Recording, read_recording
from mps_exporter.web.status_api import make_status, to_json
from testing import fake_mps_v3, v3_host
from testing.host_examples import doctor_host_text
from testing.player import RECORDINGS, Metrics, Player
from testing.process_examples import before_kill_text, doctor_pid_text

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
MOMENTS = 5
OF_THIS_RUN = ("metric mps_scrape_collector_duration_seconds", "status.sources[")


SYNTHETIC: Mapping[str, Callable[[], Recording]] = {
    "v2-partitions-captured": lambda: v3_host.v2_host(fake_mps_v3.LSPART_CAPTURE),
    "v2-partitions-manual": lambda: v3_host.v2_host(fake_mps_v3.LSPART_DOCS),
    "v3-captured": lambda: v3_host.recording(fake_mps_v3.CAPTURED, found={}),
    "v3-manual": v3_host.recording,
}
"""Hosts of interfaces that are known from their manual and from others' captures only."""


TEXTS: Mapping[str, Callable[[], str]] = {
    "doctor-host": doctor_host_text,
    "doctor-pid": doctor_pid_text,
    "doctor-before-kill": before_kill_text,
}


def recordings() -> list[str]:
    recorded = {path.name.removesuffix(".rec.gz") for path in RECORDINGS.glob("*.rec.gz")}
    return sorted(recorded | SYNTHETIC.keys())


def recording_of(name: str) -> Recording:
    made = SYNTHETIC.get(name)
    return made() if made else read_recording(RECORDINGS / f"{name}.rec.gz")


async def shown(recording: Recording) -> Mapping[float, Mapping[str, str]]:
    """Return what is shown by moments (seconds of the recording)."""
    player, began, moments = Player(recording), recording.header.started_at, {}
    for number in range(1, MOMENTS + 1):
        seconds = recording.duration_seconds * number / MOMENTS
        found = all_shown(await player.to(began + seconds), began)
        moments[seconds] = {name: text for name, text in found if not name.startswith(OF_THIS_RUN)}
    return moments


def golden_text(moments: Mapping[float, Mapping[str, str]]) -> str:
    lines, before = list[str](), dict[str, str]()
    for seconds, now in moments.items():
        lines.append(f"== {seconds:.1f} s")
        lines += [f"{key} = {value}" for key, value in now.items() if before.get(key) != value]
        lines += [f"{key} is gone" for key in before if key not in now]
        before = dict(now)
    return "\n".join(lines) + "\n"


def all_shown(metrics: Metrics, began: float) -> Iterator[tuple[str, str]]:
    """Yield the name of each value that is shown, and the value."""
    snapshot = metrics.snapshot
    for name, labels, value in metrics.samples:
        words = ",".join(f"{key}={label}" for key, label in labels.items())
        number = (
            f"count {sum(value.counts)}, sum {value.sum_seconds:.3f}"
            if isinstance(value, Histogram)
            else _number(value, began)
        )
        yield f"metric {name}{{{words}}}", number
    documents = {
        "status": json.loads(to_json(make_status(snapshot))),
        "doctor": json.loads(_doctor(snapshot)),
    }
    for name, document in documents.items():
        yield from _flat(name, document, began)


def _doctor(snapshot: Snapshot) -> str:
    return diagnosis_as_json(Diagnosis(snapshot, recent_incidents(snapshot)))


def _flat(path: str, value: object, began: float) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a document; an empty list or object is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(f"{path}.{key}", one, began)
    elif isinstance(value, Sequence) and value and not isinstance(value, str):
        for number, one in enumerate(value):
            yield from _flat(f"{path}[{number}]", one, began)
    else:
        yield path, _number(value, began) if isinstance(value, float) else json.dumps(value)


def _number(value: float, began: float) -> str:
    """Moments are written as seconds after the recording's start."""
    if abs(value - began) < 1e6:
        return f"start {value - began:+.3f} s"
    return f"{value:.6g}"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*recordings(), *TEXTS]:
        made = TEXTS.get(name)
        text = made() if made else golden_text(asyncio.run(shown(recording_of(name))))
        (GOLDEN / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines, {len(gzip.compress(text.encode()))} bytes")


if __name__ == "__main__":
    main()

"""Metrics of findings, and of the exporter itself."""

from operator import attrgetter
from typing import get_args

from mps_exporter.findings import ADVICE, findings
from mps_exporter.findings.finding import Severity
from mps_exporter.metrics.metric_types import PROC, Page, Rows, Scope, Section
from mps_exporter.snapshot import COLLECTORS, RecordingInfo


def _finding_rows(page: Page) -> Rows[float]:
    for one in findings(page.snapshot):
        yield (one.advice.name, one.severity, one.daemon, one.gpu, one.uuid), 1.0


def _recording_rows(page: Page) -> Rows[RecordingInfo]:
    if page.snapshot.recording is not None:
        yield (), page.snapshot.recording


ADVICE_SECTION = Section("Host advice")
FINDING = Scope(ADVICE_SECTION, "advice severity daemon gpu uuid", _finding_rows)
SECTION = Section("The exporter itself")
EXPORTER = Scope[Page](SECTION, "", lambda page: [((), page)])
COLLECTOR = Scope(SECTION, "collector", lambda p: [((c.name,), c) for c in p.snapshot.collectors])
RECORDING = Scope(SECTION, "", _recording_rows)
_RECORDED = attrgetter("scenario", "machine", "driver_version", "recorded_at")

FINDING.number(
    "mps_advice",
    "this exporter",
    lambda one: one,
    advice=tuple(one.name for one in ADVICE.values() if one.kind not in ("news", "trace")),
    severity=get_args(Severity),
).means("1 for each finding; mps-exporter doctor also finds what MPS left behind.")
EXPORTER.info(
    "mps_exporter_build_info",
    "this exporter",
    "version revision pythonversion",
    lambda p: (p.build.version, p.build.revision, p.build.python_version),
).means("The exporter's version.")
COLLECTOR.number(
    "mps_scrape_collector_duration_seconds",
    "this exporter",
    lambda c: c.duration_seconds,
    collector=COLLECTORS,
).means("How long the source took in this collection.")
COLLECTOR.number(
    "mps_scrape_collector_success", "this exporter", lambda c: c.success, collector=COLLECTORS
).means("1 when the source could be read in this collection.")
COLLECTOR.number(
    "mps_scrape_collector_timeout", "this exporter", lambda c: c.timed_out, collector=COLLECTORS
).means("1 when the source did not answer before the deadline.")
EXPORTER.number(
    "mps_exporter_unreadable_environments", PROC, lambda p: p.snapshot.unreadable_environments
).means(
    "Processes whose own limits could not be read: that needs CAP_SYS_PTRACE and "
    "CAP_DAC_READ_SEARCH."
)
EXPORTER.number(
    "mps_exporter_kernel_log_readable",
    "/dev/kmsg",
    lambda p: None if p.snapshot.kernel_log is None else p.snapshot.kernel_log.readable,
).means("1 when the kernel log is being read, which can prove who caused a fatal GPU error.")
EXPORTER.each(
    "mps_exporter_ignored_processes",
    PROC,
    lambda p: {(uid,): n for uid, n in sorted(p.snapshot.ignored_processes.items())},
    uid=(),
).means(
    "Processes of MPS's programs, and clients, that are left out: a user has more than 8 daemons, "
    "24 processes or 256 clients, or all users too many. The 32 users with most of them."
)
RECORDING.info(
    "mps_exporter_recording_info",
    "this exporter",
    "scenario machine driver_version recorded speed",
    lambda r: (*_RECORDED(r.header), f"{r.speed:g}"),
).means("Present while a recording is replayed: these are not the values of a live host.")

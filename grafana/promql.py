"""PromQL with the dashboard's selectors filled in.

Expressions are written with bare metrics: ``sum by (uid) (mps_uid_waiting_clients)``. Each metric
gets the matchers of the dashboard's variables that it has labels for. A metric that the catalogue
does not contain is an error here, before a panel is empty.
"""

import re
from collections.abc import Iterable, Mapping

from mps_exporter.metrics import CATALOGUE

TARGET_LABELS = ("job", "instance")  # Labels that Prometheus adds to every series that it scrapes.

_ALERT = ("alertname", "alertstate", "severity", "daemon", "server", "gpu", "uid")
FOREIGN: Mapping[str, tuple[str, ...]] = {
    "up": (),
    "scrape_duration_seconds": (),
    "scrape_samples_scraped": (),
    "process_cpu_seconds_total": (),
    "process_resident_memory_bytes": (),
    "process_open_fds": (),
    "process_max_fds": (),
    "ALERTS": _ALERT,
    "ALERTS_FOR_STATE": _ALERT,
    "process_start_time_seconds": (),
    "instance:mps_host_state:worst": (),
    "daemon_uid_cause:mps_client_losses:increase5m": ("daemon", "uid", "cause"),
    "gpu_uid:mps_client_sms:avg5m": ("gpu", "uuid", "uid", "bound"),
    "client:mps_client_info:pod": ("uid", "pod"),
    "job_uid:mps_uid_holding_gpus:avg5m": ("uid",),
    "job_uid:mps_uid_waiting_gpus:sum": ("uid",),
    "job_le:mps_uid_wait_seconds_bucket:increase1h": ("le",),
}
"""Series of other programs and of recording rules: their names and labels."""

EVENTFUL = "eventful"  # Variable: the hosts with events that EVENT_COUNTERS can have counted.
EVENT_COUNTERS = {
    "mps_client_losses_total",
    "mps_client_rejections_total",
    "mps_client_unfinished_exits_total",
}
"""Counters with dozens of series for each daemon, of which nearly all are 0."""

_GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"
_STRING = r'"[^"]*"'
_FOREIGN = "|".join(sorted(FOREIGN, key=len, reverse=True))
_METRIC = rf"\b(?P<name>(?:{_FOREIGN})\b|mps_\w+)(?P<matchers>\{{[^}}]*\}})?"
_TOKENS = re.compile(rf"{_GROUPING}|{_METRIC}|{_STRING}")
_SUFFIX = re.compile(r"_(?:bucket|count|sum)$")


def base_name(name: str) -> str:
    """Return the catalogue's name of a series: that of the histogram for its buckets."""
    stem = _SUFFIX.sub("", name)
    known = CATALOGUE.get(stem)
    return stem if known is not None and known.kind == "histogram" else name


def labels_of(name: str) -> tuple[str, ...]:
    """Return the labels that the exporter sets."""
    if name in FOREIGN:
        return FOREIGN[name]
    spec = CATALOGUE[base_name(name)]
    state = (spec.name,) if spec.kind == "stateset" else ()
    bucket = ("le",) if name.endswith("_bucket") else ()
    return (*spec.labels, *state, *bucket)


def metrics_in(expression: str) -> list[str]:
    """Return the catalogue's metrics that an expression uses, each once, in their order."""
    names = [base_name(match["name"]) for match in _TOKENS.finditer(expression) if match["name"]]
    return list(dict.fromkeys(names))


def scoped(expression: str, variables: Iterable[str]) -> str:
    """Add ``label=~"$label"`` to every metric, for each variable whose label it has."""
    wanted = tuple(variables)

    def select(match: re.Match[str]) -> str:
        if not match["name"]:
            return match[0]
        own = (match["matchers"] or "{}")[1:-1]
        of_jobs = re.match(r"job(_\w+)?:", match["name"])
        labels = (*TARGET_LABELS[: 1 if of_jobs else None], *labels_of(match["name"]))
        # An explicit matcher takes precedence over the dashboard's.
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", own))
        filters = [f'{label}=~"${label}"' for label in wanted if label in labels]
        filters = [each for each in filters if each.split("=~")[0] not in named]
        if EVENTFUL in wanted and match["name"] in EVENT_COUNTERS:
            filters.append(f'instance=~"${EVENTFUL}"')
        return f"{match['name']}{{{', '.join([*filters, *([own] if own else [])])}}}"

    return " ".join(_TOKENS.sub(select, expression).split())


def new_in_step(counter: str, by: str) -> str:
    """Count whole events between one point of a graph and the next: rate() would return fractions.

    A counter begins at 0 when its exporter begins: it counts in full if it was 0 or absent, or if
    it was reset, and its exporter was known before. Zeros are left out first, because most
    counters are 0: matching 17,000 series of 1,000 hosts takes seconds.
    """
    known = "last_over_time(mps_exporter_build_info[1h] offset $__interval)"
    grown = (
        f"({counter} > 0) - (last_over_time({counter}[1h] offset $__interval) > 0) >= 0"
        f" unless resets({counter}[$__interval]) > 0"
    )
    return f"sum by ({by}) ({grown} or {counter} > 0 and on (job, instance) {known})"


def new_in_range(counter: str, by: str) -> str:
    """Count the events in the shown time range: a series only where one happened.

    Zeros are left out first: matching the counters of 1,000 hosts takes seconds.
    """
    return f"round({grown_in_range(counter, by, least=' > 0')})"


def grown_in_range(counter: str, by: str, least: str = "") -> str:
    """Return the increase of a counter in the time range that the dashboard shows.

    increase() extrapolates: it returns 13 for 12 events. So it is used only if an exporter was
    restarted in the range; otherwise the result is the last value less the value before the range.
    Each counter of events begins at 0 when its exporter begins. least: a condition for values.
    """
    last = f"(last_over_time({counter}[$__range]){least})"
    # A lower value in the range counts from 0: the exporter was restarted as the range began.
    lowest = f"min_over_time({counter}[$__range])"
    before = f"last_over_time({counter}[1h] offset $__range){least} <= {lowest}"
    grouped = f"sum by ({by})" if by else "sum"
    # The first sample counts earlier events, unless Prometheus knew the exporter before the range
    # or the exporter started in the range.
    since = "process_start_time_seconds > time() - $__range_s"
    known = f"(last_over_time(mps_exporter_build_info[1h] offset $__range) or {since})"
    first = f"({last} * 0 and on (job, instance) {known} or {lowest})"
    grown = (
        f"{last} - ({before} or {first}) >= 0"
        f" unless resets({counter}[$__range]) > 0 or increase({counter}[$__range]){least}"
    )
    return f"{grouped} ({grown})"


def state_code(stateset: str, codes: Mapping[str, int], by: str) -> str:
    """Encode a state set as one number a series, which value mappings turn back into words."""
    states = " or ".join(
        f'({stateset}{{{stateset}="{state}"}} == 1) * {code}' for state, code in codes.items()
    )
    return f"max by ({by}) ({states})"

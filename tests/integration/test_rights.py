"""The table "Which rights buy which metrics" in docs/deployment.md, cell by cell.

The real exporter runs with each of the rights twice: without flags, and with all daemons named by
flag. A metric of the first run is a "yes" of the table, a metric of the second run only is
"configured".
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from testing.own_host import Daemon, OwnHost, as_user, in_container, own_host
from testing.page import Page

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"

OPEN = ("/tmp/nvidia-mps", "/var/log/nvidia-mps")
ELSEWHERE = ("/tmp/mps-elsewhere", "/tmp/log-elsewhere")
CLOSED = ("/tmp/mps-closed", "/tmp/log-closed")
CONTAINER = "/var/lib/container"


COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "root": ((), ()),
    "user": (as_user(1001), ()),
    "user + PTRACE": (as_user(1001, "sys_ptrace"), ()),
    "user + both": (as_user(1001, "sys_ptrace", "dac_read_search"), ()),
    "own PID namespace": (
        *(as_user(1001), ("unshare", "--pid", "--fork", "--mount", "--mount-proc")),
    ),
}
"""Column of the table -> the arguments of setpriv, and a command inside which the exporter runs."""


@dataclass
class Scene:
    """Metrics of the exporter with each of the rights: without flags, and with daemons named."""

    client: str  # PID of the client of the open daemon.
    seen: dict[str, tuple[Page, Page]]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    limits = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    with own_host() as host:
        boxed = in_container({one: f"{CONTAINER}{one}" for one in OPEN})
        daemons = (host.daemon(), host.daemon(*ELSEWHERE), _closed(host), host.daemon(inside=boxed))
        pid, *_ = [host.client(daemon, 1002, environment=limits) for daemon in daemons]
        yield Scene(str(pid), {name: _look(host, *how) for name, how in COLUMNS.items()})


def _closed(host: OwnHost) -> Daemon:
    """Start a daemon whose logs only root may read; its pipe directory is open, as always."""
    daemon = host.daemon(*CLOSED, umask="077")
    pipe = host.outside(CLOSED[0])
    pipe.chmod(0o755)
    (pipe / "fake-mps.json").chmod(0o644)
    return daemon


def _look(host: OwnHost, rights: Sequence[str], inside: Sequence[str]) -> tuple[Page, Page]:
    named = [
        f"--mps.{kind}-directory={path}"
        for both in (OPEN, ELSEWHERE, CLOSED)
        for kind, path in zip(("pipe", "log"), both, strict=True)
    ]
    found = []
    for flags in ([], named):
        host.serve(*flags, rights=rights, inside=inside)
        found.append(host.scrape())
        host.stop_exporters()
    return found[0], found[1]


# ---------------------------------------------------------------------- what the rows are about


def _values(metrics: Page, *names: str, **labels: str) -> set[float | None]:
    """Return the values of these metrics of the open daemon."""
    return {metrics.value(name, daemon=OPEN[0], **labels) for name in names}


def _container_answers(metrics: Page, client: str) -> bool:
    ours = {OPEN[0], ELSEWHERE[0], CLOSED[0]}
    others = [one for one in metrics.get("mps_control_up", ()) if one.labels["daemon"] not in ours]
    assert len(others) <= 1
    return [sample.value for sample in others] == [1]


def _follows(directory: str) -> Callable[[Page, str], bool]:
    def follows(metrics: Page, client: str) -> bool:
        name = "mps_control_log_readable"
        readable = {one.value for one in metrics.all(name, daemon=directory)}
        counted = metrics.value("mps_control_starts_total", daemon=directory)
        assert (readable == {1}) == (counted is not None)
        return readable == {1}

    return follows


def _client(metrics: Page, pid: str) -> dict[str, str]:
    found = metrics.all("mps_client_info", pid=pid)
    return found[0].labels if found else {}


def _limits(metrics: Page, pid: str) -> bool:
    seen = [
        metrics.value(f"mps_client_{name}", pid=pid)
        for name in ("active_thread_ratio", "memory_limit_bytes", "priority")
    ]
    assert seen in ([0.25, 1 << 30, 1], [None, None, None])
    source = _client(metrics, pid).get("limit_source", "unknown")
    assert source == ("unknown" if seen[0] is None else "client")
    return seen[0] is not None


ROWS: dict[str, Callable[[Page, str], bool]] = {
    "daemons that answer": lambda metrics, _: (
        _values(metrics, "mps_control_up", "mps_server_clients") == {1}
        and _values(metrics, "mps_control_state", mps_control_state="answering") == {1}
    ),
    "their processes": lambda metrics, _: (
        None not in _values(metrics, "mps_control_info", "mps_control_start_time_seconds")
    ),
    "daemons whose directories lie in a container": _container_answers,
    "incidents, waits and sessions": _follows(OPEN[0]),
    "the same, from logs elsewhere": _follows(ELSEWHERE[0]),
    "the same, where only the owner": _follows(CLOSED[0]),
    "the user, program, container": lambda metrics, pid: (
        _client(metrics, pid).get("command") == "train"
    ),
    "its PID namespace": lambda metrics, pid: bool(_client(metrics, pid).get("pid_namespace")),
    "its own limits": _limits,
}


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The columns, and the cells by what the row begins with."""
    text = PAGE.read_text("utf-8")
    start = text.index("| Data |")
    lines = text[start : text.index("\n\n", start)].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, _, *rows = cells
    return head[1:], {row[0]: row[1:] for row in rows}


def test_the_page_and_the_test_have_the_same_rows_and_columns() -> None:
    columns, rows = table()
    assert columns == list(COLUMNS)
    # The kernel log is the machine's own.
    tested = [row for row in rows if not row.startswith("who caused")]
    assert len(tested) == len(ROWS)
    for row, beginning in zip(tested, ROWS, strict=True):
        assert row.startswith(beginning)


@pytest.mark.parametrize("column", COLUMNS)
def test_what_the_table_promises_is_what_there_is(scene: Scene, column: str) -> None:
    columns, rows = table()
    promised, shown = {}, {}
    for row, cells in rows.items():
        for beginning, question in ROWS.items():
            if row.startswith(beginning):
                promised[row] = cells[columns.index(column)]
                runs = zip(("yes", "configured"), scene.seen[column], strict=True)
                found = (word for word, metrics in runs if question(metrics, scene.client))
                shown[row] = next(found, "no")
    assert shown == promised


@pytest.mark.parametrize("column", COLUMNS)
def test_no_other_metric_is_missing_and_none_is_made_up(scene: Scene, column: str) -> None:
    """All metrics of reachable daemons exist, except those that the table excludes."""
    columns, rows = table()
    (_, root), (_, named) = scene.seen["root"], scene.seen[column]
    lost = set()
    for row, cells in rows.items():
        if cells[columns.index(column)] == "no":
            lost |= set(re.findall(r"`(mps_[a-z_]+)`", row))
    # Labels of a metric that is there all the same.
    lost -= {"mps_client_info"}
    missing = root.keys() - named.keys()
    assert missing == lost & root.keys(), [root[name] for name in missing - lost]
    assert named.keys() - root.keys() <= {"mps_advice"}
    for metrics in scene.seen[column]:
        clients = [one.labels["pid"] for one in metrics.get("mps_client_info", ())]
        assert len(clients) == len(set(clients)), "no client is at two daemons"
        assert len(metrics.get("mps_control_up", ())) <= 4
        assert all(one.value == 1 for one in metrics.get("mps_control_up", ()))


def test_what_could_not_be_read_is_counted(scene: Scene) -> None:
    name = "mps_exporter_unreadable_environments"
    unread = {column: unnamed.value(name) or 0 for column, (unnamed, _) in scene.seen.items()}
    assert unread["root"] == unread["user + both"] == 0
    assert unread["user"] >= 3
    assert unread["user + PTRACE"] >= 4

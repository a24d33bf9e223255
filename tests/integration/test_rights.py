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
class Seen:
    """Metrics of the exporter without flags, and with all daemons named."""

    unnamed: Page
    named: Page


@dataclass
class Scene:
    """Four daemons, and what is seen of them with each of the rights."""

    clients: dict[str, int]
    seen: dict[str, Seen]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with own_host() as host:
        daemons = {
            "open": host.daemon(),
            "elsewhere": host.daemon(*ELSEWHERE),
            "closed": _closed(host),
            "container": host.daemon(
                inside=in_container({one: f"{CONTAINER}{one}" for one in OPEN})
            ),
        }
        clients = {
            name: host.client(
                daemon,
                1002,
                environment={
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
                    "CUDA_MPS_CLIENT_PRIORITY": "1",
                },
            )
            for name, daemon in daemons.items()
        }
        yield Scene(clients, {name: _look(host, *how) for name, how in COLUMNS.items()})


def _closed(host: OwnHost) -> Daemon:
    """Start a daemon whose logs only root may read; its pipe directory is open, as always."""
    daemon = host.daemon(*CLOSED, umask="077")
    pipe = host.outside(CLOSED[0])
    pipe.chmod(0o755)
    (pipe / "fake-mps.json").chmod(0o644)
    return daemon


def _look(host: OwnHost, rights: Sequence[str], inside: Sequence[str]) -> Seen:
    names = []
    for pipe, log in (OPEN, ELSEWHERE, CLOSED):
        names += [f"--mps.pipe-directory={pipe}", f"--mps.log-directory={log}"]
    found = []
    for flags in ([], names):
        host.serve(*flags, rights=rights, inside=inside)
        found.append(host.scrape())
        host.stop_exporters()
    return Seen(*found)


# ---------------------------------------------------------------------- what the rows are about


def _answers(metrics: Page, scene: Scene) -> bool:
    return (
        metrics.value("mps_control_up", daemon=OPEN[0]) == 1
        and metrics.value("mps_control_state", daemon=OPEN[0], mps_control_state="answering") == 1
        and metrics.value("mps_server_clients", daemon=OPEN[0]) == 1
    )


def _has_a_process(metrics: Page, scene: Scene) -> bool:
    return all(
        metrics.value(name, daemon=OPEN[0]) is not None
        for name in ("mps_control_info", "mps_control_start_time_seconds")
    )


def _container_answers(metrics: Page, scene: Scene) -> bool:
    ours = {directory for directory, _ in (OPEN, ELSEWHERE, CLOSED)}
    others = [
        sample
        for sample in metrics.get("mps_control_up", ())
        if sample.labels["daemon"] not in ours
    ]
    assert len(others) <= 1
    return [sample.value for sample in others] == [1]


def _follows(directory: str) -> Callable[[Page, Scene], bool]:
    def follows(metrics: Page, scene: Scene) -> bool:
        readable = {
            metrics.value("mps_control_log_readable", daemon=directory, log=log)
            for log in ("control", "server")
        }
        assert readable <= {None, 0, 1}
        counted = metrics.value("mps_control_starts_total", daemon=directory)
        assert (readable == {1}) == (counted is not None)
        return readable == {1}

    return follows


def _client(metrics: Page, scene: Scene) -> dict[str, str]:
    pid = str(scene.clients["open"])
    found = [one for one in metrics.get("mps_client_info", ()) if one.labels["pid"] == pid]
    return found[0].labels if found else {}


def _limits(metrics: Page, scene: Scene) -> bool:
    pid = str(scene.clients["open"])
    seen = [
        metrics.value(f"mps_client_{name}", pid=pid)
        for name in ("active_thread_ratio", "memory_limit_bytes", "priority")
    ]
    assert seen in ([0.25, 1 << 30, 1], [None, None, None])
    source = _client(metrics, scene).get("limit_source", "unknown")
    assert source == ("unknown" if seen[0] is None else "client")
    return seen[0] is not None


ROWS: dict[str, Callable[[Page, Scene], bool]] = {
    "daemons that answer": _answers,
    "their processes": _has_a_process,
    "daemons whose directories lie in a container": _container_answers,
    "incidents, waits and sessions": _follows(OPEN[0]),
    "the same, from logs elsewhere": _follows(ELSEWHERE[0]),
    "the same, where only the owner": _follows(CLOSED[0]),
    "the user, program, container": lambda metrics, scene: (
        _client(metrics, scene).get("command") == "train"
    ),
    "its PID namespace": lambda metrics, scene: bool(_client(metrics, scene).get("pid_namespace")),
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
    seen = scene.seen[column]
    promised, shown = {}, {}
    for row, cells in rows.items():
        for beginning, question in ROWS.items():
            if row.startswith(beginning):
                promised[row] = cells[columns.index(column)]
                runs = (("yes", seen.unnamed), ("configured", seen.named))
                found = (word for word, metrics in runs if question(metrics, scene))
                shown[row] = next(found, "no")
    assert shown == promised


@pytest.mark.parametrize("column", COLUMNS)
def test_no_other_metric_is_missing(scene: Scene, column: str) -> None:
    """All metrics of reachable daemons exist, except those that the table excludes."""
    columns, rows = table()
    root = scene.seen["root"].named
    all_there_is = root.keys()
    lost = set()
    for row, cells in rows.items():
        if cells[columns.index(column)] == "no":
            lost |= set(re.findall(r"`(mps_[a-z_]+)`", row))
    # Labels of a metric that is there all the same.
    lost -= {"mps_client_info"}
    missing = all_there_is - scene.seen[column].named.keys()
    assert missing == lost & all_there_is, [root[name] for name in missing - lost]
    more = scene.seen[column].named.keys() - all_there_is
    assert more <= {"mps_advice"}


@pytest.mark.parametrize("column", COLUMNS)
def test_nothing_is_reported_of_another_users_daemon(scene: Scene, column: str) -> None:
    """Whatever could not be read: no client is at two daemons, and no daemon is made up."""
    for metrics in (scene.seen[column].unnamed, scene.seen[column].named):
        clients = [one.labels["pid"] for one in metrics.get("mps_client_info", ())]
        assert len(clients) == len(set(clients))
        assert len(metrics.get("mps_control_up", ())) <= 4
        assert all(one.value == 1 for one in metrics.get("mps_control_up", ()))


def test_what_could_not_be_read_is_counted(scene: Scene) -> None:
    name = "mps_exporter_unreadable_environments"
    assert scene.seen["root"].unnamed.value(name) == 0
    assert scene.seen["user + both"].unnamed.value(name) == 0
    assert (scene.seen["user"].unnamed.value(name) or 0) >= 3
    assert (scene.seen["user + PTRACE"].unnamed.value(name) or 0) >= 4

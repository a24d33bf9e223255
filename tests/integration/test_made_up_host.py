"""The whole program on a host that somebody made up: files for /proc, a stand-in for the tool."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from mps_exporter.mps.policy import MIN_QUERY_AGE_SECONDS
from testing.fake_host import install_tool, server, set_daemon
from testing.fake_proc import BOOT_TIME, FakeProc
from testing.program import Page, Program, running
from testing.waiting import until

DAEMON, SERVER, CLIENT = 400, 457, 455
UUID = "GPU-00000000-1111-2222-3333-444444444444"


@dataclass
class MadeUpHost:
    """A host with one daemon."""

    folder: Path
    proc: FakeProc
    tool: Path
    flags: list[str] = field(default_factory=list)

    @property
    def pipe(self) -> Path:
        return self.folder / "pipe"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    def daemon(self, **state: object) -> None:
        """The daemon is like this from now on."""
        state.setdefault("pid", DAEMON)
        state.setdefault("log_directory", str(self.logs))
        set_daemon(self.pipe, **state)

    def log(self, name: str, *lines: str, component: str = "Control", pid: int = DAEMON) -> None:
        """The daemon or a server writes these lines now."""
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]  # noqa: DTZ005 - as MPS does
        with (self.logs / f"{name}.log").open("a") as file:
            file.writelines(f"[{stamp} {component} {pid:5}] {line}\n" for line in lines)

    def connect(self) -> None:
        """A server starts, and a client connects to it."""
        self.log(
            "control",
            f"NEW CLIENT {CLIENT} from user 1001: Server is not ready, push client to pending list",
            f"Starting new server {SERVER} for user 1001",
            f"NEW SERVER {SERVER}: Ready",
            f"NEW CLIENT {CLIENT} from user 1001: Server already exists",
        )
        time.sleep(0.005)  # a real server needs longer
        self.log(
            "server",
            "Active Threads Percentage set to 100.0",
            f"Client {{PID: {CLIENT}, Context ID: 0}} connected",
            f"Client {{PID: {CLIENT}, Context ID: 1}} connected",
            f"Device NVIDIA H200 (uuid {UUID}) is associated",
            component="Server",
            pid=SERVER,
        )
        self.daemon(servers=[server(SERVER, CLIENT)])
        self.processes()

    def processes(self) -> None:
        """The daemon, its server and a client are in /proc."""
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }
        started = time.time() - BOOT_TIME - 60
        self.proc.add(
            DAEMON,
            argv=["nvidia-cuda-mps-control", "-d"],
            environ=environment,
            started=started,
            sockets=[f"{self.pipe}/control"],
        )
        self.proc.add(
            SERVER,
            argv=["nvidia-cuda-mps-server"],
            parent=DAEMON,
            environ=environment,
            uid=1001,
            started=started,
        )
        self.proc.add(
            CLIENT,
            argv=["/opt/train"],
            uid=1001,
            started=started,
            environ={
                **environment,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
                "AWS_SECRET_ACCESS_KEY": "hunter2",
            },
        )


@pytest.fixture
def host(tmp_path: Path) -> MadeUpHost:
    one = MadeUpHost(tmp_path, FakeProc(tmp_path / "proc"), install_tool(tmp_path))
    one.pipe.mkdir()
    one.logs.mkdir()
    one.flags = [
        "--no-collector.nvml",
        f"--path.procfs={one.proc.root}",
        f"--mps.control-binary={one.tool}",
        f"--mps.pipe-directory={one.pipe}",
        f"--mps.log-directory={one.logs}",
        "--mps.min-query-interval=0s",
        # Starting the stand-in may take long on a busy machine; what hangs is another matter.
        "--mps.query-timeout=20s",
        "--collector.timeout=60s",
    ]
    one.daemon()
    one.log("control", f"Starting control daemon using socket {one.pipe}/control")
    one.log("server", "Startup", component="Other", pid=SERVER)
    one.processes()
    return one


def complaints(program: Program) -> list[str]:
    return [line for line in program.messages() if "level=warn" in line or "level=error" in line]


async def settled(program: Program) -> None:
    """The server was old enough to be asked which GPU it has; it is not asked again soon."""
    await program.until("mps_client_contexts", 1, pid=CLIENT, gpu="0")


async def test_it_shows_daemon_server_and_client(host: MadeUpHost) -> None:
    host.connect()
    async with running(host.folder, *host.flags) as program:
        page = await program.until("mps_server_clients", 1)
        daemon = str(host.pipe)
        assert page.value("mps_control_up", daemon=daemon) == 1
        assert page.value("mps_server_info", server=SERVER, uid=1001) == 1
        assert page.value("mps_client_info", pid=CLIENT, uid=1001, command="train") == 1
        # Which number the GPU has, the server tells when it is old enough to be asked.
        page = await program.until("mps_client_contexts", 1, pid=CLIENT, uuid=UUID, gpu="0")
        assert page.value("mps_client_active_thread_ratio", pid=CLIENT) == 0.25
        assert page.value("mps_client_connections_total") == 0  # it was there before
        assert "hunter2" not in page.text
        assert complaints(program) == []


async def test_a_client_that_comes_is_seen_and_counted(host: MadeUpHost) -> None:
    async with running(host.folder, *host.flags) as program:
        await program.until("mps_control_up", 1)
        host.connect()
        page = await program.until("mps_client_connections_total", 1, uid=1001)
        assert page.value("mps_server_startup_seconds_count") == 1
        await program.until("mps_server_clients", 1)


@pytest.mark.parametrize(
    ("mode", "state"), [("hang", "unresponsive"), ("refuse", "refused"), ("garbage", "refused")]
)
async def test_a_sick_daemon_is_a_metric_and_one_log_line(
    host: MadeUpHost, mode: str, state: str
) -> None:
    host.connect()
    patience = ["--mps.query-timeout=4s"] if mode == "hang" else []
    async with running(host.folder, *host.flags, *patience) as program:
        await program.until("mps_control_up", 1)
        host.daemon(mode=mode, servers=[server(SERVER, CLIENT)])
        page = await program.until("mps_control_up", 0)
        assert page.value("mps_control_state", mps_control_state=state) == 1
        assert page.value("mps_scrape_collector_success", collector="control") == 0
        assert page.value("mps_server_clients") == 1  # the logs still tell
        for _ in range(3):
            await program.page()
        assert len(complaints(program)) == 1
        if mode != "hang":  # one that hung is left alone for a while
            host.daemon(servers=[server(SERVER, CLIENT)])
            await program.until("mps_control_up", 1)
            assert any("control daemon answers" in line for line in program.messages())


async def test_a_daemon_that_is_gone_is_absent_and_comes_back(host: MadeUpHost) -> None:
    async with running(host.folder, *host.flags) as program:
        await program.until("mps_control_up", 1)
        host.daemon(mode="absent")
        host.proc.remove(DAEMON)
        host.proc.remove(SERVER)
        await program.until("mps_control_state", 1, mps_control_state="absent")
        host.daemon()
        host.processes()
        await program.until("mps_control_up", 1)


async def test_unreadable_logs_are_reported(host: MadeUpHost) -> None:
    host.connect()
    for name in ("control", "server"):
        (host.logs / f"{name}.log").unlink()
        (host.logs / f"{name}.log").mkdir()
    host.daemon(servers=[server(SERVER, CLIENT)], log_directory=None)
    async with running(host.folder, *host.flags) as program:
        page = await program.until("mps_server_clients", 1)
        assert page.value("mps_control_log_readable", log="control") == 0
        assert page.value("mps_server_state", mps_server_state="ACTIVE") == 1
        assert page.value("mps_client_info", pid=CLIENT) == 1
        assert page.value("mps_server_exits_total") is None  # never counted, so not 0


async def test_a_stopped_server_is_not_asked(host: MadeUpHost) -> None:
    host.connect()
    host.daemon(servers=[server(SERVER, CLIENT, stuck=True)])
    host.proc.add(
        SERVER,
        argv=["nvidia-cuda-mps-server"],
        parent=DAEMON,
        uid=1001,
        state="T",
        started=time.time() - BOOT_TIME - 60,
    )
    connected = time.time()
    async with running(host.folder, *host.flags, "--mps.reconcile-interval=1s") as program:
        await program.until("mps_server_clients", 1)
        await until(
            lambda: time.time() - connected > MIN_QUERY_AGE_SECONDS
        )  # one that runs is asked
        for _ in range(3):
            page = await program.page()
            assert page.value("mps_control_up") == 1
            assert page.value("mps_server_clients") == 1


async def test_scrapes_at_once_cost_one_collection(host: MadeUpHost) -> None:
    host.connect()
    async with running(host.folder, *host.flags) as program:
        await settled(program)
        before = (await program.page()).value("mps_control_queries_total")
        gate = host.pipe / "fake-mps.gate"
        gate.touch()
        host.daemon(servers=[server(SERVER, CLIENT)], gate=str(gate))
        scrapes = [asyncio.create_task(program.get()) for _ in range(40)]
        # So many are let in from one address. When the others are refused, all of these are inside.
        await until(lambda: sum(scrape.done() for scrape in scrapes) == 10)
        gate.unlink()
        answers = Counter(await asyncio.gather(*scrapes))
        assert Counter(status for status, _ in answers.elements()) == {503: 10, 200: 30}
        pages = [Page(text) for status, text in answers if status == 200]
        assert before is not None
        assert {page.value("mps_control_queries_total") for page in pages} == {before + 1}
        assert {page.value("mps_server_clients") for page in pages} == {1}

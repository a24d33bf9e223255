"""The programs that end jobs: which clients they terminate, and that they never hang.

mps-terminate runs unchanged, except for the path of /proc: a copy reads a synthetic /proc, so that
jobs, users, PID namespaces and processes that exit at the wrong time can be acted out.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.commands import output_of
from testing.fake_host import install_tool, server, set_daemon
from testing.fake_proc import HOST_NAMESPACE, FakeProc

JOBS = Path(__file__).parents[2] / "deploy" / "jobs"
INNER_NAMESPACE = 4026532261
SERVER = 990
IN_JOB_7 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
IN_JOB_70 = "0::/system.slice/slurmstepd.scope/job_70/step_0/user/task_0\n"
NOW = 1000.0

PATIENT = ("--timeout", "60", "--deadline", "240")
"""A daemon that answers must do so in this time, however busy the machine is."""


class Host:
    """A host with daemons and processes, and the program that is to be tested."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pipe, self.log = folder, folder / "pipe", folder / "log"
        self.log.mkdir()
        self.tool = install_tool(folder)
        self.proc = FakeProc(folder / "proc")
        (self.proc.root / "uptime").write_text(f"{NOW:.2f} 5.00\n")
        self.look_from(HOST_NAMESPACE)
        self.process(SERVER, argv=("nvidia-cuda-mps-server",))
        self.program = folder / "terminate.py"  # alone, as in a container of a pod
        text = (JOBS / "mps_terminate.py").read_text("utf-8")
        text = text.replace("/tmp/nvidia-mps", str(folder / "default"))
        self.program.write_text(text.replace("/proc", str(self.proc.root)), "utf-8")

    def look_from(self, namespace: int) -> None:
        """Run the program in this PID namespace."""
        self.proc.remove(4)
        here = self.proc.add(4, argv=("cat",), started=NOW, pid_namespace=namespace)
        link = self.proc.root / "self"
        if link.is_symlink():
            link.unlink()
        else:
            shutil.rmtree(link)
        link.symlink_to(here)

    def process(self, pid: int, **more: Any) -> None:
        self.proc.add(pid, **{"argv": ("python3",), "started": 10.0, **more})

    def daemon(self, *clients: int, pipe: Path | None = None, **state: Any) -> None:
        of_client = state.pop("each", {})
        one = server(SERVER, *clients)
        for client in one["clients"]:
            client.update(of_client)
        state = {"log_directory": str(self.log), "servers": [one], **state}
        set_daemon(pipe or self.pipe, **state)

    def run(
        self, *arguments: str, pipe: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        given = (f"--pipe-directory={self.pipe}".split("=")) if pipe else []
        return output_of(
            sys.executable,
            "-ISB",
            self.program,
            "--control",
            self.tool,
            *PATIENT,
            *given,
            *arguments,
            env={"PATH": os.environ["PATH"], **environment},
            timeout=300,
        )

    def expect(self, status: int, pids: list[int], *arguments: str, says: str = "") -> str:
        """Run the program, check status, terminated clients and output, and return the output."""
        done = self.run(*arguments)
        assert (done.returncode, done.stdout, self.terminated()) == (status, "", pids)
        assert says in done.stderr
        return done.stderr

    def terminated(self) -> list[int]:
        """The clients that a daemon was asked to terminate, in order."""
        log = self.log / "control.log"
        text = log.read_text() if log.exists() else ""
        return [int(pid) for pid in re.findall(rf"Cmd:terminate_client {SERVER} (\d+)", text)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("selection", "pids"),
    [
        (["--pid", "101"], [101]),
        (["--uid", "1002"], [102]),
        (["--slurm-job", "7"], [101, 104]),
        (["--slurm-job", "7", "--uid", "1001"], [101]),
        (["--slurm-job", "70", "--uid", "1001"], []),
        (["--descendant-of", "100"], [101, 102]),
        (["--descendant-of", "101"], [101]),
        (["--cgroup", "/system.slice/slurmstepd.scope/job_7"], [101]),
        (["--cgroup", "/system.slice/slurmstepd.scope/job_"], []),
        (["--cgroup", "/system.slice/slurmstepd.scope/", "--slurm-job", "70"], [102]),
    ],
)
def test_a_client_must_meet_every_condition(
    host: Host, selection: list[str], pids: list[int]
) -> None:
    host.process(100)
    host.process(101, uid=1001, cgroup=IN_JOB_7, parent=100)
    host.process(102, uid=1002, cgroup=IN_JOB_70, parent=105)
    host.process(105, parent=100)
    host.process(103, uid=1003, cgroup="0::/system.slice/ssh.service\n")
    host.process(104, cgroup="5:devices:/slurm/uid_1001/job_7/step_batch\n0::/\n")
    host.daemon(101, 102, 103, 104)
    says = f"terminated client {pids[0]} of server 990" if pids else ""
    host.expect(0, pids, *selection, says=says)


@pytest.mark.parametrize("reused", [False, True])
def test_a_client_that_exited_meanwhile_is_not_terminated(host: Host, reused: bool) -> None:
    """Its PID is free, or belongs to a process that started after the daemon listed the client."""
    if reused:
        host.process(101, started=NOW + 0.01)
    host.daemon(101)
    host.expect(0, [], "--pid", "101")


@pytest.mark.parametrize(("own", "pids"), [(HOST_NAMESPACE, []), (INNER_NAMESPACE, [101])])
def test_a_pid_counts_in_its_own_namespace(host: Host, own: int, pids: list[int]) -> None:
    """A daemon in a container calls its client 101; on the host this PID is another process."""
    host.process(101, cgroup=IN_JOB_7, pid_namespace=own)
    host.daemon(101, each={"namespace": str(INNER_NAMESPACE)})
    host.expect(0, pids, "--slurm-job", "7")


def test_without_the_right_to_compare_namespaces_nothing_is_sent(host: Host) -> None:
    host.process(101, pid_namespace=None)
    host.daemon(101)
    host.expect(1, [], "--pid", "101", says="its PID namespace cannot be read")


@pytest.mark.parametrize(
    ("answer", "status"), [("0", 0), ("201", 0), ("46", 1), ("Insufficient privileges for UID", 1)]
)
def test_the_answer_decides(host: Host, answer: str, status: int) -> None:
    host.process(101)
    host.daemon(101, each={"termination": answer})
    output = host.expect(status, [101], "--pid", "101")
    assert ("was not terminated" in output) == bool(status)


CLIENTS_V3 = """\
PID,SERVER,DEVICE,MAWS NS,CMD
101,srv,GPU-0,srv/default (0),"python, train"
102,srv,GPU-0,srv/default (0),"python3
103,srv,GPU-0,srv/default (0),python3
103,srv,GPU-1,srv/default (0),python3
"""


@pytest.mark.parametrize("server_namespace", [HOST_NAMESPACE, INNER_NAMESPACE])
def test_a_v3_daemon(host: Host, server_namespace: int) -> None:
    """It lists no PID namespaces: that of its server decides whether the PIDs are those here."""
    argv = ("nvidia-cuda-mps-server",)
    host.process(SERVER, argv=argv, pid_namespace=server_namespace)
    host.process(101, cgroup=IN_JOB_7)
    host.process(102, cgroup=IN_JOB_70)
    host.process(103, cgroup=IN_JOB_7)
    lists = {
        "server list --format=csv": f"name,uid,pid,status\nsrv,1000,{SERVER},Ready\nnew,1000,-,-\n",
        "client list --all --format=csv": CLIENTS_V3,
        "client terminate 101": "",
        "client terminate 103": "Insufficient privileges for UID 1000",
    }
    host.daemon(v3=lists)
    if server_namespace != HOST_NAMESPACE:
        host.expect(3, [], "--slurm-job", "7", says="cannot be compared")
        return
    says = host.expect(1, [], "--slurm-job", "7", says="terminated client 101 of server srv")
    assert "client 103 of server srv" in says
    assert "answered 'Insufficient privileges for UID 1000'" in says
    assert "client 102" not in says


# ----------------------------------------------------------------- a container's preStop hook


def test_a_hook_terminates_the_clients_of_its_own_container(host: Host) -> None:
    """The hook cannot read the host's PIDs: ps shows the PID namespace of each client."""
    host.look_from(INNER_NAMESPACE)
    own, other = server(SERVER, 5001, 5002)["clients"]
    own["namespace"] = str(INNER_NAMESPACE)
    host.daemon(servers=[{"pid": SERVER, "clients": [own, other]}])
    host.expect(0, [5001], "--own-pid-namespace")


def test_a_hook_does_not_act_on_a_client_that_changed_since(host: Host) -> None:
    host.look_from(INNER_NAMESPACE)
    one = {"pid": 5001, "id": 1, "namespace": str(INNER_NAMESPACE)}
    servers = [{"pid": SERVER, "clients": [{**one, "id": 2}]}]
    later = {"log_directory": str(host.log), "servers": servers}
    host.daemon(servers=[{"pid": SERVER, "clients": [one]}], after={"ps": later})
    host.expect(0, [], "--own-pid-namespace")


def test_a_row_forged_in_a_program_name_terminates_no_client(host: Host) -> None:
    host.look_from(INNER_NAMESPACE)
    name = f"python3\n5002 9 {SERVER} GPU-0 {INNER_NAMESPACE} python3"
    rows = [{"pid": 5001, "namespace": "4026532999", "command": name}, {"pid": 5002}]
    host.daemon(servers=[{"pid": SERVER, "clients": rows}])
    host.expect(1, [], "--own-pid-namespace", says="lists its PID twice")


def test_the_whole_host_is_no_container(host: Host) -> None:
    host.daemon(101)
    host.expect(2, [], "--own-pid-namespace")


def test_clients_that_the_daemon_itself_cannot_name(host: Host) -> None:
    host.look_from(INNER_NAMESPACE)
    host.daemon(0, each={"namespace": "?"})
    host.expect(3, [], "--own-pid-namespace", says="a PID namespace that the daemon cannot see")


def test_a_stopped_process_with_cuda_in_it_stops_the_hook(host: Host) -> None:
    host.look_from(INNER_NAMESPACE)
    host.process(7, state="T")
    (host.proc.root / "7" / "maps").write_text("7f00-7f01 r-xp 0 0:0 1 /lib/libcuda.so.580.1\n")
    host.daemon(5001, each={"namespace": str(INNER_NAMESPACE)})
    host.expect(3, [], "--own-pid-namespace")


# ------------------------------------------------------------------------------------- trouble


def test_no_daemon_is_no_error(host: Host) -> None:
    done = host.run("--uid", "0")
    assert (done.returncode, "no daemon runs" in done.stderr) == (0, True)
    assert host.run("--uid", "0", pipe=False).returncode == 0


def test_no_control_tool_is_an_error_only_where_a_daemon_is(host: Host) -> None:
    host.daemon(101)
    missing = str(host.folder / "nothing")
    assert host.run("--uid", "0", "--control", missing).returncode == 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(host.pipe / "control"))
        assert host.run("--uid", "0", "--control", missing).returncode == 3


@pytest.mark.parametrize("mode", ["hang", "refuse", "garbage", "flood", "silent"])
def test_a_daemon_that_does_not_answer_well(host: Host, mode: str) -> None:
    """Nothing is left behind that hangs, and the other daemon is served all the same."""
    host.process(101)
    host.daemon(101, pipe=host.folder / "second")
    host.daemon(101, mode=mode)
    second = str(host.folder / "second")
    output = host.expect(3, [101], "--uid", "0", "--timeout", "4", "--pipe-directory", second)
    assert output.count("are not known") == 1
    assert len(output.splitlines()) == 2


def test_a_collision_with_another_caller_is_tried_again(host: Host) -> None:
    host.process(101)
    host.daemon(101, mode="refuse_once")
    host.expect(0, [101], "--uid", "0")


def test_after_a_client_that_hangs_the_daemon_is_left_alone(host: Host) -> None:
    for pid in (101, 102):
        host.process(pid)
    host.daemon(101, 102, each={"termination": "hang"})
    done = host.run("--uid", "0", "--timeout", "4")
    (line,) = done.stderr.splitlines()
    assert "no other client of this daemon was tried" in line
    assert done.returncode == 1


@pytest.mark.parametrize("state", ["T", "Z"])
def test_a_server_that_does_not_run_is_not_asked(host: Host, state: str) -> None:
    """What it does not answer would block its daemon for every user."""
    host.process(SERVER, argv=("nvidia-cuda-mps-server",), state=state)
    host.process(101)
    host.daemon(101)
    done = host.run("--uid", "0")
    assert f"server 990 does not run (state {state})" in done.stderr
    assert done.returncode == 3
    assert "Cmd:ps" not in (host.log / "control.log").read_text()


def test_a_stopped_client_is_not_terminated(host: Host) -> None:
    host.process(101, state="T")
    host.process(102)
    host.daemon(101, 102)
    host.expect(1, [102], "--uid", "0", says="its process is stopped")


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("--dry-run",), ("--uid", "root"), ("--uid",), ("--pid", "0"), ("--pid", "-1")),
        *(("--cgroup", "/"), ("--everything",), ("--own-pid-namespace", "--uid", "0")),
        ("--uid", "0", "--timeout", "0"),
    ],
)
def test_wrong_usage_does_nothing(host: Host, arguments: tuple[str, ...]) -> None:
    host.process(101)
    host.daemon(101)
    done = host.run(*arguments)
    assert done.returncode == 2
    assert not (host.log / "control.log").exists()


def test_daemons_are_found_unless_they_belong_to_other_users(host: Host) -> None:
    for number, uid in enumerate((0, 1001, 1002)):
        pipe = host.folder / f"found-{number}"
        environ = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "OTHER": "a\nCUDA_MPS_PIPE_DIRECTORY=/no"}
        host.process(200 + number, argv=("nvidia-cuda-mps-control", "-d"), uid=uid, environ=environ)
        host.process(300 + number, uid=1001)
        host.daemon(300 + number, pipe=pipe)
    done = host.run("--uid", "1001", pipe=False)
    expected = [300, 301, 302] if os.getuid() == 1002 else [300, 301]
    assert (done.returncode, sorted(host.terminated())) == (0, expected)


IN_CONTAINER = {"uid": 0, "capabilities": 0xA80425FB}


@pytest.mark.parametrize(
    "whose",
    [
        pytest.param({"uid": 1003}, id="another user's"),
        pytest.param({"uid": 1001}, id="the caller's, hanging"),
        pytest.param({"uid": 0, "real_uid": 1001}, id="set-user-ID"),
        pytest.param({**IN_CONTAINER, "mount": 90}, id="a container's root, its mounts"),
        pytest.param({**IN_CONTAINER, "namespace_pids": (7,)}, id="a container's root, its PIDs"),
        pytest.param({"uid": 0, "users": "0 100000 65536\n"}, id="root of a user namespace"),
    ],
)
def test_no_process_of_another_user_delays_or_answers(host: Host, whose: dict[str, Any]) -> None:
    """The file hangs like that of a process whose memory is locked."""
    pipe = host.folder / "hers"
    argv, environ = ("nvidia-cuda-mps-control", "-d"), {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    here = host.proc.add(200, argv=argv, environ=environ, **whose)
    if whose["uid"]:
        (here / "cmdline").unlink()
        os.mkfifo(here / "cmdline")
    host.process(300, uid=1001)
    host.daemon(300, pipe=pipe)
    done = host.run("--uid", "1001", pipe=False)
    assert (done.returncode, host.terminated()) == (0, [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("given", ["", ".", "control"])
def test_the_default_directory_of_another_user_is_not_asked(host: Host, given: str) -> None:
    pipe = host.folder / "default"
    host.process(300, uid=1001)
    host.daemon(300, pipe=pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pipe / "control"))
        if given:
            os.chown(pipe / given, 1003, -1)
        done = host.run("--uid", "1001", pipe=False)
    assert (done.returncode, host.terminated()) == (0, [] if given else [300])


# ------------------------------------------------------------------------------------ wrappers


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A stand-in for the script: writes down how it was called, and whether PID lived then."""
    path = tmp_path / "recorder.sh"
    path.write_text(
        '#!/bin/sh\necho "$@" >>"${0%/*}/calls"\nkill -0 "$2" && echo alive >>"${0%/*}/calls"\n'
        "exit 1\n"
    )
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


DEFAULT_SIGNALS = ("env", "--default-signal=TERM,INT,HUP,USR1,USR2")
"""A shell cannot trap what was ignored when it began, as SIGINT is in a script's background."""


class Wrapped:
    """A program under mps-run.sh, in a session of its own, as a job's step is."""

    def __init__(self, recorder: Path, program: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*DEFAULT_SIGNALS, str(JOBS / "mps-run.sh"), sys.executable, "-S", "-c", program],
            env={**os.environ, "MPS_TERMINATE_CLIENTS": str(recorder), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = int(self.line())

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, text: bytes = b"") -> int:
        """Send this input to the program, and wait for its exit."""
        self.process.communicate(text, timeout=30)
        return self.process.returncode


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_job_ends_its_cuda_work_first(
    recorder: Path, how: signal.Signals
) -> None:
    """Slurm signals every process of the job; the program must outlive that."""
    job = Wrapped(recorder, SLEEPER, MPS_RUN_GRACE="0")
    os.killpg(job.process.pid, how)
    assert job.end() == 128 + how
    assert calls(recorder.parent) == [f"--descendant-of {job.pid} --deadline 15", "alive"]
    with pytest.raises(ProcessLookupError):
        os.kill(job.pid, 0)


def test_a_program_that_ends_by_itself_needs_no_kill(recorder: Path) -> None:
    job = Wrapped(recorder, "import os; print(os.getpid(), flush=True); raise SystemExit(7)")
    assert (job.end(), calls(recorder.parent)) == (7, [])


def test_a_program_that_saves_its_state_is_given_the_time(recorder: Path) -> None:
    saving = (
        "import os, signal, sys, time\n"
        # No print(): the signal may come while the line with the PID is being printed.
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(0.01)\n"  # a signal just before a pause() would not end it
    )
    job = Wrapped(recorder, saving, MPS_RUN_WAIT="60")
    job.process.terminate()
    assert job.line() == b"saved\n"
    assert job.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("seconds", ["-1", "1.5", "soon"])
def test_a_wrong_setting_starts_nothing(recorder: Path, seconds: str) -> None:
    done = subprocess.run(
        [str(JOBS / "mps-run.sh"), "touch", str(recorder.parent / "started")],
        env={**os.environ, "MPS_TERMINATE_CLIENTS": str(recorder), "MPS_RUN_GRACE": seconds},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, (recorder.parent / "started").exists()) == (2, False)


def test_an_epilog_never_fails(recorder: Path) -> None:
    """Slurm drains the node of an epilog that does."""
    environment = {"MPS_TERMINATE_CLIENTS": str(recorder), "PATH": os.environ["PATH"]}
    epilog = [str(JOBS / "mps-slurm-epilog.sh")]
    subprocess.run(epilog, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert calls(recorder.parent) == []
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1001"}
    subprocess.run(epilog, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert calls(recorder.parent)[0] == "--slurm-job 7 --uid 1001 --deadline 20"


CRITICAL = {"name": "ghost", "severity": "critical", "ordinary_user": False, "evidence": "a\nb"}
NODE, ONE_GPU = {**CRITICAL, "gpu": None, "uuid": None}, {**CRITICAL, "gpu": "0", "uuid": "GPU-0"}
USERS = {**NODE, "ordinary_user": True}
LOOKED = ["scontrol show node n1"]
DRAINED = [*LOOKED, "scontrol update nodename=n1 state=drain reason=mps-exporter: ghost: a b"]
RESUMED = [*LOOKED, "scontrol update nodename=n1 state=resume"]
OWN = r"IDLE+DRAIN ThreadsPerCore=1\n   Reason=mps-exporter: ghost [root@now]"


@pytest.mark.parametrize(
    ("findings", "gpus", "setting", "state", "expected"),
    [
        ([NODE], 2, "", "IDLE", DRAINED),
        ([NODE], 0, "", "IDLE", DRAINED),
        ([ONE_GPU], 1, "", "IDLE", DRAINED),
        ([ONE_GPU], 2, "", "IDLE", LOOKED),
        ([ONE_GPU], 2, "1", "IDLE", DRAINED),
        ([USERS], 1, "", "IDLE", LOOKED),
        ([NODE], 1, "", OWN, LOOKED),
        ([NODE], 1, "", r"MIXED+DRAIN Owner=a\n   Reason=fan", LOOKED),
        ([NODE], 1, "", r"IDLE Owner=a\n   Reason=was in DRAIN", DRAINED),
        ([], 1, "", OWN, RESUMED),
        ([], 1, "", r"IDLE+DRAIN Owner=a\n   Reason=disk", LOOKED),
        (None, 1, "", OWN, LOOKED),
    ],
)
def test_a_node_is_drained_and_resumed(
    tmp_path: Path,
    findings: list[dict[str, Any]] | None,
    gpus: int,
    setting: str,
    state: str,
    expected: list[str],
) -> None:
    """With None, a source could not be read."""
    unread = {"nvml": "no answer"} if findings is None else {}
    report = json.dumps({"findings": findings or [], "not_seen": unread})
    programs = {
        "mps-exporter": f"env | grep -q 'MPS_PIPE_DIRECTORY=/a b$' && cat <<'END'\n{report}\nEND",
        "nvidia-smi": "echo GPU\n" * gpus,
        "scontrol": f"echo scontrol \"$@\" >>'{tmp_path}/calls'\nprintf '   State={state}\\n'",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755 if text else 0o644)  # without a GPU: not there
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURMD_NODENAME": "n1",
        "MPS_HEALTH_DRAIN_FOR_ONE_GPU": setting,
    }
    settings = tmp_path / "settings"
    settings.write_text("A=$(B)\nMPS_EXPORTER_MPS_PIPE_DIRECTORY=/a b\n")
    subprocess.run([JOBS / "mps-slurm-health.sh", settings], env=environment, check=True)
    assert calls(tmp_path) == expected


@pytest.mark.parametrize(
    ("job", "failing", "anyway", "cancelled"),
    [
        ("7", "", "", True),
        ("7", "mps-terminate", "", False),
        ("7", "mps-terminate", "1", True),
        ("7", "mps-exporter", "", False),
        ("8", "", "", False),
    ],
)
def test_a_job_is_cancelled_if_its_clients_are_terminated_and_none_waits(
    tmp_path: Path, job: str, failing: str, anyway: str, *, cancelled: bool
) -> None:
    for pid, group in (("101", IN_JOB_7), ("102", IN_JOB_70), ("103", IN_JOB_7)):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cgroup").write_text(group)
    for name in ("srun", "scancel", "mps-terminate", "mps-exporter"):
        run = 'while [ "$1" != sh ]; do shift; done; "$@"' if name == "srun" else "echo told"
        text = f'echo {name} "${{1%%=*}}" "$2" "$3" >>"${{0%/*}}/calls"\n{run} || exit'
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\nexit {int(name == failing)}\n")
        (tmp_path / name).chmod(0o755)
    script = (JOBS / "mps-scancel.sh").read_text("utf-8").replace("/proc/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MPS_SCANCEL_ANYWAY": anyway}
    done = output_of("sh", "-c", script, "mps-scancel", job, env=environment)
    expected = ["srun --jobid --overlap --ntasks-per-node=1", f"mps-terminate --slurm-job {job} "]
    if job == "7" and failing != "mps-terminate":
        expected.append("mps-exporter doctor --before-kill=101 --before-kill=103")
    assert calls(tmp_path) == expected + ["scancel 7  "] * cancelled
    assert ("is not cancelled" in done.stderr, done.returncode) == (not cancelled, 1 - cancelled)
    assert ("told" in done.stderr) == (failing == "mps-exporter")

"""Scenarios about rights: the control tool as the exporter runs it, and sockets that lie."""

import asyncio
import json
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from testing.page import Page
from tests.hardware.lab import CONTROL, Daemon, Lab, as_user, exporter, get, run, serving
from tests.hardware.scenarios import scenario

PORT = 9477
_UNIT = "sys_ptrace,+dac_read_search"
PROGRAMS: dict[str, tuple[str, ...]] = {
    "root": (),
    "unit": (
        *as_user(1500),
        f"--inh-caps=-all,+{_UNIT}",
        f"--ambient-caps=-all,+{_UNIT}",
        f"--bounding-set=-all,+{_UNIT}",
        "--no-new-privs",
    ),
    "ordinary": tuple(as_user(1500)),
}
"""How the exporter is started: as root, with the rights of the systemd unit, without any."""


def scrape() -> Page:
    return Page(get(PORT, "/metrics"))


async def page_of_program(before: tuple[str, ...]) -> Page:
    """Run mps-exporter for 3 s, by another program if need be, and scrape it."""
    with serving(PORT, "--mps.min-query-interval=0s", before=before):
        await asyncio.sleep(3)
        return await asyncio.to_thread(scrape)


def _owners(directory: Path) -> dict[str, str]:
    """Mode and owner of each file, and of the directory."""
    found = {}
    for path in (directory, *sorted(directory.iterdir())):
        status = path.lstat()
        name = "." if path == directory else path.name
        found[name] = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
    return found


def _shown(page: Page, daemon: Daemon) -> dict[str, float | None]:
    return {
        "up": page.value("mps_control_up", daemon=daemon.label),
        "control.log": page.value("mps_control_log_readable", log="control", daemon=daemon.label),
        "server.log": page.value("mps_control_log_readable", log="server", daemon=daemon.label),
        "clients": page.value("mps_server_clients", daemon=daemon.label),
        "contexts": page.value("mps_server_client_contexts", daemon=daemon.label),
    }


@scenario("the control tool without rights: daemons of root, of a user, in namespaces")
async def control_rights(lab: Lab) -> None:
    root = lab.daemon("root")
    for directory in (root.pipe, root.log):
        directory.chmod(0o755)
    own = lab.daemon("own", uid=1001)
    users = lab.hidden_daemon("users", uid=1002, mode="755")
    roots = lab.hidden_daemon("roots", mode="755")
    daemons = {"root": root, "own": own, "user-contained": users, "root-contained": roots}
    for daemon in daemons.values():
        await lab.until("mps_control_up", 1, daemon=daemon.label)

    clients = [
        lab.client("spin", 90, daemon=root, uid=1001),
        lab.client("spin", 90, daemon=own, uid=1001),
        lab.client("spin", 90, daemon=users, uid=1002, before=users.enter),
        lab.client("spin", 90, daemon=roots, uid=1003, before=roots.enter),
    ]
    await lab.ready(*clients)
    for name, daemon in daemons.items():
        await lab.until("mps_server_clients", 1, daemon=daemon.label)
        for log in ("control", "server"):
            lab.check("mps_control_log_readable", 1, daemon=daemon.label, log=log)
        for directory in (daemon.log, daemon.pipe):
            owners = _owners(Path(f"/proc/{daemon.pid}/root{directory}"))
            lab.facts[f"owners {name} {directory.name}"] = owners
    # A server of another user after the first.
    clients[0].kill()
    second = await lab.ready_client("spin", 40, daemon=root, uid=1004)
    await lab.until("mps_client_info", 1, daemon=root.label, uid=1004)
    lab.check("mps_control_log_readable", 1, daemon=root.label, log="server")
    lab.facts["owners root, second user"] = _owners(root.log)
    await _by_each_program(lab, daemons)
    await lab.end(*clients, second)
    for daemon in (root, own):
        daemon.quit()


async def _by_each_program(lab: Lab, daemons: Mapping[str, Daemon]) -> None:
    """What the exporter shows of these daemons, with one client each, by its rights."""
    for how, before in PROGRAMS.items():
        page = await page_of_program(before)
        (lab.out / f"control-rights-{how}.prom").write_text(page.text)
        for name, daemon in daemons.items():
            shown = _shown(page, daemon)
            ok = how != "root" or shown["up"] == shown["clients"] == shown["server.log"] == 1
            lab.note(f"exporter as {how}: {name}", ok=ok, wanted="all 1", got=shown)
        done = await run(*before, *exporter("doctor"))
        (lab.out / f"control-rights-{how}.doctor").write_text(done.stdout + done.stderr)


_LISTEN = """
import os, socket, sys, threading, time
path, kind, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
server = socket.socket(socket.AF_UNIX, kind)
server.bind(path)
os.chmod(path, 0o777)
server.listen(64)
print("ready", flush=True)
def serve(one):
    try:
        if mode == "garbage":
            one.recv(4096); one.sendall(os.urandom(4096)); one.close()
        elif mode == "flood":
            while True: one.sendall(b"1" * 65536)
        elif mode == "lines":
            while True: one.sendall(b"4242\\n" * 1000)
        elif mode == "slow":
            while True: one.sendall(b"1"); time.sleep(0.2)
        else:
            time.sleep(3600)
    except OSError: pass
while True:
    one = server.accept()[0]
    threading.Thread(target=serve, args=(one,), daemon=True).start()
"""


def _socket_type(path: Path) -> int:
    """The type of a listening socket, as the kernel lists it."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        words = line.split()
        if words[-1] == str(path):
            return int(words[4], 16)
    return int(socket.SOCK_STREAM)


@contextmanager
def _listener(lab: Lab, daemon: Daemon, mode: str) -> Iterator[None]:
    """Put sockets of a user's own where those of her daemon were."""
    away, started = lab.folder / f"away-{mode}", []
    away.mkdir(exist_ok=True)
    try:
        for path in sorted(daemon.pipe.iterdir()):
            if stat.S_ISSOCK(path.lstat().st_mode):
                kind = _socket_type(path)
                lab.facts[f"type of {path.name}"] = kind
                shutil.move(path, away / path.name)
                process = subprocess.Popen(
                    [*as_user(1003), sys.executable, "-c", _LISTEN, str(path), str(kind), mode],
                    stdout=subprocess.PIPE,
                )
                assert process.stdout is not None
                process.stdout.readline()
                started.append((process, path))
        yield
    finally:
        for process, path in started:
            process.kill()
            process.wait(5)
            path.unlink(missing_ok=True)
        for path in away.iterdir():
            shutil.move(path, daemon.pipe / path.name)


def _tools() -> list[str]:
    """Runs of the control tool that are under way: their users and rights."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_bytes().split(b"\0")
            text = status.read_text()
        except OSError:
            continue
        if command[0].decode(errors="replace").endswith(CONTROL) and b"-d" not in command:
            rows = dict(row.split(":\t", 1) for row in text.splitlines() if ":\t" in row)
            names = ("Uid", "CapEff", "CapPrm", "CapAmb", "NoNewPrivs")
            found.append(" ".join(f"{name}={rows[name].split()[0]}" for name in names))
    return sorted(found)


@scenario("the real control tool meets a user's socket that hangs, lies or floods")
async def hostile_sockets(lab: Lab) -> None:
    root = lab.daemon("root")
    bad = lab.daemon("bad", uid=1003)
    client = await lab.ready_client("spin", 200, daemon=root)
    for how in ("root", "unit"):
        for mode in ("calm", "hang", "garbage", "flood", "lines", "slow"):
            seconds, tools, page = list[float](), list[str](), Page("")
            with (
                _listener(lab, bad, mode) if mode != "calm" else nullcontext(),
                serving(PORT, "--mps.min-query-interval=0s", before=PROGRAMS[how]) as program,
            ):
                for _ in range(8):
                    await asyncio.sleep(0.3)
                    began = time.monotonic()
                    page = await asyncio.to_thread(scrape)
                    seconds.append(round(time.monotonic() - began, 3))
                    tools += _tools()
                rows = Path(f"/proc/{program.pid}/status").read_text().splitlines()
                rss = next(row.split()[1] for row in rows if row.startswith("VmRSS"))
            result = {
                "root": _shown(page, root),
                "bad": _shown(page, bad),
                "scrapes": sorted(seconds),
                "rss_kib": int(rss),
                "tools": sorted(set(tools)),
                "left": _tools(),
            }
            lab.facts[f"{how} {mode}"] = result
            honest = result["root"]
            assert isinstance(honest, dict)
            ok = honest["up"] == honest["clients"] == 1 and not result["left"]
            ok = ok and (mode == "calm" or _shown(page, bad)["up"] == 0)
            lab.note(
                f"{how} {mode}", ok=ok, wanted="root's daemon is shown", got=json.dumps(result)
            )
    await lab.end(client)
    root.quit()

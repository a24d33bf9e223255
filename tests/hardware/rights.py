"""A scenario about rights: the control tool as the exporter runs it."""

import asyncio
import stat
from collections.abc import Mapping
from pathlib import Path

from testing.page import Page
from tests.hardware.lab import Daemon, Lab, as_user, exporter, get, run, serving
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

"""Scenarios that run the whole program, as a user does, with real clients."""

import asyncio
import ctypes.util
import sys
from pathlib import Path

from testing.commands import output_of
from testing.page import Page
from tests.hardware.lab import Lab, as_user, get, serving
from tests.hardware.scenarios import scenario

PORT = 9477


def scrape() -> Page:
    return Page(get(PORT, "/metrics"))


async def page_of_program(before: tuple[str, ...]) -> Page:
    """Run mps-exporter for 3 s, by another program if need be, and scrape it."""
    with serving(PORT, "--mps.min-query-interval=0s", before=before):
        await asyncio.sleep(3)
        return await asyncio.to_thread(scrape)


def _expect(lab: Lab, page: Page, name: str, wanted: float | None, **labels: object) -> None:
    lab.equal(f"{name}{labels}", page.value(name, **labels), wanted)


@scenario("the exporter as an ordinary user: everything but the clients' own limits")
async def ordinary_user(lab: Lab) -> None:
    daemon = lab.daemon()
    client = await lab.ready_client("spin", 14, percentage="25")
    page = await page_of_program(tuple(as_user(1001)))
    _expect(lab, page, "mps_control_up", 1)
    _expect(lab, page, "mps_server_clients", 1)
    _expect(lab, page, "mps_client_info", 1, pid=client.pid, limit_source="unknown")
    _expect(lab, page, "mps_client_sm_limit", None)
    _expect(lab, page, "mps_client_active_thread_ratio", None)
    _expect(lab, page, "mps_client_contexts", 1, pid=client.pid)
    memory = page.value("mps_client_memory_used_bytes", pid=client.pid)
    lab.note("memory of the client", ok=bool(memory), wanted="> 0", got=memory)
    unreadable = page.value("mps_exporter_unreadable_environments")
    lab.note("unreadable environments", ok=bool(unreadable), wanted=">= 1", got=unreadable)
    (lab.out / "ordinary-user.prom").write_text(page.text)
    await lab.end(client)
    daemon.quit()


@scenario("the NVML library is missing: MPS metrics carry the daemon's own UUIDs")
async def without_nvml(lab: Lab) -> None:
    daemon = lab.daemon()
    client = await lab.ready_client("spin", 14)
    uuid = (await lab.look()).snapshot.gpus[0].uuid
    library = _nvml_path()
    script = f'mount --bind /dev/null {library} && exec "$@"'
    hide = ("unshare", "--mount", "sh", "-c", script, "sh")
    page = await page_of_program(hide)
    _expect(lab, page, "mps_scrape_collector_success", 0, collector="nvml")
    _expect(lab, page, "mps_control_up", 1)
    _expect(lab, page, "mps_server_client_contexts", 1, uuid=uuid, gpu="0")
    _expect(lab, page, "mps_client_contexts", 1, uuid=uuid, pid=client.pid)
    _expect(lab, page, "mps_gpu_info", None)
    await lab.end(client)
    daemon.quit()


def _nvml_path() -> Path:
    name = ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1"
    maps = output_of(
        sys.executable,
        "-c",
        f"import ctypes; ctypes.CDLL({name!r}); print(open('/proc/self/maps').read())",
        check=True,
    ).stdout
    return Path(next(line.split()[-1] for line in maps.splitlines() if "nvidia-ml" in line))

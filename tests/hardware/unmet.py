"""Scenarios of shared memory, limits of contexts, two daemons on a GPU, and mounted directories.

The doctor's answer is compared with what happened; each comparison is a row of the truth file.
"""

import json
import time
from pathlib import Path
from typing import Any

from mps_exporter.merge.clients import PER_CONTEXT_VARIABLE
from mps_exporter.snapshot import Client as SeenClient
from tests.hardware.lab import Lab, exporter, run
from tests.hardware.scenarios import scenario

MAPPING_FAILED = 205
DEFAULT = Path("/tmp/nvidia-mps")
OWN_SHM = (
    "unshare",
    "--ipc",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none /dev/shm && exec "$@"',
    "sh",
)
SETTLED_SECONDS = 10.0  # Timeout for a process to get a context or an error.


async def _doctor(lab: Lab, *words: str) -> dict[str, Any]:
    began = time.monotonic()
    done = await run(*exporter("doctor", "--json", *words))
    lab.facts[f"doctor seconds {len(lab.facts)}"] = round(time.monotonic() - began, 2)
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


async def _finding(lab: Lab, name: str) -> str:
    """Return the evidence of a finding of the doctor; "" without it."""
    found = (await _doctor(lab)).get("findings", [])
    return " ".join(one["evidence"] for one in found if one["name"] == name)


async def _checks(lab: Lab, pid: int) -> str:
    """Return all that doctor --pid prints of a process, as JSON."""
    return json.dumps(await _doctor(lab, f"--pid={pid}"))


def _row(lab: Lab, step: str, *, ok: bool, **values: object) -> None:
    lab.facts[step] = {"ok": ok, **values}
    lab.note(step, ok=ok, wanted="as it is", got=values)


def _seen(lab: Lab, pid: int) -> SeenClient | None:
    servers = (server for daemon in lab.seen.snapshot.daemons for server in daemon.servers)
    return next((one for server in servers for one in server.clients if one.pid == pid), None)


@scenario("clients with a /dev/shm of their own, for each way to start a server")
async def memory_regions(lab: Lab) -> None:
    for name, arguments, explicit in (
        ("plain", ("-d",), False),
        ("several users", ("-d", "-multiuser-server"), False),
        ("started for a user", ("-d",), True),
    ):
        daemon = lab.daemon(name.replace(" ", "-"), arguments=arguments)
        if explicit:
            lab.facts["start_server"] = daemon.tool("start_server -uid 1001")
        host = await lab.ready_client("idle", 60, daemon=daemon, uid=1001)
        log = (daemon.log / "server.log").read_text(errors="replace")
        regions = [line for line in log.splitlines() if "shared memory region" in line]
        files = sorted(path.name for path in Path("/dev/shm").glob("cuda.shm.*"))
        inside = lab.stayer(daemon=daemon, before=OWN_SHM, uid=1001)
        said = await lab.settled(inside, SETTLED_SECONDS)
        text = await _checks(lab, inside.pid)
        failed, named = said == f"error {MAPPING_FAILED}", "named memory region" in text
        more = {"regions": regions, "files": files, "checks": text}
        _row(lab, f"{name}: own /dev/shm", ok=failed == named, said=said, named=named, **more)
        await lab.end(inside, host)
        await lab.quit(daemon)


@scenario("a percentage of each context, two daemons on a GPU, and a mounted default directory")
async def unmet(lab: Lab) -> None:
    one = lab.daemon("one")
    limits = {PER_CONTEXT_VARIABLE: "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    each = await lab.ready_client("idle", 90, daemon=one, more=limits)
    await lab.until("mps_server_clients", 1, daemon=one.label)
    lab.check("mps_client_sm_limit", None, daemon=one.label, pid=each.pid)
    source = seen.limit_source if (seen := _seen(lab, each.pid)) else None
    sms = (each.event("ready") or {}).get("sms")
    _row(lab, "per context", ok=source == "per_context", source=source, sms=sms)

    two = lab.daemon("two")
    other = await lab.ready_client("idle", 60, daemon=two)
    await lab.until("mps_server_clients", 1, daemon=two.label)
    both = await _finding(lab, "gpu_shared_by_daemons")
    named = one.label in both and two.label in both
    _row(lab, "two daemons", ok=named, evidence=both)
    await lab.end(other)
    await lab.quit(two)
    alone = await _finding(lab, "gpu_shared_by_daemons")
    _row(lab, "one of them has quit", ok=not alone, evidence=alone)

    there = DEFAULT.exists()
    DEFAULT.mkdir(exist_ok=True)
    try:
        bind = f'mount --bind {one.pipe} {DEFAULT} && unset CUDA_MPS_PIPE_DIRECTORY && exec "$@"'
        inside = lab.stayer(daemon=one, before=("unshare", "--mount", "sh", "-c", bind, "sh"))
        said = await lab.settled(inside, SETTLED_SECONDS)
        await lab.until("mps_server_clients", 2, daemon=one.label)
        reason = seen.joined_by if (seen := _seen(lab, inside.pid)) else None
        evidence = await _finding(lab, "joined_by_default_directory")
        checks = await _checks(lab, inside.pid)
        ok = (said, reason) == ("ready", "mount") and f" {inside.pid} " in evidence
        row = {"said": said, "reason": reason, "evidence": evidence, "checks": checks}
        _row(lab, "mounted default", ok=ok and "mounted for it" in checks, **row)
        variable = seen.joined_by if (seen := _seen(lab, each.pid)) else None
        _row(lab, "by the variable", ok=variable == "variable", reason=variable)
        await lab.end(inside, each)
    finally:
        if not there:
            DEFAULT.rmdir()
    await lab.quit(one)

"""Scenarios of what people share a GPU for: what it gains, and how it goes wrong by itself."""

from tests.hardware.lab import Client, Daemon, Lab, inner_pid
from tests.hardware.scenarios import scenario, served

STREAMS = 8
# Programs that use NVLink multicast can disturb others on the same host.
NCCL = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def _rate(*clients: Client) -> float:
    """Kernels a second of all these clients together."""
    ends = [client.event("done") for client in clients]
    return sum(float(str(e["kernels"])) / float(str(e["seconds"])) for e in ends if e is not None)


def _seconds(*clients: Client) -> float | None:
    """How long the slowest of these took; None unless all have ended well."""
    ends = [client.event("done") for client in clients]
    return max((float(str(e["seconds"])) for e in ends if e), default=None) if all(ends) else None


async def _activity(lab: Lab, *clients: Client) -> dict[str, float]:
    """Wait for the clients' exit; return the GPU's activity meanwhile, by two counters."""
    await lab.ready(*clients, seconds=40)
    names = {
        "busy_share": "mps_gpu_busy_seconds_total",
        "sm_active_share": "mps_gpu_sm_active_seconds_total",
    }
    await lab.run(1)
    before = await lab.look()
    await lab.run(3)
    after = await lab.look()
    seconds = after.snapshot.taken_at - before.snapshot.taken_at
    await lab.left(*clients)
    shares = {}
    for share, name in names.items():
        one, two = before.value(name, gpu=0), after.value(name, gpu=0)
        if one is not None and two is not None:
            shares[share] = round((two - one) / seconds, 4)
    return shares


@served(
    "one process with one stream, with eight streams, and eight processes with and without MPS",
    CUDA_VISIBLE_DEVICES="0",
)
async def streams(lab: Lab, daemon: Daemon) -> None:
    for name, processes, streams_each, mps in (
        ("one stream", 1, 1, False),
        ("eight streams", 1, STREAMS, False),
        ("eight processes", STREAMS, 1, False),
        ("eight processes with MPS", STREAMS, 1, True),
    ):
        crowd = [
            lab.client("spin", 6, mps=mps, streams=streams_each, gpus="0") for _ in range(processes)
        ]
        activity = await _activity(lab, *crowd)
        lab.facts[name] = {"kernels_per_second": round(_rate(*crowd), 1), **activity}
        lab.note(name, ok=_rate(*crowd) > 0, wanted="> 0", got=lab.facts[name])


@served(
    "a small job beside one that wants the whole GPU, with and without percentages",
    CUDA_VISIBLE_DEVICES="0",
)
async def percentages(lab: Lab, daemon: Daemon) -> None:
    for name, small_share, big_share in (
        ("alone", "100", None),
        ("without limits", "100", "100"),
        ("25 and 75 %", "25", "75"),
    ):
        big = []
        if big_share is not None:
            big = [lab.client("spin", 7, blocks=132 * 32, percentage=big_share)]
            await lab.ready(*big)
        small = await lab.ready_client("spin", 5, blocks=8, percentage=small_share)
        await lab.until("mps_client_sm_limit", (1, 132), pid=small.pid)
        limit = lab.value("mps_client_sm_limit", pid=small.pid)
        activity = await _activity(lab, small, *big)
        lab.facts[name] = {
            "small_kernels_per_second": round(_rate(small), 1),
            "big_kernels_per_second": round(_rate(*big), 1),
            "small_sm_limit": limit,
            **activity,
        }
        lab.note(name, ok=_rate(small) > 0, wanted="> 0", got=lab.facts[name])


@served("a framework that crashes under MPS, and whom it takes along", CUDA_VISIBLE_DEVICES="0")
async def framework_crash(lab: Lab, daemon: Daemon) -> None:
    neighbours = [lab.torch("train", 60000, gpus="0") for _ in range(2)]
    faulty = lab.torch("crash", 4, gpus="0")
    await lab.ready(*neighbours, faulty, seconds=60)
    await lab.until("mps_server_clients", 3)
    await lab.left(faulty, seconds=20)
    await lab.run(3)
    lab.check("mps_client_losses_total", 3, cause="unattributed_fault")
    lab.check("mps_server_faults_total", 1, gpu=0)
    survivors = sum(client.process.poll() is None for client in neighbours)
    lab.facts["survivors"] = survivors
    lab.facts["the faulty client said"] = faulty.event("error")
    lab.facts["a neighbour said"] = neighbours[0].output.read_text(errors="replace")[-400:]
    lab.equal("neighbours left alive", survivors, 0)
    for client in neighbours:
        client.kill()
    await lab.left(*neighbours)


# ------------------------------------------------------------------------------- two GPUs


@scenario("two daemons on two GPUs, and one in PID and mount namespaces of its own")
async def three_daemons(lab: Lab) -> None:
    daemons = [lab.daemon(f"mps{index}", CUDA_VISIBLE_DEVICES=str(index)) for index in (0, 1)]
    hidden = lab.hidden_daemon("inner", CUDA_VISIBLE_DEVICES="0")
    await lab.until("mps_control_up", 1, daemon=hidden.label)
    lab.equal("its directory is visible from the host", hidden.pipe.exists(), wanted=False)
    clients = [
        lab.client("spin", 12, daemon=daemon, uid=1001 + index)
        for index, daemon in enumerate(daemons)
    ]
    inside = lab.client("spin", 12, daemon=hidden, uid=1003, before=hidden.enter, gpus="0")
    await lab.ready(*clients, inside)
    pids = [client.pid for client in clients] + [inner_pid(inside.pid)]
    for index, daemon in enumerate([*daemons, hidden]):
        d = daemon.label
        await lab.until("mps_server_clients", 1, daemon=d)
        lab.check("mps_control_up", 1, daemon=d)
        lab.check("mps_client_info", 1, daemon=d, pid=pids[index], uid=1001 + index)
        lab.check("mps_client_memory_used_bytes", (1, 1 << 36), daemon=d, pid=pids[index])
        lab.check("mps_server_client_contexts", 1, daemon=d, gpu=index % 2)
        lab.check("mps_gpu_served", 1, daemon=d, gpu=index % 2)
        lab.check("mps_gpu_served", None, daemon=d, gpu=1 - index % 2)
    await lab.look()
    for gpu, count in ((0, 2), (1, 1)):
        lab.check("mps_gpu_processes", count, kind="mps_client", gpu=gpu)
        lab.check("mps_gpu_processes", 0, kind="direct", gpu=gpu)
    await lab.left(*clients, inside)
    await lab.run(1)
    for index, daemon in enumerate([*daemons, hidden]):
        lab.check("mps_client_disconnections_total", 1, daemon=daemon.label, uid=1001 + index)
    for daemon in daemons:
        daemon.quit()
    hidden.kill()
    await lab.run(1)


@served("data-parallel training over two GPUs: alone, beside small trainings, and those under MPS")
async def data_parallel(lab: Lab, daemon: Daemon) -> None:
    for name, mps, small in (
        ("alone", False, 0),
        ("beside 4 small trainings a GPU", False, 4),
        ("beside 4 small trainings a GPU, all under MPS", True, 4),
    ):
        meeting = lab.folder / f"meeting-{len(lab.facts)}"
        crowd = [
            lab.torch("train", 60000, mps=mps, gpus=str(gpu))
            for gpu in (0, 1)
            for _ in range(small)
        ]
        await lab.ready(*crowd, seconds=60)
        both = [lab.torch("parallel", rank, meeting, mps=mps, more=NCCL) for rank in (0, 1)]
        await lab.ready(*both, seconds=60)
        if mps:
            await lab.until("mps_server_clients", 2 + 2 * small)
            for gpu in (0, 1):
                lab.check("mps_gpu_processes", (1 + small, 2 + small), kind="mps_client", gpu=gpu)
        await lab.left(*both)
        await lab.end(*crowd)
        lab.facts[name] = {"seconds": _seconds(*both)}
        lab.note(name, ok=_seconds(*both) is not None, wanted="done", got=lab.facts[name])

"""Many replayed hosts behind one port, each under a path of its own.

    python -m grafana.pictures.hosts PORT NAME=RECORDING[@SPEED] ...

serves the recording of each name again and again at /NAME/metrics, as an exporter would. Two hosts
are no recordings: `eight-gpus` with 48 clients each, which no recorded machine had, and `mps-v3`,
made up from what is published of MPS v3.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import web

from mps_exporter.backend import CollectorBackend
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, render
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.snapshot import Client, CollectorResult, ControlDaemon, Gpu, Server, Snapshot
from mps_exporter.sources.playlist import Playlist
from mps_exporter.sources.recording import read_recording
from testing import v3_host
from testing.player import Player

RECORDINGS = Path(__file__).parents[2] / "tests" / "recordings"
MADE_UP = "eight-gpus"
V3 = "mps-v3"
GPUS, CLIENTS_PER_GPU = 8, 48


def service(recording: str) -> CollectorBackend:
    """Replay a recording: NAME, or NAME@SPEED."""
    name, _, speed = recording.partition("@")
    path = RECORDINGS / f"{name}.rec.gz"
    settings = Settings(replay=str(path), replay_speed=float(speed or 1))
    return CollectorBackend(settings, Playlist.of(read_recording(path)))


def eight_gpus(seconds: float) -> Snapshot:
    """Give a host with as many clients as MPS admits on eight GPUs, after so many seconds."""
    uuids = [f"GPU-{number:08d}-0000-4000-8000-000000000000" for number in range(GPUS)]
    servers = tuple(
        Server(
            pid=4000 + number,
            uid=1001 + number % 4,
            state="ACTIVE",
            ghost=False,
            clients_connected=CLIENTS_PER_GPU,
            contexts={uuid: CLIENTS_PER_GPU},
            contexts_limit={uuid: CLIENTS_PER_GPU},
            clients=tuple(
                Client(
                    pid=10_000 + 100 * number + client,
                    server_pid=4000 + number,
                    uid=1001 + number % 4,
                    command="train",
                    contexts={uuid: 1},
                    memory_used_bytes={uuid: (client + 1) * 30_000_000},
                    sm_limit={uuid: 132 if client % 2 else 66},
                )
                for client in range(CLIENTS_PER_GPU)
            ),
        )
        for number, uuid in enumerate(uuids)
    )
    daemon = ControlDaemon(
        pipe_directory="/tmp/nvidia-mps",  # noqa: S108, MPS's own default
        log_directory="/var/log/nvidia-mps",
        state="answering",
        servers=servers,
        gpu_uuids=tuple(uuids),
    )
    gpus = tuple(
        Gpu(
            GpuObservation(
                number,
                uuid,
                name="NVIDIA H200",
                sm_count=132,
                readings=(
                    Reading("up", 1.0),
                    Reading("busy_time", seconds * 0.9),
                    Reading("sm_active_time", seconds * (0.4 + number / 20)),
                    Reading("memory_used", 60e9 + number * 1e9),
                    Reading("memory_total", 141e9),
                    Reading("power", 500.0 + 10 * number),
                    Reading("temperature", 60.0 + number, (("sensor", "gpu"),)),
                ),
            ),
            index=str(number),
            uuid=uuid,
        )
        for number, uuid in enumerate(uuids)
    )
    return Snapshot(
        taken_at=time.time(),
        driver_version="595.71.05",
        gpus=gpus,
        gpu_indexes={uuid: str(number) for number, uuid in enumerate(uuids)},
        daemons=(daemon,),
        collectors=(CollectorResult("nvml", success=True, duration_seconds=0.01),),
    )


def app(services: Mapping[str, CollectorBackend], v3: Player) -> web.Application:
    """Serve each at /NAME/metrics, and the host with MPS v3."""
    began = time.monotonic()

    async def metrics(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == MADE_UP:
            snapshot = eight_gpus(time.monotonic() - began)
            page = Encoder().encode(render(snapshot, Build("made up", "", "")), [], TEXT_0_0_4)
        elif name == V3:
            snapshot = (await v3.to_end()).snapshot
            page = Encoder().encode(render(snapshot, Build("made up", "", "")), [], TEXT_0_0_4)
        elif name in services:
            snapshot = await services[name].collect(None, None)
            page = await services[name].expose(snapshot, TEXT_0_0_4, gzip=False)
        else:
            raise web.HTTPNotFound
        return web.Response(body=page, headers={"Content-Type": TEXT_0_0_4.content_type})

    async def followed(_: web.Application) -> AsyncIterator[None]:
        running = [asyncio.create_task(each.run()) for each in services.values()]
        yield
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for each in services.values():
            await each.close()

    app = web.Application()
    app.router.add_get("/{name}/metrics", metrics)
    app.cleanup_ctx.append(followed)
    return app


def main(arguments: list[str]) -> None:
    """Serve until terminated."""
    port, *named = arguments
    pairs = [text.partition("=")[::2] for text in named]
    services = {name: service(recording) for name, recording in pairs}
    web.run_app(
        app(services, Player(v3_host.recording())), host="127.0.0.1", port=int(port), print=None
    )


if __name__ == "__main__":
    main(sys.argv[1:])

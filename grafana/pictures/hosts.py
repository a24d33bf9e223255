"""Many replayed hosts behind one port, each with its own path.

    python -m grafana.pictures.hosts PORT NAME=RECORDING[@SPEED] ...

serves the recording of each name in a loop at /NAME/metrics, as an exporter would. Two hosts are
synthetic: `eight-gpus` with 48 clients each, and `mps-v3`, from what is published of MPS v3.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import web

from mps_exporter.backend import Backend
from mps_exporter.flags import Settings
from mps_exporter.metrics.exposition import TEXT_0_0_4
from mps_exporter.sources.recording import read_recording
from mps_exporter.sources.replay_host import Playlist
from testing import v3_host
from testing.page import text_of
from testing.player import Player
from testing.snapshots import full

RECORDINGS = Path(__file__).parents[2] / "tests" / "recordings"
MADE_UP = "eight-gpus"
V3 = "mps-v3"


def service(recording: str) -> Backend:
    """Replay a recording: NAME, or NAME@SPEED."""
    name, _, speed = recording.partition("@")
    path = RECORDINGS / f"{name}.rec.gz"
    settings = Settings(replay=str(path), replay_speed=float(speed or 1))
    return Backend(settings, Playlist.of(read_recording(path)))


def app(services: Mapping[str, Backend], v3: Player) -> web.Application:
    """Serve each at /NAME/metrics, and the host with MPS v3."""
    began = time.time()

    async def metrics(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in services:
            snapshot = await services[name].collect(None, None)
            page = await services[name].expose(snapshot, TEXT_0_0_4, gzip_level=0)
        elif name in (MADE_UP, V3):
            snapshot = full() if name == MADE_UP else (await v3.to_end()).snapshot
            shift = began - snapshot.taken_at
            page = text_of(snapshot, wall=lambda at: at + shift).encode()
        else:
            raise web.HTTPNotFound
        return web.Response(body=page, headers={"Content-Type": TEXT_0_0_4})

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

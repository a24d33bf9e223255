"""A server with an answer of 1.3 MB, as a program: ``python -m tests.unit.web.big_server``."""

import asyncio
import random
import signal
import sys

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.web.app import create_app
from mps_exporter.web.server import serve_app
from tests.unit.web.fakes import FakeBackend

REQUEST_TIMEOUT = 2.0
SEND_TIMEOUT = 2.0


async def main() -> None:
    numbers = random.Random(1)
    lines = [f'mps_x{{pid="{n}"}} {numbers.random()}\n' for n in range(38_000)]
    settings = Settings(web_listen_address=("127.0.0.1:0",))
    backend = FakeBackend(body="".join(lines).encode(), seconds=0.02, settings=settings)
    policy.REQUEST_TIMEOUT_SECONDS = REQUEST_TIMEOUT
    policy.SEND_TIMEOUT_SECONDS = SEND_TIMEOUT
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = create_app(backend)
    await serve_app(app, stop, on_listening=lambda shown: print(shown[0], flush=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mps_exporter.flags import Settings
from mps_exporter.web.app import create_app
from tests.unit.web.fakes import FakeBackend

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Any]]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def make_client(backend: FakeBackend) -> AsyncIterator[MakeClient]:
    clients: list[Client] = []

    async def make(**settings: Any) -> Client:
        backend.settings = Settings(**settings)
        app = create_app(backend)
        client: Client = TestClient(TestServer(app), auto_decompress=False)
        await client.start_server()
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()

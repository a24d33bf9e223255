"""What keeps the process small."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys

import pytest

from mps_exporter.own_memory import without_host_certificates


@pytest.mark.parametrize("before", [None, "/etc/ssl/some.pem"])
def test_no_authorities_are_read_inside_and_nothing_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    else:
        monkeypatch.setenv("SSL_CERT_FILE", before)
    with without_host_certificates():
        assert ssl.create_default_context().cert_store_stats()["x509"] == 0
    assert os.environ.get("SSL_CERT_FILE") == before


def test_the_server_holds_no_authorities_of_the_host() -> None:
    code = """if True:
        from mps_exporter import cli
        cli.asyncio.run = lambda started: started.close() or 0
        cli.main(["serve"])
        import gc, ssl
        contexts = [one for one in gc.get_objects() if isinstance(one, ssl.SSLContext)]
        print(len(contexts), sum(one.cert_store_stats()["x509"] for one in contexts))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, authorities = done.stdout.split()
    assert int(found) >= 1, "aiohttp makes none any more: the workaround can go"
    assert authorities == "0"

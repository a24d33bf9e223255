"""The doctor shows which program has the ports that this exporter and dcgm-exporter share."""

from __future__ import annotations

import socket
import threading

import pytest

from mps_exporter.commands.doctor import port_lines


@pytest.mark.parametrize(
    ("page", "owner"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n# HELP DCGM_FI_DEV_SM_CLOCK MHz\n", "dcgm-exporter"),
        (b"HTTP/1.0 200 OK\r\n\r\n# HELP mps_exporter_build_info x\n", "mps-exporter"),
        (b"SSH-2.0-x\r\n", "not known"),
    ],
)
def test_the_owner_of_a_port_is_known_by_its_metrics(page: bytes, owner: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reply() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(page)

        threading.Thread(target=reply).start()
        assert port_lines([port]) == ["", f"Ports: {port} {owner}"]
    assert port_lines([port]) == [], "free ports are left out"

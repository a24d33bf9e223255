import errno
import os
import socket
from pathlib import Path

import pytest

from mps_exporter.flags import StartError
from mps_exporter.web import server
from mps_exporter.web.server import display_address, from_systemd, listen
from testing.ports import free_port


@pytest.mark.parametrize(
    ("address", "why"),
    [("9400", ""), ("host:99999", ""), ("::1:9400", ""), ("192.0.2.1:0", "this host has no such")],
)
def test_wrong_addresses(address: str, why: str) -> None:
    with pytest.raises(StartError, match=f"cannot listen on {address}: .*{why}"):
        listen([address])


def test_all_or_none_and_a_taken_port_names_the_likely_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        taken, free = owner.getsockname()[1], free_port()
        with pytest.raises(StartError, match=r"another program listens there.*--web\.listen-addr"):
            listen([f"127.0.0.1:{free}", f"127.0.0.1:{taken}"])
        server.close_sockets(listen([f"127.0.0.1:{free}"]))
    assert "dcgm-exporter" in server._reason(":9400", OSError(errno.EADDRINUSE, "in use"))


def test_an_address_that_the_host_lacks_is_skipped_if_the_name_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [("192.0.2.1", 0), ("127.0.0.1", 0)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (one,) = listen(["a-name:0"])
    assert one.getsockname()[0] == "127.0.0.1"
    server.close_sockets([one])


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    first = listen([f"unix:{path}"])
    assert display_address(first[0]) == f"unix:{path}"
    with pytest.raises(StartError, match="another program listens there, or it is given twice"):
        listen([f"unix:{path}"])
    server.close_sockets(first)
    assert not path.exists()


def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    server.close_sockets(listen([f"unix:{path}"]))
    assert not path.exists()


def test_no_file_is_ever_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StartError, match="no socket is there"):
        listen([f"unix:{path}"])
    assert path.read_text() == "data"


def test_systemd_handed_over_nothing() -> None:
    for process, count in (("", ""), ("1", "1"), ("", "1"), (str(os.getpid()), "0")):
        environment = {"LISTEN_PID": process, "LISTEN_FDS": count}
        with pytest.raises(StartError, match="handed over no socket"):
            from_systemd(environment)
        assert environment == {}


def test_sockets_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = display_address(one)
        inherited = server._inherited(one.detach())
        assert display_address(inherited) == address
        assert not inherited.get_inheritable()
        server.close_sockets([inherited])
    with socket.socket() as one, (tmp_path / "file").open("w") as file:
        for descriptor in (one.detach(), file.fileno()):
            with pytest.raises(StartError, match="not a listening stream socket"):
                server._inherited(descriptor)
    monkeypatch.setattr(server, "_inherited", lambda descriptor: descriptor)
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
    assert list[object](from_systemd(environment)) == [3, 4]

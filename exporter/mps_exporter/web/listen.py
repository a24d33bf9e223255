"""Listening sockets: TCP addresses, Unix sockets, and those that systemd opened."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from mps_exporter.config import StartError, split_address

BACKLOG = 1024
DCGM_PORT = 9400
FIRST_SYSTEMD_FD = 3


class ListenError(StartError):
    """A socket cannot be opened; the message contains the reason and the remedy."""


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Open one or several sockets for each address: all of them or none.

    Raises:
        ListenError: An address cannot be used.
    """
    sockets: list[socket.socket] = []
    for address in addresses:
        try:
            if address.startswith("unix:"):
                sockets.append(_unix(address.removeprefix("unix:")))
            else:
                sockets += _tcp(*split_address(address))
        except (OSError, ValueError) as error:
            before = [display_address(one) for one in sockets]
            close_sockets(sockets)
            raise ListenError(
                f"cannot listen on {address}: {_reason(address, error, before)}"
            ) from error
    return sockets


def close_sockets(sockets: Sequence[socket.socket], *, remove_files: bool = True) -> None:
    """Close the sockets and remove the files of Unix sockets, unless they are systemd's."""
    for one in sockets:
        if one.fileno() < 0:
            continue
        path = one.getsockname() if one.family == socket.AF_UNIX else None
        one.close()
        if path and remove_files:
            Path(path).unlink(missing_ok=True)


def display_address(one: socket.socket) -> str:
    """Return a listening socket's address as --web.listen-address takes it."""
    name = one.getsockname()
    if one.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"


def _tcp(host: str, port: int) -> list[socket.socket]:
    if not host and socket.has_dualstack_ipv6():
        try:
            return [_bound(socket.AF_INET6, ("::", port), dualstack=True)]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is disabled
                raise
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, where in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, where))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                close_sockets(sockets)
                raise
            missing = error
    if not sockets and missing is not None:
        raise missing
    return sockets


def _bound(family: int, where: tuple[object, ...], *, dualstack: bool = False) -> socket.socket:
    one = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack)
    one.setblocking(False)
    return one


def _reason(address: str, error: Exception, before: Sequence[str]) -> str:
    number = error.errno if isinstance(error, OSError) else None
    port = address.rpartition(":")[2]
    if number == errno.EADDRINUSE:
        own = next((one for one in before if one.rpartition(":")[2] == port), None)
        if own is not None:
            return f"it is given twice or overlaps with {own} (--web.listen-address)"
        if address.startswith("unix:"):
            return "another program listens there"
        owner = (
            f"{port} is also the default port of NVIDIA's dcgm-exporter, which may be running here"
            if port == str(DCGM_PORT)
            else "another program listens there"
        )
        return (
            f"the address is in use: {owner}. Choose another port, such as "
            "--web.listen-address=:9401 (both can run side by side)"
        )
    if number == errno.EADDRNOTAVAIL:
        return "this host has no such address"
    if number in (errno.EACCES, errno.EPERM):
        return "no permission (ports below 1024 need it)"
    return getattr(error, "strerror", None) or str(error)


def _unix(path: str) -> socket.socket:
    _remove_stale(path)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.setblocking(False)
        one.bind(path)
        one.listen(BACKLOG)
    except OSError:
        one.close()
        raise
    return one


def _remove_stale(path: str) -> None:
    """Remove the socket that a dead process left, and nothing else."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError("a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def from_systemd(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the sockets that systemd opened (LISTEN_FDS), and remove the variables.

    Raises:
        ListenError: There are none, or they are not listening stream sockets.
    """
    process = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal() or int(count) < 1:
        raise ListenError(
            "--web.systemd-socket: systemd handed over no socket; start the .socket unit, not the "
            ".service, or leave the flag out"
        )
    return [_inherited(FIRST_SYSTEMD_FD + number) for number in range(int(count))]


def _inherited(descriptor: int) -> socket.socket:
    try:
        one = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ListenError(
            f"--web.systemd-socket: descriptor {descriptor} is no socket: {error.strerror}"
        ) from error
    if one.type != socket.SOCK_STREAM or not one.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        raise ListenError(
            f"--web.systemd-socket: descriptor {descriptor} is not a listening stream socket "
            "(ListenStream= with Accept=no)"
        )
    one.setblocking(False)
    one.set_inheritable(False)
    return one

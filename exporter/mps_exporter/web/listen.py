"""Listening sockets: TCP addresses, Unix sockets, and those that systemd hands over."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path

BACKLOG = 1024
DCGM_PORT = 9400
FIRST_SYSTEMD_FD = 3
_ANY = frozenset({"::", "0.0.0.0"})  # noqa: S104


class ListenError(Exception):
    """We cannot listen where we were told to; the message says why and what to do."""


class _TakenError(ListenError):
    """Somebody listens there already."""

    def __init__(self, message: str, host: object, port: int | None = None) -> None:
        super().__init__(message)
        self._host = host
        self._port = port

    def by(self, one: socket.socket) -> bool:
        """Whether it is this socket of our own that is in the way."""
        name = one.getsockname()
        if self._port is None or isinstance(name, str):
            return bool(name == self._host)
        return name[1] == self._port and (
            name[0] == self._host or not _ANY.isdisjoint((name[0], self._host))
        )


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Open a socket, or several, for each address: all of them or none.

    Raises:
        ListenError: One of them cannot be had.
    """
    sockets: list[socket.socket] = []
    had: dict[str, list[socket.socket]] = {}
    for address in addresses:
        try:
            if address.startswith("unix:"):
                had[address] = [_unix(address.removeprefix("unix:"))]
            else:
                had[address] = _tcp(address)
        except _TakenError as error:
            ours = [other for other, own in had.items() if any(error.by(one) for one in own)]
            close_sockets(sockets)
            if ours:
                raise ListenError(_twice(address, ours[0])) from error
            raise
        except ListenError:
            close_sockets(sockets)
            raise
        sockets += had[address]
    return sockets


def _twice(address: str, before: str) -> str:
    if address == before:
        return f"cannot listen on {address}: it is given twice (--web.listen-address)"
    return (
        f"cannot listen on {address}: it overlaps with {before}, which is given too "
        "(--web.listen-address)"
    )


def close_sockets(sockets: Sequence[socket.socket], *, remove_files: bool = True) -> None:
    """Close; the file of a Unix socket goes too, unless it is systemd's."""
    for one in sockets:
        if one.fileno() < 0:
            continue
        path = one.getsockname() if one.family == socket.AF_UNIX else None
        one.close()
        if path and remove_files:
            Path(path).unlink(missing_ok=True)


def display_address(one: socket.socket) -> str:
    """The address of a listening socket, as it would be given to us."""
    name = one.getsockname()
    if one.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, ``:port``, ``[IPv6]:port`` -> host (may be empty) and port.

    Raises:
        ListenError: It is none of these.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ListenError(
            f'cannot listen on {address!r}: an address is "host:port", ":port", "[IPv6]:port" or '
            '"unix:/path"'
        )
    if ":" in host and not bracketed:
        raise ListenError(
            f"cannot listen on {address!r}: an IPv6 address stands in brackets: [::1]:9400"
        )
    return (host[1:-1] if bracketed else host), int(port)


def _tcp(address: str) -> list[socket.socket]:
    host, port = split_address(address)
    if not host:
        return [_any(address, port)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {host!r} is unknown: {error}") from error
    sockets: list[socket.socket] = []
    refused: tuple[OSError, tuple[object, ...]] | None = None
    for family, _, _, _, where in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, where))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                close_sockets(sockets)
                raise _why_refused(address, where, error) from error
            refused = error, where
    if not sockets and refused is not None:
        raise _why_refused(address, refused[1], refused[0]) from refused[0]
    return sockets


def _any(address: str, port: int) -> socket.socket:
    """Every address of the host: one socket for both families where there is IPv6."""
    try:
        try:
            return _bound(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return _bound(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104
    except OSError as error:
        raise _why_refused(address, ("::", port), error) from error


def _bound(family: int, where: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        one.bind(where)
        one.listen(BACKLOG)
    except OSError:
        one.close()
        raise
    return one


def _why_refused(address: str, where: tuple[object, ...], error: OSError) -> ListenError:
    host, port = where[0], int(str(where[1]))
    reason = _reason(address, port, error)
    return (
        _TakenError(reason, host, port) if error.errno == errno.EADDRINUSE else ListenError(reason)
    )


def _reason(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = (
            f"{port} is also the default port of NVIDIA's dcgm-exporter, which may be running here"
            if port == DCGM_PORT
            else "another program listens there"
        )
        return (
            f"cannot listen on {address}: the address is in use: {owner}. Choose another port, "
            "such as --web.listen-address=:9401 (both can run side by side)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: this host has no such address"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot listen on {address}: no permission (ports below 1024 need it)"
    return f"cannot listen on {address}: {error.strerror or error}"


def _unix(path: str) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        one.setblocking(False)
        one.bind(path)
        one.listen(BACKLOG)
    except OSError as error:
        one.close()
        raise ListenError(f"cannot listen on unix:{path}: {error.strerror or error}") from error
    except ListenError:
        one.close()
        raise
    return one


def _remove_stale(path: str) -> None:
    """Remove the socket that a dead process left; never anything else."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on unix:{path}: a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise _TakenError(f"cannot listen on unix:{path}: another program listens there", path)


def from_systemd(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets that systemd opened for us (LISTEN_FDS); the variables are removed.

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
    sockets: list[socket.socket] = []
    for descriptor in range(FIRST_SYSTEMD_FD, FIRST_SYSTEMD_FD + int(count)):
        try:
            one = socket.socket(fileno=descriptor)
            sockets.append(one)
            listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ListenError(
                f"--web.systemd-socket: descriptor {descriptor} is no socket: {error.strerror}"
            ) from error
        if one.type != socket.SOCK_STREAM or not listening:
            raise ListenError(
                f"--web.systemd-socket: descriptor {descriptor} is not a listening stream socket "
                "(ListenStream= with Accept=no)"
            )
        one.setblocking(False)
        one.set_inheritable(False)
    return sockets

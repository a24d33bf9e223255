"""The server: listening sockets (TCP, Unix, systemd's), and an application served on them."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import StartError, split_address
from mps_exporter.web import BACKEND, WEB_CONFIG
from mps_exporter.web.guard import Connections

_log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------- sockets


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Open sockets for each address, or raise StartError and leave none open."""
    sockets: list[socket.socket] = []
    for address in addresses:
        try:
            if address.startswith("unix:"):
                sockets.append(_unix(address.removeprefix("unix:")))
            else:
                sockets += _tcp(*split_address(address))
        except (OSError, ValueError) as error:
            close_sockets(sockets)
            raise StartError(f"cannot listen on {address}: {_reason(address, error)}") from error
    return sockets


def close_sockets(sockets: Sequence[socket.socket], *, remove_files: bool = True) -> None:
    """Close the sockets; with `remove_files`, also remove the files of Unix sockets."""
    for one in sockets:
        if one.fileno() < 0:
            continue
        path = one.getsockname() if one.family == socket.AF_UNIX else None
        one.close()
        if path and remove_files:
            Path(path).unlink(missing_ok=True)


def display_address(one: socket.socket) -> str:
    """Return a listening socket's address in the form of --web.listen-address."""
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
            if error.errno != errno.EADDRNOTAVAIL:  # else IPv6 is off
                raise
    anywhere = "0.0.0.0"  # noqa: S104 - the default
    found = [*dict.fromkeys(socket.getaddrinfo(host or anywhere, port, type=socket.SOCK_STREAM))]
    sockets: list[socket.socket] = []
    for number, (family, _, _, _, where) in enumerate(found, 1):
        try:
            sockets.append(_bound(family, where))
        except OSError as error:
            absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
            if not absent or (number == len(found) and not sockets):
                close_sockets(sockets)
                raise
    return sockets


def _bound(family: int, where: tuple[object, ...], *, dualstack: bool = False) -> socket.socket:
    one = socket.create_server(
        where, family=family, backlog=policy.LISTEN_BACKLOG, dualstack_ipv6=dualstack
    )
    one.setblocking(False)
    return one


def _reason(address: str, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        owner = "another program listens there, or it is given twice"
        if address.startswith("unix:"):
            return owner
        if address.endswith(":9400"):
            owner = "9400 is also the default port of NVIDIA's dcgm-exporter, which may be running"
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
        one.listen(policy.LISTEN_BACKLOG)
    except OSError:
        one.close()
        raise
    return one


def _remove_stale(path: str) -> None:
    """Remove a socket that an ended process left behind, but no other file."""
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
    """Return the listening sockets that systemd opened (LISTEN_FDS), and remove the variables."""
    process = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal() or int(count) < 1:
        raise StartError(
            "--web.systemd-socket: systemd handed over no socket; start the .socket unit, not the "
            ".service, or leave the flag out"
        )
    return [_inherited(3 + number) for number in range(int(count))]  # see sd_listen_fds(3)


def _inherited(descriptor: int) -> socket.socket:
    refusal = StartError(
        f"--web.systemd-socket: descriptor {descriptor} is not a listening stream socket "
        "(ListenStream= with Accept=no)"
    )
    try:
        one = socket.socket(fileno=descriptor)
    except OSError as error:
        raise refusal from error
    if one.type != socket.SOCK_STREAM or not one.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        one.close()
        raise refusal
    one.setblocking(False)
    one.set_inheritable(False)
    return one


# -------------------------------------------------------------------------------- serving


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """Drop clients' errors, which could fill the log, except at debug level."""
    error = record.exc_info[1] if record.exc_info else None
    of_clients = HttpProcessingError, web.RequestPayloadError, ConnectionError
    return not isinstance(error, of_clients) or _log.isEnabledFor(logging.DEBUG)


_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.addFilter(_is_of_the_server)


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app,
        access_log=None,
        logger=_protocol_log,
        auto_decompress=False,
        handle_signals=False,
        handler_cancellation=True,
        keepalive_timeout=policy.KEEPALIVE_TIMEOUT_SECONDS,
        lingering_time=policy.LINGERING_TIMEOUT_SECONDS,
        shutdown_timeout=policy.DRAIN_TIMEOUT_SECONDS,
    )


async def serve_app(
    app: web.Application,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[Sequence[str]], None] | None = None,
) -> None:
    """Serve until `stop`, then finish responses; `on_listening` gets addresses with real ports."""
    settings = app[BACKEND].settings
    systemd = settings.web_systemd_socket
    sockets = from_systemd(os.environ) if systemd else listen(settings.web_listen_address)
    runner = _runner(app)
    watch = app.get(WEB_CONFIG)

    def tls() -> ssl.SSLContext | None:
        return None if watch is None else watch.active.context

    tasks: list[asyncio.Task[object]] = []
    try:
        await runner.setup()
        connections = Connections(cast("web.Server", runner.server), tls)
        addresses = [display_address(one) for one in sockets]
        for address in addresses:
            _log.info("listening", extra={"fields": {"address": address, "tls": tls() is not None}})
        if on_listening is not None:
            on_listening(addresses)
        work = [stop.wait(), connections.abort_slow_clients(), *map(connections.accept, sockets)]
        if watch is not None:
            work.append(watch.follow())
        tasks = [asyncio.create_task(one) for one in work]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only a bug ends a task other than the first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close_sockets(sockets, remove_files=not systemd)
        await runner.cleanup()
        if tasks:
            await connections.abort_all()

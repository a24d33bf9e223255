"""Ports for servers whose port must be known before they start."""

import atexit
import secrets
import socket
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

_LOCKS = ExitStack()
atexit.register(_LOCKS.close)


def free_port() -> int:
    """Return a free TCP port, reserved for the caller until its process exits.

    It is outside the kernel's range of ephemeral ports, and a lock reserves it among tests: no
    other program takes it before the intended server has started.
    """
    ports = _ports_on_request()
    first = secrets.randbelow(len(ports))
    for port in chain(ports[first:], ports[:first]):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            lock = socket.socket(socket.AF_UNIX)
            try:
                lock.bind(f"\0mps-exporter-test-port-{port}")  # no file: it ends with the process
            except OSError:
                lock.close()
                raise
            _LOCKS.enter_context(lock)
            return port
    raise AssertionError("no port is free")


def _ports_on_request() -> range:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")
    low, high = map(int, text.split())
    below, above = range(10_000, low), range(high + 1, 65_536)
    return below if len(below) >= len(above) else above

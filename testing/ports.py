"""Ports for servers that must be told theirs before they start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from itertools import chain
from pathlib import Path

_LOCKS: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that nobody uses, kept for the caller until its process ends.

    It lies outside the range from which the kernel gives ports to those who name none, and a lock
    keeps it from other tests: nobody takes it before the server that it is for has started.
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
            _LOCKS.append(lock)
            return port
    raise AssertionError("no port is free")


def _ports_on_request() -> range:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")
    low, high = map(int, text.split())
    below, above = range(10_000, low), range(high + 1, 65_536)
    return below if len(below) >= len(above) else above

"""Which GPU a context is on: server.log names the GPU without the context.

    Client {PID: 440, Context ID: 1} connected
    Device NVIDIA H200 (uuid GPU-5e4dfbf1-...) is associated        of which context?
    Status of client {PID: 440, Context ID: 1} is ACTIVE            of this one

The GPU is taken for that of the oldest context without one. The server's threads write in any
order, so the status line that follows corrects it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

MAX_WAITING = 256


class _HasContexts(Protocol):
    contexts: dict[int, str]


class Associations:
    """Contexts of one server that have no GPU yet, oldest first."""

    def __init__(self, clients: Mapping[int, _HasContexts]) -> None:
        self._clients = clients
        self._waiting: deque[tuple[int, int]] = deque(maxlen=MAX_WAITING)
        """(key of the client, context ID)."""
        self._last: tuple[int, int] | None = None
        """The context that the last GPU was given to, until its status is written."""

    def add(self, key: int, context: int) -> None:
        self._waiting.append((key, context))

    def associate(self, uuid: str) -> None:
        """A GPU is associated with a context."""
        if not self._waiting:
            return
        key, context = self._waiting.popleft()
        client = self._clients.get(key)
        if client is not None and context in client.contexts:
            client.contexts[context] = uuid
            self._last = key, context

    def confirm(self, pid: int, context: int, *, active: bool) -> None:
        """The status of a context follows: if it is ACTIVE, the last GPU is its own."""
        guessed, self._last = self._last, None
        actual = (pid, context)
        if not active or pid == 0 or guessed is None or guessed == actual:
            return
        own, other = self._clients.get(pid), self._clients.get(guessed[0])
        if own is None or other is None or own.contexts.get(context) != "":
            return
        own.contexts[context] = other.contexts.get(guessed[1], "")
        if guessed[1] in other.contexts:
            other.contexts[guessed[1]] = ""
            self._waiting.appendleft(guessed)
        if actual in self._waiting:
            self._waiting.remove(actual)

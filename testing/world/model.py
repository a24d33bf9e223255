"""A host with one control daemon of driver 580, single-user servers, and users' clients."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count
from random import Random

from mps_exporter.observations import LogName
from testing.mps_logs import EIGHT, GPU, LOGS
from testing.world.script import Action
from testing.world.truth import Truth

DAEMON = 630
FIRST_SERVER_PID, FIRST_CLIENT_PID = 1_000, 100_000
START_MS = round(EIGHT * 1000)
FIRST_BACKOFF_MS, LAST_BACKOFF_MS = 200, 51_200


@dataclass(eq=False)
class Client:
    pid: int
    uid: int
    started_ms: int
    alive: bool = True
    """It has not begun to exit."""
    exists: bool = True
    queued_ms: int | None = None
    blocked: bool = False
    """Another user's server held the GPU while this client was queued."""
    connected_ms: int | None = None
    contexts: int = 0


@dataclass(eq=False)
class Server:
    pid: int
    uid: int
    started_ms: int
    ready: bool = False
    alive: bool = True
    clients: list[Client] = field(default_factory=list)
    expected: int = 0
    """Clients that were sent here and have not connected."""


class World:
    """The host; `advance` runs the actions and what follows from them."""

    def __init__(self, seed: int, actions: Sequence[Action]) -> None:
        self.seed = seed
        self.now_ms = START_MS
        self.truth = Truth()
        self.logs: dict[LogName, bytes] = dict.fromkeys(LOGS, b"")
        self.clients: dict[str, Client] = {}
        self.queue: list[Client] = []
        self.server: Server | None = None
        self.busy = False
        """The daemon's one thread waits for a server's exit, and accepts nothing."""
        self.last_line_ms = START_MS
        self.exits: list[tuple[int, int]] = []
        """PID and time of each process that exited."""
        self._deferred: list[Callable[[], None]] = []
        self._retry = 0
        self._last_ready_uid: int | None = None
        self._server_pids = count(FIRST_SERVER_PID)
        self._numbers = count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._say("control", "Starting control daemon using socket /tmp/mps/control")
        self._say("control", "CUDA MPS Control binary version: 13000")
        self.truth.count("daemon_starts")
        for action in actions:
            self._at(START_MS + round(action.at * 1000), partial(self._act, action))

    # -- time

    def next_event_ms(self) -> int | None:
        return self._events[0][0] if self._events else None

    def advance(self, to_ms: int) -> None:
        while self._events and self._events[0][0] <= to_ms:
            at, _, event = heapq.heappop(self._events)
            self._pass_to(at)
            event()
        self._pass_to(to_ms)

    def _pass_to(self, to_ms: int) -> None:
        span, self.now_ms = to_ms - self.now_ms, to_ms
        server = self.server
        if server is not None and server.clients:
            self.truth.count("holding_seconds", server.uid, span)
        elif (server is None or not server.expected) and any(
            one.blocked and one.alive for one in self.queue
        ):
            self.truth.count("handover_idle_seconds", by=span)

    def _at(self, at_ms: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._numbers), event))

    def _after(self, milliseconds: int, event: Callable[[], None]) -> None:
        self._at(self.now_ms + milliseconds, event)

    def _delay(self, entity: object, what: str, least: int, most: int) -> int:
        return Random(f"{self.seed}/{entity}/{what}").randint(least, most)

    # -- logs

    def _say(self, log: LogName, text: str, pid: int = DAEMON) -> None:
        component = "Control" if log == "control" else "Server"
        if text == "Startup":
            component = "Other"
        seconds, milliseconds = divmod(self.now_ms, 1000)
        stamp = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{milliseconds:03d}"
        self.logs[log] += f"[{stamp} {component} {pid:5d}] {text}\n".encode()
        self.truth.lines[log] += 1
        self.last_line_ms = self.now_ms

    def say_query(self, lines: Sequence[str]) -> None:
        """Write what one run of the control tool leaves in control.log."""
        for line in lines:
            self._say("control", line)

    # -- actions

    def _act(self, action: Action) -> None:
        client = self.clients.get(action.target)
        if action.kind == "start_client":
            pid = FIRST_CLIENT_PID + int(action.target[1:])  # the same without other actions
            client = Client(pid, action.uid, self.now_ms)
            self.clients[action.target] = client
            self._daemon_accepts(lambda: self._arrive(client))
        elif action.kind == "end_client" and client is not None:
            self._end(client)
        elif action.kind == "kill_server":
            self._kill_server()

    def _daemon_accepts(self, event: Callable[[], None]) -> None:
        if self.busy:
            self._deferred.append(event)
        else:
            event()

    def _end(self, client: Client) -> None:
        """End it once it has computed for a moment; a queued one waits until it is served."""
        if not client.alive:
            return
        if client.contexts == 0:
            self._after(1000, lambda: self._end(client))
            return
        self._leave_context(client)
        # recordings/samples/uid-wait: the process disconnects 14-16 ms after its context
        self._after(self._delay(client.pid, "leave", 14, 16), lambda: self._disconnect(client))

    def _kill_server(self) -> None:
        """Kill the server; only without a queue, since no recording shows what follows then."""
        server = self.server
        if server is None or not server.ready or server.expected or self.queue or self.busy:
            return
        if any(one.contexts == 0 for one in server.clients):
            return
        server.alive = False
        self.exits.append((server.pid, self.now_ms))
        for client in list(server.clients):
            self.truth.count("losses", f"{client.uid} server_crashed")
            self._drop(server, client)
        # recordings/samples/server-killed: only control.log has a line, with status 0
        self._say("control", f"Server {server.pid} exited with status 0")
        self.truth.count("server_exits", "crashed")
        self.server = None
        self._retry += 1

    # -- the daemon

    def _arrive(self, client: Client) -> None:
        server = self.server
        self._say("control", "Accepting connection...")
        if server is not None and server.ready and server.uid == client.uid:
            self._say("control", _new_client(client, "Server already exists"))
            if any(one.blocked and one.alive for one in self.queue):
                self.truth.count("overtakes", client.uid)
            server.expected += 1
            self._after(1, lambda: self._connect(server, client))
            return
        self._say(
            "control", _new_client(client, "Server is not ready, push client to pending list")
        )
        client.queued_ms = self.now_ms
        self.queue.append(client)
        if server is None:
            self._start_server(client.uid)
        elif server.uid != client.uid:
            client.blocked = True
            if server.ready and sum(one.uid != server.uid for one in self.queue) == 1:
                self._try_shutdown(server, FIRST_BACKOFF_MS, self._retry)

    def _start_server(self, uid: int) -> None:
        server = self.server = Server(next(self._server_pids), uid, self.now_ms)
        self._say("control", f"Starting new server {server.pid} for user {uid}", server.pid)
        self.truth.count("server_starts", uid)
        for client in self.queue:
            client.blocked |= client.uid != uid
        # recordings/samples: 58 ms (server-killed) to 243 ms (uid-wait)
        self._after(2, lambda: self._say("server", "Startup", server.pid))
        self._after(self._delay(server.pid, "start", 58, 243), lambda: self._ready(server))

    def _ready(self, server: Server) -> None:
        server.ready = True
        self._say("server", "Server has started", server.pid)
        self._say("control", f"NEW SERVER {server.pid}: Ready")
        self.truth.observe("startups", self.now_ms - server.started_ms)
        mine = [one for one in self.queue if one.uid == server.uid]
        self.queue = [one for one in self.queue if one.uid != server.uid]
        if any(one.blocked for one in mine):
            self.truth.count("handovers")
        for client in mine:
            if client.blocked and client.queued_ms is not None:
                waited = self.now_ms - client.queued_ms
                self.truth.observe("waits", waited, client.uid)
                self.truth.served.append((client.pid, waited))
            self._connect(server, client, expected=False)
        if self.queue:
            self._after(1, lambda: self._try_shutdown(server, FIRST_BACKOFF_MS, self._retry))

    def _try_shutdown(self, server: Server, backoff_ms: int, retry: int) -> None:
        if retry != self._retry or self.server is not server or self.busy:
            return
        first = backoff_ms == FIRST_BACKOFF_MS
        how = "disabled" if first else "enabled"
        self._say("control", f"Try shutting down server {server.pid}, backoff is {how}")
        self._say("server", "Server has been notified to shutdown", server.pid)
        if threads := sum(1 + one.contexts for one in server.clients) + server.expected:
            # recordings/samples/uid-wait: the back-off doubles from 200 ms
            for text in (
                f"Server {server.pid} has {threads} active worker threads. "
                "Server will not shutdown.",
                f"Control will try shutting down server {server.pid} again "
                f"in at most {backoff_ms}ms",
            ):
                self._say("control", text)
            refusal = f"Server was unable to shutdown due to {threads} active clients"
            self._say("server", refusal, server.pid)
            longer = min(2 * backoff_ms, LAST_BACKOFF_MS)
            self._after(backoff_ms, lambda: self._try_shutdown(server, longer, retry))
            return
        self._say("server", "Waiting for current clients to finish", server.pid)
        self._say("server", "Exiting", server.pid)
        self.busy = True
        # recordings/samples: 60 to 94 ms
        self._after(self._delay(server.pid, "exit", 60, 94), lambda: self._exited(server))

    def _exited(self, server: Server) -> None:
        server.alive = False
        self.exits.append((server.pid, self.now_ms))
        self._say("control", f"Server {server.pid} exited with status 0")
        self.truth.count("server_exits", "requested")
        self.server, self.busy = None, False
        self._retry += 1
        self._start_server(self.queue[0].uid)
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            event()

    # -- clients on the server

    def _connect(self, server: Server, client: Client, *, expected: bool = True) -> None:
        server.expected -= expected
        client.connected_ms = self.now_ms
        server.clients.append(client)
        self._say(
            "server",
            "Received new client request for {PID: -1333654781, Context ID: 0}",
            server.pid,
        )
        self._say("server", f"Client {{PID: {client.pid}, Context ID: 0}} connected", server.pid)
        self.truth.count("connections", client.uid)
        # recordings/samples/uid-wait: the context follows 13 to 26 ms later
        gap = self._delay(client.pid, "context", 13, 26)
        self._after(gap, lambda: self._open_context(server, client))

    def _open_context(self, server: Server, client: Client) -> None:
        client.contexts = 1
        name = f"{{PID: {client.pid}, Context ID: 1}}"
        self._say("control", _new_client(client, "Server already exists"))
        self._say("server", f"Client {name} connected", server.pid)
        self._say("server", f"Device NVIDIA H200 (uuid {GPU}) is associated", server.pid)
        self._say("server", f"Status of client {name} is ACTIVE", server.pid)

    def _leave_context(self, client: Client) -> None:
        server = self.server
        assert server is not None
        client.contexts = 0
        client.alive = False
        left = sum(one.contexts for one in server.clients)
        self._say(
            "server",
            f"Client {{PID: {client.pid}, Context ID: 1}} exiting. "
            f"Number of active client contexts is {left}.",
            server.pid,
        )

    def _disconnect(self, client: Client) -> None:
        server = self.server
        if server is None or client not in server.clients:
            return
        self._say("server", f"Client process {client.pid} disconnected", server.pid)
        self._drop(server, client)

    def _drop(self, server: Server, client: Client) -> None:
        client.alive = client.exists = False
        client.contexts = 0
        server.clients.remove(client)
        self.exits.append((client.pid, self.now_ms))
        assert client.connected_ms is not None
        self.truth.count("disconnections", client.uid)
        self.truth.observe("sessions", self.now_ms - client.connected_ms, client.uid)


def _new_client(client: Client, what: str) -> str:
    return f"NEW CLIENT {client.pid} from user {client.uid}: {what}"

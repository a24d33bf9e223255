"""One control daemon of a simulated host, driver 580: one thread, a queue, one server at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from mps_exporter.observations import LogName
from testing import fake_mps_control
from testing.mps_logs import LOGS, PIPE
from testing.world.obstacles import LINES, SOMETIMES, Obstacles
from testing.world.processes import DEBUGGER_PID, Client, Gpu, Process
from testing.world.server import Server
from testing.world.truth import Truth, WaitTruth

if TYPE_CHECKING:
    from testing.world.model import World
    from testing.world.script import Action

FIRST_PID, PIDS_OF_A_DAEMON, FIRST_OF_OTHERS = 1_000, 10_000, 100_000
_PID = re.compile(
    r"(?<=PID: )\d+|(?<=server )\d+|(?<=SERVER )\d+|(?<=Server )\d+"
    r"|(?<=CLIENT )\d+|(?<=process )\d+|^\d{6}$"
)
FIRST_BACKOFF_MS, LAST_BACKOFF_MS = 200, 51_200
FORBIDDEN_STARTS = 6
CONFIRMED_AFTER_MS = 1_600
LONGEST_POLL_MS = 700
FORGOTTEN_AFTER_MS = 100_000
"""An exporter shows a daemon for 120 s after its exit; later, another one would be a new one."""
_NEW_CLIENT = "NEW CLIENT {} from user {}: {}"
_EXISTS = "Server already exists"
_PENDING = "Server is not ready, push client to pending list"
SERVER_COMMANDS = frozenset(fake_mps_control.ABOUT_A_SERVER)


class Daemon(Process):
    protocol: Literal["3"] | None = None
    """The protocol that its arguments name."""

    def __init__(self, world: World, key: str, setting: Mapping[str, Any]) -> None:
        super().__init__(0, setting.get("uid", 0), 0, fake_mps_control.NAME, exists=False)
        number = int(key[1:])
        self.world, self.key = world, key
        self.pipe = f"{PIPE}-{number}" if number else PIPE
        self.multiuser: bool = setting.get("multiuser", False)
        self.gpus = tuple(Gpu(one) for one in setting.get("gpus", range(len(world.gpus))))
        self.percentage: float = setting.get("percentage", 100.0)
        self.limits: Mapping[str, str] = setting.get("limits", {})
        """The defaults of its clients: ordinal of a GPU -> memory."""
        self._first_pid = FIRST_PID + PIDS_OF_A_DAEMON * number
        self._pids = count(self._first_pid)
        self.truth = Truth()
        self._contained = setting.get("contained", False)
        if self._contained:  # recordings/own-pid-namespace: its clients are all "0"
            self.truth.unknowable.add("its clients have no PID")
        if world.obstructed:
            self.truth.unknowable.add("readings fail")
        self._obstacles = Obstacles(world.seed, key, there=world.obstructed)
        self.logs: dict[LogName, bytearray] = {log: bytearray() for log in LOGS}
        self.served: list[Client] = []
        """All clients that had a context, oldest first."""
        self.truncations: dict[LogName, list[int]] = {log: [] for log in LOGS}
        """Lengths of the logs at which they were truncated."""
        self.renamed: set[LogName] = set()
        self.new_files: dict[LogName, list[int]] = {log: [] for log in LOGS}
        """Lengths of the logs at which a daemon began a new file."""
        self._rotated_next: set[LogName] = set()
        """The logs that are truncated after their next lines about a client."""
        self.written_ms: dict[LogName, int] = dict.fromkeys(LOGS, world.now_ms)
        """When the last line of each log was written."""
        self.found = False
        """An exporter has seen this process in /proc, and not only its lines."""
        self.starts: list[int] = []
        self._accounted_ms = 0
        self._ended_ms = 0
        self._retry = 0
        self._reset()

    def _reset(self) -> None:
        self.server: Server | None = None
        self.queue: list[Client] = []
        self.busy = False
        """It waits for a server's exit, and accepts nothing."""
        self.stuck = False
        """It waits for a server that never replies."""
        self.quitting = False
        self._gave_up = 0
        """Callers that did not wait for a reply."""
        self._deferred: list[Callable[[], None]] = []

    @property
    def inner_pids(self) -> tuple[int, ...]:
        return self.inner_pids_of(self)

    def inner_pids_of(self, process: Process) -> tuple[int, ...]:
        """Return the PID in the container of the daemon, if it runs in one."""
        return (process.pid - self._first_pid + 1,) if self._contained else ()

    def _own(self, pid: int) -> int:
        """Return the PID of a process as the daemon sees it; 0: in no namespace of its own."""
        if not self._contained or pid < 1:
            return pid
        return max(0, pid - self._first_pid + 1) if pid < FIRST_OF_OTHERS else 0

    @property
    def arguments(self) -> tuple[str, ...]:
        protocol = ("-p", self.protocol) if self.protocol else ()
        return ("-d", *(("-multiuser-server",) if self.multiuser else ()), *protocol)

    @property
    def servers(self) -> Sequence[Process]:
        return () if self.server is None else (self.server,)

    @property
    def ordinals(self) -> range:
        return range(len(self.gpus))

    @property
    def log_directory(self) -> str:
        return f"/log/{self.key}"

    @property
    def moving(self) -> bool:
        """A server starts or exits, or a client connects or leaves."""
        server = self.server
        return self.busy or (server is not None and not server.ghost and not server.settled)

    @property
    def calm(self) -> bool:
        """Whether it serves clients in order, without a dead client in its queue."""
        server = self.server
        bad = server is not None and (server.ghost or server.torn or server.abandoned_work)
        dead = any(one.dead_ms is not None for one in self.queue)
        known = not self.truth.unknowable and not any(self.truncations.values())
        return self.exists and known and not (self.stuck or self.quitting or bad or dead)

    # -- time and logs

    def after(self, milliseconds: int, event: Callable[[], None]) -> None:
        self.world.after(milliseconds, event)

    def say(self, log: LogName, *texts: str, pid: int | None = None) -> None:
        seconds, milliseconds = divmod(self.world.now_ms, 1000)
        stamp = f"{_day_and_time(seconds)}.{milliseconds:03d}"
        writer = self._own(self.pid if pid is None else pid)
        if self._contained:
            texts = tuple(_PID.sub(lambda one: str(self._own(int(one[0]))), one) for one in texts)
        for text in texts:
            component = "Control" if log == "control" else "Server"
            if text.startswith(("Startup", "Connecting to", "Initializing")):
                component = "Other"
            if (random := self._obstacles.random(SOMETIMES)) is not None:
                self.logs[log] += random.choice(LINES)
            self.logs[log] += f"[{stamp} {component} {writer:5d}] {text}\n".encode()
        self.written_ms[log] = self.world.now_ms
        news = any(text.startswith(("NEW CLIENT", "Client")) for text in texts)
        if news and log in self._rotated_next:  # No exporter has read these lines.
            self._rotated_next.discard(log)
            self._rotate("truncate", log)
        self.world.settle()

    def account(self) -> None:
        """Count the time since the last change."""
        span, self._accounted_ms = self.world.now_ms - self._accounted_ms, self.world.now_ms
        if not (self.exists and span):
            return
        server = self.server
        if server is not None and server.clients:
            self.truth.count("holding_seconds", server.uid, span)
        elif (server is None or not server.expected) and self._somebody_waits():
            self.truth.count("handover_idle_seconds", by=span)

    def _somebody_waits(self) -> bool:
        return any(one.blocked and one.dead_ms is None for one in self.queue)

    def waits(self) -> list[WaitTruth]:
        """Return the clients behind another user's server, and on a server without service."""
        waiting = [one for one in self.queue if one.blocked]
        if self.server is not None and self.server.ghost:
            waiting += [one for one in self.server.clients if one.blocked and not one.active_ms]
        return [
            WaitTruth(one.pid, one.shown_uid, one.queued_ms or 0, one.dead_ms is not None)
            for one in waiting
        ]

    # -- its life

    def start(self) -> None:
        if self._ended_ms and self.world.now_ms - self._ended_ms > FORGOTTEN_AFTER_MS:
            return
        self._reset()
        self.pid, self.started_ms, self.exists = next(self._pids), self.world.now_ms, True
        self.starts.append(self.started_ms)
        self.found = False
        for log in self.renamed:
            self.new_files[log].append(len(self.logs[log]))
        self.renamed.clear()
        self._accounted_ms = self.world.now_ms
        self.world.add(self)
        self.say("control", *self.first_lines())
        self.truth.count("daemon_starts")

    def first_lines(self) -> tuple[str, ...]:
        variable = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}"
        return (
            f"Starting control daemon using socket {self.pipe}/control",
            f"To connect CUDA applications to this daemon, set env {variable}",
            "CUDA MPS Control binary version: 13000",
        )

    def act(self, action: Action) -> bool:
        """Run an operator's action; return False if its outcome now was never measured."""
        if not self.exists:
            return True
        match action.kind:
            case "forge":
                self._forge()
            case "hide_log":
                self._hide(action.values["log"], action.values["seconds"])
            case "truncate" if round(action.at) % 2:
                self._rotated_next.add(action.values["log"])
            case "truncate" | "rename":
                self._rotate(action.kind, action.values["log"])
            case "kill_server":
                self._kill_server()
            case "exhaust":
                if self.server is not None:
                    self.server.exhausted = True
            case _:
                return self._act_if_calm(action)
        return True

    def _act_if_calm(self, action: Action) -> bool:
        server = self.server
        moving = server is not None and not (server.ready and server.calm)
        if self.quitting:
            return True
        if moving or self.queue or self.busy or self.stuck or self.frozen:
            return False
        match action.kind:
            case "quit":
                self._quit()
            case "kill_daemon":
                if self.world.last_exit_ms > self.world.now_ms - LONGEST_POLL_MS:
                    return False
                if self.uid and not self.found:  # users' daemons are searched for at scrapes only
                    return False
                self._die()
            case _ if (stopped := self if action.kind == "stop_daemon" else server) is not None:
                stopped.halted = action.values.get("how", "T")
                self.after(action.values["seconds"] * 1000, partial(self._resume, stopped))
        return True

    @property
    def frozen(self) -> bool:
        """It or its server is stopped by a signal; only queries were measured then."""
        return self.stopped or (self.server is not None and self.server.stopped)

    def _resume(self, process: Process) -> None:
        """Continue a stopped process: callers that gave up are noticed (recordings/stopped)."""
        process.halted = ""
        if self.exists:
            self._notice_given_up()
            self.stuck = False
            self._run_deferred()

    def _hide(self, log: LogName, seconds: int) -> None:
        """Take the right to read a log away for some time."""
        hidden = self.world.sight.gone_logs
        hidden.add((self.pipe, log))
        self.truth.unknowable.add(f"{log}.log was hidden")
        self.after(seconds * 1000, partial(hidden.discard, (self.pipe, log)))

    def _rotate(self, how: str, log: LogName) -> None:
        """Truncate a log; or rename it, which the daemon does not notice (measured on an H200)."""
        if how == "truncate" and log not in self.renamed:
            self.truncations[log].append(len(self.logs[log]))
        elif how == "rename" and self.found:
            self.renamed.add(log)

    def _forge(self) -> None:
        """Write lines about other users' processes, as the owner of these logs can."""
        self.truth.unknowable.add("forged")
        known = self.world.processes.values()
        others = [one for one in known if one.uid != self.uid and one.pid != DEBUGGER_PID]
        random = self.world.random(self.key, f"forge {self.world.now_ms}")
        for victim in random.sample(others, min(len(others), 3)):
            who = f"{{PID: {victim.pid}, Context"
            self.say(
                "control",
                _NEW_CLIENT.format(victim.pid, victim.uid, _PENDING),
                f"Starting new server {victim.pid} for user {self.uid}",
                f"NEW SERVER {victim.pid}: Ready",
                f"Try shutting down server {victim.pid}, backoff is disabled",
            )
            for text in (
                f"Client {who} ID: 0}} connected",
                f"Status of client {who} ID: 1}} is ACTIVE",
                f"Server failed to recevie command with status 806, assuming client {who} ID: 1}} "
                "exit",
                f"Client {who}: 1}} encountered a fatal GPU error.",
                "User did not send valid credentials",
            ):
                self.say("server", text, pid=random.choice((self.pid, victim.pid)))

    def _quit(self) -> None:
        """Drain the server, and exit (recordings/draining)."""
        self.say("control", "Accepting connection...", "NEW UI", "Cmd:quit")
        self.quitting = True
        if self.server is None:
            self._exit()
        else:
            self._try_shutdown(self.server, FIRST_BACKOFF_MS, self._retry)

    def _exit(self) -> None:
        self.say("control", "Exit with status 0")
        self._end()

    def _die(self) -> None:
        """Die by SIGKILL with its server, and write nothing (recordings/daemon-killed)."""
        if (server := self.server) is not None:
            self.account()
            server.lose_all("daemon_died")
            self.truth.count("server_exits", "daemon_died")
            self.world.end_process(server)
        self._end()
        self._confirmed_later("holding_seconds")

    def _end(self) -> None:
        self.account()
        self.world.end_process(self)
        self._reset()
        self._ended_ms = self.world.now_ms
        self._retry += 1

    def _kill_server(self) -> None:
        """Kill the server; without a queue, or a ghost, since no recording shows other cases."""
        server = self.server
        if server is None or not server.ready or self.busy or self.quitting or self.frozen:
            return
        others = self.queue or self.stuck or not server.calm
        if server.used if server.ghost else others:
            return
        self.account()
        if server.ghost:
            self._end_ghost(server)
        else:
            server.lose_all("server_crashed")
            self.truth.count("server_exits", "crashed")
        # recordings/samples/server-killed: only control.log has a line, with status 0
        self.say("control", f"Server {server.pid} exited with status 0")
        self.world.end_process(server)
        self._continue()

    def _end_ghost(self, server: Server) -> None:
        """Serve again once it is dead (recordings/deaf-server, wedge-times)."""
        self._notice_given_up()
        self.truth.count("server_exits", "ghost_ended")
        for client in list(server.clients):
            # recordings/samples/deaf-server: error 46
            if client.blocked:
                self.truth.count("waits_abandoned", client.shown_uid)
            server.remove(client)
            client.alive = False
            self.after(5, partial(self.world.end_process, client))

    def _notice_given_up(self) -> None:
        gave_up, self._gave_up = self._gave_up, 0
        for _ in range(gave_up):
            self.say("control", "Accepting connection...", "Unable to accept connection")

    def _continue(self) -> None:
        """Go on after the end of a server."""
        self.account()
        self.server, self.busy, self.stuck, self._gave_up = None, False, False, 0
        self._retry += 1
        if self.quitting:
            self._exit()
            return
        if self.queue:
            self._start_server(self.queue[0].shown_uid)
        self._run_deferred()

    def _run_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.accept(event)

    # -- queries

    def query(self, commands: Sequence[str]) -> list[list[str]] | None:
        """Return the replies to one run of the control tool; None if it does not reply."""
        server = self.server
        silent = server is not None and (server.ghost or server.stopped)
        if server is not None and silent and _asks(commands, self._own(server.pid)):
            self.stuck = True
        if self.stuck or self.quitting or self.busy or self.stopped:
            self._gave_up += 1
            return None
        replies = [fake_mps_control.reply(self._state(), one) for one in commands]
        self.say("control", *fake_mps_control.log_lines(list(commands), replies))
        if server is not None and any(one.startswith("device_query") for one in commands):
            server.say(f"Received device query command. There are {len(self.gpus)} devices")
        return replies

    def _state(self) -> dict[str, Any]:
        """Return what the control tool can see, in the form of fake_mps_control."""
        devices = [
            {
                "ordinal": ordinal,
                "pci": f"{gpu.pci[:7]}.{gpu.pci[8:]}.00",
                "uuid": gpu.uuid,
                "name": "NVIDIA H200",
            }
            for ordinal, gpu in enumerate(self.gpus)
        ]
        state = {
            "devices": devices,
            "default_percentage": self.percentage,
            "default_limits": self.limits,
        }
        server = self.server
        if server is None or not server.ready:
            return state
        clients = [
            {"pid": self._own(one.pid), "contexts": _by_ordinal(one)}
            for one in server.clients
            if one.contexts
        ]
        shown = {"pid": self._own(server.pid), "state": server.state, "clients": clients}
        return state | {"servers": [shown | {"percentage": self.percentage, "limits": self.limits}]}

    # -- clients

    def accept(self, event: Callable[[], None]) -> None:
        """Run what needs the daemon's thread, as soon as that is free."""
        if self.busy or self.stuck or self.quitting:
            self._deferred.append(event)
        elif self.exists:
            self.account()
            event()

    def may_arrive(self, client: Client) -> bool:
        """Whether it was measured what follows if this client comes now."""
        server, uid = self.server, client.shown_uid
        if self.quitting or self.frozen or (server is not None and server.pending_faults):
            return False
        if server is not None and server.abandoned_work and server.connecting:
            return False
        if self.uid and uid != self.uid:  # recordings/crash-loop
            return server is None and not self.queue and not self.busy
        dead = [one for one in self.queue if one.dead_ms is not None]
        if self.stuck:
            return not dead
        if server is not None and (server.ghost or (server.cannot_accept and server.connecting)):
            return server.uid != uid
        if dead and not (server is not None and server.ready and server.uid == uid):
            waiting = [one for one in self.queue if one.dead_ms is None]
            return dead[0].shown_uid == uid and not waiting
        return True

    def say_admission(self, client: Client, what: str = _EXISTS, *, first: bool) -> None:
        """Log a connection; the first of a process lacks its credentials."""
        refused = ("Accepting connection...", "User did not send valid credentials")
        words = _NEW_CLIENT.format(client.pid, client.shown_uid, what)
        self.say("control", *(refused if first else ()), "Accepting connection...", words)

    def arrive(self, client: Client) -> None:
        server, uid = self.server, client.shown_uid
        client.accepted = True
        if server is not None and server.ready and server.uid == uid:
            self.say_admission(client, first=True)
            if server.torn or server.cannot_accept:
                server.refuse(client)
                if self._somebody_waits():
                    self.truth.allow("overtakes", 1)
                return
            if self._somebody_waits():
                self.truth.count("overtakes", uid)
            server.expected += 1
            self.after(1, partial(self._send, server, client))
            return
        self.say_admission(client, _PENDING, first=True)
        client.queued_ms = self.world.now_ms
        self.queue.append(client)
        if self.uid and uid != self.uid:
            self._fail_to_start(client)
        elif server is None:
            self._start_server(uid)
        elif server.uid != uid:
            client.blocked = True
            if server.ready and sum(one.shown_uid != server.uid for one in self.queue) == 1:
                self._try_shutdown(server, FIRST_BACKOFF_MS, self._retry)

    def _send(self, server: Server, client: Client) -> None:
        if server.exists:
            self.account()
            server.connect(client)

    def act_on_client(self, client: Client, action: Action) -> bool:
        """Run an action on a client that exists; return False if its outcome was not measured."""
        server = self.server
        if self.frozen or (client.halted and action.values.get("how") != "SIGKILL"):
            return False
        if action.kind == "end_client" and client.alive:
            client.halted = ""
            return self._end_client(client, action.values)
        if not client.alive or client.lost:
            return True
        if not client.contexts:
            return False
        assert server is not None
        if self.busy or self.stuck or self.quitting or not server.calm:
            return False
        (ordinal, *others) = client.contexts.values()
        if others or not server.may_fault(ordinal):
            return True
        match action.kind:
            case "halt":
                self._halt(client, action.values)
            case "fault":
                server.own_fault(client, action.values["pointer"])
            case "terminate":
                self._terminate(server, client)
        return True

    def _terminate(self, server: Server, client: Client) -> None:
        command = f"Cmd:terminate_client {server.pid} {client.pid}"
        self.say("control", "Accepting connection...", "NEW UI", command)
        server.terminate(client)
        self.say("control", "0", "UI closed")

    def _halt(self, client: Client, values: Mapping[str, Any]) -> None:
        """Halt a client that uses its GPU now and then: MPS does not notice."""
        if not client.busy:
            alone = client.settings.place.holds_only(client.pid)
            client.halted = values["how"] if alone or values["how"] != "frozen" else "T"
            self.after(values["seconds"] * 1000, partial(setattr, client, "halted", ""))

    def _end_client(self, client: Client, values: Mapping[str, Any]) -> bool:
        server, killed = self.server, values.get("how", "exit") != "exit"
        if server is None or client not in server.clients:
            if client.lost or not client.accepted or client.ended_ms is not None:
                return self._end_unserved(client)
            return killed and client in self.queue and self._die_queued(client)
        if server.ghost and not client.contexts:
            return False
        if not client.complete and not client.torn:
            return False
        self.account()
        if client.torn:
            server.leave(client)
            return True
        works = values.get("work", False) and len(client.contexts) == 1
        (ordinal, *_) = client.contexts.values()
        if works and server.may_fault(ordinal):
            if not server.calm or self.quitting:
                return False
            server.leave_work(client)
        elif server.pending_faults:
            return False
        else:
            server.leave(client)
        if killed:
            self.world.end_process(client)
        return True

    def _end_unserved(self, client: Client) -> bool:
        """End a process that has lost its server, unless the daemon has not accepted it yet."""
        if not client.lost:
            return False
        client.alive = False
        self.world.end_process(client)
        return True

    def _die_queued(self, client: Client) -> bool:
        """Die in the queue: the entry stays there (recordings/wait-abandoned-sigkill)."""
        if not client.blocked or self.queue != [client] or self._deferred:
            return False
        self.account()
        client.alive, client.dead_ms = False, self.world.now_ms
        self.world.end_process(client)
        self.truth.count("waits_abandoned", client.shown_uid)
        self._confirmed_later("handover_idle_seconds")
        self.truth.allow("overtakes", 1)
        return True

    def _confirmed_later(self, running_time: str) -> None:
        """Allow for the exporter's confirmation: polls of the line and of the exit; a second."""
        self.truth.allow(running_time, CONFIRMED_AFTER_MS)
        self.world.settle(CONFIRMED_AFTER_MS + LONGEST_POLL_MS)

    # -- servers

    def _fail_to_start(self, client: Client) -> None:
        """Try a server that this daemon's user may not start (recordings/crash-loop)."""
        uid = client.shown_uid
        for _ in range(FORBIDDEN_STARTS):
            pid = next(self._pids)
            error = f"Failed to start server using uid {uid}, error: Operation not permitted"
            self.say("control", f"Starting new server {pid} for user {uid}", error, pid=pid)
            self.say("control", f"Server {pid} exited with status 1")
            self.truth.count("server_starts", uid)
            self.truth.count("server_exits", "start_failed")
        self.queue.remove(client)
        client.alive = False
        self.after(5, partial(self.world.end_process, client))

    def _start_server(self, uid: int) -> None:
        self.account()
        server = self.server = Server(self, next(self._pids), uid)
        self.world.add(server)
        self.say("control", f"Starting new server {server.pid} for user {uid}", pid=server.pid)
        self.truth.count("server_starts", uid)
        for client in self.queue:
            client.blocked |= client.shown_uid != uid
        self.after(server.start(), partial(self._ready, server))

    def _ready(self, server: Server) -> None:
        if not server.exists:
            return
        self.account()
        server.open()
        self.say("control", f"NEW SERVER {server.pid}: Ready")
        mine = [one for one in self.queue if one.shown_uid == server.uid]
        self.queue = [one for one in self.queue if one.shown_uid != server.uid]
        if mine and mine[0].dead_ms is not None:
            self._become_ghost(server, mine)
        else:
            for client in mine:
                server.connect(client, expected=False)
        if self.queue:
            self.after(1, partial(self._try_shutdown, server, FIRST_BACKOFF_MS, self._retry))

    def _become_ghost(self, server: Server, queued: Sequence[Client]) -> None:
        """Serve a dead client first, and no client from then on (recordings/deaf-server)."""
        server.ghost = True
        living = [one for one in queued if one.dead_ms is None]
        if self.world.now_ms - (queued[0].dead_ms or 0) < CONFIRMED_AFTER_MS + LONGEST_POLL_MS:
            self.world.settle(11_000)  # it may still connect, for an exporter
            self.truth.allow("handover_idle_seconds", 10_100)
        for client in living:
            server.request(client, 0)
            server.say(f"Client {client.named(0)} connected")
            server.add(client)
            server.request(client, 0)
        if not living:
            server.request(queued[0], 0)
        server.say("User did not send valid credentials")
        for client in living:
            server.say(f"Creating worker thread for client {client.named(0)}")
            gap = self.world.delay(client.key, "context", 13, 26)
            self.after(gap, partial(self._hang_at, server, client))

    def _hang_at(self, server: Server, client: Client) -> None:
        if server.exists:
            self.say_admission(client, first=False)
            self.stuck = True

    def _try_shutdown(self, server: Server, backoff_ms: int, retry: int) -> None:
        if retry != self._retry or self.server is not server or self.busy or self.stuck:
            return
        self.account()
        how = "disabled" if backoff_ms == FIRST_BACKOFF_MS else "enabled"
        self.say("control", f"Try shutting down server {server.pid}, backoff is {how}")
        if server.ghost:
            self.stuck = True  # recordings/wait-abandoned-sigkill
            return
        server.say("Server has been notified to shutdown")
        if threads := server.threads:
            # recordings/samples/uid-wait: the back-off doubles from 200 ms
            again = f"Control will try shutting down server {server.pid} again in at most"
            self.say(
                "control",
                f"Server {server.pid} has {threads} active worker threads. "
                "Server will not shutdown.",
                f"{again} {backoff_ms}ms",
            )
            server.say(f"Server was unable to shutdown due to {threads} active clients")
            longer = min(2 * backoff_ms, LAST_BACKOFF_MS)
            self.after(backoff_ms, partial(self._try_shutdown, server, longer, retry))
            return
        server.say("Waiting for current clients to finish", "Exiting")
        self.busy = True
        # recordings/samples: 60 to 94 ms
        gap = self.world.delay(server.pid, "exit", 60, 94)
        self.after(gap, partial(self._exited, server))

    def _exited(self, server: Server) -> None:
        self.account()
        self.world.end_process(server)
        self.say("control", f"Server {server.pid} exited with status 0")
        self.truth.count("server_exits", "requested")
        self._continue()


def _by_ordinal(client: Client) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for context, ordinal in client.contexts.items():
        found.setdefault(str(ordinal), []).append(context)
    return found


def _asks(commands: Sequence[str], pid: int) -> bool:
    words = [one.split() for one in commands]
    return any(
        one[0] == "ps" or (one[0] in SERVER_COMMANDS and str(pid) in one[1:]) for one in words
    )


_stamps: dict[int, str] = {}


def _day_and_time(seconds: int) -> str:
    """Return a second as the logs write it."""
    text = _stamps.get(seconds)
    if text is None:
        if len(_stamps) > 100_000:
            _stamps.clear()
        text = _stamps[seconds] = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    return text

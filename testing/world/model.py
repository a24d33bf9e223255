"""A simulated host with driver 580: its time, processes, GPUs, kernel log, and control daemons."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from testing.mps_logs import EIGHT
from testing.world.daemon import PIDS_OF_A_DAEMON, Daemon
from testing.world.daemon_v3 import DaemonV3
from testing.world.processes import DEBUGGER_PID, Client, Direct, Gpu, Process
from testing.world.script import Action
from testing.world.settings import choose
from testing.world.truth import Truth

START_MS = round(EIGHT * 1000)
RETRY_MS = 250
"""An action whose outcome at this moment was never measured is tried again after this time."""
SETTLING_MS = 300
OBSTRUCTED = 14  # Interval of the worlds in which readings fail.
FIRST_CLIENT_PID, FIRST_DIRECT_PID = 200_000, 100_000


@dataclass(eq=False)
class Sight:
    """What the host lets an exporter see."""

    kernel_log: bool = False
    nvml: bool = False
    collisions: bool = False  # Other programs query the daemons, too.
    gone_logs: set[tuple[str, str]] = field(default_factory=set)
    """Pipe directory and log of each log without read permission."""


class World:
    """The host; `advance` runs the actions and what follows from them."""

    def __init__(self, seed: int, actions: Sequence[Action]) -> None:
        self.seed = seed
        self.obstructed = seed % OBSTRUCTED == OBSTRUCTED - 1
        """Readings fail: only what holds for any reading is checked."""
        self.now_ms = START_MS
        self.stepped_ms = 0
        """Sum of the changes of the clock."""
        self.settled_ms = START_MS
        """From then on, what has happened by now can be known from outside."""
        self.daemons: dict[str, Daemon] = {}
        """Pipe directory -> daemon."""
        self.clients: dict[str, Client] = {}
        """Name -> client, including ended clients."""
        self.directs: dict[str, Direct] = {}
        self.processes: dict[int, Process] = {}
        self.known: dict[int, list[Process]] = {}
        """PID -> all processes that had it."""
        self.contained: dict[int, list[Process]] = {}
        """The same, of PIDs in containers."""
        self.gpus: tuple[Gpu, ...] = (Gpu(0),)
        self.lost_gpus: set[str] = set()
        """UUIDs of the GPUs that the driver has lost; what clients do then was not measured."""
        self.foreign_xids: list[int] = []
        """Times of the lines in the kernel log that no MPS client has caused."""
        self.exits: list[tuple[int, int]] = []
        """PID and time of each process that exited."""
        self.kernel_lines: list[tuple[int, str]] = []
        self.sight = Sight()
        self._numbers = count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self.add(Process(DEBUGGER_PID, 0, START_MS, "gdb"))
        for action in sorted(actions):
            self.at(START_MS + round(action.at * 1000), partial(self._act, action))
        self.advance(START_MS)

    # -- time

    def next_event_ms(self) -> int | None:
        return self._events[0][0] if self._events else None

    def advance(self, to_ms: int) -> None:
        while self._events and self._events[0][0] <= to_ms:
            at, _, event = heapq.heappop(self._events)
            self.now_ms = max(self.now_ms, at)
            event()
        self.now_ms = max(self.now_ms, to_ms)
        for daemon in self.daemons.values():
            daemon.account()

    def at(self, at_ms: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._numbers), event))

    def after(self, milliseconds: int, event: Callable[[], None]) -> None:
        self.at(self.now_ms + milliseconds, event)

    def random(self, entity: object, what: str) -> Random:
        """Return a generator that depends on this entity only, whatever else happens."""
        return Random(f"{self.seed}/{entity}/{what}")

    def delay(self, entity: object, what: str, least: int, most: int) -> int:
        return self.random(entity, what).randint(least, most)

    def settle(self, milliseconds: int = SETTLING_MS) -> None:
        """Delay the moment from which on all can be known."""
        self.settled_ms = max(self.settled_ms, self.now_ms + milliseconds)

    @property
    def unsettled(self) -> bool:
        return self.now_ms <= self.settled_ms or any(one.moving for one in self.daemons.values())

    # -- what exists

    def add(self, process: Process) -> None:
        self.processes[process.pid] = process
        self.known.setdefault(process.pid, []).append(process)
        for pid in process.inner_pids:
            self.contained.setdefault(pid, []).append(process)

    def named(self, pid: int) -> list[Process]:
        """Return the processes that may be meant by a PID."""
        return [*self.known.get(pid, ()), *self.contained.get(pid, ())]

    def end_process(self, process: Process) -> None:
        if process.exists:
            process.exists = False
            self.exits.append((process.pid, self.now_ms))
            if self.processes.get(process.pid) is process:
                del self.processes[process.pid]

    @property
    def last_exit_ms(self) -> int:
        return self.exits[-1][1] if self.exits else 0

    @property
    def truths(self) -> Mapping[str, Truth]:
        return {pipe: daemon.truth for pipe, daemon in self.daemons.items()}

    @property
    def lines(self) -> int:
        return sum(log.count(b"\n") for one in self.daemons.values() for log in one.logs.values())

    def healthy_pids(self) -> set[int]:
        """Return the processes whose end heals nothing.

        Processes of a user who forges logs, and with a PID from a fault, are left out.
        """
        hanging: set[Process] = set()
        for daemon in self.daemons.values():
            if (server := daemon.server) is not None and server.ghost and not server.used:
                hanging |= {server, *server.clients}
            elif server is not None and (server.torn or server.abandoned_work):
                hanging.add(server)
            if daemon.stuck:
                hanging.add(daemon)
        hanging |= {one for one in self.clients.values() if not one.healthy}
        forgers = {one.uid for one in self.daemons.values() if "forged" in one.truth.unknowable}
        faults = [fault for one in self.truths.values() for fault in one.faults]
        named = {pid for one in faults for pid in (one.culprit_pid, *one.victim_pids)}
        return {
            one.pid
            for one in self.processes.values()
            if one not in hanging and one.uid not in forgers and one.pid not in named
        }

    # -- actions

    def _act(self, action: Action) -> None:
        """Run an action, later if its outcome at this moment was never measured."""
        if action.target == "host":
            self._act_on_host(action)
        elif action.kind == "start_daemon":
            self._start_daemon(action)
        elif action.target.startswith("x"):
            self._act_directly(action)
        elif action.kind == "start_client":
            self._start_client(action)
        elif action.target in self.clients:
            client = self.clients[action.target]
            if client.exists:
                self._retry_unless(client.daemon.act_on_client(client, action), action)
        elif (daemon := self._daemon(action.target)) is not None:
            self._retry_unless(daemon.act(action), action)

    def _act_on_host(self, action: Action) -> None:
        match action.kind:
            case "host":
                self.gpus = tuple(Gpu(index) for index in range(action.values.get("gpus", 1)))
                for name in ("kernel_log", "nvml", "collisions"):
                    setattr(self.sight, name, action.values.get(name, False))
            case "clock_step":
                self._set_clock(action.values["seconds"] * 1000)
            case _:
                self._act_on_gpu(self.gpus[action.values["gpu"]], action)

    def _act_on_gpu(self, gpu: Gpu, action: Action) -> None:
        """Lose a GPU for some time, or report an error of which no MPS client is the cause."""
        text = action.values.get("text", "79, GPU has fallen off the bus.")
        self.kernel_lines.append((self.now_ms, f"NVRM: Xid (PCI:{gpu.pci}): {text}"))
        if action.kind == "xid":
            self.foreign_xids.append(self.now_ms)
            return
        self.lost_gpus.add(gpu.uuid)
        self.after(action.values["seconds"] * 1000, partial(self.lost_gpus.discard, gpu.uuid))

    def _set_clock(self, step_ms: int) -> None:
        """Set the wall clock; /proc counts starts since the boot, so they move with it.

        The logs have wall-clock timestamps only: a duration across the step includes it.
        """
        self.now_ms += step_ms
        self.settled_ms = max(self.settled_ms + step_ms, self.now_ms + SETTLING_MS)
        self.stepped_ms += step_ms
        self._events = [(at + step_ms, number, event) for at, number, event in self._events]
        for process in self.processes.values():
            process.started_ms += step_ms
        if step_ms < 0:
            for truth in self.truths.values():
                truth.unknowable.add("the clock was set back")

    def _retry_unless(self, done: bool, action: Action) -> None:
        if not done:
            self.after(RETRY_MS, partial(self._act, action))

    def _daemon(self, name: str) -> Daemon | None:
        return next((one for one in self.daemons.values() if one.key == name), None)

    def _start_daemon(self, action: Action) -> None:
        known = self._daemon(action.target)
        if known is None:
            kind = DaemonV3 if action.values.get("v3") else Daemon
            known = kind(self, action.target, action.values)
            self.daemons[known.pipe] = known
        if not known.exists:
            known.start()

    def _start_client(self, action: Action) -> None:
        name, _, number = action.target.partition("/c")
        daemon, values = self._daemon(name), action.values
        if daemon is None or not daemon.exists:
            return  # driver 580: it runs without MPS
        earlier = self.clients.get(values.get("pid_of", ""))
        pid = FIRST_CLIENT_PID + PIDS_OF_A_DAEMON * int(name[1:]) + int(number)
        if earlier is not None and earlier.dead_ms is None and not self._is_known(earlier):
            pid = earlier.pid
        client = Client(
            pid=pid,
            uid=values.get("uid", 1001),
            started_ms=self.now_ms,
            name=values.get("name", "python3"),
            key=action.target,
            daemon=daemon,
            gpus=tuple(values.get("gpus", daemon.ordinals)),
            busy=values.get("busy", True),
            settings=choose(self.random(action.target, "settings"), pid),
            groups=(100, *self.random(action.target, "groups").choice(((), (100, 7), (7, 8)))),
        )
        if daemon.may_arrive(client):  # often not: the rest is for a client that comes
            client.reservations = self._reservations(values.get("fork_of", action.target))
            self.add(client)
            self.clients[action.target] = client
            daemon.accept(partial(daemon.arrive, client))
        else:
            self._retry_unless(False, action)

    def _act_directly(self, action: Action) -> None:
        """Start or end a process without MPS."""
        if (ended := self.directs.pop(action.target, None)) is not None:
            self.end_process(ended)
            return
        if action.values.get("gpu", 1 << 10) >= len(self.gpus):
            return  # its start, or that of the GPU, is not in a shortened history
        number = int(action.target[1:])
        self.directs[action.target] = direct = Direct(
            pid=FIRST_DIRECT_PID + number,
            uid=action.values["uid"],
            started_ms=self.now_ms,
            name="python3",
            settings=choose(self.random(action.target, "settings"), FIRST_DIRECT_PID + number),
            groups=(100, *self.random(action.target, "groups").choice(((), (7, 8)))),
            gpu=self.gpus[action.values["gpu"]],
            directory=action.values["directory"],
        )
        self.add(direct)

    def _is_known(self, client: Client) -> bool:
        """Return whether its PID is in use, or its daemon still has it: that was not measured."""
        server = client.daemon.server
        queued = any(one.pid == client.pid for one in client.daemon.queue)
        ending = server is not None and client in server.clients
        return client.pid in self.processes or queued or ending

    def _reservations(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges that each context and the memory of a process reserve (recordings/xid).

        Processes that were forked from one parent have the same addresses.
        """
        random = self.random(key, "address")
        sizes = [2 << 20, 2 << 20, 774 << 20]
        starts = [0x7600_0000_0000 + random.randrange(1 << 22) * (2 << 20) for _ in sizes]
        return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))

"""One MPS server of a simulated host: its clients, their contexts, and its fatal GPU errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from testing.world.processes import Client, Process
from testing.world.truth import FaultTruth

if TYPE_CHECKING:
    from testing.world.daemon import Daemon

GARBAGE_PID = -1333654781  # What driver 580 writes for the client before the first one.
WORK_OFFSET = 0x154000
"""recordings/xid: where work that was left behind faults in the range of its context."""
MAX_CONTEXTS = 48
JUDGED_AFTER_MS = 2_200


class Server(Process):
    def __init__(self, daemon: Daemon, pid: int, uid: int) -> None:
        super().__init__(pid, uid, daemon.world.now_ms, "nvidia-cuda-mps-server", daemon.pid)
        self.daemon, self.world, self.truth = daemon, daemon.world, daemon.truth
        self.logged_ms = self.started_ms
        """Time of the line about its start: a step of the clock moves only `started_ms`."""
        self.ready_ms: int | None = None
        self.clients: list[Client] = []
        self.expected = 0
        """Clients that were sent here and have not connected."""
        self.ghost = False
        self.torn: dict[int, int] = {}
        """Ordinal of a GPU whose context a fault destroys -> time of the fault."""
        self.pending_faults = 0
        self.abandoned_work: dict[int, Client] = {}
        """Ordinal -> client that was alone there and left work; the next client meets the fault."""
        self.exhausted = False
        """It has no file descriptor left, while its clients use them."""
        self._destroyed: set[int] = set()
        self._last_request = (GARBAGE_PID, 0)
        self._handover_counted = False

    @property
    def inner_pids(self) -> tuple[int, ...]:
        return self.daemon.inner_pids_of(self)

    @property
    def pid_namespace(self) -> int:
        return self.daemon.pid_namespace

    @property
    def ready(self) -> bool:
        return self.ready_ms is not None

    @property
    def calm(self) -> bool:
        """Nobody connects, leaves, or dies: what was measured began from there."""
        alive = all(one.alive and one.complete for one in self.clients)
        return alive and not (self.expected or self.pending_faults or self.torn or self.ghost)

    @property
    def settled(self) -> bool:
        return self.ready and not self.connecting and not self.pending_faults

    @property
    def used(self) -> bool:
        return any(one.contexts and one.alive for one in self.clients)

    @property
    def cannot_accept(self) -> bool:
        return self.exhausted and self.used

    @property
    def connecting(self) -> bool:
        return bool(self.expected) or any(one.alive and not one.complete for one in self.clients)

    @property
    def threads(self) -> int:
        return sum(1 + len(one.contexts) for one in self.clients) + self.expected

    @property
    def state(self) -> str:
        return "FAULT" if self.torn else "ACTIVE"

    def say(self, *texts: str) -> None:
        self.daemon.say("server", *texts, pid=self.pid)

    # -- start

    def start(self) -> int:
        """Begin to start; return the milliseconds until it is ready."""
        several = len(self.daemon.gpus) > 1
        # recordings: 58 ms (samples/server-killed) to 243 ms (samples/uid-wait), with two GPUs
        # 540 ms (two-gpus-one-daemon) to 690 ms (fault-two-gpus)
        least, most = (540, 690) if several else (58, 243)
        duration = self.world.delay(self.pid, "start", least, most)
        socket = f"Connecting to control daemon on socket: {self.daemon.pipe}/control"
        self._after(2, partial(self.say, "Startup", socket, "Initializing server process"))
        for number in self.daemon.ordinals:
            at = duration - 48 * (len(self.daemon.gpus) - number)
            self._after(at, partial(self._create_context, number))
        return duration

    def open(self) -> None:
        self.ready_ms = self.world.now_ms
        self.say(
            f"Created anonymous shared memory region mps.shm.{self.uid}.{self.pid}",
            "CUDA MPS Server for Linux/Unix. Binary version: 13000",
            "Display Driver version: 580",
            f"Active Threads Percentage set to {self.daemon.percentage}",
            *(
                f"Device pinned memory limit for device {one} set to 0x40000000 bytes"
                for one in self.daemon.limits  # recordings/samples/thread-percentages
            ),
            "Server Priority set to 0",
            "Server has started",
        )
        self.truth.observe("startups", self.ready_ms - self.logged_ms)

    def _create_context(self, ordinal: int) -> None:
        self.say(f"Creating server context on device {ordinal} (NVIDIA H200)")

    def _after(self, milliseconds: int, event: partial[None]) -> None:
        self.daemon.after(milliseconds, partial(self._run, event))

    def _run(self, event: partial[None]) -> None:
        if self.exists:
            self.daemon.account()
            event()

    # -- clients come

    def request(self, client: Client, context: int) -> None:
        pid, last_context = self._last_request
        self.say(f"Received new client request for {{PID: {pid}, Context ID: {last_context}}}")
        self._last_request = client.pid, context

    def refuse(self, client: Client) -> None:
        """Refuse it: contexts are torn down (recordings/fault-held), or no descriptor is left."""
        self.request(client, 0)
        client.alive = False
        self._after(20, partial(self.world.end_process, client))
        if not self.torn:
            # driver 580: without a free descriptor; the client gets error 46, and all later hang
            self.say("User did not send valid credentials")
            self.ghost = True
            self.truth.allow("handover_idle_seconds", 10_100)  # the exporter waits for it
            return
        self.say(
            f"Server teardown in progress. Refusing to accept new client {client.named(0)}",
            f"Failed to accept client {client.named(0)} with status 807",
        )
        self.truth.count("rejections", f"{client.shown_uid} server_not_ready")

    def connect(self, client: Client, *, expected: bool = True) -> None:
        self.request(client, 0)
        if self._destroyed:
            # recordings/samples/left-work-kill-busy-neighbour: 44 to 57 ms
            for ordinal in sorted(self._destroyed):
                self._create_context(ordinal)
            self._destroyed.clear()
            self._after(
                self.world.delay(client.key, "again", 44, 57),
                partial(self._connected, client, expected=expected),
            )
        else:
            self._connected(client, expected=expected)

    def _connected(self, client: Client, *, expected: bool) -> None:
        self.expected -= expected
        self.say(*_connected(client, 0))
        self.add(client)
        # recordings/samples/uid-wait: the context follows 13 to 26 ms later
        self._after(
            self.world.delay(client.key, "context", 13, 26),
            partial(self.daemon.accept, partial(self._open_context, client, 1)),
        )

    def add(self, client: Client) -> None:
        client.connected_ms = self.world.now_ms
        self.clients.append(client)
        self.truth.count("connections", client.shown_uid)

    def _open_context(self, client: Client, context: int) -> None:
        """Open a context for each GPU, one after the other."""
        if not (self.exists and client.alive):
            return
        ordinal = client.gpus[context - 1]
        gpu = self.daemon.gpus[ordinal]
        self.daemon.say_admission(client, first=False)
        self.request(client, context)
        self.say(
            *_connected(client, context), f"Device NVIDIA H200 (uuid {gpu.uuid}) is associated"
        )
        if sum(ordinal in one.contexts.values() for one in self.clients) >= MAX_CONTEXTS:
            self._refuse_context(client)
            return
        client.contexts[context] = ordinal
        self.say(f"Status of client {client.named(context)} is ACTIVE")
        if client.active_ms is None:
            client.active_ms = self.world.now_ms
            self.daemon.served.append(client)
            self._serve(client)
        if context < len(client.gpus):
            gap = self.world.delay(client.key, f"context {context}", 13, 26)
            event = partial(self._open_context, client, context + 1)
            self._after(gap, partial(self.daemon.accept, event))
        if (leaver := self.abandoned_work.pop(ordinal, None)) is not None:
            # recordings/samples/left-work-sole-then-wait-5: 201 ms after its context is ACTIVE
            self.pending_faults += 1
            gap = self.world.delay(client.key, "meets", 195, 205)
            self._after(gap, partial(self._left_work_faults, leaver, ordinal))

    def _refuse_context(self, client: Client) -> None:
        """Refuse a client beyond the limit of contexts (recordings/context-limit)."""
        self.say(
            f"Failed to accept new client. Maximum number of clients ({MAX_CONTEXTS}) reached."
        )
        self.truth.count("rejections", f"{client.shown_uid} context_limit")
        if client.blocked:
            self.truth.count("waits_abandoned", client.shown_uid)
        client.alive = False
        self._disconnect(client)
        self._after(28, partial(self._end_refused, client))

    def _end_refused(self, client: Client) -> None:
        self._lost_connection(client, 0)
        self.say(f"Client process {client.pid} disconnected")
        self.world.end_process(client)

    def _serve(self, client: Client) -> None:
        """Count the end of its wait: it ended when the server was ready."""
        if not client.blocked or client.queued_ms is None or self.ready_ms is None:
            return
        self.truth.observe("waits", self.ready_ms - client.queued_ms, client.shown_uid)
        client.blocked = False
        if not self._handover_counted:
            self._handover_counted = True
            self.truth.count("handovers")

    # -- clients go

    def leave(
        self, client: Client, *, least: int = 14, most: int = 66, remarks: Sequence[str] = ()
    ) -> None:
        """Close its contexts, and after a moment its process (recordings/samples: 14 to 66 ms)."""
        client.alive = False
        for context in list(client.contexts):
            self._close_context(client, context, remarks)
        gap = self.world.delay(client.key, "leave", least, most)
        self._after(gap, partial(self._end, client))

    def _close_context(self, client: Client, context: int, remarks: Sequence[str]) -> None:
        ordinal = client.contexts.pop(context)
        left = sum(ordinal in one.contexts.values() for one in self.clients)
        self._lost_connection(client, context)
        exiting = f"Client {client.named(context)} exiting."
        if not self.ghost:  # recordings/hangs-of-processes: the first line only
            self.say(*remarks, f"{exiting} Number of active client contexts is {left}.")
        if ordinal in self.torn and not any(
            one.torn and ordinal in one.contexts.values() for one in self.clients
        ):
            self.truth.observe("recoveries", self.world.now_ms - self.torn.pop(ordinal))
            self._destroyed.add(ordinal)
            self.say(f"Destroy server context on device {ordinal} (NVIDIA H200)")

    def _lost_connection(self, client: Client, context: int) -> None:
        self.say(
            "Server failed to recevie command with status 806, assuming client "
            f"{client.named(context)} exit"
        )

    def _end(self, client: Client) -> None:
        if client not in self.clients:
            return
        self._lost_connection(client, 0)
        client.ended_ms = self.world.now_ms
        self.world.end_process(client)
        if client.torn or self._destroyed:
            # recordings/samples/client-fault: 34 to 92 ms later
            gap = self.world.delay(client.key, "disconnect", 34, 92)
            self._after(gap, partial(self._disconnect, client))
        else:
            self._disconnect(client)

    def _disconnect(self, client: Client) -> None:
        if not self.ghost:
            self.say(f"Client process {client.pid} disconnected")
        self.remove(client)

    def remove(self, client: Client) -> None:
        """Count the end of a client, and of its session if it had a context."""
        self.clients.remove(client)
        self.truth.count("disconnections", client.shown_uid)
        if client.active_ms is not None and client.connected_ms is not None:
            length = self.world.now_ms - client.connected_ms
            self.truth.observe("sessions", length, client.shown_uid)

    def terminate(self, client: Client) -> None:
        """End it for an operator (recordings/samples/terminate-client)."""
        ((context, _),) = client.contexts.items()
        self.say(f"MPS server requesting client {client.named(context)} to exit")
        self.truth.count("losses", f"{client.shown_uid} terminated")
        client.lost = True
        self.leave(client, least=14, most=16, remarks=["Client termination succeeded."])

    def lose_all(self, cause: str) -> None:
        """Count all clients as lost; those that use the GPU exit, the others notice nothing."""
        for client in list(self.clients):
            if not client.lost and client.active_ms is not None:
                self.truth.count("losses", f"{client.shown_uid} {cause}")
            client.lost = True
            client.contexts.clear()
            self.remove(client)
            if client.busy:
                client.alive = False
                self.daemon.after(5, partial(self.world.end_process, client))

    # -- fatal GPU errors

    def may_fault(self, ordinal: int) -> bool:
        """Whether all clients on this GPU use it alone: other faults were not measured."""
        here = [one for one in self.clients if ordinal in one.contexts.values()]
        return all(len(one.contexts) == 1 for one in here)

    def leave_work(self, client: Client) -> None:
        """End it with work in flight, which then faults (recordings/samples/left-work-...)."""
        (ordinal,) = client.contexts.values()
        client.leaves_work = True
        others = [
            one for one in self.clients if one is not client and ordinal in one.contexts.values()
        ]
        # limits_without_a_flag.py, UNFINISHED_END_SECONDS: up to 487 ms for the only client
        self.leave(client, least=159, most=225 if others else 487)
        if not others:
            self.abandoned_work[ordinal] = client
            return
        self.pending_faults += 1
        if any(one.busy for one in others):
            # 124 to 233 ms after its context's end, and before that of its process
            gap = self.world.delay(client.key, "fault", 124, 158)
        else:
            # 40 ms after its process has ended
            gap = 40 + self.world.delay(client.key, "leave", 159, 225)
        self._after(gap, partial(self._left_work_faults, client, ordinal))

    def _left_work_faults(self, leaver: Client, ordinal: int) -> None:
        self.pending_faults -= 1
        address = leaver.reservations[0][0] + WORK_OFFSET
        self._fault(ordinal, leaver, address, "GCC", "READ", provable=True)

    def own_fault(self, client: Client, pointer: str) -> None:
        """Use a wrong pointer (recordings/xid)."""
        (ordinal,) = client.contexts.values()
        random = self.world.random(client.key, "pointer")
        heap, heap_end = client.reservations[-1]
        address = {
            "overrun": random.randrange(heap, heap_end) & ~0xFFF,
            "null": 0,
            "wild": 0xFE82_ADAE_8000,  # a jump: no mapping is there
        }[pointer]
        unit = "GCC" if pointer == "wild" else "T1_11"
        access = "READ" if pointer == "wild" else "WRITE"
        self._fault(ordinal, client, address, unit, access, provable=pointer == "overrun")

    def _fault(
        self, ordinal: int, culprit: Client, address: int, unit: str, access: str, *, provable: bool
    ) -> None:
        """Meet a fatal error: take down all clients on this GPU."""
        now_ms = self.world.now_ms
        victims = [one for one in self.clients if ordinal in one.contexts.values()]
        if not victims:
            return
        gpu = self.daemon.gpus[ordinal]
        # recordings/xid: both PIDs are those of a client on the GPU, whoever did it
        blamed = self.world.random(culprit.key, "blamed").choice(victims)
        self.world.kernel_lines.append(
            (
                now_ms,
                f"NVRM: Xid (PCI:{gpu.pci}): 31, pid={blamed.pid}, name=-, channel 0x0000000e, "
                f"intr 00000000. MMU Fault: ENGINE GRAPHICS GPC5 GPCCLIENT_{unit} faulted @ "
                f"0x{address >> 32:x}_{address & 0xFFFFFFFF:08x}. Fault is of type FAULT_PDE "
                f"ACCESS_TYPE_VIRT_{access}",
            )
        )
        self._report_fault(ordinal, blamed, victims)
        self.torn[ordinal] = now_ms
        self.truth.count("faults", gpu.uuid)
        pids = tuple(one.pid for one in victims)
        truth = FaultTruth(now_ms, culprit.pid, culprit.leaves_work, pids)
        self.truth.faults.append(truth)
        losses = [one for one in victims if not one.lost]
        for client in victims:
            client.torn = client.lost = True
            if client.busy:
                # recordings/samples/client-fault: 22 to 35 ms; idle clients continue
                gap = self.world.delay(client.key, "torn", 22, 35)
                self._after(gap, partial(self._leave_torn, client))
        self.world.settle(JUDGED_AFTER_MS + 300)
        judge = partial(self._judge, truth, culprit, losses, address if provable else None)
        self.daemon.after(JUDGED_AFTER_MS, judge)

    def _leave_torn(self, client: Client) -> None:
        if client.contexts:
            self.leave(client)

    def _report_fault(self, ordinal: int, blamed: Client, victims: Sequence[Client]) -> None:
        self.say(
            f"Client {{PID: {blamed.pid}, Context: {_only(blamed.contexts)}}} "
            "encountered a fatal GPU error.",
            "Server is handling a fatal GPU error.",
        )
        contexts = {one.pid: f"Client {one.named(_only(one.contexts))}" for one in victims}
        self.say(*(f"{who} on device {ordinal} to be torn down" for who in contexts.values()))
        for pid, who in contexts.items():
            self.say(
                f"All clients belonging to error trigging process {pid} will be torn down",
                f"{who} on the error-trigging process {pid} to be torn down",
            )
        self.say("The following devices will be reset:", str(ordinal))
        self.say("The following client process have a sticky error set:", *map(str, contexts))

    def _judge(
        self, fault: FaultTruth, culprit: Client, losses: Sequence[Client], address: int | None
    ) -> None:
        """Count the losses by their cause, once an exporter has had the time to prove it.

        The address proves nothing (None), or not certainly if forked processes have the same.
        """
        provable = address is not None and self.world.sight.kernel_log
        # The work of any client may have waited since the culprit's end; the last line of a client
        # is up to 92 ms later.
        since_ms = min(culprit.ended_ms or fault.at_ms, fault.at_ms) - 2_100
        near = [
            one
            for one in self.daemon.served
            if (one.active_ms or 0) <= fault.at_ms + 2_000
            and (one.ended_ms or fault.at_ms) >= since_ms
        ]
        proved = all(one.mapped_ms is not None and one.mapped_ms < fault.at_ms for one in near)
        owners = [one for one in self.daemon.served if one.reserves(address)]
        proved &= all(abs(at_ms - fault.at_ms) > 3_000 for at_ms in self.world.foreign_xids)
        if provable and not (proved and culprit in near and owners == [culprit]):
            self.truth.allow("losses", len(losses))
            self.truth.allow("unfinished_exits", 1)
        if provable and fault.left_work:
            self.truth.count("unfinished_exits", culprit.uid)
        for client in losses:
            cause = "unfinished_work" if fault.left_work else "neighbour_fault"
            if client is culprit:
                cause = "own_fault"
            if not provable:
                cause = "unattributed_fault"
            self.truth.count("losses", f"{client.shown_uid} {cause}")


def _connected(client: Client, context: int) -> tuple[str, str]:
    who = client.named(context)
    return f"Client {who} connected", f"Creating worker thread for client {who}"


def _only(contexts: dict[int, int]) -> int:
    (context,) = contexts
    return context

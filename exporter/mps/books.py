"""The ledger's state, and everything that can be done to it.

The readers of the two logs (control_reader, server_reader) say what happened in the words used
here; what follows from it, and what is counted, is decided here.

Running totals are kept in whole milliseconds, as the logs' stamps are, so that they do not depend
on the steps in which time is advanced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.model import Incident, IncidentKind
from exporter.mps.incidents import MAX_PIDS, Incidents
from exporter.mps.serving import MAX_CLIENTS, MAX_CONTEXTS, Admission, Client, Fault, Server
from exporter.mps.tally import Tally
from exporter.mps.unfinished_work import (
    DECISION_SECONDS,
    MAX_ENDINGS,
    QUEUED_END_SECONDS,
    Ending,
    Verdict,
    failed_start,
    judge,
    last_on_gpu,
    suspects,
)
from exporter.mps.waits import Queue, Queued

ADMISSION_SECONDS = 10.0
"""A client that was sent to a ready server connects within a millisecond (driver 580); one that
has not after this long will not."""

CREDENTIALS_SECONDS = 10.0
"""NEW CLIENT follows within a millisecond; a caller without one after this long was refused."""

FAULT_BLOCK_SECONDS = 0.5
"""All lines about one fault are written in one go."""

DEATH_SECONDS = 1.0
"""A process was seen to be gone: its last lines are in the log by then, if it wrote any."""

ORDERLY_SECONDS = 5.0
"""A server that agrees to end has ended by then: 0.06 to 0.1 s were seen on driver 580."""

FORBIDDEN_ATTEMPTS = 6
"""How often the daemon tries a server that it may not start, before it lets the client go (580)."""

CLOCK_JUMP_MS = 60_000
"""Time that runs back by more than this has been set back."""

SAME_MOMENT_SECONDS = 0.01
"""The two logs may tell of one thing in either order when their stamps are this close."""

NO_CONTEXT = "no_context"
"""Of a wait that was given up: the client came to its server, and never had a context."""

MAX_SERVERS = 64
MAX_ENDED = 256
MAX_UUIDS = 64
MAX_UNANSWERED = 256


@dataclass(slots=True)
class Daemon:
    """The control daemon's present life."""

    started_at: float | None = None
    pid: int | None = None
    binary_version: str | None = None
    quit_requested_at: float | None = None
    ended_at: float | None = None
    died: bool = False
    missing_since: float | None = None
    counted: bool = False
    """It started, or was seen, since the exporter began to look: so its end is news."""
    configured_at: float | None = None
    """Somebody last gave it a set_... command."""
    served_at: float | None = None
    """It last did something for a client or a server: its only thread was not stuck then."""
    silent_since: float | None = None
    """When it wrote a line that another one follows at once, and none has followed."""
    sent_at: float | None = None
    """When it sent a client to a server, and neither log has said more since."""
    tries_shutdown: bool = False
    """Its log says when it asks a server to end (driver 580)."""
    backoff_seconds: float | None = None
    unanswered: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_UNANSWERED))
    """Callers without credentials that no NEW CLIENT has followed yet."""
    forbidden: dict[int, int] = field(default_factory=dict)
    """User -> servers in a row that the daemon was not allowed to start."""


class Books:
    """All that is known of one daemon."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        self.servers: dict[int, Server] = {}
        self.ended: deque[int] = deque(maxlen=MAX_ENDED)
        self.vanished: dict[int, Server] = {}
        """Servers that are gone without a line in the log, which may come yet."""
        self.queue = Queue()
        self.tally = Tally()
        self.incidents = Incidents()
        self.ordinals: dict[int, str] = {}
        """Device ordinal of the daemon -> GPU UUID."""
        self.uuids: dict[str, str] = {}
        """GPU UUID -> name, of all that clients were associated with."""
        self.readable: dict[str, bool] = {"control": False, "server": False}
        self.server_heard_at: float | None = None
        """The last line of server.log."""
        self.clock_ms: int | None = None
        """Everything up to here is in the running totals."""
        self.counting_from_ms: int | None = None
        """Running totals begin here: when the exporter did."""

    # ------------------------------------------------------------------ time

    def settle(self, at: float) -> None:
        """Advance the running totals, and do what was due by then."""
        while (due := self._next_due()) <= at:
            self._run_to(due)
            self._do_due(due)
        self._run_to(at)

    def _run_to(self, at: float) -> None:
        to = round(at * 1000.0)
        clock = self.clock_ms
        if clock is None or to <= clock:
            if clock is None or to < clock - CLOCK_JUMP_MS:
                self.clock_ms = to
            return
        start = clock if self.counting_from_ms is None else max(clock, self.counting_from_ms)
        if to > start:
            for server in self.servers.values():
                if server.occupied:
                    self.tally.holding_ms[self.tally.user(server.uid)] += to - start
            if self.idle_while_waited_for():
                self.tally.handover_idle_ms += to - start
        self.clock_ms = to

    def idle_while_waited_for(self) -> bool:
        """Whether somebody waits behind another user while nobody uses the GPU."""
        for server in self.servers.values():
            if server.occupied or server.admissions:
                return False
        return self.queue.somebody_waits()

    def _next_due(self) -> float:
        due = float("inf")
        if self.daemon.unanswered:
            due = self.daemon.unanswered[0] + CREDENTIALS_SECONDS
        for server in self.servers.values():
            if server.admissions:
                due = min(due, server.admissions[0].at + ADMISSION_SECONDS)
            if server.block is not None:
                due = min(due, server.block.at + FAULT_BLOCK_SECONDS)
            for fault in server.undecided:
                due = min(due, fault.at + DECISION_SECONDS)
            for last in server.last:
                due = min(due, last.resolved_at)
        return due

    def _do_due(self, at: float) -> None:
        counting = self.tally.counting
        self.tally.counting = self.counts_at(at)
        for server in self.servers.values():
            while server.admissions and server.admissions[0].at + ADMISSION_SECONDS <= at:
                self.never_connected(server.admissions.pop(0), at)
            if server.block is not None and server.block.at + FAULT_BLOCK_SECONDS <= at:
                self.close_block(server)
            for fault in list(server.undecided):
                if fault.at + DECISION_SECONDS <= at:
                    self._decide(server, fault, final=True)
            # Where a newcomer has run, nothing had been left behind.
            server.last = [last for last in server.last if last.resolved_at > at]
        unanswered = self.daemon.unanswered
        while unanswered and unanswered[0] + CREDENTIALS_SECONDS <= at:
            unanswered.popleft()
            if self.daemon.quit_requested_at is None:  # a draining daemon answers nobody
                self.reject(None, "credentials", (), at)
        self.tally.counting = counting

    def counts_at(self, at: float) -> bool:
        """Whether what happens at this moment is counted."""
        return self.counting_from_ms is None or round(at * 1000.0) >= self.counting_from_ms

    def incident(
        self,
        at: float,
        kind: IncidentKind,
        *,
        server_pid: int | None = None,
        uid: int | None = None,
        pids: Iterable[int] = (),
        blamed_pid: int | None = None,
        left_by_pid: int | None = None,
        ended_pids: Iterable[int] = (),
        gpu_uuids: Iterable[str] = (),
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Note something for the operator."""
        self.incidents.add(
            Incident(
                at=at,
                kind=kind,
                server_pid=server_pid,
                uid=uid,
                pids=tuple(pids),
                blamed_pid=blamed_pid,
                left_by_pid=left_by_pid,
                ended_pids=tuple(ended_pids)[:MAX_PIDS],
                gpu_uuids=tuple(uuid for uuid in gpu_uuids if uuid),
                seconds=None if seconds is None else round(max(seconds, 0.0), 3),
                detail=detail,
                counted=self.tally.counting,
            )
        )

    # ------------------------------------------------------------------ daemon

    def daemon_started(self, pid: int, at: float) -> None:
        """The log says that a control daemon came up: whatever was before it is gone."""
        daemon = self.daemon
        if (
            daemon.pid == pid
            and daemon.ended_at is None
            and daemon.started_at is not None
            and at - daemon.started_at <= 1.0
            and not self.servers
        ):
            return  # said in two lines
        self.settle(at)
        lives = daemon.started_at is not None and daemon.ended_at is None
        if lives or self.servers:
            self.daemon_died(at)
        self.daemon = Daemon(started_at=at, pid=pid)
        self.daemon.counted = self.tally.counting
        self.vanished.clear()
        self.ordinals.clear()
        if self.tally.counting:
            self.tally.daemon_starts += 1
        self.incident(at, "daemon_started")

    def daemon_died(self, at: float) -> None:
        """It is gone without a word; its servers died with it."""
        lost = [pid for server in self.servers.values() for pid in _pids(server)]
        for server in list(self.servers.values()):
            self.end_server(server, at, "daemon_died")
        self._forget_queue(at)
        self.daemon.ended_at = at
        self.daemon.died = True
        self.daemon.quit_requested_at = None
        self.daemon.unanswered.clear()
        self.incident(at, "daemon_died", pids=lost)

    def daemon_exited(self, at: float) -> None:
        """It says that it ends."""
        self.settle(at)
        for server in list(self.servers.values()):
            self.end_server(server, at, "requested")
        self._forget_queue(at)
        self.daemon.ended_at = at
        self.daemon.quit_requested_at = None
        self.daemon.backoff_seconds = None
        self.daemon.unanswered.clear()
        self.incident(at, "daemon_quit")

    def _forget_queue(self, at: float) -> None:
        for entry in self.queue.take_all():
            self.abandoned(entry, at)

    # ------------------------------------------------------------------ servers

    def current(self, uid: int | None = None) -> Server | None:
        """The server that was started last; of this user, if one is."""
        latest = None
        for server in self.servers.values():
            if uid is not None and server.uid == uid:
                return server
            latest = server
        return latest

    def start_server(
        self, pid: int, uid: int | None, at: float, *, adopted: bool = False
    ) -> Server:
        """A server process was made."""
        self.settle(at)
        known = self.servers.get(pid)
        if known is not None and known.adopted and not adopted:
            # server.log spoke first: the stamps are equal.
            known.uid, known.started_at, known.adopted = uid, at, False
            server = known
        else:
            while len(self.servers) >= MAX_SERVERS:
                del self.servers[next(iter(self.servers))]
            server = Server(pid, uid, at, adopted=adopted)
            self.servers[pid] = server
        if uid is None:
            return server
        for entry in self.queue.blocked_by(uid):
            self.wait_began(entry)
        mine = self.queue.of_user(uid)
        server.started_for.update({entry.pid: entry.dead for entry in mine if entry.pid})
        server.started_for_unnamed += sum(1 for entry in mine if not entry.pid)
        return server

    def server_ready(self, server: Server, at: float) -> None:
        """A server takes clients: those in the queue for its user are sent to it."""
        self.settle(at)
        if server.ready_at is not None:
            return
        server.ready_at = at
        if not server.adopted:
            self.tally.observe(self.tally.server_startup, at - server.started_at)
        if server.uid is None:
            return
        self.daemon.forbidden.pop(server.uid, None)
        for entry in self.queue.take_user(server.uid):
            server.started_for.setdefault(entry.pid, entry.dead)
            if not entry.dead:
                self.announce(server, entry.pid, entry.uid, at, entry)

    def end_server(self, server: Server, at: float, cause: str, detail: str = "") -> None:
        """A server is gone."""
        self.settle(at)
        self.close_block(server)
        for fault in list(server.undecided):
            self._decide(server, fault, final=True)
        lost: list[int] = []
        loss = {
            "crashed": "server_crashed",
            "daemon_died": "daemon_died",
            "requested": "terminated",
        }.get(cause)
        departed = server.unnamed_departures
        for client in server.clients.values():
            if departed:
                departed -= 1  # it left before, only its name is not known
                continue
            if loss is not None and self._was_using(server, client, cause):
                self.lose(client, loss, at, lost)
            self._end_wait(server, client, at)
            self.count_leaving(client, at, known_end=server.named is not False)
        for admission in server.admissions:
            self.never_connected(admission, at)
        server.clients.clear()
        server.admissions.clear()
        del self.servers[server.pid]
        self.ended.append(server.pid)
        self.daemon.backoff_seconds = None
        self.tally.exit(cause, at)
        if cause == "crashed":
            self.incident(
                at, "server_crashed", server_pid=server.pid, uid=server.uid, pids=lost,
                detail=detail,
            )  # fmt: skip
        elif cause == "ghost_ended":
            self.incident(at, "ghost_ended", server_pid=server.pid, uid=server.uid)
        elif cause == "start_failed":
            self.incident(at, "server_start_failed", uid=server.uid, detail=detail)

    def _was_using(self, server: Server, client: Client, cause: str) -> bool:
        """Whether a server's end took this client along."""
        if client.leaving or (server.ghost and client.wait is not None):
            return False  # the latter never got so far: its wait is given up
        # Without server.log, who is left at an orderly end has most likely left before it.
        return cause != "requested" or (self.names_clients(server) and client.had_context)

    def vanish(self, server: Server) -> None:
        """A server is gone, and the log does not say so: there is no evidence of a cause."""
        for fault in list(server.undecided):
            self._decide(server, fault, final=True)
        del self.servers[server.pid]
        self.ended.append(server.pid)
        self.vanished[server.pid] = server
        while len(self.vanished) > MAX_SERVERS:
            del self.vanished[next(iter(self.vanished))]

    def returned(self, pid: int) -> Server | None:
        """Take back a server that was thought to be gone: somebody speaks of it."""
        server = self.vanished.pop(pid, None)
        if server is not None:
            self.servers[pid] = server
            self.ended.remove(pid)
            server.missing_since = server.unlisted_since = None
        return server

    def exit_cause(self, server: Server, status: int, at: float) -> tuple[str, str]:
        """Why a server ended, and how that is known.

        The status itself proves nothing: it is 0 after SIGKILL, too (driver 580).
        """
        if server.exiting:
            return "requested", ""
        if server.ghost:
            return "ghost_ended", f"exit status {status}"  # most often killed, as it must be
        if server.ready_at is None and not server.ever_connected and not server.adopted:
            return "start_failed", f"exit status {status}"
        if self.says_exiting(server):
            return "crashed", f"exit status {status}, no orderly end in server.log"
        if self.daemon.tries_shutdown:
            asked = server.asked_at is not None and at - server.asked_at <= ORDERLY_SECONDS
            orderly = asked and not server.declined
        else:
            orderly = self.daemon.quit_requested_at is not None or any(
                entry.uid != server.uid for entry in self.queue
            )
        cause = "requested" if orderly and status == 0 else "crashed"
        return cause, f"exit status {status}, judged by control.log alone"

    def says_exiting(self, server: Server) -> bool:
        """Whether an orderly end would stand in this server's log."""
        return self.readable["server"] and server.has_log and server.named is not False

    def names_clients(self, server: Server) -> bool:
        """Whether server.log tells which clients come and go."""
        return self.readable["server"] and server.named is not False

    def forbidden(self, uid: int, at: float) -> None:
        """The daemon may not start a server for this user; it gives up after six attempts."""
        forbidden = self.daemon.forbidden
        if len(forbidden) >= MAX_SERVERS and uid not in forbidden:
            forbidden.clear()
        forbidden[uid] = forbidden.get(uid, 0) + 1
        if forbidden[uid] >= FORBIDDEN_ATTEMPTS:
            del forbidden[uid]
            self.settle(at)
            for entry in self.queue.take_user(uid):
                self.abandoned(entry, at)

    # ------------------------------------------------------------------ waits

    def queued(self, pid: int, uid: int, at: float) -> None:
        """The daemon told a client to wait."""
        self.settle(at)
        entry, replaced = self.queue.push(pid, uid, at)
        if replaced is not None:
            self.abandoned(replaced, at)
        server = self.current(uid)
        if server is None:
            return
        if server.uid == uid:
            if pid:
                server.started_for.setdefault(pid, False)
            else:
                server.started_for_unnamed += 1
            return
        entry.behind_uid = server.uid
        if not entry.behind_another:
            entry.behind_another = True
            self.wait_began(entry)

    def wait_began(self, entry: Queued) -> None:
        """A client waits behind another user's server."""
        self.incident(entry.since, "wait_started", uid=entry.uid, pids=(entry.pid,))

    def served(self, server: Server, entry: Queued, at: float) -> None:
        """A queued client has a context; the wait itself was over when the server was ready."""
        if not entry.behind_another or entry.dead:
            return
        waited = max(at if server.ready_at is None else server.ready_at, entry.since) - entry.since
        self.tally.wait(entry.uid, waited)
        if not server.handover:
            server.handover = True
            if self.tally.counting:
                self.tally.handovers += 1
        self.incident(at, "wait_served", uid=entry.uid, pids=(entry.pid,), seconds=waited)

    def abandoned(self, entry: Queued, at: float, detail: str = "") -> None:
        """A queued client is gone without having been served."""
        if entry.dead or not entry.behind_another:
            return
        entry.dead = True
        self.tally.by_user(self.tally.waits_abandoned, entry.uid)
        self.incident(
            at, "wait_abandoned", uid=entry.uid, pids=(entry.pid,), seconds=at - entry.since,
            detail=detail,
        )  # fmt: skip

    def _end_wait(self, server: Server, client: Client, at: float) -> None:
        """A client that waited leaves: without a context it was not served."""
        wait, client.wait = client.wait, None
        if wait is not None and self.names_clients(server):
            self.abandoned(wait, at, NO_CONTEXT)

    def ghost(self, server: Server, at: float) -> None:
        """A server waits for a client that died in the queue, and serves nobody."""
        if server.ghost:
            return
        server.ghost = True
        dead = sorted(server.started_for.keys() - server.clients.keys())
        self.incident(at, "ghost", server_pid=server.pid, uid=server.uid, pids=dead)

    # ------------------------------------------------------------------ clients come

    def announce(
        self, server: Server, pid: int, uid: int, at: float, wait: Queued | None = None
    ) -> None:
        """The daemon sent a client process to a server."""
        if pid:
            if len(server.announced) >= MAX_CLIENTS:
                del server.announced[next(iter(server.announced))]
            server.announced[pid] = at
            if pid in server.clients:
                return  # server.log spoke first: the stamps are equal
        server.admissions.append(Admission(pid, uid, at, wait))
        if not self.names_clients(server):
            self.connect(server, pid, at)

    def just_refused(self, server: Server, pid: int, at: float) -> bool:
        """Whether server.log told already, at the same moment, that this client was refused."""
        refused = server.turned_away.pop(pid, None)
        return refused is not None and at - refused < SAME_MOMENT_SECONDS

    def further_connection(self, server: Server, pid: int) -> None:
        """The daemon sent a client again: for a context, if the server lets it."""
        client = server.clients.get(pid)
        if client is not None and not self.names_clients(server):
            client.had_context = True
        for admission in server.admissions:
            admission.for_context |= admission.pid == pid

    def overtake(self, uid: int) -> None:
        """A client of the running user was let in although somebody else waits."""
        if self.queue.somebody_waits():
            self.tally.by_user(self.tally.overtakes, uid)

    def connect(self, server: Server, pid: int, at: float) -> Client | None:
        """A client process is connected: server.log says so, or the daemon where it cannot."""
        self.settle(at)
        known = server.clients.get(pid)
        if known is not None and (known.adopted or known.by_word):
            if known.adopted:
                self.tally.by_user(self.tally.connections, known.uid)
            known.adopted = known.by_word = False
            return known
        admission = server.admitted(pid)
        uid = server.uid if admission is None else admission.uid
        wait = admission.wait if admission is not None else self.queue.take(pid, uid)
        if known is not None:  # the same number again: the first one is gone
            self.leave(server, pid, at)
        client = Client(
            pid, uid, at,
            by_word=not self.names_clients(server),
            thread_ratio=server.thread_ratio,
            memory_limits=None if server.adopted else server.memory_limits,
        )  # fmt: skip
        client.had_context = client.by_word and admission is not None and admission.for_context
        if not server.add(client):
            return None
        self.tally.by_user(self.tally.connections, uid)
        if wait is not None:
            if pid:
                server.announced.setdefault(pid, at)
            if client.by_word:
                self.served(server, wait, at)  # nothing more can be seen of it
            else:
                client.wait = wait
        return client

    def connect_all(self, server: Server) -> None:
        """The server turns out not to name its clients: believe the daemon's word."""
        for admission in list(server.admissions):
            self.connect(server, admission.pid, admission.at)

    def never_connected(self, admission: Admission, at: float) -> None:
        """A client that was sent to a server did not come."""
        if admission.wait is not None:
            self.abandoned(admission.wait, at)

    def open_context(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client made a context."""
        found = server.without(context) if pid == 0 else server.find(pid)
        if found is None:
            client = self.connect(server, pid, at)
            found = None if client is None else server.find(pid)
        if found is None:
            return
        key, client = found
        if pid and (ending := _ending(server, pid)) is not None:
            server.endings.remove(ending)  # it goes on with another context
        if context not in client.contexts and len(client.contexts) < MAX_CONTEXTS:
            client.contexts[context] = ""
            client.creating[context] = at
            server.associating.append((key, context))
            while len(server.associating) > MAX_CONTEXTS:
                server.associating.popleft()

    def context_active(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client's context can be used: one that is refused for the limit never comes so far."""
        client = server.creating(pid, context)
        known = server.clients.get(pid)
        if client is None and known is not None and context not in known.contexts:
            # The server's threads write in any order: the line of its connection is still to come.
            self.open_context(server, pid, context, at)
            client = server.creating(pid, context)
        if client is None:
            return
        self.settle(at)
        del client.creating[context]
        client.had_context = True
        client.active_since = at if client.active_since is None else client.active_since
        server.ghost = server.complained = False
        wait, client.wait = client.wait, None
        if wait is not None:
            self.served(server, wait, at)

    def context_ready(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client's context can be used: the first after unfinished work meets it."""
        self.settle(at)
        found = server.find(pid, context)
        gpu = "" if found is None else found[1].contexts.get(context, "")
        for last in server.last:
            if last.newcomer_at is None and last.was_on((gpu,)):
                last.newcomer_at = at

    # ------------------------------------------------------------------ clients go

    def context_ends(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client has closed the connection of a context, most often because it ends."""
        self.settle(at)
        endings = server.endings
        while endings and (endings[0].closed_at() or at) < at - QUEUED_END_SECONDS:
            endings.popleft()
        if len(endings) >= MAX_ENDINGS:
            endings.popleft()
        found = server.find(pid, context)
        client = None if found is None else found[1]
        ending = None if pid == 0 else _ending(server, pid)
        if ending is None:
            ending = Ending(pid, server.uid if client is None else client.uid)
            endings.append(ending)
        if client is not None:
            ending.excused |= client.terminating or client.lost
        ending.contexts.append((at, "" if client is None else client.contexts.get(context, "")))

    def process_ends(self, server: Server, pid: int, at: float) -> None:
        """A client has closed its last connection: its process ends."""
        self.settle(at)
        ending = _ending(server, pid)
        if ending is None:
            return
        ending.ended_at = at
        others = [
            list(client.contexts.values())
            for client in server.clients.values()
            if client.contexts and (client.pid != pid or pid == 0)
        ]
        undecided = list(server.undecided)
        hit = any(ending in fault.endings for fault in undecided)
        for fault in undecided:
            self._decide(server, fault, final=False)
        if not hit:
            server.last = last_on_gpu(ending, server.endings, others, server.last)[-MAX_UUIDS:]

    def close_context(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client's context ended."""
        found = server.find(pid, context)
        if found is None:
            return
        _, client = found
        client.contexts.pop(context, None)
        client.creating.pop(context, None)
        if client.terminating:
            self.lose(client, "terminated", at)

    def leave(self, server: Server, pid: int, at: float) -> None:
        """A client process is gone."""
        self.settle(at)
        server.announced.pop(pid, None)
        found = server.find(pid)
        if found is None:
            return
        key, client = found
        if client.terminating:
            self.lose(client, "terminated", at)
        del server.clients[key]
        self._end_wait(server, client, at)
        self.count_leaving(client, at, known_end=True)

    def leave_unnamed(self, server: Server, at: float) -> None:
        """A client process is gone, and the log does not say which."""
        self.settle(at)
        if server.client_count <= 0:
            return
        if server.client_count == 1 and len(server.clients) == 1:
            self.leave(server, next(iter(server.clients.values())).pid, at)
            return
        server.unnamed_departures += 1
        self.tally.by_user(self.tally.disconnections, server.uid)
        if not server.occupied:
            server.clients.clear()
            server.announced.clear()
            server.unnamed_departures = 0

    def count_leaving(self, client: Client, at: float, *, known_end: bool) -> None:
        """Count a client's end; its stay, too, where both ends of it are known."""
        self.tally.by_user(self.tally.disconnections, client.uid)
        if known_end and client.pid and client.had_context and not client.adopted:
            self.tally.session(client.uid, at - client.connected_at)

    def lose(self, client: Client, cause: str, at: float, lost: list[int] | None = None) -> None:
        """A client came to a bad end, once."""
        if client.lost:
            return
        client.lost = True
        self.tally.by_cause(self.tally.losses, client.uid, cause)
        if lost is not None:
            lost.append(client.pid)
        if cause == "terminated" and lost is None:
            self.incident(at, "client_terminated", uid=client.uid, pids=(client.pid,))

    def reject(self, uid: int | None, cause: str, pids: Iterable[int], at: float) -> None:
        """A newcomer was refused."""
        self.tally.by_cause(self.tally.rejections, uid, cause)
        self.incident(at, "client_rejected", uid=uid, pids=pids, detail=cause)

    def refused(self, server: Server, pid: int, context: int, at: float) -> None:
        """A client that was sent to a server was not let in."""
        if pid == 0 or context != 0 or pid in server.clients:
            return
        if len(server.turned_away) >= MAX_SERVERS:
            server.turned_away.clear()
        server.turned_away[pid] = at
        server.announced.pop(pid, None)
        admission = server.admitted(pid)
        if admission is not None:
            self.settle(at)
            self.never_connected(admission, at)

    # ------------------------------------------------------------------ devices and faults

    def gpu(self, uuid: str, name: str) -> None:
        """A GPU is named."""
        if uuid in self.uuids or len(self.uuids) < MAX_UUIDS:
            self.uuids[uuid] = name

    def ordinal(self, device: int, uuid: str) -> None:
        """A device's number is tied to its UUID."""
        if device in self.ordinals or len(self.ordinals) < MAX_UUIDS:
            self.ordinals[device] = uuid

    def uuid_of(self, server: Server, device: int) -> str:
        """A device's UUID, "" when the logs did not tell."""
        known = self.ordinals.get(device)
        if known is not None:
            return known
        if len(self.uuids) == 1 and len(server.devices) <= 1:
            return next(iter(self.uuids))
        return ""

    def fault_block(self, server: Server, at: float, *, begins: bool) -> Fault:
        """The fault of which the log speaks; a new one when this line begins one."""
        self.settle(at)
        fault = server.block
        if fault is None and server.faults and not begins:
            return server.faults[-1]  # a late line of its block
        if fault is None or begins:
            self.close_block(server)
            met = tuple(last for last in server.last if last.may_have_hit(at))
            fault = Fault(at, endings=tuple(server.endings), last=met)
            fault.open = bool(met or suspects(at, (), fault.endings))
            if fault.open:
                server.undecided.append(fault)
            server.block = fault
            server.faults.append(fault)
            del server.faults[:-MAX_SERVERS]
            self.tally.last_fault_at = at
        return fault

    def fault_victim(self, server: Server, fault: Fault, pid: int) -> None:
        """A client goes down with a fault."""
        if pid and pid in fault.victims:
            return
        if len(fault.victims) >= MAX_CONTEXTS:
            return
        # Where the log blames nobody, one of them did it, and all are of one user.
        first = pid in fault.blamed or not fault.blamed
        own = first and pid not in fault.victims and (bool(fault.blamed) or not fault.victims)
        cause = "own_fault" if own else "neighbour_fault"
        fault.victims.append(pid)
        if pid == 0:
            self._lost_to(fault, server.uid, cause)
            for client in server.clients.values():
                if client.pid == 0 and not client.lost:
                    client.lost, client.torn_down_at = True, fault.at
                    break
            return
        found = server.find(pid)
        if found is None:
            self._lost_to(fault, server.uid, cause)
        else:
            found[1].torn_down_at = fault.at
            if found[1].lost:
                return
            found[1].lost = True
            self._lost_to(fault, found[1].uid, cause)

    def _lost_to(self, fault: Fault, uid: int | None, cause: str) -> None:
        """Count a victim as soon as it is known whose fault it was; cause is what MPS suggests."""
        if fault.open:
            fault.losses.append((uid, cause))
        else:
            self.tally.by_cause(self.tally.losses, uid, fault.cause or cause)

    def fault_device(self, fault: Fault, device: int) -> None:
        """A device is reset after a fault."""
        if device not in fault.devices and len(fault.devices) < MAX_UUIDS:
            fault.devices.add(device)
            fault.broken.add(device)

    def close_block(self, server: Server) -> None:
        """The log has said all about a fault."""
        fault, server.block, server.listing = server.block, None, None
        if fault is None:
            return
        self.fault_listed(server, fault)
        fault.closed = True
        if fault.open:
            self._decide(server, fault, final=False)
        else:
            self._tell(server, fault, Verdict(None, ()))

    def _decide(self, server: Server, fault: Fault, *, final: bool) -> None:
        """Settle whose fault it was, and count its victims, once the evidence is complete."""
        if final and fault is server.block:
            self.close_block(server)
        if not fault.open or not fault.closed:
            return
        met = [last for last in fault.last if last.was_on(fault.uuids)]
        verdict = judge(
            fault.at,
            fault.uuids,
            fault.endings,
            met,
            failed_start=failed_start(fault.at, fault.victims, server.endings),
            final=final,
        )
        if verdict is None:
            return
        server.undecided.remove(fault)
        fault.open = False
        culprit = verdict.culprit
        if culprit is not None:
            fault.cause = "unfinished_work"
            if not culprit.counted:
                culprit.counted = True
                self.tally.by_user(self.tally.unfinished_exits, culprit.uid)
        elif verdict.suspects:
            fault.cause = "unattributed_fault"
        for uid, cause in fault.losses:
            self.tally.by_cause(self.tally.losses, uid, fault.cause or cause)
        fault.losses.clear()
        # What they left, if anything, is gone with the fault.
        server.last = [last for last in server.last if last not in met]
        self._tell(server, fault, verdict)
        if fault.recovered_at is not None:
            self._tell_recovery(server, fault, fault.recovered_at)

    def _tell(self, server: Server, fault: Fault, verdict: Verdict) -> None:
        culprit, blamed = verdict.culprit, next(iter(sorted(fault.blamed)), None)
        self.incident(
            fault.at,
            "fault" if culprit is None else "unfinished_work",
            server_pid=server.pid,
            uid=server.uid,
            pids=[pid for pid in fault.victims if culprit is not None or pid not in fault.blamed],
            blamed_pid=blamed,
            left_by_pid=None if culprit is None else culprit.pid,
            ended_pids=() if culprit is not None else [one.pid for one in verdict.suspects],
            gpu_uuids=fault.uuids,
        )

    def fault_hit(self, server: Server, fault: Fault, pid: int, device: int) -> None:
        """A fault hit a device: a context that the log blames was on it."""
        if device in fault.hit:
            return
        fault.hit.add(device)
        if pid:  # clients with PID 0 cannot be told apart: which of them it was is not known
            self._count_fault(fault, self.uuid_of(server, device))

    def fault_listed(self, server: Server, fault: Fault) -> None:
        """All devices of a fault are known: where nobody is blamed, the only one was hit."""
        if not fault.uuids:
            devices = fault.hit or fault.devices
            self._count_fault(fault, self.uuid_of(server, *devices) if len(devices) == 1 else "")

    def _count_fault(self, fault: Fault, uuid: str) -> None:
        fault.uuids.append(uuid)
        self.tally.fault(uuid)

    def _tell_recovery(self, server: Server, fault: Fault, at: float) -> None:
        self.incident(
            at,
            "fault_recovered",
            server_pid=server.pid,
            uid=server.uid,
            gpu_uuids=fault.uuids,
            seconds=at - fault.at,
        )

    def device_closed(self, server: Server, device: int, at: float) -> None:
        """A context was destroyed: a fault there is over."""
        self.close_block(server)
        for fault in list(server.faults):
            fault.broken.discard(device)
            if fault.broken:
                continue
            server.faults.remove(fault)
            self.tally.observe(self.tally.fault_recovery, at - fault.at)
            if fault.open:
                fault.recovered_at = at  # told after the fault itself
            else:
                self._tell_recovery(server, fault, at)


def _ending(server: Server, pid: int) -> Ending | None:
    """Give the end of a client that is under way; of those with PID 0, the oldest."""
    for ending in server.endings:
        if ending.pid == pid and ending.ended_at is None:
            return ending
    return None


def _pids(server: Server) -> list[int]:
    return [client.pid for client in server.clients.values() if not client.lost]

"""server.log: the wording of each line, and its effect on the state of the daemon.

Drivers as in control_log; "2022" is a log of that year. On 550 and before, lines do not say which
client they are about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mps_exporter.mps.log_lines import KNOWN, MESSAGE, Shapes
from mps_exporter.mps.record import Moment
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState

if TYPE_CHECKING:
    from mps_exporter.mps.log_merger import LogEntry

INVALID_DEVICE_SECONDS = 1.0
"""Maximum time between the lines of one client about its invalid device."""

MAX_INVALID_DEVICE = 64

SERVER_LINES = Shapes(
    # The server itself. 580: Startup; T4, R340: Start
    ("server_process", r"Startup"),
    ("server_process", r"Start"),
    (KNOWN, r"Connecting to control daemon on socket: .*"),
    (KNOWN, r"MPS Server connecting to control daemon .*"),  # T4
    (KNOWN, r"Initializing server process"),
    # 580: Creating server context on device 0 (NVIDIA H200); T4: the same without a name
    ("device_opened", r"Creating server context on device <num><name>"),
    ("device_closed", r"Destroy server context on device <num>(?: .*)?"),
    # 580: Created anonymous shared memory region mps.shm.1001.634 (user, server)
    ("server_owner", r"Created anonymous shared memory region mps\.shm\.<uid>\.\d+"),
    # 550: Created named shared memory region /cuda.shm.0.52.1
    (KNOWN, r"Created (?:named|anonymous) shared memory region .*"),
    (KNOWN, r"CUDA MPS Server for .*"),
    (KNOWN, r"Display Driver version: .*"),
    # 580; T4: activeThreadsPercentage set to 33.000000
    ("thread_limit_set", r"Active Threads? Percentage set to <percent>"),
    ("thread_limit_set", r"activeThreadsPercentage set to <percent>"),
    # 580: Device pinned memory limit for device 0 set to 0x300000000 bytes
    ("memory_limit_set", r"Device pinned memory limit for device <num> set to 0x<hex> bytes"),
    (KNOWN, r"Server Priority set to .*"),
    # 580; T4: MPS Server is started
    ("server_open", r"Server has started"),
    ("server_open", r"MPS Server is started"),
    (KNOWN, r"Server has been notified to shutdown"),
    (KNOWN, r"Server was unable to shutdown due to .*"),
    ("server_finishing", r"Waiting for current clients to finish"),
    ("server_exiting", r"Exiting"),
    (KNOWN, r"Received device query command\..*"),
    # 580, a second daemon that was refused: Using log directory: /tmp/mpslog
    (KNOWN, r"Using log directory: .*"),
    # Clients. 580: Received new client request for {PID: -1333654781, Context ID: 0}
    ("connection_requested", r"Received new client request for \{.*\}"),
    ("unnamed_connection_requested", r"Received new client request"),  # 550, T4
    # 580: a client process (context 0) or one of its contexts; R340: New client 14781 connected
    ("client_connected", r"Client <who> connected"),
    ("client_process_connected", r"New client <pid> connected"),
    # 580, for client {PID: 440, Context ID: 1}; 550, T4
    (KNOWN, r"Creating worker thread(?: for client \{.*\})?"),
    (KNOWN, r"Worker created"),
    # 580: Device NVIDIA H200 (uuid GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893) is associated
    # T4: Device Tesla T4 (uuid 0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated
    ("device_associated", r"Device .{0,96} \(uuid <uuid>\) is associated"),
    # 580; 2022: status of client {11641, 1} is INACTIVE
    ("context_active", r"Status of client <who> is ACTIVE"),
    ("context_inactive", r"Status of client <who> is INACTIVE"),
    (
        "connection_lost",
        r"Server failed to rec\w+ command with status 806, assuming client <who> exit",
    ),
    (KNOWN, r"Server failed to rec\w+ command .*"),
    (KNOWN, r"Receive command failed, assuming client exit"),  # 550, T4
    # 580; after a trap: Client {...} exiting. Worker is in reset. Number of active ...
    (
        "context_left",
        r"Client <who> exiting\.(?: Worker is in reset\.)? "
        r"Number of active client contexts is \d+\.?",
    ),
    ("context_left", r"Client <who> exit"),  # 2022
    # T4
    ("unnamed_context_left", r"Client disconnected\. Number of active client contexts is \d+\.?"),
    ("client_left", r"Client process <pid> disconnected"),
    ("unnamed_client_left", r"Client process disconnected"),  # T4
    ("client_left", r"Client <pid> disconnected"),  # R340
    ("termination_requested", r"MPS server requesting client <who> to exit"),
    ("termination_done", r"Client termination succeeded\.?"),
    # Refusals
    (
        "limit_reached",
        r"Failed to accept new client\. Maximum number of clients \(<num>\) reached\.?",
    ),
    ("refused_in_teardown", r"Server teardown in progress\. Refusing to accept new client <who>"),
    ("accept_failed", r"Failed to accept client <who> with status <num>"),
    # 580, written by the client; the last line ends: ... less than 1 or consider using UUIDs.
    ("invalid_device", r"Invalid CUDA_VISIBLE_DEVICES\.?"),
    ("invalid_device", r"Client requested .* which is not a valid GPU ID .*"),
    ("invalid_device", r"Please set CUDA_VISIBLE_DEVICES .*"),
    # Faults. 580; the second one also 2022
    ("fault_named", r"Client <who> encountered a fatal GPU error\.?"),
    ("fault_handled", r"Server is handling a fatal GPU error\.?"),
    ("fault_teardown", r"Client <who> on device <num> to be torn down"),
    ("fault_teardown", r"Client <who> on the error-trigg\w+ process \d+ to be torn down"),
    # 580: All clients belonging to error trigging process 990 will be torn down (victims, too)
    (KNOWN, r"All clients belonging to error trigg.*"),
    # 580: The following devices will be reset: | 0; 2022: The following devices
    ("fault_list", r"The following devices.*", "devices"),
    # 580: The following client process have a sticky error set: | 991
    # 2022: The following clients have a sticky error set:
    ("fault_list", r"The following client.* sticky error set:?", "clients"),
    # Servers that cannot work. 580: started for a user whose client is gone
    ("credentials_missing", r"User did not send valid credentials"),
    # 550, component Legacy Server: Failed to start : invalid argument
    ("server_failed", r"Failed to start : .*", MESSAGE),
    ("server_failed", r"MPS server failed to start\.?"),  # R340
    ("server_failed", r"MPS Server failed to create/open SHM segment.*", MESSAGE),
    # MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.
    ("server_failed", r"MPS is only supported on .*", MESSAGE),
    ("server_failed", r"Server encountered a fatal exception\. Shutting down\.?"),
)


class ServerLogReader:
    """Applies the lines of server.log; the PID in the prefix is that of the server."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._invalid_device_at: dict[int, float] = {}

    def apply(self, entry: LogEntry, when: Moment) -> None:
        state, (name, values) = self._state, entry.event
        state.server_log_at = when.at
        state.daemon.sent_at = None
        if name == "unrecognized":
            _count_unrecognized(when)
        elif name == "number":
            server = state.servers.get(entry.pid)
            if server is not None and not server.faults.add_number(int(values[0]), when):
                _count_unrecognized(when)
        elif name == "invalid_device":
            self._invalid_device(entry.pid, when)
        elif name == "server_failed":
            self._server_failed(entry.pid, *map(str, values))
        elif name in SERVER_LINES.names:
            server = self._server(entry)
            if server is not None:
                getattr(self, name)(server, when, *values)

    def _server(self, entry: LogEntry) -> TrackedServer | None:
        """Return the server that writes; a server whose start is not in the log is adopted.

        Returns:
            None if it has ended, and this line is late.
        """
        servers = self._state.servers
        server = servers.get(entry.pid)
        if server is None:
            if servers.has_ended(entry.pid) and entry.event.name != "server_process":
                return None
            server = servers.adopt(entry.pid, entry.at)
        server.has_log = True
        return server

    # ------------------------------------------------------------------ the server itself

    def server_process(self, server: TrackedServer, when: Moment) -> None:
        """A server process writes its first line.

        A daemon has one server at a time: without control.log this line says that others are gone.
        """
        state = self._state
        if not state.readable["control"]:
            for other in state.servers:
                if other is not server and not other.only_seen_after(when.at):
                    state.server_exited(other, when)

    def server_open(self, server: TrackedServer, when: Moment) -> None:
        """The server has started; control.log shows this, too, where it is readable."""
        state = self._state
        if server.ready_at is None and not state.readable["control"]:
            when.increment("mps_server_starts_total", uid=server.uid)
            when.observe("mps_server_startup_seconds", when.at - server.started_at)
            state.server_ready(server, when)

    def server_finishing(self, server: TrackedServer, _when: Moment) -> None:
        """The server has agreed to end, and ends 0 to 1 ms after its last client has left."""
        server.finishing = True

    def server_exiting(self, server: TrackedServer, when: Moment) -> None:
        """The server ends in order: the only proof that it was asked to."""
        server.exiting = True
        if not self._state.readable["control"]:
            self._state.end_server(server, when, "requested")

    def _server_failed(self, pid: int, reason: str = "") -> None:
        """A server could not initialise; its exit follows."""
        server = self._state.servers.get(pid)
        if server is not None and server.failed_to_start:
            server.failure = reason or server.failure

    def credentials_missing(self, server: TrackedServer, when: Moment) -> None:
        """A client that was queued for this server is gone."""
        server.credentials_missing(when)

    def server_owner(self, server: TrackedServer, _when: Moment, uid: int) -> None:
        """The name of the shared memory has the server's user."""
        server.uid = uid if server.uid is None else server.uid

    def thread_limit_set(self, server: TrackedServer, _when: Moment, ratio: float) -> None:
        """The active thread percentage for clients that connect from now on."""
        server.set_thread_ratio(ratio)

    def memory_limit_set(
        self, server: TrackedServer, _when: Moment, device: int, limit_bytes: int
    ) -> None:
        """The pinned memory limit for clients that connect from now on."""
        server.set_memory_limit(device, limit_bytes)

    def device_opened(self, server: TrackedServer, _when: Moment, device: int, name: str) -> None:
        """The server made its context on a device."""
        server.add_device(device, name)

    def device_closed(self, server: TrackedServer, when: Moment, device: int) -> None:
        """The server destroyed its context on a device: this ends a fault there."""
        server.faults.close_device(device, when)

    # ------------------------------------------------------------------ clients

    def connection_requested(self, server: TrackedServer, _when: Moment) -> None:
        """A client asks to connect. The PID here is not the client's; later lines have it."""
        server.logs_pids = True

    def unnamed_connection_requested(self, server: TrackedServer, when: Moment) -> None:
        """The same, on drivers whose lines do not name clients."""
        if server.logs_pids is None:
            server.logs_pids = False
            server.clients.connect_admitted(when)

    def client_connected(self, server: TrackedServer, when: Moment, pid: int, context: int) -> None:
        """A client process (context 0) or one of its contexts (from 1 on) is connected."""
        server.logs_pids = True
        if context:
            server.open_context(pid, context, when)
        else:
            server.clients.connect(pid, when)

    def client_process_connected(self, server: TrackedServer, when: Moment, pid: int) -> None:
        """A client process is connected (first release)."""
        self.client_connected(server, when, pid, 0)

    def device_associated(self, server: TrackedServer, _when: Moment, uuid: str) -> None:
        """The context that is being created is on this GPU."""
        server.gpus.add_gpu(uuid)
        server.clients.associations.associate(uuid)

    def context_active(self, server: TrackedServer, when: Moment, pid: int, context: int) -> None:
        """A context can be used."""
        server.context_active(pid, context, when)
        server.clients.associations.confirm(pid, context, active=True)

    def context_inactive(
        self, server: TrackedServer, _when: Moment, pid: int, context: int
    ) -> None:
        """A context was hit by a fault."""
        server.clients.associations.confirm(pid, context, active=False)

    def connection_lost(self, server: TrackedServer, when: Moment, pid: int, context: int) -> None:
        """A context (from 1 on) or a process (context 0) has closed its connection.

        This is the first sign of an end; the next two lines come later where others end, too.
        """
        if context:
            server.faults.endings.context_ends(pid, context, when)
        else:
            server.faults.process_ends(pid, when)

    def context_left(self, server: TrackedServer, when: Moment, pid: int, context: int) -> None:
        """A context ended."""
        server.evidence.client_ending(pid, when.at)
        server.clients.close_context(pid, context, when)

    def unnamed_context_left(self, server: TrackedServer, when: Moment) -> None:
        """A context ended, and the line does not say whose: nothing follows from it."""

    def client_left(self, server: TrackedServer, when: Moment, pid: int) -> None:
        """A client process is gone."""
        server.evidence.client_ended(pid, when.at)
        server.clients.disconnect(pid, when)

    def unnamed_client_left(self, server: TrackedServer, when: Moment) -> None:
        """A client process is gone, and the line does not say which."""
        server.clients.disconnect_unnamed(when)

    def termination_requested(
        self, server: TrackedServer, _when: Moment, pid: int, _context: int
    ) -> None:
        """An operator terminates a client."""
        server.clients.request_termination(pid)

    def termination_done(self, server: TrackedServer, when: Moment) -> None:
        """The client of the last request was terminated."""
        server.clients.terminated(when)

    # ------------------------------------------------------------------ refusals

    def limit_reached(self, server: TrackedServer, when: Moment, limit: int) -> None:
        """A new client was refused: the GPU has as many contexts as it can serve."""
        server.client_limit = limit
        pid = server.clients.sole_newcomer()
        server.clients.admissions.count_refusal(server.uid, "context_limit", when, pid)

    def refused_in_teardown(
        self, server: TrackedServer, when: Moment, pid: int, context: int
    ) -> None:
        """A new client was refused: the server is recovering from a fault."""
        server.clients.admissions.count_refusal(server.uid, "server_not_ready", when, pid)
        server.clients.refuse(pid, context, when)

    def accept_failed(
        self, server: TrackedServer, when: Moment, pid: int, context: int, status: int
    ) -> None:
        """A new client was refused with this CUDA error; often after a line with the reason."""
        server.clients.admissions.count_status(server.uid, pid, status, when)
        server.clients.refuse(pid, context, when)

    def _invalid_device(self, pid: int, when: Moment) -> None:
        """A client asked for a GPU that the daemon does not serve: up to three lines of its own."""
        known = self._invalid_device_at.get(pid)
        if known is not None and when.at - known <= INVALID_DEVICE_SECONDS:
            return
        if len(self._invalid_device_at) >= MAX_INVALID_DEVICE:
            self._invalid_device_at.clear()
        self._invalid_device_at[pid] = when.at
        server = self._state.servers.latest()
        when.count_rejection(None if server is None else server.uid, "invalid_device", (pid,))

    # ------------------------------------------------------------------ faults

    def fault_named(self, server: TrackedServer, when: Moment, pid: int, context: int) -> None:
        """MPS names a client that met a fatal GPU error, which proves nothing."""
        server.faults.blame(pid, context, when)

    def fault_handled(self, server: TrackedServer, when: Moment) -> None:
        """The server handles a fatal GPU error."""
        server.faults.handle(when)

    def fault_teardown(
        self, server: TrackedServer, when: Moment, pid: int, context: int, device: int | None = None
    ) -> None:
        """A context is lost with the fault."""
        server.faults.tear_down(pid, context, device, when)

    def fault_list(
        self, server: TrackedServer, when: Moment, of: Literal["devices", "clients"]
    ) -> None:
        """A list of bare numbers follows."""
        server.faults.begin_list(of, when)


def _count_unrecognized(when: Moment) -> None:
    when.increment("mps_control_log_unrecognized_lines_total", log="server")

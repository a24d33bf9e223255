"""The messages of control.log and server.log, one frozen class for each kind.

An event holds what the message itself contains; when it was written, and by which process, is in
log_parser.Line and log_merger.LogEntry, so that equal messages can share one event. PIDs are as the
log prints them: the daemon's own numbering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LogEvent:
    """What a line says."""


@dataclass(frozen=True, slots=True)
class ToolEvent(LogEvent):
    """control.log: a user of the control tool connects, sends a command, or disconnects."""


@dataclass(frozen=True, slots=True)
class ServerEvent(LogEvent):
    """server.log: about the server itself."""


@dataclass(frozen=True, slots=True)
class ClientEvent(LogEvent):
    """server.log: a client connects, uses a context, or disconnects."""


@dataclass(frozen=True, slots=True)
class RefusalEvent(LogEvent):
    """server.log: a client is refused."""


@dataclass(frozen=True, slots=True)
class FaultEvent(LogEvent):
    """server.log: part of the report about a fatal GPU error."""


@dataclass(frozen=True, slots=True)
class Noise(LogEvent):
    """A known line that changes nothing."""


@dataclass(frozen=True, slots=True)
class Continuation(LogEvent):
    """A line without a prefix: it belongs to the record before it."""


@dataclass(frozen=True, slots=True)
class Unrecognized(LogEvent):
    """A line of unknown wording: a reply to a query, or a driver's new wording."""

    text: str
    """The message, shortened."""


@dataclass(frozen=True, slots=True)
class Number(LogEvent):
    """A bare number: a reply to a query, or an item of a list in server.log."""

    value: int


# ---------------------------------------------------------------- control.log: the daemon itself


@dataclass(frozen=True, slots=True)
class DaemonStarting(LogEvent):
    """The control daemon came up."""


@dataclass(frozen=True, slots=True)
class BinaryVersion(LogEvent):
    """Drivers from CUDA 13.0 on say which version the daemon is."""

    version: str


@dataclass(frozen=True, slots=True)
class DaemonExited(LogEvent):
    """The control daemon ended in order. Nothing is written when it is killed."""


@dataclass(frozen=True, slots=True)
class CredentialsMissing(ServerEvent):
    """A caller's first connection carried no credentials.

    Every healthy client causes one just before its first NEW CLIENT; it is a refusal only when no
    NEW CLIENT follows.
    """


# ---------------------------------------------------------------- control.log: the control tool


@dataclass(frozen=True, slots=True)
class UiOpened(ToolEvent):
    """A control tool connected."""


@dataclass(frozen=True, slots=True)
class UiCommand(ToolEvent):
    """A control tool sent a command; the lines after it are the reply."""

    text: str
    """The command, shortened."""


@dataclass(frozen=True, slots=True)
class UiClosed(ToolEvent):
    """A control tool left."""


@dataclass(frozen=True, slots=True)
class UiRefused(ToolEvent):
    """The command before this line was refused: its sender may not do that."""


# ---------------------------------------------------------------- control.log: clients and servers


@dataclass(frozen=True, slots=True)
class ClientArrived(LogEvent):
    """A connection of a client: one for the process, and one more for each of its contexts."""

    pid: int
    """0 where the daemon cannot see the client's PID namespace."""
    uid: int
    """Always 0 where one server serves all users."""
    queued: bool
    """True: no server is ready for this user, the client waits."""


@dataclass(frozen=True, slots=True)
class ServerStarting(LogEvent):
    """The daemon made a server process."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady(LogEvent):
    """A server takes clients from now on; the queued ones of its user are handed to it."""

    pid: int


@dataclass(frozen=True, slots=True)
class ServerExited(LogEvent):
    """A server process ended. The status is no evidence: 0 is also written after SIGKILL."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class ServerFailed(LogEvent):
    """A server could not initialise; its exit follows."""

    reason: str = ""
    """Its own words, where they say more than that."""


@dataclass(frozen=True, slots=True)
class ServerForbidden(LogEvent):
    """The daemon may not start a server for this user. It tries six times, then gives up."""

    uid: int
    reason: str = ""
    """Its own words."""


@dataclass(frozen=True, slots=True)
class ShutdownTried(LogEvent):
    """The daemon asks a server to end, for another user's sake or its own."""

    pid: int


@dataclass(frozen=True, slots=True)
class ShutdownDeclined(LogEvent):
    """The server still has clients."""

    pid: int


@dataclass(frozen=True, slots=True)
class ShutdownRetry(LogEvent):
    """The daemon's back-off: when it will ask the server again."""

    milliseconds: int


# ---------------------------------------------------------------- server.log: a server's life


@dataclass(frozen=True, slots=True)
class ServerProcess(ServerEvent):
    """A server process writes its first line."""


@dataclass(frozen=True, slots=True)
class ServerOpen(ServerEvent):
    """A server says that it has started."""


@dataclass(frozen=True, slots=True)
class ServerExiting(ServerEvent):
    """A server ends in order: the only proof that it was asked to."""


@dataclass(frozen=True, slots=True)
class ServerFinishing(ServerEvent):
    """A server has agreed to end, and does when its last client has left (0 to 1 ms later)."""


@dataclass(frozen=True, slots=True)
class ServerOwner(ServerEvent):
    """The server's shared memory names the user that it serves."""

    uid: int


@dataclass(frozen=True, slots=True)
class ThreadLimitSet(ServerEvent):
    """The active thread percentage for clients that connect from now on."""

    ratio: float


@dataclass(frozen=True, slots=True)
class MemoryLimitSet(ServerEvent):
    """The pinned memory limit for clients that connect from now on."""

    device: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceOpened(ServerEvent):
    """The server made its context on a device."""

    device: int
    name: str


@dataclass(frozen=True, slots=True)
class DeviceClosed(ServerEvent):
    """The server destroyed its context on a device: what ends a fault there."""

    device: int


# ---------------------------------------------------------------- server.log: clients


@dataclass(frozen=True, slots=True)
class ConnectionRequested(ClientEvent):
    """A client asks to connect. The PID that newer drivers print here is not its own."""

    named: bool
    """True: this driver names clients in the lines that follow."""


@dataclass(frozen=True, slots=True)
class ClientConnected(ClientEvent):
    """A client process (context 0) or one of its contexts (from 1 on) is connected."""

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class DeviceAssociated(ServerEvent):
    """The context that is being created is on this GPU."""

    uuid: str


@dataclass(frozen=True, slots=True)
class ClientStatus(ClientEvent):
    """A context became ACTIVE, or INACTIVE in a fault."""

    pid: int
    context: int
    active: bool


@dataclass(frozen=True, slots=True)
class ConnectionLost(ClientEvent):
    """A client's context (from 1 on) or its process (context 0) has closed its connection.

    The first sign of an end. ContextLeft and ClientLeft follow, but later where others end, too.
    """

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class ContextLeft(ClientEvent):
    """A context ended."""

    pid: int | None
    """None: this driver does not say whose."""
    context: int | None


@dataclass(frozen=True, slots=True)
class ClientLeft(ClientEvent):
    """A client process is gone."""

    pid: int | None
    """None: this driver does not say which."""


@dataclass(frozen=True, slots=True)
class TerminationRequested(ClientEvent):
    """An operator ends a client."""

    pid: int


@dataclass(frozen=True, slots=True)
class TerminationDone(ClientEvent):
    """The client named last was ended by an operator."""


@dataclass(frozen=True, slots=True)
class LimitReached(RefusalEvent):
    """A newcomer was refused: the GPU has as many contexts as it can serve."""

    limit: int


@dataclass(frozen=True, slots=True)
class TeardownRefusal(RefusalEvent):
    """A newcomer was refused: the server is recovering from a fault."""

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class AcceptFailed(RefusalEvent):
    """A newcomer was refused, with the CUDA error that it gets; often said after the reason."""

    pid: int
    context: int
    status: int


@dataclass(frozen=True, slots=True)
class InvalidDevice(LogEvent):
    """A client asks for a GPU that the daemon does not serve. Written by the client itself."""


# ---------------------------------------------------------------- server.log: faults


@dataclass(frozen=True, slots=True)
class FaultBlamed(FaultEvent):
    """A client met a fatal GPU error, says MPS.

    Most often it is the one that caused it. In ``tests/recordings/tour.rec.gz`` it is not: a
    neighbour's kernel was running, and the neighbour is named.
    """

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class FaultHandling(FaultEvent):
    """The server handles a fatal GPU error."""


@dataclass(frozen=True, slots=True)
class FaultTeardown(FaultEvent):
    """A context goes down with the fault."""

    pid: int
    context: int
    device: int | None


@dataclass(frozen=True, slots=True)
class FaultList(FaultEvent):
    """Heading of a list of bare numbers."""

    of: Literal["devices", "clients"]


TIMELESS_EVENTS: frozenset[type[LogEvent]] = frozenset(
    {Noise, Continuation, Unrecognized, UiOpened, UiCommand, UiClosed, UiRefused}
)
"""Those that change neither servers nor the queue: most lines of a control.log."""

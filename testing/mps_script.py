"""Scripted lines of MPS logs that many tests need (see mps_logs.script)."""

DAEMON = "00:00.000 C630 Starting control daemon using socket /tmp/mps/control\n"


def client(time: str, pid: int, server: int, context: int = 1) -> str:
    """A client process with one context, as server.log tells it."""
    return f"""
        {time} S{server} Received new client request for {{PID: -1333654781, Context ID: 0}}
        {time} S{server} Client {{PID: {pid}, Context ID: 0}} connected
        {time} S{server} Client {{PID: {pid}, Context ID: {context}}} connected
        {time} S{server} Status of client {{PID: {pid}, Context ID: {context}}} is ACTIVE
    """


def client_on(time: str, pid: int, server: int, uuid: str) -> str:
    """The same, on a GPU that the log names."""
    return client(time, pid, server).replace(
        f"{time} S{server} Status",
        f"{time} S{server} Device NVIDIA H200 (uuid {uuid}) is associated\n"
        f"        {time} S{server} Status",
    )


def leaves(time: str, pid: int, server: int) -> str:
    """Its orderly end."""
    return f"""
        {time} S{server} Client {{PID: {pid}, Context ID: 1}} exiting. \
Number of active client contexts is 0.
        {time} S{server} Client process {pid} disconnected
    """


def pending(time: str, pid: int, uid: int) -> str:
    """A client is put into the queue."""
    return (
        f"{time} C630 NEW CLIENT {pid} from user {uid}: "
        "Server is not ready, push client to pending list\n"
    )


def arrives(time: str, pid: int, uid: int) -> str:
    """A connection of a client is sent to the server."""
    return f"{time} C630 NEW CLIENT {pid} from user {uid}: Server already exists\n"


def server_starts(time: str, ready: str, pid: int, uid: int) -> str:
    """A server's start."""
    return f"""
        {time} C{pid} Starting new server {pid} for user {uid}
        {time} O{pid} Startup
        {ready} C630 NEW SERVER {pid}: Ready
    """


def server_ends(time: str, pid: int) -> str:
    """A server's orderly end, for another's sake."""
    return f"""
        {time} C630 Try shutting down server {pid}, backoff is enabled
        {time} S{pid} Exiting
        {time} C630 Server {pid} exited with status 0
    """


HOLDER = (
    DAEMON
    + pending("00:01.000", 100, 1001)
    + server_starts("00:01.001", "00:01.200", 110, 1001)
    + client("00:01.200", 100, 110)
)
"""User 1001 holds the GPU with client 100 on server 110."""

"""A stand-in for nvidia-cuda-mps-control and its daemon, for hosts without a GPU.

What the daemon is like stands in ``fake-mps.json`` in its pipe directory, so one program plays any
number of daemons. It answers the way driver 580 was seen to answer, and writes the lines that the
real daemon writes to control.log for each run of the tool.

    {
      "mode": "answer",             or absent, refuse, refuse_once, hang, garbage, flood, silent
      "pid": 445,                   of the daemon, for its log lines
      "log_directory": "/tmp/log",  null: writes no log
      "gate": "/tmp/gate",          a file: while it is there, nobody is answered
      "default_percentage": 100.0,
      "default_limits": {"0": "10G"},
      "default_priority": 0,
      "devices": [{"ordinal": 0, "pci": "0000:00.06.00", "uuid": "GPU-…", "name": "NVIDIA H200"}],
      "servers": [{
        "pid": 457, "state": "ACTIVE", "percentage": 100.0, "limits": {"0": "3G"}, "stuck": false,
        "clients": [{"pid": 455, "contexts": {"0": [1, 2]}, "namespace": "4026531836", "id": 1,
                     "termination": "0"}]    what terminate_client prints, or hang
      }],
      "after": {"ps": {…}},         what it is like once it was asked so
      "v3": {"server list --format=csv": "…"}    an MPS v3 daemon: text by arguments of the tool
    }

Everything has a default. Without the file there is no daemon. Start it with ``python -S -E``.
"""

# ruff: noqa: PTH105, PTH108, PTH110, PTH123 - pathlib would make it start more slowly

from __future__ import annotations

import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

NAME = "nvidia-cuda-mps-control"
STATE_FILE = "fake-mps.json"
DEVICE_HEADING = "Device Ordinal,PCI IDs,UUID,Name,Attributes"


def reply(state: dict[str, Any], command: str) -> list[str]:
    """What the daemon prints for one command: a list of records, each of one line or more."""
    words = command.split()
    verb = words[0] if words else ""
    if verb == "get_server_list":
        return [str(server["pid"]) for server in servers(state)]
    if verb == "get_default_active_thread_percentage":
        return [f"{float(state.get('default_percentage', 100.0)):.1f}"]
    if verb == "get_default_client_priority":
        return [str(state.get("default_priority", 0))]
    if verb == "get_default_device_pinned_mem_limit":
        return limit(state.get("default_limits"), words[1])
    if verb == "ps":
        return process_list(state)
    if verb in ABOUT_A_SERVER:
        return about_a_server(state, verb, words[1:])
    return [f'Unknown command "{command}"']


def about_a_server(state: dict[str, Any], verb: str, arguments: list[str]) -> list[str]:
    if not arguments:
        return ["A server PID is required"]
    found = [server for server in servers(state) if str(server["pid"]) == arguments[0]]
    if not found:
        return [f"Server {arguments[0]} not found"]
    if found[0].get("stuck"):
        sleep_forever()
    return ABOUT_A_SERVER[verb](state, found[0], arguments[1:])


def servers(state: dict[str, Any]) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = state.get("servers", ())
    return found


def limit(limits: dict[str, str] | None, device: str) -> list[str]:
    text = (limits or {}).get(device)
    return [text] if text else []


def status(_state: dict[str, Any], server: dict[str, Any], _rest: list[str]) -> list[str]:
    return [str(server.get("state", "ACTIVE"))]


def percentage(_state: dict[str, Any], server: dict[str, Any], _rest: list[str]) -> list[str]:
    return [f"{float(server.get('percentage', 100.0)):.1f}"]


def client_list(_state: dict[str, Any], server: dict[str, Any], _rest: list[str]) -> list[str]:
    return [str(client["pid"]) for client in server.get("clients", ())]


def device_client_list(
    state: dict[str, Any], server: dict[str, Any], _rest: list[str]
) -> list[str]:
    lines = []
    for device in reversed(state.get("devices", ())):
        number = device["ordinal"]
        lines.append(f"[{number}] {number:02d}:00.0, {device['name']}")
        for client in server.get("clients", ()):
            contexts = client.get("contexts", {"0": [1]}).get(str(number), ())
            lines += [f"{client['pid']}.{context}" for context in contexts]
    return lines


def device_query(state: dict[str, Any], server: dict[str, Any], _rest: list[str]) -> list[str]:
    rows = [
        f"{device['ordinal']},{device['pci']},{device['uuid']},{device['name']},N/A"
        for device in state.get("devices", ())
    ]
    # The blank line and the next heading are one record of the log.
    return ["Default", DEVICE_HEADING, *rows, f"\nServer {server['pid']}", DEVICE_HEADING, *rows]


def terminate_client(_state: dict[str, Any], server: dict[str, Any], rest: list[str]) -> list[str]:
    """Print 0 and drop the client; CUDA_ERROR_INVALID_CONTEXT if the client is unknown."""
    found = [client for client in server.get("clients", ()) if [str(client["pid"])] == rest]
    if not found:
        return ["201"]
    result = str(found[0].get("termination", "0"))
    if result == "hang":
        sleep_forever()
    if result == "0":
        server["clients"].remove(found[0])
    return [result]


def process_list(state: dict[str, Any]) -> list[str]:
    """The table of ps: nothing at all when a server has no client."""
    if not servers(state):
        return ["Server not found"]
    if any(server.get("stuck") for server in servers(state)):
        sleep_forever()
    row = "{:<9} {:<9} {:<14} {:<25} {:<14} {:<15}".format
    rows = [
        row(
            client["pid"],
            client.get("id", number),
            server["pid"],
            "GPU-00000000-1111-2222",
            client.get("namespace", "4026531836"),
            client.get("command", "python3"),
        )
        for server in servers(state)
        for number, client in enumerate(server.get("clients", ()), 1)
    ]
    return [row("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"), *rows] if rows else []


ABOUT_A_SERVER = {
    "terminate_client": terminate_client,
    "get_server_status": status,
    "get_active_thread_percentage": percentage,
    "get_device_pinned_mem_limit": lambda _, server, rest: limit(server.get("limits"), rest[0]),
    "get_client_list": client_list,
    "get_device_client_list": device_client_list,
    "device_query": device_query,
}


def log_lines(commands: list[str], replies: list[list[str]]) -> list[str]:
    """What one run of the tool leaves in control.log."""
    lines = ["Accepting connection...", "NEW UI"]
    for command, records in zip(commands, replies, strict=True):
        lines += [f"Cmd:{command}", *records]
        if command.startswith("get_default_device_pinned_mem_limit") and not records:
            lines.append("No default pinned memory limit set for the device!")
    return [*lines, "UI closed"]


def stamp(component: str, pid: int) -> str:
    """The beginning of a line that is written to a log now."""
    now = time.time()
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"[{seconds}.{int(now * 1000) % 1000:03d} {component} {pid:5d}] "


def append_to_log(state: dict[str, Any], lines: list[str]) -> None:
    directory = state.get("log_directory")
    if directory:
        prefix = stamp("Control", state.get("pid", 445))
        text = "".join(f"{prefix}{line}\n" for line in lines)
        with open(f"{directory}/control.log", "a") as log:
            log.write(text)


def sleep_forever() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def refused_before(directory: str) -> bool:
    """Whether this run may succeed: every other one does."""
    marker = f"{directory}/fake-mps.refused"
    if os.path.exists(marker):
        os.unlink(marker)
        return True
    open(marker, "w").close()
    return False


def answer(state: dict[str, Any], directory: str, mode: str) -> int:
    if mode == "absent":
        return refuse("Cannot find MPS control daemon process")
    if mode == "refuse" or (mode == "refuse_once" and not refused_before(directory)):
        return refuse("Cannot send command to MPS control daemon process")
    if mode == "hang":
        sleep_forever()
    if mode == "garbage":
        sys.stdout.buffer.write(b"\xff\x00 neither a list nor a refusal\n")
        return 0
    if mode == "flood":
        while True:
            sys.stdout.write("0123456789abcde\n" * 4096)
    return obey(state, directory, mode)


V3_USAGE = (
    "nvidia-cuda-mps-control <module> <verb> [positional-args] [--key=value ...] [--flag ...]"
)
"""NVIDIA's manual, release 615. That the tool prints it for a command of the older interface is
assumed."""


def obey_v3(state: dict[str, Any], arguments: list[str]) -> int:
    """Reply as an MPS v3 daemon: the query is in the tool's arguments."""
    text = state["v3"].get(" ".join(arguments))
    if text is None:
        return refuse(V3_USAGE)
    sys.stdout.write(text)
    return 0


def obey(state: dict[str, Any], directory: str, mode: str) -> int:
    if "v3" in state:
        return obey_v3(state, sys.argv[1:])
    if any(argument.startswith("-") for argument in sys.argv[1:]):
        # Driver 580; it takes no notice of other arguments.
        sys.stdout.write("Unrecognized option \0\nCUDA MPS Control for Linux/Unix/QNX.\n")
        return 0
    commands = [line for line in sys.stdin.read().split("\n") if line]
    while os.path.exists(state.get("gate", "")):
        time.sleep(0.01)
    if mode == "silent":
        return 0
    before = json.dumps(state)
    replies = [reply(state, command) for command in commands]
    for command in commands:
        state = state.get("after", {}).get(command, state)
    if json.dumps(state) != before:
        with open(f"{directory}/{STATE_FILE}.next", "w") as file:
            json.dump(state, file)
        os.replace(f"{directory}/{STATE_FILE}.next", f"{directory}/{STATE_FILE}")
    append_to_log(state, log_lines(commands, replies))
    sys.stdout.write("".join(f"{record}\n" for records in replies for record in records))
    return 0


def main() -> int:
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    try:
        with open(f"{directory}/{STATE_FILE}") as file:
            state = json.load(file)
    except FileNotFoundError:
        state = {"mode": "absent"}
    return answer(state, directory, state.get("mode", "answer"))


if __name__ == "__main__":
    sys.exit(main())

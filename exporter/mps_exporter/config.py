"""Every setting once: its flag, its environment variable, its default and its bounds.

``--web.listen-address=:9400`` and ``MPS_EXPORTER_WEB_LISTEN_ADDRESS=:9400`` are the same; the flag
wins. Repeatable settings are separated by commas in the environment.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mps_exporter.snapshot import COLLECTORS

ENVIRONMENT_PREFIX = "MPS_EXPORTER_"

REVISION_VARIABLE = "MPS_EXPORTER_BUILD_REVISION"
"""The commit that an image was built from: no setting, but for mps_exporter_build_info."""

# Set by Kubernetes beside a Service named mps-exporter: without enableServiceLinks: false no start.
_SERVICE_LINK_VARIABLES = re.compile(
    r"MPS_EXPORTER_(\w+_)?"
    r"(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|PORT=(tcp|udp|sctp)://).*"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the program was asked to do. Durations are in seconds."""

    web_listen_address: tuple[str, ...] = (":9400",)
    web_telemetry_path: str = "/metrics"
    web_config_file: str | None = None
    web_systemd_socket: bool = False
    web_max_requests: int = 40
    web_disable_exporter_metrics: bool = False
    web_enable_debug: bool = False
    mps_discovery: bool = True
    mps_pipe_directory: tuple[str, ...] = ()
    mps_log_directory: tuple[str, ...] = ()
    mps_control_binary: str = "nvidia-cuda-mps-control"
    mps_query_timeout: float = 2.0
    mps_min_query_interval: float = 5.0
    # What is asked is written into control.log: with a server of 48 clients, a minute between
    # reconciliations came to 8 MB a day. The logs tell what happens between.
    mps_reconcile_interval: float = 900.0
    path_procfs: str = "/proc"
    path_kmsg: str = "/dev/kmsg"
    path_passwd: str = "/etc/passwd"
    path_container_logs: str = "/var/log/containers"
    path_cgroupfs: str = "/sys/fs/cgroup"
    collector_nvml: bool = True
    collector_control: bool = True
    collector_logs: bool = True
    collector_process: bool = True
    collector_clients: str = "full"
    collector_clients_max: int = 1000
    collector_timeout: float = 10.0
    collector_nvml_serials: bool = False
    log_level: str = "info"
    log_format: str = "logfmt"
    replay: str | None = None
    replay_speed: float = 1.0

    def enabled_collectors(self) -> tuple[str, ...]:
        """Names of the sources that are switched on."""
        return tuple(name for name in COLLECTORS if getattr(self, f"collector_{name}"))

    def configured_directories(self) -> tuple[tuple[str, str | None], ...]:
        """(pipe directory, log directory or None) pairs given by flag, matched by position."""
        logs: list[str | None] = [*self.mps_log_directory]
        logs += [None] * (len(self.mps_pipe_directory) - len(logs))
        return tuple(zip(self.mps_pipe_directory, logs, strict=False))


class InvalidSettingError(ValueError):
    """A flag or variable has a value that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Flag:
    """How one field of Settings is given on the command line."""

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = ""
    repeatable: bool = False
    commands: tuple[str, ...] = ("serve", "demo", "doctor", "record")

    @property
    def field(self) -> str:
        return self.name.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.field.upper()

    def default_of(self, command: str) -> Any:
        """What it is for this command where nothing is given."""
        return _DEFAULTS_OF_COMMANDS.get((command, self.name), getattr(Settings(), self.field))

    @property
    def is_switch(self) -> bool:
        """Given as --flag or --no-flag."""
        return self.parse is _switch


_DEFAULTS_OF_COMMANDS = {("demo", "web.listen-address"): ("127.0.0.1:9400",)}
"""(Command, flag) -> a default other than that of Settings. A demo is for whoever starts it."""


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def _switch(value: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[value.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def _absolute_path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path")
    return value.rstrip("/") or "/"


OWN_PATHS = ("/-/", "/api/v1/", "/debug/collect", "/static/")
"""Where pages beside the metrics are."""


def _url_path(value: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._~/-]+", value):
        raise ValueError('must be a path such as "/metrics", not "/" itself')
    if value.startswith(OWN_PATHS):
        raise ValueError("is taken: other pages of the exporter are there")
    return value


def _listen_address(value: str) -> str:
    if value.startswith("unix:"):
        return _not_empty(value)
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError('must be "host:port", ":port", "[IPv6]:port" or "unix:/path"')
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("an IPv6 address stands in brackets: [::1]:9400")
    return value


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_duration(value: str) -> float:
    """Read "500ms", "5s", "1m", "1h" or plain seconds, as seconds."""
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError('must be a duration such as "500ms", "5s" or "1m"')
    return float(match[1]) * _UNITS[match[2]]


def _within(parse: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    def parsed(value: str) -> float:
        number = parse(value)
        if not low <= number <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return number

    return parsed


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parsed(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise ValueError("must be a whole number")
        return int(_within(float, low, high)(value))

    return parsed


def _one_of(*words: str) -> Callable[[str], str]:
    def parsed(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return parsed


def _float(value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise ValueError("must be a number")
    return float(value)


_COLLECTOR_HELP = {
    "nvml": "Read GPUs and their processes, from NVML.",
    "control": "Query the MPS control daemons.",
    "logs": "Read the daemons' control.log and server.log: waits, crashes, faults.",
    "process": "Read processes in /proc: daemons, users, limits, containers.",
}

_WEB = ("serve", "demo")
_HOST = ("serve", "doctor", "record")
_FOLLOWING = ("serve", "record")

FLAGS: tuple[Flag, ...] = (
    Flag(
        "web.listen-address",
        _listen_address,
        "Address to listen on: host:port, :port, [IPv6]:port or unix:/path.",
        "ADDRESS",
        repeatable=True,
        commands=_WEB,
    ),
    Flag("web.telemetry-path", _url_path, "Path of the metrics.", "PATH", commands=_WEB),
    Flag(
        "web.config.file",
        _not_empty,
        "TLS, passwords and headers, in the format of the Prometheus exporter-toolkit.",
        "FILE",
        commands=_WEB,
    ),
    Flag(
        "web.systemd-socket",
        _switch,
        "Listen on the sockets that systemd hands over.",
        commands=_WEB,
    ),
    Flag(
        "web.max-requests",
        _integer(0, 10_000),
        "Scrapes answered at the same time; further ones wait, then get 503. 0 = no limit.",
        "N",
        commands=_WEB,
    ),
    Flag(
        "web.disable-exporter-metrics",
        _switch,
        "Leave out process_* metrics about the exporter itself.",
        commands=_WEB,
    ),
    Flag(
        "web.enable-debug",
        _switch,
        "Serve /debug/collect, which shows raw inputs and names of processes.",
        commands=_WEB,
    ),
    Flag("mps.discovery", _switch, "Find running control daemons in /proc.", commands=_HOST),
    Flag(
        "mps.pipe-directory",
        _absolute_path,
        "Pipe directory of a control daemon, watched even while the daemon does not run.",
        "DIR",
        repeatable=True,
        commands=_HOST,
    ),
    Flag(
        "mps.log-directory",
        _absolute_path,
        "Log directory of the daemon whose pipe directory stands at the same position; default: "
        "the daemon's environment, then /var/log/nvidia-mps.",
        "DIR",
        repeatable=True,
        commands=_HOST,
    ),
    Flag(
        "mps.control-binary",
        _not_empty,
        "The control tool, by name on PATH or by path.",
        "FILE",
        commands=_HOST,
    ),
    Flag(
        "mps.query-timeout",
        _within(parse_duration, 0.1, 60),
        "Deadline for one run of the control tool.",
        "DURATION",
        commands=_HOST,
    ),
    Flag(
        "mps.min-query-interval",
        _within(parse_duration, 0, 3600),
        "Shortest time between two queries of a daemon; five times as long while its logs show no "
        "change. Collections in between reuse the reply. 0 = query at every collection.",
        "DURATION",
        commands=_FOLLOWING,
    ),
    Flag(
        "mps.reconcile-interval",
        _within(parse_duration, 1, 86400),
        "Time between two queries of the servers, which confirm the state read from the logs.",
        "DURATION",
        commands=_FOLLOWING,
    ),
    Flag("path.procfs", _absolute_path, "Where procfs is mounted.", "DIR", commands=_HOST),
    Flag("path.kmsg", _absolute_path, "The kernel log.", "FILE", commands=_HOST),
    Flag("path.passwd", _not_empty, "File with the names of users.", "FILE", commands=_HOST),
    Flag(
        "path.container-logs",
        _not_empty,
        "Directory of the kubelet that names containers.",
        "DIR",
        commands=_HOST,
    ),
    Flag("path.cgroupfs", _not_empty, "Where cgroup version 2 is mounted.", "DIR", commands=_HOST),
    *(Flag(f"collector.{name}", _switch, _COLLECTOR_HELP[name]) for name in COLLECTORS),
    Flag(
        "collector.clients",
        _one_of("full", "summary", "off"),
        "Series of single clients: full, summary (identity, state, contexts, memory) or off.",
        "LEVEL",
        commands=("serve", "demo"),
    ),
    Flag(
        "collector.clients.max",
        _integer(0, 100_000),
        "Clients with separate metrics, for each daemon; further clients are only counted.",
        "N",
    ),
    Flag(
        "collector.timeout",
        _within(parse_duration, 0.1, 300),
        "Deadline of a collection when the scraper names none.",
        "DURATION",
    ),
    Flag(
        "collector.nvml.serials",
        _switch,
        "Export the serial numbers of boards.",
        commands=_FOLLOWING,
    ),
    Flag(
        "log.level",
        _one_of("debug", "info", "warn", "error"),
        "Least severity logged: debug, info, warn or error.",
        "LEVEL",
        commands=("serve", "demo", "record"),
    ),
    Flag(
        "log.format",
        _one_of("logfmt", "json"),
        "Form of log lines: logfmt or json.",
        "FORMAT",
        commands=("serve", "demo", "record"),
    ),
    Flag(
        "replay", _not_empty, "Serve a recording instead of this host.", "FILE", commands=("serve",)
    ),
    Flag(
        "replay.speed",
        _within(_float, 0.1, 1000),
        "How fast a recording is replayed.",
        "FACTOR",
        commands=("serve",),
    ),
)


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Declare the flags of a command; what is not given stays out of the namespace."""
    for flag in FLAGS:
        if command not in flag.commands:
            continue
        how: dict[str, Any] = {"metavar": flag.metavar}
        if flag.is_switch:
            how = {"action": argparse.BooleanOptionalAction}
        elif flag.repeatable:
            how["action"] = "append"
        parser.add_argument(f"--{flag.name}", dest=flag.field, default=argparse.SUPPRESS, **how)


def load_settings(
    given: Mapping[str, Any], environment: Mapping[str, str], command: str
) -> Settings:
    """Flags over environment over defaults, each value checked.

    Raises:
        InvalidSettingError: A value cannot be used, or a variable with our prefix is unknown.
    """
    known = {flag.variable: flag for flag in FLAGS}
    unknown_variables = sorted(
        name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in known
        and name != REVISION_VARIABLE
        and not _SERVICE_LINK_VARIABLES.fullmatch(f"{name}={environment[name]}")
    )
    if unknown_variables:
        wrong = unknown_variables[0]
        near = difflib.get_close_matches(wrong, known, 1)
        hint = f"did you mean {near[0]}?" if near else "mps-exporter --help-all lists all"
        raise InvalidSettingError(f"unknown variable {wrong}: {hint}")
    values: dict[str, Any] = {}
    for flag in FLAGS:
        if command not in flag.commands:
            continue
        if flag.field in given:
            raw, origin = given[flag.field], f"--{flag.name}"
        elif flag.variable in environment:
            text = environment[flag.variable]
            raw = [part.strip() for part in text.split(",")] if flag.repeatable else text
            origin = flag.variable
        else:
            values[flag.field] = flag.default_of(command)
            continue
        values[flag.field] = _parsed_value(flag, raw, origin)
    settings = Settings(**values)
    _check_together(settings)
    return settings


def _parsed_value(flag: Flag, raw: bool | str | Sequence[str], origin: str) -> Any:
    if isinstance(raw, bool):
        return raw
    try:
        if isinstance(raw, str):
            return flag.parse(raw)
        return tuple(flag.parse(part) for part in raw)
    except ValueError as error:
        raise InvalidSettingError(f"{origin}: {raw!r} {error}") from None


def _check_together(settings: Settings) -> None:
    extra = len(settings.mps_log_directory) - len(settings.mps_pipe_directory)
    if extra > 0:
        raise InvalidSettingError(
            f"--mps.log-directory: given {extra} more time(s) than --mps.pipe-directory; each log "
            "directory belongs to the pipe directory at the same position"
        )
    if not settings.enabled_collectors():
        raise InvalidSettingError("every collector is switched off: nothing to export")
    if not settings.mps_discovery and not settings.mps_pipe_directory and not settings.replay:
        raise InvalidSettingError(
            "--no-mps.discovery without --mps.pipe-directory: no control daemon could be found"
        )

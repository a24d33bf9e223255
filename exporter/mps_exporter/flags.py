"""Commands, flags and settings, each declared once.

Command line, help, environment variables, docs/configuration.md and the man page come from these
tables. ``--web.listen-address=:9400`` and ``MPS_EXPORTER_WEB_LISTEN_ADDRESS=:9400`` are the same;
the flag wins. Repeatable settings are separated by commas in the environment, and an empty variable
is not set.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from mps_exporter.snapshot import COLLECTORS

PROGRAM = "mps-exporter"
DEMO_LISTEN_ADDRESS = ("127.0.0.1:9400",)  # The demo takes another port if this port is taken.

ENVIRONMENT_PREFIX = "MPS_EXPORTER_"

REVISION_VARIABLE = "MPS_EXPORTER_BUILD_REVISION"
"""Variable with an image's commit, for mps_exporter_build_info; not a setting."""

# Kubernetes sets these for a Service named mps-exporter, unless enableServiceLinks is false.
_SERVICE_LINK_VARIABLES = re.compile(
    r"MPS_EXPORTER_(\w+_)?"
    r"(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|PORT=(tcp|udp|sctp)://).*"
)


class StartError(Exception):
    """The program cannot start or continue; the message contains the reason and the remedy."""


class InvalidSettingError(ValueError):
    """The command line or the environment is wrong; the message names the error and its reason."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of mps-exporter."""

    help: str
    exit_statuses: str


_SERVING = "0 ended as asked, 1 could not start or continue, 2 wrong usage."

COMMANDS = {
    "serve": Command("Serve the metrics of this host. The default.", _SERVING),
    "demo": Command("Serve recordings of a real host. Needs no GPU.", _SERVING),
    "doctor": Command(
        "Diagnose this host once, and print how to fix each problem.",
        "0 no warning now, 1 warnings, 2 something critical, 3 not diagnosed (wrong usage, an "
        "unreadable recording, a full disk).",
    ),
    "top": Command(
        "Show who holds MPS, who waits, and what the clients use, each second, in a terminal.",
        "0 ended by q or a signal, 1 could not start or continue, 2 wrong usage.",
    ),
    "record": Command(
        "Record what the exporter reads on this host, to replay it elsewhere.",
        "0 success, 1 failure, 2 wrong usage.",
    ),
    "explain": Command(
        "Find an error text in the manual: what it means, and what to do. Needs no GPU.",
        "0 found, 1 nothing found, 2 wrong usage.",
    ),
}
DESCRIPTION = (
    "Prometheus exporter for NVIDIA MPS: who is blocked by whom, which server crashed and which "
    "clients were lost with it, the limits of each client, and how much of the GPU is working. "
    "Without a command it serves the metrics of this host."
)
GROUPS = {
    "web": "Web server",
    "mps": "MPS daemons",
    "collector": "Collectors",
    "path": "Paths",
    "log": "Log",
    "replay": "Replay",
    "record": "Recordings of incidents",
}
"""First word of a setting -> title of its group."""


class Kind(NamedTuple):
    """A kind of value: its name in the help ("" for a switch), and what is accepted."""

    metavar: str = ""
    pattern: str = ".*"
    reason: str = ""  # Message for a value that does not match.
    convert: Callable[[str], Any] = str
    bounds: tuple[float, float] = (-math.inf, math.inf)  # Lowest and highest number.

    def parse(self, text: str) -> Any:
        """Return the value. Raise ValueError with the reason if it is not accepted."""
        if not re.fullmatch(self.pattern, text, re.DOTALL):
            raise ValueError(self.reason)
        value, (low, high) = self.convert(text), self.bounds
        if isinstance(value, int | float) and not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag or an argument (its name is in capitals) of the command line."""

    name: str
    field: str  # Field of Settings.
    default: Any
    kind: Kind
    help: str
    commands: tuple[str, ...]
    setting: bool  # Whether the flag has an environment variable, unlike an option of one command.

    @property
    def repeatable(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.field.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value: --flag, and for a setting --no-flag."""
        return self.kind is _SWITCH

    @property
    def usage(self) -> str:
        """The flag in the form that documentation shows."""
        value = f"={self.kind.metavar}" if self.kind.metavar else ""
        return self.name if self.name.isupper() else f"--{self.name}{value}"

    @property
    def meaning(self) -> str:
        return self.help + " Repeatable." * self.repeatable

    def explained(self, command: str = "serve") -> str:
        """Return the meaning with the default for a command."""
        default = self.default_text(command)
        return f"{self.meaning} Default: {default}." if default else self.meaning

    def default_of(self, command: str) -> Any:
        """Return the default for a command: a demo listens only for its own host."""
        demo = (command, self.name) == ("demo", "web.listen-address")
        return DEMO_LISTEN_ADDRESS if demo else self.default

    def default_text(self, command: str = "serve") -> str:
        """Return the default in the form that documentation shows; "" if an option has none."""
        default = self.default_of(command)
        if not (self.setting or default):
            return ""
        if isinstance(default, bool):
            return "on" if default else "off"
        if isinstance(default, tuple):
            return ", ".join(default) or "none"
        if isinstance(default, float):
            return f"{default:g}s" if self.kind.metavar == "DURATION" else f"{default:g}"
        return "none" if default is None else str(default)


# ------------------------------------------------------------------------------- values


OWN_PATHS = ("/-/", "/api/v1/", "/static/", "/docs/")  # Prefixes of other pages' paths.


def _free_path(value: str) -> str:
    if value.startswith(OWN_PATHS):
        raise ValueError("is taken: other pages of the exporter are there")
    return value


def split_address(value: str) -> tuple[str, int]:
    """``host:port``, ``:port``, ``[IPv6]:port`` -> host (may be empty) and port."""
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError('must be "host:port", ":port", "[IPv6]:port" or "unix:/path"')
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError("an IPv6 address stands in brackets: [::1]:9400")
    return (host[1:-1] if bracketed else host), int(port)


def _listen_address(value: str) -> str:
    if not value.startswith("unix:"):
        split_address(value)
    return value


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_duration(value: str) -> float:
    """Return "500ms", "5s", "1m", "1h" or plain seconds as seconds."""
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError('must be a duration such as "500ms", "5s" or "1m"')
    return float(match[1]) * _UNITS[match[2]]


def _user(value: str) -> int:
    """Return the UID of a user, given by name or number."""
    import pwd  # only doctor --user needs it

    if re.fullmatch("[0-9]{1,10}", value):
        return int(value)
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, ValueError):
        raise ValueError("is the name of no user") from None


def _integer(low: int, high: int) -> Kind:
    return Kind("N", "[0-9]{1,9}", "must be a whole number", int, (low, high))


def _duration(low: float, high: float) -> Kind:
    return Kind("DURATION", convert=parse_duration, bounds=(low, high))


def _one_of(metavar: str, *words: str) -> Kind:
    return Kind(metavar, "|".join(words), f"must be one of {', '.join(words)}")


_LOG_LEVEL = _one_of("LEVEL", "debug", "info", "warn", "error")._replace(
    pattern="debug|info|warn(ing)?|error", convert=lambda word: word.removesuffix("ing")
)
_ABSOLUTE = "/.*", "must be an absolute path", lambda path: path.rstrip("/") or "/"
_NOT_EMPTY = ".+", "must not be empty"
_SWITCH = Kind(
    "",
    "(?i)true|1|yes|false|0|no",
    "must be true or false",
    lambda word: word.lower() in ("true", "1", "yes"),
)
_ADDRESS = Kind("ADDRESS", convert=_listen_address)
_DIRECTORY = Kind("DIR", *_ABSOLUTE)
_FILE = Kind("FILE", *_NOT_EMPTY)
_POSITIVE = _duration(0.001, 31_536_000)
_FACTOR = Kind("FACTOR", r"\d+(\.\d+)?", "must be a number", float, (0.1, 1000))
_URL_PATH = Kind(
    "PATH", r"/[A-Za-z0-9._~/-]+", 'must be a path such as "/metrics", not "/" itself', _free_path
)
_PROM_FILE = Kind("FILE", r".*\.prom", "must end in .prom: node_exporter reads no other files")
_PROCESS_ID = Kind("PID", "0*[1-9][0-9]{0,18}", "must be the number of a process", int)


# ------------------------------------------------------------------------------ settings


def _flags_of(*commands: str) -> Callable[..., Any]:
    """Return a function that declares a field of Settings, with its flag, for these commands."""

    def declare(default: Any, kind: Kind, text: str, *, name: str = "") -> Any:
        return field(default=default, metadata={"flag": (kind, text, commands, name)})

    return declare


_serve = _flags_of("serve")
_web = _flags_of("serve", "demo")
_host = _flags_of("serve", "doctor", "top", "record")
_following = _flags_of("serve", "record")
_logging = _flags_of("serve", "demo", "record")
_everywhere = _flags_of("serve", "demo", "doctor", "top", "record")
_option = _flags_of()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings and the options of commands. Durations are in seconds.

    The setting ``web_listen_address`` is the flag ``--web.listen-address``, the option
    ``doctor_pid`` the flag ``--pid`` of doctor. A flag with a tuple as default is repeatable.
    """

    web_listen_address: tuple[str, ...] = _web(
        (":9400",), _ADDRESS, "Address to listen on: host:port, :port, [IPv6]:port or unix:/path."
    )
    web_telemetry_path: str = _web("/metrics", _URL_PATH, "Path of the metrics.")
    web_config_file: str | None = _web(
        None,
        _FILE,
        "TLS, passwords and headers, in the format of the Prometheus exporter-toolkit.",
        name="web.config.file",
    )
    web_systemd_socket: bool = _web(
        False, _SWITCH, "Listen on the sockets that systemd hands over."
    )
    web_max_requests: int = _web(
        40,
        _integer(0, 10_000),
        "Scrapes answered at the same time; further ones wait, then get 503. 0 = no limit.",
    )
    web_disable_exporter_metrics: bool = _web(
        False, _SWITCH, "Leave out process_* metrics about the exporter itself."
    )
    mps_discovery: bool = _host(True, _SWITCH, "Find running control daemons in /proc.")
    mps_pipe_directory: tuple[str, ...] = _host(
        (),
        _DIRECTORY,
        "Pipe directory of a control daemon, watched even while the daemon does not run.",
    )
    mps_log_directory: tuple[str, ...] = _host(
        (),
        _DIRECTORY,
        "Log directory of the daemon that has the pipe directory of the same rank. Default: that "
        "of the daemon's environment, then /var/log/nvidia-mps.",
    )
    mps_control_binary: str = _host(
        "nvidia-cuda-mps-control",
        _FILE,
        "The control tool, by name on PATH or by path; a script must exec it.",
    )
    mps_query_timeout: float = _host(
        2.0, _duration(0.1, 60), "Deadline for one run of the control tool."
    )
    mps_min_query_interval: float = _following(
        5.0,
        _duration(0, 3600),
        "Shortest time between two queries of a daemon; five times as long while its logs show no "
        "change. Collections in between reuse the reply. 0 = query at every collection.",
    )
    # Queries are written into control.log: with 48 clients, a minute between reconciliations made
    # 8 MB a day. The logs show what happens between.
    mps_reconcile_interval: float = _following(
        900.0,
        _duration(1, 86400),
        "Time between two queries of the servers, which confirm the state read from the logs.",
    )
    path_procfs: str = _host("/proc", _DIRECTORY, "Where procfs is mounted.")
    path_kmsg: str = _host("/dev/kmsg", Kind("FILE", *_ABSOLUTE), "The kernel log.")
    path_passwd: str = _host("/etc/passwd", _FILE, "File with the names of users.")
    path_container_logs: str = _host(
        "/var/log/containers",
        Kind("DIR", *_NOT_EMPTY),
        "Directory of the kubelet that names containers.",
    )
    path_cgroupfs: str = _host(
        "/sys/fs/cgroup", Kind("DIR", *_NOT_EMPTY), "Where cgroup version 2 is mounted."
    )
    collector_nvml: bool = _everywhere(True, _SWITCH, "Read GPUs and their processes, from NVML.")
    collector_control: bool = _everywhere(True, _SWITCH, "Query the MPS control daemons.")
    collector_logs: bool = _everywhere(
        True, _SWITCH, "Read the daemons' control.log and server.log: waits, crashes, faults."
    )
    collector_process: bool = _everywhere(
        True, _SWITCH, "Read processes in /proc: daemons, users, limits, containers."
    )
    collector_clients: str = _web(
        "full",
        _one_of("LEVEL", "full", "summary", "off"),
        "Per-client series: full, summary (identity, state, contexts, memory) or off.",
    )
    collector_clients_max: int = _everywhere(
        1000,
        _integer(0, 100_000),
        "Clients with separate metrics, for each daemon; further clients are only counted.",
        name="collector.clients.max",
    )
    collector_timeout: float = _everywhere(
        10.0, _duration(0.1, 300), "Deadline of a collection if the scraper sends none."
    )
    collector_nvml_serials: bool = _following(
        False, _SWITCH, "Export the serial numbers of boards.", name="collector.nvml.serials"
    )
    log_level: str = _logging(
        "info", _LOG_LEVEL, "Minimum severity to log: debug, info, warn or error."
    )
    log_format: str = _logging(
        "logfmt", _one_of("FORMAT", "logfmt", "json"), "Form of log lines: logfmt or json."
    )
    replay: str | None = _serve(None, _FILE, "Serve a recording instead of this host.")
    replay_speed: float = _serve(1.0, _FACTOR, "How fast a recording is replayed.")
    record_memory: int = _serve(
        8,
        _integer(0, 1024),
        "Memory in MB for the last 10 minutes, which are recorded when a server crashes, a daemon "
        "dies, or a GPU fault or a ghost appears. 0 = off.",
    )
    record_directory: str | None = _flags_of("serve", "doctor", "record")(
        None,
        _DIRECTORY,
        "Where these recordings are kept: the newest 20, at most 64 MB. Without it, the API gives "
        "a recording while its incident is in the memory.",
    )
    record_names: bool = _serve(
        False, _SWITCH, "Keep the names of users, programs and paths in these recordings."
    )
    serve_once: bool = _option(
        False, _SWITCH, "Print the metrics once, without counters, and exit."
    )
    serve_textfile: str | None = _option(
        None, _PROM_FILE, "The same, into FILE (*.prom, for node_exporter's textfile collector)."
    )
    demo_file: str | None = _option(
        None, Kind(), "Your own recording instead of the built-in ones."
    )
    demo_chapter: str | None = _option(None, Kind("NAME"), "Where to begin. Default: wait.")
    demo_list_chapters: bool = _option(False, _SWITCH, "List the chapters, and exit.")
    demo_speed: float = _option(1.0, _FACTOR, "Replay faster, or slower.")
    doctor_pid: int | None = _option(
        None,
        _PROCESS_ID,
        "Why this process hangs, fails or bypasses MPS. Exit status: 0 well, 1 not, 3 unknown.",
    )
    doctor_user: int | None = _option(
        None,
        Kind("NAME", convert=_user),
        "Like --pid, for a user's processes that wait or use a GPU.",
    )
    doctor_job: str | None = _option(
        None, Kind("ID"), "Like --user, of a Slurm job (number) or pod (NAMESPACE/NAME or its UID)."
    )
    doctor_before_kill: tuple[int, ...] = _option(
        (),
        _PROCESS_ID,
        "Programs that could end with this process, and how to end it alone; of several, those "
        "that endanger others (JSON: a list; of one, an object with its children). Exit status: 0 "
        "no other in danger, 1 otherwise.",
    )
    doctor_json: bool = _option(False, _SWITCH, "Print JSON.")
    doctor_check: str | None = _option(
        None,
        Kind("NAME"),
        "Report one finding (or its alert), or 'critical' for any critical one, in a line. Exit "
        "status: 0 not found, 1 found, 2 unknown, 3 wrong usage.",
    )
    doctor_recording: str | None = _option(
        None, Kind("FILE"), "Diagnose the end of a recording instead."
    )
    doctor_at: float | None = _option(
        None, _POSITIVE, "Diagnose the recording at this offset from its start, not at its end."
    )
    top_url: str | None = _option(
        None,
        Kind("URL", "https?://.+", "must begin with http:// or https://"),
        "The exporter to read. Default: that at port 9400; if there is none, this host.",
    )
    record_file: str = _option("", Kind(), "The file to write.")
    record_duration: float = _option(
        60.0, _POSITIVE, "How long; Ctrl-C ends it early and keeps the file."
    )
    record_interval: float = _option(1.0, _POSITIVE, "Time between collections.")
    record_anonymise: bool = _option(
        False,
        _SWITCH,
        "Replace UUIDs and names of users, programs, folders, servers and namespaces. These stay: "
        "user numbers, PIDs, control groups, the limits and devices that processes set, known log "
        "lines, replies and commands, Xid lines, address ranges of clients, times, models, PCI "
        "addresses, versions, --scenario.",
    )
    explain_text: tuple[str, ...] = _option(
        (), Kind(), "An error text, an alert, a finding, or the number of a CUDA error."
    )
    record_scenario: str = _option("", Kind("TEXT"), "Description, stored in the recording.")
    record_incident: str | None = _option(
        None, _FILE, "Make a bug report of an incident's recording, or of the 'latest' kept one."
    )

    def enabled_collectors(self) -> tuple[str, ...]:
        return tuple(name for name in COLLECTORS if getattr(self, f"collector_{name}"))

    def changed(self) -> tuple[str, ...]:
        """Return the settings that differ from their defaults; texts, perhaps names, as "set"."""
        values = ((flag, getattr(self, flag.field)) for flag in FLAGS)
        return tuple(
            f"{flag.name}={'set' if isinstance(value, str | tuple) else value}"
            for flag, value in values
            if value != flag.default
        )

    def configured_directories(self) -> tuple[tuple[str, str | None], ...]:
        """Return the (pipe directory, log directory or None) pairs, matched by position."""
        return tuple(zip_longest(self.mps_pipe_directory, self.mps_log_directory))


def _flag(one: Field[Any]) -> Flag:
    """Return the flag of a field: of a group of settings, or an option of one command."""
    kind, text, commands, name = one.metadata["flag"]
    first, _, rest = one.name.partition("_")
    words, setting = rest.replace("_", "-"), bool(commands)
    if setting:
        derived = f"{first}.{words}" if words else first
    else:
        derived = words.upper() if words in ("file", "text") else words
    commands = commands or (first,)
    return Flag(name or derived, one.name, one.default, kind, text, commands, setting)


_DECLARED = tuple(map(_flag, fields(Settings)))
FLAGS = tuple(flag for flag in _DECLARED if flag.setting)
OPTIONS = tuple(flag for flag in _DECLARED if not flag.setting)  # Flags of a single command.


def options_of(command: str) -> list[Flag]:
    return [flag for flag in OPTIONS if command in flag.commands]


def grouped(command: str | None = None) -> dict[str, list[Flag]]:
    """Return title of a group -> its settings: of a command, or all."""
    groups: dict[str, list[Flag]] = {title: [] for title in GROUPS.values()}
    for flag in FLAGS:
        if command is None or command in flag.commands:
            groups[GROUPS[flag.name.split(".")[0]]].append(flag)
    return {title: flags for title, flags in groups.items() if flags}


def load(given: Mapping[str, Any], environment: Mapping[str, str], command: str) -> Settings:
    """Return the settings for a command: flags over environment over defaults."""
    _check_variables(environment)
    values: dict[str, Any] = {}
    for flag in (*FLAGS, *OPTIONS):
        if command not in flag.commands:
            continue
        if flag.field in given:
            values[flag.field] = _parsed(flag, given[flag.field], f"--{flag.name}")
        elif flag.setting and (text := environment.get(flag.variable)):
            raw = [part.strip() for part in text.split(",")] if flag.repeatable else text
            values[flag.field] = _parsed(flag, raw, flag.variable)
        else:
            values[flag.field] = flag.default_of(command)
    settings = Settings(**values)
    _check_together(settings)
    return settings


def _check_variables(environment: Mapping[str, str]) -> None:
    known = {REVISION_VARIABLE, *(flag.variable for flag in FLAGS)}
    for name, value in sorted(environment.items()):
        ours = name.startswith(ENVIRONMENT_PREFIX) and name not in known
        if ours and not _SERVICE_LINK_VARIABLES.fullmatch(f"{name}={value}"):
            hint = nearest(name, known) or f": {PROGRAM} --help-all lists all"
            raise InvalidSettingError(f"unknown variable {name}{hint}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message: the known flag or variable that was probably meant, or ""."""
    name = "listen" if word == "-p" or word.endswith("port") else word.lstrip("-")
    close = [one for one in known if len(name) > 2 and name in one]
    close = close or difflib.get_close_matches(word, list(known), 1, 0.7)
    return f": did you mean {close[0]}?" if close else ""


def _parsed(flag: Flag, raw: Any, origin: str) -> Any:
    if isinstance(raw, bool):
        return raw
    try:
        return flag.kind.parse(raw) if isinstance(raw, str) else tuple(map(flag.kind.parse, raw))
    except ValueError as error:
        raise InvalidSettingError(f"{origin}: {raw!r} {error}") from None


def _check_together(settings: Settings) -> None:
    extra = len(settings.mps_log_directory) - len(settings.mps_pipe_directory)
    if extra > 0:
        raise InvalidSettingError(
            f"--mps.log-directory: given {extra} more time(s) than --mps.pipe-directory; each log "
            "directory belongs to the pipe directory at the same position"
        )
    if settings.web_systemd_socket and settings.web_listen_address != Settings().web_listen_address:
        raise InvalidSettingError(
            "--web.listen-address: with --web.systemd-socket the socket unit has the address: "
            "systemctl edit mps-exporter.socket, with the lines [Socket], ListenStream=, and "
            "ListenStream= with the port"
        )
    if not settings.enabled_collectors():
        raise InvalidSettingError("every collector is switched off: nothing to export")
    if not settings.mps_discovery and not settings.mps_pipe_directory and not settings.replay:
        raise InvalidSettingError(
            "--no-mps.discovery without --mps.pipe-directory: no control daemon could be found"
        )
    doctor_modes = ("check", "pid", "before_kill", "user", "job")
    modes = [name for name in doctor_modes if getattr(settings, f"doctor_{name}") not in (None, ())]
    if "check" in modes and settings.doctor_json:
        modes.append("json")
    if len(modes) > 1:
        one, other = (mode.replace("_", "-") for mode in modes[:2])
        raise InvalidSettingError(f"--{one} and --{other}: give one of them")
    if settings.doctor_at is not None and settings.doctor_recording is None:
        raise InvalidSettingError("--at: is a moment of a recording: give --recording too")

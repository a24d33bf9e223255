"""The commands with what each takes: for the parser, the help, shell completion and the man page.

Settings that several commands share are in config.FLAGS.
"""

from __future__ import annotations

from dataclasses import dataclass

from mps_exporter.config import FLAGS, Flag


@dataclass(frozen=True, slots=True)
class Option:
    """A flag or an argument of one command."""

    name: str
    """Starts with -- unless it is given by its position."""
    help: str
    metavar: str = ""
    """"": a switch."""
    default: str | None = None
    values: tuple[str, ...] = ()
    required: bool = False

    @property
    def field(self) -> str:
        """Its name among the parsed arguments."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of mps-exporter."""

    name: str
    help: str
    options: tuple[Option, ...] = ()
    exit_statuses: str = "0 done, 1 it could not be done, 2 wrong usage."

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for flag in FLAGS if self.name in flag.commands)


SHELLS = ("bash", "zsh", "fish")

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "serve",
            "Serve the metrics of this host. The default.",
            (
                Option("--once", "Print the metrics once, without counters, and exit."),
                Option(
                    "--textfile",
                    "Write them to FILE (*.prom, for the textfile collector of node_exporter), "
                    "and exit.",
                    "FILE",
                ),
            ),
            exit_statuses="0 stopped by a signal, 1 it could not start or go on, 2 wrong usage.",
        ),
        Command(
            "demo",
            "Serve recordings of a real host. Needs no GPU.",
            (
                Option("recording", "Your own recording instead of the built-in ones.", "FILE"),
                Option("--chapter", "Where to begin. Default: wait.", "NAME"),
                Option("--list-chapters", "List the chapters, and exit."),
                Option("--speed", "Replay faster, or slower.", "FACTOR", default="1"),
            ),
            exit_statuses="0 stopped by a signal, 1 it could not start or go on, 2 wrong usage.",
        ),
        Command(
            "doctor",
            "Diagnose this host once, and print how to fix each problem.",
            (
                Option("--pid", "Say why this process hangs, fails or runs without MPS.", "PID"),
                Option("--user", "The same of each process of a user.", "NAME"),
                Option("--job", "The same of each client of a Slurm job or a pod.", "ID"),
                Option("--json", "Print JSON."),
                Option(
                    "--check",
                    "Report one finding, or 'critical' for any critical one, in a line. Exit "
                    "status: 0 it is not there, 1 it is there, 2 not known, 3 wrong usage.",
                    "NAME",
                ),
                Option("--recording", "Diagnose the end of a recording instead.", "FILE"),
                Option("--at", "Not its end, but so long after its start.", "DURATION"),
            ),
            exit_statuses="0 nothing is wrong, 1 warnings, 2 something critical, 3 the host could "
            "not be diagnosed (wrong usage, an unreadable recording, a full disk).",
        ),
        Command(
            "record",
            "Record what the exporter reads on this host, to replay it elsewhere.",
            (
                Option("recording", "The file to write.", "FILE", required=True),
                Option(
                    "--duration",
                    "How long; Ctrl-C ends it early and keeps the file.",
                    "DURATION",
                    default="60s",
                ),
                Option("--interval", "Time between collections.", "DURATION", default="1s"),
                Option("--anonymise", "Replace UUIDs, serials, names of users and programs."),
                Option("--scenario", "What is going on, for the reader.", "TEXT"),
            ),
        ),
        Command(
            "completion",
            "Print a script that completes commands and flags in a shell.",
            (Option("shell", "The shell.", "SHELL", values=SHELLS, required=True),),
        ),
    )
}

GROUPS = {
    "web": "Web server",
    "mps": "MPS daemons",
    "collector": "Collectors",
    "path": "Paths",
    "log": "Log",
    "replay": "Replay",
}
"""First word of a flag -> title of its group."""

MOST_USED = (
    "web.listen-address",
    "web.config.file",
    "mps.pipe-directory",
    "mps.log-directory",
    "log.level",
)


def default_text(flag: Flag, command: str = "serve") -> str:
    """What a setting is where nothing is given."""
    default = flag.default_of(command)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ", ".join(default) or "none"
    if isinstance(default, float):
        return f"{default:g}s" if flag.metavar == "DURATION" else f"{default:g}"
    return "none" if default is None else str(default)


def grouped(flags: tuple[Flag, ...]) -> dict[str, list[Flag]]:
    """Title of a group -> its flags."""
    groups: dict[str, list[Flag]] = {}
    for key, title in GROUPS.items():
        found = [flag for flag in flags if flag.name.split(".")[0] == key]
        if found:
            groups[title] = found
    return groups

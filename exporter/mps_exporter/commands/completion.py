"""``mps-exporter completion``: scripts that complete commands and flags in a shell."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter.command_table import COMMANDS, Command

FILES = ("FILE", "DIR")
"""Values for which the shell offers files."""


def script(shell: str) -> str:
    """Return the script for bash, zsh or fish."""
    return "\n".join({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]())


def _flags(command: Command) -> Iterator[tuple[str, str, str]]:
    """Give (flag without --, its value's name or nothing, its help)."""
    for option in command.options:
        if option.name.startswith("--"):
            yield option.name[2:], option.metavar, option.help
    for flag in command.flags:
        yield flag.name, flag.metavar, flag.help
        if flag.is_switch:
            yield f"no-{flag.name}", "", f"Not: {flag.help}"
    yield "help", "", "Print the help of the command."


def _values(command: Command) -> tuple[str, ...]:
    return next((option.values for option in command.options if option.values), ())


def _bash() -> Iterator[str]:
    yield "# Load it with: source <(mps-exporter completion bash)"
    yield "_mps_exporter() {"
    yield "  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} words="
    yield "  COMPREPLY=()"
    yield "  case $command in"
    for command in COMMANDS.values():
        flags = " ".join(f"--{name}{'=' * bool(value)}" for name, value, _ in _flags(command))
        words = " ".join((*_values(command), flags))
        yield f"    {command.name}) words='{words}' ;;"
    yield "    *) [[ $command != -* ]] || command=serve ;;"
    yield "  esac"
    serve = " ".join(f"--{name}{'=' * bool(value)}" for name, value, _ in _flags(COMMANDS["serve"]))
    yield f"  [[ $command != serve || -n $words ]] || words='{serve}'"
    yield "  if ((COMP_CWORD == 1)); then"
    yield f"    words='{' '.join(COMMANDS)} {serve} --help-all --version'"
    yield "  fi"
    yield "  # Without it, a flag with a dot or an equals sign would be several words."
    yield "  if [[ $word == -* || $COMP_CWORD == 1 || $command == completion ]]; then"
    yield '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")'
    yield "    [[ ${#COMPREPLY[@]} != 1 || ${COMPREPLY[0]} != *= ]] || compopt -o nospace"
    yield "  fi"
    yield "}"
    yield "complete -o default -F _mps_exporter mps-exporter"


def _zsh() -> Iterator[str]:
    yield "#compdef mps-exporter"
    yield "# Load it with: source <(mps-exporter completion zsh)"
    yield "_mps_exporter() {"
    yield "  local -a commands=("
    for command in COMMANDS.values():
        yield f"    {_in_quotes(f'{command.name}:{command.help}')}"
    yield "  )"
    yield "  local command=$words[2]"
    yield "  if ((CURRENT == 2)) && [[ $command != -* ]]; then"
    yield "    _describe command commands"
    yield "    return"
    yield "  fi"
    yield "  [[ $command != -* ]] || command=serve"
    yield "  case $command in"
    for command in COMMANDS.values():
        yield f"    {command.name}) _arguments -s '1: :' \\"
        if _values(command):
            yield f"      '2: :({' '.join(_values(command))})' \\"
        for name, value, text in _flags(command):
            brief = text.partition(":")[0].replace("[", "(").replace("]", ")")
            files = "_files" if value in FILES else " "
            spec = f"--{name}=[{brief}]:{value}:{files}" if value else f"--{name}[{brief}]"
            yield f"      {_in_quotes(spec)} \\"
        yield "      '*: :_files' ;;"
    yield "  esac"
    yield "}"
    yield "compdef _mps_exporter mps-exporter"


def _fish() -> Iterator[str]:
    yield "# Load it with: mps-exporter completion fish | source"
    names = " ".join(COMMANDS)
    for command in COMMANDS.values():
        yield (
            f"complete -c mps-exporter -n 'not __fish_seen_subcommand_from {names}' -f "
            f"-a {command.name} -d {_in_quotes(command.help)}"
        )
    for command in COMMANDS.values():
        condition = f"__fish_seen_subcommand_from {command.name}"
        if command.name == "serve":
            others = " ".join(name for name in COMMANDS if name != "serve")
            condition = f"not __fish_seen_subcommand_from {others}"
        if _values(command):
            yield (
                f"complete -c mps-exporter -n '{condition}' -f -a '{' '.join(_values(command))}'"
            )
        for name, value, text in _flags(command):
            takes = (" -r -F" if value in FILES else " -x") if value else ""
            yield (
                f"complete -c mps-exporter -n '{condition}' -l {name}{takes} -d {_in_quotes(text)}"
            )


def _in_quotes(text: str) -> str:
    """Quote for zsh and fish, which differ in how a quote is escaped."""
    return "'" + text.replace("'", "`") + "'"

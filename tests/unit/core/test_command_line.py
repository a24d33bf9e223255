"""Help, wrong usage, shell completion and the man page, from the tables of commands and flags."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mps_exporter.cli import COMMANDS as RUNNERS
from mps_exporter.cli import main
from mps_exporter.command_table import COMMANDS, GROUPS, MOST_USED
from mps_exporter.commands.completion import script
from mps_exporter.config import FLAGS
from mps_exporter.parser import PROGRAM, help_of, help_of_all, overview, parse_command_line

ROOT = Path(__file__).parents[3]
FLAG = re.compile(r"--(?:\[no-\])?[a-z][a-z.-]*[a-z]")


def flags_in(text: str) -> set[str]:
    return {word.replace("[no-]", "") for word in FLAG.findall(text)}


def flags_of(command: str) -> set[str]:
    options = {one.name for one in COMMANDS[command].options if one.name.startswith("--")}
    return options | {f"--{flag.name}" for flag in COMMANDS[command].flags}


def test_every_command_can_be_run() -> None:
    assert RUNNERS.keys() == COMMANDS.keys()


def test_every_flag_has_a_group_and_a_command() -> None:
    for flag in FLAGS:
        assert flag.name.split(".")[0] in GROUPS
        assert set(flag.commands) <= COMMANDS.keys()
    assert {flag.name for flag in FLAGS} >= set(MOST_USED)


# ----------------------------------------------------------------------------------- help


def test_the_help_names_the_commands_and_the_flags_used_most(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE)
    assert flags_in(text) - {"--help", "--help-all", "--version"} == {
        f"--{name}" for name in MOST_USED
    }
    assert "--help-all" in text


def test_all_flags_are_listed_with_their_variables(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-all"]) == 0
    text = capfd.readouterr().out
    for flag in FLAGS:
        assert f"${flag.variable}\n" in text + "\n"
    for command in COMMANDS:
        assert flags_of(command) <= flags_in(text)
    for title in GROUPS.values():
        assert f"\n{title}:\n" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_its_flags_only(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = capfd.readouterr().out
    assert flags_in(text.replace("Ctrl-C", "")) == flags_of(command)
    assert "Exit status: 0 " in " ".join(text.split())
    assert main([command, "-h"]) == main([command, "--help-all"]) == 0


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 250])
def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = [overview(), help_of_all(None), *map(help_of, COMMANDS.values())]
    longest = max(len(line) for text in texts for line in text.splitlines())
    # The longest variable and its indentation need 48 columns.
    assert longest <= max(48, min(columns, 100))
    if columns >= 80:
        assert longest > 70


def test_help_needs_nothing_else() -> None:
    assert isinstance(parse_command_line(["record", "--help"]), str)
    assert isinstance(parse_command_line(["doctor", "--nonsense", "-h"]), str)


# ----------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("doctr", 2, "unknown command 'doctr': did you mean doctor?"),
        ("frobnicate", 2, "unknown command 'frobnicate'"),
        (
            "--web.listen-adress=:1",
            2,
            "unknown flag --web.listen-adress: did you mean --web.listen-address?",
        ),
        (
            "--no-collector.nvmll",
            2,
            "unknown flag --no-collector.nvmll: did you mean --no-collector.nvml?",
        ),
        ("doctor --jsn", 3, "unknown flag --jsn: did you mean --json?"),
        ("--json", 2, "--json is a flag of doctor, not of serve"),
        (
            "doctor --web.max-requests=1",
            3,
            "--web.max-requests is a flag of serve and demo, not of doctor",
        ),
        ("--log.level=debug doctor", 2, "the command comes first: mps-exporter doctor ..."),
        ("serve now", 2, "unexpected argument 'now'"),
        ("--log.level", 2, "--log.level: needs a value"),
        ("record", 2, "FILE is missing: the file to write"),
        ("record x --duratoin=1s", 2, "unknown flag --duratoin: did you mean --duration?"),
        ("completion bsh", 2, "SHELL: 'bsh' must be one of bash, zsh, fish: did you mean bash?"),
        ("demo --chapter=ghosts", 1, "no chapter 'ghosts': did you mean ghost?"),
        ("demo --chapter=xyz", 1, "no chapter 'xyz': --list-chapters lists them"),
    ],
)
def test_wrong_usage_is_one_line_with_the_nearest(
    words: str, status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == status
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"{PROGRAM}: {message}"
    assert lines[1:] == [] or re.fullmatch(r"Try 'mps-exporter .*--help'\.", lines[1])


def test_a_misspelt_variable_is_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPS_EXPORTER_WEB_LISTEN_ADRESS", ":1")
    assert main([]) == 2
    assert "did you mean MPS_EXPORTER_WEB_LISTEN_ADDRESS?" in capfd.readouterr().err


def test_the_chapters_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--list-chapters"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 7
    assert re.fullmatch(r"wait +0:13  A user waits behind another user's server", lines[1])


# ------------------------------------------------------------------------------ completion


def completed(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    typed = " ".join(f"'{word}'" for word in (PROGRAM, *words))
    program = (
        f"{script('bash')}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}\n"
        "compopt() { :; }\n_mps_exporter\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(
        ["bash", "-eu", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_and_flags() -> None:
    assert completed("do") == {"doctor"}
    assert completed("doctor", "--js") == {"--json"}
    assert completed("doctor", "--web") == set()
    assert completed("--web.l") == {"--web.listen-address="}
    assert completed("--log.level=debug", "--web.l") == {"--web.listen-address="}
    assert completed("serve", "--no-mps") == {"--no-mps.discovery"}
    assert completed("completion", "") >= {"bash", "zsh", "fish"}
    for command in COMMANDS:
        offered = {word.rstrip("=") for word in completed(command, "--")}
        assert flags_of(command) <= offered


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_other_shells_can_read_their_scripts(shell: str, check: list[str], tmp_path: Path) -> None:
    text = script(shell)
    for command in COMMANDS:
        for flag in flags_of(command):
            assert flag.removeprefix("--") in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    path = tmp_path / "completion"
    path.write_text(text)
    done = subprocess.run([program, *check, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes_commands_and_flags() -> None:
    program = shutil.which("fish")
    if program is None:
        pytest.skip("no fish here")

    def offered(line: str) -> set[str]:
        text = f"{script('fish')}\ncomplete -C {line!r}\n"
        done = subprocess.run(
            [program, "--no-config", "-c", text], capture_output=True, text=True, check=True
        )
        return {word.split("\t")[0] for word in done.stdout.splitlines()}

    assert offered("mps-exporter do") == {"doctor"}
    assert offered("mps-exporter doctor --js") == {"--json"}
    assert offered("mps-exporter doctor --web") == set()
    assert "--web.listen-address" in offered("mps-exporter --web")


# --------------------------------------------------------------------------------- man page


def test_the_man_page_is_complete_and_correct_roff() -> None:
    page = ROOT / "docs" / "mps-exporter.1"
    program = shutil.which("groff")
    if program is None:
        pytest.skip("no groff here")
    done = subprocess.run(
        [program, "-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-ww", "-rLL=200n", str(page)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    text = done.stdout
    for command in COMMANDS:
        assert flags_of(command) <= flags_in(text)
    for flag in FLAGS:
        assert flag.variable in text

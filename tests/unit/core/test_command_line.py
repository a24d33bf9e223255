"""Help, wrong usage and the man page, from the tables of commands and flags."""

import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from mps_exporter.cli import main
from mps_exporter.commands.serve import free_address
from mps_exporter.flags import COMMANDS, DEMO_LISTEN_ADDRESS, FLAGS, PROGRAM, grouped, options_of

ROOT = Path(__file__).parents[3]
FLAG = re.compile(r"--(?:no-|\[no-\])?[a-z][a-z.-]*[a-z]")


def flags_in(text: str) -> set[str]:
    found = {re.sub(r"\[?no-\]?", "", word) for word in FLAG.findall(text)}
    return found - {"--help", "--help-all", "--version", "--no"}


def flags_of(command: str) -> set[str]:
    settings = [flag for flags in grouped(command).values() for flag in flags]
    return {f"--{flag.name}" for flag in (*options_of(command), *settings)} - {"--FILE", "--TEXT"}


# ----------------------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_the_help_names_the_commands(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capfd.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^ +{command} ", text, re.MULTILINE)
    assert "--help-all" in text


def test_all_flags_are_listed_with_their_variables(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-all"]) == 0
    text = capfd.readouterr().out
    assert {f"${flag.variable}" for flag in FLAGS} <= set(text.split())
    assert flags_in(text) == set().union(*map(flags_of, COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_its_flags_only(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # Help does not need what else the command needs.
    for words in ([command, "--help"], [command, "--nonsense", "-h"], ["help", command]):
        assert main(words) == 0
        text = capfd.readouterr().out
        assert flags_in(text) == flags_of(command)
        assert "Exit status: 0 " in " ".join(text.split())


@pytest.mark.parametrize("words", ["version", "--version", "-V", "doctor --version"])
def test_the_version(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert re.match(r"mps-exporter \d+\.\d+\.\d+ \(Python 3", capfd.readouterr().out)


# ----------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("doctr", 2, "COMMAND: invalid choice: 'doctr' (choose from "),
        ("--port=9401", 2, "unknown flag --port: did you mean --web.listen-address?"),
        ("--web.port=9401", 2, "unknown flag --web.port: did you mean --web.listen-address?"),
        ("-p 9401", 2, "unknown flag -p: did you mean --web.listen-address?"),
        (
            "--web.systemd-socket --web.listen-address=:9401",
            2,
            "--web.listen-address: with --web.systemd-socket the socket unit has the address: "
            "systemctl edit mps-exporter.socket, ",
        ),
        ("--listen=:9401", 2, "unknown flag --listen: did you mean --web.listen-address?"),
        (
            "--web.listen-adress=:1",
            2,
            "unknown flag --web.listen-adress: did you mean --web.listen-address?",
        ),
        ("--no-collector.nvmll", 2, "unknown flag --no-collector.nvmll: did you mean "),
        ("doctor --jsn", 3, "unknown flag --jsn: did you mean --json?"),
        ("--json", 2, "--json is a flag of doctor, not of serve"),
        (
            "doctor --web.max-requests=1",
            3,
            "--web.max-requests is a flag of serve and demo, not of doctor",
        ),
        (
            "--log.level=debug doctor",
            2,
            "unexpected argument 'doctor': the command comes first: mps-exporter doctor ...",
        ),
        ("serve now", 2, "unexpected argument 'now'"),
        ("doctor 4711", 3, "unexpected argument '4711': did you mean --pid 4711?"),
        ("--log.level", 2, "--log.level: expected one argument"),
        ("record", 2, "the following arguments are required: FILE"),
        ("record x --duratoin=1s", 2, "unknown flag --duratoin: did you mean --duration?"),
        ("demo --chapter=xyz", 2, "no chapter 'xyz': --list-chapters lists them"),
    ],
)
def test_wrong_usage_is_one_line_with_the_nearest(
    words: str, status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == status
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(f"{PROGRAM}: {message}")
    assert lines[1:] == [] or re.fullmatch(r"Try 'mps-exporter .*--help'\.", lines[1])


def test_a_misspelt_variable_is_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPS_EXPORTER_WEB_LISTEN_ADRESS", ":1")
    assert main([]) == 2
    assert "did you mean MPS_EXPORTER_WEB_LISTEN_ADDRESS?" in capfd.readouterr().err


def test_a_demo_takes_a_free_port_unless_one_was_given() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # it is taken already
            other.bind(("127.0.0.1", 9400))
            other.listen()
        (address,) = free_address(DEMO_LISTEN_ADDRESS)
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", address)
        assert address not in DEMO_LISTEN_ADDRESS
        assert free_address((":9400",)) == (":9400",)


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

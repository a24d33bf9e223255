import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.cli import parse_words
from mps_exporter.flags import (
    FLAGS,
    OPTIONS,
    OWN_PATHS,
    InvalidSettingError,
    Settings,
    load,
    parse_duration,
)
from mps_exporter.web.app import create_app
from tests.unit.web.fakes import FakeBackend


def parsed(*words: str, command: str = "serve", **environment: str) -> Settings:
    given = parse_words([command, *words])
    assert given is not None
    return load(given, environment, command)


def test_the_default_is_port_9400() -> None:
    assert parsed() == Settings()
    assert parsed().web_listen_address == (":9400",)
    assert parsed().enabled_collectors() == ("nvml", "control", "logs", "process")


def test_a_demo_listens_on_this_host_only() -> None:
    assert parsed(command="demo").web_listen_address == ("127.0.0.1:9400",)
    assert parsed("--web.listen-address=:9400", command="demo").web_listen_address == (":9400",)
    twin = {"MPS_EXPORTER_WEB_LISTEN_ADDRESS": ":1"}
    assert parsed(command="demo", **twin).web_listen_address == (":1",)


def test_every_field_is_named_like_its_flag() -> None:
    for flag in FLAGS:
        assert flag.field == flag.name.replace(".", "_").replace("-", "_")
    for flag in OPTIONS:
        assert flag.field == f"{flag.commands[0]}_{flag.name}".lower().replace("-", "_")
    assert parsed("x.rec.gz", command="record").record_file == "x.rec.gz"


def test_a_flag_beats_its_environment_twin() -> None:
    twin = {"MPS_EXPORTER_MPS_QUERY_TIMEOUT": "500ms"}
    assert parsed(**twin).mps_query_timeout == 0.5
    assert parsed("--mps.query-timeout=3s", **twin).mps_query_timeout == 3.0


@pytest.mark.parametrize("command", ["serve", "demo", "doctor", "top", "record"])
def test_an_empty_variable_is_not_set(command: str) -> None:
    words = ["x"] if command == "record" else []
    empty = {flag.variable: "" for flag in FLAGS}
    assert parsed(*words, command=command, **empty) == parsed(*words, command=command)


def test_repeatable_settings_add_up() -> None:
    words = ["--mps.pipe-directory=/a", "--mps.pipe-directory=/b/", "--mps.log-directory=/la"]
    assert parsed(*words).configured_directories() == (("/a", "/la"), ("/b", None))
    twin = {"MPS_EXPORTER_WEB_LISTEN_ADDRESS": ":1,[::1]:2"}
    assert parsed(**twin).web_listen_address == (":1", "[::1]:2")
    twin = {"MPS_EXPORTER_WEB_LISTEN_ADDRESS": "a:1, b:2 "}
    assert parsed(**twin).web_listen_address == ("a:1", "b:2")


def test_switches_have_a_no() -> None:
    assert parsed("--no-collector.nvml").enabled_collectors() == ("control", "logs", "process")
    assert not parsed(
        MPS_EXPORTER_MPS_DISCOVERY="false", MPS_EXPORTER_MPS_PIPE_DIRECTORY="/a"
    ).mps_discovery


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--web.listen-address=9400"], 'must be "host:port"'),
        (["--web.listen-address=:70000"], 'must be "host:port"'),
        (["--web.listen-address=::1:9400"], "stands in brackets"),
        (["--web.telemetry-path=/"], 'not "/" itself'),
        (["--web.telemetry-path=metrics"], "must be a path"),
        (["--web.telemetry-path=/-/healthy"], "is taken"),
        (["--web.telemetry-path=/static/metrics"], "is taken"),
        (["--mps.pipe-directory=relative"], "must be an absolute path"),
        (["--mps.query-timeout=soon"], "must be a duration"),
        (["--mps.query-timeout=1ms"], "must be from 0.1 to 60"),
        (["--collector.clients.max=-1"], "must be a whole number"),
        (["--collector.clients.max=1000000"], "must be from 0 to 100000"),
        (["--log.level=loud"], "must be one of debug, info, warn, error"),
        (["--mps.log-directory=/l"], "belongs to the pipe directory"),
        (
            [
                "--no-collector.nvml",
                "--no-collector.control",
                "--no-collector.logs",
                "--no-collector.process",
            ],
            "every collector is switched off",
        ),
        (["--no-mps.discovery"], "no control daemon could be found"),
        (["--mps.control-binary="], "must not be empty"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(words: list[str], reason: str) -> None:
    with pytest.raises(InvalidSettingError, match=reason.replace("(", r"\(")):
        parsed(*words)


@pytest.mark.parametrize(
    ("command", "words", "reason"),
    [
        ("record", ["x", "--duration=0"], "--duration: '0' must be from 0.001 to "),
        ("serve", ["--textfile=x.txt"], "must end in .prom"),
        ("demo", ["--speed=fast"], "must be a number"),
        ("doctor", ["--pid=0"], "'0' must be the number of a process"),
        ("doctor", ["--pid=x"], "'x' must be the number of a process"),
        ("doctor", ["--user=nobody-at-all"], "is the name of no user"),
        ("doctor", ["--pid=1", "--job=2"], "--pid and --job: give one of them"),
        ("doctor", ["--check=critical", "--json"], "--check and --json: give one of them"),
        ("doctor", ["--at=1s"], "give --recording too"),
    ],
)
def test_an_invalid_option_is_refused_with_the_reason(
    command: str, words: list[str], reason: str
) -> None:
    with pytest.raises(InvalidSettingError, match=reason):
        parsed(*words, command=command)


def test_the_metrics_cannot_replace_another_page() -> None:
    pages = {resource.canonical for resource in create_app(FakeBackend()).router.resources()}
    for path in pages - {"/", "/metrics"}:
        with pytest.raises(InvalidSettingError, match="is taken"):
            parsed("--web.telemetry-path=" + re.sub(r"{\w+}", "x", path))
    assert all(any(page.startswith(path) for page in pages) for path in OWN_PATHS)


@pytest.mark.parametrize(
    "variable",
    [
        *("MPS_EXPORTER_BUILD_REVISION", "MPS_EXPORTER_SERVICE_HOST"),
        *("MPS_EXPORTER_SERVICE_PORT_METRICS", "MPS_EXPORTER_PORT", "MPS_EXPORTER_PORT_9400_TCP"),
        *("MPS_EXPORTER_PORT_9400_TCP_ADDR", "MPS_EXPORTER_METRICS_SERVICE_HOST"),
        *("MPS_EXPORTER_METRICS_SERVICE_PORT", "MPS_EXPORTER_METRICS_SERVICE_PORT_HTTP"),
        *("MPS_EXPORTER_METRICS_PORT", "MPS_EXPORTER_METRICS_PORT_9400_TCP"),
        "MPS_EXPORTER_METRICS_PORT_9400_TCP_PROTO",
    ],
)
def test_variables_of_images_and_kubernetes_are_ignored(variable: str) -> None:
    assert parsed(**{variable: "tcp://10.0.0.1:9400"}) == Settings()


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(InvalidSettingError, match="MPS_EXPORTER_COLLECTOR_NVML: 'maybe'"):
        parsed(MPS_EXPORTER_COLLECTOR_NVML="maybe")


@given(st.integers(0, 10**6), st.sampled_from([("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600)]))
def test_durations_have_units(number: int, unit: tuple[str, float]) -> None:
    assert parse_duration(f"{number}{unit[0]}") == pytest.approx(number * unit[1])


@given(st.text())
def test_no_text_breaks_the_reading_of_durations(text: str) -> None:
    try:
        assert parse_duration(text) >= 0
    except ValueError:
        return

"""The reader of web configuration files compared with Prometheus' own, the exporter-toolkit.

toolkit_verdicts.json contains configurations with the toolkit's error ("" if accepted). A
configuration that only the exporter refuses has words of its reason in ``refused_here``, one that
only the exporter accepts has ``accepted_here``; docs/web-config.md explains the differences.
"""

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.web.webconfig import load_web_config
from mps_exporter.web.webconfig.config import WebConfigError
from tests.unit.web.webconfigs import filled_in, write_certificates

TABLE = Path(__file__).with_name("toolkit_verdicts.json")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(TABLE.read_text())
    return read


@pytest.fixture(scope="module")
def refusals(table: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Configuration -> reason for which the exporter refuses it, or ""."""
    folder = tmp_path_factory.mktemp("web")
    write_certificates(folder)
    path = folder / "web.yml"
    found = {}
    for name, verdict in table["verdicts"].items():
        text = filled_in(verdict["text"], folder)
        path.write_text(text, "utf-8", "surrogateescape", newline="")
        try:
            load_web_config(str(path))
        except WebConfigError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def test_everything_accepted_beyond_the_toolkit_is_listed(
    table: dict[str, Any], refusals: dict[str, str]
) -> None:
    for name, verdict in table["verdicts"].items():
        accepted = bool(verdict["error"]) and not refusals[name]
        assert accepted == verdict.get("accepted_here", False), name


def test_every_refusal_beyond_the_toolkit_is_listed(
    table: dict[str, Any], refusals: dict[str, str]
) -> None:
    verdicts = table["verdicts"]
    stricter = {
        name: refusals[name] for name in verdicts if refusals[name] and not verdicts[name]["error"]
    }
    listed = {name: one["refused_here"] for name, one in verdicts.items() if "refused_here" in one}
    if hasattr(ssl.SSLContext, "set_groups"):  # Python 3.15
        listed = {name: words for name, words in listed.items() if words != "one curve only"}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve("X25519")
    except ssl.SSLError:  # Python 3.11.2, that of Debian 12
        listed["tls-curve-X25519"] = "cannot be used"
    assert stricter.keys() == listed.keys()
    assert {name: words for name, words in listed.items() if words not in stricter[name]} == {}

"""A real Grafana with our dashboards, provisioned as docs/dashboards.md says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from grafana.__main__ import DASHBOARDS

PROVISIONING = Path(__file__).parents[1] / "provisioning"
STARTUP_SECONDS = 120
FOREIGN = "foreign"
"""The uid of a dashboard that is not ours."""
HOW_TO_GET_ONE = """GRAFANA names no Grafana. Set it to the folder of one, 12 or newer:
  GRAFANA=/usr/share/grafana        where the package of Grafana is installed
  GRAFANA=/tmp/grafana-v12.3.0      where its archive from https://grafana.com/grafana/download
                                    is unpacked
  docker cp $(docker create grafana/grafana:12.3.0):/usr/share/grafana /tmp/grafana
                                    takes it out of the image; then GRAFANA=/tmp/grafana
It needs bin/grafana, conf/ and public/ in there."""


class NoGrafanaError(Exception):
    """There is no Grafana to run; the message says how to get one."""


def program(home: str | None) -> list[str]:
    """Give the command that starts the server of an installation."""
    for name, arguments in (("grafana", ["server"]), ("grafana-server", [])):
        found = Path(home or "") / "bin" / name
        if home and os.access(found, os.X_OK):
            return [str(found), *arguments, "--homepath", home]
    raise NoGrafanaError(HOW_TO_GET_ONE)


def provisioned(folder: Path, prometheus: str, also: Path | None = None) -> Path:
    """Copy our provisioning and dashboards, with the two addresses that a user has to change."""
    target = folder / "provisioning"
    shutil.copytree(PROVISIONING, target)
    for empty in ("plugins", "alerting"):
        (target / empty).mkdir()
    shutil.copytree(DASHBOARDS, folder / "dashboards")
    if also is not None:
        foreign = json.loads(also.read_text("utf-8")) | {"uid": FOREIGN, "id": None}
        (folder / "dashboards" / "foreign.json").write_text(json.dumps(foreign), "utf-8")
    (source,) = (target / "datasources").glob("*.yml")
    content = yaml.safe_load(source.read_text("utf-8"))
    content["datasources"][0]["url"] = prometheus
    content["datasources"][0]["jsonData"]["timeInterval"] = "5s"
    source.write_text(yaml.safe_dump(content), "utf-8")
    (provider,) = (target / "dashboards").glob("*.yml")
    content = yaml.safe_load(provider.read_text("utf-8"))
    content["providers"][0]["options"]["path"] = str(folder / "dashboards")
    provider.write_text(yaml.safe_dump(content), "utf-8")
    return target


def settings(folder: Path, port: int) -> dict[str, str]:
    """Environment variables: on loopback, readable without a login, calling nobody."""
    return {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_PLUGINS_PREINSTALL_DISABLED": "true",
        "GF_NEWS_NEWS_FEED_ENABLED": "false",
        "GF_LOG_LEVEL": "warn",
    }


@contextlib.contextmanager
def running(
    home: str | None, folder: Path, port: int, prometheus: str, also: Path | None = None
) -> Iterator[str]:
    """Run it; gives the address."""
    command = program(home)
    provisioned(folder, prometheus, also)
    with (folder / "grafana.log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **settings(folder, port)}, stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _until_healthy(f"{address}/api/health", process, folder / "grafana.log")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        if process.poll() is not None:
            raise NoGrafanaError(f"Grafana ended at once:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):  # noqa: S310
            return
        if time.monotonic() > deadline:
            raise NoGrafanaError(f"Grafana does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.3)

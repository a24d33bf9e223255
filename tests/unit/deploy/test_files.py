"""Compose, systemd, the chart and the image agree with the program and with each other."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import mps_exporter
from mps_exporter.findings import findings
from mps_exporter.flags import load
from mps_exporter.observations import DaemonFacts, KernelObservation
from mps_exporter.snapshot import ControlDaemon, Snapshot

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
SYSTEMD = DEPLOY / "systemd"
CHART = DEPLOY / "helm" / "mps-exporter"
MANIFESTS = ("device-plugin.yaml", "dra.yaml", "plain.yaml")
RIGHTS = {"SYS_PTRACE", "DAC_READ_SEARCH", "SYSLOG"}
"""What the exporter can make use of: three capabilities, none of which writes."""


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def manifests(name: str) -> dict[str, Any]:
    text = (DEPLOY / "kubernetes" / name).read_text("utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


# ---------------------------------------------------------------------- compose


def services() -> dict[str, Any]:
    found: dict[str, Any] = document(COMPOSE / "compose.yml")["services"]
    return found


def test_services_of_compose_listen_on_loopback_have_no_rights_and_are_pinned() -> None:
    ports = []
    for service in services().values():
        ports += service.get("ports", ())
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service
        assert set(service.get("cap_add", ())) <= RIGHTS
        if "build" not in service and service["image"] != "mps-exporter:local":
            assert re.fullmatch(r"[a-z/]+:[v0-9.]+@sha256:[0-9a-f]{64}", service["image"])
        for volume in service.get("volumes", ()):
            source, _, _ = volume.partition(":")
            assert not source.startswith(".") or (COMPOSE / source).exists()
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_alertmanager_of_compose_inhibits_as_the_example_does() -> None:
    def inhibition(path: Path) -> str:
        begin, end = "# Alerts about a cause inhibit", "\nreceivers:"
        text = path.read_text("utf-8")
        return text[text.index(begin) : text.index(end)]

    example = inhibition(ROOT / "prometheus" / "alertmanager.yml")
    assert example.count("- source_matchers:") >= 15
    assert inhibition(COMPOSE / "alertmanager.yml") == example


def test_grafana_of_compose_loads_all_dashboards() -> None:
    provisioning = ROOT / "grafana" / "provisioning" / "dashboards" / "mps.yml"
    (provider,) = document(provisioning)["providers"]
    volumes = services()["grafana"]["volumes"]
    assert f"../../grafana/dashboards:{provider['options']['path']}:ro" in volumes
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "grafana" / "dashboards" / Path(home).name).exists()


# ---------------------------------------------------------------------- systemd


def settings_of(name: str) -> list[tuple[str, str]]:
    lines = (SYSTEMD / name).read_text("utf-8").splitlines()
    return [
        (key, value)
        for key, equals, value in (line.partition("=") for line in lines)
        if equals and not key.startswith("#")
    ]


def test_the_unit_has_the_rights_that_are_of_use_and_no_others() -> None:
    unit = settings_of("mps-exporter.service")
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        (value,) = [value for name, value in unit if name == key]
        assert set(value.split()) == {f"CAP_{right}" for right in RIGHTS}
        assert (key, "") in settings_of("mps-exporter-least.conf")


def test_the_unit_and_compose_may_read_the_kernel_log_and_not_write_it() -> None:
    unit = settings_of("mps-exporter.service")
    assert {("DeviceAllow", "/dev/kmsg r"), ("ProtectKernelLogs", "no")} <= set(unit)
    assert services()["host"]["devices"] == ["/dev/kmsg:/dev/kmsg:r"]


def test_the_doctors_drop_in_gives_what_the_unit_has_also_after_the_least_rights() -> None:
    daemon = ControlDaemon("/p", "/l", None, DaemonFacts("/p", "/l"))
    unreadable = KernelObservation(0.0, readable=False)
    (found,) = findings(Snapshot(0.0, daemons=(daemon,), kernel_log=unreadable))
    (action,) = found.actions
    file = re.search(r">/etc/systemd/system/mps-exporter.service.d/(\S+)", action.command)
    assert file is not None
    assert file[1] > "least.conf"
    given = re.findall(r"\\n(\w+)=([^\\]+)", action.command)
    assert len(given) == 4
    for key, value in given:
        there = [text for name, text in settings_of("mps-exporter.service") if name == key]
        assert set(value.split()) <= set(" ".join(there).split())


def test_logs_are_rotated_where_only_root_can_put_them() -> None:
    """Root follows these names: in a world-writable directory any user could choose the files."""
    lines = (SYSTEMD / "nvidia-mps.logrotate").read_text().splitlines()
    places = [line for line in lines if line.startswith("/")]
    assert places
    assert all(place.startswith(("/var/log/", "/run/nvidia/")) for place in places)


# ---------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pod_runs_as_an_ordinary_user_who_only_looks(name: str) -> None:
    pod = manifests(name)["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["hostPID"] is True
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert set(security["capabilities"]["add"]) == RIGHTS
    assert security["readOnlyRootFilesystem"] is True
    assert "privileged" not in security
    written = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"incidents"}
    assert {"name": "incidents", "emptyDir": {"sizeLimit": "80Mi"}} in pod["volumes"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_doctor_in_the_pod_has_the_settings_of_its_exporter(name: str) -> None:
    (container,) = manifests(name)["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve", "--web.listen-address=:9400"], "exec does not inherit it"
    settings = load({}, {one["name"]: one.get("value", "") for one in container["env"]}, "doctor")
    assert settings.path_passwd == "/host/passwd"
    assert settings.record_directory == "/var/lib/mps-exporter/incidents"
    plugin = ("/run/nvidia/mps/nvidia.com/gpu/pipe",) if name == "device-plugin.yaml" else ()
    assert settings.mps_pipe_directory == plugin
    assert len(settings.mps_log_directory) == len(plugin)


def test_the_monitor_gives_the_job_the_name_that_the_alerts_know() -> None:
    monitor = document(DEPLOY / "kubernetes" / "pod-monitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "mps-exporter"} in endpoint["relabelings"]
    rules = (ROOT / "prometheus" / "rules" / "mps-exporter.yml").read_text()
    assert 'up{job="mps-exporter"}' in rules


def test_chart_and_program_have_the_same_version() -> None:
    assert document(CHART / "Chart.yaml")["appVersion"] == mps_exporter.__version__


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    properties = document(CHART / "values.schema.json")["properties"]
    for name, value in document(CHART / "values.yaml").items():
        below = properties[name].get("properties")
        assert not below or value.keys() == below.keys(), name


def test_the_installation_checks_hashes() -> None:
    script = (SYSTEMD / "install-package.sh").read_text("utf-8")
    installs = [line for line in script.splitlines() if line.startswith('"$pip" install')]
    assert len(installs) == 3
    assert all('"${locked[@]}"' in line or "--no-index" in line for line in installs)
    assert "--require-hashes" in script


# ---------------------------------------------------------------------- discovery


def test_the_entry_for_the_list_of_mixins_leads_to_the_mixin() -> None:
    entry = json.loads((DEPLOY / "discovery" / "mixins.json").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert entry["source"] == project["urls"]["Source"]
    assert (ROOT / entry["subdir"] / "mixin.libsonnet").exists()

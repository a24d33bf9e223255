"""The chart through Helm and kubeconform, for every layout and three versions of Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "mps-exporter"
LAYOUTS = ("devicePlugin", "dra", "plain")
KUBERNETES = ("1.25.0", "1.31.0", "1.37.0")

SCHEMAS = {
    "daemonset-apps-v1",
    "serviceaccount-v1",
    "service-v1",
    "configmap-v1",
    "networkpolicy-networking-v1",
}


def tool(name: str) -> str:
    found = ROOT / ".tools" / "bin" / name
    path = str(found) if found.exists() else shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is missing: make tools")
    return path


def helm(*arguments: str) -> str:
    result = subprocess.run(
        [tool("helm"), *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def template(*values: str, kubernetes: str = "1.30.0") -> str:
    settings = [word for value in values for word in ("--set", value)]
    options = ["--namespace", "monitoring", "--kube-version", kubernetes, *settings]
    return helm("template", "mps-exporter", str(CHART), *options)


def rendered(*values: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(template(*values)) if one]


def daemonset(*values: str) -> dict[str, Any]:
    (found,) = [one for one in rendered(*values) if one["kind"] == "DaemonSet"]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def test_helm_lint_finds_nothing() -> None:
    for layout in LAYOUTS:
        helm(
            "lint", "--strict", "--kube-version", "1.30.0", "--set", f"layout={layout}", str(CHART)
        )


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubernetes' own schemas, which kubernetes-validate carries, in kubeconform's form.

    They refer to each other by an absolute path, which files do not have.
    """
    folder = tmp_path_factory.mktemp("schemas")
    carried = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    for version in KUBERNETES:
        (folder / version).mkdir()
        for name in {"_definitions", *SCHEMAS}:
            text = (carried / f"v{version}-local-strict" / f"{name}.json").read_text("utf-8")
            schema = json.loads(text.replace('"/api/_definitions.json#', '"_definitions.json#'))
            schema.pop("$id", None)
            (folder / version / f"{name}.json").write_text(json.dumps(schema))
    return folder


CUSTOM = "PodMonitor,ServiceMonitor,PrometheusRule"
"""Kinds of the Prometheus operator, whose schemas nobody carries."""


def conform(schemas: Path, version: str, text: str) -> subprocess.CompletedProcess[str]:
    location = f"{schemas}/{version}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    return subprocess.run(
        [tool("kubeconform"), "-strict", "-output", "json", "-verbose", "-skip", CUSTOM,
         "-kubernetes-version", version, "-schema-location", location, "-"],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("monitor", ["PodMonitor", "ServiceMonitor"])
def test_every_layout_is_valid_in(schemas: Path, version: str, layout: str, monitor: str) -> None:
    values = (f"layout={layout}", f"monitor.kind={monitor}", "web.configSecret=web")
    result = conform(schemas, version, template(*values, kubernetes=version))
    assert result.returncode == 0, result.stdout
    statuses = {one["kind"]: one["status"] for one in json.loads(result.stdout)["resources"]}
    assert statuses["DaemonSet"] == "statusValid"
    assert statuses["NetworkPolicy"] == "statusValid"


def test_the_check_would_notice(schemas: Path) -> None:
    wrong = template("layout=plain").replace("hostPID: true", "hostPid: true")
    assert conform(schemas, "1.31.0", wrong).returncode != 0


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_plain_manifests_are_valid_in(schemas: Path, version: str) -> None:
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        result = conform(schemas, version, path.read_text("utf-8"))
        assert result.returncode == 0, (path.name, result.stdout)


def test_the_plain_manifests_are_what_the_chart_gives(tmp_path: Path) -> None:
    environment = {**os.environ, "HELM": tool("helm")}
    subprocess.run([str(ROOT / "deploy" / "render.sh"), str(tmp_path)], check=True, env=environment)
    committed = {
        path.name: path.read_text("utf-8") for path in (ROOT / "deploy" / "kubernetes").iterdir()
    }
    fresh = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert fresh == committed, "run deploy/render.sh"


def test_rules_in_the_cluster_are_the_rules_of_the_project() -> None:
    in_cluster = {
        one["metadata"]["name"].removeprefix("mps-exporter-"): one["spec"]
        for one in rendered()
        if one["kind"] == "PrometheusRule"
    }
    files = (ROOT / "prometheus" / "rules").glob("*.yml")
    assert in_cluster == {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in files}


def test_links_in_the_alerts_lead_where_the_values_say() -> None:
    """And nothing else of a rule is changed; whether they end with a slash is the same."""
    grafana, runbooks = "https://grafana.example.org/g", "https://wiki.example.org/mps"
    links: list[str] = []
    changed = rendered(f"rules.grafanaUrl={grafana}/", f"rules.runbookUrl={runbooks}")
    for ours, expected in zip(rendered(), changed, strict=True):
        if ours["kind"] != "PrometheusRule":
            assert expected == ours
            continue
        for group, group_of_theirs in zip(
            ours["spec"]["groups"], expected["spec"]["groups"], strict=True
        ):
            for rule, other in zip(group["rules"], group_of_theirs["rules"], strict=True):
                for texts in (rule.get("annotations", {}), other.get("annotations", {})):
                    links += [texts.pop(name) for name in sorted(texts) if name.endswith("_url")]
        assert expected == ours
    starts = {re.sub(r"(/d/mps-|/Mps[A-Z]).*", "", link) for link in links}
    assert starts == {
        "http://localhost:3000", grafana, runbooks,
        "https://github.com/mps-exporter/mps-exporter/blob/main/prometheus/runbooks",
    }  # fmt: skip
    assert len([link for link in links if link.startswith((grafana, runbooks))]) == len(links) // 2


@pytest.mark.parametrize(
    ("interval", "timeout", "taken"),
    [("15s", "10s", True), ("1m", "60s", True), ("500ms", "1s", False), ("5s", "10s", False),
     ("1m", "90s", False), ("2m", "61000ms", True)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_a_timeout_longer_than_the_interval_is_refused(
    kind: str, interval: str, timeout: str, *, taken: bool
) -> None:
    """Prometheus would drop the whole job, and the operator says so in its log only."""
    values = f"monitor.kind={kind},monitor.interval={interval},monitor.scrapeTimeout={timeout}"
    result = subprocess.run(
        [tool("helm"), "template", str(CHART), "--kube-version", "1.30.0", "--set", values],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode == 0) == taken, result.stderr
    assert taken or "shorter than monitor.scrapeTimeout" in result.stderr


def test_dashboards_in_the_cluster_are_the_dashboards_of_the_project() -> None:
    in_cluster: dict[str, Any] = {}
    for one in rendered():
        if one["kind"] == "ConfigMap":
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            in_cluster |= {name: json.loads(text) for name, text in one["data"].items()}
    files = (ROOT / "grafana" / "dashboards").glob("*.json")
    assert in_cluster == {path.name: json.loads(path.read_text("utf-8")) for path in files}


def test_the_packaged_chart_carries_them(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("mps-exporter-*.tgz")
    with tarfile.open(package) as archive:
        packed = {Path(name) for name in archive.getnames()}
    for source, folder in (("prometheus/rules", "rules"), ("grafana/dashboards", "dashboards")):
        for path in (ROOT / source).glob("*.*"):
            assert Path("mps-exporter/files") / folder / path.name in packed


def test_each_layout_watches_and_mounts_what_it_is_about() -> None:
    volumes = {
        layout: {volume["name"] for volume in daemonset(f"layout={layout}")["volumes"]}
        for layout in LAYOUTS
    }
    assert volumes == {
        "devicePlugin": {"passwd", "mps-root"},
        "dra": {"passwd"},
        "plain": {"passwd", "tmp", "var-log"},
    }
    pod = daemonset("devicePlugin.resources={nvidia.com/gpu.shared,nvidia.com/h200}")
    arguments = pod["containers"][0]["args"]
    assert "--mps.pipe-directory=/run/nvidia/mps/nvidia.com/gpu.shared/pipe" in arguments
    assert "--mps.log-directory=/run/nvidia/mps/nvidia.com/h200/log" in arguments


def test_least_rights_are_none() -> None:
    security = daemonset("rights=least")["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False


def test_a_layout_that_could_see_nothing_is_refused() -> None:
    result = subprocess.run(
        [tool("helm"), "template", str(CHART), "--kube-version", "1.30.0",
         "--set", "layout=dra,rights=least"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert "layout dra needs rights full" in result.stderr


@pytest.mark.parametrize(
    "wrong", ["layout=slurm", "port=0", "unknown=1", "rights=root", "rules.grafanaUrl=here"]
)
def test_values_that_mean_nothing_are_refused(wrong: str) -> None:
    result = subprocess.run(
        [tool("helm"), "template", str(CHART), "--kube-version", "1.30.0", "--set", wrong],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0


def test_a_web_config_comes_from_a_secret_and_probes_need_no_password() -> None:
    pod = daemonset("web.configSecret=mps-web")
    container = pod["containers"][0]
    assert "--web.config.file=/etc/mps-exporter/web/web-config.yml" in container["args"]
    assert {"tcpSocket"} == container["livenessProbe"].keys() - {"periodSeconds", "timeoutSeconds"}
    (secret,) = [one for one in pod["volumes"] if "secret" in one]
    assert secret["secret"]["secretName"] == "mps-web"


def test_nothing_is_let_out_and_only_who_is_named_is_let_in() -> None:
    values = "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring"
    (policy,) = [one for one in rendered(values) if one["kind"] == "NetworkPolicy"]
    spec = policy["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["egress"] == []
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]

"""The chart through Helm and kubeconform: every layout, Kubernetes 1.28 to the newest schemas."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.commands import output_of
from testing.prometheus_programs import program
from testing.rule_files import RUNBOOK_BASE
from tools.rules import usual_severity

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "mps-exporter"
LAYOUTS = ("devicePlugin", "dra", "plain")
KUBERNETES = tuple(f"1.{minor}.0" for minor in range(28, 38))
IMAGE = "image.repository=registry.example.org/mps-exporter"

SCHEMAS = {
    "daemonset-apps-v1",
    "serviceaccount-v1",
    "service-v1",
    "configmap-v1",
    "networkpolicy-networking-v1",
}


def run_helm(*arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    return output_of(program("helm"), *arguments, cwd=ROOT, input=values)


def helm(*arguments: str, values: str = "") -> str:
    result = run_helm(*arguments, values=values)
    assert result.returncode == 0, result.stderr
    return result.stdout


def words(*values: str, kubernetes: str = "1.30.0") -> list[str]:
    settings = [word for value in (IMAGE, *values) for word in ("--set", value)]
    release = ["template", "mps-exporter", str(CHART), "--namespace", "monitoring"]
    return [*release, "--kube-version", kubernetes, *settings]


def rendered(*values: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(helm(*words(*values))) if one]


def only(kind: str, *values: str) -> dict[str, Any]:
    (found,) = [one for one in rendered(*values) if one["kind"] == kind]
    return found


def daemonset(*values: str) -> dict[str, Any]:
    pod: dict[str, Any] = only("DaemonSet", *values)["spec"]["template"]["spec"]
    return pod


def test_helm_lint_finds_nothing() -> None:
    lint = ("lint", "--strict", "--kube-version", "1.30.0", "--set")
    for layout in LAYOUTS:
        helm(*lint, f"layout={layout},{IMAGE}", str(CHART))


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
"""Kinds of the Prometheus operator, without published schemas."""


def conform(schemas: Path, version: str, text: str) -> dict[str, str]:
    """Check manifests; return the status of each kind."""
    location = f"{schemas}/{version}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    flags = ("-strict", "-output", "json", "-verbose", "-skip", CUSTOM)
    schema = ("-schema-location", location, "-kubernetes-version", version)
    result = output_of(program("kubeconform"), *flags, *schema, "-", input=text)
    assert result.returncode == 0, result.stdout
    return {one["kind"]: one["status"] for one in json.loads(result.stdout)["resources"]}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    ("layout", "monitor"),
    [("devicePlugin", "podMonitor"), ("dra", "serviceMonitor"), ("plain", "podMonitor")],
)
def test_every_layout_is_valid_in(schemas: Path, version: str, layout: str, monitor: str) -> None:
    monitors = ("podMonitor.enabled=false", f"{monitor}.enabled=true")
    values = (f"layout={layout}", *monitors, "web.configSecret=web")
    statuses = conform(schemas, version, helm(*words(*values, kubernetes=version)))
    assert statuses["DaemonSet"] == statuses["NetworkPolicy"] == "statusValid"


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_plain_manifests_are_valid_in(schemas: Path, version: str) -> None:
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        assert conform(schemas, version, path.read_text("utf-8")), path.name


def test_the_plain_manifests_are_what_the_chart_gives(tmp_path: Path) -> None:
    environment = {**os.environ, "HELM": str(program("helm"))}
    subprocess.run([str(ROOT / "deploy" / "render.sh"), str(tmp_path)], check=True, env=environment)
    committed = {
        path.name: path.read_text("utf-8") for path in (ROOT / "deploy" / "kubernetes").iterdir()
    }
    fresh = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert fresh == committed, "run deploy/render.sh"


def test_rules_in_the_cluster_are_the_rules_of_the_project() -> None:
    in_cluster = {
        one["metadata"]["name"].removeprefix("mps-exporter-"): one["spec"]
        for one in rendered(f"prometheusRule.runbookUrl={RUNBOOK_BASE}")
        if one["kind"] == "PrometheusRule"
    }
    files = (ROOT / "prometheus" / "rules").glob("*.yml")
    of_project = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in files}
    for rule in rules_of(of_project.values()):
        rule.get("annotations", {}).pop("dashboard_url", None)
    assert in_cluster == of_project


def rules_of(specs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for spec in specs for group in spec["groups"] for rule in group["rules"]]


def alerts(*values: str) -> dict[str, dict[str, Any]]:
    """The alerts in the cluster, by name."""
    specs = [one["spec"] for one in rendered(*values) if one["kind"] == "PrometheusRule"]
    return {rule["alert"]: rule for rule in rules_of(specs) if "alert" in rule}


SITES = {
    "kube-prometheus-stack": (
        "podMonitor: {additionalLabels: {release: prometheus, app.kubernetes.io/instance: own}}\n"
        "prometheusRule: {additionalLabels: {release: prometheus}, runbookUrl: https://w.e/}",
        ["release: prometheus", "instance: own", "scheme: http\n", "w.e/MpsServerCrashed.md"],
    ),
    "Flux": (
        "namespaceOverride: gpu\nfullnameOverride: mps\ncommonLabels: {team: gpu}",
        ["namespace: gpu", "name: mps\n", "team: gpu"],
    ),
    "DRA": ("layout: dra", ['nvidia.com/gpu.present: "true"', "SYS_PTRACE"]),
    "plain": (
        "layout: plain\nplain: {directories: [{pipe: /tmp/nvidia-mps, log: /var/log/nvidia-mps}]}",
        ['PIPE_DIRECTORY, value: "/tmp/nvidia-mps"', 'DIRECTORY, value: "/var/log/nvidia-mps"'],
    ),
    "TLS": (
        "web: {configSecret: web}\npodMonitor: {tlsConfig: {insecureSkipVerify: true}}",
        ["scheme: https\n", "insecureSkipVerify: true", "tcpSocket"],
    ),
    "passwords alone": (
        "web: {configSecret: web}\n"
        "podMonitor: {scheme: http, basicAuth: {username: {name: s, key: u}}}",
        ["scheme: http\n", "username:"],
    ),
    "a web configuration": (
        "web: {configSecret: mps-web}\npodLabels: {team: b}",
        [
            "--web.config.file=/etc/mps-exporter/web/web-config.yml",
            "secretName: mps-web",
            "team: b",
        ],
    ),
    "AppArmor of the runtime": ("appArmorProfile: RuntimeDefault", ["type: RuntimeDefault"]),
    "AppArmor of its own": (
        "appArmorProfile: mps-exporter",
        ["type: Localhost", "localhostProfile: mps-exporter"],
    ),
    "no rules": ("prometheusRule: {enabled: false}\ndashboards: {enabled: false}", ["PodMonitor"]),
    "ServiceMonitor": (
        "podMonitor: {enabled: false}\nserviceMonitor: {enabled: true, honorLabels: true}",
        ["kind: Service\n", "honorLabels: true"],
    ),
    "air-gapped registry": (
        f"global: {{imageRegistry: registry.local:5000}}\nimage: {{digest: 'sha256:{'0' * 64}'}}\n"
        "imagePullSecrets: [{name: pull}]",
        [f"registry.local:5000/registry.example.org/mps-exporter@sha256:{'0' * 64}", "name: pull"],
    ),
    "two node pools": (
        "nodeSelector: {pool: a}\ntolerations: [{operator: Exists}]\nextraManifests:\n"
        "- {apiVersion: v1, kind: ConfigMap, metadata: {name: '{{ .Release.Name }}-more'}}",
        ["pool: a", "operator: Exists", "name: 'mps-exporter-more'"],
    ),
}
"""Value file of a kind of site, and parts of what it renders to."""


@pytest.mark.parametrize("site", SITES)
def test_the_values_of_each_kind_of_site(schemas: Path, site: str) -> None:
    values, parts = SITES[site]
    text = helm(*words("podMonitor.interval=15s"), "--values", "-", values=values)
    assert [part for part in parts if part not in text] == []
    assert {*conform(schemas, "1.30.0", text).values()} <= {"statusValid", "statusSkipped"}


@pytest.mark.parametrize("name", ["argo-cd", "flux"])
def test_the_examples_for_gitops_render(schemas: Path, name: str) -> None:
    text = (ROOT / "deploy" / "gitops" / f"{name}.yaml").read_text("utf-8")
    spec = list(yaml.safe_load_all(text))[-1]["spec"]
    argo = spec.get("source", {})
    chart, values = (
        (argo["path"], argo["helm"]["valuesObject"])
        if argo
        else (spec["chart"]["spec"]["chart"], spec["values"])
    )
    command = ("template", "mps", chart, "--kube-version", "1.30.0", "--values", "-")
    shown = helm(*command, values=yaml.safe_dump(values))
    assert "release: kube-prometheus-stack" in shown
    assert conform(schemas, "1.30.0", shown)["DaemonSet"] == "statusValid"


@pytest.mark.parametrize(
    ("values", "hints"),
    [
        (
            (),
            ["podMonitor.additionalLabels and prometheusRule.additionalLabels it may find nothing"],
        ),
        (("web.configSecret=w",), ["scrapes by HTTPS: set podMonitor.tlsConfig"]),
        (("podMonitor.enabled=false", "prometheusRule.enabled=false"), ["Nothing scrapes it yet"]),
    ],
)
def test_the_notes_say_what_may_be_missing(
    tmp_path: Path, values: tuple[str, ...], hints: list[str]
) -> None:
    """Helm shows them only with a cluster: here they are rendered as a manifest."""
    chart = shutil.copytree(CHART, tmp_path / "mps-exporter")
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}')
    (chart / "templates" / "notes.yaml").write_text('notes: {{ include "notes" . | toJson }}\n')
    arguments = [str(chart) if word == str(CHART) else word for word in words(*values)]
    show = helm(*arguments, "--show-only", "templates/notes.yaml")
    notes = " ".join(yaml.safe_load(show)["notes"].split())
    assert [hint for hint in hints if hint not in notes] == []


def test_alerts_have_no_links_that_lead_nowhere() -> None:
    text = helm(*words("dashboards.enabled=false"))
    assert "runbook_url" not in text
    assert "dashboard_url" not in text
    assert "localhost:3000" not in text


def test_single_alerts_are_switched_off_and_labelled() -> None:
    plain = alerts()
    changed = alerts(
        "prometheusRule.alerts.MpsWouldHelp.enabled=false",
        "prometheusRule.alerts.MpsUidWaitLong.labels.severity=info",
        "prometheusRule.alerts.MpsUidWaitLong.for=15m",
        "prometheusRule.additionalRuleLabels.team=gpu",
        "prometheusRule.additionalLabels.release=prometheus",
    )
    assert plain.keys() - changed.keys() == {"MpsWouldHelp"}
    assert all(rule["labels"]["team"] == "gpu" for rule in changed.values())
    own = changed["MpsUidWaitLong"]
    assert (own["labels"]["severity"], own["for"]) == ("info", "15m")
    assert usual_severity(changed["MpsGhostServer"]["labels"]["severity"]) == "critical"


def test_dashboards_in_the_cluster_are_the_dashboards_of_the_project() -> None:
    in_cluster: dict[str, Any] = {}
    for one in rendered():
        if one["kind"] == "ConfigMap":
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            in_cluster |= {name: json.loads(text) for name, text in one["data"].items()}
    files = (ROOT / "grafana" / "dashboards").glob("*.json")
    assert in_cluster == {path.name: json.loads(path.read_text("utf-8")) for path in files}


def test_each_layout_watches_and_mounts_what_it_is_about() -> None:
    volumes = {
        layout: {volume["name"] for volume in daemonset(f"layout={layout}")["volumes"]}
        for layout in LAYOUTS
    }
    assert volumes == {
        "devicePlugin": {"passwd", "incidents", "container-logs", "mps-root"},
        "dra": {"passwd", "incidents", "container-logs"},
        "plain": {"passwd", "incidents", "tmp", "var-log"},
    }
    pod = daemonset("devicePlugin.resources={nvidia.com/gpu.shared,nvidia.com/h200}")
    given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    for what in ("pipe", "log"):
        paths = [f"/run/nvidia/mps/nvidia.com/{name}/{what}" for name in ("gpu.shared", "h200")]
        assert given[f"MPS_EXPORTER_MPS_{what.upper()}_DIRECTORY"] == ",".join(paths)


def test_least_rights_are_none() -> None:
    security = daemonset("rights=least")["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False
    assert "appArmorProfile" not in security


NO_VALUE = "values don't meet the specifications of the schema"
OWN_LABEL = "the chart itself sets the label "


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("layout=slurm", NO_VALUE),
        ("port=0", NO_VALUE),
        ("unknown=1", NO_VALUE),
        ("rights=root", NO_VALUE),
        ("appArmorProfile=a profile", NO_VALUE),
        ("prometheusRule.grafanaUrl=here", NO_VALUE),
        ("podMonitor.sampleLimit=many", NO_VALUE),
        ("image.digest=sha256:12", NO_VALUE),
        ("commonLabels.a=1", NO_VALUE),
        ("image.repository=a/b:1", NO_VALUE),
        ("image.registry=https://a", NO_VALUE),
        ("podMonitor.tlsConfig.caFile=/a", NO_VALUE),
        ("nodeSelector.a=true", NO_VALUE),
        ("commonLabels.helm\\.sh/chart=x", f"commonLabels: {OWN_LABEL}helm.sh/chart"),
        ("podLabels.helm\\.sh/chart=x", f"podLabels: {OWN_LABEL}helm.sh/chart"),
        ("layout=dra,rights=least", "layout dra needs rights full"),
        ("appArmorProfile=RuntimeDefault", "needs Kubernetes 1.30"),
        (
            "prometheusRule.alerts.MpsUidWaitlong.enabled=false",
            "no alert MpsUidWaitlong; there are: ",
        ),
    ],
)
def test_a_value_without_a_meaning_is_refused(value: str, why: str) -> None:
    result = run_helm(*words(value, kubernetes="1.29.0"))
    assert result.returncode != 0, "it was rendered"
    assert why in result.stderr


def test_nothing_is_let_out_and_only_who_is_named_is_let_in() -> None:
    values = "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring"
    spec = only("NetworkPolicy", values)["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["egress"] == []
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]

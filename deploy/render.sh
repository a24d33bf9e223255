#!/usr/bin/env bash
# Renders the chart into deploy/kubernetes, for those who use kubectl and no Helm:
#
#   deploy/render.sh            writes the files
#   deploy/render.sh FOLDER     writes them there instead
#
# HELM names the program (default: the one of `make tools`, else the one on PATH).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:-$here/kubernetes}
helm=${HELM:-$here/../.tools/bin/helm}
[ -x "$helm" ] || helm=$(command -v helm) || {
  echo 'error: helm is missing: make tools' >&2
  exit 1
}
mkdir -p "$target"

render() { # FILE WHAT HELM-ARGUMENT...
  local file=$1 what=$2
  shift 2
  {
    echo "# $what"
    echo '#'
    echo '# Made from deploy/helm/mps-exporter by deploy/render.sh: change that, and run this again.'
    "$helm" template mps-exporter "$here/helm/mps-exporter" --kube-version 1.30.0 \
      --namespace mps-exporter --set image.repository=mps-exporter "$@" 2>"$target/.errors" || {
      cat "$target/.errors" >&2
      exit 1
    }
    # Nothing of Helm manages what kubectl applies.
  } | sed '\#^ *\(helm.sh/chart\|app.kubernetes.io/managed-by\):#d' >"$target/$file"
  rm -f "$target/.errors"
}

daemonset() { # FILE WHAT LAYOUT
  render "$1" "$2" --set "layout=$3" --set podMonitor.enabled=false \
    --set prometheusRule.enabled=false --set dashboards.enabled=false
}

daemonset device-plugin.yaml "MPS by NVIDIA's device plugin (resource nvidia.com/gpu)." devicePlugin
daemonset dra.yaml "MPS by NVIDIA's DRA driver: one control daemon for each claim." dra
daemonset plain.yaml 'MPS started on the node itself: /tmp/nvidia-mps and the like.' plain
render pod-monitor.yaml 'For the Prometheus operator, in addition to any of the others.' \
  --show-only templates/podmonitor.yaml

{
  cat <<'END'
# Values of kube-prometheus-stack: its own inhibition rules, and those of prometheus/alertmanager.yml
# (Helm replaces lists). Made by deploy/render.sh.
#
# A critical MPS alert about one host says nothing about warnings on others: the stack's rules leave
# them out. The stack sends alerts nowhere (receiver "null") until alertmanager.config has your route.
alertmanager:
  config:
    inhibit_rules:
      - source_matchers: [severity="critical", alertname!~"Mps.+"]
        target_matchers: [severity=~"warning|info"]
        equal: [namespace, alertname]
      - source_matchers: [severity="warning", alertname!~"Mps.+"]
        target_matchers: [severity="info"]
        equal: [namespace, alertname]
      - source_matchers: [alertname="InfoInhibitor"]
        target_matchers: [severity="info"]
        equal: [namespace]
      - target_matchers: [alertname="InfoInhibitor"]
END
  sed '1,/^inhibit_rules:/d; /^receivers:/,$d; /^ *#/d; /^$/d; s/^/    /' "$here/../prometheus/alertmanager.yml"
} >"$target/kube-prometheus-stack.yml"

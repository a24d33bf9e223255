{{- define "mps-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "mps-exporter.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "mps-exporter.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "mps-exporter.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end }}

{{- define "mps-exporter.selector" -}}
app.kubernetes.io/name: {{ include "mps-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "mps-exporter.labels" -}}
{{- $labels := include "mps-exporter.podLabels" . | fromYaml -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .Release.Service -}}
{{- toYaml $labels -}}
{{- end }}

{{/* Those of pods: without the chart's version, which would replace pods that did not change. */}}
{{- define "mps-exporter.podLabels" -}}
{{- $labels := include "mps-exporter.selector" . | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/component" "exporter" -}}
{{- toYaml (merge $labels .Values.commonLabels) -}}
{{- end }}

{{- define "mps-exporter.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "mps-exporter.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "mps-exporter.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is required: there is no image in a public registry; build one (docs/kubernetes.md) and name it" $image.repository -}}
{{- with $image.registry | default (.Values.global).imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* They would not win: pods are selected by some of them, and Helm reads others. */}}
{{- define "mps-exporter.refuseOwnLabels" -}}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/component" "app.kubernetes.io/managed-by" "helm.sh/chart" -}}
{{- range $map := list "commonLabels" "podLabels" -}}
{{- range $name := index $.Values $map | keys | sortAlpha -}}
{{- if has $name $own -}}
{{- fail (printf "%s: the chart itself sets the label %s: leave it out" $map $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Values of version 0.1 that have other names now. */}}
{{- define "mps-exporter.refuseOldValues" -}}
{{- $old := list -}}
{{- $simple := dict "args" "extraArgs" "env" "extraEnv" "volumes" "extraVolumes" "volumeMounts" "extraVolumeMounts" "supplementalGroups" "podSecurityContext.supplementalGroups" "seLinuxOptions" "podSecurityContext.seLinuxOptions" "seccompProfile" "podSecurityContext.seccompProfile" -}}
{{- range $name, $new := $simple -}}
{{- if hasKey $.Values $name -}}
{{- $old = append $old (printf "%s is now %s" $name $new) -}}
{{- end -}}
{{- end -}}
{{- $switches := dict "PodMonitor" "podMonitor.enabled=true" "ServiceMonitor" "serviceMonitor.enabled=true with podMonitor.enabled=false" "none" "podMonitor.enabled=false" -}}
{{- $names := dict "labels" "additionalLabels" -}}
{{- range $old_map, $new_map := dict "monitor" "podMonitor" "rules" "prometheusRule" -}}
{{- $given := index $.Values $old_map -}}
{{- if kindIs "map" $given -}}
{{- range $name, $value := $given -}}
{{- if and (eq $old_map "monitor") (eq $name "kind") -}}
{{- $old = append $old (printf "monitor.kind=%v is now %s" $value (get $switches (toString $value) | default "podMonitor.enabled or serviceMonitor.enabled")) -}}
{{- else -}}
{{- $old = append $old (printf "%s.%s is now %s.%s" $old_map $name $new_map (get $names $name | default $name)) -}}
{{- end -}}
{{- end -}}
{{- else if hasKey $.Values $old_map -}}
{{- $old = append $old (printf "%s is now %s" $old_map $new_map) -}}
{{- end -}}
{{- end -}}
{{- with $old -}}
{{- fail (printf "these values have new names: %s" (join "; " .)) -}}
{{- end -}}
{{- end }}

{{/* Stops where the cluster is known and has no such kind. `helm template` knows group versions only,
     and no kinds: it renders everything. */}}
{{- define "mps-exporter.requireKind" -}}
{{- $known := .root.Capabilities.APIVersions -}}
{{- if and ($known.Has "apps/v1/DaemonSet") (not ($known.Has (printf "monitoring.coreos.com/v1/%s" .kind))) -}}
{{- fail (printf "the cluster has no %s (monitoring.coreos.com/v1): install the Prometheus operator, or set %s.enabled=false" .kind .switch) -}}
{{- end -}}
{{- end }}

{{/* Directories to watch, as variables. */}}
{{- define "mps-exporter.directories" -}}
{{- $pipes := list -}}
{{- $logs := list -}}
{{- $root := .Values.devicePlugin.root -}}
{{- if eq .Values.layout "devicePlugin" }}
{{- range .Values.devicePlugin.resources }}
{{- $pipes = append $pipes (printf "%s/%s/pipe" $root .) }}
{{- $logs = append $logs (printf "%s/%s/log" $root .) }}
{{- end }}
{{- else if eq .Values.layout "plain" }}
{{- range .Values.plain.directories }}
{{- $pipes = append $pipes .pipe }}
{{- $logs = append $logs .log }}
{{- end }}
{{- end }}
{{- if $pipes }}
- {name: MPS_EXPORTER_MPS_PIPE_DIRECTORY, value: {{ join "," $pipes | quote }}}
- {name: MPS_EXPORTER_MPS_LOG_DIRECTORY, value: {{ join "," $logs | quote }}}
{{- end }}
{{- end }}

{{/* Nodes where daemons of this layout can be. */}}
{{- define "mps-exporter.nodeSelector" -}}
{{- if .Values.nodeSelector -}}
{{ toYaml .Values.nodeSelector }}
{{- else if eq .Values.layout "devicePlugin" -}}
nvidia.com/mps.capable: "true"
{{- else -}}
nvidia.com/gpu.present: "true"
{{- end -}}
{{- end }}

{{/* A duration of one unit, in milliseconds. */}}
{{- define "mps-exporter.milliseconds" -}}
{{- if hasSuffix "ms" . -}}
{{ trimSuffix "ms" . | int }}
{{- else if hasSuffix "m" . -}}
{{ mul (trimSuffix "m" . | int) 60000 }}
{{- else -}}
{{ mul (trimSuffix "s" . | int) 1000 }}
{{- end -}}
{{- end }}

{{/* The endpoint of a monitor; `root` is the chart, `name` that of the monitor's values. */}}
{{- define "mps-exporter.endpoint" -}}
{{- $monitor := index .root.Values .name -}}
{{- with $monitor }}
{{- if lt (include "mps-exporter.milliseconds" .interval | int) (include "mps-exporter.milliseconds" .scrapeTimeout | int) }}
{{- fail (printf "%s.interval (%s) is shorter than %s.scrapeTimeout (%s): Prometheus refuses that" $.name .interval $.name .scrapeTimeout) }}
{{- end }}
{{- end -}}
port: metrics
interval: {{ $monitor.interval }}
scrapeTimeout: {{ $monitor.scrapeTimeout }}
scheme: {{ $monitor.scheme | default (ternary "https" "http" (ne .root.Values.web.configSecret "")) }}
{{- if $monitor.honorLabels }}
honorLabels: true
{{- end }}
{{- with $monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  # The alerts know the job by this name, and dashboards show nodes.
  - targetLabel: job
    replacement: mps-exporter
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
  {{- with $monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What a monitor selects. */}}
{{- define "mps-exporter.monitored" -}}
{{- $monitor := index .root.Values .name -}}
selector:
  matchLabels:
    {{- include "mps-exporter.selector" .root | nindent 4 }}
{{- with $monitor.namespace }}
namespaceSelector:
  matchNames: [{{ include "mps-exporter.namespace" $.root }}]
{{- end }}
{{- with $monitor.sampleLimit }}
sampleLimit: {{ . | int }}
{{- end }}
{{- end }}

{{/* Name, namespace and labels of an object next to the exporter; `more` are labels of its own. */}}
{{- define "mps-exporter.metadata" -}}
name: {{ include "mps-exporter.fullname" .root }}{{ .suffix }}
namespace: {{ .namespace | default (include "mps-exporter.namespace" .root) }}
labels:
  {{- toYaml (mergeOverwrite (include "mps-exporter.labels" .root | fromYaml) (.more | default dict)) | nindent 2 }}
{{- end }}

{{/* A probe. With a web config, a request could lack a certificate or a password. */}}
{{- define "mps-exporter.probe" -}}
{{- $probe := dict "periodSeconds" .period "timeoutSeconds" 5 -}}
{{- if not (or .own.httpGet .own.tcpSocket .own.exec) -}}
{{- if .root.Values.web.configSecret -}}
{{- $_ := set $probe "tcpSocket" (dict "port" "metrics") -}}
{{- else -}}
{{- $_ := set $probe "httpGet" (dict "path" .path "port" "metrics") -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $probe .own) -}}
{{- end }}

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

{{- define "mps-exporter.selector" -}}
app.kubernetes.io/name: {{ include "mps-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mps-exporter.labels" -}}
{{ include "mps-exporter.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: exporter
{{- end }}

{{- define "mps-exporter.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Directories to watch, as pairs of flags. */}}
{{- define "mps-exporter.directories" -}}
{{- $root := .Values.devicePlugin.root -}}
{{- if eq .Values.layout "devicePlugin" }}
{{- range .Values.devicePlugin.resources }}
- --mps.pipe-directory={{ $root }}/{{ . }}/pipe
- --mps.log-directory={{ $root }}/{{ . }}/log
{{- end }}
{{- else if eq .Values.layout "plain" }}
{{- range .Values.plain.directories }}
- --mps.pipe-directory={{ .pipe }}
- --mps.log-directory={{ .log }}
{{- end }}
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

{{- define "mps-exporter.endpoint" -}}
{{- with .Values.monitor }}
{{- if lt (include "mps-exporter.milliseconds" .interval | int) (include "mps-exporter.milliseconds" .scrapeTimeout | int) }}
{{- fail (printf "monitor.interval (%s) is shorter than monitor.scrapeTimeout (%s): Prometheus refuses that" .interval .scrapeTimeout) }}
{{- end }}
{{- end -}}
port: metrics
interval: {{ .Values.monitor.interval }}
scrapeTimeout: {{ .Values.monitor.scrapeTimeout }}
scheme: {{ .Values.monitor.scheme }}
{{- with .Values.monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  # The alerts know the job by this name, and dashboards show nodes.
  - targetLabel: job
    replacement: mps-exporter
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
{{- end }}

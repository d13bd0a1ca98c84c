{{- define "h2o.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "h2o.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "h2o.labels" -}}
{{ include "h2o.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{/* The secret that holds the hub token, or nothing. */}}
{{- define "h2o.hubSecret" -}}
{{- if .Values.hubToken.existingSecret -}}
{{ .Values.hubToken.existingSecret }}
{{- else if .Values.hubToken.value -}}
{{ include "h2o.name" . }}-hub-token
{{- end -}}
{{- end -}}

{{- /* As many replicas as there can be. */}}
{{- define "h2o.replicas" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}{{ else }}{{ .Values.replicaCount }}{{ end }}
{{- end }}

{{- /* Seconds that a pod may take to end: both parts of a drain, and what is left of the server's end. */}}
{{- define "h2o.endSeconds" -}}
{{- add .Values.drain.unannouncedSeconds .Values.drain.seconds 30 -}}
{{- end }}

{{- /* How quickly replicas may go: one at a time, and a replica that goes takes its prefix cache along. */}}
{{- define "h2o.scaling" -}}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - type: Pods
      value: 1
      periodSeconds: {{ include "h2o.endSeconds" . }}
{{- end }}

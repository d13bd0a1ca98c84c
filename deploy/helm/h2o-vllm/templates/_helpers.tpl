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

{{- /* The kinds of servers: one, or one for each side. With as many replicas as there can be. */}}
{{- define "h2o.sides" -}}
{{- if .Values.apart.enabled }}
- {suffix: -prefill, component: prefill, role: kv_producer, replicas: {{ .Values.apart.prefillReplicas }}}
- {suffix: -decode, component: decode, role: kv_consumer, replicas: {{ .Values.replicaCount }}}
{{- else if .Values.autoscaling.enabled }}
- {suffix: "", replicas: {{ .Values.autoscaling.maxReplicas }}}
{{- else }}
- {suffix: "", replicas: {{ .Values.replicaCount }}}
{{- end }}
{{- end }}

{{- /* Replicas of all sides. */}}
{{- define "h2o.replicas" -}}
{{- $sum := 0 }}
{{- range include "h2o.sides" . | fromYamlArray }}{{ $sum = add $sum .replicas }}{{ end }}
{{- $sum }}
{{- end }}

{{- /* How prompts go from one side to the other: called with (list . role). */}}
{{- define "h2o.transfer" -}}
{{- $apart := (index . 0).Values.apart }}
{{- $extra := dict "shared_storage_path" "/prompts" "max_folder_gib" (divf (mul 9 $apart.folder.sizeGi) 10) }}
{{- dict "kv_connector" "ExampleConnector" "kv_role" (index . 1) "kv_connector_extra_config" $extra | toJson }}
{{- end }}

{{- /* What the key is read from that clients send. */}}
{{- define "h2o.apiKey" -}}
valueFrom:
  secretKeyRef:
    name: {{ .Values.apiKey.existingSecret }}
    key: {{ .Values.apiKey.key }}
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

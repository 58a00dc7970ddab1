{{- /* Not the operator's labels: its selectors would take the test's pod for one of its own. */ -}}
{{- define "weightsync.testLabels" -}}
app.kubernetes.io/name: weightsync-test
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Nothing is left, also of a failed test: Helm shows its log before. Older ones can't, and leave the pod. */ -}}
{{- define "weightsync.testAnnotations" -}}
{{- $top := index . 0 -}}
{{- $shows := semverCompare ">=3.18.0-0" $top.Capabilities.HelmVersion.Version -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ index . 1 | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded{{ if $shows }},hook-failed{{ end }}
{{- if $shows }}
helm.sh/hook-output-log-policy: hook-succeeded,hook-failed
{{- end }}
{{- end }}

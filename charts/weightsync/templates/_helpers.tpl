{{- define "weightsync.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 39 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end }}

{{- define "weightsync.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "weightsync.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | required "serviceAccount.name: name the ServiceAccount that there is, or let serviceAccount.create be true" -}}
{{- end -}}
{{- end }}

{{- /* Of pods too: agents' NetworkPolicies let in pods whose app.kubernetes.io/name is weightsync, whatever the release. */ -}}
{{- define "weightsync.selectorLabels" -}}
app.kubernetes.io/name: weightsync
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "weightsync.labels" -}}
{{ include "weightsync.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* An image's whole name. Takes the context and the image's values. */ -}}
{{- define "weightsync.image" -}}
{{- $top := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $top.Values.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $top.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Pod Security level restricted; see https://kubernetes.io/docs/concepts/security/pod-security-standards/ */ -}}
{{- define "weightsync.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "weightsync.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What the operator does in the namespaces that it watches. A test compares it with what it asks for. */ -}}
{{- define "weightsync.rules" -}}
- apiGroups: [weightsync.dev]
  resources: [weightsyncs]
  verbs: [list, watch]
- apiGroups: [weightsync.dev]
  resources: [weightsyncs/status]
  verbs: [patch]
# Children's owner references block the deletion of the WeightSync until they are gone.
- apiGroups: [weightsync.dev]
  resources: [weightsyncs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  # Those of an earlier revision that hold nothing are ended at once.
  verbs: [list, watch, delete]
# Server-side apply is a patch, and a creation where there is none. All but budgets go with their WeightSync.
- apiGroups: [""]
  resources: [configmaps, secrets, services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end }}

{{- define "weightsync.subject" -}}
- kind: ServiceAccount
  name: {{ include "weightsync.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{- /* Where the test's WeightSync is made: where the operator acts. */ -}}
{{- define "weightsync.testNamespace" -}}
{{- if or (not .Values.watchNamespaces) (has .Release.Namespace .Values.watchNamespaces) -}}
{{- .Release.Namespace -}}
{{- else -}}
{{- first .Values.watchNamespaces -}}
{{- end -}}
{{- end }}

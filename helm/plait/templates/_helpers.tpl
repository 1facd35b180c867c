{{/* Name of all resources: a DNS-1035 label that leaves room for what KubeRay appends. */}}
{{- define "plait.fullname" -}}
{{- $release := .Release.Name -}}
{{- if not (regexMatch "^[a-z].*plait|^plait" $release) -}}
{{- $release = printf "plait-%s" $release -}}
{{- end -}}
{{- .Values.fullnameOverride | default $release | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "plait.selectorLabels" -}}
app.kubernetes.io/name: plait
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "plait.labels" -}}
{{ include "plait.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "plait.workerSelector" -}}
{{ include "plait.selectorLabels" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{- define "plait.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "plait.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "plait.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* Name of the claim that holds the weights. */}}
{{- define "plait.claimName" -}}
{{- if eq .Values.weights.source "claim" -}}
{{ include "plait.fullname" . }}-weights
{{- else -}}
{{ required "weights.source is existingClaim: set weights.existingClaim" .Values.weights.existingClaim }}
{{- end -}}
{{- end -}}

{{/* The settings of the server, as `plait.deploy.app:build` takes them. The API key is not one of them. */}}
{{- define "plait.settings" -}}
{{- $owned := dict "host" "0.0.0.0" "load_timeout_s" .Values.loadTimeout "drain_timeout_s" .Values.drainTimeout -}}
{{- merge $owned .Values.engine .Values.server | toYaml -}}
{{- end -}}

{{/* Bytes of Ray's object store: half of /dev/shm. */}}
{{- define "plait.objectStoreBytes" -}}
{{- $size := .Values.shm.size -}}
{{- $mib := trimSuffix "Mi" $size | int64 -}}
{{- if hasSuffix "Gi" $size -}}
{{- $mib = mul (trimSuffix "Gi" $size | int64) 1024 -}}
{{- end -}}
{{- if lt $mib 512 -}}
{{- fail (printf "shm.size is %s; Ray's object store and NCCL need at least 512Mi" $size) -}}
{{- end -}}
{{- div (mul $mib 1048576) 2 -}}
{{- end -}}

{{/* Values that only make sense together. */}}
{{- define "plait.check" -}}
{{- $tp := int .Values.engine.tensor_parallel_size -}}
{{- $pods := int .Values.worker.podsPerReplica -}}
{{- if mod $tp $pods -}}
{{- fail (printf "worker.podsPerReplica is %d, which does not divide engine.tensor_parallel_size %d" $pods $tp) -}}
{{- end -}}
{{- $processes := add 1 .Values.server.num_ingress -}}
{{- if lt (int .Values.server.metrics_ports) (int $processes) -}}
{{- fail (printf "server.metrics_ports is %d; one replica and %d HTTP fronts on one pod need %d" (int .Values.server.metrics_ports) (int .Values.server.num_ingress) (int $processes)) -}}
{{- end -}}
{{- if gt (add .Values.server.metrics_port .Values.server.metrics_ports) 65536 -}}
{{- fail "server.metrics_port + server.metrics_ports goes beyond port 65535" -}}
{{- end -}}
{{- if and (ne .Values.weights.source "none") (not (hasPrefix (printf "%s/" .Values.weights.mountPath) (printf "%s/" (.Values.server.model | default "")))) -}}
{{- fail (printf "weights are mounted at %s, but server.model is %q, which is not there" .Values.weights.mountPath (.Values.server.model | default "")) -}}
{{- end -}}
{{- if and (eq .Values.weights.source "emptyDir") (not .Values.weights.emptyDir.command) -}}
{{- fail "weights.source is emptyDir: set weights.emptyDir.command, which fills it" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas %d is above maxReplicas %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

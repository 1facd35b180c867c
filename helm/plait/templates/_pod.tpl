{{/* The pod of a head or a worker; takes a dict of `root`, `role` and `values` (those of the role). */}}
{{- define "plait.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $isWorker := eq .role "worker" -}}
{{- $claims := list "claim" "existingClaim" -}}
metadata:
  labels:
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "plait.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "plait.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and $values.autoscaling.enabled (not $isWorker) }}
  terminationGracePeriodSeconds: {{ add $values.drainTimeout 30 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- if eq $values.weights.source "emptyDir" }}
  initContainers:
    - name: fetch-weights
      image: {{ $values.weights.emptyDir.image | default (include "plait.image" $root) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command:
        {{- toYaml $values.weights.emptyDir.command | nindent 8 }}
      {{- with $values.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "plait.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: weights
          mountPath: {{ $values.weights.mountPath }}
  {{- end }}
  containers:
    - name: ray-{{ .role }}
      image: {{ include "plait.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "plait.containerSecurity" $root | nindent 8 }}
      env:
        - name: RAY_SERVE_ENABLE_HA_PROXY
          value: {{ ternary "1" "0" $values.ray.haproxy | quote }}
        {{- if $values.apiKey.existingSecret }}
        - name: PLAIT_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ $values.apiKey.existingSecret }}
              key: {{ $values.apiKey.secretKey }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if $isWorker }}
        - name: serve
          containerPort: {{ $values.server.port }}
        {{- range $index := until (int $values.server.metrics_ports) }}
        - name: metrics-{{ $index }}
          containerPort: {{ add $values.server.metrics_port $index }}
        {{- end }}
        {{- else }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: client
          containerPort: 10001
        {{- end }}
      {{- include "plait.probes" (dict "root" $root "isWorker" $isWorker) | nindent 6 }}
      resources:
        {{- include (printf "plait.%sResources" .role) $root | nindent 8 }}
      volumeMounts:
        - name: shm
          mountPath: /dev/shm
        {{- if ne $values.weights.source "none" }}
        - name: weights
          mountPath: {{ $values.weights.mountPath }}
          readOnly: true
        {{- end }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $values.shm.size }}
    {{- if ne $values.weights.source "none" }}
    - name: weights
      {{- if has $values.weights.source $claims }}
      persistentVolumeClaim:
        claimName: {{ include "plait.claimName" $root }}
      {{- else if eq $values.weights.source "hostPath" }}
      hostPath:
        path: {{ required "weights.source is hostPath: set weights.hostPath" $values.weights.hostPath }}
        type: Directory
      {{- else }}
      emptyDir:
        sizeLimit: {{ $values.weights.emptyDir.sizeLimit }}
      {{- end }}
    {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "plait.containerSecurity" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/*
Start-up and liveness ask the raylet, so that a slow load kills no pod; readiness of a worker asks
the HTTP proxy. A replica that loads too long or hangs is Serve's and the engine's to replace.
*/}}
{{- define "plait.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $period := int $probes.periodSeconds -}}
{{- $raylet := "{path: /api/local_raylet_healthz, port: 52365}" -}}
startupProbe:
  httpGet: {{ $raylet }}
  periodSeconds: {{ $period }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ div (add .root.Values.loadTimeout $period -1) $period }}
livenessProbe:
  httpGet: {{ $raylet }}
  periodSeconds: {{ $period }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.livenessFailureThreshold }}
readinessProbe:
  {{- if .isWorker }}
  httpGet: {path: /-/healthz, port: serve}
  {{- else }}
  httpGet: {{ $raylet }}
  {{- end }}
  periodSeconds: {{ $period }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.readinessFailureThreshold }}
{{- end -}}

{{- define "plait.headResources" -}}
{{ toYaml .Values.head.resources }}
{{- end -}}

{{/* Resources of a worker, with the GPUs of its share of the ranks. */}}
{{- define "plait.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- if eq .Values.engine.device "cuda" -}}
{{- $gpus := div .Values.engine.tensor_parallel_size .Values.worker.podsPerReplica -}}
{{- $limits := merge (dict .Values.worker.gpuResource $gpus) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

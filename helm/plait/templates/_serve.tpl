{{/* Serve's own config file: the application, and its autoscaling. */}}
{{- define "plait.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.server.port }}
applications:
  - name: plait
    route_prefix: /
    import_path: plait.deploy.app:build
    args:
      {{- include "plait.settings" . | nindent 6 }}
    {{- with .Values.autoscaling }}
    {{- if .enabled }}
    deployments:
      - name: replica
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ .minReplicas }}
          max_replicas: {{ .maxReplicas }}
          target_ongoing_requests: {{ .targetOngoingRequests }}
          downscale_delay_s: {{ .downscaleDelay }}
    {{- end }}
    {{- end }}
{{- end -}}

{{/* A file of manifests/base, in the namespace of the release. */}}
{{- define "gpu-bridge.base" -}}
{{- $file := printf "base/%s" .file -}}
{{- $text := .root.Files.Get $file -}}
{{- if not $text -}}{{- fail (printf "the chart has no %s: package it with its links followed" $file) -}}{{- end -}}
{{- $text | replace "namespace: gpu-bridge" (printf "namespace: %s" .root.Release.Namespace)
          | replace "system:serviceaccount:gpu-bridge:" (printf "system:serviceaccount:%s:" .root.Release.Namespace) -}}
{{- end -}}

{{- define "mgpu.labels" -}}
app.kubernetes.io/name: mgpu
app.kubernetes.io/part-of: mgpu
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* The image of a dict with repository, tag and digest; the second item is the default tag. */}}
{{- define "mgpu.imageOf" -}}
{{- $image := index . 0 -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default (index . 1) }}{{ end }}
{{- end }}

{{- define "mgpu.image" }}{{ include "mgpu.imageOf" (list .Values.image .Chart.AppVersion) }}{{ end }}

{{- define "mgpu.kubeSchedulerImage" -}}
{{- $version := regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" .Capabilities.KubeVersion.Version -}}
{{ include "mgpu.imageOf" (list .Values.secondScheduler.image $version) }}
{{- end }}

{{- /*
Whether Helm can read the cluster. `helm template`, a dry run without =server and Argo CD cannot: `lookup` returns nothing
then. What the chart would have to keep would be made anew each time, so it is not made without a cluster.
*/}}
{{- define "mgpu.readsCluster" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}true{{ end }}
{{- end }}

{{- /*
The CA of each process, by process: {bundle, certificate, key}. Computed once for each rendering, because genCA returns
another CA at each call. A CA that is there stays, also that of certificates.sh.
*/}}
{{- define "mgpu.authorities" -}}
{{- if not (hasKey $ "mgpuAuthorities") -}}
  {{- $authorities := dict -}}
  {{- range $process := list "webhook" "scheduler" -}}
    {{- $found := lookup "v1" "Secret" $.Release.Namespace (printf "mgpu-%s-tls" $process) -}}
    {{- $data := ($found | default dict).data | default dict -}}
    {{- if and (index $data "ca.crt") (index $data "ca.key") -}}
      {{- $_ := set $authorities $process (dict "bundle" (index $data "ca.crt")) -}}
    {{- else if $found -}}
      {{- fail (printf "the Secret mgpu-%s-tls has no CA (ca.crt, ca.key): delete it, or run manifests/certificates.sh" $process) -}}
    {{- else if include "mgpu.readsCluster" $ -}}
      {{- $name := printf "mgpu-%s CA %s" $process (dateInZone "2006-01-02 15:04:05" (now) "UTC") -}}
      {{- $ca := genCAWithKey $name (int $.Values.certificates.days) (genPrivateKey "ecdsa") -}}
      {{- $_ := set $authorities $process (dict "bundle" ($ca.Cert | b64enc) "certificate" $ca.Cert "key" $ca.Key) -}}
    {{- else -}}
      {{- fail "certificates.mode=generate needs a cluster that Helm can read, because a new CA each time would lock the API servers out. With `helm template`, Argo CD and client-side dry runs set certificates.mode to cert-manager, existing or script, or render with --dry-run=server (docs/install.md, With Helm)" -}}
    {{- end -}}
  {{- end -}}
  {{- $_ := set $ "mgpuAuthorities" $authorities -}}
{{- end -}}
{{- end }}

{{- /* The line `caBundle` of a webhook that leads to the Service (list $ "mgpu-webhook"), or nothing. */}}
{{- define "mgpu.caBundle" -}}
{{- $root := index . 0 -}}
{{- $process := trimPrefix "mgpu-" (index . 1) -}}
{{- $bundle := "" -}}
{{- if eq $root.Values.certificates.mode "generate" -}}
  {{- include "mgpu.authorities" $root -}}
  {{- $bundle = (index ($root.mgpuAuthorities | default dict) $process | default dict).bundle -}}
{{- else if eq $root.Values.certificates.mode "existing" -}}
  {{- $bundle = (index $root.Values.certificates.existing $process).caBundle | b64enc -}}
{{- end -}}
{{- with $bundle }}caBundle: {{ . }}{{ end }}
{{- end }}

{{- /* The annotation with which cert-manager sets the CA bundle (list $ "mgpu-webhook"), or nothing. */}}
{{- define "mgpu.injection" -}}
{{- $root := index . 0 -}}
{{- if eq $root.Values.certificates.mode "cert-manager" -}}
annotations: {cert-manager.io/inject-ca-from: {{ $root.Release.Namespace }}/{{ index . 1 }}}
{{- end }}
{{- end }}

{{- /* The `issuerRef` of the certificates: that of the values, or the Issuer with the self-signed CA of the chart. */}}
{{- define "mgpu.issuer" -}}
{{- with .Values.certificates.certManager.issuerRef }}{{ toYaml . }}{{ else -}}
name: mgpu
kind: Issuer
{{- end }}
{{- end }}

{{- /* The Secret with the certificate of a process (list $ "webhook"), or nothing if the process makes its own. */}}
{{- define "mgpu.certificateSecret" -}}
{{- $root := index . 0 -}}
{{- $process := index . 1 -}}
{{- if eq $root.Values.certificates.mode "cert-manager" }}mgpu-{{ $process }}-cert
{{- else if eq $root.Values.certificates.mode "existing" -}}
{{ required (printf "certificates.existing.%s.secretName is required with certificates.mode=existing" $process) (index $root.Values.certificates.existing $process).secretName }}
{{- end }}
{{- end }}

{{- /* Whether the settings say who may call the admission endpoints. */}}
{{- define "mgpu.settingsNameCallers" -}}
{{- $webhook := .Values.settings.webhook | default dict -}}
{{- $scheduler := .Values.settings.scheduler | default dict -}}
{{- if or .Values.apiServers.clientCertificates.enabled $webhook.apiServers $scheduler.apiServers $webhook.clientCa $scheduler.clientCa }}true{{ end }}
{{- end }}

{{- /* The addresses of the API servers with commas, or nothing: the values, or the EndpointSlices of the Service kubernetes. */}}
{{- define "mgpu.apiServers" -}}
{{- if .Values.apiServers.addresses -}}
  {{- join "," .Values.apiServers.addresses -}}
{{- else if and .Values.apiServers.detect (not (include "mgpu.settingsNameCallers" .)) -}}
  {{- $addresses := list -}}
  {{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "").items -}}
    {{- if eq (index (.metadata.labels | default dict) "kubernetes.io/service-name" | default "") "kubernetes" -}}
      {{- range .endpoints }}{{ $addresses = concat $addresses (.addresses | default list) }}{{ end -}}
    {{- end -}}
  {{- end -}}
  {{- if not $addresses -}}
    {{- fail "apiServers.addresses is empty, and Helm cannot read the cluster (helm template, Argo CD) or the Service kubernetes has no addresses: set apiServers.addresses (docs/install.md, API servers)" -}}
  {{- end -}}
  {{- $addresses | uniq | sortAlpha | join "," -}}
{{- end -}}
{{- end }}

{{- /* `from` of the NetworkPolicies of the admission ports, or nothing. */}}
{{- define "mgpu.narrowNetwork" -}}
{{- if .Values.networkPolicy.narrow -}}
{{- $addresses := include "mgpu.apiServers" . | required "networkPolicy.narrow needs apiServers.addresses, or addresses that are detected" -}}
from:
{{- range splitList "," $addresses }}
{{- $block := trim . }}
{{- if not (contains "/" $block) }}{{ $block = printf "%s/%s" $block (ternary "128" "32" (contains ":" $block)) }}{{ end }}
  - ipBlock: {cidr: {{ $block | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* Whether the CRD Device belongs to the release: not if somebody else (Koordinator) has made it. */}}
{{- define "mgpu.ownsDevices" -}}
{{- if eq .Values.crds.devices "auto" -}}
  {{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "devices.scheduling.koordinator.sh" -}}
  {{- if or (not $found) (eq (index (($found.metadata | default dict).labels | default dict) "app.kubernetes.io/part-of" | default "") "mgpu") }}true{{ end }}
{{- else }}{{ .Values.crds.devices }}{{ end }}
{{- end }}

{{- /* The file of settings. `settings` has precedence over what other values set. */}}
{{- define "mgpu.settings" -}}
{{- $derived := dict "dialects" (deepCopy .Values.vocabularies) -}}
{{- if and .Values.secondScheduler.enabled .Values.secondScheduler.assignPods -}}
  {{- $_ := set $derived "webhook" (dict "schedulerName" "mgpu-scheduler") -}}
{{- end -}}
{{- $agent := dict -}}
{{- if eq .Values.devicePlugin.isolation "mps" }}{{ $_ := set $agent "isolation" "mps" }}{{ end -}}
{{- if and .Values.slices.enabled .Values.slices.migManager }}{{ $_ := set $agent "migManager" true }}{{ end -}}
{{- if ne .Values.devicePlugin.kubeletDir "/var/lib/kubelet" }}{{ $_ := set $agent "kubeletDir" .Values.devicePlugin.kubeletDir }}{{ end -}}
{{- if ne .Values.devicePlugin.runtimeDir "/run/containerd" -}}
  {{- $socket := ternary "crio.sock" "containerd.sock" (contains "crio" .Values.devicePlugin.runtimeDir) -}}
  {{- $_ := set $agent "criSocket" (printf "%s/%s" .Values.devicePlugin.runtimeDir $socket) -}}
{{- end -}}
{{- if $agent }}{{ $_ := set $derived "deviceplugin" $agent }}{{ end -}}
{{- if ne .Release.Namespace "mgpu-system" -}}
  {{- $_ := set $derived "webhook" (merge (dict "namespace" .Release.Namespace) ($derived.webhook | default dict)) -}}
  {{- $_ := set $derived "scheduler" (dict "namespace" .Release.Namespace) -}}
  {{- $_ := set $derived.dialects "slices" (merge (dict "DevicePluginCMNamespace" .Release.Namespace) $derived.dialects.slices) -}}
{{- end -}}
{{- mergeOverwrite $derived (deepCopy .Values.settings) | toYaml -}}
{{- end }}

{{- /* The affinity of a Deployment, if the values have none. The argument is the process, such as "webhook". */}}
{{- define "mgpu.affinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {app.kubernetes.io/name: mgpu, app.kubernetes.io/component: {{ . }}}
{{- end }}

{{- /* Its topology spread constraints, likewise. */}}
{{- define "mgpu.spread" -}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {app.kubernetes.io/name: mgpu, app.kubernetes.io/component: {{ . }}}
{{- end }}

{{- /*
The annotations of the pods (list $ values), with values as .Values.webhook. Pods read settings when they start, so a
change of the checksum replaces them.
*/}}
{{- define "mgpu.podAnnotations" -}}
checksum/config: {{ include "mgpu.settings" (index . 0) | sha256sum }}
{{- with (index . 1).podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

#!/bin/sh
# Tries whether the API server that kubectl points at asks mgpu about GPU pods and Bindings. Writes nothing (dry runs).
#
#   API_SERVERS=192.0.2.0/28,…  what is allowed to call so far, for the command that it proposes
#   MGPU_NAMESPACE=mgpu-system  as for certificates.sh
#   TRIES=15                    how often it asks about a Binding, every 2 s
set -eu

NAMESPACE=${MGPU_NAMESPACE:-mgpu-system}
REFUSES='does not accept calls from '
TRIES=${TRIES:-15}
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
trap 'exit 1' HUP INT TERM # dash runs no EXIT trap when a signal ends it, and the folder may hold private keys

say() { printf '%s\n' "$*"; }

# A Pod that asks in two vocabularies is denied under all settings: that mgpu denies it proves that it was asked. Nothing
# is created (dry run).
webhook_is_asked() {
    said=$(kubectl create --dry-run=server -f - 2>&1 <<'YAML'
apiVersion: v1
kind: Pod
metadata: {name: mgpu-deploy, namespace: default}
spec:
  restartPolicy: Never
  securityContext: {runAsNonRoot: true, runAsUser: 65534, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: deploy
      image: mgpu
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      resources:
        requests: {vke.volcengine.com/mgpu-core: "1", aliyun.com/gpu-mem: "1"}
        limits: {vke.volcengine.com/mgpu-core: "1", aliyun.com/gpu-mem: "1"}
YAML
    ) || true
    case $said in
    # The second is how kubectl shows a denial that names its causes.
    *'.mgpu.io" denied'* | *'a pod uses one vocabulary'*) return 0 ;;
    *"$REFUSES"*)
        peer=${said#*"$REFUSES"} && peer=${peer%%: *}
        say "deploy.sh: mgpu refuses the API server, whose calls come from $peer. If that is its address and not that of a pod, run" >&2
        say "    API_SERVERS=${API_SERVERS:+$API_SERVERS,}$peer make deploy …    (docs/install.md, API servers)" >&2
        ;;
    *) say "the API server does not ask mgpu's webhook; the answer to a trial Pod: $said" >&2 ;;
    esac
    return 1
}

# The same for Bindings. They pass where mgpu is not reached, and a new leader takes a while: it is asked again.
bindings_are_asked() {
    cat >"$top/binding.json" <<'JSON'
{"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "mgpu-deploy", "namespace": "default"}, "target": {"kind": "Node", "name": "mgpu-deploy"}}
JSON
    tries=$TRIES
    while [ "$tries" -gt 0 ]; do
        said=$(kubectl create --raw '/api/v1/namespaces/default/pods/mgpu-deploy/binding?dryRun=All' \
            -f "$top/binding.json" 2>&1) || true
        case $said in *'.mgpu.io" denied'*) return 0 ;; esac
        tries=$((tries - 1))
        [ "$tries" = 0 ] || sleep 2
    done
    say "the API server does not ask mgpu about Bindings, so cards are decided late: kubectl mgpu doctor, and" >&2
    say "    kubectl -n $NAMESPACE logs deployment/mgpu-scheduler --all-pods | grep 'Refused calls'" >&2
    return 1
}

# The API server reads a claim before it asks about it, so no dry run shows this without a claim. The webhook for claims
# has the Service and the port of that for Bindings, so it is asked if it also trusts the same CA.
claims_are_asked() {
    tries=$TRIES
    while [ "$tries" -gt 0 ]; do
        [ "$(bundle_of mgpu-claims)" != "$(bundle_of mgpu-scheduler)" ] || return 0
        tries=$((tries - 1))
        [ "$tries" = 0 ] || sleep 2
    done
    say 'the webhook for ResourceClaims trusts another CA than that for Bindings, so no claim gets cards: run manifests/certificates.sh' >&2
    return 1
}

bundle_of() {
    kubectl get mutatingwebhookconfiguration "$1" -o jsonpath='{.webhooks[0].clientConfig.caBundle}'
}

webhook_is_asked
bindings_are_asked
if [ -n "$(kubectl get mutatingwebhookconfiguration mgpu-claims --ignore-not-found -o name)" ]; then
    claims_are_asked
fi
say 'the API server asks mgpu about GPU pods and Bindings'

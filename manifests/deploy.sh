#!/bin/sh
# Applies a kustomization to the cluster that kubectl points at, and waits until mgpu answers.
#
#   manifests/deploy.sh [FOLDER]     FOLDER: manifests/base, an overlay, or one of your own
#   IMAGE=images.example/mgpu:0.1.0  the image to run in place of the kustomization's
#   API_SERVERS=192.0.2.0/28,…       where the API servers' calls come from; default: what was given last time, else the
#                                    addresses of the Service `kubernetes` (docs/install.md, API servers)
#   CA=rotate                        make new certificate authorities; CA=settle later forgets the old ones
#                                    (manifests/certificates.sh, docs/operations.md)
#   NARROW_NETWORK=yes               let the NetworkPolicies of the admission ports admit these addresses only
#   WAIT=300                         seconds for the webhook and the scheduler to be ready
#
# What the folder says holds over what was changed on the cluster since (kubectl edit, scale, rollout undo).
set -eu

NAMESPACE=mgpu-system
DEVICES=devices.scheduling.koordinator.sh
WAIT=${WAIT:-300}
folder=${1:-manifests/base}
here=$(dirname "$0")
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
trap 'exit 1' HUP INT TERM # dash runs no EXIT trap when a signal ends it, and the folder may hold private keys

say() { printf '%s\n' "$*"; }
fail() { say "$*" >&2 && exit 2; }

# What is laid over the folder: each part appends to one of these, and assemble makes a kustomization of them.
: >"$top/images" && : >"$top/patches" && : >"$top/generators"
kubectl kustomize "$folder" >"$top/rendered.yaml"

assemble() {
    say 'resources: [rendered.yaml]'
    [ ! -s "$top/images" ] || { say 'images:' && cat "$top/images"; }
    [ ! -s "$top/patches" ] || { say 'patches:' && cat "$top/patches"; }
    [ ! -s "$top/generators" ] || { say 'configMapGenerator:' && cat "$top/generators"; }
}

put_in_image() {
    case ${IMAGE##*/} in
    *:*) name=${IMAGE%:*} tag=${IMAGE##*:} ;;
    *) fail "IMAGE has no tag: $IMAGE" ;;
    esac
    # An image is found by the name that it has now, and the folder may have given it another one already.
    now=$(sed -n 's/^ *image: \(.*mgpu\):[^:]*$/\1/p' "$top/rendered.yaml" | sort -u)
    [ -n "$now" ] || fail "no image in $folder is named mgpu, so IMAGE is not put in: name it there"
    say "  - {name: \"$now\", newName: \"$name\", newTag: \"$tag\"}" >>"$top/images"
}

keep_the_crd_of_others() {
    made_by=$(kubectl get customresourcedefinition "$DEVICES" --ignore-not-found \
        -o jsonpath='[{.metadata.labels.app\.kubernetes\.io/part-of}]')
    case $made_by in
    '' | '[mgpu]') ;;
    *)
        say "the CRD $DEVICES is there already and is not mgpu's (Koordinator's?): it stays as it is"
        cat >>"$top/patches" <<YAML
  - target: {kind: CustomResourceDefinition, name: $DEVICES}
    patch: '{"\$patch": delete, apiVersion: any, kind: any, metadata: {name: any}}'
YAML
        ;;
    esac
}

# The ConfigMap that the running webhook takes its API servers from; its name has a hash of its content.
running_api_servers() {
    kubectl -n "$NAMESPACE" get deployment mgpu-webhook --ignore-not-found -o go-template='{{range .spec.template.spec.containers}}{{range .env}}{{if eq .name "MGPU_WEBHOOK__APISERVERS"}}{{with .valueFrom}}{{with .configMapKeyRef}}{{.name}}{{end}}{{end}}{{end}}{{end}}{{end}}'
}

# Sets api_servers and given_by (`hand` or `detection`). Empty: the folder says itself who may call.
find_api_servers() {
    api_servers='' given_by=hand
    if [ -n "${API_SERVERS:-}" ]; then
        api_servers=$API_SERVERS
        return
    fi
    # The folder's own settings or client certificates decide; the environment would override them.
    ! grep -Eq '(apiServers|clientCa):|MGPU_(WEBHOOK|SCHEDULER)__CLIENTCA' "$top/rendered.yaml" || return 0
    grep -q 'MGPU_WEBHOOK__APISERVERS' "$top/rendered.yaml" || return 0
    configmap=$(running_api_servers)
    if [ -n "$configmap" ]; then
        api_servers=$(kubectl -n "$NAMESPACE" get configmap "$configmap" --ignore-not-found \
            -o go-template='{{if eq .data.givenBy "hand"}}{{.data.apiServers}}{{end}}')
    fi
    [ -z "$api_servers" ] || return 0
    given_by=detection
    api_servers=$(kubectl -n default get endpointslices -l kubernetes.io/service-name=kubernetes -o go-template='{{range .items}}{{range .endpoints}}{{range .addresses}}{{.}}{{"\n"}}{{end}}{{end}}{{end}}' | sort -u | paste -sd, -)
    [ -n "$api_servers" ] || fail 'the Service kubernetes names no addresses of API servers: set API_SERVERS (docs/install.md, API servers)'
}

put_in_api_servers() {
    find_api_servers
    [ -n "$api_servers" ] || return 0
    say "the admission endpoints admit calls from $api_servers"
    cat >>"$top/generators" <<YAML
  - name: mgpu-api-servers
    namespace: $NAMESPACE
    literals: ["apiServers=$api_servers", "givenBy=$given_by"]
    options:
      labels: {app.kubernetes.io/name: mgpu, app.kubernetes.io/part-of: mgpu}
YAML
    [ "${NARROW_NETWORK:-no}" = yes ] || return 0
    from=$(say "$api_servers" | tr ',' '\n' | awk '
        { gsub(/ /, "") } !NF { next }
        !/\// { $0 = $0 (/:/ ? "/128" : "/32") }
        { printf "%s{ipBlock: {cidr: \"%s\"}}", (n++ ? ", " : ""), $0 }')
    for policy in mgpu-webhook mgpu-scheduler; do
        cat >>"$top/patches" <<YAML
  - target: {kind: NetworkPolicy, name: $policy}
    patch: |
      - {op: add, path: /spec/ingress/0/from, value: [$from]}
YAML
    done
}

apply() {
    rendered=$(kubectl kustomize "$top" | awk -v image="${IMAGE:-}" '
        image && occupy && $1 == "value:" { sub(/value: .*/, "value: " image) }
        { occupy = /name: MGPU_DIALECTS__MTGPU__OCCUPYIMAGE/; print }')
    printf '%s\n' "$rendered" >"$top/applied.yaml"
    kubectl apply --server-side --force-conflicts --field-manager=mgpu -f "$top/applied.yaml" >"$top/applied" ||
        { cat "$top/applied" && exit 1; }
    cat "$top/applied"
}

# Whether the processes serve under the CA of certificates.sh: not with cert-manager, or files of the user's own.
has_own_authority() {
    grep -q '^  name: mgpu-webhook$' "$top/rendered.yaml" && ! grep -Eq 'certDir:|--cert-dir=' "$top/rendered.yaml"
}

# The scheduler of the folder mounts the key that records are sealed with.
has_record_key() { grep -q 'secretName: mgpu-record-key$' "$top/rendered.yaml"; }

make_authorities_and_keys() {
    has_own_authority || has_record_key || return 0
    kubectl apply --server-side --force-conflicts --field-manager=mgpu -f "$here/base/namespace.yaml"
    if has_own_authority; then CA=${CA:-keep} "$here/certificates.sh"; fi
    if has_record_key; then "$here/record-keys.sh"; fi
}

trust_authorities() {
    has_own_authority || return 0
    # On the first deployment the webhook configurations were not there before.
    CA=keep "$here/certificates.sh"
}

# A role that an earlier version had, or another overlay, would stay and go on giving its rights. The webhook of claims
# would deny every allocation, and the DeviceClass would direct pods to cards that nobody publishes.
remove_former_parts() {
    grep -q '^serviceaccount/mgpu-' "$top/applied" || return 0
    remove_former rbac.authorization.k8s.io clusterrolebindings,clusterroles,rolebindings,roles
    remove_former admissionregistration.k8s.io mutatingwebhookconfigurations
    # Kubernetes before 1.34 has no DeviceClasses of this version.
    remove_former resource.k8s.io deviceclasses 2>/dev/null
}

remove_former() {
    kubectl get "$2" --all-namespaces -l app.kubernetes.io/part-of=mgpu \
        -o go-template='{{range .items}}{{.kind}} {{.metadata.name}} {{with .metadata.namespace}}{{.}}{{end}}{{"\n"}}{{end}}' |
        while read -r kind name namespace; do
            current "$kind.$1/$name" || kubectl ${namespace:+-n "$namespace"} delete "$kind" "$name"
        done
}

# Succeeds for what was applied now, and for what is not named as mgpu names things.
current() {
    case $1 in */mgpu-*) ;; *) return 0 ;; esac
    grep -qi "^$1 " "$top/applied"
}

answers() {
    kubectl -n "$NAMESPACE" rollout status deployment/mgpu-webhook --timeout="${WAIT}s" &&
        kubectl -n "$NAMESPACE" rollout status deployment/mgpu-scheduler --timeout="${WAIT}s"
}

[ -z "${IMAGE:-}" ] || put_in_image
keep_the_crd_of_others
put_in_api_servers
assemble >"$top/kustomization.yaml"
make_authorities_and_keys
apply
trust_authorities
remove_former_parts
[ "$WAIT" != 0 ] || exit 0
answers && rc=0 || rc=1
kubectl -n "$NAMESPACE" get pods -o wide
if [ "$rc" = 0 ]; then
    API_SERVERS=${api_servers:-} "$here/check.sh" || rc=1
else
    say "mgpu does not answer after $WAIT s: kubectl -n $NAMESPACE describe pods says why" >&2
fi
exit "$rc"

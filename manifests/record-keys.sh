#!/bin/sh
# Makes the key that the scheduler seals placement records with, once: the private one in Secret mgpu-record-key, the
# public one in ConfigMap mgpu-record-keys, with the time at which sealing comes into force (`since`).
#
#   manifests/record-keys.sh             make what is missing; a key that is there stays
#   KEY=rotate manifests/record-keys.sh  sign with a new key; seals of the keys before count on. Where it ends before all
#                                        agents know the new key, run it again: it goes on with the same key
#   MGPU_NAMESPACE=mgpu-system           as for certificates.sh
#
# deploy.sh calls it. It needs openssl, and the namespace. Processes read the keys when they start.
set -eu

NAMESPACE=${MGPU_NAMESPACE:-mgpu-system}
SECRET=mgpu-record-key
KEYS=mgpu-record-keys
# Until then a scheduler that does not seal yet is replaced by one that does: an image is pulled, 30 s of preStop.
GRACE=900
TIME=%Y-%m-%dT%H:%M:%SZ
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
trap 'exit 1' HUP INT TERM # dash runs no EXIT trap when a signal ends it, and the folder may hold private keys
umask 077
mkdir "$top/public"

say() { printf '%s\n' "$*"; }
in_namespace() { kubectl -n "$NAMESPACE" "$@"; }
apply() { kubectl apply --server-side --force-conflicts --field-manager=mgpu-record-keys -f -; }

# The name of the key in file $1 in seals: what mgpu/model/record_seals.py calls its id.
id_of() { openssl pkey -in "$1" -pubout -outform DER | tail -c 32 | openssl dgst -sha256 -r | cut -c1-16; }

publish() { openssl pkey -in "$1" -pubout -out "$top/public/$(id_of "$1").pem"; }

# The data of the object of kind $1 and name $2, read by one call of kubectl: a line `NAME "CONTENT"` for each entry.
entries() { in_namespace get "$1" "$2" --ignore-not-found -o go-template='{{range $name, $content := .data}}{{printf "%s %q\n" $name $content}}{{end}}'; }

# The entry $2 in the file $1 of entries, or nothing.
entry() { printf '%b' "$(awk -v name="$2" '$1 == name { print substr($0, length(name) + 3, length($0) - length(name) - 3) }' "$1")"; }

# $2: the key that follows, while not everybody knows it.
keep_private() {
    in_namespace create secret generic "$SECRET" --from-file=signing.pem="$1" ${2:+--from-file=next.pem="$2"} \
        --dry-run=client -o yaml | apply
}

# GNU's, BSD's and busybox' date each have another way to read a time and to write one.
seconds_of() {
    date -u -d "$1" +%s 2>/dev/null || date -u -j -f "$TIME" "$1" +%s 2>/dev/null || date -u -D "$TIME" -d "$1" +%s
}
time_of() { date -u -d "@$1" +"$TIME" 2>/dev/null || date -u -r "$1" +"$TIME"; }

# By the API server's clock, with which it also says when a pod was created.
now() { in_namespace create configmap mgpu-time --dry-run=server -o go-template='{{.metadata.creationTimestamp}}'; }

# Whether a scheduler runs that decides without seals: one of an earlier version, which an upgrade replaces or which was
# put back for a while, or one that started when there were no keys. $found: `since` of the ConfigMap.
decides_unsealed() {
    in_namespace get pods -l app.kubernetes.io/name=mgpu,app.kubernetes.io/component=scheduler \
        -o go-template='{{range .items}}pod {{range .spec.volumes}}{{with .secret}}{{.secretName}} {{end}}{{end}}{{"\n"}}{{end}}' >"$top/pods"
    [ -s "$top/pods" ] || return 1
    ! grep -qv " $SECRET " "$top/pods" || return 0
    [ -z "$found" ] && must_restart=yes
}

# Records that it has decided by then must count, or the pods that run with them could not start their containers again.
choose_since() {
    found=$(entry "$top/configmap" since)
    must_restart=no
    if decides_unsealed; then
        since=$(time_of $(($(seconds_of "$(now)") + GRACE)))
        say "records: a scheduler without seals is there; what is created from $since on has to be sealed"
    else
        since=${found:-$(in_namespace get secret "$SECRET" -o go-template='{{.metadata.creationTimestamp}}')}
    fi
    printf '%s' "$since" >"$top/public/since"
}

# The ConfigMap of all public keys in $top/public.
keep_public() {
    in_namespace create configmap "$KEYS" --from-file="$top/public" \
        --from-literal=publicKeys=/etc/mgpu-record-keys \
        --from-literal=signingKey=/etc/mgpu-record-key/signing.pem --dry-run=client -o yaml | apply
}

restart() { in_namespace rollout restart "$@"; }

# Waits until all agents have started since the last restart. Fails where somebody has to replace them by hand.
agents_know() {
    agents=$(in_namespace get daemonset mgpu-deviceplugin --ignore-not-found -o go-template='{{.spec.updateStrategy.type}} {{.metadata.generation}} {{.status.observedGeneration}} {{with .status.desiredNumberScheduled}}{{.}}{{else}}0{{end}} {{with .status.updatedNumberScheduled}}{{.}}{{else}}0{{end}}')
    case $agents in
    '') return 0 ;;
    OnDelete*) ;;
    *) in_namespace rollout status daemonset/mgpu-deviceplugin --timeout="${WAIT:-300}s" && return 0 || return 1 ;;
    esac
    # shellcheck disable=SC2086 # five words
    set -- $agents
    [ "$2" = "$3" ] && [ "$4" = "$5" ] && return 0
    say "the agents are replaced by hand (OnDelete), and not all of them know the new key: replace them node by node" \
        '(docs/mps.md, "The life of a daemon"), then run KEY=rotate manifests/record-keys.sh again' >&2
    return 1
}

entries secret "$SECRET" >"$top/secret"
entries configmap "$KEYS" >"$top/configmap"
for name in signing.pem next.pem; do
    entry "$top/secret" "$name" | openssl base64 -d -A >"$top/$name"
done
if [ ! -s "$top/signing.pem" ]; then
    say 'records: new signing key'
    openssl genpkey -algorithm ed25519 -out "$top/signing.pem"
    keep_private "$top/signing.pem"
fi
publish "$top/signing.pem"
for name in $(awk '$1 ~ /[.]pem$/ { print $1 }' "$top/configmap"); do
    entry "$top/configmap" "$name" >"$top/public/$name"
done
begins=no
if [ "${KEY:-keep}" = rotate ] && [ ! -s "$top/next.pem" ]; then
    begins=yes
    openssl genpkey -algorithm ed25519 -out "$top/next.pem"
    keep_private "$top/signing.pem" "$top/next.pem"
fi
[ ! -s "$top/next.pem" ] || publish "$top/next.pem"
choose_since
keep_public
if [ "${KEY:-keep}" != rotate ]; then
    [ "$must_restart" = no ] || restart deployment/mgpu-scheduler daemonset/mgpu-deviceplugin
    exit 0
fi

# Everybody knows the new key before anything is signed with it.
if [ "$begins" = yes ]; then
    say 'records: every process learns the new public key'
    restart deployment/mgpu-scheduler daemonset/mgpu-deviceplugin
fi
in_namespace rollout status deployment/mgpu-scheduler --timeout="${WAIT:-300}s"
agents_know
keep_private "$top/next.pem"
restart deployment/mgpu-scheduler

#!/bin/sh
# Makes the key that the scheduler seals placement records with, once: the private one in Secret mgpu-record-key, the
# public one in ConfigMap mgpu-record-keys, with the time at which sealing came into force.
#
#   manifests/record-keys.sh             make what is missing; a key that is there stays
#   KEY=rotate manifests/record-keys.sh  sign with a new key; seals of the keys before count on
#
# deploy.sh calls it. It needs openssl, and the namespace. Processes read the keys when they start.
set -eu

NAMESPACE=mgpu-system
SECRET=mgpu-record-key
KEYS=mgpu-record-keys
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
umask 077
mkdir "$top/public"

say() { printf '%s\n' "$*"; }
in_namespace() { kubectl -n "$NAMESPACE" "$@"; }
apply() { kubectl apply --server-side --force-conflicts --field-manager=mgpu-record-keys -f -; }

# The name of the key in file $1 in seals: what mgpu/model/seals.py calls its id.
id_of() { openssl pkey -in "$1" -pubout -outform DER | tail -c 32 | openssl dgst -sha256 -r | cut -c1-16; }

publish() { openssl pkey -in "$1" -pubout -out "$top/public/$(id_of "$1").pem"; }

keep_private() {
    in_namespace create secret generic "$SECRET" --from-file=signing.pem="$1" --dry-run=client -o yaml | apply
}

# The ConfigMap of all public keys in $top/public. The time is that of the Secret, by the API server's clock, with which
# it also says when a pod was created.
keep_public() {
    since=$(in_namespace get secret "$SECRET" -o go-template='{{.metadata.creationTimestamp}}')
    printf '%s' "$since" >"$top/public/since"
    in_namespace create configmap "$KEYS" --from-file="$top/public" \
        --from-literal=publicKeys=/etc/mgpu-record-keys \
        --from-literal=signingKey=/etc/mgpu-record-key/signing.pem --dry-run=client -o yaml | apply
}

in_namespace get secret "$SECRET" --ignore-not-found -o go-template='{{index .data "signing.pem"}}' |
    openssl base64 -d -A >"$top/signing.pem"
if [ ! -s "$top/signing.pem" ]; then
    say 'records: new signing key'
    openssl genpkey -algorithm ed25519 -out "$top/signing.pem"
    keep_private "$top/signing.pem"
fi
publish "$top/signing.pem"
for name in $(in_namespace get configmap "$KEYS" --ignore-not-found -o go-template='{{range $name, $_ := .data}}{{$name}} {{end}}'); do
    case $name in
    *.pem) in_namespace get configmap "$KEYS" -o go-template="{{index .data \"$name\"}}" >"$top/public/$name" ;;
    esac
done
if [ "${KEY:-keep}" = rotate ]; then
    openssl genpkey -algorithm ed25519 -out "$top/next.pem"
    publish "$top/next.pem"
fi
keep_public
[ "${KEY:-keep}" = rotate ] || exit 0

# Everybody knows the new key before anything is signed with it.
say 'records: every process learns the new public key'
in_namespace rollout restart deployment/mgpu-scheduler daemonset/mgpu-deviceplugin
in_namespace rollout status deployment/mgpu-scheduler --timeout="${WAIT:-300}s"
in_namespace rollout status daemonset/mgpu-deviceplugin --timeout="${WAIT:-300}s"
keep_private "$top/next.pem"
in_namespace rollout restart deployment/mgpu-scheduler

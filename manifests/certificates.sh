#!/bin/sh
# Makes the certificate authorities (CA) of the webhook and the scheduler, and has the API server trust them: one Secret
# with a CA per process, and its certificate in the webhook configurations that lead to this process. The processes renew
# their certificates under it and may neither make a CA nor write a webhook configuration.
#
#   manifests/certificates.sh            make what is missing; a CA that is there stays
#   CA=rotate manifests/certificates.sh  put a new CA in front of the present one; both are trusted
#   CA=settle manifests/certificates.sh  trust the newest CA alone, some minutes after `rotate`
#   DAYS=3650                            the life of a new CA
#   MGPU_NAMESPACE=mgpu-system           the namespace of mgpu, if the Helm chart has installed it into another one
#
# deploy.sh calls it. It needs openssl, and the namespace. `certificates.sh bundle PROCESS` prints the bundle in base64.
set -eu

NAMESPACE=${MGPU_NAMESPACE:-mgpu-system}
DAYS=${DAYS:-3650}
# A CA that ends within 180 days is followed by the next one; a shorter one within a third of its life, since otherwise
# each run would add another CA to the bundle.
SOON=$((DAYS < 540 ? DAYS * 28800 : 15552000))
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
trap 'exit 1' HUP INT TERM # dash runs no EXIT trap when a signal ends it, and the folder may hold private keys
umask 077

say() { printf '%s\n' "$*"; }

# One call of kubectl for all Secrets: a line `SECRET` for each, and `SECRET FILE CONTENT` for each of its files.
read_secrets() {
    kubectl -n "$NAMESPACE" get secret/mgpu-webhook-tls secret/mgpu-scheduler-tls --ignore-not-found -o go-template='{{range .items}}{{$secret := .metadata.name}}{{$secret}}{{"\n"}}{{range $file, $content := .data}}{{$secret}} {{$file}} {{$content}}{{"\n"}}{{end}}{{end}}' >"$top/secrets"
}

# The file $2 of the Secret of process $1, or nothing.
stored() {
    awk -v secret="mgpu-$1-tls" -v file="$2" '$1 == secret && $2 == file { print $3 }' "$top/secrets" | openssl base64 -d -A
}

# A CA in $top/new.crt and $top/new.key. A configuration of our own: what openssl adds by itself differs by version.
new_authority() {
    cat >"$top/ca.conf" <<CONF
[req]
distinguished_name = name
x509_extensions = ca
prompt = no
[name]
CN = mgpu-$1 CA $(date -u '+%Y-%m-%d %H:%M:%S')
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
CONF
    openssl ecparam -name prime256v1 -genkey -noout -out "$top/new.key"
    openssl req -x509 -new -sha256 -key "$top/new.key" -days "$DAYS" -config "$top/ca.conf" -out "$top/new.crt"
}

# The certificate of file $1 that belongs to the key of file $2, which is the one that signs, into file $3.
signing() {
    openssl pkey -in "$2" -pubout -out "$top/wanted.pub" 2>/dev/null || return 1
    rm -f "$top"/one.*
    awk -v to="$top/one." '/BEGIN CERTIFICATE/ { n++ } n { print > (to n) }' "$1"
    for one in "$top"/one.*; do
        [ -f "$one" ] || continue
        openssl x509 -in "$one" -noout -pubkey >"$top/its.pub" 2>/dev/null || continue
        if cmp -s "$top/its.pub" "$top/wanted.pub"; then
            openssl x509 -in "$one" >"$3"
            return 0
        fi
    done
    return 1
}

# Sets $top/bundle.crt (what the API server trusts) and $top/ca.key of process $1; changed says whether they are new.
decide() {
    stored "$1" ca.crt >"$top/old.crt"
    stored "$1" ca.key >"$top/ca.key"
    cp "$top/old.crt" "$top/bundle.crt"
    changed=no
    if ! signing "$top/old.crt" "$top/ca.key" "$top/signing.crt"; then
        say "process $1: new CA"
        : >"$top/old.crt" # what there is cannot sign: nothing is served under it much longer
        next "$1"
    elif [ "${CA:-keep}" = rotate ] || ! openssl x509 -in "$top/signing.crt" -noout -checkend "$SOON" >/dev/null; then
        say "process $1: new CA beside the present one; CA=settle later ends the trust in the old one"
        next "$1"
    elif [ "${CA:-keep}" = settle ]; then
        cp "$top/signing.crt" "$top/bundle.crt" && changed=yes
    fi
}

next() {
    new_authority "$1"
    cat "$top/new.crt" "$top/old.crt" >"$top/bundle.crt"
    mv "$top/new.key" "$top/ca.key"
    changed=yes
}

keep() {
    if ! grep -q "^mgpu-$1-tls\$" "$top/secrets"; then
        : >"$top/empty"
        kubectl -n "$NAMESPACE" create secret generic "mgpu-$1-tls" --type=kubernetes.io/tls \
            --from-file=ca.crt="$top/bundle.crt" --from-file=ca.key="$top/ca.key" \
            --from-file=tls.crt="$top/empty" --from-file=tls.key="$top/empty"
        return
    fi
    # In a file and not an argument, which everybody on this machine could read.
    printf '{"data": {"ca.crt": "%s", "ca.key": "%s"}}' \
        "$(openssl base64 -A -in "$top/bundle.crt")" "$(openssl base64 -A -in "$top/ca.key")" >"$top/patch.json"
    kubectl -n "$NAMESPACE" patch secret "mgpu-$1-tls" --type=merge --patch-file "$top/patch.json"
}

# One call of kubectl for all webhooks: a line `KIND/CONFIGURATION INDEX NAME BUNDLE` for each.
read_webhooks() {
    kubectl get mutatingwebhookconfiguration/mgpu-webhook mutatingwebhookconfiguration/0-mgpu-webhook \
        validatingwebhookconfiguration/mgpu-webhook mutatingwebhookconfiguration/mgpu-scheduler \
        mutatingwebhookconfiguration/mgpu-claims --ignore-not-found \
        -o go-template='{{range .items}}{{$of := .}}{{range $at, $hook := .webhooks}}{{$of.kind}}/{{$of.metadata.name}} {{$at}} {{.name}} {{with .clientConfig.caBundle}}{{.}}{{end}}{{"\n"}}{{end}}{{end}}' >"$top/webhooks"
}

# Into each webhook of the configuration $1 that trusts something else, by an identity of our own as field manager: an
# overlay that is applied without this script takes nothing away that another manager owns.
trust() {
    patch=$(awk -v of="$1" -v bundle="$(openssl base64 -A -in "$top/bundle.crt")" '$1 == of && $4 != bundle {
        printf "%s{\"op\":\"test\",\"path\":\"/webhooks/%d/name\",\"value\":\"%s\"}", (n++ ? "," : ""), $2, $3
        printf ",{\"op\":\"add\",\"path\":\"/webhooks/%d/clientConfig/caBundle\",\"value\":\"%s\"}", $2, bundle
    }' "$top/webhooks")
    [ -z "$patch" ] || kubectl patch "$1" --type=json --field-manager=mgpu-certificates -p "[$patch]"
}

trust_all() {
    trust "MutatingWebhookConfiguration/mgpu-$1"
    case $1 in
    webhook)
        trust MutatingWebhookConfiguration/0-mgpu-webhook
        trust ValidatingWebhookConfiguration/mgpu-webhook
        ;;
    scheduler) trust MutatingWebhookConfiguration/mgpu-claims ;; # with components/dra
    esac
}

read_secrets
if [ "${1:-}" = bundle ]; then
    stored "$2" ca.crt | openssl base64 -A
    exit 0
fi
read_webhooks
for process in webhook scheduler; do
    decide "$process"
    if [ "${CA:-keep}" = settle ]; then
        # The other way round: what is served must be under the newest CA before the old one is forgotten.
        stored "$process" tls.crt >"$top/leaf.crt"
        if ! openssl verify -CAfile "$top/signing.crt" "$top/leaf.crt" >/dev/null 2>&1; then
            say "process $process does not serve under the newest CA yet: try again in a minute" >&2
            exit 1
        fi
        keep "$process"
        trust_all "$process"
        continue
    fi
    # First the trust, then the CA that a process signs with at once.
    trust_all "$process"
    [ "$changed" = no ] || keep "$process"
done

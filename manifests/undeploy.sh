#!/bin/sh
# Takes mgpu off the cluster that kubectl points at, so that nothing is left stuck. May be run again after a failure.
#
#   WAIT=120           seconds for the MtgpuPods to go by themselves, and for mgpu's own pods
#   KEEP_DEVICES=yes   leave the CRD of Devices (Koordinator came after mgpu); one that was there before mgpu stays anyway
#   MGPU_NAMESPACE=mgpu-system  as for certificates.sh
#   CLEAN_NODES=yes    take mgpu's annotations, its label and the resources it published off the Nodes too; only when no
#                      pod holds cards any more
#
# Pods that have cards go on running; their annotations stay.
set -eu

NAMESPACE=${MGPU_NAMESPACE:-mgpu-system}
WAIT=${WAIT:-120}
OURS="-l app.kubernetes.io/part-of=mgpu"
FINALIZER=mgpu.io/mtgpupod

say() { printf '%s\n' "$*"; }

# Asked for before anything is done: an API server that does not answer now ends this here.
definitions=$(kubectl get customresourcedefinitions -o name)
there() { printf '%s\n' "$definitions" | grep -q "/$1\$"; }

# While the agents still run: the kubelet ends a pod with a claim only after the driver has answered.
kubectl get resourceclaims --all-namespaces -o go-template='{{range .items}}{{$claim := .metadata}}{{with .status}}{{with .allocation}}{{with .devices}}{{range .results}}{{if eq .driver "gpu.mgpu.io"}}{{$claim.namespace}}/{{$claim.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}{{end}}{{end}}' 2>/dev/null |
    sort -u | while read -r claim; do
    say "ResourceClaim $claim has cards: without mgpu its pods cannot end, so they must be deleted by force"
done

# First of all: from now on nothing on this cluster waits for mgpu, whatever of it is dead or dying.
say 'webhook configurations'
kubectl delete mutatingwebhookconfigurations,validatingwebhookconfigurations $OURS --ignore-not-found
kubectl delete validatingadmissionpolicybindings,validatingadmissionpolicies $OURS --ignore-not-found ||
    say 'this cluster has no ValidatingAdmissionPolicies (Kubernetes before 1.30)'

# While the scheduler process still runs: it ends their Pods and occupy pods, and takes its finalizer off.
if there mtgpupods.lsalab.nthu; then
    say "MtgpuPods (at most $WAIT s)"
    kubectl delete mtgpupods --all --all-namespaces --timeout="${WAIT}s" ||
        say 'some MtgpuPods do not go: is the scheduler process dead?'
    # The last resort: nobody takes the finalizer off any more, so it is done by hand. Their Pods go with them (they own
    # them); the occupy pods would stay.
    kubectl get mtgpupods --all-namespaces --no-headers \
        -o custom-columns=NAMESPACE:.metadata.namespace,NAME:.metadata.name |
        while read -r namespace name; do
            others=$(kubectl -n "$namespace" get mtgpupod "$name" --ignore-not-found -o go-template="{{range .metadata.finalizers}}{{if ne . \"$FINALIZER\"}}\"{{.}}\",{{end}}{{end}}")
            say "finalizer of $namespace/$name taken off by hand${others:+; what waits for these is not ours: ${others%,}}"
            kubectl -n "$namespace" patch mtgpupod "$name" --type=merge \
                -p "{\"metadata\":{\"finalizers\":[${others%,}]}}" || say "$namespace/$name has gone meanwhile"
        done
    kubectl -n kube-system delete pods -l mgpu.io/occupies --ignore-not-found --timeout="${WAIT}s" ||
        say 'some occupy pods do not go: do their nodes answer?'
    say 'CRD of MtgpuPods'
    kubectl delete customresourcedefinitions mtgpupods.lsalab.nthu --ignore-not-found --timeout="${WAIT}s"
fi

# Before the Devices: a scheduler process that sees them go would believe that the cards are gone.
say 'controllers and agents'
kubectl -n "$NAMESPACE" delete deployments,daemonsets $OURS --ignore-not-found
kubectl -n "$NAMESPACE" wait --for=delete pods -l app.kubernetes.io/name=mgpu --timeout="${WAIT}s" ||
    say 'some pods of mgpu do not end: do their nodes answer?'

if kubectl get deviceclasses,resourceslices >/dev/null 2>&1; then
    say 'DeviceClasses and ResourceSlices'
    kubectl delete deviceclasses $OURS --ignore-not-found
    kubectl delete resourceslices --field-selector spec.driver=gpu.mgpu.io --ignore-not-found
fi

if [ "${KEEP_DEVICES:-no}" != yes ]; then
    say 'CRD of Devices, if it is of mgpu'
    kubectl delete customresourcedefinitions $OURS --ignore-not-found --timeout="${WAIT}s"
fi

say 'rights, priority classes, namespace'
kubectl -n kube-system delete roles,rolebindings $OURS --ignore-not-found
kubectl delete clusterroles,clusterrolebindings,priorityclasses $OURS --ignore-not-found
kubectl delete namespace "$NAMESPACE" --ignore-not-found --timeout="${WAIT}s"

[ "${CLEAN_NODES:-no}" = yes ] || exit 0
say 'nodes'
for node in $(kubectl get nodes -o name); do
    published=$(kubectl get "$node" -o jsonpath='{.metadata.annotations.mgpu\.io/status-resources}')
    if [ -n "$published" ]; then
        gone=$(printf '%s' "$published" | sed 's/[^,]*/"&":null/g')
        kubectl patch "$node" --subresource=status --type=merge -p "{\"status\":{\"capacity\":{$gone}}}"
    fi
    kubectl annotate "$node" mgpu.io/status-resources- mgpu.io/slices- mgpu.io/slices-planned- mgpu.io/cards-changed- \
        mgpu.io/agent- dynamicgpuslice-
    kubectl label "$node" mgpu.io/whole-cards- mgpu.io/hami-core-
done

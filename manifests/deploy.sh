#!/bin/sh
# Applies a kustomization to the cluster that kubectl points at, and waits until mgpu answers.
#
#   manifests/deploy.sh [FOLDER]     FOLDER: manifests/base, an overlay, or one of your own
#   IMAGE=images.example/mgpu:0.1.0  the image to run in place of the kustomization's
#   WAIT=300                         seconds for the webhook and the scheduler to be ready
set -eu

NAMESPACE=mgpu-system
WAIT=${WAIT:-300}
folder=${1:-manifests/base}
if [ -n "${IMAGE:-}" ]; then
    case ${IMAGE##*/} in
    *:*) name=${IMAGE%:*} tag=${IMAGE##*:} ;;
    *) echo "IMAGE has no tag: $IMAGE" >&2 && exit 2 ;;
    esac
    top=$(mktemp -d)
    trap 'rm -r "$top"' EXIT
    kubectl kustomize "$folder" >"$top/rendered.yaml"
    # An image is found by the name that it has now, and the folder may have given it another one already.
    now=$(sed -n 's/^ *image: \(.*mgpu\):[^:]*$/\1/p' "$top/rendered.yaml" | sort -u)
    [ -n "$now" ] || { echo "no image in $folder is named mgpu, so IMAGE is not put in: name it there" >&2 && exit 2; }
    cat >"$top/kustomization.yaml" <<YAML
resources: [rendered.yaml]
images:
  - {name: "$now", newName: "$name", newTag: "$tag"}
YAML
    rendered=$(kubectl kustomize "$top" | awk -v image="$IMAGE" '
        occupy && $1 == "value:" { sub(/value: .*/, "value: " image) }
        { occupy = /name: MGPU_DIALECTS__MTGPU__OCCUPYIMAGE/; print }')
else
    rendered=$(kubectl kustomize "$folder")
fi
printf '%s\n' "$rendered" | kubectl apply --server-side --field-manager=mgpu -f -
[ "$WAIT" != 0 ] || exit 0
kubectl -n "$NAMESPACE" rollout status deployment/mgpu-webhook --timeout="${WAIT}s"
# Of its replicas one leads and is ready, so that its rollout never counts as complete.
kubectl -n "$NAMESPACE" wait --for=jsonpath='{.status.readyReplicas}'=1 deployment/mgpu-scheduler --timeout="${WAIT}s"
kubectl -n "$NAMESPACE" get pods -o wide

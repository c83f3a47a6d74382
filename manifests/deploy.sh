#!/bin/sh
# Applies a kustomization to the cluster that kubectl points at, and waits until mgpu answers.
#
#   manifests/deploy.sh [FOLDER]     FOLDER: manifests/base, an overlay, or one of your own
#   IMAGE=images.example/mgpu:0.1.0  the image to run in place of the kustomization's
#   WAIT=300                         seconds for the webhook and the scheduler to be ready
#
# What the folder says holds over what was changed on the cluster since (kubectl edit, scale, rollout undo).
set -eu

NAMESPACE=mgpu-system
DEVICES=devices.scheduling.koordinator.sh
WAIT=${WAIT:-300}
folder=${1:-manifests/base}
top=$(mktemp -d)
trap 'rm -r "$top"' EXIT
kubectl kustomize "$folder" >"$top/rendered.yaml"
echo 'resources: [rendered.yaml]' >"$top/kustomization.yaml"
if [ -n "${IMAGE:-}" ]; then
    case ${IMAGE##*/} in
    *:*) name=${IMAGE%:*} tag=${IMAGE##*:} ;;
    *) echo "IMAGE has no tag: $IMAGE" >&2 && exit 2 ;;
    esac
    # An image is found by the name that it has now, and the folder may have given it another one already.
    now=$(sed -n 's/^ *image: \(.*mgpu\):[^:]*$/\1/p' "$top/rendered.yaml" | sort -u)
    [ -n "$now" ] || { echo "no image in $folder is named mgpu, so IMAGE is not put in: name it there" >&2 && exit 2; }
    cat >>"$top/kustomization.yaml" <<YAML
images:
  - {name: "$now", newName: "$name", newTag: "$tag"}
YAML
fi
made_by=$(kubectl get customresourcedefinition "$DEVICES" --ignore-not-found \
    -o jsonpath='[{.metadata.labels.app\.kubernetes\.io/part-of}]')
case $made_by in
'' | '[mgpu]') ;;
*)
    echo "the CRD $DEVICES is there already and is not mgpu's (Koordinator's?): it stays as it is"
    cat >>"$top/kustomization.yaml" <<YAML
patches:
  - target: {kind: CustomResourceDefinition, name: $DEVICES}
    patch: '{"\$patch": delete, apiVersion: any, kind: any, metadata: {name: any}}'
YAML
    ;;
esac
rendered=$(kubectl kustomize "$top" | awk -v image="${IMAGE:-}" '
    image && occupy && $1 == "value:" { sub(/value: .*/, "value: " image) }
    { occupy = /name: MGPU_DIALECTS__MTGPU__OCCUPYIMAGE/; print }')
printf '%s\n' "$rendered" | kubectl apply --server-side --force-conflicts --field-manager=mgpu -f -
[ "$WAIT" != 0 ] || exit 0
answers() {
    kubectl -n "$NAMESPACE" rollout status deployment/mgpu-webhook --timeout="${WAIT}s" &&
        kubectl -n "$NAMESPACE" rollout status deployment/mgpu-scheduler --timeout="${WAIT}s"
}
answers && rc=0 || rc=1
kubectl -n "$NAMESPACE" get pods -o wide
[ "$rc" = 0 ] || echo "mgpu does not answer after $WAIT s: kubectl -n $NAMESPACE describe pods says why" >&2
exit "$rc"

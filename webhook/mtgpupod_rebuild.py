"""Replaces the content of a new Pod of an MtgpuPod with what mgpu builds from the MtgpuPod.

`webhook.admission` calls `is_rebuilt` and `rebuild` for `/rebuild`, and `webhook.main` calls `make_finder`.

The scheduler's account may create Pods in every namespace, so an attacker with its token could run any program as any
service account. Therefore the webhook, which has an account of its own, sets the content of such a Pod, and takes it
from the spec of the MtgpuPod, which the tenant has written. It would not be enough to compare the Pod with the
MtgpuPod: the API server and other admission plugins complete a Pod before this webhook, and their additions cannot be
distinguished from those of an attacker.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import CARDS, KIND, VISIBLE, MtgpuPod
from mgpu.dialects.mtgpu_pods import manifest
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import BadObject, Problem, RetryLater, raise_if_any
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL, Seal
from mgpu.serving.review import Patch
from mgpu.settings import Settings

FindMtgpuPod = Callable[[str, str], Mapping[str, Any] | None]
"""A function that returns the MtgpuPod with a namespace and a name, or None if it does not exist.

The function raises RetryLater if it cannot read the MtgpuPod.
"""
SECONDS = 3.0
"""The timeout in seconds for reading an MtgpuPod. The API server waits 5 seconds for the review."""

_OWNERS = "metadata.ownerReferences"
_INDEX = re.compile(r"\d{1,4}", re.ASCII)
_UUID = re.compile(r"(?!\d+$)(?!(?:all|none|void)$)[A-Za-z0-9][-A-Za-z0-9._]{0,127}", re.ASCII)
"""The UUID of one card. In `NVIDIA_VISIBLE_DEVICES`, NVIDIA's runtime would also accept an index, a list, `all`, `none`
and `void`."""


def is_rebuilt(raw: Mapping[str, Any], user: str, settings: Settings) -> bool:
    """Return whether a new Pod must be built from its MtgpuPod.

    If the user is not trusted, `validate_create` denies such a Pod. If MtgpuPods are disabled, another controller in
    `webhook.identities` may create any Pods for them, but mgpu's scheduler may not.
    """
    if not mtgpu.controlling_mtgpupod(raw) or user not in settings.webhook.trusted_users:
        return False
    return mtgpu.enabled(settings) or user == settings.webhook.scheduler_user


def rebuild(raw: Mapping[str, Any], namespace: str, find: FindMtgpuPod | None) -> Patch:
    """Return the JSON Patch that replaces a new Pod with the one that mgpu builds from its MtgpuPod.

    Of the content of the new Pod only the seal, the index of the card and its UUID stay. The UUID must be that of the
    MtgpuPod's card.

    Args:
        find: the function that reads the MtgpuPod; None if this process has no access to an API server.

    Raises:
        BadObject: if `find` is None, if the Pod names no existing and valid MtgpuPod, or if mgpu would not create the
            Pod of the MtgpuPod now.
        RetryLater: if the MtgpuPod cannot be read.
    """
    if find is None:
        text = f"names an {KIND}, which this webhook cannot read: start the webhook in the cluster or with --kubeconfig"
        raise BadObject([Problem(_OWNERS, text)])
    meta = table_at(raw, "metadata")
    name = str(meta.get("name") or "")
    owner = find(namespace, name) if name else None
    if owner is None:
        text = f"names an {KIND} as the controller of this Pod, and {KIND} {namespace}/{name or '?'} does not exist"
        raise BadObject([Problem(_OWNERS, f"{text}; the Pod of an {KIND} has the name of the {KIND}")])
    pod = mtgpu.read_mtgpupod(owner)
    problems = [*_mismatches(raw, pod)]
    raise_if_any(problems)
    return tuple(_operations(meta, manifest(owner, pod, _variable(raw, VISIBLE), int(_variable(raw, CARDS)))))


def _mismatches(raw: Mapping[str, Any], pod: MtgpuPod) -> Iterator[Problem]:
    """Yield each reason for which mgpu would not create this Pod for its MtgpuPod now."""
    if mtgpu.controlling_mtgpupod(raw) != pod.uid:
        yield Problem(_OWNERS, f"names another uid than {pod.uid}, which is the uid of {KIND} {pod.key}")
    if pod.deleting:
        yield Problem(_OWNERS, f"names {KIND} {pod.key}, which is being deleted")
    path = f"spec.containers[*].env[{VISIBLE}]"
    card = mtgpu.visible_card(raw) or ""
    if not pod.card_uuid:
        yield Problem(path, f"must be the card of {KIND} {pod.key}, but its status.BoundDeviceID names no card")
    elif card != pod.card_uuid or not _UUID.fullmatch(card):
        text = f"must be the card of {KIND} {pod.key}, as one UUID"
        yield Problem(path, f"{text}; status.BoundDeviceID is {pod.card_uuid!r}, and the variable is {card[:128]!r}")
    if not _INDEX.fullmatch(_variable(raw, CARDS)):
        yield Problem(f"spec.containers[*].env[{CARDS}]", "must be the index of the card")


def _variable(raw: Mapping[str, Any], name: str) -> str:
    """Return the value of an environment variable in the first container that has it, or ""."""
    containers = table_at(raw, "spec").get("containers") or ()
    rows = (row for container in containers for row in container.get("env") or ())
    return next((str(row["value"]) for row in rows if row.get("name") == name and row.get("value")), "")


def _operations(sent: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the operations of `rebuild`. In a JSON Patch, `add` replaces an existing member."""
    meta = built["metadata"]
    annotations = dict(meta["annotations"])
    seal = Seal.read(str(table_at(sent, "annotations").get(SEAL, "")))
    if seal is not None:
        annotations[SEAL] = str(seal)
    yield {"op": "add", "path": "/metadata/annotations", "value": annotations}
    yield {"op": "add", "path": "/metadata/labels", "value": meta.get("labels", {})}
    yield {"op": "add", "path": "/metadata/ownerReferences", "value": meta["ownerReferences"]}
    for key in ("finalizers", "generateName"):
        if sent.get(key):
            yield {"op": "remove", "path": f"/metadata/{key}"}
    yield {"op": "replace", "path": "/spec", "value": built["spec"]}


def make_finder(api: Api) -> FindMtgpuPod:
    def find(namespace: str, name: str) -> Mapping[str, Any] | None:
        path = f"namespaces/{quote(namespace, safe='')}/mtgpupods/{quote(name, safe='')}"
        try:
            return api.get(f"/apis/{mtgpu.API_VERSION}/{path}")
        except (ApiError, Unreachable) as error:
            if isinstance(error, ApiError) and error.status == 404:
                return None
            raise RetryLater(f"{mtgpu.KIND} {namespace}/{name} cannot be read: {error}") from error

    return find

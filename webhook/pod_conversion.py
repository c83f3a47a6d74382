"""Converts new pods so that they request their shares by a ResourceClaim, and no longer as resources of a vocabulary.

`/convert` receives the pods of namespaces with the label `mgpu.io/dra: convert`, and pods with this label
(manifests/components/dra-convert). It writes nothing into the API: it refers to a ResourceClaimTemplate that does not
have to exist, and a controller of the scheduler creates it (`scheduler.claims.templates`).

What must hold:

- The order of `/convert` and `/mutate` does not matter. Both read the same request from a pod, and `/convert` also does
  what `/mutate` does not do for a pod without GPU resources.
- A second call changes nothing. If another webhook has added a GPU container in between, the claim then includes it.
- The annotation `mgpu.io/converted` gives no user more than its resources would. `/restore` puts the resources back
  before any other webhook sees the pod, so a pod with the annotation is a pod that requests these resources: the rules
  and quotas of its namespace apply to it, and it is converted again only where pods are converted. `/validate` denies
  a new pod whose annotation is not what `/convert` writes, and later changes of the annotation.

The functions are pure.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from mgpu import dialects
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabularies, vocabulary_of
from mgpu.model import budget
from mgpu.model.converted_requests import CLAIM, CONVERTED, ConvertedRequests, Resources, pod_claim, read_converted
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import VISIBLE_DEVICES, Pod, read_new_pod
from mgpu.model.raw_objects import annotation_path, table_at
from mgpu.serving.review import json_pointer
from mgpu.settings import Settings
from webhook.claim_requests import ClaimRequests, claim_requests
from webhook.pod_mutation import Mutation, Operation, check_size, needs_scheduler_name
from webhook.pod_rules import validate_create

_KINDS = ("initContainers", "containers")
_AMOUNTS = ("requests", "limits")
_PATH = annotation_path(CONVERTED)

Raw = Mapping[str, Any]


def convert(raw: Raw, settings: Settings) -> Mutation:
    """Return the changes that let a new pod request its cards by a claim.

    A pod that is invalid in its vocabulary is left as it is, so that `/validate` denies it with its own messages. The
    same holds for pods of disabled vocabularies, and for the Pods of MtgpuPods.

    Raises:
        BadObject: if parts of the pod's JSON have a wrong type, or if a claim cannot express what the pod requests.
    """
    restored = _restored(raw)
    raise_if_any(budget.excess(restored, None))
    pod = _classic_pod(restored)
    request = _valid_request(restored, pod, settings)
    if request is None:
        return _changes(raw, restored)
    if pod.node:
        text = "spec.nodeName: is set, and no scheduler allocates the claims of such a pod, so it is not converted"
        return _changes(raw, restored, text)
    claims = claim_requests(pod, request, settings)
    _check_claim_names(restored)
    original = {}
    for container in _containers(restored):
        if taken := _gpu_resources(container):
            original[str(container["name"])] = taken
    converted = ConvertedRequests(claims.requests, request.constraints.texts(), original)
    changed = _converted(restored, claims, converted)
    if needs_scheduler_name(pod, settings):
        changed["spec"]["schedulerName"] = settings.webhook.scheduler_name
    return _changes(raw, changed, *_warnings(pod, claims))


def restore(raw: Raw) -> Mutation:
    """Return the changes that put the resources of a converted pod back, and remove its claim and its annotation."""
    if CONVERTED not in table_at(raw, "metadata", "annotations"):
        return Mutation()
    return _changes(raw, _restored(raw))


def converted_problems(raw: Raw, settings: Settings) -> Iterator[Problem]:
    """Yield the problem of a new pod whose annotation is not what `/convert` writes for the pod."""
    if CONVERTED not in table_at(raw, "metadata", "annotations"):
        return
    try:
        is_same = not convert(raw, settings).patch
    except BadObject as error:
        yield from error.problems
        return
    if not is_same:
        text = "is not what mgpu's conversion writes for this pod; remove it"
        yield Problem(_PATH, text, Rule.PLACEMENT_IS_RESERVED)


def _classic_pod(restored: Raw) -> Pod:
    """Return the pod without allocation records, as `/mutate` reads it."""
    pod = read_new_pod(restored)
    return replace(
        pod, annotations={k: v for k, v in pod.annotations.items() if not dialects.is_placement_annotation(k)}
    )


def _valid_request(restored: Raw, pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the request; None unless the pod uses exactly one enabled vocabulary and is valid in it."""
    used = vocabularies(pod)
    if len(used) != 1:
        return None
    try:
        request = dialects.read_request(pod, settings)
    except BadObject:
        return None
    if request is None:
        return None
    # `/mutate` removes records and `mgpu.io/share`, so they must not count as problems if it has not been called yet.
    bare = deepcopy(dict(restored))
    bare["metadata"] = {**table_at(restored, "metadata"), "annotations": dict(pod.annotations)}
    for container in _containers(bare):
        for kind in _AMOUNTS:
            _amounts_of(container, kind).pop(SHARE, None)
    return None if validate_create(bare, settings) else request


def _amounts_of(container: Raw, kind: str) -> dict[str, Any]:
    """Return the requests or the limits of a raw container, to be changed in place; {} if it has none."""
    found = table_at(container, "resources", kind)
    return found if isinstance(found, dict) else {}


def _check_claim_names(restored: Raw) -> None:
    rows = _rows(table_at(restored, "spec").get("resourceClaims"))
    if any(table_at(row).get("name") == CLAIM for row in rows):
        text = (
            f"the name {CLAIM!r} is needed for the claim into which the pod's GPU request is converted; choose another"
        )
        raise BadObject([Problem("spec.resourceClaims", text)])


def _warnings(pod: Pod, claims: ClaimRequests) -> Iterator[str]:
    for container in pod.containers:
        if container.name in claims.by_container and container.visible:
            yield f"{container.path}.env[{VISIBLE_DEVICES}]: removed; mgpu sets it to the cards that the container gets"
        if container.name in claims.held_longer:
            yield f"{container.path}.resources: the pod holds these cards until it ends, as a claim does not shrink"


def _containers(raw: Raw) -> Iterator[dict[str, Any]]:
    spec = table_at(raw, "spec")
    return (item for kind in _KINDS for item in _rows(spec.get(kind)) if isinstance(item, dict))


def _rows(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _gpu_resources(container: Raw) -> Resources:
    """Return the amounts of a container that belong to a vocabulary, without `mgpu.io/share`."""
    found = {
        kind: {
            name: str(amount) for name, amount in sorted(_amounts_of(container, kind).items()) if vocabulary_of(name)
        }
        for kind in _AMOUNTS
    }
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _converted(restored: Raw, claims: ClaimRequests, converted: ConvertedRequests) -> dict[str, Any]:
    """Return the pod with the claim in place of its GPU resources."""
    changed = deepcopy(dict(restored))
    meta = changed.setdefault("metadata", {})
    meta["annotations"] = {**(meta.get("annotations") or {}), CONVERTED: converted.to_annotation()}
    spec = changed["spec"]
    spec["resourceClaims"] = [*_rows(spec.get("resourceClaims")), pod_claim(converted)]
    for container in _containers(changed):
        for kind in _AMOUNTS:
            amounts = _amounts_of(container, kind)
            for name in [name for name in amounts if vocabulary_of(name) or name == SHARE]:
                del amounts[name]
            if not amounts and kind in (container.get("resources") or {}):
                # kube-apiserver stores no empty table, and `converted_problems` compares with what it stores.
                del container["resources"][kind]
        request = claims.by_container.get(str(container.get("name")))
        if request is not None:
            resources = container["resources"]
            resources["claims"] = [*_rows(resources.get("claims")), {"name": CLAIM, "request": request}]
            # The pod's own variable would name other cards than those of the claim.
            if container.get("env"):
                container["env"] = [e for e in container["env"] if table_at(e).get("name") != VISIBLE_DEVICES]
    return changed


def _restored(raw: Raw) -> dict[str, Any]:
    """Return the pod as it was before its conversion, without the annotation. An unreadable annotation is dropped."""
    text = table_at(raw, "metadata", "annotations").get(CONVERTED)
    if text is None:
        return dict(raw)
    restored = deepcopy(dict(raw))
    del restored["metadata"]["annotations"][CONVERTED]
    try:
        converted = read_converted(text) if isinstance(text, str) else None
    except BadObject:
        converted = None
    if converted is None:
        return restored
    spec = restored.get("spec")
    rows = _rows(table_at(spec).get("resourceClaims"))
    own = pod_claim(converted)
    has_claim = own in rows
    if has_claim and isinstance(spec, dict):
        spec["resourceClaims"] = [row for row in rows if row != own]
        if not spec["resourceClaims"]:
            del spec["resourceClaims"]
    for container in _containers(restored):
        _restore_container(container, converted, has_claim=has_claim)
    return restored


def _restore_container(container: dict[str, Any], converted: ConvertedRequests, *, has_claim: bool) -> None:
    resources = container.get("resources") or {}
    if not isinstance(resources, dict):
        return
    if has_claim and (claims := _rows(resources.get("claims"))):
        resources["claims"] = [row for row in claims if table_at(row).get("name") != CLAIM]
        if not resources["claims"]:
            del resources["claims"]
    for kind, amounts in converted.original.get(str(container.get("name")), {}).items():
        known = {name: amount for name, amount in amounts.items() if vocabulary_of(name)}
        if known:
            resources[kind] = {**known, **table_at(resources, kind)}
            container["resources"] = resources


def _changes(before: Raw, after: Raw, *warnings: str) -> Mutation:
    """Return the patch that makes one pod of the other. Only fields that this module changes are compared."""
    return Mutation(check_size([*_operations(before, after)]), warnings)


def _operations(before: Raw, after: Raw) -> Iterator[Operation]:
    yield from _of_table(before, after, ("metadata",), ("annotations",))
    yield from _of_table(before, after, ("spec",), ("resourceClaims", "schedulerName"))
    for kind in _KINDS:
        old = _rows(table_at(before, "spec").get(kind))
        new = _rows(table_at(after, "spec").get(kind))
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            for key in ("resources", "env"):
                if table_at(one).get(key) != table_at(other).get(key):
                    yield {"op": "add", "path": json_pointer("spec", kind, i, key), "value": other[key]}


def _of_table(before: Raw, after: Raw, path: tuple[str, ...], keys: tuple[str, ...]) -> Iterator[Operation]:
    old = table_at(before, *path)
    new = table_at(after, *path)
    for key in keys:
        if old.get(key) == new.get(key):
            continue
        pointer = json_pointer(*path, key)
        if key not in new:
            yield {"op": "remove", "path": pointer}
        elif key == "annotations" and old.get(key):
            yield from _of_annotation(old[key], new[key])
        else:
            yield {"op": "add", "path": pointer, "value": new[key]}


def _of_annotation(old: Raw, new: Raw) -> Iterator[Operation]:
    """Yield the operation for the one annotation that conversions write, instead of one with all annotations."""
    pointer = json_pointer("metadata", "annotations", CONVERTED)
    if CONVERTED not in new:
        yield {"op": "remove", "path": pointer}
    elif old.get(CONVERTED) != new[CONVERTED]:
        yield {"op": "add", "path": pointer, "value": new[CONVERTED]}

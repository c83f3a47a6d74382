"""What `/mutate` changes in a new Pod.

`webhook.admission` calls `mutate`, and `mgpu simulate`. Pure. The mutation completes valid GPU pods so that the kubelet
calls the node agent for their containers; it leaves what is wrong for the validation to deny as the user wrote it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects.protocol import SHARE, Amounts
from mgpu.dialects.registry import vocabularies, vocabulary_of
from mgpu.model import budget
from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import VISIBLE_DEVICES, Container, Pod, Stage, read_new_pod
from mgpu.model.slice_names import is_mps
from mgpu.serving.review import json_pointer
from mgpu.settings import Settings

_DEFAULT_SCHEDULER = "default-scheduler"

Operation = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A JSON Patch (RFC 6902) and warnings for the user. Mutating the patched pod again changes nothing more."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(raw: Mapping[str, Any], settings: Settings, user: str = "") -> Mutation:
    """Return the changes to a pod that is being created.

    Placement annotations are removed from every pod unless a trusted user creates it, whether their vocabulary is
    enabled or not. Nothing else changes in a pod that requests no GPU.

    Args:
        user: who creates the pod; "" for a user without a name.
    Raises:
        BadObject: where parts of the pod's JSON have a wrong type, or where it needs more changes than a patch may
            have.
    """
    pod = read_new_pod(raw)
    trusted = user in settings.webhook.trusted_users
    placed = [] if trusted else sorted(filter(dialects.is_placement_annotation, pod.annotations))
    patch: list[Operation] = [{"op": "remove", "path": json_pointer("metadata", "annotations", key)} for key in placed]
    rule = "removed; it records a placement, which only mgpu decides"
    warnings = [f"metadata.annotations[{key}]: {rule}" for key in placed]
    # The request is read without the record: an exported pod with node and record would look as if it had its cards.
    pod = replace(pod, annotations={k: v for k, v in pod.annotations.items() if k not in placed})
    used = vocabularies(pod)
    if not used:
        return Mutation(_within_budget(patch), tuple(warnings))
    request = _request(pod, settings) if len(used) == 1 else None
    if request is not None and _schedules(pod, settings):
        patch.append(
            {"op": "add", "path": json_pointer("spec", "schedulerName"), "value": settings.webhook.scheduler_name}
        )
        if pod.scheduler not in ("", _DEFAULT_SCHEDULER):
            warnings.append(f"spec.schedulerName: {pod.scheduler!r} is replaced; this cluster sets it for GPU pods")
    served = dialects.device_containers(request) if request is not None else frozenset()
    for container in pod.containers:
        requests, limits = _completed(container)
        if request is not None:
            dialect = dialects.by_name(request.dialect)
            if dialect.enabled(settings):
                requests, limits = dialect.normalized(requests, limits)
            requests, limits = _with_share(container, requests, limits, settings, needed=container.name in served)
            if container.requested(SHARE) and SHARE not in requests:
                warnings.append(f"{container.path}.resources[{SHARE}]: removed; mgpu sets it where it is needed")
        patch += _set(container, "requests", container.requests, requests)
        patch += _set(container, "limits", container.limits, limits)
        if container.name in served:
            removed = list(_without_visible_devices(container))
            patch += removed
            if removed:
                path = f"{container.path}.env[{VISIBLE_DEVICES}]"
                warnings.append(f"{path}: removed; mgpu sets it to the cards that the container gets")
    return Mutation(
        _within_budget(patch), (*warnings, *(_missing_for_mps(raw, pod, request) if request is not None else ()))
    )


def _within_budget(patch: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the patch as it is. Raises BadObject where it has too many operations."""
    if len(patch) > budget.MAX_PATCH_OPERATIONS:
        most = budget.MAX_PATCH_OPERATIONS
        text = f"needs {len(patch)} changes before it can run, more than the {most} of one patch; split the pod"
        raise BadObject([Problem("spec.containers", text, Rule.TOO_LARGE)])
    return tuple(patch)


def _request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the request; None for a vocabulary that is not served or a broken request."""
    try:
        return dialects.read_request(pod, settings)
    except BadObject:
        return None


def _missing_for_mps(raw: Mapping[str, Any], pod: Pod, request: GpuRequest) -> Iterator[str]:
    """Yield warnings about fields that a pod with MPS shares may need (docs/design/slices.md, "MPS")."""
    shares = {one.container for one in dialects.device_requests(request) if is_mps(one.type)}
    if not shares:
        return
    spec = raw.get("spec") or {}
    if spec.get("hostIPC") is not True:
        text = "is not set; clients of CUDA MPS may need it to reach the server of their card. mgpu does not add it"
        yield f"spec.hostIPC: {text}"
    if _runs_as_set(spec):
        return
    listed = {c.path: item for c, item in zip(pod.containers, _items(spec), strict=True) if c.name in shares}
    missing = [path for path, item in listed.items() if not _runs_as_set(item)]
    if missing:
        text = (
            "is not set; clients of CUDA MPS run as the user of its server, if that is not root. mgpu does not add it"
        )
        yield f"{'spec' if len(missing) == len(listed) else missing[0]}.securityContext.runAsUser: {text}"


def _items(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the containers of the raw pod in the order of `Pod.containers`."""
    return [item or {} for kind in ("initContainers", "containers") for item in spec.get(kind) or ()]


def _runs_as_set(holder: Mapping[str, Any]) -> bool:
    context = holder.get("securityContext")
    return isinstance(context, dict) and context.get("runAsUser") is not None


def _schedules(pod: Pod, settings: Settings) -> bool:
    """Return whether the pod's scheduler is to be set; a pod that has a node needs none.

    Source: docs/design/koordinator.md, "Upgrade webhook".
    """
    return settings.webhook.scheduler_name not in ("", pod.scheduler) and not pod.node


def _completed(container: Container) -> tuple[Amounts, Amounts]:
    """Return requests and limits, each completed by the other.

    Extended resources need both, and equal ones (docs/design/kubernetes.md, "Pods").
    """
    requests = dict(container.requests)
    limits = dict(container.limits)
    return (
        requests | {n: limits[n] for n in limits.keys() - requests.keys() if vocabulary_of(n)},
        limits | {n: requests[n] for n in requests.keys() - limits.keys() if vocabulary_of(n)},
    )


def _with_share(
    container: Container, requests: Amounts, limits: Amounts, settings: Settings, *, needed: bool
) -> tuple[Amounts, Amounts]:
    """Return the amounts with `mgpu.io/share: 1` where the container needs it, and without it otherwise.

    Args:
        needed: whether the node hands the container cards or slices. Unless it requests another resource that is served
            as device ids, the kubelet would not call the node agent for it.
    """
    bare = replace(container, requests=_without_share(requests), limits=_without_share(limits))
    share = {SHARE: "1"} if needed and not dialects.carrier(bare, settings) else {}
    return {**bare.requests, **share}, {**bare.limits, **share}


def _without_share(amounts: Amounts) -> dict[str, str]:
    return {name: amount for name, amount in amounts.items() if name != SHARE}


def _set(container: Container, kind: str, before: Mapping[str, str], after: Amounts) -> Iterator[Operation]:
    if after and not before:
        yield {"op": "add", "path": _pointer(container, "resources", kind), "value": dict(sorted(after.items()))}
        return
    for name in sorted(before.keys() - after.keys()):
        yield {"op": "remove", "path": _pointer(container, "resources", kind, name)}
    for name in sorted(after):
        if before.get(name) != after[name]:
            yield {"op": "add", "path": _pointer(container, "resources", kind, name), "value": after[name]}


def _without_visible_devices(container: Container) -> Iterator[Operation]:
    """Yield operations that remove the pod's own `NVIDIA_VISIBLE_DEVICES`, from the back of the list.

    The pod's variable would override the one from Allocate (docs/design/kubernetes.md, "Device manager"). Each
    operation of a patch sees the list as the one before left it, so removing from the front would shift the positions.
    """
    for i in reversed(container.visible):
        yield {"op": "remove", "path": _pointer(container, "env", i)}


def _pointer(container: Container, *parts: str | int) -> str:
    listed = "containers" if container.stage is Stage.APP else "initContainers"
    return json_pointer("spec", listed, container.position, *parts)

"""Computes the changes that `/mutate` makes to a new Pod.

`mutate` completes valid GPU pods so that the kubelet calls the node agent for their containers. In an invalid pod it
must not change an amount that the user wrote, because the message of the denial quotes it. The function is pure;
`mgpu simulate` calls it too.
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
    """A JSON Patch (RFC 6902) and warnings for the user. Mutating the patched pod again changes nothing."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(raw: Mapping[str, Any], settings: Settings, user: str = "") -> Mutation:
    """Return the changes to a pod that is being created.

    Placement annotations of every vocabulary, enabled or not, are removed unless the user is trusted. Nothing else
    changes in a pod that requests no GPU.

    Args:
        user: the name of the user who creates the pod; "" if it is unknown.

    Raises:
        BadObject: if parts of the pod's JSON have a wrong type, or if the pod needs more changes than a patch may have.
    """
    pod = read_new_pod(raw)
    trusted = user in settings.webhook.trusted_users
    removed = [] if trusted else sorted(filter(dialects.is_placement_annotation, pod.annotations))
    patch: list[Operation] = [{"op": "remove", "path": json_pointer("metadata", "annotations", key)} for key in removed]
    rule = "removed; it records a placement, which only mgpu decides"
    warnings = [f"metadata.annotations[{key}]: {rule}" for key in removed]
    # Read the request without the record. Otherwise a pod that was exported with its node and record would count as a
    # pod that has its cards.
    pod = replace(pod, annotations={k: v for k, v in pod.annotations.items() if k not in removed})
    used = vocabularies(pod)
    if not used:
        return Mutation(check_size(patch), tuple(warnings))
    request = _request(pod, settings) if len(used) == 1 else None
    if request is not None and needs_scheduler_name(pod, settings):
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
            operations = list(_remove_visible_devices(container))
            patch += operations
            if operations:
                path = f"{container.path}.env[{VISIBLE_DEVICES}]"
                warnings.append(f"{path}: removed; mgpu sets it to the cards that the container gets")
    if request is not None:
        warnings += _missing_mps_user(raw, pod, request)
    return Mutation(check_size(patch), tuple(warnings))


def check_size(patch: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the patch unchanged. Raises BadObject if it has too many operations."""
    if len(patch) > budget.MAX_PATCH_OPERATIONS:
        limit = budget.MAX_PATCH_OPERATIONS
        text = f"needs {len(patch)} changes before it can run, but a patch may have at most {limit}; split the pod"
        raise BadObject([Problem("spec.containers", text, Rule.TOO_LARGE)])
    return tuple(patch)


def _request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the request; None if its vocabulary is disabled or the request is invalid."""
    try:
        return dialects.read_request(pod, settings)
    except BadObject:
        return None


def _missing_mps_user(raw: Mapping[str, Any], pod: Pod, request: GpuRequest) -> Iterator[str]:
    """Yield a warning if containers with MPS shares set no user (docs/design/slices.md, "MPS").

    `hostIPC` is not needed, because the agent gives the containers the `/dev/shm` of the MPS server (docs/mps.md).
    """
    shares = {container.container for container in dialects.device_requests(request) if is_mps(container.type)}
    if not shares:
        return
    spec = raw.get("spec") or {}
    if _runs_as_set(spec):
        return
    listed = {c.path: item for c, item in zip(pod.containers, _items(spec), strict=True) if c.name in shares}
    missing = [path for path, item in listed.items() if not _runs_as_set(item)]
    if missing:
        text = (
            "is not set; clients of CUDA MPS must run as the same user as its server unless that runs as root. "
            "mgpu does not add it"
        )
        yield f"{'spec' if len(missing) == len(listed) else missing[0]}.securityContext.runAsUser: {text}"


def _items(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the containers of the raw pod in the order of `Pod.containers`."""
    return [item or {} for kind in ("initContainers", "containers") for item in spec.get(kind) or ()]


def _runs_as_set(holder: Mapping[str, Any]) -> bool:
    context = holder.get("securityContext")
    return isinstance(context, dict) and context.get("runAsUser") is not None


def needs_scheduler_name(pod: Pod, settings: Settings) -> bool:
    """Return whether the pod's schedulerName must be set (docs/design/koordinator.md, "Upgrade webhook").

    A pod that already has a node needs no scheduler.
    """
    return settings.webhook.scheduler_name not in ("", pod.scheduler) and not pod.node


def _completed(container: Container) -> tuple[Amounts, Amounts]:
    """Return the requests and the limits. A GPU resource that only one of them names is copied to the other.

    Kubernetes demands equal requests and limits of extended resources (docs/design/kubernetes.md, "Pods").
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
    """Return the amounts with `mgpu.io/share: 1` if the container needs it, and without it otherwise.

    The kubelet calls the node agent only for a container that requests a resource that is served as device ids. So a
    container that gets cards or slices needs `mgpu.io/share` unless it requests another such resource.

    Args:
        needed: whether the container gets cards or slices.
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


def _remove_visible_devices(container: Container) -> Iterator[Operation]:
    """Yield the operations that remove the pod's own `NVIDIA_VISIBLE_DEVICES`, last position first.

    The pod's variable would override the variable from Allocate (docs/design/kubernetes.md, "Device manager"). Each
    operation of a patch applies to the result of the previous one, so each removal shifts the positions of the
    variables that follow.
    """
    for i in reversed(container.visible):
        yield {"op": "remove", "path": _pointer(container, "env", i)}


def _pointer(container: Container, *parts: str | int) -> str:
    listed = "containers" if container.stage is Stage.APP else "initContainers"
    return json_pointer("spec", listed, container.position, *parts)

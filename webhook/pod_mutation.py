"""What admission changes in a new GPU pod. Pure; `mgpu simulate` calls it too."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import koordinator
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabularies, vocabulary_of
from mgpu.model import budget
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import VISIBLE_DEVICES, Container, Pod, Stage, read_new_pod
from mgpu.model.quantities import same_quantity
from mgpu.model.slice_names import is_mps
from mgpu.serving.review import pointer
from mgpu.settings import Settings
from webhook.identities import identities

_DEFAULT_SCHEDULER = "default-scheduler"

Operation = Mapping[str, Any]
Amounts = dict[str, str]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A JSON Patch (RFC 6902), and what to tell the user. Mutating the patched pod again changes nothing more."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(raw: Mapping[str, Any], settings: Settings, user: str = "") -> Mutation:
    """The changes to a pod that is being created. user: who creates it; "": nobody of the suite.

    Placement annotations are removed from every pod, whether it asks for GPU or not and whether their vocabulary is
    enabled or not, unless one of the suite's identities creates the pod. Nothing else changes in a pod that asks for no
    GPU. Raises BadObject where the pod's JSON has parts of a wrong type, or needs more changes than a patch may hold.
    """
    pod = read_new_pod(raw)
    trusted = user in identities(settings)
    placed = [] if trusted else sorted(filter(dialects.is_placement_annotation, pod.annotations))
    patch: list[Operation] = [{"op": "remove", "path": pointer("metadata", "annotations", key)} for key in placed]
    rule = "removed; it records a placement, which only mgpu decides"
    warnings = [f"metadata.annotations[{key}]: {rule}" for key in placed]
    # The request is read without them: an exported pod has a node and a record, and looks like one that has its cards.
    pod = replace(pod, annotations={k: v for k, v in pod.annotations.items() if k not in placed})
    spoken = vocabularies(pod)
    if not spoken:
        return Mutation(_within_budget(patch), tuple(warnings))
    request = _ask(pod, settings) if len(spoken) == 1 else None
    if request is not None and _schedules(pod, settings):
        patch.append({"op": "add", "path": pointer("spec", "schedulerName"), "value": settings.webhook.scheduler_name})
        if pod.scheduler not in ("", _DEFAULT_SCHEDULER):
            warnings.append(f"spec.schedulerName: {pod.scheduler!r} is replaced; this cluster sets it for GPU pods")
    given = dialects.served(request) if request is not None else frozenset()
    for container in pod.containers:
        requests, limits = _completed(container)
        if request is not None:
            if koordinator.enabled(settings):
                requests, limits = _translated(requests, limits)
            requests, limits = _carried(container, requests, limits, settings, needed=container.name in given)
            if container.asked(SHARE) and SHARE not in requests:
                warnings.append(f"{container.path}.resources[{SHARE}]: removed; mgpu sets it where it is needed")
        patch += _set(container, "requests", container.requests, requests)
        patch += _set(container, "limits", container.limits, limits)
        if container.name in given:
            removed = list(_without_visible_devices(container))
            patch += removed
            if removed:
                path = f"{container.path}.env[{VISIBLE_DEVICES}]"
                warnings.append(f"{path}: removed; mgpu sets it to the cards that the container gets")
    return Mutation(
        _within_budget(patch), (*warnings, *(_missing_for_mps(raw, pod, request) if request is not None else ()))
    )


def _within_budget(patch: Sequence[Operation]) -> tuple[Operation, ...]:
    """Raises BadObject."""
    if len(patch) > budget.PATCH:
        text = f"needs {len(patch)} changes before it can run, more than the {budget.PATCH} of one patch; split the pod"
        raise BadObject([Problem("spec.containers", text)])
    return tuple(patch)


def _ask(pod: Pod, settings: Settings) -> GpuRequest | None:
    """None for a vocabulary that is not served, and for a broken ask: that is denied later, as it was written."""
    try:
        return dialects.read_request(pod, settings)
    except BadObject:
        return None


def _missing_for_mps(raw: Mapping[str, Any], pod: Pod, request: GpuRequest) -> Iterator[str]:
    """What a pod with slices under MPS may need beside them (docs/design/slices.md, "MPS"); it is the user's to add."""
    shares = {one.container for one in dialects.handed(request) if is_mps(one.type)}
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
    """The containers as the pod has them, in the order of `Pod.containers`."""
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
    """Requests for limits and the reverse: extended resources need both, equal (docs/design/kubernetes.md, "Pods")."""
    requests, limits = dict(container.requests), dict(container.limits)
    return (
        requests | {n: limits[n] for n in limits.keys() - requests.keys() if vocabulary_of(n)},
        limits | {n: requests[n] for n in requests.keys() - limits.keys() if vocabulary_of(n)},
    )


def _translated(requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
    """`koordinator.sh/gpu` replaced by what it stands for; unequal amounts of it are left for the validation."""
    if not same_quantity(requests.get(koordinator.GPU, ""), limits.get(koordinator.GPU, "")):
        return requests, limits
    return koordinator.translated(requests), koordinator.translated(limits)


def _carried(
    container: Container, requests: Amounts, limits: Amounts, settings: Settings, *, needed: bool
) -> tuple[Amounts, Amounts]:
    """With one `mgpu.io/share` where a container gets cards (needed) and asks for nothing served as device ids."""
    bare = replace(container, requests=_without_share(requests), limits=_without_share(limits))
    share = {SHARE: "1"} if needed and not dialects.carrier(bare, settings) else {}
    return {**bare.requests, **share}, {**bare.limits, **share}


def _without_share(amounts: Amounts) -> Amounts:
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
    """The pod's own variable would win over Allocate's (docs/design/kubernetes.md, "Device manager").

    From the back: each operation of a patch sees the list as the one before left it.
    """
    for i in reversed(container.visible):
        yield {"op": "remove", "path": _pointer(container, "env", i)}


def _pointer(container: Container, *parts: str | int) -> str:
    listed = "containers" if container.stage is Stage.APP else "initContainers"
    return pointer("spec", listed, container.position, *parts)

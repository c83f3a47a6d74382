"""Reads requests and allocation records of pods, whatever vocabulary they use.

The functions choose the dialect, so that their callers, mainly the processes and `mgpu.presentation`, need not import
one. The module of each vocabulary has the members of `mgpu.dialects.protocol.Dialect`, and `mgpu.dialects.registry`
lists these modules. The only exception is `mgpu.dialects.mtgpu`: MtgpuPods are objects of their own, so the module is
not a `Dialect`, and its callers import it by name. All functions here are pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu.dialects.mtgpu import ANNOTATIONS as MTGPU_ANNOTATIONS
from mgpu.dialects.protocol import SHARE, Dialect, UnhealthyCardLists
from mgpu.dialects.registry import (
    ALL,
    MTGPU_PREFIX,
    REQUEST_ANNOTATIONS,
    REQUEST_LABELS,
    by_name,
    enabled,
    is_placement_annotation,
    vocabulary_of,
)
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.pod_constraints import (
    CARD_UUIDS,
    PREFIX,
    SAME_CARD_GROUP,
    Constraints,
    find_contradictions,
    read_constraints,
)
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS as CONSTRAINTS
from mgpu.model.pods import SUGGESTED_NODE, Container, Node, Pod
from mgpu.model.quantities import same_quantity
from mgpu.model.raw_objects import annotation_path
from mgpu.model.resizing import RESIZE, RESIZED, held_shares, read_sizes
from mgpu.model.resource_claims import DRA
from mgpu.model.slice_names import is_slice
from mgpu.settings import CARD_POLICIES, Settings

__all__ = [
    "ALL",
    "REQUEST_ANNOTATIONS",
    "REQUEST_LABELS",
    "Dialect",
    "acknowledgement",
    "by_name",
    "card_policy",
    "cards_from_capacity",
    "carrier",
    "constraint_problems",
    "device_containers",
    "device_requests",
    "drop_unread_annotations",
    "enabled",
    "environment_of",
    "has_run",
    "has_waiting_container",
    "is_placement_annotation",
    "is_read_annotation",
    "is_request_annotation",
    "read_bare_request",
    "read_placement",
    "read_request",
    "unhealthy_card_lists",
    "unhealthy_list_of",
]

_READ = frozenset((*REQUEST_ANNOTATIONS, *CONSTRAINTS, *MTGPU_ANNOTATIONS, SUGGESTED_NODE, RESIZE))
"""The annotations that mgpu reads, except those of allocation records."""
_MAX_TEXT = 16_384
"""The most characters of an annotation that are kept. The longest valid one is a constraint with 100 entries of 128
characters."""


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the pod's request in the first enabled vocabulary that it uses, with its constraints.

    Returns None for a pod without GPUs. A bound pod with an allocation record keeps its cards, so its constraints are
    not checked. Such a pod may have been admitted under other settings. If its dialect is disabled now, or if it
    requests less than the minimum in the settings (`minGPUMemory`, `minGPUMemoryRatio`) now, its request is read
    regardless of the settings. Amounts of 0 in a bound pod are ignored, since the pod may be older than the
    installation.

    Raises:
        BadObject: with every broken rule.
    """
    try:
        request = _read_request(pod, settings)
    except BadObject:
        if (without_zeros := _without_zeros(pod)) != pod:
            return read_request(without_zeros, settings)
        request = _read_as_admitted(pod, settings)
        if request is None:
            raise
    return request or _read_as_admitted(pod, settings)


def _read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    request = read_bare_request(pod, settings)
    if request is None:
        return None
    constraints, problems = _constraints(pod, request)
    if problems and not (pod.node and any(map(is_placement_annotation, pod.annotations))):
        raise BadObject(problems)
    return replace(request, constraints=constraints)


def _without_zeros(pod: Pod) -> Pod:
    """Return a bound pod without amounts of 0, which the kubelet ignores, and any other pod unchanged."""
    if not pod.node:
        return pod
    containers = [
        replace(container, requests=_above_zero(container.requests), limits=_above_zero(container.limits))
        for container in pod.containers
    ]
    return replace(pod, containers=tuple(containers))


def _above_zero(amounts: Mapping[str, str]) -> dict[str, str]:
    return {name: amount for name, amount in amounts.items() if not same_quantity(amount, "0")}


_WIDEST = {"enabled": True, "mgpu_enable": True, "min_gpu_memory": 0, "min_gpu_memory_ratio": 1}
"""Settings under which each dialect can read all pods that it has ever admitted."""


def _read_as_admitted(pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the request regardless of the settings; None unless the pod is bound and has a readable record."""
    if not pod.node or not any(map(is_placement_annotation, pod.annotations)):
        return None
    blocks = {
        name: block.model_copy(update={k: v for k, v in _WIDEST.items() if k in type(block).model_fields})
        for name, block in settings.dialects
    }
    widest = settings.model_copy(update={"dialects": settings.dialects.model_copy(update=blocks)})
    try:
        request = _read_request(pod, widest)
        return request if request and read_placement(pod, request) else None
    except BadObject:
        return None


def read_bare_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """Return the pod's request without constraints, or None for a pod without GPUs. Raises BadObject."""
    return next((request for dialect in enabled(settings) if (request := dialect.read_request(pod, settings))), None)


def constraint_problems(pod: Pod, request: GpuRequest | None) -> tuple[Problem, ...]:
    """Return the problems with the constraints of a pod.

    Args:
        request: the pod's request; None if it cannot be read or its vocabulary is disabled.
    """
    constraints, problems = _constraints(pod, request)
    return (*problems, *find_contradictions(constraints))


def _constraints(pod: Pod, request: GpuRequest | None) -> tuple[Constraints, tuple[Problem, ...]]:
    constraints, problems = read_constraints(pod.annotations, pod.namespace, CARD_POLICIES)
    return constraints, (*problems, *_impossible(constraints, request))


def _impossible(constraints: Constraints, request: GpuRequest | None) -> Iterator[Problem]:
    """Yield a problem for each constraint that no cluster can meet for this request."""
    rule = Rule.CONSTRAINT_IMPOSSIBLE
    if request and not request.containers and device_requests(request):
        text = "is a constraint on cards, but the pod requests slices, which any card can provide; leave it out"
        yield from (Problem(annotation_path(PREFIX + key), text, rule) for key in constraints.texts())
        return
    containers = request.containers if request else ()
    several = next((c for c in containers if c.cards > 1), None)
    if constraints.same_card and several:
        text = f"all containers of the group share one card, {_cards_of(several)}"
        yield Problem(annotation_path(SAME_CARD_GROUP), text, rule)
    uuids = len(constraints.uuids)
    more = next((c for c in containers if c.cards > uuids), None)
    if uuids and more:
        text = f"names {uuids} card{'' if uuids == 1 else 's'}, {_cards_of(more)}"
        yield Problem(annotation_path(CARD_UUIDS), text, rule)


def _cards_of(container: ContainerRequest) -> str:
    return f"but container {container.container!r} requests {container.cards} cards"


def card_policy(request: GpuRequest, settings: Settings) -> str:
    """Return the name of the card policy for a pod or a claim: its constraint, or else the policy in the settings."""
    if request.dialect == DRA:
        return request.constraints.card_policy or settings.card_policy_for(settings.dra.card_policy, "binpack")
    dialect = by_name(request.dialect)
    return request.constraints.card_policy or settings.card_policy_for(
        dialect.card_policy(settings), dialect.DEFAULT_CARD_POLICY
    )


def carrier(container: Container, settings: Settings) -> str | None:
    """Return the resource whose Allocate call is answered with the container's cards, or None if there is none.

    The result is one of the resources that the container requests and that agents serve as device ids. It is the first
    one in the order of the dialects and of the resources of each dialect. `SHARE` comes last.
    """
    served: list[str] = []
    for dialect in enabled(settings):
        served += (resource.name for resource in dialect.resources((), settings) if resource.as_ids)
    for dialect in enabled(settings):
        if dialect.RESOURCES_FOLLOW_CARDS:
            names = {*container.requests, *container.limits}
            served += sorted(name for name in names if vocabulary_of(name) == dialect.NAME)
    return next((name for name in (*served, SHARE) if container.requested(name)), None)


def is_read_annotation(key: str) -> bool:
    """Return whether an annotation is part of a request, a constraint, a resize, an MtgpuPod or a record."""
    return is_request_annotation(key) or is_placement_annotation(key)


def is_request_annotation(key: str) -> bool:
    """Return whether an annotation is part of a request, a constraint, a resize or an MtgpuPod."""
    return key in _READ


def drop_unread_annotations(pod: Pod, *also: str) -> Pod:
    """Return the pod without the annotations that neither mgpu nor the caller reads.

    Other annotations may take 256 KiB of every pod. A text that is too long to be valid is truncated, and remains
    invalid. Allocation records are never truncated. At most one unknown annotation with the prefix of MtgpuPods is
    kept, which suffices to show that the pod uses that vocabulary.

    Args:
        also: the names of further annotations that the caller reads.
    """
    read: dict[str, str] = {}
    has_mtgpu = False
    for key, text in pod.annotations.items():
        if is_placement_annotation(key):
            read[key] = text
        elif key in _READ or key in also or (key.startswith(MTGPU_PREFIX) and not has_mtgpu):
            has_mtgpu = has_mtgpu or key.startswith(MTGPU_PREFIX)
            read[key] = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT]
    return pod if len(read) == len(pod.annotations) and read == pod.annotations else replace(pod, annotations=read)


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    """Return the shares in the pod's allocation record, or None if the pod has no record.

    A container that was resized has the memory that the ledger holds for it (`mgpu.model.resizing`).

    Raises BadObject if the record cannot be read, contradicts the amounts of the request, or names cards for a
    container that requests none.
    """
    shares = by_name(request.dialect).read_placement(pod, request)
    if shares is None or RESIZED not in pod.annotations:
        return shares
    return held_shares(shares, read_sizes(pod.annotations))


def acknowledgement(pod: Pod, request: GpuRequest) -> dict[str, str]:
    """Return the missing annotations that the node adds once the pod has its cards."""
    return by_name(request.dialect).acknowledgement(pod)


def device_requests(request: GpuRequest, container: str | None = None) -> tuple[ContainerRequest, ...]:
    """Return the requests for cards and slices. The agent makes no other devices visible to containers.

    Args:
        container: the container whose requests are returned; None returns the requests of all containers.
    """
    requests = (*request.containers, *(other for other in request.others if is_slice(other.type)))
    return tuple(one for one in requests if container in (None, one.container))


def device_containers(request: GpuRequest) -> frozenset[str]:
    """Return the names of the containers that request cards or slices."""
    return frozenset(one.container for one in device_requests(request))


def has_run(pod: Pod, request: GpuRequest | None) -> bool:
    """Return whether a container that requests cards or slices has ever run. Its cards must then not change.

    In a pod without such containers, the containers that request other devices are considered instead.

    Args:
        request: the pod's request. If it is None, because it cannot be read, all containers are considered.
    """
    return (
        pod.started
        if request is None
        else pod.has_run(one.container for one in device_requests(request) or request.others)
    )


def has_waiting_container(pod: Pod, request: GpuRequest) -> bool:
    """Return whether a container that requests cards or slices has not run yet."""
    return not all(pod.has_run((container,)) for container in device_containers(request))


def environment_of(
    pod: Pod, request: GpuRequest, container: str, devices: Sequence[Card], gpus: Sequence[Card]
) -> dict[str, str]:
    """Return the environment variables of a container; {} if it requests neither cards nor slices.

    `MGPU_MEMORY_BYTES` is the least memory that the container has on any of its cards or slices.

    Args:
        devices: the container's cards or slices, sorted by type and index.
        gpus: all GPUs of the node.
    """
    requests = device_requests(request, container)
    if not requests:
        return {}
    return {
        "NVIDIA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices),
        "MGPU_CARDS": ",".join(str(device.index) for device in devices),
        "MGPU_CORE_PERCENT": f"{requests[0].core / 10:g}",
        "MGPU_MEMORY_BYTES": str(min((requests[0].amount_on(device).memory for device in devices), default=0)),
        **by_name(request.dialect).environment(pod, requests[0], devices, gpus),
    }


def cards_from_capacity(node: Node, settings: Settings) -> tuple[Card, ...]:
    """Return the cards that the capacity of a node describes; () if it describes none.

    Call it only for a node without a Device object. The capacity is also read in disabled vocabularies, since the cards
    exist in any case.
    """
    return next(filter(None, (dialect.cards_from_capacity(node, settings) for dialect in ALL)), ())


def unhealthy_card_lists(settings: Settings) -> tuple[UnhealthyCardLists, ...]:
    return tuple(lists for dialect in enabled(settings) if (lists := dialect.UNHEALTHY_CARD_LISTS))


def unhealthy_list_of(raw: Mapping[str, Any]) -> tuple[str, UnhealthyCardLists] | None:
    """Return the node whose unhealthy cards a ConfigMap lists, and the format; None for any other ConfigMap."""
    for dialect in ALL:
        lists = dialect.UNHEALTHY_CARD_LISTS
        if lists and (node := lists.node_of(raw)) is not None:
            return node, lists
    return None

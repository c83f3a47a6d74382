"""The API vocabularies, each one module of the same shape (`Dialect`), and their registry.

To add one: write a module with the names of `Dialect`, add it to `ALL`, its resources to `vocabulary`, its settings
to `mgpu.settings`, and a case to the contract suite (tests/mgpu/dialects/contract.py). No dialect imports another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mgpu.dialects import gpushare, koordinator, mgpu, slices
from mgpu.dialects.mtgpu import ANNOTATIONS as OF_MTGPUPODS
from mgpu.dialects.protocol import SHARE, NodeResource
from mgpu.dialects.registry import MTGPU
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.ledger import Share
from mgpu.model.pod_constraints import ALL as WISHES
from mgpu.model.pod_constraints import (
    CARD_UUIDS,
    PREFIX,
    SAME_CARD_GROUP,
    Constraints,
    contradictions,
    field,
    read_constraints,
)
from mgpu.model.pods import Container, Pod
from mgpu.model.quantities import same_quantity
from mgpu.model.record_seals import SEAL
from mgpu.model.slice_names import is_slice
from mgpu.settings import CARD_POLICIES, Settings


class Dialect(Protocol):
    """What a dialect's module offers. All functions are pure."""

    @property
    def NAME(self) -> str: ...  # noqa: N802

    @property
    def DEFAULT_CARD_POLICY(self) -> str: ...  # noqa: N802

    @property
    def ASK_ANNOTATIONS(self) -> tuple[str, ...]:  # noqa: N802
        """The annotations that `read_ask` reads; it reads no others."""

    @property
    def RECORD_KEYS(self) -> tuple[str, ...]:  # noqa: N802
        """What each annotation begins with that `owns_annotation` is true of."""

    def enabled(self, settings: Settings) -> bool:
        """Whether pods in this vocabulary are served."""

    def card_policy(self, settings: Settings) -> str | None:
        """The dialect's own setting of the card policy, if it has one."""

    def read_request(self, pod: Pod, settings: Settings) -> GpuRequest | None:
        """What the pod asks for in this vocabulary; None: nothing. Raises BadObject with every broken rule."""

    def write_placement(
        self,
        pod: Pod,
        request: GpuRequest,
        placement: Placement,
        cards: Sequence[Card],
        settings: Settings,
        now_ns: int,
    ) -> dict[str, str]:
        """The annotations that record `placement` on `cards` (all of the node's, of all types).

        now_ns: nanoseconds since 1970.
        """

    def read_placement(self, pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
        """The shares that the pod's annotations record, as `read_placement` of this package promises."""

    def owns_annotation(self, key: str) -> bool:
        """Whether the key is written by `write_placement` (or the node): nobody else may set it."""

    def resources(self, cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
        """What a node with these cards offers in this vocabulary."""

    def environment(
        self, pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]
    ) -> dict[str, str]:
        """The dialect's own variables for a container of `pod` that got `cards`, beside and over the common ones.

        gpus: all of the node's.
        """


ALL: tuple[Dialect, ...] = (mgpu, gpushare, koordinator, slices)
ASK_ANNOTATIONS = frozenset(key for dialect in ALL for key in dialect.ASK_ANNOTATIONS)
"""The annotations that say what a pod asks for, in whatever vocabulary."""
_READ = frozenset((*ASK_ANNOTATIONS, *WISHES, *OF_MTGPUPODS))
"""The annotations that are read, beside records."""
_RECORD_KEYS = (SEAL, *(key for dialect in ALL for key in dialect.RECORD_KEYS))
_BY_NAME: Mapping[str, Dialect] = {dialect.NAME: dialect for dialect in ALL}


def enabled(settings: Settings) -> Iterator[Dialect]:
    return (dialect for dialect in ALL if dialect.enabled(settings))


def by_name(name: str) -> Dialect:
    return _BY_NAME[name]


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """What the pod asks for, in whichever enabled vocabulary, and its wishes; None: it asks for no GPU of ours.

    Raises BadObject. A pod that mixes vocabularies is refused at admission (`vocabulary.mixing`); here the first
    dialect that knows the pod reads it. A pod that has its cards keeps them: wishes count until they are decided, and
    what was admitted under other settings (a dialect enabled then, a smaller minimum) is read as it was. Nor does one
    that is bound ask for what it says 0 of: admission denies that, but it may have come before.
    """
    try:
        request = _read_request(pod, settings)
    except BadObject:
        if (bare := _without_zeros(pod)) != pod:
            return read_request(bare, settings)
        request = _admitted_once(pod, settings)
        if request is None:
            raise
    return request or _admitted_once(pod, settings)


def _read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    request = read_bare_request(pod, settings)
    if request is None:
        return None
    constraints, problems = _constraints(pod, request)
    if problems and not (pod.node and any(map(is_placement_annotation, pod.annotations))):
        raise BadObject(problems)
    return replace(request, constraints=constraints)


def _without_zeros(pod: Pod) -> Pod:
    """A pod that is bound without the amounts that are 0: for those its kubelet gives it nothing."""
    if not pod.node:
        return pod
    some = [
        replace(container, requests=_above_zero(container.requests), limits=_above_zero(container.limits))
        for container in pod.containers
    ]
    return replace(pod, containers=tuple(some))


def _above_zero(amounts: Mapping[str, str]) -> dict[str, str]:
    return {name: amount for name, amount in amounts.items() if not same_quantity(amount, "0")}


_WIDEST = {"enabled": True, "mgpu_enable": True, "min_gpu_memory": 0, "min_gpu_memory_ratio": 1}
"""Of the dialects' settings: under these, each reads all that it has ever admitted."""


def _admitted_once(pod: Pod, settings: Settings) -> GpuRequest | None:
    """The ask of a pod that is bound and whose record can be read, whatever the settings are now."""
    if not pod.node or not any(map(is_placement_annotation, pod.annotations)):
        return None
    blocks = {
        name: block.model_copy(update={k: v for k, v in _WIDEST.items() if k in type(block).model_fields})
        for name, block in settings.dialects
    }
    then = settings.model_copy(update={"dialects": settings.dialects.model_copy(update=blocks)})
    try:
        request = _read_request(pod, then)
        return request if request and read_placement(pod, request) else None
    except BadObject:
        return None


def read_bare_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    """What the pod asks for without its wishes. Raises BadObject."""
    return next((request for dialect in enabled(settings) if (request := dialect.read_request(pod, settings))), None)


def constraint_problems(pod: Pod, request: GpuRequest | None) -> tuple[Problem, ...]:
    """What is wrong with the wishes of a pod with this ask. None: an ask that cannot be read, or not in use here."""
    constraints, problems = _constraints(pod, request)
    return (*problems, *contradictions(constraints))


def _constraints(pod: Pod, request: GpuRequest | None) -> tuple[Constraints, tuple[Problem, ...]]:
    constraints, problems = read_constraints(pod.annotations, pod.namespace, CARD_POLICIES)
    return constraints, (*problems, *_unmeetable(constraints, request))


def _unmeetable(constraints: Constraints, request: GpuRequest | None) -> Iterator[Problem]:
    """Wishes that no cluster can meet for this ask: at the first container that asks for too many cards.

    And all wishes of a pod that asks for slices: they are cut wherever they can be.
    """
    if request and not request.containers and handed(request):
        text = "is a wish for cards, while the pod asks for slices, which are cut from any card; leave it out"
        yield from (Problem(field(PREFIX + key), text) for key in constraints.shown())
        return
    asking = [
        (c, f"container {c.container!r} asks for {c.cards} cards") for c in (request.containers if request else ())
    ]
    several = next((text for c, text in asking if c.cards > 1), None)
    if constraints.same_card and several:
        yield Problem(field(SAME_CARD_GROUP), f"all containers of the group share one card, {several}")
    uuids = len(constraints.uuids)
    more = next((text for c, text in asking if c.cards > uuids), None)
    if uuids and more:
        yield Problem(field(CARD_UUIDS), f"names {uuids} card{'' if uuids == 1 else 's'}, {more}")


def card_policy(request: GpuRequest, settings: Settings) -> str:
    """The name of the card policy that holds for a pod with this ask: its own wish, else as the settings say."""
    dialect = by_name(request.dialect)
    return request.constraints.card_policy or settings.card_policy_for(
        dialect.card_policy(settings), dialect.DEFAULT_CARD_POLICY
    )


def carrier(container: Container, settings: Settings) -> str | None:
    """The resource that a container's cards are handed out with: of those that it asks for and that are served as
    device ids the first by order of the dialects and of their resources, then `SHARE`; None: it asks for none.
    """
    served = [r.name for dialect in enabled(settings) for r in dialect.resources((), settings) if r.as_ids]
    if slices.enabled(settings):
        served += slices.asked_by(container)  # which slices a node serves depends on how its cards are cut
    return next((name for name in (*served, SHARE) if container.asked(name)), None)


_LONGEST = 16_384
"""Characters of an annotation of an ask. The longest wish has 100 entries of 128 characters."""


def is_placement_annotation(key: str) -> bool:
    """Return whether only the suite itself may write this annotation: it records a placement, or seals a record.

    Vocabularies that are disabled count too: whether one is enabled may change while the pod exists. A pod may have
    20,000 annotations, and each is asked about whenever the pod is read.
    """
    return key.startswith(_RECORD_KEYS) and (key == SEAL or any(dialect.owns_annotation(key) for dialect in ALL))


def is_read(key: str) -> bool:
    """Return whether an annotation is read: it is part of an ask, a wish, of an MtgpuPod or of a record."""
    return key in _READ or is_placement_annotation(key)


def without_unread(pod: Pod, *also: str) -> Pod:
    """Return the pod with those of its annotations that mgpu reads, and `also`: others may take 256 KiB of every pod.

    Of a text that is longer than any that says something, only the beginning is read, which says as little. Records are
    read as a whole. Of the annotations of MtgpuPods that say nothing, one tells that the pod has some.
    """
    read: dict[str, str] = {}
    told = False
    for key, text in pod.annotations.items():
        if is_placement_annotation(key):
            read[key] = text
        elif key in _READ or key in also or (key.startswith(MTGPU) and not told):
            told = told or key.startswith(MTGPU)
            read[key] = text if len(text) <= _LONGEST else text[:_LONGEST]
    return pod if len(read) == len(pod.annotations) and read == pod.annotations else replace(pod, annotations=read)


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    """The shares that the pod's annotations record; None: no record.

    A record says which cards a container has. How much of each is what the pod asks for: a record that gives a
    container more or less than that, or gives a container something that does not ask for it, is refused like one that
    cannot be read. Raises BadObject.
    """
    return by_name(request.dialect).read_placement(pod, request)


def handed(request: GpuRequest, container: str | None = None) -> tuple[ContainerRequest, ...]:
    """What of an ask its node hands to containers: cards and slices; of other devices the node does nothing.

    container: of this one alone.
    """
    asks = (*request.containers, *(other for other in request.others if is_slice(other.type)))
    return tuple(one for one in asks if container in (None, one.container))


def served(request: GpuRequest) -> frozenset[str]:
    """The containers that the node hands something to: all at once, since a pod may have hundreds."""
    return frozenset(one.container for one in handed(request))


def has_run(pod: Pod, request: GpuRequest | None) -> bool:
    """Whether a container of this ask that waits for what its node hands to it has ever run: then that cannot be chosen
    anew. None: of an ask that cannot be read, any container.
    """
    return pod.started if request is None else pod.has_run(one.container for one in handed(request) or request.others)


def waits(pod: Pod, request: GpuRequest) -> bool:
    """Return whether a container that waits for what its node hands to it has not run yet."""
    return not all(pod.has_run((container,)) for container in served(request))


def environment_of(
    pod: Pod, request: GpuRequest, container: str, devices: Sequence[Card], gpus: Sequence[Card]
) -> dict[str, str]:
    """What a container of `pod`, which has this ask, sees of `devices`: its own, cards or slices, by type and index.

    gpus: all of the node's. {}: the node hands nothing to this container.
    `MGPU_MEMORY_BYTES` is per card or slice; of those that differ, the smallest.
    """
    asks = handed(request, container)
    if not asks:
        return {}
    return {
        "NVIDIA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices),
        "MGPU_CARDS": ",".join(str(device.index) for device in devices),
        "MGPU_CORE_PERCENT": f"{asks[0].core / 10:g}",
        "MGPU_MEMORY_BYTES": str(min((asks[0].takes(device).memory for device in devices), default=0)),
        **by_name(request.dialect).environment(pod, asks[0], devices, gpus),
    }

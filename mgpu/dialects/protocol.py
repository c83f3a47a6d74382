"""Defines the protocol of dialects: the members that the module of each vocabulary has, and their types.

The processes call the dialects through `mgpu.dialects`, so their code does not change when a vocabulary is added
(CONTRIBUTING.md, "Adding a dialect"). A dialect assigns the functions at the end of this module to members that it does
not need.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mgpu.model.cards import GPU, Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.ledger import Share
from mgpu.model.pods import Node, Pod
from mgpu.settings import Settings

SHARE = "mgpu.io/share"
"""The resource that admission adds to a GPU container if no other resource of the container is served as device ids.
The kubelet calls Allocate only for resources that are served as device ids."""

SHARES_PER_CARD = 16
"""The number of device ids of `SHARE` for each card of a node."""

Amounts = Mapping[str, str]
"""The requests or the limits of a container: quantities by the name of the resource."""


@dataclass(frozen=True, slots=True)
class NodeResource:
    """An extended resource of a node.

    Attributes:
        amounts: the index and the amount of every device of the type, including unhealthy devices.
        as_ids: whether the device plugin serves the resource with one device id per unit. Otherwise the resource is a
            number in the node's status, the sum over healthy devices, since the kubelet cannot handle very many device
            ids (docs/design/kubernetes.md, "Device manager").
        type: the type of the devices.
        follows_settings: whether `as_ids` depends on the settings. An agent applies a change of `as_ids` only while no
            running pod holds the resource.
        of_memory: whether the resource stands for memory of cards, so that live resizes free some of it.
    """

    name: str
    amounts: tuple[tuple[int, int], ...]
    as_ids: bool
    type: str = GPU
    follows_settings: bool = False
    of_memory: bool = False


@dataclass(frozen=True, slots=True)
class UnhealthyCardLists:
    """The ConfigMaps in which administrators mark cards as unhealthy, one for each node.

    Such a ConfigMap lists the indexes of the cards in `data.gpus`, for example `0,1`.

    Attributes:
        namespace: the namespace of the ConfigMaps.
        prefix: the part of a ConfigMap's name before the name of the node.
    """

    namespace: str
    prefix: str

    def node_of(self, raw: Mapping[str, Any]) -> str | None:
        """Return the node whose cards this ConfigMap lists, or None for any other ConfigMap."""
        meta = raw["metadata"]
        name = str(meta["name"])
        node = name.removeprefix(self.prefix)
        return node if meta.get("namespace") == self.namespace and node != name else None

    def cards_of(self, raw: Mapping[str, Any]) -> frozenset[int]:
        """Return the card indexes that the ConfigMap lists. Raises BadObject if any of them is invalid."""
        data = raw.get("data")
        text = data.get("gpus", "") if isinstance(data, dict) else ""
        if not isinstance(text, str):
            raise BadObject([Problem("data.gpus", "must be a string")])
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        wrong = next((part for part in parts if not re.fullmatch(r"\d{1,9}", part, re.ASCII)), None)
        if wrong is not None:
            raise BadObject([Problem("data.gpus", f"{wrong[:40]!r} is not a card index; write a list such as 0,1")])
        return frozenset(map(int, parts))


class Dialect(Protocol):
    """The members of the module of a vocabulary. All functions are pure."""

    @property
    def NAME(self) -> str:  # noqa: N802
        """The name of the vocabulary, in settings, messages and metrics."""

    @property
    def DEFAULT_CARD_POLICY(self) -> str:  # noqa: N802
        """The card policy that applies if neither the pod nor the settings name one."""

    @property
    def RESOURCE_PREFIXES(self) -> tuple[str, ...]:  # noqa: N802
        """The prefixes of all resource names for which `owns_resource` returns true."""

    @property
    def RESOURCES_FOLLOW_CARDS(self) -> bool:  # noqa: N802
        """Whether the resources of a node depend on the partitioning of its cards."""

    @property
    def REQUEST_ANNOTATIONS(self) -> tuple[str, ...]:  # noqa: N802
        """All annotations that `read_request` reads."""

    @property
    def REQUEST_LABELS(self) -> tuple[str, ...]:  # noqa: N802
        """All labels that `read_request` reads. Users can change them at any time."""

    @property
    def RECORD_KEYS(self) -> tuple[str, ...]:  # noqa: N802
        """The prefixes of all annotations for which `owns_annotation` returns true."""

    @property
    def ACKNOWLEDGEMENTS(self) -> frozenset[str]:  # noqa: N802
        """The annotations of a record that the node writes (`acknowledgement`). Seals do not cover them."""

    @property
    def UNHEALTHY_CARD_LISTS(self) -> UnhealthyCardLists | None:  # noqa: N802
        """The ConfigMaps in which tools of this vocabulary list unhealthy cards; None if there are none."""

    def enabled(self, settings: Settings) -> bool:
        """Return whether the settings enable this vocabulary."""

    def card_policy(self, settings: Settings) -> str | None:
        """Return the card policy in the settings of this dialect, or None if it is not set."""

    def owns_resource(self, name: str) -> bool:
        """Return whether a resource belongs to this vocabulary.

        Misspelt names should belong to it too, so that `read_request` can reject them.
        """

    def normalized(self, requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
        """Return the requests and limits of a container, in resources that nodes report.

        Equivalent resources replace those that no node reports. Admission writes the result into the pod.
        """

    def read_request(self, pod: Pod, settings: Settings) -> GpuRequest | None:
        """Return the pod's request in this vocabulary, or None. Raises BadObject with every broken rule."""

    def write_placement(
        self,
        pod: Pod,
        request: GpuRequest,
        placement: Placement,
        cards: Sequence[Card],
        settings: Settings,
        now_ns: int,
    ) -> dict[str, str]:
        """Return the annotations that record a placement.

        Args:
            cards: the node's devices of all types.
            now_ns: the time in nanoseconds since 1970.
        """

    def read_placement(self, pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
        """Return the shares that the pod's annotations record, as `mgpu.dialects.read_placement` describes."""

    def owns_annotation(self, key: str) -> bool:
        """Return whether `write_placement` or the node writes this annotation. Users must not set such annotations."""

    def acknowledgement(self, pod: Pod) -> dict[str, str]:
        """Return the annotations that the node adds to the record once the pod has its cards, if they are missing."""

    def resources(self, cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
        """Return the resources of a node with these cards in this vocabulary."""

    def cards_from_capacity(self, node: Node, settings: Settings) -> tuple[Card, ...]:
        """Return the cards that the capacity of a node without a Device object describes in this vocabulary."""

    def environment(
        self, pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]
    ) -> dict[str, str]:
        """Return the vocabulary's own variables for a container. They override the common variables.

        Args:
            request: the request of the container.
            cards: the cards or slices of the container.
            gpus: all GPUs of the node.
        """


def unrequested_problems(
    requests: Iterable[ContainerRequest], record: Mapping[str, Any], path: str
) -> Iterator[Problem]:
    """Yield a problem for each type of devices that a record gives to a container that does not request it.

    Args:
        record: the devices by container and type, which have not been validated.
        path: the path of the record, which the problems name.
    """
    requested = {(request.container, request.type) for request in requests}
    for container, row in record.items():
        for type in row if isinstance(row, dict) else (row,):
            if (container, type) not in requested:
                text = f"gives {str(type)[:40]!r} to container {container[:63]!r}, which does not request it"
                yield Problem(path, text)


# A dialect assigns the following functions to members that it does not need.


def unchanged(requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
    """Implement `normalized` for a vocabulary whose resources need not be replaced."""
    return requests, limits


def nothing_to_acknowledge(pod: Pod) -> dict[str, str]:  # noqa: ARG001
    """Implement `acknowledgement` for a vocabulary in which the node adds nothing to the record."""
    return {}


def no_cards_from_capacity(node: Node, settings: Settings) -> tuple[Card, ...]:  # noqa: ARG001
    """Implement `cards_from_capacity` for a vocabulary in which a node's capacity does not describe its cards."""
    return ()


def no_variables(
    pod: Pod,  # noqa: ARG001
    request: ContainerRequest,  # noqa: ARG001
    cards: Sequence[Card],  # noqa: ARG001
    gpus: Sequence[Card],  # noqa: ARG001
) -> dict[str, str]:
    """Implement `environment` for a vocabulary without variables of its own."""
    return {}

"""What a dialect is: the names that each module of a vocabulary offers, and the types that it uses for them.

The processes call dialects through `mgpu.dialects` and import none by name, so that a vocabulary is one module. Members
that a vocabulary has no need of are assigned from the functions at the end of this module. Everything here is pure.
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
"""The resource of a container that requests no other resource served as device ids, so that the kubelet calls Allocate
for it."""

SHARES_PER_CARD = 16

Amounts = Mapping[str, str]
"""A container's requests or limits: resource name → quantity."""


@dataclass(frozen=True, slots=True)
class NodeResource:
    """An extended resource of a node.

    Attributes:
        amounts: (card index, amount) for every card, unhealthy ones too.
        as_ids: whether the device plugin serves it, one device id per unit. Otherwise it is a number in the node's
            status, summed over healthy cards: the kubelet cannot handle ids for resources with very many units
            (docs/design/kubernetes.md, "Device manager").
        type: the type of the cards.
        follows_settings: whether `as_ids` depends on the settings. A node changes such a resource only while no running
            pod holds it in its former form.
    """

    name: str
    amounts: tuple[tuple[int, int], ...]
    as_ids: bool
    type: str = GPU
    follows_settings: bool = False


@dataclass(frozen=True, slots=True)
class UnhealthyCardLists:
    """ConfigMaps by which administrators mark cards as unhealthy, one per node: `data.gpus` is `0,1`.

    Attributes:
        prefix: begins the name of the ConfigMap; the name of the node follows.
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
        """Return the card indexes that the ConfigMap lists; an empty list marks none.

        Raises BadObject: a list is read as a whole or not at all.
        """
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
    """What the module of a vocabulary offers. All functions are pure."""

    @property
    def NAME(self) -> str: ...  # noqa: N802

    @property
    def DEFAULT_CARD_POLICY(self) -> str: ...  # noqa: N802

    @property
    def RESOURCE_PREFIXES(self) -> tuple[str, ...]:  # noqa: N802
        """The prefixes of all resource names for which `owns_resource` is true."""

    @property
    def RESOURCES_FOLLOW_CARDS(self) -> bool:  # noqa: N802
        """Whether a node serves as device ids whatever resource of the vocabulary its cards are cut into."""

    @property
    def REQUEST_ANNOTATIONS(self) -> tuple[str, ...]:  # noqa: N802
        """The annotations that `read_request` reads. It reads no others."""

    @property
    def RECORD_KEYS(self) -> tuple[str, ...]:  # noqa: N802
        """The prefixes of all annotations for which `owns_annotation` is true."""

    @property
    def ACKNOWLEDGEMENTS(self) -> frozenset[str]:  # noqa: N802
        """The annotations of a record that the node writes (`acknowledgement`). Seals do not cover them."""

    @property
    def UNHEALTHY_CARD_LISTS(self) -> UnhealthyCardLists | None:  # noqa: N802
        """The ConfigMaps in which this vocabulary's own tools list unhealthy cards; None where it has none."""

    def enabled(self, settings: Settings) -> bool:
        """Return whether pods of this vocabulary are served."""

    def card_policy(self, settings: Settings) -> str | None:
        """Return the dialect's own setting of the card policy, or None where it is not set."""

    def owns_resource(self, name: str) -> bool:
        """Return whether a resource belongs to this vocabulary.

        Misspelt names that no other vocabulary claims belong to it too, so that `read_request` can refuse them.
        """

    def normalized(self, requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
        """Return a container's requests and limits as admission rewrites them, in names that a node serves."""

    def read_request(self, pod: Pod, settings: Settings) -> GpuRequest | None:
        """Return what the pod requests in this vocabulary, or None. Raises BadObject with every broken rule."""

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
            cards: all devices of the node, of all types.
            now_ns: nanoseconds since 1970.
        """

    def read_placement(self, pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
        """Return the shares that the pod's annotations record, as `mgpu.dialects.read_placement` describes."""

    def owns_annotation(self, key: str) -> bool:
        """Return whether `write_placement` or the node writes this annotation, so that users must not set it."""

    def acknowledgement(self, pod: Pod) -> dict[str, str]:
        """Return the annotations that the node writes once it has handed the cards out; {} where none are missing."""

    def resources(self, cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
        """Return what a node with these cards offers in this vocabulary."""

    def cards_from_capacity(self, node: Node, settings: Settings) -> tuple[Card, ...]:
        """Return the cards of a node without a Device object, as its capacity in this vocabulary describes them."""

    def environment(
        self, pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]
    ) -> dict[str, str]:
        """Return the dialect's own variables for a container that got `cards`. They override the common ones.

        Args:
            gpus: all GPUs of the node.
        """


def unrequested_problems(
    requests: Iterable[ContainerRequest], record: Mapping[str, Any], path: str
) -> Iterator[Problem]:
    """Yield a problem for each type of devices that a record gives to a container that does not request it.

    Args:
        record: container → type → devices, not validated.
        path: the path of the record, for the problems.
    """
    requested = {(request.container, request.type) for request in requests}
    for container, row in record.items():
        for type in row if isinstance(row, dict) else (row,):
            if (container, type) not in requested:
                text = f"gives {str(type)[:40]!r} to container {container[:63]!r}, which does not request it"
                yield Problem(path, text)


# The following functions are the members of dialects that do not need them.


def unchanged(requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
    """`normalized` of a vocabulary whose names a node serves as they are."""
    return requests, limits


def nothing_to_acknowledge(pod: Pod) -> dict[str, str]:  # noqa: ARG001
    """`acknowledgement` of a vocabulary whose record is complete when the pod is bound."""
    return {}


def no_cards_from_capacity(node: Node, settings: Settings) -> tuple[Card, ...]:  # noqa: ARG001
    """`cards_from_capacity` of a vocabulary that says nothing of cards in a node's capacity."""
    return ()


def no_variables(
    pod: Pod,  # noqa: ARG001
    request: ContainerRequest,  # noqa: ARG001
    cards: Sequence[Card],  # noqa: ARG001
    gpus: Sequence[Card],  # noqa: ARG001
) -> dict[str, str]:
    """`environment` of a vocabulary for which the common variables suffice."""
    return {}

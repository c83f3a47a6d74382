"""Defines GPU requests, placements and rejections, in one form for all vocabularies.

A dialect reads a `GpuRequest` from a pod, the placement engine (`scheduler.engine.placement`) answers with a
`Placement` or a `Rejection`, and the dialect writes the placement into the allocation record.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mgpu.model.cards import GPU, WHOLE_CORE, WHOLE_RATIO, Card, noun
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Node, Stage


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """The request of one container: `cards` distinct cards of a type, and the same share of each.

    Attributes:
        core: the core of each card, in milli.
        memory: the memory of each card, in bytes.
        whole: whether the container gets whole idle cards. In this case core is 1000 and memory is 0.
        ratio: the memory of each card, in percent (`amount_of`); None if the request states no percentage.
        is_nvidia_gpu: whether the resource is `nvidia.com/gpu`, which NVIDIA's device plugin serves on some nodes.
    """

    container: str
    cards: int = 1
    core: int = 0
    memory: int = 0
    whole: bool = False
    stage: Stage = Stage.APP
    ratio: int | None = None
    type: str = GPU
    is_nvidia_gpu: bool = False

    def amount_on(self, card: Card) -> "Amount":
        return whole_card_amount(card) if self.whole else amount_of(self.core, self.memory, self.ratio, card)


def whole_cards(
    container: str, cards: int, stage: Stage = Stage.APP, *, is_nvidia_gpu: bool = False
) -> ContainerRequest:
    return ContainerRequest(container, cards, core=WHOLE_CORE, whole=True, stage=stage, is_nvidia_gpu=is_nvidia_gpu)


class Amount(NamedTuple):
    """An amount of one card: the core in milli, the memory in bytes, and the memory in percent (`ratio`).

    `shares` is the number of containers that use the amount.
    """

    core: int = 0
    memory: int = 0
    shares: int = 0
    ratio: int = 0


def whole_card_amount(card: Card) -> Amount:
    return Amount(card.core, card.memory, 1, WHOLE_RATIO)


def amount_of(core: int, memory: int, ratio: int | None, card: Card) -> Amount:
    """Return the amount of a card that one container needs (docs/design/koordinator.md, "Conversion").

    If `ratio` is None, the request states no percentage, and the percentage of the result is 0. With a `ratio`, if one
    of `memory` and `ratio` is 0, it is computed from the other. Bytes are rounded down, and percentages are rounded up.
    """
    if ratio is None:
        return Amount(core, memory, 1)
    bytes_of_ratio, ratio_of_bytes = ratio * card.memory // 100, -(-100 * memory // max(1, card.memory))
    return Amount(core, memory or bytes_of_ratio, 1, ratio or ratio_of_bytes)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A label that a pod requires of its node.

    Attributes:
        allowed: the values that the label may have.
        reason: the reason why other nodes do not fit. `{found}` in it stands for the node's value.
        default: the value that counts for a node without the label.
    """

    label: str
    allowed: tuple[str, ...]
    reason: str
    default: str = ""

    def unmet_requirement(self, node: Node) -> str | None:
        found = node.labels.get(self.label, self.default)
        return None if found in self.allowed else self.reason.replace("{found}", found or "not set")


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The request of one pod.

    Attributes:
        containers: the requests for GPUs, one for each container that requests some, in start order.
        max_shares: the most containers of all pods that may share a card of this pod; 0 for any number.
        requirements: the requirements on the node. The first unmet one is reported.
        constraints: the constraints on cards that the pod sets in annotations.
        others: the requests for devices of other types, in start order within each type.
        isolation: the isolation back end that the pod names (`mgpu.model.isolation`); "" if it names none.
    """

    dialect: str
    containers: tuple[ContainerRequest, ...]
    max_shares: int = 0
    requirements: tuple[Requirement, ...] = ()
    constraints: Constraints = NO_CONSTRAINTS
    others: tuple[ContainerRequest, ...] = ()
    isolation: str = ""

    def unmet_requirement(self, node: Node) -> str | None:
        return next((reason for r in self.requirements if (reason := r.unmet_requirement(node))), None)


def peak(uses: Iterable[tuple[Stage, Amount]]) -> Amount:
    """Return the most that a pod needs of one card at any time.

    The kubelet runs an init container beside the sidecars that started before it, and the app containers beside all
    sidecars (KEP-753).

    Args:
        uses: the stage and the amount of each container on that card, in start order.
    """
    running = [0] * len(Amount._fields)
    busiest = [0] * len(Amount._fields)
    for stage, amount in uses:
        for i, value in enumerate(amount):
            busiest[i] = max(busiest[i], running[i] + value)
            if stage is not Stage.INIT:
                running[i] += value
    return Amount(*busiest)


@dataclass(frozen=True, slots=True)
class Placement:
    """The card indexes of each container of a request, ascending, in the order of the request.

    Attributes:
        proven: whether it is proven that no better placement exists. False only if the search reached its limits.
        others: the type, the container and the indexes for each request of devices of another type.
    """

    containers: tuple[tuple[str, tuple[int, ...]], ...]
    proven: bool = field(default=True, compare=False)
    others: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    # This is a table, since `cards` is called for every container on every card, and a pod may have 256 containers.
    _cards: Mapping[tuple[str, str], tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = {(type, name): cards for type, name, cards in self.others}
        table.update(((GPU, name), cards) for name, cards in self.containers)
        object.__setattr__(self, "_cards", table)

    def cards(self, container: str, type: str = GPU) -> tuple[int, ...]:
        """Return the indexes of the container's devices of this type; () for none."""
        return self._cards.get((type, container), ())


class RejectionKind(StrEnum):
    """The kind of a rejection, and the value of the label `reason` of the metric `mgpu_rejections_total`.

    The values must not change. A new kind needs a row in docs/metrics.md, in the same order.
    """

    GATED = "gated"
    BINDINGS_FAIL = "bindings-fail"
    AGENT = "agent"
    CORE_AND_MEMORY = "core-and-memory"
    CORE = "core"
    MEMORY = "memory"
    UNHEALTHY = "unhealthy"
    MTGPUPODS = "mtgpupods"
    IN_USE = "in-use"
    SHARES = "shares"
    NVIDIA_PLUGIN = "nvidia-plugin"
    SLICES = "slices"
    NO_DEVICE = "no-device"
    CONSTRAINT = "constraint"
    NOT_TOGETHER = "not-together"
    NOT_PROVEN = "not-proven"
    NODE_LABEL = "node-label"
    OTHER_DEVICE = "other-device"
    BOUND_ALREADY = "bound-already"
    UNKNOWN_NODE = "unknown-node"
    GANG = "gang"
    MALFORMED = "malformed"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class CardRefusal:
    """The reason why a container does not fit on one card.

    Attributes:
        reason: a short text such as `unhealthy` or `memory 4.0 GiB short`. Cards with equal texts are counted together.
    """

    index: int
    kind: RejectionKind
    reason: str
    type: str = GPU


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a pod cannot be placed, on one node or on all nodes.

    Attributes:
        kind: the label value under which metrics count the rejection.
        hopeless: whether evicting pods from the node cannot help, for example because it has no such card.
        proven: whether it is proven that the pod does not fit. False if the search reached its limits before. Then
            `hopeless` is False too.
    """

    kind: RejectionKind
    reason: str
    cards: tuple[CardRefusal, ...] = ()
    hopeless: bool = False
    proven: bool = True

    def __str__(self) -> str:
        """Return one line for Events and answers: `3 cards: 2 memory 4.0 GiB short, 1 unhealthy`."""
        if not self.cards:
            return self.reason
        cards = f"{len(self.cards)} {noun(self.cards[0].type)}{'s' if len(self.cards) != 1 else ''}"
        listed = f"{cards}: {', '.join(f'{n} {reason}' for reason, n in _counted(self.cards))}"
        return f"{self.reason} ({listed})" if self.reason else listed

    def summary(self) -> "Rejection":
        """Return the same rejection with its whole text as the reason, and without its cards.

        kube-scheduler counts the nodes with equal texts and puts the number before the text:
        `0/3 nodes are available: 2 insufficient GPU (8 cards: 8 unhealthy)`.
        """
        if not self.cards:
            return self
        type = self.cards[0].type
        text = str(self) if self.reason else f"insufficient {'GPU' if type == GPU else type} ({self})"
        return Rejection(self.kind, text, hopeless=self.hopeless, proven=self.proven)


def cards_rejection(cards: Sequence[CardRefusal], reason: str = "") -> Rejection:
    """Return the rejection of a node on which no card fits. Its kind is that of the most frequent reason.

    Args:
        cards: the reason for each card; at least one.
    """
    first, _ = _counted(cards)[0]
    kind = next(card.kind for card in cards if card.reason == first)
    return Rejection(kind, reason, tuple(cards))


def _counted(cards: Sequence[CardRefusal]) -> list[tuple[str, int]]:
    """Return each reason with its number of cards, in descending order of the number and then by text."""
    counts = Counter(card.reason for card in cards)
    return sorted(counts.items(), key=lambda row: (-row[1], row[0]))


def cards_by_index(cards: Sequence[Card], type: str = GPU) -> Mapping[int, Card]:
    return {card.index: card for card in cards if card.type == type}

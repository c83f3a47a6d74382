"""What a pod requests, where it is placed, and why it cannot be: one form for all vocabularies.

Dialects make a `GpuRequest` of a pod, the placement engine answers with a `Placement` or a `Rejection`, and dialects
write the placement into a record.
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
    """What one container requests: `cards` distinct cards of a type, and the same share of each.

    Attributes:
        core: milli of each card.
        memory: bytes of each card.
        whole: whether it takes idle cards as a whole. Then core is 1000 and memory 0, whatever the card has.
        ratio: percent of each card's memory (`amount_of`); None for a request that does not count in percent.
        is_nvidia_gpu: whether it is written as `nvidia.com/gpu`, which NVIDIA's own device plugin serves on some nodes.
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
        """Return what this container takes of a card."""
        return whole_card_amount(card) if self.whole else amount_of(self.core, self.memory, self.ratio, card)


def whole_cards(
    container: str, cards: int, stage: Stage = Stage.APP, *, is_nvidia_gpu: bool = False
) -> ContainerRequest:
    return ContainerRequest(container, cards, core=WHOLE_CORE, whole=True, stage=stage, is_nvidia_gpu=is_nvidia_gpu)


class Amount(NamedTuple):
    """An amount of one card: core in milli, memory in bytes, number of containers, memory in percent."""

    core: int = 0
    memory: int = 0
    shares: int = 0
    ratio: int = 0


def whole_card_amount(card: Card) -> Amount:
    return Amount(card.core, card.memory, 1, WHOLE_RATIO)


def amount_of(core: int, memory: int, ratio: int | None, card: Card) -> Amount:
    """Return one container's share of a card (docs/design/koordinator.md, "Conversion").

    Of `memory` and `ratio` the one that is 0 follows from the other: bytes are rounded down, percent up.
    """
    if ratio is None:
        return Amount(core, memory, 1)
    bytes_of_ratio, ratio_of_bytes = ratio * card.memory // 100, -(-100 * memory // max(1, card.memory))
    return Amount(core, memory or bytes_of_ratio, 1, ratio or ratio_of_bytes)


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a node label must be for a pod.

    Attributes:
        default: stands for an absent label.
        reason: why another node is refused; `{found}` in it is replaced by the node's value.
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
    """What one pod requests.

    Attributes:
        containers: those that request GPUs, in start order, each once.
        max_shares: the most containers on a card that it uses; 0 for any number.
        requirements: what the node must be. The first unmet one is the reason.
        constraints: what the pod demands of its cards beside its vocabulary.
        others: requests for devices of other types, per type in start order.
    """

    dialect: str
    containers: tuple[ContainerRequest, ...]
    max_shares: int = 0
    requirements: tuple[Requirement, ...] = ()
    constraints: Constraints = NO_CONSTRAINTS
    others: tuple[ContainerRequest, ...] = ()

    def unmet_requirement(self, node: Node) -> str | None:
        return next((reason for r in self.requirements if (reason := r.unmet_requirement(node))), None)


def peak(uses: Iterable[tuple[Stage, Amount]]) -> Amount:
    """Return what a pod needs of one card at its busiest moment.

    The kubelet runs an init container beside the sidecars started before it, and the app containers beside all sidecars
    (KEP-753).

    Args:
        uses: its containers on that card in start order.
    """
    running, busiest = [0] * len(Amount._fields), [0] * len(Amount._fields)
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
        proven: whether no better placement exists; False only where the search reached its limits.
        others: type, container and indexes for each request for devices of other types.
    """

    containers: tuple[tuple[str, tuple[int, ...]], ...]
    proven: bool = field(default=True, compare=False)
    others: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    # A table, since `cards` is called for every container on every card: a pod may have hundreds of containers.
    _of: Mapping[tuple[str, str], tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = {(type, name): cards for type, name, cards in self.others}
        known.update(((GPU, name), cards) for name, cards in self.containers)
        object.__setattr__(self, "_of", known)

    def cards(self, container: str, type: str = GPU) -> tuple[int, ...]:
        """Return the container's cards of this type; () for none."""
        return self._of.get((type, container), ())


class RejectionKind(StrEnum):
    """What keeps a pod off a node, or off all of them.

    The values are label values of the metric `mgpu_rejections_total` (docs/metrics.md), so users' dashboards and alerts
    rely on them. A new kind needs a row there; the order is that of the document.
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
    CONSTRAINT = "wish"
    NOT_TOGETHER = "not-together"
    NOT_PROVEN = "not-proven"
    NODE_LABEL = "node-label"
    OTHER_DEVICE = "other-device"
    BOUND_ALREADY = "bound-already"
    UNKNOWN_NODE = "unknown-node"
    MALFORMED = "malformed"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class CardRefusal:
    """Why one card cannot serve a container.

    reason: a short text such as `unhealthy` or `memory 4.0 GiB short`. Cards with the same text are counted together.
    """

    index: int
    kind: RejectionKind
    reason: str
    type: str = GPU


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a pod cannot be placed, on one node or on any.

    kind: what to count the rejection under. The code that finds the reason sets it; no code reads it out of the text.
    hopeless: evicting pods from the node cannot help, because it has no such card or the wrong label.
    proven: the pod does not fit. False where the search ended before that was known; such a rejection is never
    hopeless.
    """

    kind: RejectionKind
    reason: str
    cards: tuple[CardRefusal, ...] = ()
    hopeless: bool = False
    proven: bool = True

    def __str__(self) -> str:
        """One line for Events and replies: `3 cards: 2 memory 4.0 GiB short, 1 unhealthy`."""
        if not self.cards:
            return self.reason
        cards = f"{len(self.cards)} {noun(self.cards[0].type)}{'s' if len(self.cards) != 1 else ''}"
        listed = f"{cards}: {', '.join(f'{n} {reason}' for reason, n in _counted(self.cards))}"
        return f"{self.reason} ({listed})" if self.reason else listed

    def summary(self) -> "Rejection":
        """Return the same rejection with its whole text as the reason and without its cards.

        The text reads well behind a number of nodes, since kube-scheduler adds nodes with equal texts up:
        `0/3 nodes are available: 2 insufficient GPU (8 cards: 8 unhealthy)`.
        """
        if not self.cards:
            return self
        type = self.cards[0].type
        text = str(self) if self.reason else f"insufficient {'GPU' if type == GPU else type} ({self})"
        return Rejection(self.kind, text, hopeless=self.hopeless, proven=self.proven)


def cards_rejection(cards: Sequence[CardRefusal], reason: str = "") -> Rejection:
    """Return the rejection of a node none of whose cards can serve, of the kind that most of its cards have."""
    first, _ = _counted(cards)[0]
    kind = next(card.kind for card in cards if card.reason == first)
    return Rejection(kind, reason, tuple(cards))


def _counted(cards: Sequence[CardRefusal]) -> list[tuple[str, int]]:
    """Return each reason and how many cards have it, the commonest first, equally common ones by their text."""
    counts = Counter(card.reason for card in cards)
    return sorted(counts.items(), key=lambda row: (-row[1], row[0]))


def cards_by_index(cards: Sequence[Card], type: str = GPU) -> Mapping[int, Card]:
    """Return the devices of a type by their index."""
    return {card.index: card for card in cards if card.type == type}

"""What a pod asks for and where it is put: one form for all dialects."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mgpu.model.cards import GPU, WHOLE_CORE, WHOLE_RATIO, Card, noun
from mgpu.model.pod_constraints import NONE, Constraints
from mgpu.model.pods import Node, Stage


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """`cards` distinct cards of a type; of each `core` milli and `memory`, or all of it (`whole`: only idle cards).

    A whole ask has core 1000 and memory 0; what it takes is the memory of the card it gets.
    memory: bytes. ratio: percent of the card's memory (`amount_of`); None: the ask does not count in percent.
    stock: asked for as `nvidia.com/gpu`, which NVIDIA's own plugin serves on some nodes.
    """

    container: str
    cards: int = 1
    core: int = 0
    memory: int = 0
    whole: bool = False
    stage: Stage = Stage.APP
    ratio: int | None = None
    type: str = GPU
    stock: bool = False

    def takes(self, card: Card) -> "Amount":
        """What this container takes of `card`."""
        return whole_of(card) if self.whole else amount_of(self.core, self.memory, self.ratio, card)


def whole_cards(container: str, cards: int, stage: Stage = Stage.APP, *, stock: bool = False) -> ContainerRequest:
    return ContainerRequest(container, cards, core=WHOLE_CORE, whole=True, stage=stage, stock=stock)


class Amount(NamedTuple):
    """Of one card: core in milli, memory in bytes, number of containers, memory in percent."""

    core: int = 0
    memory: int = 0
    shares: int = 0
    ratio: int = 0


def whole_of(card: Card) -> Amount:
    return Amount(card.core, card.memory, 1, WHOLE_RATIO)


def amount_of(core: int, memory: int, ratio: int | None, card: Card) -> Amount:
    """One container's share of `card`, memory in bytes and in percent (docs/design/koordinator.md, "Conversion").

    Of `memory` and `ratio` the one that is 0 follows from the other: bytes are rounded down, percent up.
    """
    if ratio is None:
        return Amount(core, memory, 1)
    bytes_of_ratio, ratio_of_bytes = ratio * card.memory // 100, -(-100 * memory // max(1, card.memory))
    return Amount(core, memory or bytes_of_ratio, 1, ratio or ratio_of_bytes)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The node label `label` (`default` where absent) must be one of `allowed`, else `reason` says why not.

    `{found}` in the reason stands for what the node has.
    """

    label: str
    allowed: tuple[str, ...]
    reason: str
    default: str = ""

    def unmet(self, node: Node) -> str | None:
        found = node.labels.get(self.label, self.default)
        return None if found in self.allowed else self.reason.replace("{found}", found or "not set")


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What one pod asks for. `containers`: those that ask for GPU, in start order, none of them twice.

    others: the same for devices of other types, per type in start order and none twice.
    max_shares: at most so many containers on a card it uses (0: any number).
    requirements: what the node must be; the first unmet one is the reason.
    wishes: what the pod says beside its dialect.
    """

    dialect: str
    containers: tuple[ContainerRequest, ...]
    max_shares: int = 0
    requirements: tuple[Requirement, ...] = ()
    constraints: Constraints = NONE
    others: tuple[ContainerRequest, ...] = ()

    def unmet(self, node: Node) -> str | None:
        return next((reason for r in self.requirements if (reason := r.unmet(node))), None)


def peak(uses: Iterable[tuple[Stage, Amount]]) -> Amount:
    """What a pod needs of one card at its busiest moment; `uses` are its containers on that card in start order.

    As the kubelet runs them (KEP-753): an init container runs beside the sidecars started before it, the app
    containers beside all sidecars. Per dimension: max(init containers, sum of sidecars and app containers).
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
    """The card indexes of each container of an ask, ascending, in the ask's order.

    others: type, container and indexes, for each of the ask's others.
    proven: no better placement exists. False only where the search ended at its limits.
    """

    containers: tuple[tuple[str, tuple[int, ...]], ...]
    proven: bool = field(default=True, compare=False)
    others: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    # Asked of every container on every card: a pod may have hundreds of them.
    _of: Mapping[tuple[str, str], tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = {(type, name): cards for type, name, cards in self.others}
        known.update(((GPU, name), cards) for name, cards in self.containers)
        object.__setattr__(self, "_of", known)

    def cards(self, container: str, type: str = GPU) -> tuple[int, ...]:
        """The container's cards of this type; () for one that has none."""
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


def by_index(cards: Sequence[Card], type: str = GPU) -> Mapping[int, Card]:
    return {card.index: card for card in cards if card.type == type}

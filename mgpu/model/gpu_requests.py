"""What a pod asks for and where it is put: one form for all dialects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class CardRefusal:
    """Why one card cannot serve: a kind to add up by (`unhealthy`, `memory 4.0 GiB short`), as people read it."""

    index: int
    reason: str
    type: str = GPU


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a node cannot take a pod. `hopeless`: evicting pods there cannot help (no such card, wrong label).

    proven: the pod does not fit. False where the search was ended before that was known; never hopeless then.
    """

    reason: str
    cards: tuple[CardRefusal, ...] = ()
    hopeless: bool = False
    proven: bool = True

    def __str__(self) -> str:
        """One line for Events and replies: `3 cards: 2 memory 4.0 GiB short, 1 unhealthy`."""
        if not self.cards:
            return self.reason
        counts: dict[str, int] = {}
        for refusal in self.cards:
            counts[refusal.reason] = counts.get(refusal.reason, 0) + 1
        rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
        cards = f"{len(self.cards)} {noun(self.cards[0].type)}{'s' if len(self.cards) != 1 else ''}"
        listed = f"{cards}: {', '.join(f'{n} {reason}' for reason, n in rows)}"
        return f"{self.reason} ({listed})" if self.reason else listed


def by_index(cards: Sequence[Card], type: str = GPU) -> Mapping[int, Card]:
    return {card.index: card for card in cards if card.type == type}

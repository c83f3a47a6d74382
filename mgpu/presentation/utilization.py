"""Computes how much of a cluster's cards is in use, by node, by model and by pod.

`mgpu top` prints the results. Scripts read the keys that the JSON functions return, so the keys must not change.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mgpu.presentation.card_views import CardUse, CardView, NodeView, percent

_UNKNOWN_MODEL = "not said"


@dataclass(frozen=True, slots=True)
class Figures:
    """The use of a group of cards.

    Attributes:
        name: the name of the group: a node, a model, or the cluster.
        idle: the number of healthy cards that no pod holds.
        core_used: the core that pods hold, in thousandths of a card. A card over its capacity counts as full.
        core: the core of all cards, in thousandths of a card.
        memory_used: the memory that pods hold, in bytes. A card over its capacity counts as full.
        memory: the memory of all cards, in bytes.
        models: the card models, sorted.
    """

    name: str
    nodes: int = 0
    cards: int = 0
    idle: int = 0
    unhealthy: int = 0
    core_used: int = 0
    core: int = 0
    memory_used: int = 0
    memory: int = 0
    models: tuple[str, ...] = ()

    @property
    def core_share(self) -> float:
        return self.core_used / self.core if self.core else 0.0

    @property
    def memory_share(self) -> float:
        return self.memory_used / self.memory if self.memory else 0.0


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The distribution of the free capacity over healthy cards.

    Core is in thousandths of a card, and memory is in bytes. Partitioned cards count only in `partitioned`.

    Attributes:
        idle, idle_core, idle_memory: the number of cards that no pod holds, and their core and memory.
        part, part_core, part_memory: the number of cards in use with both free core and free memory, and these free
            amounts.
        most_core, most_memory: the largest free core and the largest free memory of a card that counts in `part`.
        useless_core: the free core of cards in use without free memory.
        useless_memory: the free memory of cards in use without free core.
    """

    idle: int = 0
    idle_core: int = 0
    idle_memory: int = 0
    part: int = 0
    part_core: int = 0
    part_memory: int = 0
    most_core: int = 0
    most_memory: int = 0
    useless_core: int = 0
    useless_memory: int = 0
    partitioned: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod with the sum of its holdings. Its core is in thousandths of a card, and its memory is in bytes."""

    pod: str
    dialect: str
    nodes: tuple[str, ...]
    cards: int
    core: int
    memory: int


SORTS: Mapping[str, Callable[[Figures], tuple[Any, ...]]] = MappingProxyType(
    {
        "core": lambda row: (-row.core_share, -row.memory_share, row.name),
        "memory": lambda row: (-row.memory_share, -row.core_share, row.name),
        "cards": lambda row: (-row.cards, row.name),
        "idle": lambda row: (-row.idle, row.name),
        "name": lambda row: (row.name,),
    }
)


def sum_cards(name: str, rows: Iterable[tuple[str, CardView]]) -> Figures:
    """Return the figures of these cards.

    Args:
        rows: the name of the node and the card, for each card.
    """
    rows = list(rows)
    states = [view.state for _, view in rows]
    return Figures(
        name,
        nodes=len({node for node, _ in rows}),
        cards=len(states),
        idle=sum(s.idle and s.card.healthy for s in states),
        unhealthy=sum(not s.card.healthy for s in states),
        core_used=sum(min(s.core_used, s.card.core) for s in states),
        core=sum(s.card.core for s in states),
        memory_used=sum(min(s.memory_used, s.card.memory) for s in states),
        memory=sum(s.card.memory for s in states),
        models=tuple(sorted({s.card.model or _UNKNOWN_MODEL for s in states})),
    )


def by_node(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each node with cards, in the order of `nodes`."""
    return [sum_cards(node.name, ((node.name, card) for card in node.cards)) for node in nodes if node.cards]


def by_model(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each card model, sorted by model."""
    found: dict[str, list[tuple[str, CardView]]] = {}
    for node in nodes:
        for view in node.cards:
            found.setdefault(view.state.card.model or _UNKNOWN_MODEL, []).append((node.name, view))
    return [sum_cards(model, found[model]) for model in sorted(found)]


def fragmentation(nodes: Iterable[NodeView]) -> Fragmentation:
    views = [view for node in nodes for view in node.cards if view.state.card.healthy]
    whole = [view.state for view in views if not view.mode]
    idle = [s for s in whole if s.idle]
    part = [s for s in whole if not s.idle and s.core_free and s.memory_free]
    useless = [s for s in whole if not s.idle and not (s.core_free and s.memory_free)]
    return Fragmentation(
        idle=len(idle),
        idle_core=sum(s.core_free for s in idle),
        idle_memory=sum(s.memory_free for s in idle),
        part=len(part),
        part_core=sum(s.core_free for s in part),
        part_memory=sum(s.memory_free for s in part),
        most_core=max((s.core_free for s in part), default=0),
        most_memory=max((s.memory_free for s in part), default=0),
        useless_core=sum(s.core_free for s in useless),
        useless_memory=sum(s.memory_free for s in useless),
        partitioned=len(views) - len(whole),
    )


def holders(nodes: Iterable[NodeView]) -> list[Holder]:
    """Return the pods with the sums of their holdings, in descending order of core and then memory.

    A pod whose cards are unknown is left out. It holds its share on every card of its node, so the sum of its holdings
    has no meaning.
    """
    uses: dict[str, list[tuple[str, CardUse]]] = {}
    for node in nodes:
        for view in node.cards:
            for use in view.uses:
                if use.certain:
                    uses.setdefault(use.pod, []).append((node.name, use))
    rows = (
        Holder(
            pod,
            held[0][1].dialect,
            tuple(sorted({node for node, _ in held})),
            len(held),
            sum(use.core for _, use in held),
            sum(use.memory for _, use in held),
        )
        for pod, held in uses.items()
    )
    return sorted(rows, key=lambda row: (-row.core, -row.memory, row.pod))


def figures_json(row: Figures) -> dict[str, Any]:
    return {
        "name": row.name,
        "nodes": row.nodes,
        "models": list(row.models),
        "cards": row.cards,
        "idle": row.idle,
        "unhealthy": row.unhealthy,
        "core": {"used": percent(row.core_used), "total": percent(row.core)},
        "memory": {"used": row.memory_used, "total": row.memory},
    }


def fragmentation_json(found: Fragmentation) -> dict[str, Any]:
    return {
        "idle": {"cards": found.idle, "core": percent(found.idle_core), "memory": found.idle_memory},
        "partUsed": {
            "cards": found.part,
            "core": percent(found.part_core),
            "memory": found.part_memory,
            "mostCore": percent(found.most_core),
            "mostMemory": found.most_memory,
        },
        "useless": {"core": percent(found.useless_core), "memory": found.useless_memory},
        "cut": {"cards": found.partitioned},
    }


def holder_json(row: Holder) -> dict[str, Any]:
    return {
        "pod": row.pod,
        "dialect": row.dialect or None,
        "nodes": list(row.nodes),
        "cards": row.cards,
        "core": percent(row.core),
        "memory": row.memory,
    }

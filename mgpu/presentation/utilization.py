"""Computes how much of a cluster's cards is in use, by node, by model and by pod.

`mgpu top` prints the results. Scripts read the keys that the JSON functions return, so the keys must not change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from mgpu.presentation.card_views import CardUse, CardView, NodeView, percent

UNKNOWN_MODEL = "unknown"


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


class Holder(NamedTuple):
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


def by_node(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each node with cards, in the order of `nodes`."""
    return [_node(node) for node in nodes if node.cards]


def by_model(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each card model, sorted by model."""
    found: dict[str, list[Figures]] = {}
    for node in nodes:
        for model, views in _models(node).items():
            found.setdefault(model, []).append(_cards(model, (model,), views))
    return [add(model, found[model]) for model in sorted(found)]


def add(name: str, rows: Sequence[Figures]) -> Figures:
    """Return the figures of all rows together, which have no card and no node in common."""
    return Figures(
        name,
        nodes=sum([row.nodes for row in rows]),
        cards=sum([row.cards for row in rows]),
        idle=sum([row.idle for row in rows]),
        unhealthy=sum([row.unhealthy for row in rows]),
        core_used=sum([row.core_used for row in rows]),
        core=sum([row.core for row in rows]),
        memory_used=sum([row.memory_used for row in rows]),
        memory=sum([row.memory for row in rows]),
        models=tuple(sorted({model for row in rows for model in row.models})),
    )


def _node(node: NodeView) -> Figures:
    return _cards(node.name, tuple(sorted(_models(node))), node.cards)


def _models(node: NodeView) -> dict[str, list[CardView]]:
    """Return the cards of each model."""
    found: dict[str, list[CardView]] = {}
    for view in node.cards:
        found.setdefault(view.state.card.model or UNKNOWN_MODEL, []).append(view)
    return found


def _cards(name: str, models: tuple[str, ...], views: Sequence[CardView]) -> Figures:
    """Return the figures of cards of one node. One loop, since a large cluster has tens of thousands of cards."""
    idle = unhealthy = core_used = core = memory_used = memory = 0
    for view in views:
        state = view.state
        card = state.card
        if not card.healthy:
            unhealthy += 1
        elif state.idle:
            idle += 1
        core += card.core
        core_used += state.core_used if state.core_used < card.core else card.core
        memory += card.memory
        memory_used += state.memory_used if state.memory_used < card.memory else card.memory
    return Figures(name, 1, len(views), idle, unhealthy, core_used, core, memory_used, memory, models)


def fragmentation(nodes: Iterable[NodeView]) -> Fragmentation:
    views = [view for node in nodes for view in node.cards if view.state.card.healthy]
    whole = [view.state for view in views if not view.mode]
    idle = [s for s in whole if s.idle]
    free = [(s.core_free, s.memory_free) for s in whole if not s.idle]
    part = [(core, memory) for core, memory in free if core and memory]
    useless = [(core, memory) for core, memory in free if not (core and memory)]
    return Fragmentation(
        idle=len(idle),
        idle_core=sum(s.core_free for s in idle),
        idle_memory=sum(s.memory_free for s in idle),
        part=len(part),
        part_core=sum([core for core, _ in part]),
        part_memory=sum([memory for _, memory in part]),
        most_core=max([core for core, _ in part], default=0),
        most_memory=max([memory for _, memory in part], default=0),
        useless_core=sum([core for core, _ in useless]),
        useless_memory=sum([memory for _, memory in useless]),
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
    rows = [_holder(pod, held) for pod, held in uses.items()]
    return sorted(rows, key=lambda row: (-row.core, -row.memory, row.pod))


def _holder(pod: str, held: Sequence[tuple[str, CardUse]]) -> Holder:
    node, use = held[0]
    if len(held) == 1:
        return Holder(pod, use.dialect, (node,), 1, use.core, use.memory)
    nodes = tuple(sorted({name for name, _ in held}))
    core, memory = sum(use.core for _, use in held), sum(use.memory for _, use in held)
    return Holder(pod, use.dialect, nodes, len(held), core, memory)


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
        "partitioned": {"cards": found.partitioned},
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

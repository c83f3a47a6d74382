"""Computes how much of a cluster's cards is in use, by node, by model and by pod. Pure.

`mgpu top` prints these figures as tables or as JSON. The JSON functions are API, because scripts read their keys.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mgpu.presentation.card_views import CardUse, CardView, NodeView, percent

_UNKNOWN_MODEL = "not said"


@dataclass(frozen=True, slots=True)
class Figures:
    """The use of a group of cards.

    Attributes:
        idle: the number of healthy cards that no pod holds.
        core_used, core: in thousandths of a card. A card over its capacity counts as full.
        memory_used, memory: in bytes.
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
    """The distribution of the free capacity over healthy cards. Core in thousandths of a card, memory in bytes.

    Attributes:
        idle, idle_core, idle_memory: the number of cards that no pod holds, and their capacity.
        part, part_core, part_memory: the number of cards in use with free core and memory, and their free capacity.
        most_core, most_memory: the largest free capacity of one of these cards.
        useless_core, useless_memory: the free core of cards without free memory, and the reverse. No share fits there.
        partitioned: the number of partitioned cards, which do not count elsewhere.
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
    """A pod with the sum of its holdings. Core in thousandths of a card, memory in bytes."""

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
    """Return the figures of these cards, which are given as pairs of node name and card."""
    nodes: set[str] = set()
    models: set[str] = set()
    found = Figures(name)
    for node, view in rows:
        state, card = view.state, view.state.card
        nodes.add(node)
        models.add(card.model or _UNKNOWN_MODEL)
        found = replace(
            found,
            cards=found.cards + 1,
            idle=found.idle + (state.idle and card.healthy),
            unhealthy=found.unhealthy + (not card.healthy),
            core_used=found.core_used + min(state.core_used, card.core),
            core=found.core + card.core,
            memory_used=found.memory_used + min(state.memory_used, card.memory),
            memory=found.memory + card.memory,
        )
    return replace(found, nodes=len(nodes), models=tuple(sorted(models)))


def by_node(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each node that has cards, in the order given."""
    return [sum_cards(node.name, ((node.name, card) for card in node.cards)) for node in nodes if node.cards]


def by_model(nodes: Iterable[NodeView]) -> list[Figures]:
    """Return the figures of each card model, sorted by model."""
    found: dict[str, list[tuple[str, CardView]]] = {}
    for node in nodes:
        for view in node.cards:
            found.setdefault(view.state.card.model or _UNKNOWN_MODEL, []).append((node.name, view))
    return [sum_cards(model, found[model]) for model in sorted(found)]


def fragmentation(nodes: Iterable[NodeView]) -> Fragmentation:
    """Return the distribution of the free capacity over the cards of these nodes."""
    found = Fragmentation()
    for view in (view for node in nodes for view in node.cards if view.state.card.healthy):
        state = view.state
        core, memory = state.core_free, state.memory_free
        if view.mode:
            found = replace(found, partitioned=found.partitioned + 1)
        elif state.idle:
            idle_core, idle_memory = found.idle_core + core, found.idle_memory + memory
            found = replace(found, idle=found.idle + 1, idle_core=idle_core, idle_memory=idle_memory)
        elif core and memory:
            found = replace(
                found,
                part=found.part + 1,
                part_core=found.part_core + core,
                part_memory=found.part_memory + memory,
                most_core=max(found.most_core, core),
                most_memory=max(found.most_memory, memory),
            )
        else:
            useless_core, useless_memory = found.useless_core + core, found.useless_memory + memory
            found = replace(found, useless_core=useless_core, useless_memory=useless_memory)
    return found


def holders(nodes: Iterable[NodeView]) -> list[Holder]:
    """Return the pods with the sums of their holdings, largest first.

    A pod with an unreadable allocation record is not included: it is held on every card of its node, so its sum has no
    meaning.
    """
    found: dict[str, Holder] = {}
    for node in nodes:
        for view in node.cards:
            for use in view.uses:
                if use.certain:
                    before = found.get(use.pod) or Holder(use.pod, use.dialect, (), 0, 0, 0)
                    found[use.pod] = _with(before, use, node.name)
    return sorted(found.values(), key=lambda row: (-row.core, -row.memory, row.pod))


def _with(holder: Holder, use: CardUse, node: str) -> Holder:
    return replace(
        holder,
        nodes=tuple(sorted({*holder.nodes, node})),
        cards=holder.cards + 1,
        core=holder.core + use.core,
        memory=holder.memory + use.memory,
    )


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

"""What metrics say of cards: a node at a time, in whole numbers, so that sums stay exact as nodes change. Pure."""

from collections import Counter

from mgpu.model.card_use import card_uses, held_of
from mgpu.model.ledger import Ledger
from mgpu.presentation.card_views import inventory_of
from scheduler.cluster.node_snapshots import NodeContents

Figures = Counter[tuple[str, str]]
"""By what is counted and of whom: a model, a dialect, or "". Core is in milli, memory in bytes."""

HEALTHY, UNHEALTHY, IDLE, CORE, CORE_USED, MEMORY, MEMORY_USED = (
    "healthy",
    "unhealthy",
    "idle",
    "core",
    "core used",
    "memory",
    "memory used",
)
PODS, HELD_CORE, HELD_MEMORY = "pods", "held core", "held memory"
NODES, BARRIERS, FREE, STRANDED = "nodes", "barriers", "free", "stranded"


def figures_of(found: NodeContents) -> Figures:
    """Of one node; only what is not 0."""
    counts: Figures = Counter()
    ledger, name = Ledger(), found.node.name
    devices = inventory_of(found.slices, (*found.cards, *found.others))
    ledger.set_cards(name, devices)
    for holding in found.held:
        ledger.hold(holding)
    for use in card_uses(found.cards, (*ledger.cards(name), *ledger.others(name))):
        card, model = use.card, use.card.model
        counts[HEALTHY if card.healthy else UNHEALTHY, model] += 1
        counts[CORE, model] += card.core
        counts[CORE_USED, model] += use.core
        counts[MEMORY, model] += card.memory
        counts[MEMORY_USED, model] += use.memory
        counts[IDLE, model] += card.healthy and use.idle
        if card.healthy and use.shared:
            free = max(0, card.core - use.core)
            counts[FREE, ""] += free
            counts[STRANDED, ""] += 0 if use.idle else free
    for holding in found.held:
        if not holding.occupies:  # that card is held for MtgpuPods, which are counted themselves
            core, memory = held_of(holding, devices)
            counts[PODS, holding.dialect] += 1
            counts[HELD_CORE, holding.dialect] += core
            counts[HELD_MEMORY, holding.dialect] += memory
    counts[NODES, ""] += bool(found.cards)
    counts[BARRIERS, ""] += found.slices.waiting
    return +counts

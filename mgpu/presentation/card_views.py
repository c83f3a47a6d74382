"""Snapshots of nodes, their cards and slices, and the pods that hold them.

The card map, the tables, `mgpu inspect -o json`, `mgpu simulate` and the web page show these values. `view_nodes` makes
them from a ledger. `nodes_json` is API (docs/design/simulate.md). Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import NO_SLICES, NodeSlices, Partitioning, slice_devices, unpartitioned_cards
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Stage
from mgpu.model.slice_names import MIG, Slice, is_slice


@dataclass(frozen=True, slots=True)
class CardUse:
    """What one pod holds of one card at its peak.

    Attributes:
        core, memory: in thousandths of a card and in bytes. 0 for an occupy pod that keeps a card for its MtgpuPods.
        certain: False for a pod with an unreadable allocation record, which is held on every card of its node.
        dialect: the vocabulary of its request, `nvidia` where NVIDIA's device plugin chose its cards, "" if unknown.
        occupies: the GPUID for which an occupy pod keeps the card, "" for all other pods. An occupy pod appears only
            on a card that no MtgpuPod of that GPUID uses.
    """

    pod: str
    containers: tuple[str, ...]
    core: int
    memory: int
    certain: bool = True
    constraints: Constraints = NO_CONSTRAINTS
    dialect: str = ""
    occupies: str = ""


@dataclass(frozen=True, slots=True)
class SliceView:
    """A slice of a card with its core and memory. holder: `namespace/pod/container`, "" while the slice is free."""

    slice: Slice
    state: CardState
    uses: tuple[CardUse, ...] = ()
    holder: str = ""


@dataclass(frozen=True, slots=True)
class CardView:
    """A card. cut: MIG or MPS for a card that is divided, or reserved for slices; its use is then the sum of theirs."""

    state: CardState
    uses: tuple[CardUse, ...] = ()
    cut: str = ""
    slices: tuple[SliceView, ...] = ()

    @property
    def holders(self) -> list[str]:
        """`namespace/pod/container`, sorted."""
        return sorted(f"{use.pod}/{container}".rstrip("/") for use in self.uses for container in use.containers)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node.

    Attributes:
        cards: its GPUs. others: its devices of other types.
        annotations: those that mgpu writes on the Node.
        note: the state of its partition plan, "" where there is none.
    """

    name: str
    cards: tuple[CardView, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    others: tuple[CardView, ...] = ()
    note: str = ""

    @property
    def devices(self) -> tuple[CardView, ...]:
        return (*self.cards, *self.others)


@dataclass(frozen=True, slots=True)
class NodePartitions:
    """A node whose cards are partitioned. gpus: all its GPUs. annotations: those that describe the partitions."""

    found: NodeSlices
    gpus: tuple[Card, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)


def list_allocatable(found: NodeSlices, cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the devices that pods can get: undivided cards, slices, and devices of other types."""
    gpus = [card for card in cards if card.type == GPU]
    slices = slice_devices(replace(found, partitioning=Partitioning()), gpus)
    return (*unpartitioned_cards(found, gpus), *slices, *(card for card in cards if card.type != GPU))


def view_nodes(ledger: Ledger, sliced: Mapping[str, NodePartitions] | None = None) -> tuple[NodeView, ...]:
    """Return every node of the ledger, sorted by name. sliced: the nodes whose cards are partitioned, by name."""
    nothing = NodePartitions(NO_SLICES, ())
    return tuple(_node(ledger, name, (sliced or {}).get(name, nothing)) for name in sorted(ledger.nodes()))


def _node(ledger: Ledger, name: str, sliced: NodePartitions) -> NodeView:
    whole = _viewed(ledger, name, ledger.cards(name))
    known = {view.state.card.index for view in whole}
    cut = (_divided(ledger, name, card, sliced.found) for card in sliced.gpus if card.index not in known)
    others = _viewed(ledger, name, (s for s in ledger.others(name) if not is_slice(s.card.type)))
    cards = tuple(sorted((*whole, *cut), key=lambda view: view.state.card.index))
    return NodeView(name, cards, sliced.annotations, others, _note(sliced.found))


def _viewed(ledger: Ledger, node: str, states: Iterable[CardState]) -> tuple[CardView, ...]:
    return tuple(CardView(state, _uses(ledger, node, [state.card], state.gpuid)) for state in states)


def _divided(ledger: Ledger, node: str, card: Card, found: NodeSlices) -> CardView:
    """Return a divided card, with the sum of its held slices as its use."""
    alone = [(s, NodeSlices(found.mode, existing=(replace(s, pod=""),))) for s in found.existing]
    made = [(s, device) for s, one in alone for device in slice_devices(one, [card])]
    slices = tuple(_slice(ledger, node, s, device) for s, device in made)
    held = [s.state for s in slices if not s.state.idle]
    core, memory = sum(s.core_used for s in held), sum(s.memory_used for s in held)
    state = CardState(card, core, memory, sum(s.shares for s in held))
    return CardView(state, _uses(ledger, node, [device for _, device in made]), found.mode, slices)


def _slice(ledger: Ledger, node: str, s: Slice, device: Card) -> SliceView:
    uses, holder = _uses(ledger, node, [device]), _holder(ledger, node, device)
    if not uses and s.pod:
        uses, holder = (CardUse(s.pod, (), device.core, device.memory),), s.pod
    core, memory = sum(use.core for use in uses), sum(use.memory for use in uses)
    return SliceView(s, CardState(device, core, memory, len(uses)), uses, holder)


def _holder(ledger: Ledger, node: str, device: Card) -> str:
    """Return the container that has the slice, preferring app containers: an init container's slice can be reused."""
    held = [
        (share.stage == Stage.INIT, f"{_name(holding)}/{share.container}".rstrip("/"))
        for holding in ledger.holdings(node)
        for share in holding.shares
        if share.is_on(device)
    ]
    return min(held)[1] if held else ""


def _note(found: NodeSlices) -> str:
    plan, (refused, why) = found.partitioning.plan, found.refused or (None, "")
    if plan is not None and plan == refused:
        return f"plan {plan} was refused: {why}"
    return f"plan {plan} is under way" if found.has_pending_plan else ""


def _uses(ledger: Ledger, node: str, cards: Sequence[Card], gpuid: str = "") -> tuple[CardUse, ...]:
    """Return what each pod holds of these devices together. gpuid: that of the card, where there is just one."""
    uses = []
    for holding in ledger.holdings(node):
        on = [(share, card) for card in cards for share in holding.shares if share.is_on(card)]
        if on:
            amounts = [holding.uses(card) for card in dict.fromkeys(card for _, card in on)]
            containers = tuple(sorted({share.container for share, _ in on}))
            certain = all(share.card is not None for share, _ in on)
            keeps = holding.occupies and holding.gpuid == gpuid
            core, memory = (0, 0) if keeps else (sum(a.core for a in amounts), sum(a.memory for a in amounts))
            occupies = holding.gpuid if holding.occupies else ""
            uses.append(
                CardUse(
                    _name(holding), containers, core, memory, certain, holding.constraints, holding.dialect, occupies
                )
            )
    users = tuple(use for use in uses if not gpuid or use.occupies != gpuid)
    return users or tuple(uses)


def _name(holding: Holding) -> str:
    return holding.key if holding.name else f"pod {holding.uid}"


def nodes_json(nodes: Iterable[NodeView]) -> dict[str, Any]:
    """Return the `nodes` object of the JSON output (docs/design/simulate.md)."""
    return {
        node.name: {"cards": [_card_json(card) for card in node.devices], "annotations": dict(node.annotations)}
        for node in nodes
    }


def _card_json(view: CardView) -> dict[str, Any]:
    state = view.state
    return {
        "index": state.card.index,
        "uuid": state.card.uuid,
        **({} if state.card.type == GPU else {"type": state.card.type}),
        "healthy": state.card.healthy,
        "core": {"used": percent(state.core_used), "total": percent(state.card.core)},
        "memory": {"used": state.memory_used, "total": state.card.memory},
        "holders": view.holders,
        "slices": [_slice_json(s, view.cut) for s in view.slices],
        "gpuid": state.gpuid or None,
    }


def _slice_json(view: SliceView, cut: str) -> dict[str, Any]:
    start = {"start": view.slice.start} if cut == MIG else {}
    return {"profile": view.slice.name, **start, "holder": view.holder or None}


def percent(milli: int) -> int | float:
    """Convert thousandths to percent, to an integer where it is one."""
    return milli // 10 if milli % 10 == 0 else milli / 10

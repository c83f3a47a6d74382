"""Defines snapshots of nodes, their cards and slices, and the pods that hold them.

`view_nodes` creates them from a ledger, mainly for the commands and the scheduler's web page. Users' programs read the
keys that `nodes_json` returns, so the keys must not change (docs/design/simulate.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.isolation import NONE, STRONGEST_FIRST
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.mig_devices import instances_of
from mgpu.model.node_slices import NO_SLICES, NodeSlices, Partitioning, slice_devices, unpartitioned_cards
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Node, Stage
from mgpu.model.slice_names import MIG, MIG_CLAIMS, Slice, is_slice
from mgpu.presentation.claim_views import holder_name
from mgpu.version import AGENT_ANNOTATION, parse_agent_report


@dataclass(frozen=True, slots=True)
class CardUse:
    """The part of one card that one pod holds.

    Attributes:
        pod: the pod as `namespace/name`, or the ResourceClaim as `claim namespace/name`. If only the UID is known, it
            is `pod UID`, or the UID alone for the pod of a slice.
        containers: the containers that have the card. For a claim, its requests.
        core: the most core that the pod needs at any time, in thousandths of a card. It is 0 for an occupy pod that
            keeps a card for its MtgpuPods.
        memory: the most memory that the pod needs at any time, in bytes. It is 0 for such an occupy pod.
        certain: whether the pod's cards are known. A pod whose cards are unknown holds its share on every card of its
            node.
        dialect: the vocabulary of the request; `dra` for a claim, `nvidia` if an agent found the cards without an
            allocation record, and "" if it is unknown.
        occupies: the GPUID for which an occupy pod keeps the card; "" for all other pods. An occupy pod is left out if
            other pods hold the card of its GPUID.
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
    """A slice of a card.

    Attributes:
        state: the slice as a device, with the core and memory that pods hold of it.
        holder: the container that has the slice, as `namespace/pod/container`, or the UID of the pod if only that is
            known; "" if the slice is free.
    """

    slice: Slice
    state: CardState
    uses: tuple[CardUse, ...] = ()
    holder: str = ""


@dataclass(frozen=True, slots=True)
class CardView:
    """A card, or a device of another type.

    What pods hold of a partitioned card is the sum over its slices.

    Attributes:
        mode: `mig` or `mps` for a card that is partitioned or reserved for slices; "" for other cards.
    """

    state: CardState
    uses: tuple[CardUse, ...] = ()
    mode: str = ""
    slices: tuple[SliceView, ...] = ()

    @property
    def holders(self) -> list[str]:
        """The containers that hold the card, as `namespace/pod/container`, sorted."""
        return sorted(f"{use.pod}/{container}".rstrip("/") for use in self.uses for container in use.containers)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node.

    Attributes:
        cards: the GPUs of the node.
        annotations: the annotations of the Node that describe its slices.
        others: the devices of other types.
        note: a text about a partition plan that is under way or was refused; "" otherwise.
        isolation: the isolation back end that the agent reports (`mgpu.model.isolation`); "" if it is not known.
    """

    name: str
    cards: tuple[CardView, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    others: tuple[CardView, ...] = ()
    note: str = ""
    isolation: str = ""

    @property
    def devices(self) -> tuple[CardView, ...]:
        return (*self.cards, *self.others)


@dataclass(frozen=True, slots=True)
class NodePartitions:
    """The slices of a node with partitioned cards.

    Attributes:
        gpus: all GPUs of the node, partitioned or not.
        annotations: the annotations of the Node that describe the slices.
    """

    slices: NodeSlices
    gpus: tuple[Card, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)


def with_isolation(view: NodeView, node: Node | None) -> NodeView:
    """Return the view with the isolation back end that the agent reports in an annotation of the Node."""
    report = parse_agent_report(node.annotations.get(AGENT_ANNOTATION, "")) if node else None
    found = report.isolation.backend if report and report.isolation else ""
    return replace(view, isolation=found) if found in (NONE, *STRONGEST_FIRST) else view


def list_allocatable(node_slices: NodeSlices, cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the devices that pods can hold: unpartitioned cards, slices, and devices of other types.

    Slices that a pending plan removes are included, because pods may still hold them.
    """
    gpus = [card for card in cards if card.type == GPU]
    slices = slice_devices(replace(node_slices, partitioning=Partitioning()), gpus)
    return (*unpartitioned_cards(node_slices, gpus), *slices, *(card for card in cards if card.type != GPU))


def view_nodes(ledger: Ledger, partitions: Mapping[str, NodePartitions] | None = None) -> tuple[NodeView, ...]:
    """Return every node of the ledger, sorted by name.

    Args:
        partitions: the slices of nodes with partitioned cards, by the name of the node.
    """
    unpartitioned = NodePartitions(NO_SLICES, ())
    return tuple(_node(ledger, name, (partitions or {}).get(name, unpartitioned)) for name in sorted(ledger.nodes()))


def _node(ledger: Ledger, name: str, partitions: NodePartitions) -> NodeView:
    holdings = ledger.holdings(name)
    held = _Held(holdings)
    slices = _with_claimed_instances(partitions.slices, holdings)
    whole = _whole_cards(held, ledger.cards(name))
    indexes = {view.state.card.index for view in whole}
    gpus = (card for card in partitions.gpus if card.index not in indexes)
    partitioned = (_partitioned_card(held, card, slices) for card in gpus)
    others = _whole_cards(held, (s for s in ledger.others(name) if not is_slice(s.card.type)))
    cards = tuple(sorted((*whole, *partitioned), key=lambda view: view.state.card.index))
    return NodeView(name, cards, partitions.annotations, others, _plan_note(partitions.slices))


def _with_claimed_instances(slices: NodeSlices, holdings: Sequence[Holding]) -> NodeSlices:
    """Return the slices of a node on which claims get MIG instances: those that are held. Others do not exist."""
    if slices.mode != MIG_CLAIMS:
        return slices
    devices = {device for holding in holdings for device in instances_of(holding.shares)}
    existing = (Slice(device.card, device.instance.start, device.instance.profile) for device in sorted(devices))
    return replace(slices, mode=MIG, existing=tuple(existing))


class _Held:
    """The holdings on a node, found by the devices that their shares name.

    Nearly all shares name a card by its index or UUID. To compare each card with each holding instead takes most of the
    time in which a node with 8 cards and 8 pods is viewed.
    """

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings
        self._named: dict[tuple[str, int | str], list[int]] = {}
        self._unnamed: dict[str, list[int]] = {}  # By type of device: holdings on unknown cards, or on cards by minor.
        for position, holding in enumerate(holdings):
            for share in holding.shares:
                if isinstance(share.card, int | str):
                    self._named.setdefault((share.type, share.card), []).append(position)
                else:
                    self._unnamed.setdefault(share.type, []).append(position)

    def near(self, devices: Iterable[Card]) -> list[Holding]:
        """Return all holdings that may be on one of the devices, in the order of the holdings."""
        positions: set[int] = set()
        for device in devices:
            positions.update(self._named.get((device.type, device.index), ()))
            positions.update(self._named.get((device.type, device.uuid), ()))
            positions.update(self._unnamed.get(device.type, ()))
        return [self._holdings[position] for position in sorted(positions)]


def _whole_cards(held: _Held, states: Iterable[CardState]) -> tuple[CardView, ...]:
    return tuple(CardView(state, _uses(held, [state.card], state.gpuid)) for state in states)


def _partitioned_card(held: _Held, card: Card, node_slices: NodeSlices) -> CardView:
    single = [(s, NodeSlices(node_slices.mode, existing=(replace(s, pod=""),))) for s in node_slices.existing]
    made = [(s, device) for s, one_slice in single for device in slice_devices(one_slice, [card])]
    slices = tuple(_slice(held, s, device) for s, device in made)
    used = [s.state for s in slices if not s.state.idle]
    core, memory = sum(s.core_used for s in used), sum(s.memory_used for s in used)
    state = CardState(card, core, memory, sum(s.shares for s in used))
    return CardView(state, _uses(held, [device for _, device in made]), node_slices.mode, slices)


def _slice(held: _Held, s: Slice, device: Card) -> SliceView:
    uses = _uses(held, [device])
    holder = _holder(held, device)
    if not uses and s.pod:
        uses = (CardUse(s.pod, (), device.core, device.memory),)
        holder = s.pod
    core, memory = sum(use.core for use in uses), sum(use.memory for use in uses)
    return SliceView(s, CardState(device, core, memory, len(uses)), uses, holder)


def _holder(held: _Held, device: Card) -> str:
    """Return the container that has the slice; "" if there is none.

    If an app container uses the slice after an init container, the result is the app container.
    """
    containers = [
        (share.stage == Stage.INIT, f"{holder_name(holding)}/{share.container}".rstrip("/"))
        for holding in held.near([device])
        for share in holding.shares
        if share.is_on(device)
    ]
    return min(containers)[1] if containers else ""


def _plan_note(slices: NodeSlices) -> str:
    plan = slices.partitioning.plan
    refused, reason = slices.refused or (None, "")
    if plan is not None and plan == refused:
        return f"plan {plan} was refused: {reason}"
    return f"plan {plan} is under way" if slices.has_pending_plan else ""


def _uses(held: _Held, cards: Sequence[Card], gpuid: str = "") -> tuple[CardUse, ...]:
    """Return what each pod holds of these devices in total.

    Args:
        gpuid: the GPUID of the card, if `cards` is a single card with a GPUID; "" otherwise.
    """
    uses = []
    for holding in held.near(cards):
        on = [(share, card) for card in cards for share in holding.shares if share.is_on(card)]
        if on:
            amounts = [holding.uses(card) for card in dict.fromkeys(card for _, card in on)]
            containers = tuple(sorted({share.container for share, _ in on}))
            certain = all(share.card is not None for share, _ in on)
            core, memory = sum(a.core for a in amounts), sum(a.memory for a in amounts)
            if holding.occupies and holding.gpuid == gpuid:
                core = memory = 0
            occupies = holding.gpuid if holding.occupies else ""
            name = holder_name(holding)
            uses.append(
                CardUse(name, containers, core, memory, certain, holding.constraints, holding.dialect, occupies)
            )
    users = tuple(use for use in uses if not gpuid or use.occupies != gpuid)
    return users or tuple(uses)


def nodes_json(nodes: Iterable[NodeView]) -> dict[str, Any]:
    """Return the `nodes` object of the JSON output (docs/design/simulate.md)."""
    return {
        node.name: {
            "cards": [_card_json(card) for card in node.devices],
            "annotations": dict(node.annotations),
            **({"isolation": node.isolation} if node.isolation else {}),
        }
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
        "slices": [_slice_json(s, view.mode) for s in view.slices],
        "gpuid": state.gpuid or None,
    }


def _slice_json(view: SliceView, cut: str) -> dict[str, Any]:
    start = {"start": view.slice.start} if cut == MIG else {}
    return {"profile": view.slice.name, **start, "holder": view.holder or None}


def percent(milli: int) -> int | float:
    """Return thousandths in percent, as an int if the percentage is a whole number."""
    return milli // 10 if milli % 10 == 0 else milli / 10

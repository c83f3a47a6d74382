"""A node that can be cut, as the planner and the filter see it: pure, for the scheduler and `mgpu simulate` alike."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mgpu.model.cards import Card, CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import Amount, GpuRequest, Rejection, peak
from mgpu.model.ledger import Holding, Share
from mgpu.model.node_slices import NodeSlices, slice_devices
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, RESOURCE_PREFIX, Slice, mode_of, place_of, slice_of_resource
from scheduler.engine.effort import Budget
from scheduler.engine.partitioning.geometry import Geometries
from scheduler.engine.partitioning.partition_plan import PartitionableCards, can_offer, partitionable_cards, plan_cards

_HELD = "in use by pods that asked for no slice"
_OTHERWISE = "in use by pods with slices of another kind"


@dataclass(frozen=True, slots=True)
class PartitionableNode:
    """A node with the label at one moment. version: it moves with every change of the node, as a View's.

    gpus: its cards, cut or not. barred: those that must stay whole, and why. cards: what the planner makes of them.
    used: the places that are held by pods, reservations among them, or given to pods as the node says.
    missing: those of them that bound pods hold and that are not made, on cards that can be cut.
    idle: the places that a pod can have now, in the order in which they are given.
    memory: of the GPUs, held in bytes. room: free cpu and memory. named: what pods use of the resources that settings
    weigh by name.
    problem: why what the node says of its slices is not in force.
    """

    node: Node
    version: int
    gpus: tuple[Card, ...]
    found: NodeSlices
    used: frozenset[Slice]
    missing: frozenset[Slice]
    barred: Mapping[int, str]
    idle: tuple[Slice, ...]
    memory: int
    cards: PartitionableCards
    room: CpuMemory
    named: Mapping[str, int]
    problem: str | None = None

    @property
    def made(self) -> frozenset[Slice]:
        """The places of the slices that there are."""
        return frozenset(s.place for s in self.found.existing)

    def is_partitioned_as(self, slices: Iterable[Slice]) -> bool:
        """Whether a plan of these changes nothing: they are made, and a plan that was refused withholds none."""
        return {*slices} == self.made == {s.place for s in self.found.available}

    def fits(self, wanted: Mapping[str, int]) -> bool:
        """Whether a pod that asks for these can have them now."""
        return all(sum(s.name == name for s in self.idle) >= count for name, count in wanted.items())


def make_partitionable_node(
    node: Node,
    found: NodeSlices,
    gpus: Sequence[Card],
    states: Iterable[CardState],
    holdings: Iterable[Holding],
    geometries: Geometries,
    *,
    room: CpuMemory,
    named: Mapping[str, int] = MappingProxyType({}),
    version: int = 0,
    problem: str | None = None,
) -> PartitionableNode:
    """gpus: all of the node's. states: its whole cards and its slices, with what is held of them."""
    states, holdings = tuple(states), tuple(holdings)
    places = [(h.bound, place) for h in holdings for share in h.shares if (place := slice_of_share(share))]
    held = [(bound, place) for bound, place in places if mode_of(place.name) == found.mode]
    plan_node = [(slice_of_device(s.card), s) for s in states]
    used = {s.place for s in found.existing if s.pod} | {place for _, place in held}
    used |= {place for place, state in plan_node if place and not state.idle}
    made, able = {s.place for s in found.existing}, _cuttable(found, gpus)
    barred = {place.card: _OTHERWISE for _, place in places if mode_of(place.name) != found.mode}
    barred |= {state.card.index: _HELD for place, state in plan_node if not place and not state.idle}
    # An MtgpuPod holds its card whatever others decided of it meanwhile.
    theirs = [share for h in holdings if h.gpuid for share in h.shares]
    barred |= {gpu.index: _HELD for gpu in gpus if any(share.is_on(gpu) for share in theirs)}
    memory = sum(state.memory_used for place, state in plan_node if not place)
    memory += sum(card.memory for card in slice_devices(NodeSlices(found.mode, existing=tuple(used)), gpus))
    return PartitionableNode(
        node,
        version,
        tuple(gpus),
        found,
        frozenset(used),
        frozenset(place for bound, place in held if bound and place not in made and place.card in able),
        barred,
        tuple(p for p, state in sorted(plan_node, key=_given_first) if p and state.idle and state.card.healthy),
        memory,
        partitionable_cards(gpus, found, used, geometries, barred=barred),
        room,
        named,
        problem,
    )


def _given_first(row: tuple[Slice | None, CardState]) -> tuple[str, int, int]:
    """As a decision takes them: the lowest minor."""
    card = row[1].card
    return card.type, card.index if card.minor is None else card.minor, card.index


def with_claimed_slices(
    target: PartitionableNode, claims: Sequence[Mapping[str, int]], geometries: Geometries
) -> PartitionableNode:
    """The same where pods that ask for these have what there is of it now: no plan takes it away."""
    left, kept = sum(map(Counter, claims), Counter()), set()
    for place in target.idle:
        if left[place.name] > 0:
            left[place.name] -= 1
            kept.add(place)
    if not kept:
        return target
    used, idle = target.used | kept, tuple(place for place in target.idle if place not in kept)
    cards = partitionable_cards(target.gpus, target.found, used, geometries, barred=target.barred)
    return replace(target, used=used, idle=idle, cards=cards)


def slice_of_share(share: Share) -> Slice | None:
    """The place that a share is of; None: it is of no slice, or nobody knows of which."""
    name = slice_of_resource(RESOURCE_PREFIX + share.type)
    return Slice(*place_of(share.card), name) if name and isinstance(share.card, int) else None


def slice_of_device(card: Card) -> Slice | None:
    """The place of the slice that this device is; None: it is none."""
    name = slice_of_resource(RESOURCE_PREFIX + card.type)
    return Slice(*place_of(card.index), name) if name else None


def requested_slices(request: GpuRequest) -> dict[str, int]:
    """Slice → how many a pod with this ask holds at its busiest moment; {}: it asks for none."""
    found: dict[str, int] = {}
    for type_ in dict.fromkeys(c.type for c in request.others):
        name = slice_of_resource(RESOURCE_PREFIX + type_)
        if name:
            found[name] = peak((c.stage, Amount(shares=c.cards)) for c in request.others if c.type == type_).shares
    return found


def can_be_partitioned_for(target: PartitionableNode, wanted: Mapping[str, int], budget: Budget | None = None) -> bool:
    """Return whether the node could be cut so that a pod has these. Raises Exhausted, as `can_offer` does."""
    return can_offer(target.cards, wanted, budget)


def plan_node(
    target: PartitionableNode, wanted: Sequence[Mapping[str, int]], budget: Budget | None = None
) -> tuple[Slice, ...] | Rejection:
    """All slices that the node shall have, for pods that ask for `wanted`, in order: for the first one all that it
    asks for, for the others what is possible. What is used stays in its place, and is made again where it is missing.

    A card that nobody can cut now, one that is lost among them, stays as the node says it is.
    """
    found = plan_cards(target.cards, wanted or ({},), budget)
    if isinstance(found, Rejection):
        return found
    able = _cuttable(target.found, target.gpus)
    stay = (s.place for s in target.found.existing if s.card not in able)
    return tuple(sorted({*(s for s in found if s.card in able), *stay}))


def _cuttable(found: NodeSlices, gpus: Iterable[Card]) -> frozenset[int]:
    cards = (gpu.index for gpu in gpus if gpu.healthy)
    return frozenset(cards) & found.cards if found.mode == MIG else frozenset(cards)


def find_served_pods(
    slices: Iterable[Slice], used: Iterable[Slice], wanted: Sequence[Mapping[str, int]]
) -> Iterator[bool]:
    """Which of these pods, in order, have their slices where a node has `slices`, of which some are used."""
    free = Counter(s.name for s in {*slices}.difference(used))
    for counts in wanted:
        all_there = all(free[name] >= count for name, count in counts.items())
        if all_there:
            free.subtract(counts)
        yield all_there


def memory_of(target: PartitionableNode, wanted: Mapping[str, int]) -> int:
    """Bytes of the slices that a pod asks for, on the card of the node where they are largest."""
    total, kinds = 0, tuple({(gpu.model, gpu.memory): gpu for gpu in target.gpus}.values())
    for name, count in wanted.items():
        everywhere = tuple(Slice(gpu.index, 0, name) for gpu in kinds)
        sizes = [card.memory for card in slice_devices(NodeSlices(target.found.mode, existing=everywhere), kinds)]
        total += count * max(sizes, default=0)
    return total

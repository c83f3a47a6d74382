"""The state of a node whose cards can be partitioned.

`scheduler.cluster.partitionable_nodes` creates a `PartitionableNode` for each state of a node. Mainly the filter asks
which slices are free now (`fits`), and the partition controller asks which slices there could be (`plan_node`). A
`PartitionableNode` is immutable. A plan that is made from it must be dropped if `version` is no longer current.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

_HELD = "in use by pods that request no slice"
_OTHER_MODE = "in use by pods with slices of another kind"


@dataclass(frozen=True, slots=True)
class PartitionableNode:
    """A node with the label `gpu.partitioning` at one moment.

    Attributes:
        gpus: All GPUs of the node.
        version: A number that changes with every change of the node, like `NodeSnapshot.version`.
        observed: What the node reports about its slices.
        used: The places that pods hold, including reservations, or that the node reports as used.
        missing: The places that bound pods hold although no slice exists there. Only cards that are healthy and, under
            MIG, in MIG mode are considered.
        unavailable: By index, the reasons why cards must not be partitioned.
        free: The places that a pod can have now, in the order in which they are given to pods.
        memory_used: The GPU memory in use, in bytes.
        cards: The cards that can be partitioned.
        free_resources: The free CPU and memory of the node.
        named_resources: For each extended resource that the settings name, the sum that the pods of the node request.
        problem: The reason why the node's report of its slices cannot be read, or None.
    """

    node: Node
    version: int
    gpus: tuple[Card, ...]
    observed: NodeSlices
    used: frozenset[Slice]
    missing: frozenset[Slice]
    unavailable: Mapping[int, str]
    free: tuple[Slice, ...]
    memory_used: int
    cards: PartitionableCards
    free_resources: CpuMemory
    named_resources: Mapping[str, int]
    problem: str | None = None

    @property
    def existing(self) -> frozenset[Slice]:
        """The places of the slices that exist."""
        return frozenset(s.place for s in self.observed.existing)

    def is_partitioned_as(self, slices: Iterable[Slice]) -> bool:
        """Return whether a plan of these slices changes nothing.

        This is so if exactly these slices exist, and if all of them are available to pods.
        """
        return {*slices} == self.existing == {s.place for s in self.observed.available}

    def fits(self, request: Mapping[str, int]) -> bool:
        """Return whether a pod that requests these slices can have them now."""
        return all(sum(s.name == name for s in self.free) >= count for name, count in request.items())


def make_partitionable_node(
    node: Node,
    observed: NodeSlices,
    gpus: Sequence[Card],
    states: Iterable[CardState],
    holdings: Iterable[Holding],
    geometries: Geometries,
    *,
    room: CpuMemory,
    named: Mapping[str, int],
    version: int = 0,
    problem: str | None = None,
) -> PartitionableNode:
    """Return the partitionable node with this state. `node`, `observed`, `version` and `problem` become its attributes.

    Args:
        states: The whole cards and the slices of the node, with what pods hold of them.
        holdings: The holdings of the pods on the node.
        geometries: The geometries that the settings allow.
        room: The free CPU and memory of the node.
        named: The attribute `named_resources`.
    """
    states, holdings = tuple(states), tuple(holdings)
    held = [(h.bound, place) for h in holdings for share in h.shares if (place := slice_of_share(share))]
    devices_of = [(slice_of_device(s.card), s) for s in states]
    existing, partitionable = {s.place for s in observed.existing}, _partitionable_indexes(observed, gpus)
    used = {s.place for s in observed.existing if s.pod}
    used |= {place for _, place in held if mode_of(place.name) == observed.mode}
    used |= {place for place, state in devices_of if place and not state.idle}
    unavailable = {place.card: _OTHER_MODE for _, place in held if mode_of(place.name) != observed.mode}
    unavailable |= {state.card.index: _HELD for place, state in devices_of if not place and not state.idle}
    # The card of an MtgpuPod is unavailable even if `states` does not contain the MtgpuPod.
    of_mtgpupods = [share for h in holdings if h.gpuid for share in h.shares]
    unavailable |= {gpu.index: _HELD for gpu in gpus if any(share.is_on(gpu) for share in of_mtgpupods)}
    memory_used = sum(state.memory_used for place, state in devices_of if not place)
    memory_used += sum(card.memory for card in slice_devices(NodeSlices(observed.mode, existing=tuple(used)), gpus))
    missing = {place for bound, place in held if bound and mode_of(place.name) == observed.mode} - existing
    return PartitionableNode(
        node,
        version,
        tuple(gpus),
        observed,
        frozenset(used),
        frozenset(place for place in missing if place.card in partitionable),
        unavailable,
        tuple(p for p, state in sorted(devices_of, key=_minor) if p and state.idle and state.card.healthy),
        memory_used,
        partitionable_cards(gpus, observed, used, geometries, unavailable),
        room,
        named,
        problem,
    )


def _minor(row: tuple[Slice | None, CardState]) -> tuple[str, int, int]:
    """Return the sort key of a device. Pods get the device with the lowest minor first (policy `minor`)."""
    card = row[1].card
    return card.type, card.index if card.minor is None else card.minor, card.index


def with_claimed_slices(
    target: PartitionableNode, claims: Sequence[Mapping[str, int]], geometries: Geometries
) -> PartitionableNode:
    """Return the node as if pods already used the free slices that they claim, so that no plan destroys these slices.

    Args:
        claims: The number of slices by name that each of these pods claims.
    """
    missing, claimed = sum(map(Counter, claims), Counter()), set()
    for place in target.free:
        if missing[place.name] > 0:
            missing[place.name] -= 1
            claimed.add(place)
    if not claimed:
        return target
    used, free = target.used | claimed, tuple(place for place in target.free if place not in claimed)
    cards = partitionable_cards(target.gpus, target.observed, used, geometries, target.unavailable)
    return replace(target, used=used, free=free, cards=cards)


def slice_of_share(share: Share) -> Slice | None:
    """Return the place of the slice that a share holds, or None if it holds none or an unknown one."""
    name = slice_of_resource(RESOURCE_PREFIX + share.type)
    return Slice(*place_of(share.card), name) if name and isinstance(share.card, int) else None


def slice_of_device(card: Card) -> Slice | None:
    """Return the place of the slice that this device is, or None if it is not a slice."""
    name = slice_of_resource(RESOURCE_PREFIX + card.type)
    return Slice(*place_of(card.index), name) if name else None


def requested_slices(request: GpuRequest) -> dict[str, int]:
    """Return, by name, the most slices that a pod with this request holds at the same time."""
    counts: dict[str, int] = {}
    for type_ in dict.fromkeys(c.type for c in request.others):
        name = slice_of_resource(RESOURCE_PREFIX + type_)
        if name:
            counts[name] = peak((c.stage, Amount(shares=c.cards)) for c in request.others if c.type == type_).shares
    return counts


def can_be_partitioned_for(target: PartitionableNode, request: Mapping[str, int], budget: Budget | None = None) -> bool:
    """Return whether the node has these slices free, or could be partitioned to have them, as `can_offer` does.

    Raises Exhausted if the budget ends before the answer is known.
    """
    return can_offer(target.cards, request, budget)


def plan_node(
    target: PartitionableNode, requests: Sequence[Mapping[str, int]], budget: Budget | None = None
) -> tuple[Slice, ...] | Rejection:
    """Return all slices that the node should have for pods with these requests, as `plan_cards` does.

    Slices in use stay at their places, and are created again if they are missing. A card that is not healthy, or not in
    MIG mode on a MIG node, keeps the slices that the node reports.
    """
    planned = plan_cards(target.cards, requests, budget)
    if isinstance(planned, Rejection):
        return planned
    partitionable = _partitionable_indexes(target.observed, target.gpus)
    others = (s.place for s in target.observed.existing if s.card not in partitionable)
    return tuple(sorted({*(s for s in planned if s.card in partitionable), *others}))


def _partitionable_indexes(observed: NodeSlices, gpus: Iterable[Card]) -> frozenset[int]:
    healthy = frozenset(gpu.index for gpu in gpus if gpu.healthy)
    return healthy & observed.cards if observed.mode == MIG else healthy


def find_served_pods(
    slices: Iterable[Slice], used: Iterable[Slice], requests: Sequence[Mapping[str, int]]
) -> Iterator[bool]:
    """Yield for each pod, in order, whether a node has free slices for it once the pods before it have theirs.

    Args:
        slices: All slices of the node.
        used: The slices that other pods use.
        requests: The number of slices by name that each pod requests.
    """
    free = Counter(s.name for s in {*slices}.difference(used))
    for counts in requests:
        is_served = all(free[name] >= count for name, count in counts.items())
        if is_served:
            free.subtract(counts)
        yield is_served


def memory_of_slices(target: PartitionableNode, request: Mapping[str, int]) -> int:
    """Return the memory of the requested slices in bytes, each with the largest size that it has on any card."""
    total, kinds = 0, tuple({(gpu.model, gpu.memory): gpu for gpu in target.gpus}.values())
    for name, count in request.items():
        on_all_kinds = tuple(Slice(gpu.index, 0, name) for gpu in kinds)
        sizes = [card.memory for card in slice_devices(NodeSlices(target.observed.mode, existing=on_all_kinds), kinds)]
        total += count * max(sizes, default=0)
    return total

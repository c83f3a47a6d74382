"""Builds the ResourceSlices with which the agent publishes the MIG instances that claims can have.

Every possible instance of a card is a device, and those of one card overlap. So each card has a set of counters: one
for each memory slice, one for the compute slices, and one for the media engines. A device consumes what its instance
would take, and kube-scheduler allocates no devices that together consume more than there is. What the counters allow is
what `mgpu.model.mig` allows.

The API server wants counters and devices in different slices, at most 8 sets of counters in one slice, and at most 64
devices with counters in another. All slices of a node belong to its one pool, because a device can only consume
counters of its own pool. Which devices a node has follows from its cards alone; what is in use of them changes nothing,
since kube-scheduler itself counts what claims hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.mig import Instance, Layout, Profile, layout_of
from mgpu.model.mig_attributes import mig_attributes
from mgpu.model.mig_devices import MigOffer, offers_of
from mgpu.model.quantities import quantity_of_bytes
from mgpu.model.resource_claims import CORES, MEMORY, MILLI_PER_PERCENT, device_name
from mgpu.model.resource_slices import (
    IN_USE,
    NOT_IN_MIG_MODE,
    UNHEALTHY,
    Taint,
    attribute_value,
    make_object,
    slice_name,
    taint_rows,
)

MOST_COUNTER_SETS = 8
MOST_DEVICES = 64

Raw = dict[str, Any]
Counters = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PublishedMigCard:
    """A card with the MIG instances that it offers to claims.

    Attributes:
        taken: the instances that claims cannot have now, because pods without claims hold the card or a part of it, or
            because somebody else has created instances.
        in_mode: whether the card is in MIG mode.
    """

    card: Card
    taken: frozenset[Instance] = frozenset()
    in_mode: bool = True


def make_mig_slices(
    node: str, node_uid: str, cards: Sequence[PublishedMigCard], generation: int, slices: int
) -> list[Raw]:
    """Return the slices with the MIG instances of a node: those with counters first, in the order of their names.

    Args:
        generation: the generation of the pool.
        slices: the number of all slices of the pool.
    """
    ordered = sorted(cards, key=lambda one: one.card.index)
    pool = {"name": node, "generation": generation, "resourceSliceCount": slices}
    sets = [_counter_set(one.card) for one in ordered]
    devices = [device for one in ordered for device in _devices(one)]
    contents = [
        *(("counters", i, {"sharedCounters": rows}) for i, rows in enumerate(_parts(sets, MOST_COUNTER_SETS))),
        *(("mig", i, {"devices": rows}) for i, rows in enumerate(_parts(devices, MOST_DEVICES))),
    ]
    return [
        make_object(f"{slice_name(node)}-{kind}-{i:02}", node, node_uid, pool, content) for kind, i, content in contents
    ]


def _parts(rows: Sequence[Raw], most: int) -> Iterator[list[Raw]]:
    for first in range(0, len(rows), most):
        yield [*rows[first : first + most]]


def count_mig_slices(cards: Sequence[PublishedMigCard]) -> int:
    """Return how many slices `make_mig_slices` returns."""
    devices = sum(len(offers_of(one.card)) for one in cards)
    return -(-len(cards) // MOST_COUNTER_SETS) - (-devices // MOST_DEVICES)


def counters_of(layout: Layout) -> Counters:
    """Return the counters of a card of this layout."""
    found = {_memory_slice(position): 1 for position in range(layout.slices)}
    found["compute-slices"] = layout.compute
    if any(profile.media for profile in layout.profiles):
        found["media-engines"] = 1
    return {**found, **{_of_profile(p): p.most for p in layout.profiles if _is_limited(p)}}


def consumed_by(layout: Layout, instance: Instance) -> Counters:
    """Return what an instance consumes of the counters of its card; nothing if the card cannot have it."""
    profile = layout.profile(instance.profile)
    if profile is None:
        return {}
    found = {_memory_slice(position): 1 for position in range(instance.start, instance.start + profile.size)}
    found["compute-slices"] = profile.compute
    if profile.media:
        found["media-engines"] = 1
    return {**found, **({_of_profile(profile): 1} if _is_limited(profile) else {})}


def _memory_slice(position: int) -> str:
    return f"memory-slice-{position}"


def _of_profile(profile: Profile) -> str:
    return profile.name.replace(".", "-").replace("+", "-")


def _is_limited(profile: Profile) -> bool:
    """Return whether a card has fewer instances of the profile than places, for a reason other than media engines."""
    return profile.most < len(profile.starts) and not profile.media


def _counter_set(card: Card) -> Raw:
    layout = layout_of(card.model, card.memory)
    assert layout is not None, card
    return {"name": device_name(card.index), "counters": _rows(counters_of(layout))}


def _rows(counters: Counters) -> Raw:
    return {name: {"value": str(value)} for name, value in counters.items()}


def _devices(one: PublishedMigCard) -> Iterator[Raw]:
    of_card = [*([UNHEALTHY] if not one.card.healthy else []), *([NOT_IN_MIG_MODE] if not one.in_mode else [])]
    for offer in offers_of(one.card):
        taints = [*of_card]
        if offer.instance in one.taken:
            taints.append(IN_USE)
        yield _device(offer, taints)


def _device(offer: MigOffer, taints: Sequence[Taint]) -> Raw:
    consumed = _rows(consumed_by(offer.layout, offer.instance))
    device = {
        "name": offer.device.name,
        "attributes": {name: attribute_value(value) for name, value in mig_attributes(offer).items()},
        "capacity": {
            CORES: {"value": str(offer.core // MILLI_PER_PERCENT)},
            MEMORY: {"value": quantity_of_bytes(offer.memory)},
        },
        "consumesCounters": [{"counterSet": device_name(offer.card.index), "counters": consumed}],
    }
    return {**device, "taints": taint_rows(taints)} if taints else device

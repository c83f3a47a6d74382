"""Computes the slices of a node's pool: one with the cards that claims can share, and those with MIG instances.

kube-scheduler takes only the slices with the highest generation, and uses the pool only if it has as many of them as
each of them says. So if the slices change in what they have in common, all of them get a new generation, and the pool
is incomplete until the last one is written. While it is incomplete, kube-scheduler allocates nothing of it. What
changes often, the free amounts and the taints, does not need a new generation, since each slice is written as a whole.

If the agent dies in between, the next one finds slices of different generations, and begins with another new one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deviceplugin.dra.slice_content import Raw, desired_slice, generation_of, with_metadata_of
from mgpu.model.mig_resource_slices import PublishedMigCard, count_mig_slices, make_mig_slices
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_slices import PublishedCard, make_slice, slice_name


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """What a node offers to claims.

    Attributes:
        cards: the cards that claims can share.
        mig_cards: the cards of which claims get MIG instances.
    """

    cards: tuple[PublishedCard, ...]
    mig_cards: tuple[PublishedMigCard, ...] = ()


def desired_pool(node: str, node_uid: str, offer: PoolOffer, present: Mapping[str, Raw]) -> list[Raw]:
    """Return the slices that the node should have, in the order in which they must be written.

    Args:
        present: the slices of the driver on this node, by name.
    """
    name = slice_name(node)
    if not offer.mig_cards:
        return [desired_slice(node, node_uid, offer.cards, present.get(name))]
    highest = max(map(generation_of, present.values()), default=0)
    kept = _made(node, node_uid, offer, highest)
    is_kept = present.keys() == {one["metadata"]["name"] for one in kept} and all(
        _structure(present[one["metadata"]["name"]]) == _structure(one) for one in kept
    )
    made = kept if is_kept else _made(node, node_uid, offer, highest + 1)
    return [with_metadata_of(present.get(one["metadata"]["name"]), one) for one in made]


def _made(node: str, node_uid: str, offer: PoolOffer, generation: int) -> list[Raw]:
    count = 1 + count_mig_slices(offer.mig_cards)
    instances = make_mig_slices(node, node_uid, offer.mig_cards, generation, count)
    return [*instances, make_slice(node, node_uid, offer.cards, generation, {}, count)]


def _structure(one: Mapping[str, Any]) -> object:
    """Return what cannot change without a new generation, to be compared with `==`."""
    spec = table_at(one, "spec")
    devices = sorted((str(row.get("name")), _sets(row)) for row in spec.get("devices") or ())
    counters = [(row.get("name"), sorted(row.get("counters") or ())) for row in spec.get("sharedCounters") or ()]
    return spec.get("pool"), devices, sorted(counters)


def _sets(device: Mapping[str, Any]) -> Sequence[object]:
    rows = device.get("consumesCounters") or ()
    return [(row.get("counterSet"), sorted(row.get("counters") or ())) for row in rows]

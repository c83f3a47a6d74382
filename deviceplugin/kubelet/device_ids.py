"""Chooses the device ids of a resource, one for each unit, and decides which of them are unhealthy.

An id stands for no particular card, so the ids that a pod gets do not determine its cards. The kubelet reports the
number of ids as the node's capacity, and the number of healthy ids as the allocatable amount. The functions are pure.
`deviceplugin.advertised_resources` calls `device_ids`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, islice

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card

MAX_IDS = 4000
"""The maximum number of ids of a node. Each id is written into the status of the pod that holds it, and the size of an
API object is limited (docs/design/kubernetes.md, "Device manager")."""


def device_ids(
    resource: NodeResource,
    cards: Sequence[Card],
    limit: int = MAX_IDS,
    held: Mapping[int, Sequence[str]] | None = None,
    taken: Collection[str] = (),
    before: Collection[str] = (),
) -> dict[str, bool]:
    """Return, by id, whether the id is healthy. There is one id for each unit of all cards, but at most `limit`.

    Ids that pods hold are kept, up to this number, because the kubelet fails a pod whose id disappears. As many ids are
    unhealthy as the unhealthy cards have units. For each unhealthy card, ids of pods on this card are chosen first,
    since the kubelet reports unhealthy ids in the status of their pods. Ids that were unhealthy before come next, so
    that few ids change. Free ids follow, and then all others.

    Args:
        resource: The resource, with the units of each card.
        cards: The GPUs of the node.
        limit: The maximum number of ids.
        held: The ids that pods on a card hold, by the index of the card.
        taken: All ids that pods hold.
        before: The ids that are unhealthy now.
    """
    amounts = dict(resource.amounts)
    total = min(limit, sum(amounts.values()))
    held_ids = sorted((i for i in taken if i.isdecimal()), key=int)[:total]
    others = (i for i in map(str, count()) if i not in taken)
    ids = dict.fromkeys(sorted((*held_ids, *islice(others, total - len(held_ids))), key=int), True)
    for card in cards:
        if not card.healthy:
            of_card = (held or {}).get(card.index, ())
            order = _unique(of_card, sorted(before), (i for i in reversed(ids) if i not in taken), reversed(ids))
            healthy = [i for i in order if ids.get(i)]
            ids.update(dict.fromkeys(healthy[: amounts.get(card.index, 0)], False))
    return ids


def _unique(*parts: Iterable[str]) -> dict[str, None]:
    return {i: None for part in parts for i in part}

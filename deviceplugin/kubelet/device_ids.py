"""Chooses the device ids of a resource, one for each unit, and which of them are unhealthy.

`deviceplugin.advertised_resources` calls `device_ids`, which is pure. An id stands for no particular card: which id a
pod gets says nothing about its cards. Only the number of ids and the number of unhealthy ids matter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, islice

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card

MAX_IDS = 4000
"""The maximum number of ids of a node, since each id is written into the status of the pod that holds it.

Source: docs/design/kubernetes.md, "Device manager".
"""


def device_ids(
    resource: NodeResource,
    cards: Sequence[Card],
    limit: int = MAX_IDS,
    held: Mapping[int, Sequence[str]] | None = None,
    taken: Collection[str] = (),
    before: Collection[str] = (),
) -> dict[str, bool]:
    """Return id → whether it is healthy, with one id for each unit of all cards, at most `limit`.

    Ids that pods hold come first, because the kubelet fails a pod whose id disappears. As many ids are unhealthy as the
    unhealthy cards have units. For each such card the order of preference is: ids that pods on this card hold, since
    the kubelet reports them in the status of these pods; ids that were unhealthy before, so that few change; free ids;
    all others.

    Args:
        held: card index → ids that pods on that card hold.
        taken: all ids that pods hold.
        before: the ids that are unhealthy now.
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

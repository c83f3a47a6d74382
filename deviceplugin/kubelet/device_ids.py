"""The device ids that stand for a resource's units: short names of no particular card, each healthy or not.

Which id a pod gets says nothing about its cards. Only two numbers matter: how many ids there are, and how many of them
are unhealthy. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, islice

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card

MAX_IDS = 4000
"""The most ids of a node. The number is limited because each id is written into the status of the pod that holds it.

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
    """Return every id and whether it is healthy: one per unit of all cards, at most `limit`.

    Ids that pods hold are always among them, even if there were more before: the kubelet fails a pod whose id is gone.
    As many are unhealthy as the unhealthy cards have units. Those are, for each such card: first ids that its own pods
    hold, since the kubelet reports them in the status of these pods; then ids that were unhealthy before, so that few
    change; then free ids; then any.

    Args:
        held: card index → ids of the pods on that card.
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

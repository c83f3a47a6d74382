"""The device ids that stand for a resource's units: short names of no card, healthy or not.

Which id a pod gets says nothing about which card; only how many there are, and how many are unhealthy, does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, islice

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card

MAX_IDS = 4000
"""Per node: each id is written into the status of the pod that holds it.

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
    """Every id and whether it is healthy: one per unit of all cards, `limit` at most.

    Those that pods hold (`taken`) are among them, also when there were more before.
    As many are unhealthy as the unhealthy cards have units: of each such card first ids that its own pods hold
    (`held`: card index → ids), then those that were unhealthy before, then free ones (not in `taken`), then any.
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

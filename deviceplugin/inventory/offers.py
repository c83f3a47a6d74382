"""What a node offers of each resource: as device ids, or as an amount in its status. Pure.

All ids of a node together have a limit (`deviceplugin.kubelet.device_ids.MAX_IDS`). If its cards have more units, the
ids are divided evenly among the vocabularies, and what one does not need goes to the others. `mgpu.io/share` and whole
cards come first: they are few, and several vocabularies use them.

A resource that gets fewer ids than its cards have units is not published in node status instead: a container that
requests nothing else would then start without an Allocate, and so without its cards. The node takes fewer such pods,
and an Event says so; disabling the vocabularies that are not used leaves room for all units.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu import dialects
from mgpu.dialects.protocol import SHARE, SHARES_PER_CARD, NodeResource
from mgpu.model.cards import GPU, Card
from mgpu.settings import Settings

WHOLE_CARDS = "nvidia.com/gpu"


def id_resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    """Return the resources that are served as device ids, each once. Their names do not depend on the cards."""
    return tuple(resource for _, resource in _by_vocabulary(cards, settings))


def status_amounts(cards: Sequence[Card], settings: Settings) -> dict[str, int]:
    """Return resource → amount in node status, summed over the healthy ones of `cards` (devices of all types)."""
    found: dict[str, int] = {}
    healthy = {(card.type, card.index) for card in cards if card.healthy}
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(cards, settings):
            if not resource.as_ids:
                amounts = (amount for index, amount in resource.amounts if (resource.type, index) in healthy)
                found.setdefault(resource.name, sum(amounts))
    return found


def id_limits(cards: Sequence[Card], settings: Settings, limit: int) -> dict[str, int]:
    """Return resource → how many ids it has, `limit` in all."""
    needs: dict[str, dict[str, int]] = {}
    for vocabulary, resource in _by_vocabulary(cards, settings):
        needs.setdefault(vocabulary, {})[resource.name] = sum(amount for _, amount in resource.amounts)
    found = _divide(needs.pop("", {}), limit)
    left = limit - sum(found.values())
    shares = _divide({name: sum(own.values()) for name, own in needs.items()}, left)
    for vocabulary, own in needs.items():
        found |= _divide(own, shares[vocabulary])
    return found


def _by_vocabulary(cards: Sequence[Card], settings: Settings) -> Iterator[tuple[str, NodeResource]]:
    """Yield vocabulary and resource, each resource once; "" for resources that several vocabularies use."""
    gpus, seen = [card for card in cards if card.type == GPU], {SHARE}
    yield "", NodeResource(SHARE, tuple((card.index, SHARES_PER_CARD) for card in gpus), as_ids=True)
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(gpus, settings):
            if resource.as_ids and resource.name not in seen:
                seen.add(resource.name)
                yield "" if resource.name == WHOLE_CARDS else dialect.NAME, resource


def _divide(needs: Mapping[str, int], limit: int) -> dict[str, int]:
    """Give each what it needs. If that is too much, divide evenly; what small ones do not need goes to the others."""
    found = {}
    for left, (name, need) in zip(range(len(needs), 0, -1), sorted(needs.items(), key=_by_need), strict=True):
        found[name] = min(need, limit // left)
        limit -= found[name]
    return found


def _by_need(row: tuple[str, int]) -> tuple[int, str]:
    return row[1], row[0]

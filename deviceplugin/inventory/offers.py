"""What a node offers of each resource: as device ids, or as a number in its status. Pure.

All ids of a node together have a limit. Where its cards have more units, the ids are divided evenly among the
vocabularies, and what one of them does not need is the others'; the carrier and whole cards, few and of use to
several, come first. A resource that has fewer ids than its cards have units is *not* published in node status instead:
a container that asks for nothing else would then start without an Allocate, and so without its cards. The node takes
fewer such pods, and says so; whoever disables the vocabularies that nobody uses there has room for all.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu import dialects
from mgpu.dialects.protocol import SHARE, SHARES_PER_CARD, NodeResource
from mgpu.model.cards import GPU, Card
from mgpu.settings import Settings

WHOLE_CARDS = "nvidia.com/gpu"


def as_ids(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    """The resources that are served as device ids, each once; their names do not depend on the cards."""
    return tuple(resource for _, resource in _by_vocabulary(cards, settings))


def in_status(cards: Sequence[Card], settings: Settings) -> dict[str, int]:
    """Resource → amount in node status, summed over healthy cards. `cards`: devices of all types."""
    found: dict[str, int] = {}
    healthy = {(card.type, card.index) for card in cards if card.healthy}
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(cards, settings):
            if not resource.as_ids:
                amounts = (amount for index, amount in resource.amounts if (resource.type, index) in healthy)
                found.setdefault(resource.name, sum(amounts))
    return found


def budget(cards: Sequence[Card], settings: Settings, limit: int) -> dict[str, int]:
    """Resource → how many ids it has, `limit` in all."""
    needs: dict[str, dict[str, int]] = {}
    for vocabulary, resource in _by_vocabulary(cards, settings):
        needs.setdefault(vocabulary, {})[resource.name] = sum(amount for _, amount in resource.amounts)
    found = _divided(needs.pop("", {}), limit)
    left = limit - sum(found.values())
    shares = _divided({name: sum(own.values()) for name, own in needs.items()}, left)
    for vocabulary, own in needs.items():
        found |= _divided(own, shares[vocabulary])
    return found


def _by_vocabulary(cards: Sequence[Card], settings: Settings) -> Iterator[tuple[str, NodeResource]]:
    """(vocabulary, resource); "": what is of use to several."""
    gpus, seen = [card for card in cards if card.type == GPU], {SHARE}
    yield "", NodeResource(SHARE, tuple((card.index, SHARES_PER_CARD) for card in gpus), as_ids=True)
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(gpus, settings):
            if resource.as_ids and resource.name not in seen:
                seen.add(resource.name)
                yield "" if resource.name == WHOLE_CARDS else dialect.NAME, resource


def _divided(needs: Mapping[str, int], limit: int) -> dict[str, int]:
    """As much as each needs; where that is more than `limit`, evenly, the small ones' rest among the others."""
    found = {}
    for left, (name, need) in zip(range(len(needs), 0, -1), sorted(needs.items(), key=_by_need), strict=True):
        found[name] = min(need, limit // left)
        limit -= found[name]
    return found


def _by_need(row: tuple[str, int]) -> tuple[int, str]:
    return row[1], row[0]

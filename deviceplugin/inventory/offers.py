"""Computes how much of each resource a node offers, either as device ids or as an amount in its status.

The functions are pure. Mainly `deviceplugin.advertised_resources` calls them for the device ids, and
`inventory.reporter` for the node status; `deviceplugin.main` reads the names of the resources. The number of ids of a
node is limited (`kubelet.device_ids.MAX_IDS`). If its cards have more units, the ids are divided evenly among the
vocabularies, and ids that one vocabulary does not need go to the others. `mgpu.io/share` and whole cards get their ids
first, since they need few and several vocabularies use them.

If a resource gets too few ids, the node takes fewer pods that request it, and an Event reports that. Such a resource is
not moved to node status: a container that requests nothing else would start without an Allocate call, and so without
its cards.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu import dialects
from mgpu.dialects.protocol import SHARE, SHARES_PER_CARD, NodeResource
from mgpu.model.cards import GPU, Card
from mgpu.settings import Settings

WHOLE_CARDS = "nvidia.com/gpu"


def id_resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    """Return the resources that are offered as device ids, each once. The names do not depend on the cards."""
    return tuple(resource for _, resource in _by_vocabulary(cards, settings))


def status_amounts(cards: Sequence[Card], settings: Settings) -> dict[str, int]:
    """Return the amounts in node status by resource: the sums over the healthy devices of all types in `cards`."""
    found: dict[str, int] = {}
    healthy = {(card.type, card.index) for card in cards if card.healthy}
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(cards, settings):
            if not resource.as_ids:
                amounts = (amount for index, amount in resource.amounts if (resource.type, index) in healthy)
                found.setdefault(resource.name, sum(amounts))
    return found


def names_of_memory(settings: Settings) -> frozenset[str]:
    """Return the names of the resources that stand for memory."""
    return frozenset(
        resource.name
        for dialect in dialects.enabled(settings)
        for resource in dialect.resources((), settings)
        if resource.of_memory
    )


def id_limits(cards: Sequence[Card], settings: Settings, limit: int) -> dict[str, int]:
    """Return the number of ids by resource. The sum is at most `limit`."""
    needs: dict[str, dict[str, int]] = {}
    for vocabulary, resource in _by_vocabulary(cards, settings):
        needs.setdefault(vocabulary, {})[resource.name] = sum(amount for _, amount in resource.amounts)
    found = _divide(needs.pop("", {}), limit)
    remaining = limit - sum(found.values())
    shares = _divide({name: sum(own.values()) for name, own in needs.items()}, remaining)
    for vocabulary, own in needs.items():
        found |= _divide(own, shares[vocabulary])
    return found


def _by_vocabulary(cards: Sequence[Card], settings: Settings) -> Iterator[tuple[str, NodeResource]]:
    """Yield each resource that is offered as device ids, with its vocabulary.

    The vocabulary of `mgpu.io/share` and of whole cards is "", because several vocabularies use them.
    """
    gpus = [card for card in cards if card.type == GPU]
    yielded = {SHARE}
    yield "", NodeResource(SHARE, tuple((card.index, SHARES_PER_CARD) for card in gpus), as_ids=True)
    for dialect in dialects.enabled(settings):
        for resource in dialect.resources(gpus, settings):
            if resource.as_ids and resource.name not in yielded:
                yielded.add(resource.name)
                yield "" if resource.name == WHOLE_CARDS else dialect.NAME, resource


def _divide(needs: Mapping[str, int], limit: int) -> dict[str, int]:
    """Divide `limit` evenly among the names, but give no name more than it needs."""
    found = {}
    for position, (need, name) in enumerate(sorted((need, name) for name, need in needs.items())):
        found[name] = min(need, limit // (len(needs) - position))
        limit -= found[name]
    return found

"""Without CDI: a container that got the cards of an equal decision keeps them, and the two records change places.

`Allocate` had to guess, and what it said stands. Between equal asks that is no harm, as long as the records say what is
so. Every step is a transposition, so that at any time each decision belongs to one container. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from deviceplugin.pods.capacity_check import excess, holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import VISIBLE, Target
from mgpu import dialects
from mgpu.model.cards import GPU, Card
from mgpu.model.gpu_requests import Placement
from mgpu.model.ledger import share_of
from mgpu.settings import Settings

Key = tuple[str, str]
"""Pod UID and container."""


def cards_in(env: Mapping[str, str], cards: Sequence[Card]) -> tuple[Card, ...]:
    """The cards that an environment names."""
    uuids = env.get(VISIBLE, "").split(",")
    return tuple(card for card in cards if card.uuid in uuids)


def partner(
    target: Target,
    given: Sequence[Card],
    cards: Sequence[Card],
    pods: Iterable[GpuPod],
    settled: Collection[Key],
    served: Collection[Key],
) -> Target | None:
    """Whose decision the container was given, by its cards: the oldest equal one's; None: nobody's any more.

    settled: containers that are known to run on their own record. served: those whose decision Allocate gave away; it
    is one of them, unless an agent before this one did.
    """
    targets = [
        Target(known, request.container) for known in pods if known.request for request in known.request.containers
    ]
    for other in sorted(targets, key=lambda other: other.key not in served):
        if other.known.pod.ended or other.known.problem or other.key in {*settled, target.key}:
            continue
        if other.carrier != target.carrier or not exchangeable(other):
            continue  # what Allocate of one resource gives away is never another one's
        equal = replace(other.request, container=target.container, stage=target.request.stage) == target.request
        named = {card for card in cards if any(share.is_on(card) for share in other.shares)}
        if equal and named == set(given):
            return other
    return None


def exchangeable(target: Target) -> bool:
    """Whether the pod's record can be written anew from what the agent knows: all of it is about GPUs."""
    return target.known.request is not None and not target.known.request.others


def room(target: Target, given: Sequence[Card], cards: Sequence[Card], pods: Iterable[GpuPod]) -> str | None:
    """Return why the container cannot have these cards, by the other pods' records; None where it can."""
    others = [known for known in pods if not known.pod.ended and known.pod.uid != target.known.pod.uid]
    return excess(holding(with_cards(target, given), cards), [holding(known, cards) for known in others], cards)


def with_cards(target: Target, cards: Sequence[Card]) -> GpuPod:
    """The pod as if its record gave `cards` to the container. Raises Refused where it asks for none."""
    known, request = target.known, target.request
    new = tuple(share_of(request, card.index) for card in cards)
    own = tuple(share for share in known.shares or () if share.type == GPU)
    gpus = (*(share for share in own if share.container != request.container), *new)
    order = [c.container for c in known.request.containers] if known.request else []
    devices = tuple(share for share in known.shares or () if share.type != GPU)
    return replace(known, shares=(*sorted(gpus, key=lambda share: order.index(share.container)), *devices))


def record(known: GpuPod, cards: Sequence[Card], settings: Settings, now_ns: int) -> dict[str, str]:
    """The annotations that say what the pod's shares say; none where it asks for nothing."""
    if known.request is None:
        return {}
    placed = []
    for request in known.request.containers:
        own = Target(known, request.container).shares
        indexes = (card.index for card in cards if any(share.is_on(card) for share in own))
        placed.append((request.container, tuple(sorted(indexes))))
    dialect = dialects.by_name(known.request.dialect)
    return dialect.write_placement(known.pod, known.request, Placement(tuple(placed)), cards, settings, now_ns)

"""Computes the limits of a container from its shares of cards. The functions are pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deviceplugin.pods.identity import Target
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Share


class Unenforceable(Exception):
    """The shares of the container cannot be enforced. The message is the reason."""


@dataclass(frozen=True, slots=True)
class CardLimit:
    """The limit of a container on one card.

    Attributes:
        memory: The limit in bytes; None if the share states no memory, or is the whole card.
        compute: The limit in thousandths of the card; None if the share states no compute, or is the whole card.
    """

    card: Card
    memory: int | None
    compute: int | None


@dataclass(frozen=True, slots=True)
class LimitedContainer:
    """A container with its limits, sorted by the index of the card.

    In this order NVIDIA_VISIBLE_DEVICES names the cards.
    """

    target: Target
    limits: tuple[CardLimit, ...]


def limits_of(shares: Iterable[Share], gpus: Sequence[Card]) -> tuple[CardLimit, ...]:
    """Return the limits of the container with these shares; () if it has only whole cards, slices or no cards.

    A whole card beside shares has a place among the limits, because back ends number or count the cards of a container.

    Args:
        gpus: All GPUs of the node, including partitioned ones.

    Raises Unenforceable if a share states no amount. Records of other systems can state the amounts of all containers
    of a pod together.
    """
    of_cards = [share for share in shares if share.type == GPU]
    if all(share.whole for share in of_cards):
        return ()
    limits = [_limit(share, card) for share in of_cards for card in gpus if share.is_on(card)]
    return tuple(sorted(limits, key=lambda limit: (limit.card.index, limit.card.uuid)))


def _limit(share: Share, card: Card) -> CardLimit:
    if share.whole:
        return CardLimit(card, None, None)
    amount = share.amount(card)
    if not amount.memory and not amount.core:
        raise Unenforceable("the allocation record does not say how much of the pod's share belongs to the container")
    return CardLimit(card, amount.memory or None, amount.core or None)

"""Enumerates which containers of a pod can be on one card together.

`placement` and `evictions` call `kinds_of` and `configurations` to set up the exact search of `solver`. `first_fit`
builds configurations with `grow`.

Equal containers that start one after the other are one kind, because only their number on a card matters. A
configuration is a number of containers of each kind, packed into an integer with a field for each kind. It must be
built in start order: an init container ends before the containers after it start, and what the containers need
together is the peak of what runs at the same time (`mgpu.model.gpu_requests.peak`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import add, gt
from typing import NamedTuple

from mgpu.model.cards import WHOLE_RATIO, Card, CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest
from mgpu.model.pods import Stage
from scheduler.engine.effort import Budget, Exhausted

_NOTHING = Amount()

_PERCENT = 100
"""The resolution of `Configuration.held`. With a finer resolution, the search compares many more placements."""

_GROW_STEPS = 16
"""Steps to add one container to a configuration and to check whether it fits."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Equal containers that start one after the other.

    Attributes:
        container: One of these containers.
        members: The positions of the containers in the request.
        units: The number of cards that the containers need in total.
        shift: The position of the kind's field in a packed integer.
        mask: The largest number that the field can contain.
        guard: The bit above the field, which is 0 in configurations. `solver` uses it to detect an underflow.
    """

    container: ContainerRequest
    members: tuple[int, ...]
    units: int
    shift: int
    mask: int
    guard: int

    def count(self, code: int) -> int:
        """Return how many containers of this kind are in a configuration."""
        return code >> self.shift & self.mask


class Configuration(NamedTuple):
    """Containers that are on one card.

    Attributes:
        code: The number of containers of each kind, packed into an integer.
        need: The peak of what the containers take of the card together.
        whole: Whether one of the containers takes the whole card, so that the card must be idle.
        running: What the containers that keep running take, without init containers.
        whole_runs: Whether one of the containers that keep running takes the whole card.
    """

    code: int = 0
    need: Amount = _NOTHING
    whole: bool = False
    running: Amount = _NOTHING
    whole_runs: bool = False

    def fits(self, state: CardState, max_shares: int) -> bool:
        """Return whether enough of the card is free.

        Args:
            max_shares: The most shares of a card, or 0 for no limit.
        """
        return (
            self.need.core <= state.core_free
            and self.need.memory <= state.memory_free
            and self.need.ratio <= state.ratio_free
            and (not max_shares or state.shares + self.need.shares <= max_shares)
            and (not self.whole or state.idle)
        )

    def held(self, largest: Amount) -> int:
        """Return how much of a card the pod holds: percent of core plus percent of memory, rounded up.

        The percentages refer to the largest card of the node, so that the result does not depend on the card. A whole
        card of any size counts as the whole largest card.

        Args:
            largest: The result of `largest_of`.
        """
        if self.whole:
            return 2 * _PERCENT
        core, memory = self.need.core * largest.memory, self.need.memory * largest.core
        if self.need.ratio:
            memory = self.need.ratio * largest.memory * largest.core // WHOLE_RATIO
        return -(-_PERCENT * (core + memory) // (largest.core * largest.memory))


def kinds_of(request: GpuRequest) -> tuple[Kind, ...]:
    """Return the kinds of a request, in start order.

    The field of the first kind has the most significant bits, so that packed integers compare like the tuples of the
    numbers of containers.
    """
    runs = [list(run) for _, run in groupby(enumerate(request.containers), lambda row: replace(row[1], container=""))]
    kinds: list[Kind] = []
    shift = 0
    for run in reversed(runs):
        container = run[0][1]
        units = container.cards * len(run)
        bits = units.bit_length()
        members = tuple(position for position, _ in run)
        kinds.append(Kind(container, members, units, shift, (1 << bits) - 1, 1 << shift + bits))
        shift += bits + 1
    return tuple(reversed(kinds))


def largest_of(request: GpuRequest, cards: Sequence[CardState]) -> Amount | None:
    """Return the most core and memory that a card has, to measure what the pod holds (`Configuration.held`).

    Returns None if the pod holds the same in every placement, because it has a single container or no init containers.

    As long as a pod exists, it holds the peak of what its containers take on each card. A ResourceQuota and the kubelet
    count the peak of the whole pod. So a pod whose init containers had cards of their own would hold more than they
    count.
    """
    if len(request.containers) == 1 or all(c.stage is not Stage.INIT for c in request.containers):
        return None
    return Amount(max(s.card.core for s in cards), max(s.card.memory for s in cards))


def configurations(
    kinds: Sequence[Kind], states: Sequence[CardState], max_shares: int, limit: int, budget: Budget
) -> list[Configuration]:
    """Return every configuration that may fit one of `states`, which are cards of one size. The first one is empty.

    Raises Exhausted if there are more than `limit` configurations, or if the attempts take more than the budget. A
    request with many kinds can have few configurations that fit and still need many attempts.
    """
    card = states[0].card
    shares = max_shares - min(s.shares for s in states) if max_shares else sum(len(k.members) for k in kinds)
    most_free = Amount(
        max(s.core_free for s in states),
        max(s.memory_free for s in states),
        shares,
        max(s.ratio_free for s in states),
    )
    some_card_is_idle = any(s.idle for s in states)
    found = [Configuration()]
    for kind in kinds:
        if kind.container.whole and not some_card_is_idle:
            continue
        added = []
        for configuration in found:
            attempts = 0
            grown: Configuration | None = configuration
            for _ in kind.members:
                attempts += 1
                grown = grown and grow(grown, kind, card)
                if grown is None or any(map(gt, grown.need, most_free)):
                    break
                added.append(grown)
            budget.take(_GROW_STEPS * attempts)
            if len(found) + len(added) > limit:
                raise Exhausted
        found += added
    return found


def grow(before: Configuration, kind: Kind, card: Card) -> Configuration | None:
    """Return the configuration with one more container of this kind, which starts last.

    Returns None if one of two containers that would run at the same time takes the whole card.
    """
    container = kind.container
    if before.whole_runs or (container.whole and before.running.shares):
        return None
    at_once = Amount(*map(add, before.running, container.amount_on(card)))
    stays = container.stage is not Stage.INIT
    return Configuration(
        before.code + (1 << kind.shift),
        Amount(*map(max, before.need, at_once)),
        before.whole or container.whole,
        at_once if stays else before.running,
        container.whole and stays,
    )


def all_on_one_card(kinds: Sequence[Kind], card: Card) -> Configuration | None:
    """Return the configuration of all containers on one card, or None if two of them exclude each other."""
    configuration: Configuration | None = Configuration()
    for kind in kinds:
        for _ in kind.members:
            configuration = grow(configuration, kind, card) if configuration else None
    return configuration

"""Which containers of a pod can be on one card together.

Equal containers are one kind: only how many of them are on a card matters. A configuration is a number of each kind,
packed into an integer with a field per kind.
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

x = Amount()

_PERCENT = 100
"""Of what is held. Finer steps leave the search many more placements to tell apart."""

_GROW = 16
"""Steps to add one container to a configuration and to see whether it still fits."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Equal containers, which can stand for one another. `members`: their positions in the ask.

    units: the cards that they need in total. shift, mask: where a number of this kind stands in a packed integer;
    guard: the bit above it, which is 0 in configurations.
    """

    container: ContainerRequest
    members: tuple[int, ...]
    units: int
    shift: int
    mask: int
    guard: int

    def count(self, code: int) -> int:
        """How many of this kind are in a configuration."""
        return code >> self.shift & self.mask


class Configuration(NamedTuple):
    """Containers that are on one card. `code`: how many of each kind, packed. whole: the card must be idle.

    need: of the card at their busiest moment (`mgpu.model.gpu_requests.peak`).
    running: the same of those that keep running, so far; whole_runs: one of those takes the whole card.
    """

    code: int = 0
    need: Amount = x
    whole: bool = False
    running: Amount = x
    whole_runs: bool = False

    def fits(self, state: CardState, max_shares: int) -> bool:
        return (
            self.need.core <= state.core_free
            and self.need.memory <= state.memory_free
            and self.need.ratio <= state.ratio_free
            and (not max_shares or state.shares + self.need.shares <= max_shares)
            and (not self.whole or state.idle)
        )

    def held(self, largest: Amount) -> int:
        """Return how much of a card the pod holds: percent of core plus percent of memory, rounded up.

        Percent of the largest card, so that no size of card is preferred; the whole of any card is all of the largest.
        """
        if self.whole:
            return 2 * _PERCENT
        core, memory = self.need.core * largest.memory, self.need.memory * largest.core
        if self.need.ratio:
            memory = self.need.ratio * largest.memory * largest.core // WHOLE_RATIO
        return -(-_PERCENT * (core + memory) // (largest.core * largest.memory))


def kinds_of(request: GpuRequest) -> tuple[Kind, ...]:
    """The kinds of an ask, in start order: equal containers that start one after the other.

    The first kind has the highest field, so that packed integers compare as the numbers of the kinds do, in order.
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
    """Return the core and memory of the largest card, to measure what the pod holds (`Configuration.held`).

    None: the pod holds the same wherever it is placed, since it has no init container beside other containers. A card
    is held at the pod's busiest moment on it for as long as the pod exists, while a ResourceQuota and the kubelet count
    the busiest moment of the pod. With init containers on cards of their own a pod would hold more than is counted.
    """
    if len(request.containers) == 1 or all(c.stage is not Stage.INIT for c in request.containers):
        return None
    return Amount(max(s.card.core for s in cards), max(s.card.memory for s in cards))


def configurations(
    kinds: Sequence[Kind], states: Sequence[CardState], max_shares: int, most: int, budget: Budget
) -> list[Configuration]:
    """Every configuration that may fit one of `states`, cards of one size; the empty one first.

    Raises Exhausted where there are more than `most`, or where trying them takes more than the budget: many kinds of
    which few go together make few configurations and much work.
    """
    card = states[0].card
    shares = max_shares - min(s.shares for s in states) if max_shares else sum(len(k.members) for k in kinds)
    most_free = Amount(
        max(s.core_free for s in states),
        max(s.memory_free for s in states),
        shares,
        max(s.ratio_free for s in states),
    )
    idle = any(s.idle for s in states)
    found = [Configuration()]
    for kind in kinds:
        if kind.container.whole and not idle:
            continue
        more = []
        for one in found:
            tried = 0
            grown: Configuration | None = one
            for _ in kind.members:
                tried += 1
                grown = grown and grow(grown, kind, card)
                if grown is None or any(map(gt, grown.need, most_free)):
                    break
                more.append(grown)
            budget.take(_GROW * tried)
            if len(found) + len(more) > most:
                raise Exhausted
        found += more
    return found


def grow(before: Configuration, kind: Kind, card: Card) -> Configuration | None:
    """One more container of this kind, started last. None: it would run beside a container with the whole card."""
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

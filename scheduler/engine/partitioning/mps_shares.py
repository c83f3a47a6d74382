"""Into what one card is cut under MPS, given what of it is in use (docs/design/slices.md, "MPS"). Pure.

Slices of a card are numbered and may be of any size in GiB; together they have at most its memory.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as count_from
from math import prod
from operator import mul

from mgpu.model.cards import Card
from mgpu.model.slice_names import MAX_MPS_CLIENTS, gigabytes
from scheduler.engine.effort import Budget
from scheduler.engine.partitioning.geometry import Counts, Cut, Place, Vector, added, counts_of

_GIB = 1 << 30
_CUT = 100
"""Steps."""
_MOST_OPTIONS = 500
"""With more of them only the one with the largest slices is looked at: dozens of slices of many sizes."""


@dataclass(frozen=True, slots=True)
class MpsCard:
    """memory: whole GiB. used, free: slices as (number, name), ascending."""

    memory: int
    used: tuple[Place, ...]
    free: tuple[Place, ...]

    def has(self, name: str) -> int:
        """How many free ones of this size there are."""
        return sum(size == name for _, size in self.free)

    @property
    def left(self) -> int:
        """GiB that are not in use."""
        return self.memory - sum(gigabytes(name) for _, name in self.used)

    @property
    def whole(self) -> bool:
        """Whether cutting it takes a card from those that want all of one."""
        return not self.used and not self.free

    def most(self, name: str) -> int:
        """How many of this size could be free, if the card were cut for it alone."""
        return max(0, min(self.left // gigabytes(name), MAX_MPS_CLIENTS - len(self.used)))

    def options(self, asked: Counts, budget: Budget | None = None) -> tuple[Vector, ...]:
        """Return the most of what is asked that can be free at a time, none more than asked; less always can be."""
        if budget is not None:
            number = _count(self.left, asked) if self.complete(asked) else 1
            budget.take(10 + 2 * len(asked) * (1 + number))
        left, places = self.left, MAX_MPS_CLIENTS - len(self.used)
        if not self.complete(asked):
            return (_largest_first(left, places, asked),)
        found = _shares(left, places, tuple(map(_size, asked)), tuple(count for _, count in asked))
        return tuple(sorted(found, key=lambda vector: (-sum(vector), vector)))

    def complete(self, asked: Counts) -> bool:
        """Return whether `options` are all that there are. Otherwise they are one of them, for want of time."""
        return _count(self.left, asked) <= _MOST_OPTIONS

    @property
    def alike(self) -> Hashable:
        """Cards for which this is equal have equal options."""
        return self.left, len(self.used)

    def at_most(self, asked: Counts, _budget: Budget | None = None) -> Vector:
        """No more than so many of each, and so many GiB together, are in any of `options`."""
        return (*(min(count, self.most(name)) for name, count in asked), max(0, self.left))

    def kept(self, asked: Counts) -> Cut:
        """As it is, where what is asked is among its free slices."""
        return Cut(tuple(sorted(self.used + self.free)), room=self.room(asked))

    def cut(self, asked: Counts, wished: Counts = (), budget: Budget | None = None) -> Cut | None:
        """Cut anew so that all that is asked is free, and of what is wished for beside it as much as can be.

        None: it cannot be. Sizes are cut smallest first. A free slice that nobody asks for is given up where its place
        is needed, and one that is wished for where it is needed for what is asked.
        """
        if budget is not None:
            budget.take(_CUT + 10 * (len(asked) + len(wished)))
        return _cut(self, asked, wished)

    def emptied(self) -> "MpsCard":
        return MpsCard(self.memory, (), ())

    def why(self, name: str) -> str:
        """Why it cannot have one of these."""
        if not self.used:
            return f"{self.memory} GiB: no room for {name}"
        if len(self.used) >= MAX_MPS_CLIENTS:
            return f"{len(self.used)} slices in use, the most that MPS serves"
        return f"{self.memory - self.left} of {self.memory} GiB in use: no room for {name}"

    def room(self, asked: Counts) -> int:
        """Squared, so that of equal cards the fuller one is cut: what is left of the node lies together."""
        left = self.left - sum(gigabytes(name) * count for name, count in asked)
        return max(0, left) ** 2


def mps_card(card: Card, used: Iterable[Place], free: Iterable[Place]) -> MpsCard:
    return MpsCard(card.memory // _GIB, tuple(sorted(used)), tuple(sorted(free)))


def _count(memory: int, asked: Counts) -> int:
    """Return how many vectors `_shares` looks at, at most."""
    return prod(min(count, memory // gigabytes(name)) + 1 for name, count in asked[1:])


def _largest_first(memory: int, places: int, asked: Counts) -> Vector:
    most = dict.fromkeys((name for name, _ in asked), 0)
    for name, count in sorted(asked, key=_size, reverse=True):
        most[name] = max(0, min(count, memory // gigabytes(name), places))
        memory, places = memory - most[name] * gigabytes(name), places - most[name]
    return tuple(most.values())


def _shares(memory: int, places: int, sizes: Vector, counts: Vector) -> Iterator[Vector]:
    """Yield the vectors to which no slice can be added."""
    if not sizes:
        yield ()
        return
    most = max(0, min(counts[0], memory // sizes[0], places))
    for n in range(most + 1) if len(sizes) > 1 else (most,):
        for others in _shares(memory - n * sizes[0], places - n, sizes[1:], counts[1:]):
            left = memory - n * sizes[0] - sum(map(mul, sizes[1:], others))
            if n == most or left < sizes[0] or n + sum(others) == places:
                yield (n, *others)


@lru_cache(maxsize=10_000)
def _cut(card: MpsCard, asked: Counts, wished: Counts) -> Cut | None:
    memory = card.left - sum(gigabytes(name) * count for name, count in asked)
    places = MAX_MPS_CLIENTS - len(card.used) - sum(count for _, count in asked)
    if memory < 0 or places < 0:
        return None
    served = dict.fromkeys((name for name, _ in wished), 0)
    spare = {name: max(0, card.has(name) - dict(asked).get(name, 0)) for name in served}
    for have in (spare, dict(wished)):  # first what is free, so that it stays
        for name, count in sorted(wished, key=_size):
            more = min(count, have[name]) - served[name]
            more = max(0, min(more, memory // gigabytes(name), places))
            served[name] += more
            memory, places = memory - more * gigabytes(name), places - more
    needed = added(asked, counts_of(served.items()))
    stay, idle = _split(card.free, needed)
    stay += _left_of(idle, memory, places)
    numbers = {number for number, _ in card.used + stay}
    lowest = (number for number in count_from(0) if number not in numbers)
    made = [name for name, count in sorted(needed, key=_size) for _ in range(count - card.has(name))]
    slices = card.used + stay + tuple((number, name) for number, name in zip(lowest, made, strict=False))
    destroyed = len(card.free) - len(stay)
    touched = bool(made) or destroyed > 0
    return Cut(tuple(sorted(slices)), counts_of(served.items()), touched, destroyed, card.room(needed))


def _split(free: tuple[Place, ...], needed: Counts) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Those that serve what is needed, the lowest of each size, and the others."""
    serving = [s for name, count in needed for s in [s for s in free if s[1] == name][:count]]
    return tuple(serving), tuple(s for s in free if s not in serving)


def _left_of(free: tuple[Place, ...], memory: int, places: int) -> tuple[Place, ...]:
    """What can stay of these in so many GiB and places: as few as possible are given up, the largest of them first."""
    rest = sorted(free, key=lambda s: (gigabytes(s[1]), -s[0]))
    while (lacking := sum(gigabytes(name) for _, name in rest) - memory) > 0:
        rest.remove(next((s for s in rest if gigabytes(s[1]) >= lacking), rest[-1]))
    return tuple(rest[max(0, len(rest) - places) :])


def _size(row: tuple[str, int]) -> int:
    return gigabytes(row[0])

"""Chooses the MPS shares of one card, given those that are in use (docs/design/slices.md, "MPS").

`partition_plan` creates each `MpsCard`. `slice_allocation` asks it which shares it could offer and how it would be
partitioned. `geometry.MigCard` must have the same interface for MIG. The shares ("slices") of a card are numbered and
may have any size in GiB. Together they have at most the memory of the card, and there are at most MAX_MPS_CLIENTS of
them. So a request fits if and only if enough memory and enough slots for its slices are free, and no search is needed.
A slice in use must keep its number.
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
from scheduler.engine.partitioning.geometry import CardPartition, Counts, Place, Vector, add_counts, counts_of

_GIB = 1 << 30
_PARTITION_STEPS = 100
"""The steps to partition a card, in addition to 10 for each size in the request and in the extra requests."""
_MAX_OPTIONS = 500
"""The most options that `options` computes.

A request for dozens of slices of many sizes may have more. Then only the result of `_largest_first` is used.
"""


@dataclass(frozen=True, slots=True)
class MpsCard:
    """A card under MPS.

    Attributes:
        memory: The memory of the card, in whole GiB.
        used: The slices in use, in ascending order.
        free: The other slices, in ascending order.
    """

    memory: int
    used: tuple[Place, ...]
    free: tuple[Place, ...]

    def count_free(self, name: str) -> int:
        return sum(size == name for _, size in self.free)

    @property
    def available(self) -> int:
        """The memory that is not in use, in GiB."""
        return self.memory - sum(gigabytes(name) for _, name in self.used)

    @property
    def is_whole(self) -> bool:
        """Whether the card has no slices, so that pods that request a whole card could use it now."""
        return not self.used and not self.free

    def max_free(self, name: str) -> int:
        """Return how many slices of this size could be free if the card were partitioned only for this size."""
        return max(0, min(self.available // gigabytes(name), MAX_MPS_CLIENTS - len(self.used)))

    def options(self, requested: Counts, budget: Budget | None = None) -> tuple[Vector, ...]:
        """Return the largest vectors of the requested slices that can be free together, at most as many as requested.

        Every smaller vector is possible too.
        """
        complete = self.has_all_options(requested)
        if budget is not None:
            number = _max_vectors(self.available, requested) if complete else 1
            budget.take(10 + 2 * len(requested) * (1 + number))
        slots = MAX_MPS_CLIENTS - len(self.used)
        if not complete:
            return (_largest_first(self.available, slots, requested),)
        counts = tuple(count for _, count in requested)
        return _options(self.available, slots, tuple(map(_size, requested)), counts)

    def has_all_options(self, requested: Counts) -> bool:
        """Return whether `options` returns all options. Otherwise it returns one of them, to save time."""
        return _max_vectors(self.available, requested) <= _MAX_OPTIONS

    @property
    def options_key(self) -> Hashable:
        """A key that is equal only for cards with equal options."""
        return self.available, len(self.used)

    def upper_bound(self, requested: Counts, _budget: Budget | None = None) -> Vector:
        """Return the largest count of each slice in any option, followed by the free memory of the card in GiB."""
        return (*(min(count, self.max_free(name)) for name, count in requested), max(0, self.available))

    def unchanged(self, requested: Counts) -> CardPartition:
        """Return the card without changes. The requested slices must be among the free ones."""
        return CardPartition(tuple(sorted(self.used + self.free)), creatable=self.creatable_beside(requested))

    def partition(self, requested: Counts, extra: Counts = (), budget: Budget | None = None) -> CardPartition | None:
        """Partition the card so that all requested slices are free, and as many of the extra ones as possible.

        Among the extra slices, those that are free already are served first, then the smallest. A free slice that
        nothing requests is destroyed if its memory or slot is needed. A free slice that only an extra request needs is
        destroyed if a requested slice needs its memory or slot. Returns None if the requested slices do not fit.
        """
        if budget is not None:
            budget.take(_PARTITION_STEPS + 10 * (len(requested) + len(extra)))
        return _partition(self, requested, extra)

    def emptied(self) -> "MpsCard":
        return MpsCard(self.memory, (), ())

    def no_room_reason(self, name: str) -> str:
        """Return why the card cannot have a slice of this size."""
        if not self.used:
            return f"{self.memory} GiB in total: no room for {name}"
        if len(self.used) >= MAX_MPS_CLIENTS:
            return f"{len(self.used)} slices in use, the most that MPS serves"
        return f"{self.memory - self.available} of {self.memory} GiB in use: no room for {name}"

    def creatable_beside(self, requested: Counts) -> int:
        """Return the square of the memory in GiB that is left beside the slices in use and the requested ones.

        Because of the square, a fuller card is preferred to an emptier one, and the free memory of the node stays
        together.
        """
        left = self.available - sum(gigabytes(name) * count for name, count in requested)
        return max(0, left) ** 2


def mps_card(card: Card, used: Iterable[Place], free: Iterable[Place]) -> MpsCard:
    return MpsCard(card.memory // _GIB, tuple(sorted(used)), tuple(sorted(free)))


def _max_vectors(memory: int, requested: Counts) -> int:
    """Return an upper bound on the number of vectors that `_full_vectors` yields."""
    return prod(min(count, memory // gigabytes(name)) + 1 for name, count in requested[1:])


def _largest_first(memory: int, slots: int, requested: Counts) -> Vector:
    """Return the option with as many of the largest slices as possible, then of the next size, and so on."""
    numbers = dict.fromkeys((name for name, _ in requested), 0)
    for name, count in sorted(requested, key=_size, reverse=True):
        numbers[name] = max(0, min(count, memory // gigabytes(name), slots))
        memory -= numbers[name] * gigabytes(name)
        slots -= numbers[name]
    return tuple(numbers.values())


@lru_cache(maxsize=10_000)
def _options(memory: int, slots: int, sizes: Vector, counts: Vector) -> tuple[Vector, ...]:
    """Return the vectors of `_full_vectors`, those with the most slices first. Many cards of a cluster are alike."""
    return tuple(sorted(_full_vectors(memory, slots, sizes, counts), key=lambda vector: (-sum(vector), vector)))


def _full_vectors(memory: int, slots: int, sizes: Vector, counts: Vector) -> Iterator[Vector]:
    """Yield the vectors to which no slice can be added."""
    if not sizes:
        yield ()
        return
    most = max(0, min(counts[0], memory // sizes[0], slots))
    for n in range(most + 1) if len(sizes) > 1 else (most,):
        for others in _full_vectors(memory - n * sizes[0], slots - n, sizes[1:], counts[1:]):
            left = memory - n * sizes[0] - sum(map(mul, sizes[1:], others))
            if n == most or left < sizes[0] or n + sum(others) == slots:
                yield (n, *others)


@lru_cache(maxsize=10_000)
def _partition(card: MpsCard, requested: Counts, extra: Counts) -> CardPartition | None:
    memory = card.available - sum(gigabytes(name) * count for name, count in requested)
    slots = MAX_MPS_CLIENTS - len(card.used) - sum(count for _, count in requested)
    if memory < 0 or slots < 0:
        return None
    served = dict.fromkeys((name for name, _ in extra), 0)
    spare = {name: max(0, card.count_free(name) - dict(requested).get(name, 0)) for name in served}
    for limit in (spare, dict(extra)):  # slices that are free already are served first, so that they stay
        for name, count in sorted(extra, key=_size):
            more = max(0, min(min(count, limit[name]) - served[name], memory // gigabytes(name), slots))
            served[name] += more
            memory -= more * gigabytes(name)
            slots -= more
    needed = add_counts(requested, counts_of(served.items()))
    serving = tuple(s for name, count in needed for s in [s for s in card.free if s[1] == name][:count])
    unneeded = tuple(s for s in card.free if s not in serving)
    kept = serving + _remaining(unneeded, memory, slots)
    numbers = {number for number, _ in card.used + kept}
    unused_numbers = (number for number in count_from(0) if number not in numbers)
    created = [name for name, count in sorted(needed, key=_size) for _ in range(count - card.count_free(name))]
    slices = card.used + kept + tuple(zip(unused_numbers, created, strict=False))
    destroyed = len(card.free) - len(kept)
    touched = bool(created) or destroyed > 0
    creatable = card.creatable_beside(needed)
    return CardPartition(tuple(sorted(slices)), counts_of(served.items()), touched, destroyed, creatable)


def _remaining(free: tuple[Place, ...], memory: int, slots: int) -> tuple[Place, ...]:
    """Return which of these slices stay: as many as this memory in GiB and this number of slots allow."""
    remaining = sorted(free, key=lambda s: (gigabytes(s[1]), -s[0]))
    while (lacking := sum(gigabytes(name) for _, name in remaining) - memory) > 0:
        remaining.remove(next((s for s in remaining if gigabytes(s[1]) >= lacking), remaining[-1]))
    return tuple(remaining[max(0, len(remaining) - slots) :])


def _size(row: tuple[str, int]) -> int:
    return gigabytes(row[0])

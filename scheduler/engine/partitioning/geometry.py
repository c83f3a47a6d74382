"""Chooses the MIG instances of one card, given those that are in use.

`partition_plan` creates each `MigCard`. `slice_allocation` asks it which slices it could offer and how it would be
partitioned. `mps_shares.MpsCard` must have the same interface for MPS.

The choice is exact, because it compares all geometries (docs/design/slices.md, "Choosing a geometry"). If the settings
list geometries for the card, only these are compared. Otherwise only geometries to which no instance can be added are
compared, because a smaller one could not serve more requests. There are few: at most 239 for a layout.

An instance is a profile and a start, which is the number of its first memory slice. A set of instances is an integer
with a bit for each instance that the card could have, so a geometry is tested with a few operations on integers. Two
things must hold: an instance in use is part of every result, and results depend only on the arguments, because they are
cached.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from operator import ge, mul

from mgpu.model.cards import Card
from mgpu.model.mig import LAYOUTS, Instance, Layout, Profile, layout_of
from mgpu.model.pod_constraints import matches_model
from scheduler.engine.effort import Budget

_PARTITION_STEPS = 6_000
"""The steps to choose the best geometry of a card. All geometries are compared for that."""

Geometries = Mapping[str, Sequence[Mapping[str, int]]]
"""By model, the only geometries that cards of matching models may have (`matches_model`).

A geometry is the number of instances by profile.
"""
Counts = tuple[tuple[str, int], ...]
"""Names of slices with their counts, which are above 0, sorted by name."""
Place = tuple[int, str]
"""The start and the profile of a MIG instance, or the number and the name of an MPS slice."""
Vector = tuple[int, ...]
"""A count for each name of a Counts, in the same order."""


def counts_of(rows: Iterable[tuple[str, int]]) -> Counts:
    """Return the counts above 0, sorted by name."""
    return tuple(sorted((name, count) for name, count in rows if count > 0))


def largest_vectors(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """Return the vectors that no other vector equals or exceeds in every element, those with the largest sum first."""
    largest: list[Vector] = []
    for vector in sorted(vectors, key=lambda vector: (-sum(vector), vector)):
        if not any(all(map(ge, other, vector)) for other in largest):
            largest.append(vector)
    return tuple(largest)


def gigabytes_of(names: Iterable[str], vector: Vector) -> int:
    """Return the total memory in GB of this many slices of each name."""
    return sum(map(mul, map(_gigabytes, names), vector))


@lru_cache(maxsize=1000)
def _gigabytes(name: str) -> int:
    return int(re.findall(r"(\d+)gb", name)[0])


def add_counts(*counts: Counts) -> Counts:
    total = Counter[str]()
    for rows in counts:
        total.update(dict(rows))
    return counts_of(total.items())


@dataclass(frozen=True, slots=True)
class CardPartition:
    """The slices of a card under a plan.

    Attributes:
        slices: The slices of the card in ascending order.
        served: How many slices of the extra requests are free in addition to the requested ones.
        touched: Whether the plan changes the card.
        destroyed: How many free slices the plan destroys.
        creatable: A measure of what could still be created beside the slices in use, the requested ones and the
            `served` ones, if the other free slices were destroyed. Only values of cards of one node can be compared.
    """

    slices: tuple[Place, ...]
    served: Counts = ()
    touched: bool = False
    destroyed: int = 0
    creatable: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GeometryTable:
    """The geometries of the cards of a model, as sets of bits. Bit i stands for instances[i].

    Attributes:
        instances: The instances that such a card could have, one for each bit.
        clashes: For each instance, the set of instances that cannot exist beside it.
        profile_bits: By profile, the set of its instances.
        bit: By place, the set that contains only the instance at this place.
        geometries: The geometries to choose from, the preferred ones first.
        is_configured: Whether `geometries` are those of the settings.
    """

    layout: Layout
    instances: tuple[Instance, ...]
    clashes: tuple[int, ...]
    profile_bits: Mapping[str, int]
    bit: Mapping[Place, int]
    geometries: tuple[int, ...] = ()
    is_configured: bool = False

    def blocked(self, existing: int) -> int:
        """Return these instances, and those that cannot be created beside them."""
        blocked = existing
        for i in bits_of(existing):
            blocked |= self.clashes[i]
        return blocked

    def creatable(self, existing: int) -> int:
        """Return how many other instances could be created beside these, each by itself."""
        return len(self.instances) - self.blocked(existing).bit_count()

    def places(self, existing: int) -> tuple[Instance, ...]:
        return tuple(sorted(self.instances[i] for i in bits_of(existing)))


def bits_of(instances: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, in ascending order."""
    while instances:
        lowest = instances & -instances
        yield lowest.bit_length() - 1
        instances ^= lowest


def table_of(card: Card, geometries: Geometries) -> GeometryTable | None:
    """Return the table of the card's model, or None if such a card cannot be partitioned.

    Args:
        geometries: The geometries of the settings. The first entry that matches the model applies.
    """
    layout = layout_of(card.model, card.memory)
    if layout is None:
        return None
    allowed = next((allowed for model, allowed in geometries.items() if matches_model(model, card.model)), None)
    return _table(layout.name, None if allowed is None else tuple(counts_of(geometry.items()) for geometry in allowed))


@lru_cache(maxsize=100)
def _table(layout_name: str, allowed: tuple[Counts, ...] | None) -> GeometryTable:
    """Return the table of a layout with the allowed geometries, in their order.

    If `allowed` is None, all geometries to which no instance can be added are allowed. Those with the most instances of
    the layout's first profile come first; the other profiles decide between equal ones, in their order.
    """
    layout = next(layout for layout in LAYOUTS if layout.name == layout_name)
    owners = [(profile, Instance(start, profile.name)) for profile in layout.profiles for start in profile.starts]
    clashes = tuple(
        sum(1 << j for j, (q, b) in enumerate(owners) if i != j and _clash(p, a, q, b))
        for i, (p, a) in enumerate(owners)
    )
    instances = tuple(instance for _, instance in owners)
    profile_bits = {p.name: sum(1 << i for i, (q, _) in enumerate(owners) if q is p) for p in layout.profiles}
    table = GeometryTable(layout, instances, clashes, profile_bits, {(*a,): 1 << i for i, a in enumerate(instances)})
    rank: dict[int, Vector] = {}
    order = {geometry: i for i, geometry in reversed([*enumerate(allowed or ())])}
    for geometry in _all_sets(table, 0, 0):
        counts = {p: (geometry & bits).bit_count() for p, bits in profile_bits.items()}
        if allowed is None and table.creatable(geometry) == 0:
            rank[geometry] = tuple(-count for count in counts.values())
        elif counts_of(counts.items()) in order:
            rank[geometry] = (order[counts_of(counts.items())],)
    ranked = tuple(sorted(rank, key=lambda geometry: (rank[geometry], table.places(geometry))))
    return replace(table, geometries=ranked, is_configured=allowed is not None)


def _clash(p: Profile, a: Instance, q: Profile, b: Instance) -> bool:
    return bool(p.mask(a.start) & q.mask(b.start)) or (p.media and q.media)


def _all_sets(table: GeometryTable, instances: int, first: int) -> Iterator[int]:
    """Yield every set of instances that adds to these instances any number of others from bit `first` on.

    All instances of a set can exist together.
    """
    yield instances
    for i in bits_of(~table.blocked(instances) & (1 << len(table.instances)) - (1 << first)):
        yield from _all_sets(table, instances | 1 << i, i + 1)


def mig_card(table: GeometryTable, used: Iterable[Place], free: Iterable[Place]) -> "MigCard | str":
    """Return the card with these instances, or the reason why it cannot be partitioned.

    Args:
        used: The instances that are in use. Some may not exist, for example after a reboot.
        free: The other instances. An instance that cannot exist beside those in use, or beside an earlier one, is
            ignored.
    """
    in_use = blocked = 0
    for place in used:
        bit = table.bit.get(place, 0)
        if not bit or blocked & bit:
            return f"a {place[1]} is in use at {place[0]}, where it cannot exist"
        in_use |= bit
        blocked |= table.blocked(bit)
    taken, idle = blocked, 0
    for place in free:
        bit = table.bit.get(place, 0) & ~taken
        idle |= bit
        taken |= table.blocked(bit)
    return MigCard(table, in_use, idle, in_use if table.is_configured else blocked)


@dataclass(frozen=True, slots=True)
class MigCard:
    """A card in MIG mode.

    Attributes:
        used: The set of instances in use.
        free: The set of other instances. All instances of the card can exist together.
        options_base: The set on which the options of the card depend: with configured geometries the instances in use,
            otherwise these and the instances that they block. The second set is the same for more cards, so more cards
            share cached options.
    """

    table: GeometryTable
    used: int
    free: int
    options_base: int

    @property
    def is_whole(self) -> bool:
        """Whether pods that request a whole card could use the card now. A card in MIG mode is never whole."""
        return False

    def count_free(self, name: str) -> int:
        return (self.free & self.table.profile_bits.get(name, 0)).bit_count()

    def max_free(self, name: str) -> int:
        """Return how many instances of this profile could be free if the card were partitioned only for it."""
        return max(self.count_free(name), self._options((name,), None)[0][0])

    def options(self, requested: Counts, budget: Budget | None = None) -> tuple[Vector, ...]:
        """Return the largest vectors of the requested slices that can be free together, at most as many as requested.

        Every smaller vector is possible too.
        """
        names, counts = tuple(name for name, _ in requested), tuple(count for _, count in requested)
        options = {tuple(map(min, counts, option)) for option in self._options(names, budget)}
        # The card may have more free instances now than any configured geometry that contains the instances in use.
        if self.table.is_configured:
            options.add(tuple(map(min, counts, map(self.count_free, names))))
        return largest_vectors(options)

    def _options(self, names: tuple[str, ...], budget: Budget | None) -> tuple[Vector, ...]:
        cached = _options_cache(self.table, self.options_base, names)
        if not cached:
            if budget is not None:
                budget.take(len(self.table.geometries) * (2 + len(names)))
            cached.append(_find_options(self.table, self.options_base, names))
        if budget is not None:
            budget.take((2 * len(names) + len(cached[0])) * len(cached[0]))
        return cached[0]

    def has_all_options(self, _requested: Counts) -> bool:
        """Return whether `options` returns all options. For MIG it does, because there are few."""
        return True

    @property
    def options_key(self) -> Hashable:
        """A key that is equal only for cards with equal options."""
        return id(self.table), self.options_base, self.free if self.table.is_configured else 0

    def upper_bound(self, requested: Counts, budget: Budget | None = None) -> Vector:
        """Return the largest count of each slice in any option, followed by the most GB of an option."""
        options, names = self.options(requested, budget), [name for name, _ in requested]
        return (*map(max, zip(*options, strict=True)), max(gigabytes_of(names, option) for option in options))

    def unchanged(self, requested: Counts) -> CardPartition:
        """Return the card without changes. The requested slices must be among the free ones."""
        existing = self.used | self.free
        return CardPartition(self.table.places(existing), creatable=_creatable_beside(self, existing, requested))

    def partition(self, requested: Counts, extra: Counts = (), budget: Budget | None = None) -> CardPartition | None:
        """Partition the card so that all requested slices are free, and as many of the extra ones as possible.

        The best geometry has the most extra slices, then the most slices, then destroys the fewest free slices, then
        lets the most instances be created beside the requested slices, and then is the first one in the order of the
        table. Returns None if no geometry has all requested slices.
        """
        cached = _partition_cache(self, requested, extra)
        if not cached:
            if budget is not None:
                budget.take(_PARTITION_STEPS)
            cached.append(_find_partition(self, requested, extra))
        return cached[0]

    def emptied(self) -> "MigCard":
        return MigCard(self.table, 0, 0, 0)

    def no_room_reason(self, name: str) -> str:
        """Return why the card cannot have an instance of this profile."""
        if name not in self.table.profile_bits:
            return f"{self.table.layout.name} has no profile {name}"
        starts: dict[str, list[int]] = {}
        for start, profile in self.table.places(self.used):
            starts.setdefault(profile, []).append(start)
        if not starts:
            return f"no geometry in KnowGeometries has {name}"
        places = ", ".join(f"{profile} in use at {', '.join(map(str, at))}" for profile, at in sorted(starts.items()))
        return f"{places}: no room for {name}"


# The caches contain lists that `_options` and `partition` fill, so that the steps of a computation are charged once.


@lru_cache(maxsize=50_000)
def _options_cache(_table: GeometryTable, _options_base: int, _names: tuple[str, ...]) -> list[tuple[Vector, ...]]:
    return []


def _find_options(table: GeometryTable, options_base: int, names: tuple[str, ...]) -> tuple[Vector, ...]:
    """Return the largest vectors of these slices that can be free together, however many slices are requested."""
    bits_of_names = [table.profile_bits.get(name, 0) for name in names]
    usable = sum(bits_of_names) & ~options_base
    found = {
        geometry & usable
        for geometry in table.geometries
        if not table.is_configured or geometry & options_base == options_base
    }
    vectors = {tuple((geometry & bits).bit_count() for bits in bits_of_names) for geometry in found}
    return largest_vectors(vectors) or ((0,) * len(names),)


@lru_cache(maxsize=50_000)
def _partition_cache(_card: MigCard, _requested: Counts, _extra: Counts) -> list[CardPartition | None]:
    return []


def _find_partition(card: MigCard, requested: Counts, extra: Counts) -> CardPartition | None:
    table, best_rank, best = card.table, (0, 0, 0), list[tuple[int, Counts]]()
    for geometry in table.geometries:
        if geometry & card.used != card.used:
            continue
        spare = {name: (geometry & bits & ~card.used).bit_count() for name, bits in table.profile_bits.items()}
        for name, count in requested:
            spare[name] = spare.get(name, 0) - count
        if min(spare.values()) < 0:
            continue
        served = counts_of((name, min(count, spare.get(name, 0))) for name, count in extra)
        destroyed = (card.free & ~geometry).bit_count()
        rank = (-sum(count for _, count in served), -geometry.bit_count(), destroyed)
        if not best or rank < best_rank:
            best_rank, best = rank, []
        if rank == best_rank:
            best.append((geometry, served))
    if not best:
        return None
    creatable = [_creatable_beside(card, geometry, add_counts(requested, served)) for geometry, served in best]
    geometry, served = best[creatable.index(max(creatable))]
    touched = geometry != card.used | card.free
    return CardPartition(table.places(geometry), served, touched, best_rank[2], max(creatable))


def _creatable_beside(card: MigCard, geometry: int, requested: Counts) -> int:
    """Return how many other instances could be created beside those in use and the requested ones, each by itself.

    The pod gets those free instances of the geometry with which this number is highest. The other free instances do not
    matter, because they can be destroyed.
    """
    table, free = card.table, geometry & ~card.used
    choices = (combinations(bits_of(free & table.profile_bits[name]), count) for name, count in requested)
    taken = (sum(1 << i for chosen in choice for i in chosen) for choice in product(*choices))
    return max(table.creatable(card.used | bits) for bits in taken)

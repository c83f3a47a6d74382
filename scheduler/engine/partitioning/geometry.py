"""Into what one MIG card is cut, given what of it is in use (docs/design/slices.md, "Choosing a geometry"). Pure.

There are few ways to cut a card: the layout of eight slices has 239 into which nothing more fits. So all are looked at,
as bits: one bit for each instance that the card could have, which is a profile and a start.
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

_CUT_STEPS = 6_000
"""Of the choice of one way to cut a card: all ways are compared."""

Geometries = Mapping[str, Sequence[Mapping[str, int]]]
"""Model, as `matches` reads it → the only ways to cut its cards, each of them complete: profile → how many."""
Counts = tuple[tuple[str, int], ...]
"""Slice → how many, above 0, by name."""
Place = tuple[int, str]
"""As an Instance: start and profile, or number and name of an MPS slice."""
Vector = tuple[int, ...]
"""How many of each slice of a Counts."""


def counts_of(rows: Iterable[tuple[str, int]]) -> Counts:
    return tuple(sorted((name, count) for name, count in rows if count > 0))


def most_of(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """Those than which no other is more or the same in every respect, the largest first."""
    found: list[Vector] = []
    for vector in sorted(vectors, key=lambda vector: (-sum(vector), vector)):
        if not any(all(map(ge, more, vector)) for more in found):
            found.append(vector)
    return tuple(found)


def memory_of(names: Iterable[str], vector: Vector) -> int:
    """GB, as the names of the slices say."""
    return sum(map(mul, map(_gigabytes, names), vector))


@lru_cache(maxsize=1000)
def _gigabytes(name: str) -> int:
    return int(re.findall(r"(\d+)gb", name)[0])


def added(*counts: Counts) -> Counts:
    total = Counter[str]()
    for rows in counts:
        total.update(dict(rows))
    return counts_of(total.items())


@dataclass(frozen=True, slots=True)
class Cut:
    """What a card is cut into, for an ask. slices: all of them, ascending.

    served: of what was wished for beside the ask, how many of each are free. touched: whether anything changes.
    destroyed: how many slices were free and are not any more. room: how much can be made beside what is in use and
    what is asked, where other free slices are given up; comparable between cards of one node.
    """

    slices: tuple[Place, ...]
    served: Counts = ()
    touched: bool = False
    destroyed: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GeometryTable:
    """All that the cards of a model can be cut into. Bit i stands for instances[i].

    clashes: by bit, what cannot be made beside it. of: by profile, its bits. ways: the best first.
    known: whether the ways are those that the settings name, and not all of them.
    """

    layout: Layout
    instances: tuple[Instance, ...]
    clashes: tuple[int, ...]
    of: Mapping[str, int]
    bit: Mapping[Place, int]
    ways: tuple[int, ...] = ()
    known: bool = False

    def blocked(self, made: int) -> int:
        """What cannot be made beside these, and they themselves."""
        found = made
        for i in bits_of(made):
            found |= self.clashes[i]
        return found

    def creatable(self, made: int) -> int:
        """How many (profile, start) pairs can still be made beside these."""
        return len(self.instances) - self.blocked(made).bit_count()

    def listed(self, made: int) -> tuple[Instance, ...]:
        return tuple(sorted(self.instances[i] for i in bits_of(made)))


def bits_of(made: int) -> Iterator[int]:
    while made:
        low = made & -made
        yield low.bit_length() - 1
        made ^= low


def table_of(card: Card, geometries: Geometries) -> GeometryTable | None:
    """None: such a card cannot be cut. Of `geometries` the first that names its model holds."""
    layout = layout_of(card.model, card.memory)
    if layout is None:
        return None
    allowed = next((allowed for model, allowed in geometries.items() if matches_model(model, card.model)), None)
    return _table(layout.name, None if allowed is None else tuple(counts_of(geometry.items()) for geometry in allowed))


@lru_cache(maxsize=100)
def _table(name: str, allowed: tuple[Counts, ...] | None) -> GeometryTable:
    """name: of the layout. allowed: complete geometries, the best first. None: all, the more of the first profiles."""
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    owners = [(profile, Instance(start, profile.name)) for profile in layout.profiles for start in profile.starts]
    clashes = tuple(
        sum(1 << j for j, (q, b) in enumerate(owners) if i != j and _clash(p, a, q, b))
        for i, (p, a) in enumerate(owners)
    )
    instances = tuple(instance for _, instance in owners)
    of = {p.name: sum(1 << i for i, (q, _) in enumerate(owners) if q is p) for p in layout.profiles}
    bare = GeometryTable(layout, instances, clashes, of, {(*a,): 1 << i for i, a in enumerate(instances)})
    if allowed is None:
        rank = {made: tuple(-(made & b).bit_count() for b in of.values()) for made in _sets(bare, 0, 0)}
        rank = {made: key for made, key in rank.items() if bare.creatable(made) == 0}
    else:
        order = {geometry: (i,) for i, geometry in reversed([*enumerate(allowed)])}
        contents = ((made, counts_of((p, (made & b).bit_count()) for p, b in of.items())) for made in _sets(bare, 0, 0))
        rank = {made: order[content] for made, content in contents if content in order}
    ways = tuple(sorted(rank, key=lambda made: (rank[made], bare.listed(made))))
    return replace(bare, ways=ways, known=allowed is not None)


def _clash(p: Profile, a: Instance, q: Profile, b: Instance) -> bool:
    return bool(p.mask(a.start) & q.mask(b.start)) or (p.media and q.media)


def _sets(table: GeometryTable, made: int, first: int) -> Iterator[int]:
    """`made`, and with it every set of instances from bit `first` on that can lie beside it and one another."""
    yield made
    for i in bits_of(~table.blocked(made) & (1 << len(table.instances)) - (1 << first)):
        yield from _sets(table, made | 1 << i, i + 1)


def mig_card(table: GeometryTable, used: Iterable[Place], free: Iterable[Place]) -> "MigCard | str":
    """The card with these instances, or why it cannot be cut anew. used: as records have it, made or not."""
    in_use = blocked = 0
    for place in used:
        bit = table.bit.get(place, 0)
        if not bit or blocked & bit:
            return f"{place[1]} in use at {place[0]}, where it cannot be"
        in_use |= bit
        blocked |= table.blocked(bit)
    beside, idle = blocked, 0
    for place in free:
        bit = table.bit.get(place, 0) & ~beside
        idle |= bit
        beside |= table.blocked(bit)
    return MigCard(table, in_use, idle, in_use if table.known else blocked)


@dataclass(frozen=True, slots=True)
class MigCard:
    """A card in MIG mode. used, free: bits of its table, which can lie beside one another.

    around: of what is in use, that which decides what can be made beside it.
    """

    table: GeometryTable
    used: int
    free: int
    around: int

    @property
    def whole(self) -> bool:
        """Whether cutting it takes a card from those that want all of one; who is in MIG mode is never that."""
        return False

    def has(self, name: str) -> int:
        """How many free ones of this profile there are."""
        return (self.free & self.table.of.get(name, 0)).bit_count()

    def most(self, name: str) -> int:
        """How many of this profile could be free, if the card were cut for it alone."""
        return max(self.has(name), self._options((name,), None)[0][0])

    def options(self, asked: Counts, budget: Budget | None = None) -> tuple[Vector, ...]:
        """Return the most of what is asked that can be free at a time, none more than asked; less always can be."""
        names, counts = tuple(name for name, _ in asked), tuple(count for _, count in asked)
        found = {tuple(map(min, counts, option)) for option in self._options(names, budget)}
        if self.table.known:  # its free slices can be more than any configured geometry has beside what is in use
            found.add(tuple(map(min, counts, map(self.has, names))))
        return most_of(found)

    def _options(self, names: tuple[str, ...], budget: Budget | None) -> tuple[Vector, ...]:
        known = _known_options(self.table, self.around, names)
        if not known:
            if budget is not None:
                budget.take(len(self.table.ways) * (2 + len(names)))
            known.append(_options(self.table, self.around, names))
        if budget is not None:
            budget.take((2 * len(names) + len(known[0])) * len(known[0]))
        return known[0]

    def complete(self, _asked: Counts) -> bool:
        """Return whether `options` are all that there are: always, there are few."""
        return True

    @property
    def alike(self) -> Hashable:
        """Cards for which this is equal have equal options."""
        return id(self.table), self.around, self.free if self.table.known else 0

    def at_most(self, asked: Counts, budget: Budget | None = None) -> Vector:
        """No more than so many of each, and so many GB together, are in any of `options`."""
        options, names = self.options(asked, budget), [name for name, _ in asked]
        return (*map(max, zip(*options, strict=True)), max(memory_of(names, option) for option in options))

    def kept(self, asked: Counts) -> Cut:
        """As it is, where what is asked is among its free slices."""
        made = self.used | self.free
        return Cut(self.table.listed(made), room=_room(self, made, asked))

    def cut(self, asked: Counts, wished: Counts = (), budget: Budget | None = None) -> Cut | None:
        """Cut anew so that all that is asked is free, and of what is wished for beside it as much as can be.

        None: it cannot be. Of all ways, in this order: most that is wished for; most slices; fewest destroyed that were
        free; what is asked leaves the most room; as configured, or with most of the layout's first profiles.
        """
        known = _known_best(self, asked, wished)
        if not known:
            if budget is not None:
                budget.take(_CUT_STEPS)
            known.append(_best(self, asked, wished))
        return known[0]

    def emptied(self) -> "MigCard":
        return MigCard(self.table, 0, 0, 0)

    def why(self, name: str) -> str:
        """Why it cannot have one of these."""
        if name not in self.table.of:
            return f"{self.table.layout.name} has no profile {name}"
        used: dict[str, list[int]] = {}
        for start, profile in self.table.listed(self.used):
            used.setdefault(profile, []).append(start)
        if not used:
            return f"no geometry in KnowGeometries has {name}"
        places = ", ".join(f"{profile} in use at {', '.join(map(str, at))}" for profile, at in sorted(used.items()))
        return f"{places}: no room for {name}"


@lru_cache(maxsize=50_000)
def _known_options(_table: GeometryTable, _around: int, _names: tuple[str, ...]) -> list[tuple[Vector, ...]]:
    """Return where what `_options` finds is kept. Where all is allowed, it depends only on the memory slices in use."""
    return []


def _options(table: GeometryTable, around: int, names: tuple[str, ...]) -> tuple[Vector, ...]:
    """As MigCard.options of any number."""
    of = [table.of.get(name, 0) for name in names]
    open_ = sum(of) & ~around
    ways = {made & open_ for made in table.ways if not table.known or made & around == around}
    return most_of({tuple((made & bits).bit_count() for bits in of) for made in ways}) or ((0,) * len(names),)


@lru_cache(maxsize=50_000)
def _known_best(_card: MigCard, _asked: Counts, _wished: Counts) -> list[Cut | None]:
    """Return where what `_best` finds is kept, so that only what is worked out is charged."""
    return []


def _best(card: MigCard, asked: Counts, wished: Counts) -> Cut | None:
    table, best, equal = card.table, (0, 0, 0), list[tuple[int, Counts]]()
    for made in table.ways:
        if made & card.used != card.used:
            continue
        over = {name: (made & of & ~card.used).bit_count() for name, of in table.of.items()}
        for name, count in asked:
            over[name] = over.get(name, 0) - count
        if min(over.values()) < 0:
            continue
        served = counts_of((name, min(count, over.get(name, 0))) for name, count in wished)
        destroyed = (card.free & ~made).bit_count()
        rank = (-sum(count for _, count in served), -made.bit_count(), destroyed)
        if not equal or rank < best:
            best, equal = rank, []
        if rank == best:
            equal.append((made, served))
    if not equal:
        return None
    rooms = [_room(card, made, added(asked, served)) for made, served in equal]
    made, served = equal[rooms.index(max(rooms))]
    return Cut(table.listed(made), served, made != card.used | card.free, best[2], max(rooms))


def _room(card: MigCard, made: int, asked: Counts) -> int:
    """How many (profile, start) pairs can be made beside what is in use and those of `made` that serve what is asked.

    Those serve it that leave the most. Other free slices are in nobody's way, since they can be given up.
    """
    table, free = card.table, made & ~card.used
    choices = (combinations(bits_of(free & table.of[name]), count) for name, count in asked)
    taken = (sum(1 << i for chosen in choice for i in chosen) for choice in product(*choices))
    return max(table.creatable(card.used | bits) for bits in taken)

"""All that a card can be cut into, by trying, and what the rules say of each: to compare the planner with."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from mgpu.model.mig import Instance, Layout, invalid_reason, possible_instances

Instances = frozenset[Instance]


class Best(NamedTuple):
    """What the best cut of a card reaches: requests served beside the ask, slices, destroyed ones, what can be made."""

    served: int
    slices: int
    destroyed: int
    room: int


@lru_cache(maxsize=10)
def all_cuts(layout: Layout) -> tuple[Instances, ...]:
    """One instance after the other, as long as the rules have nothing against it."""
    pairs = [Instance(start, profile.name) for profile in layout.profiles for start in profile.starts]
    found, fresh = {frozenset[Instance]()}, {frozenset[Instance]()}
    while fresh:
        fresh = {
            cut | {pair}
            for cut in fresh
            for pair in pairs
            if pair not in cut and not invalid_reason(layout, [*cut, pair])
        }
        found |= fresh
    return tuple(sorted(found, key=sorted))


def free_in(cut: Iterable[Instance], used: Instances) -> Counter[str]:
    return Counter(i.profile for i in cut if i not in used)


def allowed_cuts(
    layout: Layout, used: Instances, asked: Mapping[str, int], geometries: Iterable[Mapping[str, int]] | None
) -> list[Instances]:
    """Those that leave the used ones where they are and have all that is asked free."""
    fitting = [cut for cut in all_cuts(layout) if used <= cut and free_in(cut, used) >= Counter(asked)]
    return fitting if geometries is None else [c for c in fitting if Counter(i.profile for i in c) in list(geometries)]


def best_of(
    layout: Layout,
    cuts: Iterable[Instances],
    used: Instances,
    free: Instances,
    asked: Counter[str],
    wished: Counter[str],
) -> Best:
    def rank(cut: Instances) -> tuple[int, int, int]:
        return -((free_in(cut, used) - asked) & wished).total(), -len(cut), len(free - cut)

    first = min(map(rank, cuts))
    equal = [cut for cut in cuts if rank(cut) == first]
    rooms = (
        len(possible_instances(layout, used.union(serving)))
        for cut in equal
        for serving in _serving(sorted(cut - used), asked + ((free_in(cut, used) - asked) & wished))
    )
    return Best(-first[0], -first[1], first[2], max(rooms))


def _serving(free: list[Instance], counts: Counter[str]) -> Iterable[tuple[Instance, ...]]:
    return (some for some in combinations(free, counts.total()) if Counter(i.profile for i in some) == counts)

"""Describes into which GPU instances NVIDIA's MIG can partition a card, and where each instance may start.

A card's memory is divided into a row of memory slices. An instance takes as many consecutive memory slices as its
profile has, and may start only at certain positions. Instances must not overlap, each profile has a maximum number of
instances, and only one instance can have media engines (`+me`) (docs/design/slices.md, "Choosing a geometry"). The
tables for A30, A100 and H100 are the output of `nvidia-smi mig -lgipp`. The starts for H200 and B200 are inferred from
those for the H100. Mainly the scheduler's partition planner and the agents use this module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_GIB = 1 << 30


class Instance(NamedTuple):
    """A GPU instance: its first memory slice and the name of its profile."""

    start: int
    profile: str

    def __str__(self) -> str:
        return f"{self.profile} at {self.start}"


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of GPU instance.

    Attributes:
        name: NVIDIA's name (`1g.10gb+me`).
        compute: the number of compute slices of an instance.
        size: the number of memory slices of an instance.
        starts: the memory slices at which an instance may start.
        most: the maximum number of instances per card.
    """

    name: str
    compute: int
    size: int
    starts: tuple[int, ...]
    most: int

    @property
    def media(self) -> bool:
        """Whether an instance has the card's media engines. Only one instance of a card can have them."""
        return self.name.endswith("+me")

    def mask(self, start: int) -> int:
        """Return the memory slices of an instance at `start` as a bit mask."""
        return ((1 << self.size) - 1) << start


@dataclass(frozen=True, slots=True)
class Layout:
    """The possible partitions of the cards of one model.

    Attributes:
        slices: the number of memory slices of a card.
        compute: the number of compute slices of a card.
        inferred: whether the table is inferred from another model, not read from a card.
    """

    name: str
    slices: int
    compute: int
    profiles: tuple[Profile, ...]
    inferred: bool = False

    def profile(self, name: str) -> Profile | None:
        return next((p for p in self.profiles if p.name == name), None)


def _of_eight(name: str, one: int, two: int, four: int, all_: int, *, inferred: bool = False) -> Layout:
    """Return a layout of eight memory slices.

    The numbers are the gigabytes in the names of profiles with one, two, four and all memory slices.
    """
    profiles = (
        Profile(f"1g.{one}gb", 1, 1, tuple(range(7)), 7),
        Profile(f"1g.{one}gb+me", 1, 1, tuple(range(7)), 1),
        Profile(f"1g.{two}gb", 1, 2, (0, 2, 4, 6), 4),
        Profile(f"2g.{two}gb", 2, 2, (0, 2, 4), 3),
        Profile(f"3g.{four}gb", 3, 4, (0, 4), 2),
        Profile(f"4g.{four}gb", 4, 4, (0,), 1),
        Profile(f"7g.{all_}gb", 7, 8, (0,), 1),
    )
    return Layout(name, 8, 7, profiles, inferred)


_A30 = Layout(
    "A30-24",
    4,
    4,
    (
        Profile("1g.6gb", 1, 1, (0, 1, 2, 3), 4),
        Profile("1g.6gb+me", 1, 1, (0, 1, 2, 3), 1),
        Profile("2g.12gb", 2, 2, (0, 2), 2),
        Profile("2g.12gb+me", 2, 2, (0, 2), 1),
        Profile("4g.24gb", 4, 4, (0,), 1),
    ),
)
_A100_40 = _of_eight("A100-40", 5, 10, 20, 40)
_A100_80 = _of_eight("A100-80", 10, 20, 40, 80)
_H100_80 = _of_eight("H100-80", 10, 20, 40, 80)
_H100_94 = _of_eight("H100-NVL-94", 12, 24, 47, 94)
_H200 = _of_eight("H200-141", 18, 35, 71, 141, inferred=True)
_B200 = _of_eight("B200-180", 23, 45, 90, 180, inferred=True)

LAYOUTS = (_A30, _A100_40, _A100_80, _H100_80, _H100_94, _H200, _B200)

_MODELS = (
    ("A30", 0, _A30),
    ("A100", 60, _A100_80),
    ("A100", 0, _A100_40),
    ("A800", 60, _A100_80),
    ("A800", 0, _A100_40),
    ("H100", 88, _H100_94),
    ("H100", 0, _H100_80),
    ("H800", 88, _H100_94),
    ("H800", 0, _H100_80),
    ("H200", 0, _H200),
    ("B200", 0, _B200),
)
"""Each row has a word in the name of the model, the minimum memory in GiB, and the layout. The first match counts.

A800 has the layouts of A100, and H800 those of H100: in NVIDIA's mig-parted, the two models of each pair share their
configurations (config-default.yaml).
"""

_ALIASES = {"7g.79gb": "7g.80gb"}


@lru_cache(maxsize=1000)
def layout_of(model: str, memory: int) -> Layout | None:
    """Return the layout of a model (`NVIDIA A100-SXM4-80GB`) with `memory` bytes, or None if no layout is known."""
    words = set(re.split(r"[^A-Z0-9]+", model.upper()))
    return next((layout for word, least, layout in _MODELS if word in words and memory >= least * _GIB), None)


def invalid_geometry_reason(model: str, geometry: Mapping[str, int]) -> str | None:
    """Return the reason why no card of a model can have a geometry; None if one can, or if the model is unknown.

    Args:
        model: the name of the model, with its memory in GB (`NVIDIA-A100-SXM4-80GB`) or without (`A100`).
        geometry: the number of instances by profile.
    """
    words = set(re.split(r"[^A-Z0-9]+", model.upper()))
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d{1,4}GB", word, re.ASCII)]
    layouts = [layout_of(model, size * _GIB) for size in sizes] or [lay for word, _, lay in _MODELS if word in words]
    problems = [_unplaceable(layout, geometry) for layout in layouts if layout]
    return None if not problems or None in problems else problems[0]


def _unplaceable(layout: Layout, geometry: Mapping[str, int]) -> str | None:
    unknown = next((name for name in geometry if layout.profile(name) is None), None)
    if unknown is not None:
        return invalid_reason(layout, (Instance(0, unknown),))
    if arrange(layout, (), geometry) is None:
        return f"{layout.name} cannot be partitioned into {', '.join(f'{n} of {name}' for name, n in geometry.items())}"
    return None


def canonical(profile: str) -> str:
    """Return the name that a profile has in the tables. Some drivers report another name."""
    return _ALIASES.get(profile, profile)


def invalid_reason(layout: Layout, instances: Iterable[Instance]) -> str | None:
    """Return the reason why a card cannot have these instances, or None if it can."""
    taken, counts = 0, dict.fromkeys((p.name for p in layout.profiles), 0)
    for start, name in sorted(instances):
        profile = layout.profile(name)
        if profile is None:
            return f"{layout.name} has no profile {name}; it has {', '.join(p.name for p in layout.profiles)}"
        if start not in profile.starts:
            return f"{name} cannot start at {start}, only at {', '.join(map(str, profile.starts))}"
        if taken & profile.mask(start):
            return f"{name} at {start} overlaps another instance"
        taken |= profile.mask(start)
        counts[name] += 1
        if counts[name] > profile.most:
            return f"a card has at most {profile.most} of {name}"
    if sum(counts[p.name] for p in layout.profiles if p.media) > 1:
        return "a card has at most one instance with media engines (+me)"
    return None


def possible_instances(layout: Layout, instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return each instance that can be created beside `instances`, in the order of the layout's profiles and starts."""
    return _possible(layout, frozenset(instances))


@lru_cache(maxsize=50_000)
def _possible(layout: Layout, instances: frozenset[Instance]) -> tuple[Instance, ...]:
    taken, counts, media = 0, dict.fromkeys((p.name for p in layout.profiles), 0), False
    for profile in layout.profiles:
        for instance in instances:
            if instance.profile == profile.name:
                taken |= profile.mask(instance.start)
                counts[profile.name] += 1
                media = media or profile.media
    return tuple(
        Instance(start, profile.name)
        for profile in layout.profiles
        if counts[profile.name] < profile.most and not (media and profile.media)
        for start in profile.starts
        if not taken & profile.mask(start)
    )


def arrange(layout: Layout, fixed: Iterable[Instance], wanted: Mapping[str, int]) -> tuple[Instance, ...] | None:
    """Return the best positions of new instances beside fixed ones, ascending, or None if they do not fit.

    The best arrangement leaves the most `possible_instances`. Of several such arrangements, it is the one with the
    lowest starts. All arrangements are tried; there are few, because a card has at most 7 instances.

    Args:
        wanted: the number of new instances by profile.
    """
    counts = tuple(sorted((name, count) for name, count in wanted.items() if count > 0))
    return _arranged(layout, frozenset(fixed), counts)


@lru_cache(maxsize=50_000)
def _arranged(
    layout: Layout, fixed: frozenset[Instance], wanted: tuple[tuple[str, int], ...]
) -> tuple[Instance, ...] | None:
    """Return the result of `arrange`.

    The result is cached: the cards of a cluster have few different partitions, and pods request few different slices.
    """
    found = (tuple(sorted(new)) for new in _arrangements(layout, fixed, wanted, 0))
    return min(found, key=lambda new: (-len(_possible(layout, fixed.union(new))), new), default=None)


def _arrangements(
    layout: Layout, fixed: frozenset[Instance], wanted: tuple[tuple[str, int], ...], least: int
) -> Iterator[tuple[Instance, ...]]:
    """Yield every arrangement of the instances in `wanted`.

    Instances of equal profiles have ascending starts, so that no arrangement is yielded twice. `least` is the lowest
    start of the first instance.
    """
    if not wanted:
        yield ()
        return
    (name, count), rest = wanted[0], wanted[1:]
    for first in _possible(layout, fixed):
        if first.profile == name and first.start >= least:
            remaining = ((name, count - 1), *rest) if count > 1 else rest
            for others in _arrangements(layout, fixed | {first}, remaining, first.start + 1 if count > 1 else 0):
                yield (first, *others)

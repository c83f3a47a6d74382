"""Chance that is the same for a seed everywhere: only `Random.random`, whose stream Python promises not to change."""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(items: Sequence[T], random: Random) -> T:
    return items[int(random.random() * len(items))]


def shuffled(items: Iterable[T], random: Random) -> list[T]:
    keyed = [(random.random(), i, item) for i, item in enumerate(items)]
    return [item for *_, item in sorted(keyed, key=lambda row: row[:2])]


def endless(items: Sequence[T], random: Random) -> Iterator[T]:
    """All of them in random order, then drawn with replacement."""
    yield from shuffled(items, random)
    while True:
        yield pick(items, random)

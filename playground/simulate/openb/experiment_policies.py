"""The policies of the experiment, which choose the node and the cards of each pod.

`experiment` reads the table `POLICIES`. `fgd` and `fragmentation` are the scheduler's own. Everything random comes
from `Random.random`, whose stream Python promises not to change, so that a seed gives the same result everywhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np

from playground.simulate.openb.trace import Trace
from scheduler.engine import NODE_POLICIES
from scheduler.engine.learning.expected_pods import UNIT, Learner
from scheduler.engine.learning.node_board import UNFIT, Chooser, NodeBoard
from scheduler.engine.learning.shapes import CARD, Ints, NodeRows, Shape, fitting_rows, fullest_cards, needed_milli
from scheduler.engine.policies.fgd import Fgd, typical_pods
from scheduler.engine.policies.fragmentation import Fragmentation

T = TypeVar("T")


def pick(items: Sequence[T], random: Random) -> T:
    return items[int(random.random() * len(items))]


def shuffled(items: Iterable[T], random: Random) -> list[T]:
    keyed = [(random.random(), i, item) for i, item in enumerate(items)]
    return [item for *_, item in sorted(keyed, key=lambda row: row[:2])]


def endless(items: Sequence[T], random: Random) -> Iterator[T]:
    """Yield all items in random order, then draw with replacement."""
    yield from shuffled(items, random)
    while True:
        yield pick(items, random)


class BestFit:
    """Chooses the node with the least CPU and GPU left, relative to the largest node, and its fullest cards.

    As published with FGD: int(100 · (1 − ½ · cpu left / most cpu − ½ · gpu left / most gpu)); memory does not count.
    """

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        most_cpu = max(1, *(node.cpu for node in rows.classes))
        most_gpu = CARD * max(1, *(node.cards for node in rows.classes))
        left = (rows.cpu - shape.cpu) * most_gpu + (
            rows.free.sum(1) - shape.cards * needed_milli(rows, shape)
        ) * most_cpu
        return _keys_of_fitting(rows, shape, (200 * most_cpu * most_gpu - 100 * left) // (2 * most_cpu * most_gpu))

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        return _fullest(rows.free, rows, shape)


class Fullness:
    """`binpack` and `spread`: the live scheduler's node score, and the cards with the least or the most left."""

    def __init__(self, policy: str) -> None:
        self._score = cast(Callable[[Ints, Ints], Ints], NODE_POLICIES[policy])  # it works on arrays, too
        self._sign = {"binpack": 1, "spread": -1}[policy]

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        total = CARD * np.array([node.cards for node in rows.classes], np.int64)[rows.class_index]
        used = total - rows.free.sum(1) + shape.cards * needed_milli(rows, shape)
        return _keys_of_fitting(rows, shape, self._score(np.minimum(used, total), np.maximum(total, 1)))

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        return _fullest(self._sign * rows.free, rows, shape)


def _keys_of_fitting(rows: NodeRows, shape: Shape, scores: Ints) -> Ints:
    keys = np.full(len(rows.class_index), UNFIT, np.int64)
    at = fitting_rows(rows, shape, needed_milli(rows, shape))
    keys[at] = scores[at]
    return keys


def _fullest(left: Ints, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
    fitting = rows.free >= needed_milli(rows, shape)[:, None]
    return tuple(np.flatnonzero(fullest_cards(left, fitting, shape.cards)).tolist())


Spot = tuple[int, tuple[int, ...]]
"""(row of the node, its cards)."""

Place = Callable[[Shape], Spot | None]
"""Called once for every arrival, in order. Returns None where the pod fits nowhere."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The input of a policy. `board` has the free resources at the time when a pod arrives."""

    trace: Trace
    board: NodeBoard
    random: Random


def _random(given: PolicyInput) -> Place:
    """Choose any node that the pod fits, and any of its cards."""
    fit = Fullness("binpack")

    def place(pod: Shape) -> Spot | None:
        fitting_rows = np.flatnonzero(given.board.keys(fit, pod) != UNFIT)
        if not len(fitting_rows):
            return None
        row = pick(fitting_rows.tolist(), given.random)
        node = given.board.rows([row])
        cards = np.flatnonzero(node.free[0] >= needed_milli(node, pod)).tolist()
        return row, tuple(shuffled(cards, given.random)[: pod.cards])

    return place


def _best(given: PolicyInput, chooser: Chooser) -> Place:
    """Choose the node with the highest key, the first one among equals."""

    def place(pod: Shape) -> Spot | None:
        keys = given.board.keys(chooser, pod)
        row = int(np.argmax(keys))
        return None if keys[row] == UNFIT else (row, chooser.cards(given.board.rows([row]), pod))

    return place


def _fragmentation(given: PolicyInput) -> Place:
    """Learn which pods to expect from those that have arrived, including refused ones, as the live scheduler does."""
    learner, nodes = Learner(), Counter(given.trace.nodes)
    best: Place

    def place(pod: Shape) -> Spot | None:
        nonlocal best
        learner.observe(pod)
        if learner.due():
            best = _best(given, Fragmentation(learner.counts(), nodes))
        return best(pod)

    return place


def _fragmentation_known(given: PolicyInput) -> Place:
    """Know the popularity of pods in the trace beforehand, as FGD does."""
    counts = sorted(Counter(given.trace.pods).items())
    known = tuple((shape, UNIT * number) for shape, number in counts)
    return _best(given, Fragmentation(known, Counter(given.trace.nodes)))


def _fgd(given: PolicyInput) -> Place:
    """Know the popularity of pods in the trace beforehand, as published."""
    return _best(given, Fgd(typical_pods(Counter(given.trace.pods))))


POLICIES: Mapping[str, Callable[[PolicyInput], Place]] = MappingProxyType(
    {
        "random": _random,
        "bestfit": lambda given: _best(given, BestFit()),
        "binpack": lambda given: _best(given, Fullness("binpack")),
        "spread": lambda given: _best(given, Fullness("spread")),
        "fgd": _fgd,
        "fragmentation": _fragmentation,
        "fragmentation-known": _fragmentation_known,
    }
)
"""In the order of the output."""

"""Defines the policies of the experiment, which choose the node and the cards of each pod.

`experiment` calls them, and `openb_command` offers their names. `fgd` and `fragmentation` are policies of mgpu's
scheduler. All random numbers come from `Random.random`, because Python guarantees that its results for a seed do not
change between versions.
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
    """Yield every item once in random order, and then random items without end."""
    yield from shuffled(items, random)
    while True:
        yield pick(items, random)


class BestFit:
    """Chooses the node on which the least CPU and GPU would be left, and the fullest cards of this node.

    The key of a node is computed as in the publication of FGD, which does not consider memory:
    int(100 · (1 − ½ · cpu left / most cpu − ½ · gpu left / most gpu)). `most cpu` and `most gpu` are the largest
    amounts that a node of the cluster has.
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
    """Chooses the node by the score of mgpu's node policy `binpack` or `spread`.

    On the node, `binpack` chooses the cards with the least compute left, and `spread` the cards with the most.
    """

    def __init__(self, policy: str) -> None:
        self._score = cast(Callable[[Ints, Ints], Ints], NODE_POLICIES[policy])  # the function works on arrays, too
        self._sign = {"binpack": 1, "spread": -1}[policy]

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        total = CARD * np.array([node.cards for node in rows.classes], np.int64)[rows.class_index]
        used = total - rows.free.sum(1) + shape.cards * needed_milli(rows, shape)
        return _keys_of_fitting(rows, shape, self._score(np.minimum(used, total), np.maximum(total, 1)))

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        return _fullest(self._sign * rows.free, rows, shape)


def _keys_of_fitting(rows: NodeRows, shape: Shape, scores: Ints) -> Ints:
    """Return the scores of the nodes that the pod fits, and UNFIT for the other nodes."""
    keys = np.full(len(rows.class_index), UNFIT, np.int64)
    at = fitting_rows(rows, shape, needed_milli(rows, shape))
    keys[at] = scores[at]
    return keys


def _fullest(left: Ints, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
    """Return the cards with the lowest values in `left` among those that the pod fits. `rows` must have one row."""
    fitting = rows.free >= needed_milli(rows, shape)[:, None]
    return tuple(np.flatnonzero(fullest_cards(left, fitting, shape.cards)).tolist())


Spot = tuple[int, tuple[int, ...]]
"""The row of the chosen node in the NodeBoard, and the positions of the chosen cards on the node."""

Place = Callable[[Shape], Spot | None]
"""Chooses the node and the cards of a pod. It is called for every pod in the order of arrival, and returns None if the
pod fits no node."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The input of a policy.

    Attributes:
        trace: The nodes and the pods of the experiment.
        board: The resources that are free when a pod arrives.
        random: The source of all random numbers of the policy.
    """

    trace: Trace
    board: NodeBoard
    random: Random


def _random(given: PolicyInput) -> Place:
    """Return a policy that chooses a random one of the nodes that the pod fits, and random cards that the pod fits."""
    fit = Fullness("binpack")  # It only tells which nodes the pod fits; all policies agree on that.

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
    """Return a policy that chooses the node with the highest key, and the first one among nodes with the same key."""

    def place(pod: Shape) -> Spot | None:
        keys = given.board.keys(chooser, pod)
        row = int(np.argmax(keys))
        return None if keys[row] == UNFIT else (row, chooser.cards(given.board.rows([row]), pod))

    return place


def _fragmentation(given: PolicyInput) -> Place:
    """Return the policy that expects future pods to be like those that have arrived, as mgpu's scheduler does.

    It also learns from pods that fit no node.
    """
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
    """Return the policy `fragmentation`, here with the frequencies of pods in the trace in place of learned ones."""
    counts = sorted(Counter(given.trace.pods).items())
    known = tuple((shape, UNIT * number) for shape, number in counts)
    return _best(given, Fragmentation(known, Counter(given.trace.nodes)))


def _fgd(given: PolicyInput) -> Place:
    """Return FGD. As in its publication, it knows the frequencies of pods in the trace from the start."""
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
"""The policies by name, in the order of the output."""

"""Where a pod of the experiment goes: the policies, one function each, in one table."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import numpy as np

from playground.simulate.openb.baselines import BestFit, Fullness
from playground.simulate.openb.chance import pick, shuffled
from playground.simulate.openb.trace import Trace
from scheduler.fragmentation.board import UNFIT, Board, Chooser
from scheduler.fragmentation.fgd import Fgd, typical_pods
from scheduler.fragmentation.learner import UNIT, Learner
from scheduler.fragmentation.potential import Fragmentation
from scheduler.fragmentation.rows import needs
from scheduler.fragmentation.shapes import Shape

Spot = tuple[int, tuple[int, ...]]
"""(row of the node, its cards)."""

Place = Callable[[Shape], Spot | None]
"""Asked once for every arrival, in order; None: it fits nowhere."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy may use. board: as it is when a pod arrives; random: for what is left to chance."""

    trace: Trace
    board: Board
    random: Random


def _random(setting: Setting) -> Place:
    """Any node that can take the pod, any of its cards that can."""
    fit = Fullness("binpack")

    def place(pod: Shape) -> Spot | None:
        able = np.flatnonzero(setting.board.keys(fit, pod) != UNFIT)
        if not len(able):
            return None
        row = pick(able.tolist(), setting.random)
        node = setting.board.rows([row])
        cards = np.flatnonzero(node.free[0] >= needs(node, pod)).tolist()
        return row, tuple(shuffled(cards, setting.random)[: pod.cards])

    return place


def _best(setting: Setting, chooser: Chooser) -> Place:
    """The node with the highest key, of equal ones the first in the order of the seed."""

    def place(pod: Shape) -> Spot | None:
        keys = setting.board.keys(chooser, pod)
        row = int(np.argmax(keys))
        return None if keys[row] == UNFIT else (row, chooser.cards(setting.board.rows([row]), pod))

    return place


def _fragmentation(setting: Setting) -> Place:
    """Learns what pods come from those that came, refused ones too, as the live scheduler does."""
    learner, nodes = Learner(), Counter(setting.trace.nodes)
    best: Place

    def place(pod: Shape) -> Spot | None:
        nonlocal best
        learner.observe(pod)
        if learner.due():
            best = _best(setting, Fragmentation(learner.counts(), nodes))
        return best(pod)

    return place


def _fragmentation_known(setting: Setting) -> Place:
    """Told the trace's popularity beforehand, as FGD is."""
    counts = sorted(Counter(setting.trace.pods).items())
    known = tuple((shape, UNIT * number) for shape, number in counts)
    return _best(setting, Fragmentation(known, Counter(setting.trace.nodes)))


def _fgd(setting: Setting) -> Place:
    """As published, it is told the trace's popularity beforehand."""
    return _best(setting, Fgd(typical_pods(Counter(setting.trace.pods))))


POLICIES: Mapping[str, Callable[[Setting], Place]] = MappingProxyType(
    {
        "random": _random,
        "bestfit": lambda setting: _best(setting, BestFit()),
        "binpack": lambda setting: _best(setting, Fullness("binpack")),
        "spread": lambda setting: _best(setting, Fullness("spread")),
        "fgd": _fgd,
        "fragmentation": _fragmentation,
        "fragmentation-known": _fragmentation_known,
    }
)
"""In the order in which they are shown."""

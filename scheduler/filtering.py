"""Which nodes can take a pod, and how good each is: thousands of nodes per call, nothing written."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import NamedTuple

import numpy as np

from mgpu.model.asks import Ask, Placement
from mgpu.model.cards import CardState
from mgpu.model.groups import Seat
from mgpu.model.pods import Node
from mgpu.settings import Settings
from scheduler.decide import assess, score
from scheduler.gpu_pods import GpuPod
from scheduler.placement.refusals import impossible
from scheduler.placement.wishing import elsewhere, fresh
from scheduler.ranking import Ranking
from scheduler.state import State
from scheduler.vector.fits import Sifted, hopeless, sift
from scheduler.vector.reasons import reasons, told
from scheduler.vector.rows import COUNT, Mask, Rows
from scheduler.vector.scores import same_on_any_cards, scores

_ASKS_KEPT = 32
_STATES_KEPT = 20_000


@dataclass(slots=True)
class Filtered:
    """`passed` in the order asked; the others with the reason, apart where no eviction there can help."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)


class _Answer(NamedTuple):
    """What the engine says of a pod on a node. reason "": it fits, and `points` is the node's score."""

    reason: str = ""
    hopeless: bool = False
    points: int = 0


class _Look(NamedTuple):
    """The nodes asked about, by position. unmet: those where the pod cannot be whatever their cards hold, and why.

    apart: no other node is like them. seats: where the pod's same-card group is.
    """

    rows: Rows
    unmet: dict[int, str]
    apart: Mask
    seats: Sequence[Seat]
    sifted: Sifted


class _Memo:
    """What is known of an ask by the state of a node's cards; the latest asks and a bounded number of states."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Ask, dict[bytes, _Answer]] = OrderedDict()

    def of(self, ask: Ask) -> dict[bytes, _Answer]:
        with self._lock:
            known = self._known.setdefault(ask, {})
            self._known.move_to_end(ask)
            if len(self._known) > _ASKS_KEPT:
                self._known.popitem(last=False)
            if len(known) > _STATES_KEPT:
                known = self._known[ask] = {}
            return known


class Filter:
    """Thread-safe. What the arrays can tell they tell of all nodes at once; the rest is the engine's, node by node."""

    def __init__(self, state: State, settings: Settings) -> None:
        self._state, self._settings = state, settings
        self._memo = _Memo()
        self._ranking = Ranking(state, settings)

    def warm(self) -> None:
        """Take in all nodes now, not in the first call's time."""
        self._state.refresh()
        self._ranking.refresh()

    def filter(self, known: GpuPod, names: Sequence[str]) -> Filtered:
        """A malformed ask fits nowhere, and its problems are the reason."""
        ask = known.ask
        if ask is None:
            return Filtered(hopeless=dict.fromkeys(names, "; ".join(map(str, known.problems))))
        look = self._look(known, ask, names)
        found = Filtered(hopeless={names[i]: reason for i, reason in look.unmet.items()})
        fits = look.sifted.fits.copy()
        for i, answer in self._by_engine(ask, look, look.sifted.open):
            if answer.reason:
                (found.hopeless if answer.hopeless else found.failed)[names[i]] = answer.reason
            else:
                fits[i] = True
        for positions, texts, hope in _refusals(ask, look):
            told_of = list(zip([names[i] for i in positions], texts, strict=True))
            found.failed.update(compress(told_of, hope))
            found.hopeless.update(compress(told_of, map(not_, hope)))
        found.passed = list(compress(names, fits.tolist()))
        return found

    def scores(self, known: GpuPod, names: Sequence[str]) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more)."""
        ranked = self._ranking.points(known, names)
        if ranked is not None:
            return ranked
        points = [0] * len(names)
        if known.ask is not None:
            for i, found in self._points(known.ask, self._look(known, known.ask, names)):
                points[i] = found
        return points

    def _points(self, ask: Ask, look: _Look) -> Iterator[tuple[int, int]]:
        """From each node's own cards; at once where it makes no difference which of them the pod gets."""
        at_once = look.sifted.fits & same_on_any_cards(look.rows, ask) & ~look.apart
        positions = np.flatnonzero(at_once)
        weight_of_core = self._settings.dialects.mgpu.weight_of_core
        points = scores(look.rows.some(positions), ask, self._settings.node_policy, weight_of_core)
        yield from zip(positions.tolist(), map(fresh, points) if ask.wishes.spread else points, strict=True)
        closely = look.sifted.open | (look.sifted.fits & ~at_once)
        yield from ((i, answer.points) for i, answer in self._by_engine(ask, look, closely))

    def _look(self, known: GpuPod, ask: Ask, names: Sequence[str]) -> _Look:
        rows, unmet = self._state.rows(names, known.pod, ask)
        seats, beside = self._state.seats(ask, known.pod.uid), self._state.group_nodes(ask)
        apart = rows.odd | (rows.totals[COUNT] == 0)
        if beside:
            apart |= np.fromiter([name in beside for name in names], np.bool_, len(names))
        if seats:
            away = np.flatnonzero(~apart).tolist()
            unmet = {**dict.fromkeys(away, str(elsewhere(ask, (), seats))), **unmet}
        which = np.ones(len(names), np.bool_)
        which[list(unmet)] = False
        return _Look(rows, unmet, apart, seats, sift(rows, ask, which, apart if seats else rows.odd))

    def _by_engine(self, ask: Ask, look: _Look, which: Mask) -> Iterator[tuple[int, _Answer]]:
        """The answers for `which`; nodes in an equal state get the same."""
        memo, rows = self._memo.of(ask), look.rows
        for i in np.flatnonzero(which).tolist():
            key = b"" if look.apart[i] else rows.key(i)
            answer = memo.get(key)
            if answer is None:
                answer = self._assess(ask, rows.nodes[rows.at[i]], rows.cards_of(i), look.seats)
                if key:
                    memo[key] = answer
            yield i, answer

    def _assess(self, ask: Ask, node: Node, cards: Sequence[CardState], seats: Sequence[Seat]) -> _Answer:
        found = assess(ask, node, cards, self._settings, seats=seats)
        if isinstance(found, Placement):
            return _Answer(points=score(ask, found, cards, self._settings))
        return _Answer(told(found), found.hopeless)


def _refusals(ask: Ask, look: _Look) -> Iterator[tuple[list[int], list[str], list[bool]]]:
    """Positions, reasons, and whether there is hope, of the nodes that cannot be as the arrays say."""
    few = np.flatnonzero(look.sifted.too_few).tolist()
    yield few, [str(impossible(ask, look.rows.cards_of(i))) for i in few], [False] * len(few)
    for number in sorted(set(look.sifted.alone.tolist()) - {-1}):
        refused, container = np.flatnonzero(look.sifted.alone == number), ask.containers[number]
        rows = look.rows.some(refused)
        yield refused.tolist(), reasons(rows, ask, container), (~hopeless(rows, ask)).tolist()

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
from scheduler.looking import Look, look
from scheduler.placement.refusals import impossible
from scheduler.ranking import Ranking
from scheduler.state import State
from scheduler.vector.fits import hopeless
from scheduler.vector.reasons import reasons, told
from scheduler.vector.rows import Mask

_ASKS_KEPT = 256
_ANSWERS_KEPT = 40_000
"""Over all asks: some 40 MB."""


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


class _Memo:
    """What the engine has said of an ask by the state of a node's cards; the latest asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Ask, dict[bytes, _Answer]] = OrderedDict()

    def of(self, ask: Ask) -> dict[bytes, _Answer]:
        with self._lock:
            self._known.setdefault(ask, {})
            self._known.move_to_end(ask)
            while sum(map(len, self._known.values())) > _ANSWERS_KEPT or len(self._known) > _ASKS_KEPT:
                self._known.popitem(last=False)
            return self._known.setdefault(ask, {})


class Filter:
    """Thread-safe. What the arrays can tell they tell of all nodes at once; the rest is the engine's, node by node."""

    def __init__(self, state: State, settings: Settings) -> None:
        self._state, self._settings = state, settings
        self._memo = _Memo()
        self._ranking = Ranking(state, settings)

    def refresh(self) -> None:
        """Take in all nodes and what was learnt, now and not in a call's time."""
        self._state.refresh()
        self._ranking.refresh()

    def filter(self, known: GpuPod, names: Sequence[str]) -> Filtered:
        """A malformed ask fits nowhere, and its problems are the reason."""
        ask = known.ask
        if ask is None:
            return Filtered(hopeless=dict.fromkeys(names, "; ".join(map(str, known.problems))))
        seen = look(self._state, self._settings, known, ask, names)
        found = Filtered(hopeless={names[i]: reason for i, reason in seen.unmet.items()})
        for i, answer in self._by_engine(ask, seen, seen.sifted.open):
            if answer.reason:
                (found.hopeless if answer.hopeless else found.failed)[names[i]] = answer.reason
            else:
                seen.fits[i] = True
        for refused, texts, hope in _refusals(ask, seen):
            told_of = dict(zip(map(names.__getitem__, refused), texts, strict=True))
            if not any(hope):
                found.hopeless.update(told_of)
            elif all(hope):
                found.failed.update(told_of)
            else:
                found.failed.update(compress(told_of.items(), hope))
                found.hopeless.update(compress(told_of.items(), map(not_, hope)))
        found.passed = list(compress(names, seen.fits.tolist()))
        return found

    def scores(self, known: GpuPod, names: Sequence[str]) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more)."""
        ranked = self._ranking.points(known, names)
        if ranked is not None:
            return ranked
        if known.ask is None:
            return [0] * len(names)
        seen = look(self._state, self._settings, known, known.ask, names, scoring=True)
        for i, answer in self._by_engine(known.ask, seen, np.ones_like(seen.apart)):
            seen.points[i] = answer.points
        points: list[int] = seen.points.tolist()
        return points

    def _by_engine(self, ask: Ask, seen: Look, which: Mask) -> Iterator[tuple[int, _Answer]]:
        """The answers for `which` of the nodes looked at closely; those in an equal state get the same."""
        chosen = np.flatnonzero(which).tolist()
        if not chosen:
            return
        memo, rows, positions = self._memo.of(ask), seen.rows, seen.closely.tolist()
        for row in chosen:
            key = b"" if seen.apart[row] else rows.key(row)
            answer = memo.get(key)
            if answer is None:
                answer = self._assess(ask, rows.nodes[row], rows.cards[row], seen.seats)
                if key:
                    memo[key] = answer
            yield positions[row], answer

    def _assess(self, ask: Ask, node: Node, cards: Sequence[CardState], seats: Sequence[Seat]) -> _Answer:
        found = assess(ask, node, cards, self._settings, seats=seats)
        if isinstance(found, Placement):
            return _Answer(points=score(ask, found, cards, self._settings))
        return _Answer(told(found), found.hopeless)


def _refusals(ask: Ask, seen: Look) -> Iterator[tuple[list[int], list[str], list[bool]]]:
    """Positions, reasons, and whether there is hope, of the nodes that cannot be as the arrays say."""
    few = np.flatnonzero(seen.sifted.too_few)
    texts = [str(impossible(ask, seen.rows.cards[row])) for row in few.tolist()]
    yield seen.closely[few].tolist(), texts, [False] * len(texts)
    for number in sorted(set(seen.sifted.alone.tolist()) - {-1}):
        refused, container = np.flatnonzero(seen.sifted.alone == number), ask.containers[number]
        rows = seen.rows if len(refused) == len(seen.rows) else seen.rows.some(refused)
        yield seen.closely[refused].tolist(), reasons(rows, ask, container), (~hopeless(rows, ask)).tolist()

"""Which nodes can take a pod, and how good each is: thousands of nodes per call, nothing written."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mgpu.model.asks import Ask, Placement, Rejection
from mgpu.model.cards import CardState
from mgpu.model.pods import Node
from mgpu.settings import Settings
from scheduler.decide import assess, score
from scheduler.gpu_pods import GpuPod
from scheduler.matrix import Matrix
from scheduler.state import State

_UNKNOWN = "the node is not known to mgpu (yet)"
_ASKS_KEPT = 32
_STATES_KEPT = 20_000


@dataclass(slots=True)
class Filtered:
    """`passed` in the order asked; the others with the reason, apart where no eviction there can help."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)


class _Refused(NamedTuple):
    reason: str
    hopeless: bool


_Answer = tuple[_Refused | None, int]
"""Why a pod does not fit on a node (None: it fits), and the node's score, 0..10."""


class _Row(NamedTuple):
    """A node that is looked at closely. `key`: equal for nodes whose answer is the same; b"": this one's alone."""

    node: Node
    cards: tuple[CardState, ...]
    key: bytes


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
    """Thread-safe. Nodes whose cards are in an equal state get one answer, worked out once."""

    def __init__(self, state: State, settings: Settings) -> None:
        self._state, self._settings = state, settings
        self._memo = _Memo()

    def filter(self, known: GpuPod, names: Sequence[str]) -> Filtered:
        """A malformed ask fits nowhere, and its problems are the reason."""
        if known.ask is None:
            return Filtered(hopeless=dict.fromkeys(names, "; ".join(map(str, known.problems))))
        sifted, answers = self._look(known, known.ask, names, closely=False)
        found = Filtered(hopeless={names[i]: reason for i, reason in sifted.unmet})
        fitting = sifted.sure
        for i, (refused, _) in answers:
            if refused is None:
                fitting.append(i)
            else:
                (found.hopeless if refused.hopeless else found.failed)[names[i]] = refused.reason
        found.passed = [names[i] for i in (sorted(fitting) if answers else fitting)]
        return found

    def scores(self, known: GpuPod, names: Sequence[str]) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more)."""
        scores = [0] * len(names)
        if known.ask is not None:
            for i, (_, points) in self._look(known, known.ask, names, closely=True)[1]:
                scores[i] = points
        return scores

    def _look(
        self, known: GpuPod, ask: Ask, names: Sequence[str], *, closely: bool
    ) -> tuple["_Sifted", list[tuple[int, _Answer]]]:
        """closely: an answer, with its score, also for nodes where the pod fits for sure."""
        decision = self._state.decision(known.pod.uid)
        own = decision.node if decision else ""  # what it holds there already is not in its way
        memo = self._memo.of(ask)
        sifted = self._state.matrix(lambda matrix: _sift(matrix, ask, names, own, memo, closely=closely))
        answers = sifted.answers
        for i, row in sifted.open:
            if not row.key:
                cards = self._state.view(row.node.name, known.pod.uid).cards
                answers.append((i, self._assess(ask, row.node, cards)))
                continue
            answer = memo.get(row.key)
            if answer is None:
                answer = memo[row.key] = self._assess(ask, row.node, row.cards)
            answers.append((i, answer))
        return sifted, answers

    def _assess(self, ask: Ask, node: Node, cards: tuple[CardState, ...]) -> _Answer:
        found = assess(ask, node, cards, self._settings)
        if isinstance(found, Placement):
            return None, score(ask, found, cards, self._settings)
        return _Refused(_told(found), found.hopeless), 0


def _told(found: Rejection) -> str:
    """Readable behind the number of nodes: `0/3 nodes are available: 2 insufficient GPU (8 cards: 8 unhealthy)`."""
    return str(found) if found.reason else f"insufficient GPU ({found})"


class _Sifted(NamedTuple):
    """Positions in the names asked about: those that fit for sure, those that cannot whatever their cards hold with
    the reason, those whose answer is known, those that must be looked at.
    """

    sure: list[int]
    unmet: list[tuple[int, str]]
    answers: list[tuple[int, _Answer]]
    open: list[tuple[int, _Row]]


def _sift(
    matrix: Matrix, ask: Ask, names: Sequence[str], own: str, memo: dict[bytes, _Answer], *, closely: bool
) -> _Sifted:
    rows = matrix.rows(names)
    met, reasons = matrix.unmet(ask)
    if not len(met):
        return _Sifted([], [(i, _UNKNOWN) for i in range(len(names))], [], [])
    known = rows >= 0
    suits = known & met[rows]
    unmet = [(i, _UNKNOWN) for i in np.flatnonzero(~known).tolist()]
    unmet += [(i, reasons[rows[i]]) for i in np.flatnonzero(known & ~suits).tolist()]
    sure = np.zeros_like(suits)
    if len(ask.containers) == 1 and not closely:
        sure = suits & matrix.serving(ask.containers[0], ask.max_shares)[rows] & (rows != matrix.rows([own])[0])
    sifted = _Sifted(np.flatnonzero(sure).tolist(), unmet, [], [])
    rest = np.flatnonzero(suits & ~sure)
    for i, row in zip(rest.tolist(), rows[rest].tolist(), strict=True):
        node, key = matrix.nodes[row], matrix.keys[row]
        if node is None or node.name == own:
            key = b""
        answer = memo.get(key)
        if answer is not None:
            sifted.answers.append((i, answer))
        elif node is not None:
            sifted.open.append((i, _Row(node, matrix.cards[row], key)))
    return sifted

"""Which nodes can take a pod, and how good each is: thousands of nodes per call, nothing written."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mgpu.model.asks import Ask, Placement
from mgpu.model.cards import CardState
from mgpu.model.pods import Node
from mgpu.settings import Settings
from scheduler.decide import assess, score
from scheduler.matrix import Matrix
from scheduler.state import GpuPod, State

_UNKNOWN = "the node is not known to mgpu (yet)"
_ASKS_KEPT = 32
_STATES_KEPT = 20_000


@dataclass(slots=True)
class Filtered:
    """`passed` in the order asked; the others with the reason, apart where no eviction there can help."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)

    def refuse(self, name: str, rejection: "_Refused") -> None:
        (self.hopeless if rejection.hopeless else self.failed)[name] = rejection.reason


class _Refused(NamedTuple):
    reason: str
    hopeless: bool


class _Row(NamedTuple):
    """A node that is looked at closely. `key`: equal for nodes whose answer is the same."""

    name: str
    node: Node
    cards: tuple[CardState, ...]
    key: bytes


class _Memo:
    """What is known of an ask by the state of a node's cards; the latest asks and a bounded number of states."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Ask, dict[bytes, tuple[_Refused | None, int]]] = OrderedDict()

    def of(self, ask: Ask) -> dict[bytes, tuple[_Refused | None, int]]:
        with self._lock:
            known = self._known.setdefault(ask, {})
            self._known.move_to_end(ask)
            if len(self._known) > _ASKS_KEPT:
                self._known.popitem(last=False)
            if len(known) > _STATES_KEPT:
                known.clear()
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
        ask, answer = known.ask, Filtered()
        own = self._own(known)
        sure, refused, close = self._state.matrix(lambda matrix: _sift(matrix, ask, names, own))
        for i, reason in refused:
            answer.hopeless[names[i]] = reason
        for i, row in close.items():
            verdict, _ = self._assessed(known, ask, row)
            if verdict is None:
                sure.append(i)
            else:
                answer.refuse(row.name, verdict)
        answer.passed = [names[i] for i in (sorted(sure) if close else sure)]
        return answer

    def scores(self, known: GpuPod, names: Sequence[str]) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more)."""
        if known.ask is None:
            return [0] * len(names)
        ask, own = known.ask, self._own(known)
        _, _, close = self._state.matrix(lambda matrix: _sift(matrix, ask, names, own, closely=True))
        return [self._assessed(known, ask, close[i])[1] if i in close else 0 for i in range(len(names))]

    def _own(self, known: GpuPod) -> str:
        """The node where the pod already holds cards: it can have those again."""
        decision = self._state.decision(known.pod.uid)
        return decision.node if decision else ""

    def _assessed(self, known: GpuPod, ask: Ask, row: _Row) -> tuple[_Refused | None, int]:
        """Why not (None: it fits), and the score."""
        if not row.key:  # cards of its own are among these, or none at all
            return self._assess(ask, row.node, self._state.view(row.name, known.pod.uid).cards)
        memo = self._memo.of(ask)
        found = memo.get(row.key)
        if found is None:
            found = memo[row.key] = self._assess(ask, row.node, row.cards)
        return found

    def _assess(self, ask: Ask, node: Node, cards: tuple[CardState, ...]) -> tuple[_Refused | None, int]:
        found = assess(ask, node, cards, self._settings)
        if isinstance(found, Placement):
            return None, score(ask, found, cards, self._settings)
        return _Refused(str(found), found.hopeless), 0


class _Sifted(NamedTuple):
    """Positions in the names asked about: those that fit for sure, those that cannot with the reason, and the rest."""

    sure: list[int]
    refused: list[tuple[int, str]]
    close: dict[int, _Row]


def _sift(matrix: Matrix, ask: Ask, names: Sequence[str], own: str, *, closely: bool = False) -> _Sifted:
    """own: a node that is looked at closely in any case; closely: so are all that meet the ask's requirements."""
    rows = matrix.rows(names)
    met, reasons = matrix.unmet(ask)
    known = rows >= 0
    suits = known & met[rows] if len(met) else known
    refused = [(i, _UNKNOWN) for i in np.flatnonzero(~known).tolist()]
    refused += [(i, reasons[rows[i]]) for i in np.flatnonzero(known & ~suits).tolist()]
    sure = np.zeros_like(suits)
    if len(ask.containers) == 1 and not closely and len(met):
        sure = suits & matrix.serving(ask.containers[0], ask.max_shares)[rows] & (rows != matrix.rows([own])[0])
    close = {}
    for i in np.flatnonzero(suits & ~sure).tolist():
        row = int(rows[i])
        node = matrix.nodes[row]
        if node is not None:
            key = b"" if node.name == own else matrix.keys[row]
            close[i] = _Row(node.name, node, matrix.cards[row], key)
    return _Sifted(np.flatnonzero(sure).tolist(), refused, close)

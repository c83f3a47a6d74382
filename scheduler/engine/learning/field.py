"""Named nodes on a board, and the scores of all of them as kube-scheduler wants them."""

from collections.abc import Sequence

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.pods import Node
from scheduler.engine.card_policy import HIGHEST
from scheduler.engine.learning.board import UNFIT, Board, Judge
from scheduler.engine.learning.columns import class_of, free_of
from scheduler.engine.learning.node_columns import Ints
from scheduler.engine.learning.shapes import Shape

_OTHERS = 4
"""The most of any other node. Six points less are 300 with the weight of 5 that we recommend: more than fullness and
balance of cpu and memory can make up for (100 each), less than what users state by affinity, taints and spreading."""

BEHIND = 2**61
"""Taken off a key: behind all nodes that it is not taken off, but still better than not at all."""


WIDTH = 16
"""Cards of a node on the board at most. All rows of a board are equally wide, and what a node costs grows with the
square of the width: one wide node would slow every pod's scoring."""


class Field:
    """The nodes with cards, by name, on a board. Not thread-safe.

    wide: the nodes with more than WIDTH cards, which are not on the board; the caller judges each by itself.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.wide: set[str] = set()
        self._row: dict[str, int] = {}
        self._unused: list[int] = []

    def put(self, node: Node, cards: Sequence[CardState], room: CpuMemory) -> None:
        """Take in the node as it is now. room: what it has free of cpu and memory."""
        if not 0 < len(cards) <= WIDTH:
            self.drop(node.name)
            if cards:
                self.wide.add(node.name)
            return
        self.wide.discard(node.name)
        row = self._row.get(node.name)
        if row is None:
            row = self._row[node.name] = self._unused.pop() if self._unused else len(self._row)
        self.board.put(row, class_of(node, cards), *room, free_of(cards))

    def drop(self, name: str) -> None:
        self.wide.discard(name)
        row = self._row.pop(name, None)
        if row is not None:
            self.board.drop(row)
            self._unused.append(row)

    def keys(self, judge: Judge, shape: Shape, names: Sequence[str]) -> Ints:
        """One key per name, UNFIT where the pod does not fit or there is no such node."""
        keys = np.append(self.board.keys(judge, shape), UNFIT)
        row = self._row
        return keys[np.fromiter([row.get(name, -1) for name in names], np.intp, len(names))]


def points(names: Sequence[str], keys: Ints) -> list[int]:
    """Scores as kube-scheduler wants them. It picks at random among the best, so exactly one node gets 10.

    That is the first by name of those with the highest key; the others get 0..4 in proportion to theirs. No points at
    all where no node is known to fit.
    """
    fit = keys != UNFIT
    if not fit.any():
        return [0] * len(names)
    best, least = int(keys.max()), int(keys[fit].min())
    share = _OTHERS * ((keys - least) / (best - least)) if best > least else np.full(len(keys), float(_OTHERS))
    scores: list[int] = np.where(fit, share, 0).astype(np.int64).tolist()
    scores[min(np.flatnonzero(keys == best).tolist(), key=lambda i: names[i])] = HIGHEST
    return scores

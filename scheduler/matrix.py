"""All nodes' cards as arrays (node × card), so that one pod is held against thousands of nodes at once.

Exact for asks of one container, which are nearly all.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mgpu.model.asks import Ask, ContainerAsk, Requirement
from mgpu.model.cards import CardState
from mgpu.model.pods import Node

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

_REQUIREMENTS_KEPT = 64


@dataclass(slots=True)
class _Unmet:
    """For one dialect's requirements: which rows meet them, and why the others do not."""

    met: Mask
    reasons: list[str]


class Matrix:
    """Not thread-safe. Rows are nodes, columns their cards by position; a row without a node fits nothing.

    nodes, cards: what stands in each row. keys: equal for rows whose cards are equal in all that placing
    looks at.
    """

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._free_rows: list[int] = []
        self.nodes: list[Node | None] = []
        self.cards: list[tuple[CardState, ...]] = []
        self.keys: list[bytes] = []
        self._core = np.zeros((0, 0), np.int64)
        self._memory = np.zeros((0, 0), np.int64)
        self._shares = np.zeros((0, 0), np.int64)
        self._healthy = np.zeros((0, 0), np.bool_)
        self._unmet: OrderedDict[tuple[Requirement, ...], _Unmet] = OrderedDict()

    def put(self, node: Node, cards: tuple[CardState, ...]) -> None:
        """The node as it is now."""
        row = self._row.get(node.name)
        if row is None:
            row = self._free_rows.pop() if self._free_rows else len(self.nodes)
            self._row[node.name] = row
        self._grow(row + 1, len(cards))
        before, self.nodes[row] = self.nodes[row], node
        if before is None or before.labels != node.labels:
            for requirements, known in self._unmet.items():
                self._judge(requirements, known, row)
        self._fill(row, cards)

    def drop(self, name: str) -> None:
        row = self._row.pop(name, None)
        if row is not None:
            self.nodes[row] = None
            self._free_rows.append(row)
            self._fill(row, ())

    def rows(self, names: Sequence[str]) -> Rows:
        """The row of each name; -1 where there is no such node."""
        row = self._row
        return np.fromiter([row.get(name, -1) for name in names], np.intp, len(names))

    def unmet(self, ask: Ask) -> tuple[Mask, list[str]]:
        """Per row: whether it meets the ask's requirements, and the reason where it does not."""
        known = self._unmet.get(ask.requirements)
        if known is None:
            known = self._unmet[ask.requirements] = _Unmet(np.zeros(len(self._core), np.bool_), [""] * len(self._core))
            for row in range(len(self.nodes)):
                self._judge(ask.requirements, known, row)
            if len(self._unmet) > _REQUIREMENTS_KEPT:
                self._unmet.popitem(last=False)
        self._unmet.move_to_end(ask.requirements)
        return known.met, known.reasons

    def serving(self, container: ContainerAsk, max_shares: int) -> Mask:
        """The rows where this container fits, were it the only one of its pod: what `place` says, exactly."""
        serving = self._healthy.copy()
        if container.whole:
            serving &= self._shares == 0
        else:
            serving &= (self._core >= container.core) & (self._memory >= container.memory)
        if max_shares:
            serving &= self._shares < max_shares
        return np.asarray(serving.sum(axis=1) >= container.cards)

    def _judge(self, requirements: tuple[Requirement, ...], known: _Unmet, row: int) -> None:
        node = self.nodes[row]
        reason = None if node is None else next((text for r in requirements if (text := r.unmet(node))), None)
        known.met[row] = node is not None and reason is None
        known.reasons[row] = reason or ""

    def _fill(self, row: int, cards: tuple[CardState, ...]) -> None:
        self.cards[row] = cards
        rows = [
            (s.core_free, s.memory_free, s.shares, c.healthy, s.core_used, s.memory_used, c.core, c.memory, c.index)
            for s in cards
            for c in (s.card,)
        ]
        table = np.array(rows, np.int64).reshape(len(cards), 9)
        for column, array in enumerate((self._core, self._memory, self._shares, self._healthy)):
            array[row] = 0
            array[row, : len(cards)] = table[:, column]
        self.keys[row] = table.tobytes()

    def _grow(self, rows: int, columns: int) -> None:
        missing = rows - len(self.nodes)
        self.nodes += [None] * missing
        self.cards += [()] * missing
        self.keys += [b""] * missing
        have_rows, have_columns = self._core.shape
        if rows <= have_rows and columns <= have_columns:
            return
        shape = (max(have_rows, 2 * rows) if rows > have_rows else have_rows, max(columns, have_columns))
        self._core, self._memory, self._shares, self._healthy = (
            _grown(array, shape) for array in (self._core, self._memory, self._shares, self._healthy)
        )
        for known in self._unmet.values():
            known.met = np.concatenate((known.met, np.zeros(shape[0] - len(known.met), np.bool_)))
            known.reasons += [""] * (shape[0] - len(known.reasons))


def _grown(array: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
    larger = np.zeros(shape, array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger

"""Stores all nodes and their cards as arrays, which are updated node by node.

`NodeSnapshots` updates the arrays, and the filter evaluates a snapshot of them without any lock. Copying the arrays for
each call of the filter would take as long as the evaluation, and nearly every call ends before a node changes. So a
snapshot shares the arrays, and they are copied before a change only while a snapshot is in use (copy on write): a
row that a snapshot may contain must be changed only after `_unshare`.
"""

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Rejection, RejectionKind, Requirement
from mgpu.model.pod_constraints import Constraints
from mgpu.model.pods import Node
from scheduler.cluster.eligibility import Eligibility
from scheduler.engine.arrays.node_table import FIELDS, TOTALS, Ints, Mask, NodeArrays, NodeTable, table_row

UNKNOWN = Rejection(RejectionKind.UNKNOWN_NODE, "the node is not known to mgpu (yet)", hopeless=True)
"""The rejection of a node that kube-scheduler knows and this process does not."""
_MAX_REQUIREMENTS = 64
"""The maximum number of combinations of requirements for which results are stored."""
_FEW = 4
"""A snapshot of less than this fraction of all nodes gets arrays of its own. Evaluating all rows would take longer."""
_NO_NODE = Node("")
_NO_ROW = 0
"""The row of every unknown name; its node is `_NO_NODE`."""


@dataclass(slots=True)
class _RequirementResults:
    """The rows that meet the requirements of a request, and the rejections of the other rows."""

    is_met: Mask
    rejections: list[Rejection]


class _RowByName(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return _NO_ROW


class ClusterArrays:
    """The arrays of all nodes. Not thread-safe; the tables that it returns are immutable and may be read by any thread.

    Each node has a row, and each of its cards has a column in that row. The row of a deleted node is used again for
    another node.
    """

    def __init__(self) -> None:
        self._rows = _RowByName()
        self._names_since_compaction = 0
        self._free_rows: list[int] = []
        self._temporary_rows: list[int] = []  # The rows in which the last `table` stored `instead`.
        self._nodes = [_NO_NODE]
        self._cards: list[tuple[CardState, ...]] = [()]
        self._data: Ints = np.zeros((len(FIELDS), 1, 1), np.int64)
        self._totals: Ints = np.zeros((len(TOTALS), 1), np.int64)
        self._odd: Mask = np.zeros(1, np.bool_)  # True for a row whose cards arrays cannot describe.
        self._results: OrderedDict[tuple[Requirement, ...], _RequirementResults] = OrderedDict()
        self._eligibility = Eligibility()
        self._eligibility.put(_NO_ROW, ())
        self._shared: weakref.WeakSet[NodeArrays] = weakref.WeakSet()

    def put(self, node: Node, cards: tuple[CardState, ...]) -> None:
        """Store a node and its cards in place of their last state."""
        row = self._rows.get(node.name)
        if row is None:
            row = self._rows[node.name] = self._new_row()
            self._names_since_compaction += 1
        before = self._nodes[row]
        self._set(row, node, cards)
        if before is _NO_NODE or before.labels != node.labels:
            for requirements, results in self._results.items():
                self._check_requirements(requirements, results, row)

    def drop(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._set(row, _NO_NODE, ())
            self._free_rows.append(row)

    def table(
        self, names: Sequence[str], request: GpuRequest, instead: Mapping[str, tuple[CardState, ...]]
    ) -> NodeTable:
        """Return a snapshot of these nodes. A name that is not stored has the rejection UNKNOWN in the result.

        Args:
            request: The request, whose requirements exclude nodes and whose constraints exclude cards.
            instead: By node, the cards that replace the stored ones in the snapshot.
        """
        if 2 * self._names_since_compaction > len(self._rows):
            self._compact_names()
        rows = np.fromiter(map(self._rows.__getitem__, names), np.intp, len(names))
        results = self._results_of(request.requirements)
        unmet = {i: results.rejections[rows[i]] for i in np.flatnonzero(~results.is_met[rows]).tolist()}
        self._free_temporary_rows()
        for name, cards in instead.items():
            row = self._rows.get(name)
            if row is not None:
                temporary = self._new_row()
                self._temporary_rows.append(temporary)
                self._set(temporary, self._nodes[row], cards)
                rows[rows == row] = temporary
        used = len(self._nodes)
        arrays = NodeArrays(
            self._data[:, :used],
            self._totals[:, :used],
            self._odd[:used],
            self._exclusion_codes(request.constraints),
            self._eligibility.exclusions,
        )
        table = NodeTable(arrays, rows, self._nodes, self._cards, rows, unmet)
        if _FEW * len(names) < used:
            return table.compact()
        self._shared.add(arrays)
        return table

    def _unshare(self) -> None:
        """Copy the arrays before a change, if a table that shares them is still in use."""
        if self._shared:
            self._data = self._data.copy()
            self._totals = self._totals.copy()
            self._odd = self._odd.copy()
            self._nodes = self._nodes.copy()
            self._cards = self._cards.copy()
            self._shared.clear()  # The tables keep the old arrays, and nothing shares the new ones.

    def _set(self, row: int, node: Node, cards: tuple[CardState, ...]) -> None:
        self._unshare()
        self._nodes[row] = node
        self._cards[row] = cards
        self._data[:, row] = 0
        self._totals[:, row] = 0
        description = table_row(cards)
        self._odd[row] = description is None
        if description is None:
            self._eligibility.drop(row)
            return
        self._widen(len(cards))
        self._eligibility.put(row, cards)
        self._data[:, row, : len(cards)], self._totals[:, row] = description

    def _compact_names(self) -> None:
        """Copy all names and row numbers one after the other, so that they are close to one another in memory.

        Each call of `table` looks up its names, and the copies make that several times faster.
        """
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows)).tolist()
        names = [name.encode().decode() for name in self._rows]
        self._rows = _RowByName(zip(names, rows, strict=True))
        self._names_since_compaction = 0

    def _free_temporary_rows(self) -> None:
        for row in self._temporary_rows:
            self._set(row, _NO_NODE, ())
        self._free_rows += self._temporary_rows
        self._temporary_rows.clear()

    def _exclusion_codes(self, constraints: Constraints) -> Ints | None:
        """Return the exclusion codes in the shape of the other arrays, or None if no card can be excluded."""
        codes = self._eligibility.exclusion_codes(constraints)
        if codes is None:
            return None
        resized = np.zeros((len(self._nodes), self._data.shape[2]), np.int64)
        common = codes[: len(resized), : resized.shape[1]]
        resized[: common.shape[0], : common.shape[1]] = common
        return resized

    def _results_of(self, requirements: tuple[Requirement, ...]) -> _RequirementResults:
        results = self._results.get(requirements)
        if results is None:
            size = len(self._odd)
            results = _RequirementResults(np.zeros(size, np.bool_), [UNKNOWN] * size)
            self._results[requirements] = results
            for row in self._rows.values():
                self._check_requirements(requirements, results, row)
            if len(self._results) > _MAX_REQUIREMENTS:
                self._results.popitem(last=False)
        self._results.move_to_end(requirements)
        return results

    def _check_requirements(
        self, requirements: tuple[Requirement, ...], results: _RequirementResults, row: int
    ) -> None:
        node = self._nodes[row]
        reason = next((text for r in requirements if (text := r.unmet_requirement(node)) is not None), None)
        results.is_met[row] = reason is None
        if reason is not None:
            results.rejections[row] = Rejection(RejectionKind.NODE_LABEL, reason, hopeless=True)

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = len(self._nodes)
        self._nodes.append(_NO_NODE)
        self._cards.append(())
        if row >= len(self._odd):
            self._data = _doubled(self._data, 1)
            self._totals = _doubled(self._totals, 1)
            self._odd = _doubled(self._odd, 0)
            for results in self._results.values():
                results.is_met = _doubled(results.is_met, 0)
                results.rejections += [UNKNOWN] * len(results.rejections)
        return row

    def _widen(self, columns: int) -> None:
        missing = columns - self._data.shape[2]
        if missing > 0:
            self._data = np.pad(self._data, ((0, 0), (0, 0), (0, missing)))


def _doubled(array: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    return np.concatenate((array, np.zeros_like(array)), axis)

"""All nodes and their cards as arrays, kept up to date node by node.

The filter evaluates a snapshot of these arrays without any lock. A copy for each call would cost as much as the
evaluation, and nearly always the call has ended before anything changes. So a snapshot shares the arrays, and they are
copied before a change only while a snapshot of them is in use (copy on write).
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
from scheduler.engine.arrays.node_table import FIELDS, TOTALS, Ints, Mask, NodeArrays, NodeTable, described

UNKNOWN = Rejection(RejectionKind.UNKNOWN_NODE, "the node is not known to mgpu (yet)", hopeless=True)
_REQUIREMENTS_KEPT = 64
_NOBODY, _NOWHERE = Node(""), 0
"""The node and the row of every name that no node has."""


@dataclass(slots=True)
class _Met:
    """For one pod's requirements: which rows meet them, and why the others do not."""

    met: Mask
    reasons: list[Rejection]


class _Row(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return _NOWHERE


class ClusterArrays:
    """Not thread-safe. The tables that it returns are immutable and may be read by any thread."""

    def __init__(self) -> None:
        self._row = _Row()
        self._scattered = 0
        self._free: list[int] = []
        self._guests: list[int] = []
        self._nodes = [_NOBODY]
        self._cards: list[tuple[CardState, ...]] = [()]
        self._data: Ints = np.zeros((len(FIELDS), 1, 1), np.int64)
        self._totals: Ints = np.zeros((len(TOTALS), 1), np.int64)
        self._odd: Mask = np.zeros(1, np.bool_)
        self._met: OrderedDict[tuple[Requirement, ...], _Met] = OrderedDict()
        self._eligibility = Eligibility()
        self._eligibility.put(_NOWHERE, ())
        self._in_use: weakref.WeakSet[NodeArrays] = weakref.WeakSet()

    def put(self, node: Node, cards: tuple[CardState, ...]) -> None:
        """The node as it is now."""
        row = self._row.get(node.name)
        if row is None:
            row = self._row[node.name] = self._new_row()
            self._scattered += 1
        before = self._nodes[row]
        self._set(row, node, cards)
        if before is _NOBODY or before.labels != node.labels:
            for requirements, known in self._met.items():
                self._judge(requirements, known, row)

    def drop(self, name: str) -> None:
        row = self._row.pop(name, None)
        if row is not None:
            self._set(row, _NOBODY, ())
            self._free.append(row)

    def table(
        self, names: Sequence[str], request: GpuRequest, instead: Mapping[str, tuple[CardState, ...]]
    ) -> NodeTable:
        """Return a snapshot of the nodes of these names.

        Args:
            instead: by node the cards to assume in place of those put here.
        """
        if 2 * self._scattered > len(self._row):
            self._gather()
        at = np.fromiter(map(self._row.__getitem__, names), np.intp, len(names))
        known = self._judged(request.requirements)
        unmet = {i: known.reasons[at[i]] for i in np.flatnonzero(~known.met[at]).tolist()}
        self._dismiss_guests()
        for name, cards in instead.items():
            row = self._row.get(name)
            if row is not None:
                guest = self._new_row()
                self._guests.append(guest)
                self._set(guest, self._nodes[row], cards)
                at[at == row] = guest
        used = len(self._nodes)
        data, totals, odd = self._data[:, :used], self._totals[:, :used], self._odd[:used]
        rows = NodeArrays(data, totals, odd, self._bars(request.constraints), self._eligibility.exclusions)
        self._in_use.add(rows)
        return NodeTable(rows, self._nodes, self._cards, at, unmet)

    def _unshare(self) -> None:
        """Copy what this matrix shares with tables that somebody still reads, before the first change after them."""
        if self._in_use:
            self._data = self._data.copy()
            self._totals = self._totals.copy()
            self._odd = self._odd.copy()
            self._nodes = self._nodes.copy()
            self._cards = self._cards.copy()
            self._in_use.clear()  # those tables have what was copied to themselves now

    def _set(self, row: int, node: Node, cards: tuple[CardState, ...]) -> None:
        self._unshare()
        self._nodes[row] = node
        self._cards[row] = cards
        self._data[:, row] = 0
        self._totals[:, row] = 0
        made = described(cards)
        self._odd[row] = made is None
        if made is None:
            self._eligibility.drop(row)
            return
        self._widen(len(cards))
        self._eligibility.put(row, cards)
        self._data[:, row, : len(cards)], self._totals[:, row] = made

    def _gather(self) -> None:
        """All names are looked up in every call, and many times as fast where they and their numbers stand together in
        memory: so they are made anew, one after the other.
        """
        rows = np.fromiter(self._row.values(), np.intp, len(self._row)).tolist()
        names = [name.encode().decode() for name in self._row]
        self._row, self._scattered = _Row(zip(names, rows, strict=True)), 0

    def _dismiss_guests(self) -> None:
        for row in self._guests:
            self._set(row, _NOBODY, ())
        self._free += self._guests
        self._guests.clear()

    def _bars(self, constraints: Constraints) -> Ints | None:
        codes = self._eligibility.bars(constraints)
        if codes is None:
            return None
        bars = np.zeros((len(self._nodes), self._data.shape[2]), np.int64)
        known = codes[: len(bars), : bars.shape[1]]
        bars[: known.shape[0], : known.shape[1]] = known
        return bars

    def _judged(self, requirements: tuple[Requirement, ...]) -> _Met:
        known = self._met.get(requirements)
        if known is None:
            known = self._met[requirements] = _Met(np.zeros(len(self._odd), np.bool_), [UNKNOWN] * len(self._odd))
            for row in self._row.values():
                self._judge(requirements, known, row)
            if len(self._met) > _REQUIREMENTS_KEPT:
                self._met.popitem(last=False)
        self._met.move_to_end(requirements)
        return known

    def _judge(self, requirements: tuple[Requirement, ...], known: _Met, row: int) -> None:
        node = self._nodes[row]
        reason = next((text for r in requirements if (text := r.unmet(node)) is not None), None)
        known.met[row] = reason is None
        if reason is not None:
            known.reasons[row] = Rejection(RejectionKind.NODE_LABEL, reason, hopeless=True)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = len(self._nodes)
        self._nodes.append(_NOBODY)
        self._cards.append(())
        if row >= len(self._odd):
            self._data, self._totals = _doubled(self._data, 1), _doubled(self._totals, 1)
            self._odd = _doubled(self._odd, 0)
            for known in self._met.values():
                known.met = _doubled(known.met, 0)
                known.reasons += [UNKNOWN] * len(known.reasons)
        return row

    def _widen(self, columns: int) -> None:
        missing = columns - self._data.shape[2]
        if missing > 0:
            self._data = np.pad(self._data, ((0, 0), (0, 0), (0, missing)))


def _doubled(array: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    return np.concatenate((array, np.zeros_like(array)), axis)

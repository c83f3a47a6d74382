"""The node policies that compare all nodes with one another: by what a judge says of them."""

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.groups import Seat
from mgpu.settings import Settings
from scheduler.cluster.forecast import Outlook
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.effort_budget import Call, unlimited
from scheduler.engine.card_constraints import shares_card_with_group
from scheduler.engine.learning.node_board import BEHIND, UNFIT, Field, Judge, points
from scheduler.engine.learning.shapes import Ints, Shape, class_of, free_of, rows_of
from scheduler.engine.node_assessment import assess

_LATELY = 64
"""Shapes."""


class Cluster(Protocol):
    """What a ranking asks of `scheduler.cluster.cache.ClusterCache`."""

    @property
    def outlook(self) -> Outlook: ...

    def take_moved(self) -> Iterable[tuple[str, NodeSnapshot]]: ...

    def view(self, node: str, without: str) -> NodeSnapshot: ...

    def reservation(self, uid: str) -> Reservation | None: ...

    def seats(self, request: GpuRequest, without: str) -> tuple[Seat, ...]: ...

    def group_nodes(self, request: GpuRequest) -> frozenset[str]: ...


class Ranking:
    """Thread-safe. One call at a time, which costs what has changed since the last one for a pod of this shape.

    Until it is `refresh`ed, it goes on with the judge that it has.
    """

    def __init__(self, state: Cluster, settings: Settings) -> None:
        self._state, self._settings = state, settings
        self._lock = threading.Lock()
        self._field = Field()
        self._judge: Judge | None = None

    def points(self, known: GpuPod, names: Sequence[str], call: Call | None = None) -> list[int] | None:
        """0..10 for each node, exactly one 10; None: `nodePolicy` is none of these, nothing is learnt yet, or the pod
        asks for no GPU.

        call: what effort it may take; None: of a process that keeps nobody waiting.
        """
        if self._judge is None or known.request is None or not known.request.containers:
            return None
        shape = self._state.outlook.shape(known.pod, known.request)
        with self._lock:
            self._follow()
            judge = self._judge
            keys = self._field.keys(judge, shape, names)
            wide = tuple(self._field.wide)
        self._alone(known, known.request, judge, shape, names, keys, wide, call or unlimited())
        return points(names, keys) if (keys != UNFIT).any() else None

    def refresh(self) -> None:
        """Take in all nodes as they are, and the latest judge: what it says of pods as they came lately is worked out
        here, while calls go on. One thread at a time.
        """
        judge = self._state.outlook.judges.get(self._settings.node_policy)
        with self._lock:
            self._follow()
            shapes, board = self._field.board.shapes[-_LATELY:], self._field.board.copy()
        if judge is self._judge or judge is None:
            return
        for shape in shapes:
            board.keys(judge, shape)
        with self._lock:
            self._field.board.adopt(board)
            self._judge = judge

    def _follow(self) -> None:
        # The state's lock is taken within this one, never this one within the state's.
        for name, view in self._state.take_moved():
            if view.node is None:
                self._field.drop(name)
            else:
                self._field.put(view.node, view.cards, view.room)

    def _alone(
        self,
        known: GpuPod,
        request: GpuRequest,
        judge: Judge,
        shape: Shape,
        names: Sequence[str],
        keys: Ints,
        wide: Iterable[str],
        call: Call,
    ) -> None:
        """Set the keys of the nodes that the board cannot judge: where this very pod, or one of its spread group, is,
        and those with more cards than the board has columns.
        """
        uid, nodes = known.pod.uid, {*self._state.group_nodes(request), *wide}
        decision = self._state.reservation(uid)
        if decision is not None:
            nodes.add(decision.node)
        for i in [i for i, name in enumerate(names) if name in nodes] if nodes else ():
            keys[i] = self._key(
                request, judge, shape, self._state.view(names[i], uid), self._state.seats(request, uid), call
            )

    def _key(
        self, request: GpuRequest, judge: Judge, shape: Shape, view: NodeSnapshot, seats: Sequence[Seat], call: Call
    ) -> int:
        limits = call.next_limits()
        if view.node is None or limits is None:
            return UNFIT
        unkept = (*view.unkept, *view.unkept_others)
        found = assess(request, view.node, unkept, self._settings, seats=seats, limits=limits, effort=call.effort)
        if not isinstance(found, Placement):
            return UNFIT
        key = int(judge.keys(rows_of(class_of(view.node, view.cards), view.room, [free_of(view.cards)]), shape)[0])
        return key - BEHIND if key != UNFIT and shares_card_with_group(request, found, view.unkept) else key

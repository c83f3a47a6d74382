"""Scores nodes according to the learning node policies, which compare all nodes with one another.

Such a policy learns from the pods that arrive (`scheduler.cluster.forecast`) and provides a judge. The judge gives each
node a key for a pod of a certain shape (`scheduler.engine.learning`), and the node with the highest key is the best.
`decisions.filter` calls `Ranking` before it scores by other means. `Ranking` stores the keys of all nodes, so a call
has to rate only the nodes that have changed since the last call for a pod of the same shape.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.groups import GroupCard
from mgpu.settings import Settings
from scheduler.cluster.cluster_queries import NODES_PER_LOCK, pause
from scheduler.cluster.forecast import Forecast
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.effort_budgets import Call, unlimited
from scheduler.engine.card_constraints import shares_card_with_group
from scheduler.engine.learning.node_board import DEMOTION, UNFIT, BoardByName, Judge, extender_scores
from scheduler.engine.learning.shapes import Shape, class_of, free_milli, node_rows
from scheduler.engine.node_assessment import assess

_SHAPES_RENEWED = 64
"""The number of recent shapes for which the keys of a new judge are computed before the judge is used."""


class Cluster(Protocol):
    """The part of `scheduler.cluster.cache.ClusterCache` that a ranking uses. Simulations provide another class."""

    @property
    def forecast(self) -> Forecast: ...

    def take_changed_nodes(self, most: int) -> Sequence[tuple[str, NodeSnapshot]]: ...

    def node_snapshot(self, node: str, uid: str) -> NodeSnapshot: ...

    def reservation(self, uid: str) -> Reservation | None: ...

    def group_cards(self, request: GpuRequest, without: str) -> tuple[GroupCard, ...]: ...

    def group_nodes(self, request: GpuRequest) -> frozenset[str]: ...


class Ranking:
    """Ranks nodes by the judge of the configured node policy. Thread-safe: `_lock` guards the board and the judge.

    The lock is held for milliseconds at most: nodes are taken in a few at a time, and rated without the lock. A new
    judge is used only after `refresh`, which a background thread calls.
    """

    def __init__(self, state: Cluster, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self._lock = threading.Lock()
        self._field = BoardByName()
        self._judge: Judge | None = None

    def points(self, gpu_pod: GpuPod, names: Sequence[str], call: Call | None = None) -> list[int] | None:
        """Return a score from 0 to 10 for each node. Exactly one node gets 10.

        Returns None if the caller has to score by other means: the policy does not learn or has not learned enough yet,
        the pod requests no GPU, or it fits on none of the nodes.

        Args:
            call: The budget of the call; None in a process that serves no other caller (`unlimited`).
        """
        request = gpu_pod.request
        if self._judge is None or request is None or not request.containers:
            return None
        call = call or unlimited()
        shape = self._state.forecast.shape(gpu_pod.pod, request)
        self._update_board()
        with self._lock:
            judge = self._judge
            rating = self._field.board.begin_rating(judge, shape)
            rows = self._field.rows(names)
            wide = set(self._field.wide)
        keys_of_rows = rating.keys()
        with self._lock:
            self._field.board.store(rating, keys_of_rows)
        keys = np.append(keys_of_rows, UNFIT)[rows]  # a node that is not on the board has the row -1
        # The board has no correct keys for nodes with more cards than it has columns, for nodes with pods of this
        # pod's groups, and for the node on which this pod has a reservation.
        excluded = wide | self._state.group_nodes(request)
        reservation = self._state.reservation(gpu_pod.pod.uid)
        if reservation is not None:
            excluded.add(reservation.node)
        for i in [i for i, name in enumerate(names) if name in excluded] if excluded else ():
            keys[i] = self._key(gpu_pod, request, names[i], judge, shape, call)
        return extender_scores(names, keys) if (keys != UNFIT).any() else None

    def refresh(self) -> None:
        """Take in the changed nodes and the latest judge. Only one thread at a time may call this.

        The keys for recent shapes are computed on a copy of the board, while calls continue with the old judge.
        """
        judge = self._state.forecast.judges.get(self._settings.node_policy)
        self._update_board()
        with self._lock:
            shapes = self._field.board.shapes[-_SHAPES_RENEWED:]
            board = self._field.board.copy()
        if judge is self._judge or judge is None:
            return
        for shape in shapes:
            board.keys(judge, shape)
        with self._lock:
            self._field.board.adopt(board)
            self._judge = judge

    def _update_board(self) -> None:
        """Take in the nodes that have changed."""
        is_complete = False
        while not is_complete:
            # Lock order: the cache's lock is acquired while this one is held, never the reverse. Nodes are taken from
            # the cache under this lock, so that no call misses a change that another thread has taken.
            with self._lock:
                changed = self._state.take_changed_nodes(NODES_PER_LOCK)
                for name, snapshot in changed:
                    if snapshot.node is None:
                        self._field.drop(name)
                    else:
                        self._field.put(snapshot.node, snapshot.cards, snapshot.free_resources)
            is_complete = len(changed) < NODES_PER_LOCK
            if not is_complete:
                pause()

    def _key(self, gpu_pod: GpuPod, request: GpuRequest, name: str, judge: Judge, shape: Shape, call: Call) -> int:
        """Return the key of a node that the board cannot judge. The engine finds out whether the pod fits there."""
        snapshot = self._state.node_snapshot(name, gpu_pod.pod.uid)
        limits = call.next_limits()
        if snapshot.node is None or limits is None:
            return UNFIT
        group_cards = self._state.group_cards(request, gpu_pod.pod.uid)
        cards = (*snapshot.available_cards, *snapshot.available_other_devices)
        effort = call.effort
        found = assess(
            request, snapshot.node, cards, self._settings, group_cards=group_cards, limits=limits, effort=effort
        )
        if not isinstance(found, Placement):
            return UNFIT
        rows = node_rows(class_of(snapshot.node, snapshot.cards), snapshot.free_resources, [free_milli(snapshot.cards)])
        key = int(judge.keys(rows, shape)[0])
        if key != UNFIT and shares_card_with_group(request, found, snapshot.available_cards):
            return key - DEMOTION
        return key

"""The nodes with the label as sites, made of what the state of the scheduler knows, and kept while nothing changes."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from mgpu.model.cards import CardState
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import LABEL, NodeSlices
from mgpu.model.pods import Node, Pod
from mgpu.settings import Settings
from scheduler.cluster.devices import Inventories
from scheduler.cluster.node_view import View
from scheduler.cluster.slice_state import Plan
from scheduler.engine.eviction_search import freed
from scheduler.engine.partitioning.named_resources import NamedUsage
from scheduler.engine.partitioning.partitionable_node import Site, site_of
from scheduler.engine.partitioning.slice_score import named_resources


class Replanned(Protocol):
    def __call__(self, node: str, *, freed: bool) -> None:
        """A plan for this node was made (freed False) or dropped."""


class Sites:
    """Thread-safe, by its owner's lock. All that it is made of is its owner's, and only read, but for the plans."""

    def __init__(
        self,
        lock: threading.RLock,
        view: Callable[[str, str], View],
        inventories: Inventories,
        ledger: Ledger,
        replanned: Replanned,
        settings: Settings,
    ) -> None:
        self._lock, self._view, self._inventories, self._ledger = lock, view, inventories, ledger
        self._tell_replanned, self._known = replanned, inventories.slices
        self._geometries = settings.dialects.slices.geometries
        self._named = NamedUsage(named_resources(settings.dialects.slices))
        self._kept: dict[str, Site] = {}

    def names(self) -> tuple[str, ...]:
        """Of the nodes with the label, in order."""
        with self._lock:
            return self._known.names()

    def refresh(self) -> None:
        """Make all sites now and not in a call's time."""
        for name in self.names():
            self.of(name)

    def of(self, name: str, uid: str = "") -> Site | None:
        """A node as pod `uid` would have it cut; None: it has no label, or there is no such node."""
        with self._lock:
            view = self._view(name, uid)
            if view.node is None or not view.node.labels.get(LABEL):
                return None
            own = self._ledger.holding(uid)
            alone = (view.cards, view.others) != (view.unkept, view.unkept_others) or (own and own.node == name)
            kept = self._kept.get(name)
            if not alone and kept and (kept.version, kept.room) == (view.version, view.room):
                return kept
            site = self._site(name, view.node, view, self._known.of(name), {uid})
            if not alone:
                self._kept[name] = site
            return site

    def without(self, name: str, uid: str, gone: Collection[str]) -> Site | None:
        """The same once the pods of these uids are gone, and their slices free."""
        with self._lock:
            view, found = self._view(name, uid), self._known.of(name)
            if view.node is None or not view.node.labels.get(LABEL):
                return None
            leaving = [held for held in self._ledger.holdings(name) if held.uid in gone]
            cards, others = _freed(view.unkept, leaving), _freed(view.unkept_others, leaving)
            made = tuple(replace(s, pod="") if s.pod in gone else s for s in found.made)
            return self._site(
                name,
                view.node,
                replace(view, unkept=cards, unkept_others=others),
                replace(found, made=made),
                {uid, *gone},
            )

    def _site(self, name: str, node: Node, view: View, found: NodeSlices, apart: Collection[str]) -> Site:
        """apart: the uids of pods that are not counted there."""
        return site_of(
            node,
            found,
            self._inventories.gpus(node),
            (*view.unkept, *view.unkept_others),
            [held for held in self._ledger.holdings(name) if held.uid not in apart],
            self._geometries,
            room=view.room,
            named=self._named.on(name),
            version=view.version,
            problem=self._known.problem(name),
        )

    def follow(self, pod: Pod) -> None:
        """A pod as it is now, whatever it asks for."""
        with self._lock:
            self._named.follow(pod)

    def drop_pod(self, uid: str) -> None:
        with self._lock:
            self._named.drop(uid)

    def drop_node(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)

    # Plans.

    def plan(self, plan: Plan, version: int) -> bool:
        """Let it stand over what its node says, from now on; False: the node has changed since `version`."""
        with self._lock:
            if self._view(plan.node, "").version != version:
                return False
            self._known.plan(plan)
            self._tell_replanned(plan.node, freed=False)
            return True

    def drop_plan(self, plan: Plan) -> None:
        """It was not written and will not be."""
        with self._lock:
            self._known.drop(plan)
            self._tell_replanned(plan.node, freed=True)

    def plans(self) -> tuple[Plan, ...]:
        """Those that their nodes do not show yet, by the names of these."""
        with self._lock:
            return tuple(plan for _, plan in sorted(self._known.plans().items()))


def _freed(states: Sequence[CardState], gone: Sequence[Holding]) -> tuple[CardState, ...]:
    return tuple(freed(state, [{state.card.index: held.uses(state.card)} for held in gone]) for state in states)

"""Remembers the nodes of Volcano's sessions, and tells whether the action `reclaim` would evict all victims there.

Volcano counts the resources of a node as sums (volcano.sh, pkg/scheduler/api, `Resource`). In `reclaim` it evicts
victims in an order of its own until the sums suffice. If the cards are fragmented, fewer victims suffice for the sums
than for the cards, and would be evicted in vain. `api.volcano` uses the module.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, Self

from mgpu.model.raw_objects import table_at
from scheduler.decisions.preemption import Outlook

Amounts = Mapping[str, float]
"""The amounts of resources by name. Volcano's amounts of cpu and of extended resources are in thousandths."""

_TOLERANCE = 0.1
"""Volcano takes amounts that differ by less as equal (`minResource`)."""
_MAX_SEEN = 10_000
"""The most pairs of pod and node for which the node is remembered."""


class SeenNode(NamedTuple):
    """A node in a session.

    Attributes:
        free: What is free there of the resources that a task requests once the pods have ended that leave the node, in
            Volcano's sums (`FutureIdle`).
        outlook: What the session has decided about the node, or None.
    """

    free: Amounts
    outlook: Outlook | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], outlook: Outlook | None) -> Self:
        """Return the node in the arguments of a predicate."""
        keys = ("Idle", "Releasing", "Pipelined")
        idle, releasing, pipelined = (_amounts(table_at(arguments, "node", key)) for key in keys)
        names = _requested(table_at(arguments, "task"))
        return cls({n: idle.get(n, 0) + releasing.get(n, 0) - pipelined.get(n, 0) for n in names}, outlook)


class SeenNodes:
    """The nodes that tasks may need victims on, from their last predicates. Thread-safe.

    Volcano calls the predicate of a node before it asks for victims there, and only the predicate has the whole node.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: OrderedDict[tuple[str, str], SeenNode] = OrderedDict()

    def put(self, uid: str, node: str, seen: SeenNode | None) -> None:
        with self._lock:
            self._seen.pop((uid, node), None)
            if seen is not None:
                self._seen[uid, node] = seen
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)

    def get(self, uid: str, node: str) -> SeenNode | None:
        with self._lock:
            return self._seen.get((uid, node))


def evicts_all(evictor: Mapping[str, Any], victims: Sequence[Mapping[str, Any]], free: Amounts) -> bool:
    """Return whether the sums suffice only once all of the victims are evicted, in whichever order.

    Args:
        free: `SeenNode.free` of their node.
    """
    wanted = _requested(evictor)
    held = [_amounts(table_at(victim, "Resreq")) for victim in victims]
    total = {name: free.get(name, 0) + sum(amounts.get(name, 0) for amounts in held) for name in wanted}
    return all(
        any(total[name] - amounts.get(name, 0) <= wanted[name] - _TOLERANCE for name in wanted) for amounts in held
    )


def _requested(task: Mapping[str, Any]) -> Amounts:
    return {name: amount for name, amount in _amounts(table_at(task, "InitResreq")).items() if amount > 0}


def _amounts(resource: Mapping[str, Any]) -> dict[str, float]:
    scalars = table_at(resource, "ScalarResources")
    found = {"cpu": resource.get("MilliCPU"), "memory": resource.get("Memory"), **scalars}
    return {name: float(amount) for name, amount in found.items() if isinstance(amount, int | float)}

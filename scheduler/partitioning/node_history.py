"""What the partition controller remembers of a node from one pass to the next: refused plans and idle cards.

All of it is in memory, on the controller's thread. A new leader begins without it: it may repeat a plan that was
refused, and idle slices stay for their whole time again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mgpu.model.slice_names import MPS, Slice
from scheduler import metrics
from scheduler.engine.partitioning.partitionable_node import PartitionableNode

REPEAT_SECONDS = 60.0
"""How long a plan that a node refused is not made again while the node stays as it is."""


@dataclass(slots=True)
class _Refused:
    """The plans that a node refused in one state.

    Attributes:
        plan: number of the last one.
        state: the slices and cards of the node at the refusal.
        targets: the slices that were planned, and when that was refused.
    """

    plan: int
    state: object
    targets: dict[frozenset[Slice], float] = field(default_factory=dict)


class RefusedPlans:
    """Plans that nodes refused, so that they are not repeated at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: dict[str, _Refused] = {}

    def observe(self, target: PartitionableNode) -> None:
        """Record what the node says of its last plan."""
        name, found = target.node.name, target.found
        if found.refused is None:
            self._refused.pop(name, None)
            return
        plan = found.refused[0]
        before = self._refused.get(name)
        if before is not None and before.plan == plan:
            return
        metrics.PLANS.labels("refused").inc()
        refused = before if before is not None and before.state == _state(target) else _Refused(plan, _state(target))
        refused.plan = plan
        self._refused[name] = refused
        now = self._clock()
        refused.targets = {target: at for target, at in refused.targets.items() if now < at + REPEAT_SECONDS}
        if found.partitioning.plan == plan and found.planned is not None:
            refused.targets[frozenset(found.planned)] = now

    def forbids(self, target: PartitionableNode, slices: Collection[Slice]) -> bool:
        """Return whether the node has refused these slices within the last minute, in the state in which it is now.

        Not only the last plan counts: the plans for two pods would otherwise be made in turn for ever.
        """
        self.observe(target)
        refused = self._refused.get(target.node.name)
        if refused is None or refused.state != _state(target):
            return False
        at = refused.targets.get(frozenset(slices))
        return at is not None and self._clock() < at + REPEAT_SECONDS

    def forget(self, node: str) -> None:
        self._refused.pop(node, None)


def _state(target: PartitionableNode) -> object:
    return target.found.made, target.found.cards


class IdleCards:
    """Cards of MPS nodes whose slices no pod uses.

    They become whole again after a time, because a partitioned card cannot be shared or given whole. A MIG card serves
    slices only, partitioned or not, so its free slices keep no pod away.

    Args:
        seconds: that slices may be idle; 0 keeps them for ever.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._idle_since: dict[str, dict[int, float]] = {}  # node → card → time

    def __bool__(self) -> bool:
        return bool(self._idle_since)

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._idle_since))

    def observe(self, target: PartitionableNode) -> None:
        """Record which cards of the node are idle. Further slices on an idle card begin no new time."""
        found, name = target.found, target.node.name
        # Slices that no plan of mgpu has made are left to the administrator who made them.
        if not self._seconds or found.mode != MPS or not found.placed or found.planned is None:
            self.forget(name)
            return
        cards = {s.card for s in target.made} - {s.card for s in target.used | found.by_others}
        before = self._idle_since.pop(name, {})
        now = self._clock()
        if cards:
            self._idle_since[name] = {card: before.get(card, now) for card in sorted(cards)}

    def due(self, node: str, more: float = 0.0) -> frozenset[int]:
        """Return the cards that have been idle for long enough, and for so many seconds more."""
        since = self._clock() - self._seconds - more
        return frozenset(card for card, at in self._idle_since.get(node, {}).items() if at <= since)

    def forget(self, node: str) -> None:
        self._idle_since.pop(node, None)

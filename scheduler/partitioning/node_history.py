"""The history of nodes that the partition controller needs: which plans they refused, and since when cards are idle.

Only the partition controller uses this module, on its thread. The history exists only in memory. A new leader begins
without it, which is safe: it may repeat a plan that was refused, and idle slices stay for the full time again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mgpu.model.slice_names import MPS, Slice
from scheduler import metrics
from scheduler.engine.partitioning.partitionable_node import PartitionableNode

REPEAT_SECONDS = 60.0
"""The time for which a plan that a node refused is not repeated, unless the node changes."""


@dataclass(slots=True)
class _Refused:
    """The plans that a node refused while it was in one state.

    Attributes:
        plan: The number of the last plan that was refused.
        state: The slices and the cards of the node at that time.
        targets: For each refused set of slices, the time of the refusal.
    """

    plan: int
    state: object
    targets: dict[frozenset[Slice], float] = field(default_factory=dict)


class RefusedPlans:
    """Remembers the plans that nodes refused, so that they are not repeated at once.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: dict[str, _Refused] = {}

    def observe(self, target: PartitionableNode) -> None:
        """Record whether the agent of the node has refused its last plan."""
        name, found = target.node.name, target.observed
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
        """Return whether the node refused these slices less than a minute ago, and has not changed since.

        All refused plans of that minute count, not only the last one. Otherwise two refused plans for two pods would
        be made in turn without end.
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
    return target.observed.existing, target.observed.cards


class IdleCards:
    """Measures for how long the slices of cards have been idle on nodes with MPS.

    Slices that are idle for too long are removed, because a card with MPS slices cannot be shared in another way or be
    allocated as a whole. A card in MIG mode can only be used through slices, so its idle slices keep no pod away.

    Args:
        clock: A monotonic clock, in seconds.
        seconds: The time for which slices may be idle. 0 means without limit.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._idle_since: dict[str, dict[int, float]] = {}  # by node and card, the time

    def __bool__(self) -> bool:
        return bool(self._idle_since)

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._idle_since))

    def observe(self, target: PartitionableNode) -> None:
        """Record which cards of the node are idle. If an idle card gets more slices, its time is not reset."""
        found, name = target.observed, target.node.name
        # If there is no plan of mgpu, an administrator made the slices, and only an administrator may remove them.
        if not self._seconds or found.mode != MPS or not found.has_positions or found.planned is None:
            self.forget(name)
            return
        cards = {s.card for s in target.existing} - {s.card for s in target.used | found.foreign_slices}
        before = self._idle_since.pop(name, {})
        now = self._clock()
        if cards:
            self._idle_since[name] = {card: before.get(card, now) for card in sorted(cards)}

    def due(self, node: str, extra_seconds: float = 0.0) -> frozenset[int]:
        """Return the cards that have been idle for longer than allowed, by at least `extra_seconds`."""
        since = self._clock() - self._seconds - extra_seconds
        return frozenset(card for card, at in self._idle_since.get(node, {}).items() if at <= since)

    def forget(self, node: str) -> None:
        self._idle_since.pop(node, None)

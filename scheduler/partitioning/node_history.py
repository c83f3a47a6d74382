"""The history of nodes for the partition controller: which plans they refused, and since when cards have been idle.

The history exists only in memory, and is not thread-safe: the partition controller uses it on its thread. A new leader
begins without it, which is safe: it may repeat a plan that was refused, and idle slices stay for the full time again.
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
        state: The slices and the cards of the node at the first of these refusals.
        targets: For each refused set of slices, the time of its last refusal.
    """

    plan: int
    state: object
    targets: dict[frozenset[Slice], float] = field(default_factory=dict)


class RefusedPlans:
    """Remembers the plans that nodes refused, so that the controller does not repeat them at once.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: dict[str, _Refused] = {}

    def observe(self, target: PartitionableNode) -> None:
        """Record whether the agent of the node has refused the last plan of the node."""
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

        Earlier refused plans of that minute count too. Otherwise the controller would make two refused plans for two
        pods in turn, without end.
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
    """Measures for how long all slices of a card have been idle, on nodes with MPS.

    The controller removes slices that are idle for too long, because a card with MPS slices cannot be shared in another
    way or be allocated as a whole. A card in MIG mode can be used only through slices, so its idle slices stay.

    Args:
        clock: A monotonic clock, in seconds.
        seconds: The time for which slices may be idle. With 0 they may be idle without limit.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._idle_since: dict[str, dict[int, float]] = {}  # By node and card, the time since which it has been idle.

    def __bool__(self) -> bool:
        return bool(self._idle_since)

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._idle_since))

    def observe(self, target: PartitionableNode) -> None:
        """Record which cards of the node are idle now. New slices on an idle card do not reset the time of the card."""
        found, name = target.observed, target.node.name
        # On a node without a plan of mgpu, an administrator made the slices, and only an administrator may remove them.
        if not self._seconds or found.mode != MPS or not found.has_positions or found.planned is None:
            self.forget(name)
            return
        cards = {s.card for s in target.existing} - {s.card for s in target.used | found.foreign_slices}
        before = self._idle_since.pop(name, {})
        now = self._clock()
        if cards:
            self._idle_since[name] = {card: before.get(card, now) for card in sorted(cards)}

    def due(self, node: str, extra_seconds: float = 0.0) -> frozenset[int]:
        """Return the cards that have been idle for the allowed time and `extra_seconds` more, or longer."""
        since = self._clock() - self._seconds - extra_seconds
        return frozenset(card for card, at in self._idle_since.get(node, {}).items() if at <= since)

    def forget(self, node: str) -> None:
        self._idle_since.pop(node, None)

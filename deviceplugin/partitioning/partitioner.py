"""The interface of the two partitioners, `mig_partitioner` and `mps_partitioner`, and what they have in common.

`partition_worker` gives a partitioner the state of the node, and publishes what the partitioner returns.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice, mode_of


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """What a reconciliation starts from.

    Attributes:
        reported: the plan in the Node's annotations, and as `made` the slices of the last report.
        gpus: all GPUs of the node.
        users: returns which pod uses which place, given the slices that exist.
        held: the indexes of the cards of which pods in other vocabularies hold shares.
    """

    reported: NodeSlices
    gpus: Sequence[Card]
    users: Callable[[Collection[Slice]], Users]
    held: Collection[int]

    @property
    def plan(self) -> int | None:
        return self.reported.partitioning.plan

    @property
    def pending_plan(self) -> int | None:
        """The plan if it has not been applied yet, else None."""
        return self.plan if self.plan != self.reported.partitioning.applied else None

    def is_refused(self) -> bool:
        """Return whether the Node already reports that the plan is refused: the scheduler may be replacing it."""
        refused = self.reported.refused
        return refused is not None and refused[0] == self.plan

    def switch_mig_mode(self, manager: ModeManager, *, on: bool) -> list[str]:
        """Switch the MIG mode of all cards, and return why cards keep their mode.

        Cards of which pods hold shares, or slices of the other mode, keep it. Slices of the desired mode do not matter.
        """
        other_mode = MPS if on else MIG
        held = {*self.held, *(place.card for place in self.users(()) if mode_of(place.name) == other_mode)}
        in_use = {gpu.uuid for gpu in self.gpus if gpu.index in held}
        return [*manager.switch({gpu.uuid for gpu in self.gpus}, in_use, on=on).values()]


@dataclass(frozen=True, slots=True)
class ObservedPartitions:
    """The state of the cards after a reconciliation.

    Attributes:
        slices: the slices that exist, with UUIDs and without pods.
        busy: the places on which processes run.
        cards: the indexes of the cards that can be partitioned.
        unhealthy: the indexes of the cards whose slices must not be given out now.
        refused: the plan that cannot be applied, and the reason.
        applied: the plan with which the slices agree.
        problems: other problems, for Events of the node.
        retry_reason: why another reconciliation is needed soon, or None.
    """

    slices: tuple[Slice, ...] = ()
    busy: frozenset[Slice] = frozenset()
    cards: frozenset[int] = frozenset()
    unhealthy: frozenset[int] = frozenset()
    refused: tuple[int, str] | None = None
    applied: int | None = None
    problems: tuple[str, ...] = ()
    retry_reason: str | None = None


class Partitioner(Protocol):
    """The interface of partitioners. Used by the partition worker's thread alone."""

    def reset(self) -> None:
        """Forget the cards because the node has another mode now, and release what this mode needs on the node."""

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        """Change the cards towards the desired state as far as that is possible now.

        Raises RetryLater if the state of the cards is not known.
        """

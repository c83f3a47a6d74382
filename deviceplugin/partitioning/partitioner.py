"""The interface of the two partitioners, `mig_partitioner` and `mps_partitioner`, and the types of its data.

`partition_worker` passes the state of the node to a partitioner, and publishes the state that the partitioner returns.
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
    """The state of the node at the start of a reconciliation.

    Attributes:
        reported: The plan in the Node's annotations. Its attribute `existing` contains the slices of the last
            observation, or those that the Node reports if there was no observation yet.
        users: A function that takes the slices that exist, and returns which pod uses which place. A place is a slice
            without its UUID and its pod (`Slice.place`).
        held: The indexes of the cards that are held by pods with other vocabularies or with cards of other plugins.
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
        """The number of the plan if the plan has not been applied yet, else None."""
        return self.plan if self.plan != self.reported.partitioning.applied else None

    def is_refused(self) -> bool:
        """Return whether the Node reports that the plan is refused, so that the scheduler may be replacing it."""
        refused = self.reported.refused
        return refused is not None and refused[0] == self.plan

    def switch_mig_mode(self, manager: ModeManager, *, on: bool) -> list[str]:
        """Switch the MIG mode of all cards, and return the reasons why cards keep their mode.

        A card keeps its mode while pods hold shares of it, or slices of the other mode, or while processes run on it.
        Slices of the desired mode do not prevent the switch. Raises RetryLater and MigRefused.
        """
        other_mode = MPS if on else MIG
        held = {*self.held, *(place.card for place in self.users(()) if mode_of(place.name) == other_mode)}
        in_use = {gpu.uuid for gpu in self.gpus if gpu.index in held}
        return [*manager.switch({gpu.uuid for gpu in self.gpus}, in_use, on=on).values()]


@dataclass(frozen=True, slots=True)
class ObservedPartitions:
    """The state of the cards after a reconciliation.

    Attributes:
        slices: The slices that exist, without their pods. MIG instances have UUIDs.
        busy: The places on which processes run.
        cards: The indexes of the cards that can be partitioned.
        unhealthy: The indexes of the cards whose slices must not be given out now.
        refused: The number of the plan that cannot be applied, and the reason; None if no plan is refused.
        applied: The number of the plan with which the slices agree, or None.
        problems: Problems other than the reason of a refused plan, for Events of the node.
        retry_reason: The reason why another reconciliation is needed soon, or None.
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
    """The interface of partitioners. Only the partition worker's thread uses it."""

    def reset(self) -> None:
        """Forget the state of the cards, because the node has another mode now, and let daemons of this mode end."""

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        """Change the cards towards the desired state as far as possible now. Raises RetryLater."""

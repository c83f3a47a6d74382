"""The interface of the two ways to cut cards: MIG instances and MPS shares."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import Slice


@dataclass(frozen=True, slots=True)
class ObservedPartitions:
    """What exists after a reconciliation.

    Attributes:
        made: the slices, with UUIDs and without pods.
        busy: places where processes run.
        cards: the indexes of cards that can be cut.
        unwell: the indexes of cards whose slices must not be given out now.
        refused: the plan that cannot be applied, and why.
        done: the plan that `made` agrees with.
        problems: what else is wrong, for the node's Events.
        retry: why another reconciliation is needed soon; None: it is not.
    """

    made: tuple[Slice, ...] = ()
    busy: frozenset[Slice] = frozenset()
    cards: frozenset[int] = frozenset()
    unwell: frozenset[int] = frozenset()
    refused: tuple[int, str] | None = None
    done: int | None = None
    problems: tuple[str, ...] = ()
    retry: str | None = None


class Partitioner(Protocol):
    """Used by the partition worker's thread alone."""

    def leave(self) -> None:
        """Forget the cards, since the node is in another mode now, and end what runs for this mode."""

    def reconcile(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> ObservedPartitions:
        """Bring the cards towards the desired state as far as that is possible now.

        Args:
            found: what the Node says: the plan, and as `made` what was reported last.
            gpus: all cards of the node.
            users: returns which pod has which place, given the slices that exist.
            held: the indexes of cards that pods in other vocabularies have shares of.

        Raises RetryLater where the state of the cards is not known.
        """


class NoPartitioner:
    """The partitioner of nodes whose container runtime has no CDI: it never cuts a card."""

    def leave(self) -> None:
        """Do nothing."""

    def reconcile(
        self,
        found: NodeSlices,  # noqa: ARG002
        gpus: Sequence[Card],  # noqa: ARG002
        users: Callable[[Collection[Slice]], Users],  # noqa: ARG002
        held: Collection[int],  # noqa: ARG002
    ) -> ObservedPartitions:
        raise RetryLater("no card is cut here: slices need a container runtime with CDI (deviceplugin.cdi)")

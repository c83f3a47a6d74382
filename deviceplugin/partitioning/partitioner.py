"""How a node's cards are cut: one interface for MIG and MPS."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import Slice


@dataclass(frozen=True, slots=True)
class Cut:
    """What there is after a look. made: with UUIDs, without pods. busy: places where processes run.

    cards: those that can be cut. unwell: those whose slices nobody can be given now. refused: the plan that cannot be
    applied, and why. done: the plan that what is made agrees with. problems: what else is wrong, for the node's Events.
    retry: why this look was not the last one that is needed, "" where it was.
    """

    made: tuple[Slice, ...] = ()
    busy: frozenset[Slice] = frozenset()
    cards: frozenset[int] = frozenset()
    unwell: frozenset[int] = frozenset()
    refused: tuple[int, str] | None = None
    done: int | None = None
    problems: tuple[str, ...] = ()
    retry: str = ""


class Cutter(Protocol):
    def leave(self) -> None:
        """The cards are not cut in this way now: what is kept up for it goes, and what was known is forgotten."""

    def cut(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> Cut:
        """Make the cards what they shall be, as far as that can be. Raises RetryLater where nothing is known of them.

        found: what the Node says; its `made` is what was reported last. users: who has which place, given what is made.
        held: the indexes of cards that pods in other vocabularies have shares of.
        """

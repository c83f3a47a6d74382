"""Keeps the cards of a node in MIG mode whose MIG instances ResourceClaims get.

The node has the label `gpu.partitioning=mig-claims`. Nothing is planned on it: `deviceplugin.dra` creates an instance
when a claim is prepared, and destroys it when the claim has ended. So this partitioner only switches the MIG mode, and
changes no instances. It reports which cards are in MIG mode, and the *foreign* instances, which were not created for a
claim: administrators or an earlier partition plan have created them, and they keep their places from claims.
"""

from collections.abc import Callable, Collection

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.partitioner import ObservedPartitions, PartitionContext
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance
from mgpu.model.node_slices import UNKNOWN_POD
from mgpu.model.slice_names import Slice, read_name

Places = Collection[tuple[str, Instance]]
"""The places of instances, each with the UUID of its card."""


class ClaimedCards:
    """The partitioner of these nodes. Only the partition worker's thread uses it.

    Args:
        manager: The manager that switches the cards' MIG mode; None if administrators switch it.
        owned: A function that returns the places at which instances for claims exist, or are about to.
    """

    def __init__(self, driver: MigDriver, manager: ModeManager | None, owned: Callable[[], Places]) -> None:
        self._driver = driver
        self._manager = manager
        self._owned = owned

    def reset(self) -> None:
        """Do nothing, because there is no state. Instances of claims stay until their claims have ended."""

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        """Switch the cards into MIG mode, and return what was observed. Raises RetryLater."""
        problems: list[str] = []
        # An instance of a claim may be destroyed or created while the cards are read.
        owned = {*self._owned()}
        try:
            if self._manager is not None:
                problems = context.switch_mig_mode(self._manager, on=True)
            found = {card.uuid: card for card in self._driver.read() if card.capable and card.current}
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        owned.update(self._owned())
        cards: set[int] = set()
        slices: list[Slice] = []
        for gpu in context.gpus:
            card = found.get(gpu.uuid)
            foreign = _foreign(card, owned) if card is not None else ()
            slices += (Slice(gpu.index, i.start, i.profile, pod=UNKNOWN_POD) for i in foreign if read_name(i.profile))
            problems += (
                f"card {gpu.index} has a {i}, which is not of a claim; no claim gets its place" for i in foreign
            )
            if card is not None and all(read_name(i.profile) for i in foreign):
                # Of an instance whose profile mgpu does not know, it is not known which places are left.
                cards.add(gpu.index)
        return ObservedPartitions(tuple(sorted(slices)), cards=frozenset(cards), problems=tuple(problems))


def _foreign(card: MigCard, owned: Places) -> list[Instance]:
    return sorted(one.instance for one in card.instances if (card.uuid, one.instance) not in owned)

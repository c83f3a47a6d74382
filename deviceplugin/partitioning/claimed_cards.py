"""Keeps the cards of a node in MIG mode whose MIG instances ResourceClaims get.

The node has the label `gpu.partitioning=mig-claims`. Nothing is planned on it: `deviceplugin.dra` creates an instance
when a claim is prepared, and destroys it when the claim has ended. So this partitioner only switches the MIG mode, and
changes no instances.
"""

from deviceplugin.mig.mig_driver import MigDriver, MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.partitioner import ObservedPartitions, PartitionContext
from mgpu.model.errors import RetryLater


class ClaimedCards:
    """The partitioner of these nodes. Only the partition worker's thread uses it.

    Args:
        manager: The manager that switches the cards' MIG mode; None if administrators switch it.
    """

    def __init__(self, driver: MigDriver, manager: ModeManager | None) -> None:
        self._driver = driver
        self._manager = manager

    def reset(self) -> None:
        """Do nothing, because there is no state. Instances of claims stay until their claims have ended."""

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        """Switch the cards into MIG mode, and return which of them are in it. Raises RetryLater."""
        problems: list[str] = []
        try:
            if self._manager is not None:
                problems = context.switch_mig_mode(self._manager, on=True)
            in_mode = {card.uuid for card in self._driver.read() if card.capable and card.current}
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        cards = frozenset(gpu.index for gpu in context.gpus if gpu.uuid in in_mode)
        return ObservedPartitions(cards=cards, problems=tuple(problems))

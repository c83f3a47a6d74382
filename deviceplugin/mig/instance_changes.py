"""Changes the MIG instances of one card to the planned ones, and undoes the changes if one of them fails.

`partitioning.mig_partitioner` calls `apply` for each card. The order of the changes matters. Missing instances that
pods use are created first. Then instances that are not planned are destroyed, so that their places are free, and new
instances are created last. A plan that lacks an instance that pods use, or on which processes run, is refused.
"""

import logging
from collections.abc import Collection, Iterable
from typing import NamedTuple

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused, existing_instances, usable_instances
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, invalid_reason

log = logging.getLogger(__name__)


class RollbackFailed(MigRefused):
    """A step failed, and not all steps could be undone. Apply the plan again later."""


class _Step(NamedTuple):
    """The creation or destruction of one instance."""

    create: bool
    instance: Instance

    def run(self, driver: MigDriver, uuid: str) -> None:
        if self.create:
            driver.create(uuid, self.instance)
        else:
            driver.destroy(uuid, self.instance)

    def undo(self, driver: MigDriver, uuid: str) -> None:
        """Undo the step, even if only a part of it succeeded. The driver creates or destroys what remains."""
        self._replace(create=not self.create).run(driver, uuid)

    def __str__(self) -> str:
        return f"{'create' if self.create else 'destroy'} {self.instance}"


def apply(driver: MigDriver, uuid: str, desired: Collection[Instance], in_use: Collection[Instance]) -> None:
    """Make `desired` the only instances of a card. If the card has these instances already, nothing changes.

    Missing instances that are in use, as after a reboot, are created first. They stay even if the plan fails.

    Args:
        uuid: The UUID of the card.
        desired: The planned instances.
        in_use: The instances that must stay because pods use them. Those on which processes run are added here.

    Raises:
        MigRefused: The plan lacks an instance that is in use, or the card does not allow the plan or one of its steps.
            Unless the exception is a RollbackFailed, the steps of the plan have been undone.
        RetryLater: The card or NVML does not answer. The steps of the plan have been undone.
    """
    _restore(driver, _card(driver, uuid), frozenset(in_use))
    card, planned = _card(driver, uuid), frozenset(desired)
    if lost := sorted(_used(card, in_use) - planned):
        raise MigRefused(f"{uuid}: {_listed(lost)} in use, but not in the plan")
    _check(card, planned)
    _run(driver, uuid, sorted(existing_instances(card) - planned), sorted(planned - usable_instances(card)))


def _restore(driver: MigDriver, card: MigCard, in_use: frozenset[Instance]) -> None:
    """Create the missing instances that are in use, one by one, so that one failure does not prevent the others.

    Existing instances that are not in use and occupy the place of a missing one are destroyed first. If some could not
    be created, raise the first error at the end.
    """
    missing = sorted(in_use - usable_instances(card))
    if not missing:
        return
    log.warning("creating missing MIG instances that are in use", extra={"card": card.uuid, "made": _listed(missing)})
    _check(card, _used(card, in_use))
    free, errors = set(existing_instances(card) - _used(card, in_use)), []
    for instance in missing:
        staying, in_the_way = _used(card, in_use), []
        for other in sorted(free):
            if invalid_reason(_layout(card), {*staying, other}):
                in_the_way.append(other)
            else:
                staying.add(other)
        try:
            _run(driver, card.uuid, in_the_way, [instance])
        except (MigRefused, RetryLater) as error:
            errors.append(error)
        else:
            free -= set(in_the_way)
    if errors:
        raise errors[0]


def _run(driver: MigDriver, uuid: str, old: Iterable[Instance], new: Iterable[Instance]) -> None:
    """Destroy the instances `old`, and then create `new` in the free places. Undo all steps if one fails."""
    begun: list[_Step] = []
    try:
        for step in (*(_Step(False, i) for i in old), *(_Step(True, i) for i in new)):
            begun.append(step)
            step.run(driver, uuid)
            log.info("MIG instance changed", extra={"card": uuid, "step": str(step)})
    except (MigRefused, RetryLater) as error:
        _undo(driver, uuid, begun, error)
        raise


def _undo(driver: MigDriver, uuid: str, begun: Iterable[_Step], cause: Exception) -> None:
    """Undo the steps. If one cannot be undone, undo the others nevertheless, and raise RollbackFailed at the end."""
    failed = []
    for step in reversed(tuple(begun)):
        try:
            step.undo(driver, uuid)
        except (MigRefused, RetryLater) as error:
            failed.append(f"{step} ({error})")
    if failed:
        raise RollbackFailed(f"{cause}; and these steps could not be undone: {', '.join(failed)}") from cause


def _card(driver: MigDriver, uuid: str) -> MigCard:
    card = next((card for card in driver.read() if card.uuid == uuid), None)
    if card is None:
        raise RetryLater(f"{uuid} does not answer")
    if not card.current:
        raise MigRefused(f"{uuid} is not in MIG mode")
    return card


def _layout(card: MigCard) -> Layout:
    if card.layout is None:
        raise MigRefused(f"{card.uuid} cannot be partitioned")
    return card.layout


def _check(card: MigCard, instances: Iterable[Instance]) -> None:
    if reason := invalid_reason(_layout(card), instances):
        raise MigRefused(f"{card.uuid}: {reason}")


def _used(card: MigCard, in_use: Iterable[Instance]) -> set[Instance]:
    """Return the instances that pods use or processes run on."""
    return {*in_use, *(one.instance for one in card.instances if one.busy)}


def _listed(instances: Iterable[Instance]) -> str:
    return ", ".join(map(str, instances))

"""Changes the MIG instances of one card to the planned ones, and undoes all changes where a step fails.

Only the MIG partitioner calls `apply`. Order matters: what is in use and gone is created first, instances that are not
planned are destroyed next, and new ones are created last, when their places are free. Nothing that processes run on is
ever destroyed.
"""

import logging
from collections.abc import Collection, Iterable
from typing import NamedTuple

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused, complete, existing
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, invalid_reason

log = logging.getLogger(__name__)


class RollbackFailed(MigRefused):
    """A step failed, and undoing the steps before it failed too. Apply the plan again later."""


class _Step(NamedTuple):
    create: bool
    instance: Instance

    def run(self, driver: MigDriver, uuid: str) -> None:
        if self.create:
            driver.create(uuid, self.instance)
        else:
            driver.destroy(uuid, self.instance)

    def undo(self, driver: MigDriver, uuid: str) -> None:
        """Undo the step, also one that failed half way: both calls accept what they find."""
        self._replace(create=not self.create).run(driver, uuid)

    def __str__(self) -> str:
        return f"{'create' if self.create else 'destroy'} {self.instance.profile} at {self.instance.start}"


def apply(driver: MigDriver, uuid: str, desired: Collection[Instance], in_use: Collection[Instance]) -> None:
    """Make `desired` the only instances of a card. Calling it again is safe.

    What of `in_use` is missing after a reboot is created first, and stays although the plan fails.

    Args:
        uuid: the card.
        desired: what the plan says.
        in_use: what must stay, whatever the plan says.

    Raises MigRefused where something in use, or the card, does not allow the plan, and whatever a step raises. The card
    is then as before, except after RollbackFailed.
    """
    _restore(driver, _card(driver, uuid), frozenset(in_use))
    card, wanted = _card(driver, uuid), frozenset(desired)
    if lost := sorted(_used(card, in_use) - wanted):
        raise MigRefused(f"{uuid}: {_listed(lost)} in use, but not in the plan")
    _check(card, wanted)
    _run(driver, uuid, sorted(existing(card) - wanted), sorted(wanted - complete(card)))


def _restore(driver: MigDriver, card: MigCard, in_use: frozenset[Instance]) -> None:
    """Create what is in use and missing, one by one, so that one failure does not prevent the others.

    Raises the first error at the end.
    """
    missing = sorted(in_use - complete(card))
    if not missing:
        return
    log.warning("creating again what is in use and missing on %s: %s", card.uuid, _listed(missing))
    _check(card, _used(card, in_use))
    free, errors = set(existing(card) - _used(card, in_use)), []
    for instance in missing:
        stay, gone = _used(card, in_use), []
        for other in sorted(free):
            if invalid_reason(_layout(card), {*stay, other}):
                gone.append(other)
            else:
                stay.add(other)
        try:
            _run(driver, card.uuid, gone, [instance])
        except (MigRefused, RetryLater) as error:
            errors.append(error)
        else:
            free -= set(gone)
    if errors:
        raise errors[0]


def _run(driver: MigDriver, uuid: str, gone: Iterable[Instance], new: Iterable[Instance]) -> None:
    """Destroy `gone` and then create `new`, so that each creation finds its place free. Undo everything on failure."""
    begun: list[_Step] = []
    try:
        for step in (*(_Step(False, i) for i in gone), *(_Step(True, i) for i in new)):
            begun.append(step)
            step.run(driver, uuid)
            log.info("%s on %s: done", step, uuid)
    except (MigRefused, RetryLater) as error:
        _undo(driver, uuid, begun, error)
        raise


def _undo(driver: MigDriver, uuid: str, begun: Iterable[_Step], why: Exception) -> None:
    """Undo the steps, also after one that cannot be undone, so that as much as possible is as before."""
    failed = []
    for step in reversed(tuple(begun)):
        try:
            step.undo(driver, uuid)
        except (MigRefused, RetryLater) as error:
            failed.append(f"{step} ({error})")
    if failed:
        raise RollbackFailed(f"{why}; and these steps could not be undone: {', '.join(failed)}") from why


def _card(driver: MigDriver, uuid: str) -> MigCard:
    card = next((card for card in driver.read() if card.uuid == uuid), None)
    if card is None:
        raise RetryLater(f"{uuid} does not answer")
    if not card.current:
        raise MigRefused(f"{uuid} is not in MIG mode")
    return card


def _layout(card: MigCard) -> Layout:
    if card.layout is None:
        raise MigRefused(f"{card.uuid} cannot be cut")
    return card.layout


def _check(card: MigCard, instances: Iterable[Instance]) -> None:
    if why := invalid_reason(_layout(card), instances):
        raise MigRefused(f"{card.uuid}: {why}")


def _used(card: MigCard, in_use: Iterable[Instance]) -> set[Instance]:
    return {*in_use, *(made.instance for made in card.instances if made.busy)}


def _listed(instances: Iterable[Instance]) -> str:
    return ", ".join(f"{i.profile} at {i.start}" for i in instances)

"""The MIG agent of the seed: makes what is made on a card what shall be there, undoing all if a step fails."""

import logging
from collections.abc import Collection, Iterable
from typing import NamedTuple

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, problem

log = logging.getLogger(__name__)


class RollbackFailed(MigRefused):
    """A step failed, and so did going back: the card is neither as it was nor as it shall be. Apply again later."""


class _Step(NamedTuple):
    create: bool
    instance: Instance

    def run(self, driver: MigDriver, uuid: str) -> None:
        if self.create:
            driver.create(uuid, self.instance)
        else:
            driver.destroy(uuid, self.instance)

    def undo(self, driver: MigDriver, uuid: str) -> None:
        """Also of a step that failed half way: both calls take what they find."""
        self._replace(create=not self.create).run(driver, uuid)

    def __str__(self) -> str:
        return f"{'create' if self.create else 'destroy'} {self.instance.profile} at {self.instance.start}"


def apply(driver: MigDriver, uuid: str, wanted: Collection[Instance], keep: Collection[Instance]) -> None:
    """Make `wanted` all that there is on a card. keep: what is in use, whatever is planned.

    Nothing in `keep`, and nothing that processes run on, is ever destroyed; what of `keep` is missing (a reboot) is
    made first, and stays although the plan fails. Raises MigRefused where that, or the card, does not allow the plan,
    and what a step raised; all is then as it was before the plan (RollbackFailed: it is not). Doing it again is safe.
    """
    _restore(driver, _card(driver, uuid), frozenset(keep))
    card, wanted = _card(driver, uuid), frozenset(wanted)
    if lost := sorted(_used(card, keep) - wanted):
        raise MigRefused(f"{uuid}: {_listed(lost)} in use, but not in the plan")
    _check(card, wanted)
    there, whole = _there(card), _whole(card)
    _run(driver, uuid, sorted(there - wanted), sorted(wanted - whole))


def _restore(driver: MigDriver, card: MigCard, keep: frozenset[Instance]) -> None:
    """Each for itself, so that those that can be are there although another cannot; raises the first one's error."""
    missing = sorted(keep - _whole(card))
    if not missing:
        return
    log.warning("making again what is in use and gone on %s: %s", card.uuid, _listed(missing))
    _check(card, _used(card, keep))
    free, errors = _there(card) - _used(card, keep), []
    for instance in missing:
        stay, gone = _used(card, keep), []
        for other in sorted(free):
            if problem(_layout(card), {*stay, other}):
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
    """Destroying goes first: where everything lies is known, so each step finds its place free."""
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
    """Goes on past a step that cannot be undone: as much as possible is to be as it was."""
    failed = []
    for step in reversed(tuple(begun)):
        try:
            step.undo(driver, uuid)
        except (MigRefused, RetryLater) as error:
            failed.append(f"{step} ({error})")
    if failed:
        raise RollbackFailed(f"{why}; and could not be undone: {', '.join(failed)}") from why


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
    if why := problem(_layout(card), instances):
        raise MigRefused(f"{card.uuid}: {why}")


def _there(card: MigCard) -> set[Instance]:
    return {made.instance for made in card.instances}


def _whole(card: MigCard) -> set[Instance]:
    return {made.instance for made in card.instances if made.uuid}


def _used(card: MigCard, keep: Iterable[Instance]) -> set[Instance]:
    return {*keep, *(made.instance for made in card.instances if made.busy)}


def _listed(instances: Iterable[Instance]) -> str:
    return ", ".join(f"{i.profile} at {i.start}" for i in instances)

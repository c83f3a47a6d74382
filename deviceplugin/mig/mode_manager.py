"""Switches cards into MIG mode and out of it.

Both partitioners call `ModeManager.settle` in every reconciliation, also right after the agent's start: from Hopper on
a card forgets its MIG mode at a reboot. A card that pods hold or processes run on keeps its mode.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The last attempt on a card.

    Attributes:
        due: when the next one may be made.
        reason: why this one did not succeed.
    """

    on: bool
    due: float
    pause: float
    reason: str


class ModeManager:
    """Keeps the cards in their desired MIG modes. Used by the partition worker's thread alone."""

    def __init__(self, driver: MigDriver, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}

    def settle(self, wanted: Mapping[str, bool], held: Collection[str]) -> dict[str, str]:
        """Switch the cards to the desired modes. Return by UUID why a card is not in its desired mode.

        Attempts that fail are repeated after growing pauses, up to five minutes.

        Args:
            wanted: UUID → whether MIG mode is to be on. Cards without MIG, or that do not answer, are left alone.
            held: the UUIDs of the cards that pods have a share or a slice of, which keep their mode.

        Raises RetryLater and MigRefused where no card can be read.
        """
        problems = {}
        for card in self._driver.read():
            if card.capable and card.uuid in wanted:
                on = wanted[card.uuid]
                if card.current == card.pending == on:
                    self._attempts.pop(card.uuid, None)
                elif reason := self._settle(card, card.uuid in held, on=on):
                    problems[card.uuid] = reason
        return problems

    def _settle(self, card: MigCard, held: bool, *, on: bool) -> str | None:
        changes = card.current != on
        if changes and (held or card.busy):
            who = "pods hold it" if held else "processes run on it"
            return f"the MIG mode of {card.uuid} cannot be switched {'on' if on else 'off'} yet: {who}"
        last = self._attempts.get(card.uuid)
        if last and last.on == on and self._clock() < last.due:
            return last.reason
        reason = self._attempt(card, on=on)
        if reason is None:
            self._attempts.pop(card.uuid, None)
            log.info("MIG mode of %s is %s", card.uuid, "on" if on else "off")
            return None
        pause = min(2 * last.pause, _LONGEST_PAUSE) if last and last.on == on else _FIRST_PAUSE
        self._attempts[card.uuid] = _Attempt(on, self._clock() + pause, pause, reason)
        return reason

    def _attempt(self, card: MigCard, *, on: bool) -> str | None:
        """Switch the mode; return why that failed, or None.

        A card with instances cannot leave MIG mode. The instances of a card that gets here are unused, so they are
        destroyed.
        """
        try:
            if card.current and not on:
                for made in card.instances:
                    self._driver.destroy(card.uuid, made.instance)
            return self._driver.set_mode(card.uuid, on=on)
        except (MigRefused, RetryLater) as error:
            return str(error)

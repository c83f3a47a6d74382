"""Switches cards into MIG mode and out of it.

The partitioners call `ModeManager.switch` whenever they reconcile (`PartitionContext.switch_mig_mode`), and first when
the agent starts, because cards of the generation Hopper and later lose their MIG mode at a reboot. A card that pods
hold, or on which processes run, keeps its mode.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0


@dataclass(frozen=True, slots=True)
class _FailedAttempt:
    """The last attempt to switch a card, which has failed.

    Attributes:
        on: Whether the attempt was to switch MIG mode on.
        retry_at: The earliest time of the next attempt, by the manager's clock.
        pause: The least time between this attempt and the next one, in seconds.
    """

    on: bool
    retry_at: float
    pause: float
    reason: str


class ModeManager:
    """The manager of the cards' MIG modes. Only the partition worker's thread uses it.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, driver: MigDriver, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._clock = clock
        self._attempts: dict[str, _FailedAttempt] = {}

    def switch(self, cards: Collection[str], in_use: Collection[str], *, on: bool) -> dict[str, str]:
        """Switch the MIG mode of these cards. Return, by UUID, why a card does not have the desired mode.

        Cards without MIG, and cards that do not answer, are ignored. After a failure, a card is tried again in a later
        call. The pause before that grows up to `_LONGEST_PAUSE`.

        Args:
            cards: The UUIDs of the cards.
            in_use: The UUIDs of the cards that must keep their mode because pods hold shares or slices of them.
            on: Whether the desired mode is on.

        Raises:
            MigRefused: The agent has no permission to read the cards.
            RetryLater: NVML does not answer.
        """
        problems = {}
        for card in self._driver.read():
            if card.capable and card.uuid in cards:
                if card.current == card.pending == on:
                    self._attempts.pop(card.uuid, None)
                elif reason := self._switch(card, card.uuid in in_use, on=on):
                    problems[card.uuid] = reason
        return problems

    def _switch(self, card: MigCard, held: bool, *, on: bool) -> str | None:
        """Switch the mode unless the card is in use or a pause has not ended. Return why the mode is not switched."""
        # If only the pending mode (after the next reset) differs, it can be changed although pods hold the card.
        if card.current != on and (held or card.busy):
            cause = "pods hold it" if held else "processes run on it"
            return f"the MIG mode of {card.uuid} cannot be switched {'on' if on else 'off'} yet: {cause}"
        last = self._attempts.get(card.uuid)
        if last and last.on != on:
            last = None
        if last and self._clock() < last.retry_at:
            return last.reason
        reason = self._attempt(card, on=on)
        if reason is None:
            self._attempts.pop(card.uuid, None)
            log.info("MIG mode of %s is %s", card.uuid, "on" if on else "off")
            return None
        pause = min(2 * last.pause, _LONGEST_PAUSE) if last else _FIRST_PAUSE
        self._attempts[card.uuid] = _FailedAttempt(on, self._clock() + pause, pause, reason)
        return reason

    def _attempt(self, card: MigCard, *, on: bool) -> str | None:
        """Switch the mode. Return why that failed, or None.

        A card with instances cannot leave MIG mode, so its instances are destroyed. `_switch` has checked that the card
        is not in use.
        """
        try:
            if card.current and not on:
                for mig_instance in card.instances:
                    self._driver.destroy(card.uuid, mig_instance.instance)
            return self._driver.set_mode(card.uuid, on=on)
        except (MigRefused, RetryLater) as error:
            return str(error)

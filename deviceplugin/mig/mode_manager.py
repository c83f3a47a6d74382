"""The MIG manager of the seed: puts cards into MIG mode and out of it, and nothing else."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The last one on a card. due: when the next may be. why: it did not do."""

    on: bool
    due: float
    pause: float
    why: str


class ModeManager:
    """Called again and again, at the start of the agent too: from Hopper on a card forgets its mode at a reboot."""

    def __init__(self, driver: MigDriver, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver, self._clock = driver, clock
        self._attempts: dict[str, _Attempt] = {}

    def settle(self, wanted: Mapping[str, bool], held: Collection[str]) -> dict[str, str]:
        """UUID → why a card is not in the mode that it shall be in. Raises RetryLater and MigRefused: none is known.

        wanted: UUID → whether MIG mode shall be on; cards that cannot be cut, and that do not answer, are left alone.
        held: the UUIDs of the cards that pods have a share or a slice of; these, and those that processes run on, keep
        the mode that they are in. What NVML does not do at once is asked of it again after ever longer pauses.
        """
        problems = {}
        for card in self._driver.read():
            if card.capable and card.uuid in wanted:
                on = wanted[card.uuid]
                if card.current == card.pending == on:
                    self._attempts.pop(card.uuid, None)
                elif why := self._settle(card, card.uuid in held, on=on):
                    problems[card.uuid] = why
        return problems

    def _settle(self, card: MigCard, held: bool, *, on: bool) -> str:
        changes = card.current != on
        if changes and (held or card.busy):
            who = "pods hold it" if held else "processes run on it"
            return f"the MIG mode of {card.uuid} cannot be switched {'on' if on else 'off'} yet: {who}"
        last = self._attempts.get(card.uuid)
        if last and last.on == on and self._clock() < last.due:
            return last.why
        why = self._attempt(card, on=on)
        if not why:
            self._attempts.pop(card.uuid, None)
            log.info("MIG mode of %s is %s", card.uuid, "on" if on else "off")
            return ""
        pause = min(2 * last.pause, _LONGEST_PAUSE) if last and last.on == on else _FIRST_PAUSE
        self._attempts[card.uuid] = _Attempt(on, self._clock() + pause, pause, why)
        return why

    def _attempt(self, card: MigCard, *, on: bool) -> str:
        """Instances keep a card in MIG mode; those here are free."""
        try:
            if card.current and not on:
                for made in card.instances:
                    self._driver.destroy(card.uuid, made.instance)
            return self._driver.set_mode(card.uuid, on=on)
        except (MigRefused, RetryLater) as error:
            return str(error)

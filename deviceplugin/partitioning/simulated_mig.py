"""MIG of simulated cards: those of the same file that the agent reads them from."""

from pathlib import Path

from deviceplugin.cards.simulated_cards import SimulatedCards
from deviceplugin.mig.mig_driver import MigCard, NvmlMig
from deviceplugin.mig.simulated_nvml import SimulatedNvml
from mgpu.model.errors import BadObject, RetryLater

_SUFFIX = ".mig.json"


def state_file(cards: Path) -> Path:
    """Where the MIG state of the cards in this file stands: `cards.mig.json` beside `cards.yaml`."""
    return cards.with_suffix(_SUFFIX)


class SimulatedMig(NvmlMig):
    """cards: the file, read again when it changes."""

    def __init__(self, cards: Path, node: str) -> None:
        self._source = SimulatedCards(cards, node)
        self._simulated = SimulatedNvml(state_file(cards), ())
        super().__init__(self._simulated)

    def read(self) -> tuple[MigCard, ...]:
        try:
            self._simulated.cards = self._source.read()
        except BadObject as error:
            raise RetryLater(str(error)) from error
        return super().read()

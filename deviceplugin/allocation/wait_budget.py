"""How long all answers of an agent together may wait."""

from collections.abc import Callable

_PER_SECOND = 0.1


class Patience:
    """Seconds of waiting that come back over time.

    The kubelet asks for one pod at a time and does nothing else meanwhile, so each answer that waits holds up the whole
    node. Pods that will never get cards can be made as fast as a quota lets failed ones go.

    Args:
        most: seconds that may be waited at once; a tenth of a second comes back each second.
        clock: seconds, never set back.
    """

    def __init__(self, most: float, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._left, self._at = most, clock()

    def left(self) -> float:
        """Return how many seconds may be waited now."""
        now = self._clock()
        self._left, self._at = min(self._most, self._left + _PER_SECOND * (now - self._at)), now
        return max(0.0, self._left)

    def spend(self, seconds: float) -> None:
        """Count seconds that were waited."""
        self._left = self.left() - seconds

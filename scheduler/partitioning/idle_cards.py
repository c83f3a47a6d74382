"""Cards of MPS nodes whose slices nobody uses: they become whole again, since others cannot have a card that is cut.

A MIG card is for slices alone, cut or not, so its free slices keep nobody away.
"""

from collections.abc import Callable

from mgpu.model.slice_names import MPS
from scheduler.engine.partitioning.partitionable_node import Site


class IdleCards:
    """Not thread-safe. Kept in memory: after a restart every card has its whole time again. seconds: 0 keeps slices."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._since: dict[str, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._since))

    def see(self, site: Site) -> None:
        """The node as it is now. Slices that are made beside others on an idle card begin no new time."""
        found, name = site.found, site.node.name
        if not self._seconds or found.mode != MPS or not found.placed or found.planned is None:
            self.drop(name)  # of slices that no plan of mgpu's has made, the one who made them decides
            return
        cards = {s.card for s in site.made} - {s.card for s in site.used | found.by_others}
        before, now = self._since.pop(name, {}), self._clock()
        if cards:
            self._since[name] = {card: before.get(card, now) for card in sorted(cards)}

    def due(self, node: str, more: float = 0.0) -> frozenset[int]:
        """Return the cards that have been idle for long enough, and so many seconds more."""
        at = self._clock() - self._seconds - more
        return frozenset(card for card, since in self._since.get(node, {}).items() if since <= at)

    def drop(self, node: str) -> None:
        self._since.pop(node, None)

"""Plans that nodes have refused: the same is not tried again at once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from mgpu.model.slices import Slice
from scheduler.slices.site import Site

AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    """plan: its id. target: what it wanted; None: not known. state: the node's, when it was refused."""

    plan: int
    target: frozenset[Slice] | None
    state: object
    since: float


class Refusals:
    """Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[str, _Refusal] = {}

    def see(self, site: Site) -> None:
        """The node as it is now."""
        name, found = site.node.name, site.found
        if found.refused is None:
            self._of.pop(name, None)
            return
        plan, before = found.refused[0], self._of.get(name)
        if before is None or before.plan != plan:
            known = found.partitioning.plan == plan and found.planned is not None
            target = frozenset(found.planned or ()) if known else None
            self._of[name] = _Refusal(plan, target, _state(site), self._clock())

    def forbid(self, site: Site, slices: Collection[Slice]) -> bool:
        """Whether the node has refused just this, in the state in which it still is, within the last minute."""
        self.see(site)
        refusal = self._of.get(site.node.name)
        if refusal is None or refusal.target != frozenset(slices) or refusal.state != _state(site):
            return False
        return self._clock() < refusal.since + AGAIN_SECONDS


def _state(site: Site) -> object:
    return site.found.made, site.found.cards

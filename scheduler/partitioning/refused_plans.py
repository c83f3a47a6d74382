"""Plans that nodes have refused: the same is not tried again at once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mgpu.model.slice_names import Slice
from scheduler import metrics
from scheduler.engine.partitioning.partitionable_node import Site

AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Refused:
    """plan: the last one. state: the node's, when it refused. targets: what it refused in that state, and when."""

    plan: int
    state: object
    targets: dict[frozenset[Slice], float] = field(default_factory=dict)


class Refusals:
    """Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[str, _Refused] = {}

    def see(self, site: Site) -> None:
        """The node as it is now."""
        name, found = site.node.name, site.found
        if found.refused is None:
            self._of.pop(name, None)
            return
        plan, before = found.refused[0], self._of.get(name)
        if before is not None and before.plan == plan:
            return
        metrics.PLANS.labels("refused").inc()
        refused = before if before is not None and before.state == _state(site) else _Refused(plan, _state(site))
        refused.plan, self._of[name] = plan, refused
        now = self._clock()
        refused.targets = {target: at for target, at in refused.targets.items() if now < at + AGAIN_SECONDS}
        if found.partitioning.plan == plan and found.planned is not None:
            refused.targets[frozenset(found.planned)] = now

    def forbid(self, site: Site, slices: Collection[Slice]) -> bool:
        """Whether the node has refused just this, in the state in which it still is, within the last minute.

        All that it has refused since then counts: of two pods each would be planned for right after the other.
        """
        self.see(site)
        refused = self._of.get(site.node.name)
        if refused is None or refused.state != _state(site):
            return False
        at = refused.targets.get(frozenset(slices))
        return at is not None and self._clock() < at + AGAIN_SECONDS

    def drop(self, node: str) -> None:
        self._of.pop(node, None)


def _state(site: Site) -> object:
    return site.found.made, site.found.cards

"""What was decided for pods that have not appeared on their nodes yet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu.model.asks import Ask, Placement
from mgpu.model.requests import NOTHING, Room


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Cards reserved for a pod on a node until it appears there. annotations: what its Binding is to carry.

    needs: what the pod reserves of the node's cpu and memory. gpuid: for which it occupies a card.
    """

    uid: str
    namespace: str
    name: str
    node: str
    ask: Ask
    placement: Placement
    annotations: Mapping[str, str]
    needs: Room = NOTHING
    gpuid: str = ""


class Decisions:
    """Those in force, by the uid of the pod, each with the time until which the pod should have appeared.

    Not thread-safe. seconds: how long that is.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._known: dict[str, tuple[Decision, float]] = {}

    def get(self, uid: str) -> Decision | None:
        return self._known[uid][0] if uid in self._known else None

    def put(self, decision: Decision) -> None:
        """In place of the pod's last one, with its full time."""
        self._known[decision.uid] = (decision, self._clock() + self._seconds)

    def drop(self, uid: str) -> None:
        self._known.pop(uid, None)

    def made_within(self, seconds: float) -> bool:
        """Whether one was made, or given its full time again, in the last so many seconds."""
        since = self._clock() + self._seconds - seconds
        return any(until > since for _, until in self._known.values())

    def overdue(self) -> tuple[Decision, ...]:
        """Those whose pod has not appeared in time, oldest first."""
        now = self._clock()
        rows = sorted((until, d.uid, d) for d, until in self._known.values() if until <= now)
        return tuple(decision for *_, decision in rows)

"""Stores the pods in flight: those that kube-scheduler is binding, whose cards are not decided yet.

`decisions.in_flight_filter` says why, and what must hold. It adds the pods, and `Decider` ends their flights. They are
lost with the process and with the lead, which costs at most some refused bindings.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field

from mgpu.model.errors import RetryLater
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.effort_budgets import CallerGone

_FLIGHT_SECONDS = 2.0
"""The longest time for which a pod is in flight. A Binding follows within milliseconds unless a plugin delays it."""
_CALLER_CHECK_SECONDS = 0.02
"""The interval at which a waiting call checks whether its caller has given up."""
_MAX_PODS = 32
"""The most pods in flight. Beyond that, the oldest ones are no longer considered."""
_MAX_WAITING = 4
"""The most calls that wait. Each occupies a thread of the server. Further calls do not wait."""


@dataclass(slots=True)
class Flight:
    """A pod in flight.

    Attributes:
        nodes: The nodes of which its scheduler probably chooses one.
        until: When it is no longer considered.
        expected: By node, the cards that it will probably get there, or None if it does not fit. They are added when
            another pod may go to the same node. They are not reserved.
    """

    gpu_pod: GpuPod
    nodes: Set[str]
    until: float
    expected: dict[str, Reservation | None] = field(default_factory=dict)


class PodsInFlight:
    """The pods in flight. Thread-safe.

    Args:
        wait: Waits until a condition is notified, at most for a number of seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._changed = threading.Condition()
        self._flights: OrderedDict[str, Flight] = OrderedDict()
        self._waiting = 0
        self._ended = 0

    def begin(self, gpu_pod: GpuPod, nodes: Collection[str]) -> None:
        """Record that the scheduler probably binds the pod to one of these nodes."""
        flight = Flight(gpu_pod, frozenset(nodes), self._clock() + _FLIGHT_SECONDS)
        with self._changed:
            self._flights.pop(gpu_pod.pod.uid, None)
            self._flights[gpu_pod.pod.uid] = flight
            if len(self._flights) > _MAX_PODS:
                self._flights.popitem(last=False)

    def end(self, uid: str) -> None:
        """Record that the cards of the pod are decided or refused, or that it is scheduled again."""
        with self._changed:
            if self._flights.pop(uid, None) is not None:
                self._ended += 1
                self._changed.notify_all()

    def current(self) -> tuple[Flight, ...]:
        """Return the pods in flight, the oldest first."""
        now = self._clock()
        with self._changed:
            while self._flights and next(iter(self._flights.values())).until <= now:
                self._flights.popitem(last=False)
            return tuple(self._flights.values())

    def expected(self, uid: str, node: str) -> Reservation | None:
        """Return the cards that others expect this pod to get on this node, or None if they expect nothing."""
        with self._changed:
            flight = self._flights.get(uid)
        return flight.expected.get(node) if flight and flight.until > self._clock() else None

    @property
    def ended(self) -> int:
        """How many flights have ended by a decision."""
        return self._ended

    def wait(self, ended: int, until: float, gone: CallerGone) -> bool:
        """Wait until more than `ended` flights have ended, and return True. Return False if it must not go on waiting.

        Raises:
            RetryLater: The caller has given up.
        """
        with self._changed:
            if self._waiting >= _MAX_WAITING:
                return False
            self._waiting += 1
            try:
                while self._ended == ended:
                    left = until - self._clock()
                    if left <= 0:
                        return False
                    if gone():
                        raise RetryLater("the caller has given up, so it does not wait for other pods")
                    self._wait(self._changed, min(left, _CALLER_CHECK_SECONDS))
                return True
            finally:
                self._waiting -= 1

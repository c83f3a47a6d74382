"""Which pods the policies that learn count, and when: each once, and of those that only wait a bounded number."""

from collections import Counter

from mgpu.model.pods import Pod

WAITING = 100
"""Pods of a namespace that count before they have cards. Of the last 4,000 pods, which is what the policies remember,
these are 2.5 %. Whoever may create pods can create any number that wait for ever, or that name a node and fail there.
"""


class Arrivals:
    """Not thread-safe. A pod counts when it comes; beyond the allowance of its namespace, once it has cards.

    The allowance comes back with each pod of the namespace that gets cards, and not with those that are deleted.
    """

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._waiting: set[str] = set()

    def came(self, pod: Pod) -> bool:
        """Return whether the pod counts now, though it has no cards yet."""
        if self._used[pod.namespace] >= WAITING:
            return False
        self._used[pod.namespace] += 1
        self._waiting.add(pod.uid)
        return True

    def placed(self, pod: Pod) -> bool:
        """Return whether the pod, which has got its cards, counts now: it has not been counted before."""
        self._used[pod.namespace] -= 1
        if self._used[pod.namespace] <= 0:
            del self._used[pod.namespace]
        if pod.uid not in self._waiting:
            return True
        self._waiting.remove(pod.uid)
        return False

    def gone(self, uid: str) -> None:
        self._waiting.discard(uid)

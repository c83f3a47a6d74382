"""Pods that were deleted by force and still hold cards, by namespace.

A ResourceQuota stops counting a pod when its object goes, while its containers run on until the agent kills them. A
namespace that deletes pods by force again and again would hold many times its quota, so it gets no further cards before
what it deleted has ended. The nodes tell by UID alone what still runs, and are believed about pods of their own: else
one node could stop the pods of another one's tenants.
"""

from collections.abc import Callable
from typing import NamedTuple

WAIT_SECONDS = 300.0
"""Since the deletion. Agents kill such containers after 60 s. One that cannot, or a node that is lost and whose Device
still says so, must not stop a namespace for ever."""
_MOST_DELETED = 10_000
"""Deleted pods whose namespaces are remembered, the latest ones; each takes some 300 bytes."""


class _Deleted(NamedTuple):
    namespace: str
    name: str
    node: str
    at: float


class Remnants:
    """Not thread-safe. What is remembered is lost with the process: then the cards alone are held.

    Args:
        clock: seconds, never set back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deleted: dict[str, _Deleted] = {}
        self._held: dict[str, dict[str, _Deleted]] = {}

    def deleted(self, uid: str, namespace: str, name: str, node: str) -> None:
        """Remember a pod that was deleted before it had ended."""
        self._deleted.pop(uid, None)
        self._deleted[uid] = _Deleted(namespace, name, node, self._clock())
        if len(self._deleted) > _MOST_DELETED:
            oldest = next(iter(self._deleted))
            self.release(oldest)
            del self._deleted[oldest]

    def hold(self, uid: str, node: str) -> None:
        """This node says that this UID holds cards of it: a remnant, where it is one of these pods and ran there."""
        deleted = self._deleted.get(uid)
        if deleted and deleted.node == node:
            self._held.setdefault(deleted.namespace, {})[uid] = deleted

    def release(self, uid: str) -> None:
        """This UID holds nothing any more."""
        deleted = self._deleted.get(uid)
        held = self._held.get(deleted.namespace, {}) if deleted else {}
        if held.pop(uid, None) and deleted and not held:
            del self._held[deleted.namespace]

    def problem(self, namespace: str) -> str | None:
        """Return why pods of this namespace get no cards now; None: they do."""
        since = self._clock() - WAIT_SECONDS
        held = [deleted for deleted in self._held.get(namespace, {}).values() if deleted.at > since]
        if not held:
            return None
        first = min(held)
        others = f" and {len(held) - 1} more" if len(held) > 1 else ""
        return (
            f"pod {first.namespace}/{first.name}{others} was deleted by force and still runs on {first.node}; "
            "pods of its namespace get no cards before it has ended"
        )

"""Stores the remnants: pods that were deleted by force while their containers still run and hold cards.

A ResourceQuota counts a pod only while its object exists, but after a deletion by force its containers run until they
end or the agent kills them. `maxGPUIDsPerNamespace`, which counts the GPUIDs of existing MtgpuPods, has the same gap.
By deleting pods by force again and again, a user could make a namespace hold many times its quota. So pods and
MtgpuPods of the namespace get no more cards until its remnants have ended, but for `WAIT_SECONDS` at most.

Nodes report only the UIDs of remnants; their namespaces and names come from the deleted objects. A node is trusted only
about its own pods, because otherwise one node could block the tenants of another. `Holdings` uses `Remnants`, with the
lock of the cluster cache held.
"""

from collections.abc import Callable
from typing import NamedTuple

from scheduler.cluster.events import Publisher, RemnantsEnded

WAIT_SECONDS = 300.0
"""The longest time after its deletion for which a remnant keeps its namespace from getting cards. Agents kill the
containers of a remnant after 60 s. An agent that cannot kill them, or a node that is lost, must not block a namespace
for ever."""
_MAX_UNREPORTED = 10_000
"""The most deleted pods that are remembered until a node reports them. Each takes about 300 bytes, and the oldest are
forgotten first. A node reports a remnant within seconds of its deletion."""


class _Deleted(NamedTuple):
    """A pod that was deleted before it had ended. The fields are the arguments of `Remnants.deleted`, and the time."""

    namespace: str
    name: str
    node: str
    deleted_at: float
    gpuid: str | None = None


class Remnants:
    """Part of the ClusterCache, which holds its lock around every call.

    It publishes RemnantsEnded for each namespace whose last remnant has ended. A restart of the scheduler loses the
    remnants, but their cards stay held. The number of reported remnants is not limited, because otherwise a tenant
    could get cards again by deleting many small pods.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, events: Publisher, clock: Callable[[], float]) -> None:
        self._events = events
        self._clock = clock
        self._unreported: dict[str, _Deleted] = {}
        self._reported: dict[str, _Deleted] = {}
        self._uids: dict[str, set[str]] = {}  # By namespace, the UIDs of its reported pods.

    def deleted(self, uid: str, namespace: str, name: str, node: str, gpuid: str | None = None) -> None:
        """Remember a pod that was deleted before it had ended.

        Args:
            gpuid: The GPUID of its MtgpuPod, or None if the pod was not created for an MtgpuPod.
        """
        self.release(uid)
        self._remember(uid, _Deleted(namespace, name, node, self._clock(), gpuid))

    def hold(self, uid: str, node: str) -> None:
        """Record that the node reports this UID as holding cards. A pod that was deleted there becomes a remnant."""
        deleted = self._unreported.get(uid)
        if deleted and deleted.node == node:
            self._reported[uid] = self._unreported.pop(uid)
            self._uids.setdefault(deleted.namespace, set()).add(uid)

    def release(self, uid: str) -> None:
        """Record that this UID no longer holds cards."""
        deleted = self._reported.pop(uid, None)
        if deleted is None:
            return
        self._remember(uid, deleted)
        uids = self._uids[deleted.namespace]
        uids.discard(uid)
        if not uids:
            del self._uids[deleted.namespace]
            self._events.publish(RemnantsEnded(deleted.namespace))

    def gpuid(self, uid: str) -> str | None:
        """Return the GPUID of the remnant of an MtgpuPod, or None for any other UID."""
        deleted = self._reported.get(uid)
        return deleted.gpuid if deleted else None

    def problem(self, namespace: str) -> str | None:
        """Return the reason why pods of this namespace get no cards now, or None."""
        held = self._held(namespace)
        if not held:
            return None
        first = min(held)
        others = f" and {len(held) - 1} more" if len(held) > 1 else ""
        return (
            f"pod {first.namespace}/{first.name}{others} was deleted by force and still runs on {first.node}; "
            "pods of its namespace get no cards until it has ended"
        )

    def seconds(self, namespace: str) -> float:
        """Return after how many seconds the remnants of a namespace no longer block it; 0 if none block it now."""
        latest = max((deleted.deleted_at for deleted in self._held(namespace)), default=None)
        return 0.0 if latest is None else latest + WAIT_SECONDS - self._clock()

    def _held(self, namespace: str) -> list[_Deleted]:
        since = self._clock() - WAIT_SECONDS
        reported = (self._reported[uid] for uid in self._uids.get(namespace, ()))
        return [deleted for deleted in reported if deleted.deleted_at > since]

    def _remember(self, uid: str, deleted: _Deleted) -> None:
        self._unreported.pop(uid, None)
        self._unreported[uid] = deleted
        if len(self._unreported) > _MAX_UNREPORTED:
            del self._unreported[next(iter(self._unreported))]

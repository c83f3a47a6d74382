"""Pods that were deleted by force and still hold cards, by namespace.

A ResourceQuota stops counting a pod when its object goes, while its containers run on until the agent kills them. The
same is true of `maxGPUIDsPerNamespace`, which counts MtgpuPods. A namespace that deletes pods by force again and again
would hold many times what it may, so its pods and MtgpuPods get no further cards before the deleted pods have ended.
The nodes report only the UIDs of pods that still run, and are believed about pods of their own: otherwise one node
could stop the pods of another node's tenants.
"""

from collections.abc import Callable
from typing import NamedTuple

from scheduler.cluster.events import Publisher, RemnantsEnded

WAIT_SECONDS = 300.0
"""Since the deletion. Agents kill such containers after 60 s. One that cannot, or a node that is lost and whose Device
still says so, must not stop a namespace for ever."""
_MOST_DELETED = 10_000
"""Deleted pods whose namespaces are remembered although no node reports them, the latest ones; each takes some 300
bytes. A node reports a pod within seconds of its deletion."""


class _Deleted(NamedTuple):
    namespace: str
    name: str
    node: str
    at: float
    gpuid: str = ""


class Remnants:
    """Not thread-safe. What is remembered is lost with the process: then the cards alone are held.

    A deleted pod that a node reports is not forgotten for the sake of later ones. Otherwise a tenant could delete
    enough small pods to be given cards again.

    Args:
        events: Publishes RemnantsEnded with each namespace whose last remnant has ended.
        clock: Seconds, never set back.
    """

    def __init__(self, events: Publisher, clock: Callable[[], float]) -> None:
        self._events = events
        self._clock = clock
        self._unreported: dict[str, _Deleted] = {}
        self._reported: dict[str, _Deleted] = {}
        self._uids: dict[str, set[str]] = {}  # namespace → the pods of it that are reported

    def deleted(self, uid: str, namespace: str, name: str, node: str, gpuid: str = "") -> None:
        """Remember a pod that was deleted before it had ended. gpuid: that of its MtgpuPod."""
        self.release(uid)
        self._remember(uid, _Deleted(namespace, name, node, self._clock(), gpuid))

    def hold(self, uid: str, node: str) -> None:
        """This node reports that this UID holds cards of it: a remnant if it is one of these pods and ran there."""
        deleted = self._unreported.get(uid)
        if deleted and deleted.node == node:
            self._reported[uid] = self._unreported.pop(uid)
            self._uids.setdefault(deleted.namespace, set()).add(uid)

    def release(self, uid: str) -> None:
        """This UID holds nothing any more."""
        deleted = self._reported.pop(uid, None)
        if deleted is None:
            return
        self._remember(uid, deleted)
        uids = self._uids[deleted.namespace]
        uids.discard(uid)
        if not uids:
            del self._uids[deleted.namespace]
            self._events.publish(RemnantsEnded(deleted.namespace))

    def gpuid(self, uid: str) -> str:
        """Return the GPUID of a remnant that ran for an MtgpuPod, else ""."""
        deleted = self._reported.get(uid)
        return deleted.gpuid if deleted else ""

    def problem(self, namespace: str) -> str | None:
        """Return the reason why pods of this namespace get no cards now, or None if they do."""
        held = self._held(namespace)
        if not held:
            return None
        first = min(held)
        others = f" and {len(held) - 1} more" if len(held) > 1 else ""
        return (
            f"pod {first.namespace}/{first.name}{others} was deleted by force and still runs on {first.node}; "
            "pods of its namespace get no cards before it has ended"
        )

    def seconds(self, namespace: str) -> float:
        """Return the time after which its remnants no longer matter, whether they have ended or not; 0 for now."""
        latest = max((deleted.at for deleted in self._held(namespace)), default=None)
        return 0.0 if latest is None else latest + WAIT_SECONDS - self._clock()

    def _held(self, namespace: str) -> list[_Deleted]:
        since = self._clock() - WAIT_SECONDS
        found = (self._reported[uid] for uid in self._uids.get(namespace, ()))
        return [deleted for deleted in found if deleted.at > since]

    def _remember(self, uid: str, deleted: _Deleted) -> None:
        self._unreported.pop(uid, None)
        self._unreported[uid] = deleted
        if len(self._unreported) > _MOST_DELETED:
            del self._unreported[next(iter(self._unreported))]

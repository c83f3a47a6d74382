"""What a write brings with it: finalizers, graceful deletion of pods, namespaces that empty, definitions that serve."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from playground.apiserver.errors import forbidden
from playground.apiserver.kinds import Kind, Registry
from playground.apiserver.pods import grace_period
from playground.apiserver.storage import Item, Object, Storage

_CRDS = "customresourcedefinitions.apiextensions.k8s.io"
_KEPT = ("default", "kube-system", "kube-public", "kube-node-lease")


class Lifecycle:
    def __init__(self, storage: Storage, registry: Registry) -> None:
        self._storage, self._registry = storage, registry

    def created(self, kind: Kind, item: Item) -> None:
        if kind.resource == _CRDS:
            self._registry.define(item.obj)

    def changed(self, kind: Kind, old: Item, new: Object) -> Item:
        """Write an update; removes an object whose last finalizer went while it was being deleted. Raises Stale."""
        metadata = new["metadata"]
        done = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if done and not metadata.get("deletionGracePeriodSeconds"):
            return self._remove(kind, old, new)
        item = self._storage.replace(kind.resource, old, new)
        if kind.resource == _CRDS:
            self._registry.define(item.obj)
        return item

    def delete(
        self, kind: Kind, old: Item, grace: int | None, finalizers: Sequence[str] | None = None
    ) -> tuple[Item, bool]:
        """(the object as it is now, whether it is gone). `grace` in seconds, None for the pod's own. Raises Stale.

        finalizers: what it has from now on; None: what it has.
        """
        if kind.resource == "namespaces":
            return self._delete_namespace(kind, old)
        obj = _with_finalizers(old.obj, finalizers)
        seconds = grace_period(obj, grace) if kind.resource == "pods" else 0
        if "deletionTimestamp" in obj["metadata"]:
            pending = obj["metadata"].get("deletionGracePeriodSeconds") or 0
            if grace is None or seconds >= pending:
                return (old if obj == old.obj else self.changed(kind, old, obj)), False
        if kind.resource == "pods" or obj["metadata"].get("finalizers"):
            old = self._storage.replace(kind.resource, old, terminating(obj, seconds))
        if seconds or obj["metadata"].get("finalizers"):
            return old, False
        return self._remove(kind, old, old.obj), True

    def _remove(self, kind: Kind, old: Item, obj: Object) -> Item:
        gone = self._storage.remove(kind.resource, old, obj)
        if kind.resource == _CRDS:
            self._undefine(gone.obj)
        if namespace := gone.key[0]:
            self._finish_namespace(namespace)
        return gone

    def _undefine(self, crd: Object) -> None:
        resource = f"{crd['spec']['names']['plural']}.{crd['spec']['group']}"
        for item in list(self._storage.collection(resource).items.values()):
            self._storage.remove(resource, item)
        self._registry.undefine(crd)
        self._storage.drop(resource)

    def _delete_namespace(self, kind: Kind, old: Item) -> tuple[Item, bool]:
        name = old.key[1]
        if name in _KEPT:
            raise forbidden("", "namespaces", name, "this namespace may not be deleted")
        if "deletionTimestamp" not in old.obj["metadata"]:
            ending = terminating(old.obj, None) | {"status": {"phase": "Terminating"}}
            old = self._storage.replace(kind.resource, old, ending)
        for resource, collection in self._storage.collections().items():
            for item in [i for i in collection.items.values() if i.key[0] == name]:
                self.delete(self._registry.of(resource), item, None)
        return old, self._finish_namespace(name)

    def _finish_namespace(self, name: str) -> bool:
        """Remove a terminating namespace once nothing is in it."""
        item = self._storage.get("namespaces", "", name)
        if item is None or "deletionTimestamp" not in item.obj["metadata"]:
            return False
        if any(key[0] == name for c in self._storage.collections().values() for key in c.items):
            return False
        self._storage.remove("namespaces", item)
        return True


def _with_finalizers(obj: Object, finalizers: Sequence[str] | None) -> Object:
    """The object with these; None: as it is."""
    if finalizers is None or [*finalizers] == (obj["metadata"].get("finalizers") or []):
        return obj
    others = {k: v for k, v in obj["metadata"].items() if k != "finalizers"}
    return {**obj, "metadata": others | ({"finalizers": [*finalizers]} if finalizers else {})}


def terminating(obj: Object, seconds: int | None) -> Object:
    at = datetime.fromtimestamp(int(time.time()) + (seconds or 0), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {**obj["metadata"], "deletionTimestamp": at}
    if "deletionTimestamp" not in obj["metadata"] and "generation" in metadata:
        metadata["generation"] += 1
    if seconds is not None:
        metadata["deletionGracePeriodSeconds"] = seconds
    return {**obj, "metadata": metadata}

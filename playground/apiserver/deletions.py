"""Deletes objects, and carries out what follows from a write.

`Lifecycle` handles finalizers, grace periods, terminating namespaces, and the kinds of CustomResourceDefinitions.
`Deleter` handles DELETE requests and evictions. `api_server` and `subresources` call `Deleter`, and `writes` calls
`Lifecycle`.
"""

import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from playground.apiserver.admission_webhooks import Admission
from playground.apiserver.api_errors import conflict, forbidden, invalid, not_found, success, unsupported
from playground.apiserver.calls import Call, check_dry_run
from playground.apiserver.kinds import Kind, Registry
from playground.apiserver.objects import read_body
from playground.apiserver.pod_rules import grace_period
from playground.apiserver.reads import selected
from playground.apiserver.storage import Item, Object, Stale, Storage

_ATTEMPTS = 5
_CRDS = "customresourcedefinitions.apiextensions.k8s.io"
_PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
# kube-apiserver answers the deletion of these kinds with the object. For all other kinds, the answer is a Status once
# the object has been removed.
_RETURN_OBJECT = ("pods", "persistentvolumeclaims", "serviceaccounts", "resourcequotas", "services")
# The finalizer that each propagationPolicy adds. `playground.controller_manager` removes it, as the garbage collector
# of a real cluster does.
_FINALIZER = {"Orphan": "orphan", "Foreground": "foregroundDeletion", "Background": ""}


class Lifecycle:
    """Writes updates and deletions to the storage, and carries out what follows from them."""

    def __init__(self, storage: Storage, registry: Registry) -> None:
        self._storage = storage
        self._registry = registry

    def created(self, kind: Kind, item: Item) -> None:
        """Serve the kinds of the object if it is a new or changed CustomResourceDefinition."""
        if kind.resource == _CRDS:
            self._registry.define(item.obj)

    def changed(self, kind: Kind, old: Item, new: Object) -> Item:
        """Write an update. If the object is being deleted, remove it instead once nothing delays its deletion.

        A finalizer or a grace period delays the deletion. Raises Stale if `old` is no longer the stored object.
        """
        metadata = new["metadata"]
        done = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if done and not metadata.get("deletionGracePeriodSeconds"):
            return self._remove(kind, old, new)
        item = self._storage.replace(kind.resource, old, new)
        self.created(kind, item)
        return item

    def delete(
        self, kind: Kind, old: Item, grace: int | None, finalizers: Sequence[str] | None = None
    ) -> tuple[Item, bool]:
        """Remove an object, or mark it as being deleted if it has finalizers or a grace period.

        Args:
            grace: The seconds that the kubelet has to end a pod, or None for the pod's own grace period.
            finalizers: The new finalizers of the object, or None to leave them as they are.

        Returns:
            The object after the call, and whether it was removed.

        Raises:
            Stale: `old` is no longer the stored object.
        """
        if kind.resource == "namespaces":
            return self._delete_namespace(kind, old)
        obj = _with_finalizers(old.obj, finalizers)
        seconds = grace_period(obj, grace) if kind.resource == "pods" else 0
        if "deletionTimestamp" in obj["metadata"]:
            # A second deletion can only shorten the grace period.
            pending = obj["metadata"].get("deletionGracePeriodSeconds") or 0
            if grace is None or seconds >= pending:
                return (old if obj == old.obj else self.changed(kind, old, obj)), False
        if kind.resource == "pods" or obj["metadata"].get("finalizers"):
            old = self._storage.replace(kind.resource, old, terminating(obj, seconds))
        if seconds or obj["metadata"].get("finalizers"):
            return old, False
        return self._remove(kind, old, old.obj), True

    def _remove(self, kind: Kind, old: Item, obj: Object) -> Item:
        """Remove an object whose last state is `obj`.

        The kinds of a removed CustomResourceDefinition are removed with their objects. If the object was the last one
        in a terminating namespace, the namespace is removed too.
        """
        gone = self._storage.remove(kind.resource, old, obj)
        if kind.resource == _CRDS:
            self._undefine(gone.obj)
        if namespace := gone.key[0]:
            self._finish_namespace(namespace)
        return gone

    def _undefine(self, crd: Object) -> None:
        """Remove the objects and the kinds of a CustomResourceDefinition."""
        resource = f"{crd['spec']['names']['plural']}.{crd['spec']['group']}"
        for item in list(self._storage.collection(resource).items.values()):
            self._storage.remove(resource, item)
        self._registry.undefine(crd)
        self._storage.drop(resource)

    def _delete_namespace(self, kind: Kind, old: Item) -> tuple[Item, bool]:
        """Mark the namespace as terminating and delete everything in it, as the namespace controller does."""
        name = old.key[1]
        if name in _PERMANENT_NAMESPACES:
            raise forbidden("namespaces", name, "this namespace may not be deleted")
        if "deletionTimestamp" not in old.obj["metadata"]:
            ending = terminating(old.obj, None) | {"status": {"phase": "Terminating"}}
            old = self._storage.replace(kind.resource, old, ending)
        for resource, collection in self._storage.collections().items():
            for item in [i for i in collection.items.values() if i.key[0] == name]:
                self.delete(self._registry.of(resource), item, None)
        return old, self._finish_namespace(name)

    def _finish_namespace(self, name: str) -> bool:
        """Remove a namespace if it is terminating and empty. Return whether it was removed."""
        item = self._storage.get("namespaces", "", name)
        if item is None or "deletionTimestamp" not in item.obj["metadata"]:
            return False
        if any(key[0] == name for c in self._storage.collections().values() for key in c.items):
            return False
        self._storage.remove("namespaces", item)
        return True


class Deleter:
    """Checks the preconditions and the admission of deletions, then calls `Lifecycle.delete`."""

    def __init__(self, storage: Storage, admission: Admission, lifecycle: Lifecycle) -> None:
        self._storage = storage
        self._admission = admission
        self._lifecycle = lifecycle

    async def delete(self, call: Call) -> Item | Object:
        """Delete one object. Return the object or a Status, as kube-apiserver answers the request."""
        item, gone = await self._delete(call, _options(call))
        kind = call.path.kind
        if gone and kind.resource not in _RETURN_OBJECT:
            about = {"name": item.key[1], "kind": kind.plural, "uid": item.obj["metadata"]["uid"]}
            return success(about | ({"group": kind.group} if kind.group else {}))
        return item

    async def delete_collection(self, call: Call) -> list[Item]:
        """Delete the objects that the call's namespace and selectors choose, and return them."""
        options, deleted = _options(call), []
        for item in selected(self._storage, call):
            path = dataclasses.replace(call.path, namespace=item.key[0], name=item.key[1])
            deleted.append((await self._delete(dataclasses.replace(call, path=path), options))[0])
        return deleted

    async def _delete(self, call: Call, options: Object) -> tuple[Item, bool]:
        kind, path = call.path.kind, call.path
        dry_run = call.dry_run or check_dry_run(options.get("dryRun") or [])
        attrs = call.attributes("DELETE", path.name, dry_run=dry_run)
        for _ in range(_ATTEMPTS):
            old = self._storage.get(kind.resource, path.namespace, path.name)
            if old is None:
                raise not_found(kind.resource, path.name)
            _check_preconditions(kind, old.obj["metadata"], options.get("preconditions") or {})
            await self._admission.mutate(attrs, None, old.obj, lambda o: o)
            await self._admission.validate(attrs, None, old.obj)
            if dry_run:
                return (Item(terminating(old.obj, 0)) if kind.resource == "pods" else old), True
            try:
                finalizers = _finalizers(old.obj["metadata"], options)
                return self._lifecycle.delete(kind, old, options.get("gracePeriodSeconds"), finalizers)
            except Stale:
                continue
        raise conflict(kind.resource, path.name, "the object has been modified; please try again")


def terminating(obj: Object, seconds: int | None) -> Object:
    """Return the object, marked as being deleted.

    Args:
        seconds: The grace period of a pod, or 0 for another object. For a namespace it is None, because a namespace has
            no `deletionGracePeriodSeconds`.
    """
    at = datetime.fromtimestamp(int(time.time()) + (seconds or 0), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {**obj["metadata"], "deletionTimestamp": at}
    if "deletionTimestamp" not in obj["metadata"] and "generation" in metadata:
        metadata["generation"] += 1
    if seconds is not None:
        metadata["deletionGracePeriodSeconds"] = seconds
    return {**obj, "metadata": metadata}


def _with_finalizers(obj: Object, finalizers: Sequence[str] | None) -> Object:
    """Return the object with other finalizers, or unchanged if `finalizers` is None."""
    if finalizers is None or [*finalizers] == (obj["metadata"].get("finalizers") or []):
        return obj
    others = {k: v for k, v in obj["metadata"].items() if k != "finalizers"}
    return {**obj, "metadata": others | ({"finalizers": [*finalizers]} if finalizers else {})}


def _options(call: Call) -> Object:
    """Return the DeleteOptions in the body. If they have no grace period, they get that of the query, if there is one.

    Raises a 422 for an unknown `propagationPolicy`.
    """
    options = (read_body(call) if call.body.strip() else None) or {}
    if "gracePeriodSeconds" in call.query and "gracePeriodSeconds" not in options:
        options = {**options, "gracePeriodSeconds": call.number("gracePeriodSeconds")}
    policy = options.get("propagationPolicy")
    if policy and policy not in _FINALIZER:
        cause = unsupported("propagationPolicy", policy, (*sorted(_FINALIZER), "nil"))
        raise invalid("DeleteOptions.meta.k8s.io", "", [cause])
    return dict(options)


def _finalizers(metadata: Object, options: Object) -> list[str]:
    """Return the object's finalizers with the one that the options' propagation policy adds."""
    before = metadata.get("finalizers") or []
    if options.get("orphanDependents") is not None:
        wanted = _FINALIZER["Orphan"] if options["orphanDependents"] else ""
    elif options.get("propagationPolicy"):
        wanted = _FINALIZER[options["propagationPolicy"]]
    else:
        return before
    return [f for f in before if f not in _FINALIZER.values()] + ([wanted] if wanted else [])


def _check_preconditions(kind: Kind, metadata: Object, given: Object) -> None:
    """Raise a 409 if the UID or the resourceVersion of the object differs from that of the preconditions."""
    checks = (
        ("uid", "UID", "The object might have been deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "The object might have been modified"),
    )
    for field, word, hint in checks:
        if given.get(field) and given[field] != metadata[field]:
            mismatch = f"the {word} in the precondition ({given[field]}) does not match "
            mismatch += f"the {word} in record ({metadata[field]}). {hint}"
            raise conflict(kind.qualified_kind, metadata["name"], mismatch)

"""Delete one object, or those that a selector chooses."""

import dataclasses

from playground.apiserver.admission import Admission
from playground.apiserver.errors import conflict, invalid, not_found, success, unsupported
from playground.apiserver.kinds import Kind
from playground.apiserver.lifecycle import Lifecycle, terminating
from playground.apiserver.objects import read_body
from playground.apiserver.reads import selected
from playground.apiserver.routes import Call, check_dry_run
from playground.apiserver.storage import Item, Object, Stale, Storage
from playground.apiserver.writes import attributes

_ATTEMPTS = 5
_RETURN_OBJECT = ("pods", "persistentvolumeclaims", "serviceaccounts", "resourcequotas", "services")
_FINALIZER = {"Orphan": "orphan", "Foreground": "foregroundDeletion", "Background": ""}
"""What a policy puts on the object for the garbage collector, which is a client like any other."""


def _options(call: Call) -> Object:
    """DeleteOptions, from the body or else from the query."""
    options = (read_body(call) if call.body.strip() else None) or {}
    if "gracePeriodSeconds" in call.query and "gracePeriodSeconds" not in options:
        options = {**options, "gracePeriodSeconds": call.number("gracePeriodSeconds")}
    policy = options.get("propagationPolicy")
    if policy and policy not in _FINALIZER:
        cause = unsupported("propagationPolicy", policy, (*sorted(_FINALIZER), "nil"))
        raise invalid("meta.k8s.io", "DeleteOptions", "", [cause])
    return dict(options)


def _finalizers(metadata: Object, options: Object) -> list[str]:
    """Those that the object is deleted with: one of the garbage collector's where its dependents go first, or stay."""
    before = metadata.get("finalizers") or []
    if options.get("orphanDependents") is not None:
        wanted = _FINALIZER["Orphan"] if options["orphanDependents"] else ""
    elif options.get("propagationPolicy"):
        wanted = _FINALIZER[options["propagationPolicy"]]
    else:
        return before
    return [f for f in before if f not in _FINALIZER.values()] + ([wanted] if wanted else [])


class Deleter:
    def __init__(self, storage: Storage, admission: Admission, lifecycle: Lifecycle) -> None:
        self._storage, self._admission, self._lifecycle = storage, admission, lifecycle

    async def delete(self, call: Call) -> Item | Object:
        """The object, or a Status for kinds that are answered so when they are gone at once."""
        item, gone = await self._delete(call, _options(call))
        kind = call.path.kind
        if gone and kind.resource not in _RETURN_OBJECT:
            about = {"name": item.key[1], "kind": kind.plural, "uid": item.obj["metadata"]["uid"]}
            return success(about | ({"group": kind.group} if kind.group else {}))
        return item

    async def delete_collection(self, call: Call) -> list[Item]:
        options, deleted = _options(call), []
        for item in selected(self._storage, call):
            path = dataclasses.replace(call.path, namespace=item.key[0], name=item.key[1])
            deleted.append((await self._delete(dataclasses.replace(call, path=path), options))[0])
        return deleted

    async def _delete(self, call: Call, options: Object) -> tuple[Item, bool]:
        kind, path = call.path.kind, call.path
        dry_run = call.dry_run or check_dry_run(options.get("dryRun") or [])
        attrs = dataclasses.replace(attributes(call, "DELETE", "DeleteOptions", path.name), dry_run=dry_run)
        for _ in range(_ATTEMPTS):
            old = self._storage.get(kind.resource, path.namespace, path.name)
            if old is None:
                raise not_found(kind.group, kind.plural, path.name)
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
        raise conflict(kind.group, kind.plural, path.name, "the object has been modified; please try again")


def _check_preconditions(kind: Kind, metadata: Object, given: Object) -> None:
    checks = (
        ("uid", "UID", "The object might have been deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "The object might have been modified"),
    )
    for field, word, hint in checks:
        if given.get(field) and given[field] != metadata[field]:
            why = (
                f"the {word} in the precondition ({given[field]}) does not match "
                f"the {word} in record ({metadata[field]}). {hint}"
            )
            raise conflict(kind.group, kind.kind, metadata["name"], why)

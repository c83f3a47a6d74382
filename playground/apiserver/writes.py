"""Create, update, patch: admission between reading and writing, and the write refused when the object changed since."""

from collections.abc import Callable
from typing import Any

import orjson

from playground.apiserver import patches, priorities, quotas
from playground.apiserver.admission import Admission
from playground.apiserver.applied import Applied, removal
from playground.apiserver.attributes import Attributes
from playground.apiserver.errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    conflict,
    field_immutable,
    forbidden,
    invalid,
    invalid_value,
    not_found,
    plain,
    required,
)
from playground.apiserver.kinds import Kind
from playground.apiserver.lifecycle import Lifecycle
from playground.apiserver.objects import (
    carried_over,
    complete,
    create_problems,
    needs_version,
    normalise,
    read_body,
    update_problems,
)
from playground.apiserver.routes import Call, wrong_kind
from playground.apiserver.schema import field_validation
from playground.apiserver.storage import Exists, Item, Object, Stale, Storage

_ATTEMPTS = 5
# Taken from a new object before any webhook sees it.
_WIPED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink")
_MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def attributes(call: Call, operation: str, options: str, name: str, *, subresource: str = "") -> Attributes:
    """What admission is told about a request."""
    kind = call.path.kind
    return Attributes(
        operation=operation,
        group=kind.group,
        version=kind.version,
        plural=kind.plural,
        subresource=subresource,
        kind=(kind.group, kind.version, kind.kind),
        namespace=call.path.namespace if kind.namespaced else name if kind.plural == "namespaces" else "",
        name=name,
        user=call.user,
        dry_run=call.dry_run,
        namespaced=kind.namespaced,
        options={"kind": options, "apiVersion": "meta.k8s.io/v1"} | ({"dryRun": ["All"]} if call.dry_run else {}),
        warnings=call.warnings,
    )


class Writer:
    def __init__(self, storage: Storage, admission: Admission, lifecycle: Lifecycle) -> None:
        self._storage, self._admission, self._lifecycle = storage, admission, lifecycle
        self._applied = Applied()

    async def create(self, call: Call) -> Item:
        kind, body = call.path.kind, read_body(call)
        if not isinstance(body, dict):
            raise bad_request(f"the body is no {kind.kind}")
        if wrong := wrong_kind(call.path, body.get("apiVersion") or "", body.get("kind") or ""):
            raise wrong
        return await self.create_object(call, body)

    async def create_object(self, call: Call, body: Object) -> Item:
        """Admission, validation and the write of a new object; only the first two in a dry run."""
        kind = call.path.kind
        obj = self._decoded(call, kind, body)
        metadata = obj["metadata"]
        if kind.namespaced:
            self._check_namespace(call, metadata)
        else:
            metadata.pop("namespace", None)
        for field in _WIPED:
            metadata.pop(field, None)
        if metadata.get("resourceVersion"):
            raise plain(500, "resourceVersion should not be set on objects to be created")
        if kind.resource == "pods":
            priorities.resolve(self._storage, obj)
        attrs = attributes(call, "CREATE", "CreateOptions", metadata.get("name") or "")
        sent = obj
        obj = await self._admission.mutate(attrs, obj, None, lambda o: normalise(kind, o)[0])
        if kind.resource == "pods" and obj is not sent:
            # The real server calls its own plugins again where a webhook changed the object.
            priorities.resolve(self._storage, obj)
        complete(kind, obj)
        name = obj["metadata"].get("name") or ""
        self._refuse(kind, name, create_problems(kind, obj))
        await self._admission.validate(attributes(call, "CREATE", "CreateOptions", name), obj, None)
        if kind.resource == "pods":
            quotas.check(self._storage, obj)
        if call.dry_run:
            if self._storage.get(kind.resource, call.path.namespace, name):
                raise already_exists(kind.group, kind.plural, name)
            return Item(obj)
        try:
            item = self._storage.create(kind.resource, obj)
        except Exists as problem:
            raise already_exists(kind.group, kind.plural, name) from problem
        self._lifecycle.created(kind, item)
        return item

    async def update(self, call: Call) -> Item:
        """PUT, also of `status`."""
        kind, body = call.path.kind, read_body(call)
        if not isinstance(body, dict):
            raise bad_request(f"the body is no {kind.kind}")
        if wrong := wrong_kind(call.path, body.get("apiVersion") or "", body.get("kind") or ""):
            raise wrong
        obj = self._decoded(call, kind, body)
        if not obj["metadata"].get("resourceVersion") and needs_version(kind):
            cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
            raise invalid(kind.group, kind.plural, call.path.name, [cause])
        return await self.change(call, lambda _: obj)

    async def patch(self, call: Call) -> tuple[Item, bool]:
        """(the object, whether it is new): only an apply creates one."""
        kind = call.path.kind
        media, patch = patches.parse(call.content_type, call.body, custom=kind.custom)
        if media == patches.APPLY:
            return await self._apply(call, patch)
        return await self.change(call, lambda old: self._patched(call, media, patch, old)), False

    async def _apply(self, call: Call, patch: Object) -> tuple[Item, bool]:
        kind, path, manager = call.path.kind, call.path, call.query.get("fieldManager", "")
        if not manager:
            cause = required("fieldManager", "is required for apply patch")
            raise invalid("meta.k8s.io", "PatchOptions", "", [cause])
        found = self._storage.get(kind.resource, path.namespace, path.name)
        if found is None and path.subresource:
            raise not_found(kind.group, kind.plural, path.name)
        if found is None:
            patch.setdefault("metadata", {})["name"] = path.name
            item = await self.create_object(call, patch)
        else:

            def applied(old: Object) -> Object:
                before = self._applied.before(old["metadata"]["uid"], manager)
                gone = removal(before, patch, lists=not kind.custom)
                without = patches.apply(patches.STRATEGIC, gone, old, custom=kind.custom)
                return self._patched(call, patches.APPLY, patch, without)

            item = await self.change(call, applied)
        if not call.dry_run:
            self._applied.keep(item.obj["metadata"]["uid"], manager, patch)
        return item, found is None

    def _patched(self, call: Call, media: str, patch: Any, old: Object) -> Object:
        """Raises a 422 for a patch that makes something else of the object than its kind allows."""
        kind = call.path.kind
        result = patches.apply(media, patch, old, custom=kind.custom)
        try:
            obj = self._decoded(call, kind, result)
        except ApiError as problem:
            shown = orjson.dumps(result).decode()
            raise invalid("", "", "", [invalid_value("patch", shown, problem.message)]) from problem
        uid = obj["metadata"].get("uid")
        if uid != old["metadata"]["uid"]:
            raise invalid(kind.group, kind.kind, call.path.name, [field_immutable("metadata.uid", uid)])
        return obj

    async def change(self, call: Call, make: Callable[[Object], Object]) -> Item:
        """Write what `make` makes of the stored object; it is made again when another write came between."""
        kind, path = call.path.kind, call.path
        attrs = attributes(call, "UPDATE", "UpdateOptions", path.name, subresource=path.subresource)
        for _ in range(_ATTEMPTS):
            old = self._existing(call)
            new = carried_over(kind, path.subresource, make(old.obj), old.obj)
            new = await self._admission.mutate(attrs, new, old.obj, lambda o: normalise(kind, o)[0])
            new = carried_over(kind, path.subresource, new, old.obj)
            self._refuse(kind, path.name, update_problems(kind, path.subresource, new, old.obj))
            await self._admission.validate(attrs, new, old.obj)
            if new == old.obj:
                return old
            if call.dry_run:
                return Item(new)
            try:
                return self._lifecycle.changed(kind, old, new)
            except Stale:
                continue
        raise conflict(kind.group, kind.plural, path.name, _MODIFIED)

    def _existing(self, call: Call) -> Item:
        path = call.path
        item = self._storage.get(path.kind.resource, path.namespace, path.name)
        if item is None:
            raise not_found(path.kind.group, path.kind.plural, path.name)
        return item

    @staticmethod
    def _decoded(call: Call, kind: Kind, body: Object) -> Object:
        obj, unknown = normalise(kind, body)
        field_validation(call.field_validation, kind.kind, kind.version, unknown, call.warnings.append)
        return obj

    def _check_namespace(self, call: Call, metadata: Object) -> None:
        namespace, kind = call.path.namespace, call.path.kind
        if metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        found = self._storage.get("namespaces", "", namespace)
        if found is None:
            raise not_found("", "namespaces", namespace)
        if "deletionTimestamp" in found.obj["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
            cause["field"] = "metadata.namespace"
            raise forbidden(kind.group, kind.plural, metadata.get("name") or "", why, [cause])

    @staticmethod
    def _refuse(kind: Kind, name: str, problems: list[Cause]) -> None:
        if problems:
            raise invalid(kind.group, kind.kind, name, problems)

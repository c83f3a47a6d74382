"""Creates, updates and patches objects: each write passes admission before it is stored.

`api_server` calls `Writer`. An update that contains an outdated resourceVersion is refused. Any other update starts
again if the object changes during the admission.
"""

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from playground.apiserver import claim_authorization, claim_rules, patches, pod_rules
from playground.apiserver.admission_webhooks import Admission
from playground.apiserver.api_errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    invalid_value,
    not_found,
    plain,
    required,
)
from playground.apiserver.authorization import Authorizer, Request
from playground.apiserver.calls import Call, check_kind
from playground.apiserver.deletions import Lifecycle
from playground.apiserver.kinds import Kind
from playground.apiserver.object_decoding import check_unknown
from playground.apiserver.objects import (
    carried_over,
    complete,
    create_problems,
    needs_version,
    normalise,
    read_body,
    update_problems,
)
from playground.apiserver.reads import existing
from playground.apiserver.storage import Exists, Item, Object, Stale, Storage

_ATTEMPTS = 5
# The metadata fields that are removed from a new object before webhooks get it.
_SERVER_OWNED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink")
_MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


class Writer:
    """Writes objects through admission.

    For server-side apply, it stores in memory what each field manager has applied to each object.
    """

    def __init__(self, storage: Storage, admission: Admission, lifecycle: Lifecycle, authorizer: Authorizer) -> None:
        self._storage = storage
        self._authorizer = authorizer
        self._admission = admission
        self._lifecycle = lifecycle
        self._applied: dict[tuple[str, str], Object] = {}

    async def create(self, call: Call) -> Item:
        """Handle POST of a new object."""
        return await self._create(call, check_kind(call.path.kind, read_body(call)))

    async def update(self, call: Call) -> Item:
        """Handle PUT of an object or of its status."""
        kind = call.path.kind
        obj = self._decoded(call, check_kind(kind, read_body(call)))
        if not obj["metadata"].get("resourceVersion") and needs_version(kind):
            cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
            raise invalid(kind.resource, call.path.name, [cause])
        return await self._change(call, "update", lambda _: obj)

    async def patch(self, call: Call) -> tuple[Item, bool]:
        """Handle PATCH. Return the object, and whether it is new. Only a server-side apply can create an object."""
        kind = call.path.kind
        media, patch = patches.parse(call.content_type, call.body, custom=kind.custom)
        if media == patches.APPLY:
            return await self._apply(call, patch)
        return await self._change(call, "patch", lambda old: self._patched(call, media, patch, old)), False

    async def _create(self, call: Call, body: Object) -> Item:
        """Admit, validate and store a new object. A dry run stores nothing."""
        kind = call.path.kind
        obj = self._decoded(call, body)
        metadata = obj["metadata"]
        if kind.namespaced:
            self._check_namespace(call, metadata)
        else:
            metadata.pop("namespace", None)
        for field in _SERVER_OWNED:
            metadata.pop(field, None)
        if metadata.get("resourceVersion"):
            raise plain(500, "resourceVersion should not be set on objects to be created")
        obj = await self._admitted(call, obj)
        name = obj["metadata"].get("name") or ""
        if call.dry_run:
            if self._storage.get(kind.resource, call.path.namespace, name):
                raise already_exists(kind.resource, name)
            return Item(obj)
        try:
            item = self._storage.create(kind.resource, obj)
        except Exists as problem:
            raise already_exists(kind.resource, name) from problem
        self._lifecycle.created(kind, item)
        return item

    async def _admitted(self, call: Call, obj: Object) -> Object:
        """Return a new object after admission and validation.

        As in kube-apiserver, the order is: built-in plugins, mutating webhooks, completion, validation, validating
        webhooks, quotas.
        """
        kind = call.path.kind
        if kind.resource == "pods":
            pod_rules.resolve_priority(self._storage, obj)
        attributes = call.attributes("CREATE", obj["metadata"].get("name") or "")
        mutated = await self._admission.mutate(attributes, obj, None, lambda o: normalise(kind, o)[0])
        if kind.resource == "pods" and mutated is not obj:
            # kube-apiserver calls its built-in plugins again if a webhook has changed the object.
            pod_rules.resolve_priority(self._storage, mutated)
        complete(kind, mutated)
        name = mutated["metadata"].get("name") or ""
        _refuse(kind, name, [*create_problems(kind, mutated), *self._admin_problems(call, mutated)])
        await self._admission.validate(call.attributes("CREATE", name), mutated, None)
        if kind.resource == "pods":
            pod_rules.check_quotas(self._storage, mutated)
        return dict(mutated)

    async def _apply(self, call: Call, patch: Object) -> tuple[Item, bool]:
        """Handle a server-side apply. It removes the fields that the manager applied before and now leaves out."""
        kind, path = call.path.kind, call.path
        manager = call.query.get("fieldManager", "")
        if not manager:
            cause = required("fieldManager", "is required for apply patch")
            raise invalid("PatchOptions.meta.k8s.io", "", [cause])
        found = self._storage.get(kind.resource, path.namespace, path.name)
        if found is None and path.subresource:
            raise not_found(kind.resource, path.name)

        def applied(old: Object) -> Object:
            before = self._applied.get((old["metadata"]["uid"], manager), {})
            gone = patches.removal(before, patch, lists=not kind.custom)
            without = patches.apply(patches.STRATEGIC, gone, old, custom=kind.custom)
            return self._patched(call, patches.APPLY, patch, without)

        if found is None:
            patch.setdefault("metadata", {})["name"] = path.name
            item = await self._create(call, patch)
        else:
            item = await self._change(call, "patch", applied)
        if not call.dry_run:
            self._applied[item.obj["metadata"]["uid"], manager] = patch
        return item, found is None

    def _patched(self, call: Call, media: str, patch: Any, old: Object) -> Object:
        """Return the patched object. Raises a 422 if the result is not an object of this kind or has another UID."""
        kind = call.path.kind
        result = patches.apply(media, patch, old, custom=kind.custom)
        try:
            obj = self._decoded(call, result)
        except ApiError as problem:
            shown = orjson.dumps(result).decode()
            raise invalid("", "", [invalid_value("patch", shown, problem.message)]) from problem
        uid = obj["metadata"].get("uid")
        if uid != old["metadata"]["uid"]:
            cause = invalid_value("metadata.uid", uid, "field is immutable")
            raise invalid(kind.qualified_kind, call.path.name, [cause])
        return obj

    async def _change(self, call: Call, verb: str, make: Callable[[Object], Object]) -> Item:
        """Write the object that `make` returns for the stored object.

        If the stored object changes during admission, start again. Raises a 409 after `_ATTEMPTS` attempts.

        Args:
            verb: The verb of the request, which is `update` or `patch`.
        """
        kind, path = call.path.kind, call.path
        attributes = call.attributes("UPDATE", path.name, subresource=path.subresource)
        for _ in range(_ATTEMPTS):
            old = existing(self._storage, call)
            new = carried_over(kind, path.subresource, make(old.obj), old.obj)
            new = await self._admission.mutate(attributes, new, old.obj, lambda o: normalise(kind, o)[0])
            new = carried_over(kind, path.subresource, new, old.obj)
            lacking = self._lacking_rights(call, verb, new, old.obj)
            _refuse(kind, path.name, [*lacking, *update_problems(kind, path.subresource, new, old.obj)])
            await self._admission.validate(attributes, new, old.obj)
            if new == old.obj:
                return old
            if call.dry_run:
                return Item(new)
            try:
                return self._lifecycle.changed(kind, old, new)
            except Stale:
                continue
        raise conflict(kind.resource, path.name, _MODIFIED)

    def _admin_problems(self, call: Call, obj: Object) -> Iterator[Cause]:
        namespace = self._storage.get("namespaces", "", call.path.namespace)
        labels = (namespace.obj["metadata"].get("labels") or {}) if namespace else {}
        return claim_rules.admin_problems(call.path.kind, obj, labels)

    def _lacking_rights(self, call: Call, verb: str, new: Object, old: Object) -> list[Cause]:
        """Return the causes for rights that a change of the status of a ResourceClaim needs and the user lacks."""
        kind, path, user = call.path.kind, call.path, call.user
        if (kind.resource, path.subresource) != ("resourceclaims.resource.k8s.io", "status"):
            return []
        request = Request(user.name, verb, kind.group, "resourceclaims/status", path.namespace, path.name)
        return list(claim_authorization.problems(self._authorizer.permits, user, request, new, old))

    @staticmethod
    def _decoded(call: Call, body: Object) -> Object:
        """Return the object that a body describes. `fieldValidation` determines how unknown fields are handled."""
        kind = call.path.kind
        obj, unknown = normalise(kind, body)
        check_unknown(call.field_validation, kind.kind, kind.version, unknown, call.warnings.append)
        return obj

    def _check_namespace(self, call: Call, metadata: Object) -> None:
        """Set the namespace of a new object to the namespace of the path.

        Raises ApiError if the object names another namespace, or if the namespace does not exist or is terminating.
        """
        namespace = call.path.namespace
        if metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        found = self._storage.get("namespaces", "", namespace)
        if found is None:
            raise not_found("namespaces", namespace)
        if "deletionTimestamp" in found.obj["metadata"]:
            reason = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
            cause["field"] = "metadata.namespace"
            raise forbidden(call.path.kind.resource, metadata.get("name") or "", reason, [cause])


def _refuse(kind: Kind, name: str, problems: list[Cause]) -> None:
    if problems:
        raise invalid(kind.qualified_kind, name, problems)

"""Applies patches: JSON patch (RFC 6902), merge patch (RFC 7396), strategic merge patch, and server-side apply.

`writes` applies the patches of requests, and `admission_webhooks` those of webhooks. Server-side apply works without
field ownership: there are no `managedFields`, and managers never conflict. If a manager applies an object again and
leaves out fields that it applied before, these fields are removed.
"""

from typing import Any

import jsonpatch
import jsonpointer
import orjson
import yaml

from playground.apiserver.api_errors import ApiError, bad_request, plain
from playground.apiserver.storage import Object

JSON = "application/json-patch+json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
_REFUSED = "the server rejected our request due to an error in our request"
_MAX_OPERATIONS = 10_000
# The key that identifies the items of a list, by the name of the list's field. The keys are those of
# x-kubernetes-patch-merge-key in the OpenAPI document of Kubernetes.
_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "imagePullSecrets": "name", "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey", "schedulingGates": "name", "resourceClaims": "name", "podIPs": "ip",
    "conditions": "type", "addresses": "type", "ownerReferences": "uid", "webhooks": "name", "matchConditions": "name",
    "secrets": "name", "resourceClaimStatuses": "name", "reservedFor": "uid",
}  # fmt: skip
# The lists of plain values that a strategic merge patch adds to. It replaces all other lists of plain values.
_PRIMITIVES = frozenset(("finalizers", "podCIDRs"))
_DELETE = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"
_RETAIN = "$retainKeys"


def parse(content_type: str, body: bytes, *, custom: bool) -> tuple[str, Any]:
    """Return the media type and the patch of a request.

    Raises a 400 for a malformed patch, a 413 for too many operations, and a 415 for another media type.

    Args:
        custom: Whether the request is for a custom resource. Custom resources do not support strategic merge patches.
    """
    media = content_type.partition(";")[0].strip()
    accepted = [JSON, MERGE, APPLY] if custom else [JSON, MERGE, STRATEGIC, APPLY]
    if media not in accepted and media != "application/apply-patch+cbor":
        raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
    try:
        patch = yaml.load(body, yaml.CSafeLoader) if media == APPLY else orjson.loads(body)
    except (orjson.JSONDecodeError, yaml.YAMLError) as problem:
        raise bad_request(f"error decoding patch: {problem}") from problem
    if not isinstance(patch, list if media == JSON else dict):
        raise bad_request("error decoding patch: json: cannot unmarshal into a patch of this kind")
    if media == JSON and len(patch) > _MAX_OPERATIONS:
        too_many = f"The allowed maximum operations in a JSON patch is {_MAX_OPERATIONS}"
        raise ApiError(413, "RequestEntityTooLarge", too_many)
    return media, patch


def apply(media: str, patch: Any, target: Object, *, custom: bool) -> Object:
    """Return a patched copy of `target`.

    Raises a 422 if a JSON patch does not apply to the object, and the errors of `strategic_merge`.

    Args:
        media: The media type of the patch, as `parse` returns it.
        custom: Whether the object is a custom resource, for which server-side apply merges like a merge patch.
    """
    if media == MERGE or (media in (STRATEGIC, APPLY) and custom):
        return dict(merge(target, patch))
    if media in (STRATEGIC, APPLY):
        return strategic_merge(target, patch)
    try:
        return json_patch(target, patch)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as problem:
        raise ApiError(422, "Invalid", _REFUSED, {}) from problem


def _copy(value: Any) -> Any:
    """Return a copy of a JSON value, in a fraction of the time of `copy.deepcopy`."""
    return orjson.loads(orjson.dumps(value))


def merge(target: Any, patch: Any) -> Any:
    """Return a copy of `target` with a JSON merge patch (RFC 7396) applied."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def json_patch(target: Object, operations: list[Object]) -> Object:
    """Return a copy of `target` with a JSON patch (RFC 6902) applied.

    As in kube-apiserver, `replace` adds a member that is missing. Raises jsonpatch.JsonPatchException or
    jsonpointer.JsonPointerException if the patch does not apply.
    """
    result: Object = _copy(target)
    for operation in jsonpatch.JsonPatch(operations).patch:
        if operation["op"] == "replace" and isinstance(_parent(result, operation["path"]), dict):
            operation = {**operation, "op": "add"}
        result = jsonpatch.JsonPatch([operation]).apply(result, in_place=True)
    return result


def _parent(target: Object, path: str) -> Any:
    return jsonpointer.resolve_pointer(target, path.rpartition("/")[0], None)


def merge_key(field: str, items: list[Any]) -> str | None:
    """Return the key that identifies the items of a list, or None for a list that is replaced as a whole."""
    if field == "ports":
        # The ports of a container have the key containerPort, and the ports of a Service have the key port.
        return "containerPort" if any("containerPort" in i for i in items if isinstance(i, dict)) else "port"
    return _KEYS.get(field)


def strategic_merge(target: Object, patch: Object) -> Object:
    """Return a copy of `target` with a strategic merge patch applied.

    Raises a 400 for an unknown directive and, as kube-apiserver does, a 500 for a list item without its key.
    """
    directive = patch.get("$patch")
    if directive == "replace":
        return {k: _copy(v) for k, v in patch.items() if k != "$patch"}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"Unknown patch type found: {directive}")
    result = dict(target)
    if (retain := patch.get(_RETAIN)) is not None:
        result = {k: v for k, v in result.items() if k in retain}
    for key, value in patch.items():
        if key.startswith(_DELETE):
            field = key.removeprefix(_DELETE)
            result[field] = [v for v in result.get(field) or [] if v not in value]
        elif not key.startswith("$"):
            _merge_field(result, key, value, patch.get(_ORDER + key))
    for key in [k for k in patch if k.startswith(_ORDER) and k.removeprefix(_ORDER) not in patch]:
        field = key.removeprefix(_ORDER)
        if isinstance(result.get(field), list):
            result[field] = _ordered(result[field], patch[key], result[field], merge_key(field, result[field]))
    return result


def _merge_field(result: Object, key: str, value: Any, order: list[Any] | None) -> None:
    current = result.get(key)
    if value is None:
        result.pop(key, None)
    elif isinstance(value, dict):
        result[key] = strategic_merge(current if isinstance(current, dict) else {}, value)
    elif isinstance(value, list) and key in _PRIMITIVES:
        merged = [*(current or []), *(v for v in value if v not in (current or []))]
        result[key] = _ordered(merged, order or value, current or [], None)
    elif isinstance(value, list) and (ident := merge_key(key, [*(current or []), *value])):
        result[key] = _merge_list(current or [], value, ident, order)
    else:
        result[key] = _copy(value)


def _merge_list(current: list[Any], patch: list[Any], key: str, order: list[Any] | None) -> list[Any]:
    if any(item.get("$patch") == "replace" for item in patch):
        return [_copy(i) for i in patch if "$patch" not in i]
    items = list(current)
    for change in patch:
        if key not in change:
            shown = " ".join(f"{k}:{v}" for k, v in sorted(change.items()))
            raise plain(500, f"map: map[{shown}] does not contain declared merge key: {key}")
        at = next((i for i, item in enumerate(items) if item.get(key) == change[key]), None)
        if change.get("$patch") == "delete":
            items = [item for item in items if item.get(key) != change[key]]
        elif at is None:
            items.append(strategic_merge({}, change))
        else:
            items[at] = strategic_merge(items[at], change)
    wanted = order or [c for c in patch if c.get("$patch") != "delete"]
    return _ordered(items, wanted, current, key)


def _ordered(items: list[Any], order: list[Any], server: list[Any], key: str | None) -> list[Any]:
    """Return the items of a patched list in their final order.

    The items in `order` get that order. Each other item stays before the next item of `order` if it preceded that item
    in `server`.

    Args:
        order: The order that the patch requests.
        server: The list before the patch.
        key: The key that identifies the items, or None for a list of plain values.
    """

    def ident(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    wanted = [ident(o) for o in order]
    was = {ident(item): i for i, item in reversed(list(enumerate(server)))}
    named = sorted((i for i in items if ident(i) in wanted), key=lambda i: wanted.index(ident(i)))
    others = [i for i in items if ident(i) not in wanted]
    result: list[Any] = []
    while named and others:
        left, right = was.get(ident(others[0])), was.get(ident(named[0]))
        first = others if left is not None and right is not None and left < right else named
        result.append(first.pop(0))
    return result + named + others


def removal(before: Object, after: Object, *, lists: bool) -> Object:
    """Return the patch that removes the fields that `before` sets and `after` does not.

    Args:
        lists: Whether to remove single items of lists whose items have a key. If not, the patch does not contain lists
            that `after` has too.
    """
    patch: Object = {}
    for name, value in before.items():
        if name in ("apiVersion", "kind"):
            continue
        wanted = after.get(name)
        if name not in after:
            patch[name] = None
        elif isinstance(value, dict) and isinstance(wanted, dict):
            patch[name] = removal(value, wanted, lists=lists)
        elif lists and isinstance(value, list) and isinstance(wanted, list) and (key := merge_key(name, value)):
            patch[name] = _removed_items(value, wanted, key)
    return {name: value for name, value in patch.items() if value not in ({}, [])}


def _removed_items(before: list[Any], after: list[Any], key: str) -> list[Object]:
    kept = {item.get(key): item for item in after}
    patches = []
    for item in before:
        ident = item.get(key)
        if ident not in kept:
            patches.append({key: ident, "$patch": "delete"})
        elif inner := removal(item, kept[ident], lists=True):
            patches.append({key: ident, **inner})
    return patches

"""Kubernetes' strategic merge patch: lists of named things are merged by their key, with `$patch` and its relatives."""

import copy
from typing import Any

from playground.apiserver.errors import bad_request, plain
from playground.apiserver.storage import Object

_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "imagePullSecrets": "name", "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey", "schedulingGates": "name", "resourceClaims": "name", "podIPs": "ip",
    "conditions": "type", "addresses": "type", "ownerReferences": "uid", "webhooks": "name", "matchConditions": "name",
    "secrets": "name", "resourceClaimStatuses": "name",
}  # fmt: skip
_PRIMITIVES = frozenset(("finalizers", "podCIDRs"))
_DELETE, _ORDER, _RETAIN = "$deleteFromPrimitiveList/", "$setElementOrder/", "$retainKeys"


def merge_key(field: str, items: list[Any]) -> str | None:
    """What identifies the items of a list; None for a list that is replaced as a whole."""
    if field == "ports":
        # A container's ports and a Service's have different keys; only the latter's items never have containerPort.
        return "containerPort" if any("containerPort" in i for i in items if isinstance(i, dict)) else "port"
    return _KEYS.get(field)


def strategic_merge(target: Object, patch: Object) -> Object:
    """The patched copy of `target`. Raises a 500, as the real server does, for a list item without its merge key."""
    directive = patch.get("$patch")
    if directive == "replace":
        return {k: copy.deepcopy(v) for k, v in patch.items() if k != "$patch"}
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
        result[key] = copy.deepcopy(value)


def _merge_list(current: list[Any], patch: list[Any], key: str, order: list[Any] | None) -> list[Any]:
    if any(item.get("$patch") == "replace" for item in patch):
        return [copy.deepcopy(i) for i in patch if "$patch" not in i]
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
    """Items in `order` come in that order; the others stay before those that they preceded on the server."""

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

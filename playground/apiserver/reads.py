"""Get and list: one consistent view per list, also over its pages."""

import base64
import binascii

import orjson

from playground.apiserver.errors import bad_request, expired, not_found, too_large_version
from playground.apiserver.kinds import Kind
from playground.apiserver.routes import Call
from playground.apiserver.selectors import both
from playground.apiserver.storage import Item, Key, Object, Storage, TooOld


def existing(storage: Storage, call: Call) -> Item:
    """Raises a 404."""
    path = call.path
    item = storage.get(path.kind.resource, path.namespace, path.name)
    if item is None:
        raise not_found(path.kind.group, path.kind.plural, path.name)
    return item


def render(item: Item, kind: Kind) -> bytes:
    """The stored bytes; written again only where a definition serves the object under another version."""
    if item.obj["apiVersion"] == kind.api_version:
        return item.raw
    return orjson.dumps(item.obj | {"apiVersion": kind.api_version})


def selected(storage: Storage, call: Call) -> list[Item]:
    """The stored objects that a call's namespace and selectors choose, by namespace and name."""
    return _choose(storage.collection(call.path.kind.resource).items, call)


def _choose(items: dict[Key, Item], call: Call) -> list[Item]:
    kind, namespace = call.path.kind, call.path.namespace
    matches = both(call.query.get("labelSelector", ""), call.query.get("fieldSelector", ""), kind)
    keys = sorted(k for k in items if not namespace or k[0] == namespace)
    return [items[k] for k in keys if matches is None or matches(items[k].obj)]


def list_items(storage: Storage, call: Call) -> tuple[list[Item], Object]:
    """(a page of items, the list's metadata). Raises 410 for a `continue` whose snapshot is forgotten."""
    rv, after = storage.rv, ("", "")
    asked = call.query.get("resourceVersion") or ""
    if token := call.query.get("continue"):
        rv, after = _read_token(token)
    elif asked:
        if not asked.isdecimal():
            why = f'strconv.ParseUint: parsing "{asked}": invalid syntax'
            raise bad_request(f'invalid resource version: resourceVersion: Invalid value: "{asked}": {why}')
        if int(asked) > storage.rv:
            raise too_large_version(int(asked), storage.rv)
        if call.query.get("resourceVersionMatch") == "Exact":
            rv = int(asked)
    items = _choose(_at(storage, call.path.kind, rv, paged=bool(token)), call)
    items = [i for i in items if i.key > after] if token else items
    metadata: Object = {"resourceVersion": str(rv)}
    limit = call.number("limit")
    if limit and len(items) > limit:
        metadata["continue"] = _token(rv, items[limit - 1].key)
        if not call.query.get("labelSelector") and not call.query.get("fieldSelector"):
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return items, metadata


def _at(storage: Storage, kind: Kind, rv: int, *, paged: bool) -> dict[Key, Item]:
    collection = storage.collection(kind.resource)
    if rv >= storage.rv:
        return collection.items
    try:
        return collection.at(rv)
    except TooOld as problem:
        if paged:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new "
                "list without the continue parameter."
            ) from problem
        raise expired(str(problem)) from problem


def _token(rv: int, key: Key) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([rv, *key])).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, Key]:
    try:
        rv, namespace, name = orjson.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(rv), (str(namespace), str(name))
    except (binascii.Error, ValueError) as problem:
        raise bad_request(f"invalid continue token: continue key is not valid: {problem}") from problem


def render_list(items: list[Item], metadata: Object, kind: Kind) -> bytes:
    head = orjson.dumps({"kind": kind.list_kind, "apiVersion": kind.api_version, "metadata": metadata})
    return head[:-1] + b',"items":[' + b",".join(render(i, kind) if kind.custom else i.bare for i in items) + b"]}"

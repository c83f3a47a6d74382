"""Gets, lists and watches objects.

All pages of a list show the state at one resourceVersion. A watch sends the changes after a resourceVersion as lines of
JSON. If the watch has selectors, an object that begins to match is reported as added, and an object that no longer
matches as deleted. `api_server` calls this module, and `writes`, `deletions` and `subresources` find objects with
`existing` and `selected`.
"""

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncGenerator, Callable

import orjson

from playground.apiserver.api_errors import Cause, bad_request, expired, invalid, not_found, too_large_version
from playground.apiserver.calls import Call
from playground.apiserver.kinds import Kind
from playground.apiserver.selectors import Match, both
from playground.apiserver.storage import Change, Item, Key, Object, Storage, Subscription, TooOld

Render = Callable[[Item], bytes]
_LONGEST_WATCH = 1800.0
"""The seconds after which a watch ends if the client sends no `timeoutSeconds`."""


def existing(storage: Storage, call: Call) -> Item:
    """Return the object that a call names. Raises a 404 if it does not exist."""
    path = call.path
    item = storage.get(path.kind.resource, path.namespace, path.name)
    if item is None:
        raise not_found(path.kind.resource, path.name)
    return item


def render(item: Item, kind: Kind) -> bytes:
    """Return the JSON of an object in the version of `kind`. A custom resource may be stored in another version."""
    if item.obj["apiVersion"] == kind.api_version:
        return item.raw
    return orjson.dumps(item.obj | {"apiVersion": kind.api_version})


def render_list(items: list[Item], metadata: Object, kind: Kind) -> bytes:
    """Return the JSON of a list of objects."""
    head = orjson.dumps({"kind": kind.list_kind, "apiVersion": kind.api_version, "metadata": metadata})
    return head[:-1] + b',"items":[' + b",".join(render(i, kind) if kind.custom else i.bare for i in items) + b"]}"


def selected(storage: Storage, call: Call) -> list[Item]:
    """Return the stored objects that a call's namespace and selectors choose, sorted by namespace and name."""
    return _choose(storage.collection(call.path.kind.resource).items, call)


def _choose(items: dict[Key, Item], call: Call) -> list[Item]:
    namespace, matches = call.path.namespace, _matches(call)
    keys = sorted(k for k in items if not namespace or k[0] == namespace)
    return [items[k] for k in keys if matches is None or matches(items[k].obj)]


def _matches(call: Call) -> Match | None:
    return both(call.query.get("labelSelector", ""), call.query.get("fieldSelector", ""), call.path.kind)


def list_items(storage: Storage, call: Call) -> tuple[list[Item], Object]:
    """Return one page of a list and the list's metadata.

    Raises a 410 if the history does not go back to the requested resourceVersion, a 504 if that resourceVersion does
    not exist yet, and a 400 for invalid parameters.
    """
    rv, after = storage.rv, ("", "")
    wanted = call.query.get("resourceVersion") or ""
    if token := call.query.get("continue"):
        rv, after = _read_token(token)
    elif wanted:
        if not wanted.isdecimal():
            reason = f'strconv.ParseUint: parsing "{wanted}": invalid syntax'
            raise bad_request(f'invalid resource version: resourceVersion: Invalid value: "{wanted}": {reason}')
        if int(wanted) > storage.rv:
            raise too_large_version(int(wanted), storage.rv)
        if call.query.get("resourceVersionMatch") == "Exact":
            rv = int(wanted)
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
    """Return the objects of a kind as they were at a resourceVersion. `paged` selects the message of the 410."""
    collection = storage.collection(kind.resource)
    if rv >= storage.rv:
        return collection.items
    try:
        return collection.at(rv)
    except TooOld as problem:
        too_old = "The provided continue parameter is too old to display a consistent list result."
        too_old += " You can start a new list without the continue parameter."
        raise expired(too_old if paged else str(problem)) from problem


def _token(rv: int, key: Key) -> str:
    """Return the `continue` token of a page. `key` is the key of the last object on the page."""
    return base64.urlsafe_b64encode(orjson.dumps([rv, *key])).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, Key]:
    try:
        rv, namespace, name = orjson.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(rv), (str(namespace), str(name))
    except (binascii.Error, ValueError) as problem:
        raise bad_request(f"invalid continue token: continue key is not valid: {problem}") from problem


class Watch:
    """Produces the events of one watch.

    The constructor raises a 400 or a 422 for invalid parameters. A resourceVersion that is too old is reported by an
    ERROR event in the stream.

    Args:
        show: A function that returns the JSON that this client gets for an object, or None for the object itself.
        bookmark_every: The seconds without a change after which a bookmark is sent, if the client allows bookmarks.
    """

    def __init__(self, storage: Storage, call: Call, show: Render | None, bookmark_every: float) -> None:
        _check_watch(call)
        self._storage = storage
        self._call = call
        self._kind = call.path.kind
        self._matches = _matches(call)
        self._show: Render = show or (lambda item: render(item, self._kind))
        self._bookmark_every = bookmark_every
        self._bookmarks = call.flag("allowWatchBookmarks")
        self._seconds = call.number("timeoutSeconds") or _LONGEST_WATCH
        self._reached = int(call.query.get("resourceVersion") or 0)

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield events, as lines of JSON, until the watch ends.

        It ends if it times out, if the reader falls too far behind, if the server stops, or if the resource is removed.
        """
        storage, resource = self._storage, self._kind.resource
        first = [] if self._reached else selected(storage, self._call)
        self._reached = self._reached or storage.rv
        try:
            subscription = storage.watch(resource, self._reached)
        except TooOld as problem:
            yield _line("ERROR", orjson.dumps(expired(str(problem)).status()))
            return
        try:
            if first:
                yield b"".join(_line("ADDED", self._show(item)) for item in first)
            async for line in self._follow(subscription):
                yield line
        finally:
            storage.unwatch(resource, subscription)

    async def _follow(self, subscription: Subscription) -> AsyncGenerator[bytes]:
        end = time.monotonic() + self._seconds
        while not subscription.closed and (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, self._bookmark_every)):
                    changes = await subscription.take()
            except TimeoutError:
                # A change may have come at the moment of the timeout. It must be sent before the bookmark.
                if self._bookmarks and not subscription.behind:
                    self._reached = max(self._reached, self._storage.rv)
                    yield _bookmark(self._kind, self._reached)
                continue
            self._reached = changes[-1].rv if changes else self._reached
            if lines := [line for change in changes if (line := self._event(change))]:
                yield b"".join(lines)

    def _event(self, change: Change) -> bytes | None:
        """Return the line for a change, or None if the watch selects neither the old nor the new object."""
        namespace, matches = self._call.path.namespace, self._matches
        if namespace and change.new.key[0] != namespace:
            return None
        old = change.old is not None and (matches is None or matches(change.old.obj))
        new = not change.removed and (matches is None or matches(change.new.obj))
        if new:
            return _line("MODIFIED" if old else "ADDED", self._show(change.new))
        if not old or change.old is None:
            return None
        if change.removed:
            return _line("DELETED", self._show(change.new))
        # The object no longer matches. The client gets its last matching state, with the resourceVersion of the change.
        metadata = {**change.old.obj["metadata"], "resourceVersion": str(change.rv)}
        return _line("DELETED", self._show(Item({**change.old.obj, "metadata": metadata})))


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


def _bookmark(kind: Kind, rv: int) -> bytes:
    obj: Object = {"kind": kind.kind, "apiVersion": kind.api_version}
    return _line("BOOKMARK", orjson.dumps(obj | {"metadata": {"resourceVersion": str(rv), "creationTimestamp": None}}))


def _check_watch(call: Call) -> None:
    """Raise a 400 or a 422 if the parameters of a watch are invalid."""
    if "sendInitialEvents" in call.query:
        # A server without the feature WatchList gives this answer. Clients then send a list and a watch instead.
        detail = "Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        cause = Cause("sendInitialEvents", detail, "FieldValueForbidden")
        raise invalid("ListOptions.meta.k8s.io", "", [cause])
    wanted = call.query.get("resourceVersion") or "0"
    if not wanted.isdecimal():
        raise bad_request(f'Invalid value: "{wanted}": strconv.ParseUint: parsing "{wanted}": invalid syntax')

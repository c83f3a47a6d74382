"""Watch: the changes after a resourceVersion as lines of JSON; selectors make objects appear and vanish."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import orjson

from playground.apiserver.errors import Cause, bad_request, expired, invalid
from playground.apiserver.kinds import Kind
from playground.apiserver.reads import render, selected
from playground.apiserver.routes import Call
from playground.apiserver.selectors import Match, both
from playground.apiserver.storage import Change, Item, Object, Storage, Subscription, TooOld

Render = Callable[[Item], bytes]
_LONGEST = 1800.0


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


def _bookmark(kind: Kind, rv: int) -> bytes:
    obj: Object = {"kind": kind.kind, "apiVersion": kind.api_version}
    return _line("BOOKMARK", orjson.dumps(obj | {"metadata": {"resourceVersion": str(rv), "creationTimestamp": None}}))


def event(change: Change, call: Call, matches: Match | None, show: Render) -> bytes | None:
    """The line for a change as this watcher sees it; None when it concerns nothing that it selected."""
    namespace = call.path.namespace
    if namespace and change.new.key[0] != namespace:
        return None
    old = change.old is not None and (matches is None or matches(change.old.obj))
    new = not change.removed and (matches is None or matches(change.new.obj))
    if new:
        return _line("MODIFIED" if old else "ADDED", show(change.new))
    if not old or change.old is None:
        return None
    if change.removed:
        return _line("DELETED", show(change.new))
    # It left the selection: the watcher gets what it knew, with the resourceVersion of the change.
    metadata = {**change.old.obj["metadata"], "resourceVersion": str(change.rv)}
    return _line("DELETED", show(Item({**change.old.obj, "metadata": metadata})))


class Watch:
    """One watch. Making it raises 400 and 422; that a version is too old is told in the stream, as in reality."""

    def __init__(self, storage: Storage, call: Call, show: Render | None, bookmark_every: float) -> None:
        _check(call)
        self._storage, self._call, self._kind = storage, call, call.path.kind
        self._matches = both(call.query.get("labelSelector", ""), call.query.get("fieldSelector", ""), self._kind)
        self._show: Render = show or (lambda item: render(item, self._kind))
        self._bookmark_every = bookmark_every
        self._bookmarks = call.flag("allowWatchBookmarks")
        self._seconds = call.number("timeoutSeconds") or _LONGEST
        self._reached = int(call.query.get("resourceVersion") or 0)

    async def lines(self) -> AsyncGenerator[bytes]:
        """Until the watch's timeout, its overflow or the server's end."""
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
                # The time may be over in the very moment of a change, which a bookmark must not run ahead of.
                if self._bookmarks and not subscription.behind:
                    self._reached = max(self._reached, self._storage.rv)
                    yield _bookmark(self._kind, self._reached)
                continue
            self._reached = changes[-1].rv if changes else self._reached
            if lines := [line for c in changes if (line := event(c, self._call, self._matches, self._show))]:
                yield b"".join(lines)


def _check(call: Call) -> None:
    if "sendInitialEvents" in call.query:
        detail = "Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        raise invalid("meta.k8s.io", "ListOptions", "", [Cause("sendInitialEvents", detail, "FieldValueForbidden")])
    asked = call.query.get("resourceVersion") or "0"
    if not asked.isdecimal():
        raise bad_request(f'Invalid value: "{asked}": strconv.ParseUint: parsing "{asked}": invalid syntax')

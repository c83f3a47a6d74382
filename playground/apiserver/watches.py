"""Watch: the changes after a resourceVersion as lines of JSON; selectors make objects appear and vanish."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import orjson

from playground.apiserver.errors import ApiError, Cause, bad_request, expired, invalid
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


def start(storage: Storage, call: Call) -> tuple[Subscription, list[Item], int]:
    """(subscription, objects to begin with, resourceVersion reached). Raises 410, 400, 422."""
    if "sendInitialEvents" in call.query:
        detail = "Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        raise invalid("meta.k8s.io", "ListOptions", "", [Cause("sendInitialEvents", detail, "FieldValueForbidden")])
    asked = call.query.get("resourceVersion") or "0"
    if not asked.isdecimal():
        raise bad_request(f'Invalid value: "{asked}": strconv.ParseUint: parsing "{asked}": invalid syntax')
    resource, since = call.path.kind.resource, int(asked)
    if since == 0:
        first = selected(storage, call)
        return storage.watch(resource, storage.rv), first, storage.rv
    try:
        return storage.watch(resource, since), [], since
    except TooOld as problem:
        raise expired(str(problem)) from problem


def error_line(problem: ApiError) -> bytes:
    """How a watch that was accepted says that it cannot go on."""
    return _line("ERROR", orjson.dumps(problem.status()))


async def stream(storage: Storage, call: Call, show: Render | None, bookmark_every: float) -> AsyncGenerator[bytes]:
    """Lines of one watch, until its timeout, its overflow or the server's end."""
    kind = call.path.kind
    matches = both(call.query.get("labelSelector", ""), call.query.get("fieldSelector", ""), kind)
    draw: Render = show or (lambda item: render(item, kind))
    bookmarks = call.flag("allowWatchBookmarks")
    end = time.monotonic() + (call.number("timeoutSeconds") or _LONGEST)
    try:
        subscription, first, reached = start(storage, call)
    except ApiError as problem:
        if problem.code != 410:
            raise
        yield error_line(problem)
        return
    try:
        if first:
            yield b"".join(_line("ADDED", draw(item)) for item in first)
        while not subscription.closed and (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, bookmark_every)):
                    changes = await subscription.take()
            except TimeoutError:
                if bookmarks:
                    reached = max(reached, storage.rv)
                    yield _bookmark(kind, reached)
                continue
            lines = [line for c in changes if (line := event(c, call, matches, draw))]
            reached = changes[-1].rv if changes else reached
            if lines:
                yield b"".join(lines)
    finally:
        storage.unwatch(kind.resource, subscription)

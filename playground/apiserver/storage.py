"""Stores the objects of the API server in memory, with one resourceVersion that counts the writes of all resources.

The modules of the API server that read or write objects share one `Storage`. Each resource has a history of limited
length, from which watches and paged lists are served. All calls come from one event loop, so each of them is atomic. A
stored object is never changed in place.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

# The resourceVersion of the empty storage. `Storage.watch` raises TooOld for a lower one.
_FIRST = 100

# The maximum size of an object in bytes: etcd's limit for a request, 1.5 MiB.
_LARGEST = 1_572_864

Object = dict[str, Any]
Key = tuple[str, str]
"""The namespace and the name of an object. The namespace of a cluster-scoped object is ""."""


class Stale(Exception):
    """The object was changed or removed after it was read."""


class Exists(Exception):
    """An object with this name is stored already."""


class TooLarge(Exception):
    """The object is larger than etcd would accept."""


class TooOld(Exception):
    """The history does not go back to the resourceVersion `wanted`, but only to `oldest`."""

    def __init__(self, wanted: int, oldest: int) -> None:
        super().__init__(f"too old resource version: {wanted} ({oldest})")


class Item:
    """A stored object. Its JSON is made at most once in each form, however many clients read or watch the object.

    Attributes:
        obj: The object, which must not be changed.
        key: The namespace and the name of the object.
    """

    __slots__ = ("_bare", "_raw", "key", "obj")

    def __init__(self, obj: Object) -> None:
        self.obj = obj
        self.key: Key = (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        self._raw: bytes | None = None
        self._bare: bytes | None = None

    @property
    def raw(self) -> bytes:
        """The JSON of the object."""
        if self._raw is None:
            self._raw = orjson.dumps(self.obj)
        return self._raw

    @property
    def bare(self) -> bytes:
        """The JSON without `kind` and `apiVersion`, which is the form in lists of built-in kinds."""
        if self._bare is None:
            self._bare = orjson.dumps({k: v for k, v in self.obj.items() if k not in ("kind", "apiVersion")})
        return self._bare


@dataclass(frozen=True, slots=True)
class Change:
    """One write.

    Attributes:
        rv: The resourceVersion of the write.
        old: The object before the write, or None if the write created the object.
        new: The object after the write, or the last state of a removed object, with the resourceVersion of the write.
        removed: Whether the write removed the object.
    """

    rv: int
    old: Item | None
    new: Item
    removed: bool = False


class Subscription:
    """The changes that a watcher has not taken yet.

    The subscription is closed if more changes are pending than `limit` and the length of `backlog` together.

    Args:
        backlog: The changes that are pending at first.
        limit: The number of further changes that may be pending.

    Attributes:
        closed: Whether the watch must end.
    """

    def __init__(self, backlog: Iterator[Change] | list[Change], limit: int) -> None:
        self._pending = list(backlog)
        self._limit = limit + len(self._pending)
        self._wake = asyncio.Event()
        self.closed = False
        if self._pending:
            self._wake.set()

    def push(self, change: Change) -> None:
        self._pending.append(change)
        if len(self._pending) > self._limit:
            self.closed = True
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    @property
    def behind(self) -> bool:
        """Whether changes are waiting to be taken."""
        return bool(self._pending)

    async def take(self) -> list[Change]:
        """Wait for changes and return all pending ones. The list is empty only if the subscription is closed."""
        await self._wake.wait()
        self._wake.clear()
        taken = self._pending
        self._pending = []
        return taken


class Collection:
    """The objects of one resource in all namespaces, and their latest changes.

    Attributes:
        history: The latest changes, in order.
        watchers: The subscriptions of the watches of this resource.
        floor: The oldest resourceVersion from which `since` can list the changes.
    """

    def __init__(self, history: int, floor: int) -> None:
        self.items: dict[Key, Item] = {}
        self.history: deque[Change] = deque()
        self.watchers: set[Subscription] = set()
        self._length = history
        self.floor = floor

    def record(self, change: Change) -> None:
        """Apply a change to the objects, add it to the history and pass it to the watchers."""
        if change.removed:
            del self.items[change.new.key]
        else:
            self.items[change.new.key] = change.new
        self.history.append(change)
        while len(self.history) > self._length:
            self.floor = self.history.popleft().rv
        for watcher in self.watchers:
            watcher.push(change)

    def since(self, rv: int) -> list[Change]:
        """Return the changes after `rv`, in order. Raises TooOld if the history does not go back to `rv`."""
        if rv < self.floor:
            raise TooOld(rv, self.floor)
        found = []
        for change in reversed(self.history):
            if change.rv <= rv:
                break
            found.append(change)
        return found[::-1]

    def at(self, rv: int) -> dict[Key, Item]:
        """Return the objects as they were at `rv`. Raises TooOld if the history does not go back to `rv`."""
        items = dict(self.items)
        for change in reversed(self.since(rv)):
            if change.old is None:
                items.pop(change.new.key, None)
            else:
                items[change.new.key] = change.old
        return items


class Storage:
    """The collections of all resources.

    A resource is named by its plural and its group, such as `pods` and `deployments.apps`. `history` is the number of
    changes that each collection stores.

    Attributes:
        rv: The resourceVersion of the latest write.
    """

    def __init__(self, history: int = 10_000) -> None:
        self.rv = _FIRST
        self._history = history
        self._collections: dict[str, Collection] = {}

    def collection(self, resource: str) -> Collection:
        """Return the collection of a resource. If it does not exist, create an empty one."""
        if resource not in self._collections:
            self._collections[resource] = Collection(self._history, _FIRST)
        return self._collections[resource]

    def collections(self) -> dict[str, Collection]:
        return dict(self._collections)

    def drop(self, resource: str) -> None:
        """Remove the collection of a resource whose definition was deleted, and end the watches of the resource."""
        gone = self._collections.pop(resource, None)
        for watcher in gone.watchers if gone else ():
            watcher.close()

    def get(self, resource: str, namespace: str, name: str) -> Item | None:
        return self.collection(resource).items.get((namespace, name))

    def create(self, resource: str, obj: Object) -> Item:
        """Store a new object. Raises Exists if its name is in use, and TooLarge if it is too large."""
        item, collection = self._stamped(obj), self.collection(resource)
        if item.key in collection.items:
            raise Exists
        return self._write(collection, None, item)

    def replace(self, resource: str, old: Item, obj: Object) -> Item:
        """Replace `old` with `obj`.

        Raises Stale if `old` is no longer the stored object, and TooLarge if `obj` is too large.
        """
        collection = self._current(resource, old)
        return self._write(collection, old, self._stamped(obj))

    def remove(self, resource: str, old: Item, obj: Object | None = None) -> Item:
        """Remove `old`. Raises Stale if `old` is no longer the stored object, and TooLarge if `obj` is too large.

        The result and the event for watchers have `obj`, or `old` if `obj` is None, with the resourceVersion of the
        removal.
        """
        collection = self._current(resource, old)
        return self._write(collection, old, self._stamped(obj or old.obj), removed=True)

    def watch(self, resource: str, since: int) -> Subscription:
        """Subscribe to the changes after `since`. The caller must end the subscription with `unwatch`.

        Raises TooOld if the history does not go back to `since`.
        """
        collection = self.collection(resource)
        subscription = Subscription(collection.since(since), limit=self._history)
        collection.watchers.add(subscription)
        return subscription

    def unwatch(self, resource: str, subscription: Subscription) -> None:
        if collection := self._collections.get(resource):
            collection.watchers.discard(subscription)

    def _current(self, resource: str, old: Item) -> Collection:
        """Return the collection of `old`. Raises Stale if `old` is no longer the stored object."""
        collection = self.collection(resource)
        if collection.items.get(old.key) is not old:
            raise Stale
        return collection

    def _stamped(self, obj: Object) -> Item:
        """Return `obj` with the resourceVersion of the next write. Raises TooLarge if it is too large."""
        item = Item({**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.rv + 1)}})
        if len(item.raw) > _LARGEST:
            raise TooLarge
        return item

    def _write(self, collection: Collection, old: Item | None, new: Item, *, removed: bool = False) -> Item:
        self.rv += 1
        collection.record(Change(self.rv, old, new, removed))
        return new

"""Lists and watches one kind of object and reports changes, as client-go's reflector and informer do.

The scheduler, the agents and the playground watch objects with it. The `informer` of the kubernetes package is not
used, because it stores all objects whole and lists them without pages.
"""

import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.kube.client import Api, ApiError, Unreachable, Watch, WatchSilent

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_MIN_PAUSE, _MAX_PAUSE = 0.1, 10.0
"""The first and the longest pause, in seconds, before the objects are listed again after a failure. The pause doubles
with each failure, and varies at random by up to a half."""
_Name = tuple[str, str]
"""The namespace and the name of an object."""
_Version = tuple[str, str]
"""The UID and the resourceVersion of an object."""


class Reflector:
    """Calls `changed(object)` for each new or changed object and `gone(object)` for each deleted one.

    Both are called on the reflector's thread. A watch reports the changes in their order. A list reports objects with a
    new resourceVersion to `changed`, and then objects that do not exist any more to `gone`. So several changes of an
    object between two lists are reported as one. `gone` gets the deleted object, or only the metadata that identifies
    it (`_identity`). If an object was deleted and created again with the same name, `gone` is called before `changed`.
    An exception of a callback is logged and does not stop the watch.

    Any thread may call the methods. The lock of `_lists` guards the numbers of lists.

    Args:
        path: The path of the collection, such as `/api/v1/pods`.
        query: A labelSelector, a fieldSelector, or both.
        optional: Whether the API server may lack the kind. A missing kind counts as empty, and is listed again after
            pauses.
        missing_seconds: The longest pause before a missing kind is listed again. It varies at random by up to a half.
        watch_seconds: The time after which the server ends each watch. The reflector then begins a new watch where the
            last one ended. A half-open connection is noticed at that time, or earlier after a silence of 150 s
            (`mgpu.kube.client`).

    Attributes:
        restarts: The number of times that a list or the watch failed. All objects are listed again after each failure.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        changed: Callable[[Raw], None],
        gone: Callable[[Raw], None],
        query: Mapping[str, Any] | None = None,
        *,
        optional: bool = False,
        missing_seconds: float = _MAX_PAUSE,
        watch_seconds: int = 300,
    ) -> None:
        self._watch_seconds = watch_seconds
        self._api = api
        self._path = path
        self._query = dict(query or {})
        self._optional = optional
        self._missing_seconds = missing_seconds
        self._changed = changed
        self._gone = gone
        self._known: dict[_Name, _Version] = {}
        self._stop = threading.Event()
        self._lists = threading.Condition()
        # Lists are numbered. These are the numbers of the last list that has begun, of the last list that has finished,
        # and of the last list that `refresh` has requested.
        self._begun = 0
        self._finished = 0
        self._requested = 0
        self._watch: Watch | None = None
        self._broken_since: float | None = None
        self._forbidden = False
        self.restarts = 0
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to stop. It stops immediately unless it is in a callback or a list."""
        self._stop.set()
        with self._lists:
            self._lists.notify_all()
        self._interrupt()

    @property
    def synced(self) -> bool:
        """Whether the callbacks have been called for all objects of the first list."""
        return self._finished > 0

    @property
    def broken_for(self) -> float:
        """The number of seconds since the first failure after the last complete list; 0 if there was no failure."""
        since = self._broken_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def forbidden(self) -> bool:
        """Whether the watch is broken, and the last failure was an answer with the status 403."""
        return self._forbidden

    def wait_synced(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds until `synced` is true, and return it."""
        with self._lists:
            return self._lists.wait_for(lambda: self._finished > 0, timeout)

    def refresh(self, timeout: float) -> bool:
        """List again now, and wait until the callbacks have been called for all changes before this call.

        Returns False if they have not been called within `timeout` seconds.
        """
        with self._lists:
            requested = self._begun + 1
            self._requested = requested
            self._lists.notify_all()
            self._interrupt()
            return self._lists.wait_for(lambda: self._finished >= requested, timeout)

    def _interrupt(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.end()

    def _run(self) -> None:
        pause = _MIN_PAUSE
        last_error = ""
        while not self._stop.is_set():
            self._followed = math.inf
            longest = _MAX_PAUSE
            try:
                version = self._relist()
                if not version:
                    longest = self._missing_seconds
                else:
                    self._followed = time.monotonic()
                    self._follow(version)
            except (ApiError, Unreachable) as error:
                if self._refresh_due() or self._stop.is_set():
                    continue
                self.restarts += 1
                self._broken_since = self._broken_since or time.monotonic()
                self._forbidden = isinstance(error, ApiError) and error.status == 403
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("watch of %s broke, listing again: %s", self._path, error)
            except Exception:
                # An unexpected answer must not end this loop, which is the outermost loop of the thread.
                self.restarts += 1
                self._broken_since = self._broken_since or time.monotonic()
                log.exception("watch of %s failed, listing again", self._path)
            # The pause is reset only after a watch that lasted for some time. If every list reset it, a process that
            # may list but not watch would list without long pauses.
            if time.monotonic() - self._followed > _MAX_PAUSE:
                pause = _MIN_PAUSE
                last_error = ""
            if not self._refresh_due():
                # Jitter, so that not all clients return at the same time after an outage of the API server.
                self._rest(pause * (0.5 + random.random()))
                pause = min(pause * 2, longest)

    def _rest(self, seconds: float) -> None:
        """Wait, unless a refresh or `stop` is requested."""
        with self._lists:
            self._lists.wait_for(lambda: self._stop.is_set() or self._refresh_due(), seconds)

    def _refresh_due(self) -> bool:
        return self._requested > self._begun

    def _relist(self) -> str:
        """List the objects, call the callbacks, and return the version to watch from.

        Returns "" if the kind is optional and the API server does not serve it.
        """
        with self._lists:
            self._begun += 1
            begun = self._begun
        version = ""
        missing = set(self._known)
        try:
            for page, version in self._api.pages(self._path, **self._query):  # noqa: B007
                for item in page:
                    missing.discard(_name(item))
                    self._take(item)
        except ApiError as error:
            if not (self._optional and error.status == 404):
                raise
        for name in missing:
            self._call(self._gone, _identity(name, self._known.pop(name)))
        self._broken_since, self._forbidden = None, False
        with self._lists:
            self._finished = begun
            self._lists.notify_all()
        return version

    def _follow(self, version: str) -> None:
        """Watch until a watch fails, or a list or `stop` is requested. Each watch continues where the last ended."""
        while not (self._stop.is_set() or self._refresh_due()):
            started = time.monotonic()
            self._watch = watch = self._api.watch(self._path, version, seconds=self._watch_seconds, **self._query)
            try:
                if self._stop.is_set() or self._refresh_due():  # `_interrupt` may have found no watch to end.
                    return
                for kind, item in watch:
                    if self._stop.is_set():
                        return
                    version = item["metadata"]["resourceVersion"]
                    if kind == "DELETED":
                        self._known.pop(_name(item), None)
                        self._call(self._gone, item)
                    elif kind != "BOOKMARK":
                        self._take(item)
            except WatchSilent as error:
                # Perhaps only the connection is half-open. The next watch delivers the missed changes.
                log.info("%s; watching again", error)
            finally:
                self._watch = None
                watch.close()
            if time.monotonic() - started < 1 and not self._refresh_due():
                self._stop.wait(0.1)  # A server that ends every watch at once must not be called in a tight loop.

    def _take(self, item: Raw) -> None:
        meta = item["metadata"]
        name = _name(item)
        new = (meta["uid"], meta["resourceVersion"])
        known = self._known.get(name)
        if known == new:
            return
        if known is not None and known[0] != new[0]:
            self._call(self._gone, _identity(name, known))
        self._known[name] = new
        self._call(self._changed, item)

    def _call(self, callback: Callable[[Raw], None], item: Raw) -> None:
        try:
            callback(item)
        except Exception:
            meta = item["metadata"]
            log.exception("Failed to process %s %s/%s", self._path, meta.get("namespace", ""), meta["name"])


def _name(item: Raw) -> _Name:
    meta = item["metadata"]
    return sys.intern(meta.get("namespace", "")), meta["name"]


def _identity(name: _Name, version: _Version) -> Raw:
    """Return the metadata that identify a deleted object. More is not stored: whole pods would need much memory."""
    namespace = {"namespace": name[0]} if name[0] else {}
    return {"metadata": {**namespace, "name": name[1], "uid": version[0], "resourceVersion": version[1]}}

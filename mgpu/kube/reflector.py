"""List and watch of one kind, kept in sync for ever: what a controller's cache is fed from.

The kubernetes client's own `informer` was read: it neither diffs a re-list (what vanished while the watch was down
would stay) nor hands out raw objects. Hence this one.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.kube.client import Api, ApiError, Silent, Unreachable, Watch

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_MIN_PAUSE, _MAX_PAUSE = 0.1, 10.0
_Name = tuple[str, str]


class Reflector:
    """Calls `changed(object)` for every object that is new or different and `gone(object)` for every one that vanished.

    Both run on the reflector's own thread, one after the other, in the order of the API's history; after a re-list
    `changed` only where the resourceVersion moved, then `gone` for what is no longer there (its last known name and
    uid). Of one name there is one object at a time: `gone` for it comes before `changed` for its successor.
    An exception from a callback is logged and does not stop the watch.

    path: the collection (`/api/v1/pods`). query: labelSelector, fieldSelector.
    optional: an API server that does not know the kind has no objects of it, and is asked again.
    watch_seconds: after so long the server ends each watch, and the next one goes on from there. A half-open connection
    is noticed at that time at the latest, or after a silence of 150 s (`mgpu.kube.client`).
    `restarts`: how often the watch has broken, so that everything was listed again.
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
        watch_seconds: int = 300,
    ) -> None:
        self._watch_seconds = watch_seconds
        self._api, self._path, self._query, self._optional = api, path, dict(query or {}), optional
        self._changed, self._gone = changed, gone
        self._known: dict[_Name, Raw] = {}
        self._stop = threading.Event()
        self._lists = threading.Condition()
        self._begun = self._finished = 0
        self._wanted = 0
        self._watch: Watch | None = None
        self._broken_since: float | None = None
        self._forbidden = False
        self.restarts = 0
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, which it does at once unless a callback or a list is under way."""
        self._stop.set()
        with self._lists:
            self._lists.notify_all()
        self._interrupt()

    @property
    def synced(self) -> bool:
        """Whether the first list has been handed over completely."""
        return self._finished > 0

    @property
    def broken_for(self) -> float:
        """Seconds since the API server was last heard on this, 0 while the watch runs."""
        since = self._broken_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def forbidden(self) -> bool:
        """Whether the API server's last answer was that this process may not see these (403)."""
        return self._forbidden

    def wait_synced(self, timeout: float) -> bool:
        with self._lists:
            return self._lists.wait_for(lambda: self._finished > 0, timeout)

    def refresh(self, timeout: float) -> bool:
        """List again now: True once everything that was written before this call has been handed over."""
        with self._lists:
            wanted = self._wanted = self._begun + 1
            self._lists.notify_all()
            self._interrupt()
            return self._lists.wait_for(lambda: self._finished >= wanted, timeout)

    def _interrupt(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.end()

    def _run(self) -> None:
        pause, told = _MIN_PAUSE, ""
        while not self._stop.is_set():
            self._followed = math.inf
            try:
                version = self._relist()
                if version:
                    self._followed = time.monotonic()
                    self._follow(version)
            except (ApiError, Unreachable) as error:
                if self._refresh_due() or self._stop.is_set():
                    continue
                self.restarts += 1
                self._broken_since = self._broken_since or time.monotonic()
                self._forbidden = isinstance(error, ApiError) and error.status == 403
                if str(error) != told:
                    told = str(error)
                    log.warning("watch of %s broke, listing again: %s", self._path, error)
            except Exception:
                # The thread's outermost loop: an answer that nobody foresaw must not end it.
                self.restarts += 1
                self._broken_since = self._broken_since or time.monotonic()
                log.exception("watch of %s failed, listing again", self._path)
            if time.monotonic() - self._followed > _MAX_PAUSE:  # who may list and not watch must not list all the time
                pause, told = _MIN_PAUSE, ""
            if not self._refresh_due():
                # Jitter: after an outage of the API server not everybody comes back at once.
                self._rest(pause * (0.5 + random.random()))
                pause = min(pause * 2, _MAX_PAUSE)

    def _rest(self, seconds: float) -> None:
        """Until somebody wants a list now, or `stop`."""
        with self._lists:
            self._lists.wait_for(lambda: self._stop.is_set() or self._refresh_due(), seconds)

    def _refresh_due(self) -> bool:
        return self._wanted > self._begun

    def _relist(self) -> str:
        """The version to watch from; "" where the API server does not know the kind and need not."""
        with self._lists:
            self._begun += 1
            begun = self._begun
        version, present = "", set()
        try:
            for page, version in self._api.pages(self._path, **self._query):  # noqa: B007
                for item in page:
                    present.add(_name(item))
                    self._take(item)
        except ApiError as error:
            if not (self._optional and error.status == 404):
                raise
        for name in [name for name in self._known if name not in present]:
            self._call(self._gone, self._known.pop(name))
        self._broken_since, self._forbidden = None, False
        with self._lists:
            self._finished = begun
            self._lists.notify_all()
        return version

    def _follow(self, version: str) -> None:
        """Watch after watch, each from where the last one ended, until one is refused or breaks, or a list is due."""
        while not (self._stop.is_set() or self._refresh_due()):
            started = time.monotonic()
            self._watch = watch = self._api.watch(self._path, version, seconds=self._watch_seconds, **self._query)
            try:
                if self._stop.is_set() or self._refresh_due():  # asked for before there was a watch to interrupt
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
            except Silent as error:
                # The server may be well and the connection half-open: what came meanwhile comes with the next watch.
                log.info("%s; watching again", error)
            finally:
                self._watch = None
                watch.close()
            if time.monotonic() - started < 1 and not self._refresh_due():
                self._stop.wait(0.1)  # a server that ends every watch at once must not be asked in a tight loop

    def _take(self, item: Raw) -> None:
        name, new = _name(item), _identity(item)
        known = self._known.get(name)
        if known == new:
            return
        if known is not None and known["metadata"]["uid"] != new["metadata"]["uid"]:
            self._call(self._gone, known)
        self._known[name] = new
        self._call(self._changed, item)

    def _call(self, callback: Callable[[Raw], None], item: Raw) -> None:
        try:
            callback(item)
        except Exception:
            meta = item["metadata"]
            log.exception("%s %s/%s could not be taken in", self._path, meta.get("namespace", ""), meta["name"])


def _name(item: Raw) -> _Name:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _identity(item: Raw) -> Raw:
    """What is kept of an object to tell that it is gone: a cluster's pods would not fit in memory twice."""
    meta = item["metadata"]
    return {"metadata": {key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion") if key in meta}}

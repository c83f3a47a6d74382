"""List and watch of one kind, kept in sync for ever: what a controller's cache is fed from.

The kubernetes client's own `informer` was read: it neither diffs a re-list (what vanished while the watch was down
would stay) nor hands out raw objects. Hence this one.
"""

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.kube.client import Api, ApiError, Unreachable

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_MAX_PAUSE = 10.0


class Reflector:
    """Calls `changed(object)` for every object that is new or different and `gone(object)` for every one that vanished.

    Both run on the reflector's own thread, one after the other, in the order of the API's history; after a re-list
    with `gone` for what is no longer there (the last known state of it), and with `changed` only where the
    resourceVersion moved. An exception from a callback is logged and does not stop the watch.

    path: the collection (`/api/v1/pods`). query: labelSelector, fieldSelector.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        changed: Callable[[Raw], None],
        gone: Callable[[Raw], None],
        query: Mapping[str, Any] | None = None,
    ) -> None:
        self._api, self._path, self._query = api, path, dict(query or {})
        self._changed, self._gone = changed, gone
        self._known: dict[str, tuple[str, Raw]] = {}
        self._stop = threading.Event()
        self._synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does with the watch's next event or end."""
        self._stop.set()

    @property
    def synced(self) -> bool:
        """Whether the first list has been handed over completely."""
        return self._synced.is_set()

    def wait_synced(self, timeout: float) -> bool:
        return self._synced.wait(timeout)

    def _run(self) -> None:
        pause = 0.1
        while not self._stop.is_set():
            try:
                version = self._relist()
                pause = 0.1
                self._follow(version)
            except (ApiError, Unreachable) as error:
                log.warning("watch of %s broke, listing again: %s", self._path, error)
                # Jitter: after an outage of the API server not everybody comes back at once.
                self._stop.wait(pause * (0.5 + random.random()))
                pause = min(pause * 2, _MAX_PAUSE)

    def _relist(self) -> str:
        items, version = self._api.list(self._path, **self._query)
        present = {item["metadata"]["uid"] for item in items}
        for uid in [uid for uid in self._known if uid not in present]:
            self._forget(uid)
        for item in items:
            self._take(item)
        self._synced.set()
        return version

    def _follow(self, version: str) -> None:
        """Watch after watch, each from where the last one ended, until one is refused or breaks."""
        while not self._stop.is_set():
            for kind, item in self._api.watch(self._path, version, **self._query):
                if self._stop.is_set():
                    return
                version = item["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    self._known[item["metadata"]["uid"]] = (version, item)
                    self._forget(item["metadata"]["uid"])
                elif kind != "BOOKMARK":
                    self._take(item)

    def _take(self, item: Raw) -> None:
        uid, version = item["metadata"]["uid"], item["metadata"]["resourceVersion"]
        if self._known.get(uid, ("",))[0] != version:
            self._known[uid] = (version, _identity(item))
            self._call(self._changed, item)

    def _forget(self, uid: str) -> None:
        self._call(self._gone, self._known.pop(uid)[1])

    def _call(self, callback: Callable[[Raw], None], item: Raw) -> None:
        try:
            callback(item)
        except Exception:
            meta = item["metadata"]
            log.exception("%s %s/%s could not be taken in", self._path, meta.get("namespace", ""), meta["name"])


def _identity(item: Raw) -> Raw:
    """What is kept of an object to tell that it is gone: a cluster's pods would not fit in memory twice."""
    meta = item["metadata"]
    return {"metadata": {key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion") if key in meta}}

"""Implements the garbage collector, and the pod garbage collector.

The garbage collector handles the propagation policies Background, Foreground and Orphan. It deletes only objects of
`_KINDS`, and assumes that an owner of another kind exists. The pod garbage collector deletes the pods of deleted nodes.
`controllers` starts both.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
_RESOURCE = "resource.k8s.io/v1"
_KINDS = {
    ("v1", "Node"): ("/api/v1", "nodes"),
    ("v1", "Pod"): ("/api/v1", "pods"),
    (DEVICE_API, "Device"): (f"/apis/{DEVICE_API}", "devices"),
    (mtgpu.API_VERSION, mtgpu.KIND): (f"/apis/{mtgpu.API_VERSION}", "mtgpupods"),
    (_RESOURCE, "ResourceClaim"): (f"/apis/{_RESOURCE}", "resourceclaims"),
    (_RESOURCE, "ResourceSlice"): (f"/apis/{_RESOURCE}", "resourceslices"),
}
_OPTIONAL = ("resourceclaims", "resourceslices")  # Kubernetes before 1.34 does not serve them
_CLUSTER_SCOPED = ("nodes", "devices", "resourceslices")
_FOREGROUND = "foregroundDeletion"
_ORPHAN = "orphan"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_PASS_SECONDS = 0.1
_DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
_DISRUPTED |= {"message": "PodGC: node no longer exists"}


@dataclass(frozen=True, slots=True)
class _Object:
    """The part of an object that the controllers need.

    Attributes:
        path: The URL path of the object.
        meta: Its metadata.
        owners: Its ownerReferences.
        node: For a pod, the node to which it is bound, or "".
        ended: Whether it is a pod that has ended.
    """

    path: str
    meta: Raw
    owners: tuple[Raw, ...]
    node: str
    ended: bool

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.meta

    @property
    def finalizers(self) -> list[str]:
        return list(self.meta.get("finalizers") or ())

    @property
    def precondition(self) -> dict[str, Any]:
        return {"preconditions": {"uid": self.meta["uid"]}}


class GarbageCollection:
    """Runs both controllers in a thread. It may be started once, after the API server serves all kinds.

    Args:
        api: The client of the API server.
        node_seconds: The time in seconds between the deletion of a node and the deletion of its pods.
    """

    def __init__(self, api: Api, node_seconds: float = 1.0) -> None:
        self._api = api
        self._node_seconds = node_seconds
        self._lock = threading.Lock()  # guards `_objects` and `_nodes`, which the threads of the watches change
        self._objects: dict[str, _Object] = {}
        self._nodes: set[str] = set()
        self._missing: dict[str, float] = {}  # the monotonic time at which each deleted node was missed first
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._watches = [
            Reflector(
                api, f"{root}/{plural}", partial(self._seen, root, plural), self._gone, optional=plural in _OPTIONAL
            )
            for root, plural in _KINDS.values()
        ]
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def start(self) -> None:
        for watch in self._watches:
            watch.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()
        for watch in self._watches:
            watch.stop()
        self._thread.join(5)

    def _seen(self, root: str, plural: str, raw: Raw) -> None:
        meta, phase = raw["metadata"], (raw.get("status") or {}).get("phase")
        where = f"/namespaces/{meta['namespace']}" if meta.get("namespace") else ""
        node = str(raw.get("spec", {}).get("nodeName") or "") if plural == "pods" else ""
        owners = tuple(meta.get("ownerReferences") or ())
        found = _Object(f"{root}{where}/{plural}/{meta['name']}", meta, owners, node, phase in ("Succeeded", "Failed"))
        with self._lock:
            self._objects[meta["uid"]] = found
            if plural == "nodes":
                self._nodes.add(meta["name"])
        self._changed.set()

    def _gone(self, raw: Raw) -> None:
        with self._lock:
            found = self._objects.pop(raw["metadata"]["uid"], None)
            if found and found.path == f"/api/v1/nodes/{raw['metadata']['name']}":
                self._nodes.discard(raw["metadata"]["name"])
        self._changed.set()

    def _run(self) -> None:
        while not all(watch.wait_synced(0.1) for watch in self._watches):
            if self._stopped.is_set():
                return
        again = False
        while not self._stopped.is_set():
            self._changed.wait(_PASS_SECONDS if again else None)
            self._changed.clear()
            again = self._pass()
            self._stopped.wait(_PASS_SECONDS)

    def _pass(self) -> bool:
        """Take all steps that are due. Return whether another pass is needed even if no object changes."""
        with self._lock:
            objects = dict(self._objects)
            nodes = set(self._nodes)
        lost = [found for found in objects.values() if found.node and found.node not in nodes]
        self._missing = {found.node: self._missing.get(found.node, time.monotonic()) for found in lost}
        again = bool(lost)
        steps: list[Callable[[], None]] = [*self._steps(objects), *(partial(self._delete_lost, pod) for pod in lost)]
        for step in steps:
            try:
                step()
            except (ApiError, Unreachable) as error:
                # The object has changed or was deleted, or the API server cannot be reached. The next pass tries again.
                log.info("a controller could not change an object, and tries again: %s", error)
                again = True
        return again

    def _steps(self, objects: Mapping[str, _Object]) -> Iterator[Callable[[], None]]:
        """Yield the garbage collector's next steps as functions, in the order of the objects' UIDs."""
        for uid, found in sorted(objects.items()):
            if found.deleting and {_FOREGROUND, _ORPHAN} & set(found.finalizers):
                dependents = [other for other in objects.values() if any(ref["uid"] == uid for ref in other.owners)]
                orphan = _ORPHAN in found.finalizers
                yield partial(self._orphan if orphan else self._delete_dependents, found, dependents)
            elif found.owners and not found.deleting:
                yield partial(self._delete_ownerless, found, objects)

    def _orphan(self, owner: _Object, owned: list[_Object]) -> None:
        """Handle `--cascade=orphan`: remove the references to the owner, and then the finalizer of the owner."""
        for other in owned:
            kept = [ref for ref in other.owners if ref["uid"] != owner.meta["uid"]]
            self._api.patch(other.path, {"metadata": {**_version(other), "ownerReferences": kept or None}})
        self._finish(owner, _ORPHAN)

    def _delete_dependents(self, owner: _Object, owned: list[_Object]) -> None:
        """Handle `--cascade=foreground`: delete the dependents.

        Remove the owner's finalizer once no dependent with `blockOwnerDeletion` is left.
        """
        for other in owned:
            if not other.deleting:
                self._api.delete(other.path, other.precondition)
        blocking = (ref.get("blockOwnerDeletion") for o in owned for ref in o.owners if ref["uid"] == owner.meta["uid"])
        if not any(blocking):
            self._finish(owner, _FOREGROUND)

    def _finish(self, owner: _Object, finalizer: str) -> None:
        """Remove a finalizer from the owner, which ends its deletion if no other finalizer is left."""
        kept = [f for f in owner.finalizers if f != finalizer]
        self._api.patch(owner.path, {"metadata": {**_version(owner), "finalizers": kept or None}})

    def _delete_ownerless(self, found: _Object, objects: Mapping[str, _Object]) -> None:
        if not any(ref["uid"] in objects or self._exists(ref, found) for ref in found.owners):
            self._api.delete(found.path, found.precondition)

    def _exists(self, ref: Raw, owned: _Object) -> bool:
        """Return whether an owner exists according to the API server.

        The watch of the owners may lag behind the watch of the dependents, so the watch alone does not suffice.
        """
        kind = _KINDS.get((ref["apiVersion"], ref["kind"]))
        if kind is None:
            return True
        root, plural = kind
        where = "" if plural in _CLUSTER_SCOPED else f"/namespaces/{owned.meta['namespace']}"
        return self._uid(f"{root}{where}/{plural}/{ref['name']}") == str(ref["uid"])

    def _uid(self, path: str) -> str:
        """Return the UID of the object at a URL path, or "" if there is none."""
        try:
            return str(self._api.get(path)["metadata"]["uid"])
        except ApiError as error:
            if error.status != 404:
                raise
            return ""

    def _delete_lost(self, pod: _Object) -> None:
        """Delete a pod whose node has been gone for `node_seconds`. If it has not ended, set it to Failed first."""
        if time.monotonic() - self._missing[pod.node] < self._node_seconds or self._uid(f"/api/v1/nodes/{pod.node}"):
            return
        if not pod.ended:
            status = {"phase": "Failed", "conditions": [_DISRUPTED]}
            body = {"metadata": {"uid": pod.meta["uid"]}, "status": status}
            self._api.patch(f"{pod.path}/status", body, _STRATEGIC_PATCH)
        self._api.delete(pod.path, {"gracePeriodSeconds": 0, **pod.precondition})


def _version(found: _Object) -> dict[str, Any]:
    """Return the metadata with which the API server refuses a patch if the object has changed."""
    return {"uid": found.meta["uid"], "resourceVersion": found.meta["resourceVersion"]}

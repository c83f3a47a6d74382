"""What the controller of MtgpuPods writes: their finalizer and status, their Pods, and occupy pods."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.kube.client import JSON_PATCH
from scheduler.decisions.decider import pod_path
from scheduler.mtgpupods.stored_objects import FINALIZERS

Raw = Mapping[str, Any]


class Writer:
    """Every write is of what the caller has seen: where that is out of date the API server refuses it (409, 404).

    may_decide raises RetryLater while this process must not write; it is asked before each write. Every call raises
    that, ApiError and Unreachable.
    """

    def __init__(self, api: Api, may_decide: Callable[[], None]) -> None:
        self._api, self._may_decide = api, may_decide

    def put_finalizer(self, item: Raw) -> Raw:
        """The MtgpuPod as it is then."""
        item = self._with_all_finalizers(item)
        return self._finalizers(item, [*_finalizers(item), mtgpu.FINALIZER])

    def take_finalizer(self, item: Raw) -> None:
        item = self._with_all_finalizers(item)
        self._finalizers(item, [name for name in _finalizers(item) if name != mtgpu.FINALIZER])

    def _with_all_finalizers(self, item: Raw) -> Raw:
        """Return the MtgpuPod with all its finalizers: `of_mtgpupod` keeps a bounded number of them."""
        if len(_finalizers(item)) <= FINALIZERS:
            return item
        whole = self.mtgpupod(item)
        if whole["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{_path(item)} has changed since it was looked at")
        return whole

    def status(self, item: Raw, status: Raw) -> Raw:
        """The MtgpuPod as it is then. The whole status at once: a merge patch could not remove fields. That nobody has
        changed the MtgpuPod meanwhile is said by its version, which the API server compares (409).
        """
        self._may_decide()
        version = item["metadata"]["resourceVersion"]
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": status},
        ]
        return self._api.patch(f"{_path(item)}/status", patch, JSON_PATCH)

    def mtgpupod(self, item: Raw) -> Raw:
        """As the API server has it now, with all its parts."""
        return self._api.get(_path(item))

    def pod(self, namespace: str, name: str) -> Raw | None:
        """As it is now, whatever the watch has brought; None: there is none."""
        try:
            return self._api.get(pod_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def make(self, pod: Raw) -> None:
        self._may_decide()
        self._api.create(f"/api/v1/namespaces/{quote(pod['metadata']['namespace'], safe='')}/pods", pod)

    def delete(self, namespace: str, name: str, uid: str, *, force: bool = False) -> None:
        """Nothing where it is another pod by now, or none. force: without grace."""
        self._may_decide()
        grace = {"gracePeriodSeconds": 0} if force else {}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **grace}
        try:
            self._api.delete(pod_path(namespace, name), options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _finalizers(self, item: Raw, names: list[str]) -> Raw:
        self._may_decide()
        version = item["metadata"]["resourceVersion"]
        return self._api.patch(_path(item), {"metadata": {"resourceVersion": version, "finalizers": names}})


def has_finalizer(item: Raw) -> bool:
    return mtgpu.FINALIZER in _finalizers(item)


def _finalizers(item: Raw) -> list[str]:
    return [*(item["metadata"].get("finalizers") or ())]


def _path(item: Raw) -> str:
    meta = item["metadata"]
    namespace, name = (quote(meta[key], safe="") for key in ("namespace", "name"))
    return f"/apis/{mtgpu.API_VERSION}/namespaces/{namespace}/mtgpupods/{name}"

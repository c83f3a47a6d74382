"""Stores the memory that pods are promised by live resizes, until the watch delivers their records.

A promise is bound to the version of the pod on which the decision is based. The write of the decision names this
version too. So once the watch delivers a later version, the write has either succeeded, and the record has the amounts,
or it never will, and the promise is void. The cluster cache uses `Promises` with its lock held.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mgpu.model.ledger import Share
from mgpu.model.resizing import RESIZE, RESIZED, shares_with
from scheduler.cluster.gpu_pods import GpuPod


class Promise(NamedTuple):
    """The bytes that containers of a pod will hold, if the decision about the pod's version is written."""

    version: str
    held: Mapping[str, int]


class Promises:
    """Part of the ClusterCache, which holds its lock around every call."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}

    def put(self, uid: str, promise: Promise) -> None:
        self._promises[uid] = promise

    def drop(self, uid: str) -> None:
        self._promises.pop(uid, None)

    def with_promised(self, gpu_pod: GpuPod, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Return the shares of this version of a pod, with what it was promised."""
        promise = self._promises.get(gpu_pod.pod.uid)
        if promise is None:
            return shares
        if promise.version != gpu_pod.version:
            self.drop(gpu_pod.pod.uid)
            return shares
        return shares_with(shares, promise.held)


def is_resizing(gpu_pod: GpuPod) -> bool:
    """Return whether the pod has annotations of a live resize."""
    annotations = gpu_pod.pod.annotations
    return bool(gpu_pod.pod.node) and (RESIZE in annotations or RESIZED in annotations)

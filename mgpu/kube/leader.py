"""Leader election through a Lease (coordination.k8s.io/v1), as client-go does it.

The times in the record are not trusted, only how long it has stood still here.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from mgpu.kube.client import Api, ApiError, Unreachable
from mgpu.version import VERSION, own_version

log = logging.getLogger(__name__)

LEASE_SECONDS = 15
LABEL = "mgpu.io/leads"
"""Of the pod whose process leads, with the value `true`."""
_FENCE_SECONDS = 10.0
"""Without a renewal for so long a leader stops acting: what it began has 5 s to land before anybody else may lead."""
_ROUND_SECONDS = 2.0


class Leader:
    """`leading` is true for at most one identity at a time. Thread-safe."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._clock = clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed: float | None = None
        self._seen: tuple[str, float] = ("", 0.0)
        self._term = 0
        self._told = ""

    @property
    def leading(self) -> bool:
        renewed = self._renewed
        return renewed is not None and self._clock() < renewed + _FENCE_SECONDS

    @property
    def term(self) -> int:
        """How often this identity has come to lead: what was learnt in an earlier term may be out of date."""
        return self._term

    def run(self, stop: threading.Event) -> None:
        """Seek and keep the lease until `stop`; then give it up."""
        while not stop.is_set():
            self.round()
            stop.wait(_ROUND_SECONDS * (0.9 + 0.2 * random.random()))
        self.release()

    def round(self) -> None:
        """One attempt to get or to renew the lease. Raises nothing."""
        was = self.leading
        started = self._clock()
        try:
            held = self._acquire(started)
        except (ApiError, Unreachable) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return
        self._told = ""
        if held:
            if not was:
                self._term += 1
                log.info("leading", extra={"identity": self._identity, "term": self._term})
            self._renewed = started
        else:
            self._renewed = None

    def release(self) -> None:
        """Let another one lead at once."""
        if not self.leading:
            return
        self._renewed = None
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                self._api.replace(f"{self._path}/{self._name}", lease)
        except (ApiError, Unreachable) as error:
            log.info("lease not released: %s", error)

    def _acquire(self, now: float) -> bool:
        """Whether the lease is ours now. A Conflict of the write says that another one was faster."""
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return self._written(lambda: self._api.create(self._path, self._lease({}, {})))
        meta, spec = lease["metadata"], lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if meta["resourceVersion"] != self._seen[0]:
            self._seen = (meta["resourceVersion"], now)
        duration = spec.get("leaseDurationSeconds") or LEASE_SECONDS
        if holder not in ("", self._identity) and now < self._seen[1] + duration:
            return False
        path = f"{self._path}/{self._name}"
        return self._written(lambda: self._api.replace(path, self._lease(meta, spec)))

    def _written(self, write: Callable[[], Any]) -> bool:
        try:
            write()
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        return True

    def _lease(self, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        now, ours = _now(), spec.get("holderIdentity") == self._identity
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                **meta,
                "annotations": {**(meta.get("annotations") or {}), VERSION: own_version()},
            },
            "spec": {
                **spec,
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": now,
                "acquireTime": spec.get("acquireTime", now) if ours else now,
                "leaseTransitions": (spec.get("leaseTransitions") or 0) + (not ours),
            },
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Leader election through a Lease (coordination.k8s.io/v1), as client-go does it.

The times and numbers in the record are not trusted, only how long it has stood still here: a stolen token could
otherwise write a lease of 68 years.
"""

import logging
import math
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
LAND_SECONDS = 5.0
"""What a leader began while it led has so long to land before anybody else may lead."""
_FENCE_SECONDS = LEASE_SECONDS - LAND_SECONDS
"""Without a renewal for so long a leader stops acting."""
_ROUND_SECONDS = 2.0
_TRANSITIONS = 1 << 31
"""The count is an int32: one more than the largest would be refused by the API server each time."""
_SEEK_SECONDS = 0.5
"""While another one leads: nobody decides for so long after it has given the lease up."""


def boot_time() -> float:
    """Return the seconds since this machine started, suspensions included.

    CLOCK_MONOTONIC leaves suspensions out: after one, a leader would go on for what its lease had left before.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux alone has it
    return time.clock_gettime(clock)


class Leader:
    """`leading` is true for at most one identity at a time. Thread-safe.

    elsewhere: whether another one is to lead, given whether this one does; then it does not seek the lease, or gives it
    up. landed: returns when all that was begun while leading has landed, or has had LAND_SECONDS for it.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = boot_time,
        elsewhere: Callable[[bool], bool] | None = None,
        landed: Callable[[], object] = lambda: time.sleep(LAND_SECONDS),
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._clock, self._elsewhere, self._landed = clock, elsewhere, landed
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed: float | None = None
        self._may_write_until = -math.inf
        self._seen: tuple[str, float] = ("", 0.0)
        self._term = 0
        self._told = ""

    @property
    def leading(self) -> bool:
        renewed = self._renewed
        return renewed is not None and self._clock() < renewed + _FENCE_SECONDS

    @property
    def may_write(self) -> bool:
        """Whether what was begun while leading may still be sent: nobody else leads before it has landed.

        Longer than `leading` where the lease is being given up, which waits for just that.
        """
        return self._clock() < self._may_write_until

    @property
    def term(self) -> int:
        """How often this identity has come to lead: what was learnt in an earlier term may be out of date."""
        return self._term

    def run(self, stop: threading.Event) -> None:
        """Seek and keep the lease until `stop`; then give it up."""
        while not stop.is_set():
            self.round()
            stop.wait((_ROUND_SECONDS if self.leading else _SEEK_SECONDS) * (0.9 + 0.2 * random.random()))
        self.release()

    def round(self) -> None:
        """One attempt to get or to renew the lease, or to give it up where it is another one's turn. Raises nothing."""
        was = self.leading
        started = self._clock()
        try:
            elsewhere = self._elsewhere is not None and self._elsewhere(was)
            if elsewhere and was:
                log.info("giving the lease up: it is another one's turn", extra={"identity": self._identity})
                self.release()
                return
            held = self._acquire(started, seek=not elsewhere)
        except (ApiError, Unreachable, KeyError) as error:  # KeyError: the answer is no Lease
            if str(error) != self._told:
                self._told = str(error)
                log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return
        self._told = ""
        if held:
            if not self.leading:  # the round itself may have taken too long
                self._term += 1
                log.info("leading", extra={"identity": self._identity, "term": self._term})
            self._renewed = started
            self._may_write_until = started + _FENCE_SECONDS
        else:
            self._renewed = None
            self._may_write_until = -math.inf

    def release(self) -> None:
        """Lead no more, from now on; and let another one, as soon as what was begun has landed."""
        if not self.leading:
            return
        self._renewed = None
        self._landed()
        self._may_write_until = -math.inf
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                self._api.replace(f"{self._path}/{self._name}", lease)
        except (ApiError, Unreachable) as error:
            log.info("lease not released: %s", error)

    def _acquire(self, now: float, *, seek: bool) -> bool:
        """Whether the lease is ours now. A Conflict of the write says that another one was faster.

        Who does not seek it looks all the same: for how long it has stood still it has to know when its turn comes.
        """
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return seek and self._written(lambda: self._api.create(self._path, self._lease({}, {})))
        meta, spec = lease["metadata"], lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if meta["resourceVersion"] != self._seen[0]:
            self._seen = (meta["resourceVersion"], now)
        if not seek or (holder not in ("", self._identity) and now < self._seen[1] + LEASE_SECONDS):
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
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": now,
                "acquireTime": spec.get("acquireTime", now) if ours else now,
                "leaseTransitions": ((spec.get("leaseTransitions") or 0) + (not ours)) % _TRANSITIONS,
            },
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

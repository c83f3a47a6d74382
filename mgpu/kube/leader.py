"""Leader election through a Lease (coordination.k8s.io/v1), as in client-go.

Times and durations in the Lease are not trusted, only for how long it has not changed by the local clock: with a stolen
token an attacker could otherwise write a Lease of 68 years.
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
from mgpu.version import VERSION_ANNOTATION, own_version

log = logging.getLogger(__name__)

LEASE_SECONDS = 15
LABEL = "mgpu.io/leads"
"""The label with the value `true` on the Pod of the leader."""
WRITE_SECONDS = 5.0
"""Writes that a leader has begun get this long to arrive before another replica may lead."""
_FENCE_SECONDS = LEASE_SECONDS - WRITE_SECONDS
"""A leader that has not renewed its Lease for so long stops acting."""
_ROUND_SECONDS = 2.0
_TRANSITIONS = 1 << 31
"""The counter is an int32; the API server would refuse one more than the largest for ever."""
_SEEK_SECONDS = 0.5
"""The interval of a follower: for so long no replica decides after the leader has released the Lease."""


def boot_time() -> float:
    """Return the seconds since this machine started, suspensions included.

    CLOCK_MONOTONIC does not count suspensions: after one, a leader would continue although its Lease has expired.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has CLOCK_BOOTTIME
    return time.clock_gettime(clock)


class Leader:
    """A candidate. `leading` is true for at most one identity at a time. Thread-safe.

    Args:
        should_yield: called with whether this replica leads; returns whether another one should. Then this replica does
            not seek the Lease, or releases it.
        wait_for_writes: returns when all writes begun while leading have arrived, or after WRITE_SECONDS.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = boot_time,
        should_yield: Callable[[bool], bool] | None = None,
        wait_for_writes: Callable[[], object] = lambda: time.sleep(WRITE_SECONDS),
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._clock = clock
        self._should_yield = should_yield
        self._wait_for_writes = wait_for_writes
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
        """Whether writes begun while leading may still be sent: no other replica leads before they have arrived.

        This stays true longer than `leading` while the Lease is being released, which waits for these writes.
        """
        return self._clock() < self._may_write_until

    @property
    def term(self) -> int:
        """How many times this identity has become the leader. Knowledge of an earlier term can be out of date."""
        return self._term

    def run(self, stop: threading.Event) -> None:
        """Seek and keep the Lease until `stop`, then release it."""
        while not stop.is_set():
            self.round()
            stop.wait((_ROUND_SECONDS if self.leading else _SEEK_SECONDS) * (0.9 + 0.2 * random.random()))
        self.release()

    def round(self) -> None:
        """Try once to acquire or renew the Lease, or release it if another replica should lead. Never raises."""
        was = self.leading
        started = self._clock()
        try:
            elsewhere = self._should_yield is not None and self._should_yield(was)
            if elsewhere and was:
                log.info("Releasing lease: another replica should lead", extra={"identity": self._identity})
                self.release()
                return
            held = self._acquire(started, seek=not elsewhere)
        except (ApiError, Unreachable, KeyError) as error:  # KeyError: the answer is not a Lease
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
        """Stop leading now, and release the Lease as soon as all writes have arrived."""
        if not self.leading:
            return
        self._renewed = None
        self._wait_for_writes()
        self._may_write_until = -math.inf
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                self._api.replace(f"{self._path}/{self._name}", lease)
        except (ApiError, Unreachable) as error:
            log.info("lease not released: %s", error)

    def _acquire(self, now: float, *, seek: bool) -> bool:
        """Return whether this identity holds the Lease now. A Conflict means that another one was faster.

        A replica that does not seek the Lease reads it nevertheless: it has to know for how long the Lease has not
        changed when it is to seek it.
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
                "annotations": {**(meta.get("annotations") or {}), VERSION_ANNOTATION: own_version()},
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

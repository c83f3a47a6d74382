"""Implements leader election with a Lease (coordination.k8s.io/v1), as client-go does.

The replicas of the scheduler elect their leader with a `Leader`. A `Leader` must not trust the times and durations in
the Lease, because an attacker with a stolen token could write a Lease with a duration of 68 years. A `Leader` measures
with its own clock for how long the Lease has not changed.
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
"""The time after which another candidate may acquire a Lease that has not changed."""
LABEL = "mgpu.io/leads"
"""The label of the leader's Pod, with the value `true`."""
WRITE_SECONDS = 5.0
"""The time that a write may take to arrive at the API server. A leader that cannot renew its Lease stops writing
this long before another candidate may acquire the Lease."""
_FENCE_SECONDS = LEASE_SECONDS - WRITE_SECONDS
"""The time after its last renewal of the Lease at which a leader stops deciding and writing."""
_ROUND_SECONDS = 2.0
"""The interval at which the leader renews the Lease."""
_TRANSITIONS = 1 << 31
"""The number at which leaseTransitions wraps around. It is an int32, and the API server rejects larger values."""
_SEEK_SECONDS = 0.5
"""The interval at which a follower reads the Lease. After the leader has released the Lease, no replica leads for up to
about this time."""


def boot_time() -> float:
    """Return the seconds since this machine started. On Linux they include suspensions.

    With CLOCK_MONOTONIC, which does not count suspensions, a leader would continue after a suspension although its
    Lease has expired.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Only Linux has CLOCK_BOOTTIME.
    return time.clock_gettime(clock)


class Leader:
    """A candidate of the election. At most one candidate is `leading` at a time.

    Any thread may read the properties, but only one thread at a time may call the methods.

    Args:
        identity: The name of this candidate, which no other candidate may have.
        clock: A clock in seconds that is never set back and that counts suspensions.
        should_yield: A function that gets whether this replica leads, and returns whether another replica should lead.
            If so, this replica releases the Lease or does not try to acquire it.
        wait_for_writes: A function that returns when all writes that began while this replica led have arrived, at the
            latest after WRITE_SECONDS.
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
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._should_yield = should_yield
        self._wait_for_writes = wait_for_writes
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed: float | None = None
        self._may_write_until = -math.inf
        self._observed: tuple[str, float] = ("", 0.0)
        self._term = 0
        self._last_error = ""

    @property
    def leading(self) -> bool:
        renewed = self._renewed
        return renewed is not None and self._clock() < renewed + _FENCE_SECONDS

    @property
    def may_write(self) -> bool:
        """Whether writes that began while this candidate led may still be sent.

        While the Lease is being released, `may_write` is still true although `leading` is false, because the release
        waits for the writes.
        """
        return self._clock() < self._may_write_until

    @property
    def term(self) -> int:
        """The number of times that this candidate became the leader. State from an earlier term may be outdated."""
        return self._term

    def run(self, stop: threading.Event) -> None:
        """Try to acquire and renew the Lease until `stop` is set, then release it."""
        while not stop.is_set():
            self.round()
            stop.wait((_ROUND_SECONDS if self.leading else _SEEK_SECONDS) * (0.9 + 0.2 * random.random()))
        self.release()

    def round(self) -> None:
        """Try once to acquire or renew the Lease, or release it if another replica should lead.

        Errors of the API server are logged.
        """
        was_leading = self.leading
        started = self._clock()
        try:
            yields = self._should_yield is not None and self._should_yield(was_leading)
            if yields and was_leading:
                log.info("Releasing lease: another replica should lead", extra={"identity": self._identity})
                self.release()
                return
            held = self._acquire(started, seek=not yields)
        except (ApiError, Unreachable, KeyError) as error:  # KeyError: the answer is not a Lease
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return
        self._last_error = ""
        if held:
            if not self.leading:  # Not leading before, or the round has taken so long that this candidate stopped.
                self._term += 1
                log.info("leading", extra={"identity": self._identity, "term": self._term})
            self._renewed = started
            self._may_write_until = started + _FENCE_SECONDS
        else:
            self._renewed = None
            self._may_write_until = -math.inf

    def release(self) -> None:
        """Stop leading, wait until all writes have arrived, and release the Lease."""
        if not self.leading:
            return
        self._renewed = None
        self._wait_for_writes()
        self._may_write_until = -math.inf
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") == self._identity:
                spec |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                self._api.replace(f"{self._path}/{self._name}", lease)
        except (ApiError, Unreachable) as error:
            log.info("failed to release the lease: %s", error)

    def _acquire(self, now: float, *, seek: bool) -> bool:
        """Try to acquire or renew the Lease, and return whether this candidate holds it now.

        Args:
            now: The current time of the clock.
            seek: Whether to acquire the Lease. If not, the Lease is only read, in order to know later for how long it
                has not changed.
        """
        try:
            lease = self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return seek and self._written(lambda: self._api.create(self._path, self._lease({}, {})))
        meta, spec = lease["metadata"], lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if meta["resourceVersion"] != self._observed[0]:
            self._observed = (meta["resourceVersion"], now)
        if not seek or (holder not in ("", self._identity) and now < self._observed[1] + LEASE_SECONDS):
            return False
        path = f"{self._path}/{self._name}"
        return self._written(lambda: self._api.replace(path, self._lease(meta, spec)))

    def _written(self, write: Callable[[], Any]) -> bool:
        try:
            write()
        except ApiError as error:
            if error.status == 409:  # Another candidate was faster.
                return False
            raise
        return True

    def _lease(self, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        now = _now()
        is_own = spec.get("holderIdentity") == self._identity
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
                "acquireTime": spec.get("acquireTime", now) if is_own else now,
                "leaseTransitions": ((spec.get("leaseTransitions") or 0) + (not is_own)) % _TRANSITIONS,
            },
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

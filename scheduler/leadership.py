"""Directs calls to the leader by a label, and finds out which replica should lead if each has a kube-scheduler.

`LeaderLabel` labels the pod of the replica that decides, and the Service selects that label. So all replicas can be
ready, as Deployments, PodDisruptionBudgets and alerts expect. Safety does not depend on the label: only the holder of
the Lease (`mgpu.kube.leader`) decides, and any other replica answers 503. `scheduler.runtime` uses this module.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.leader import LABEL, LEASE_SECONDS
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

REPLICAS = "app.kubernetes.io/name=mgpu,app.kubernetes.io/component=scheduler"
"""The label selector of the pods of all replicas."""
_ROUND_SECONDS = 0.2
_RETRY_SECONDS = 2.0
_REPEAT_SECONDS = 15.0
"""The interval at which the labels are checked. Users may edit them, and a former leader's last write may be late."""


class LeaderLabel:
    """Keeps the label on the pod of the replica that decides, and on no other pod.

    Args:
        uid: The UID of this process's own pod.
        not_deciding_reason: Returns why this process does not decide now, or None if it decides.

    Attributes:
        written: Whether this process decides and its pod alone had the label at the last check.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        uid: str,
        not_deciding_reason: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._uid = uid
        self._not_deciding_reason = not_deciding_reason
        self._clock = clock
        self._due = 0.0
        self.written = False
        self._name: str | None = None
        self._logged_error: str | None = None

    def run(self, stop: threading.Event, wait_for_release: Callable[[], object]) -> None:
        """Keep the label until `stop` is set and `wait_for_release` has returned, then remove it.

        Args:
            wait_for_release: Blocks until another replica may lead.
        """
        while not stop.wait(_ROUND_SECONDS):
            self.round()
        wait_for_release()
        self.end()

    def round(self) -> None:
        """Label this pod, and no other, if this process decides and a check is due. API errors are only logged."""
        if self._not_deciding_reason() is not None:
            self._due = 0.0
            self.written = False
        elif self._clock() >= self._due:
            self.written = self._try(self._label)
            self._due = self._clock() + (_REPEAT_SECONDS if self.written else _RETRY_SECONDS)

    def end(self) -> None:
        """Remove the label from the pod of this process. API errors are only logged."""
        self.written = False
        name = self._name
        if name is not None:
            self._try(lambda: self._write(name, None, uid=self._uid))

    def _label(self) -> None:
        """Remove the label from the other pods, then add it to this one.

        The order matters if the process dies halfway: no labelled pod is better than a labelled follower. Raises
        RetryLater if this process stops deciding.
        """
        replicas = [pod["metadata"] for pod in self._api.list(self._path, labelSelector=REPLICAS)[0]]
        own = next((meta for meta in replicas if meta["uid"] == self._uid), None)
        self._name = own["name"] if own else None
        writes: list[tuple[dict[str, Any], str | None]] = []
        writes += ((meta, None) for meta in replicas if meta is not own and LABEL in meta["labels"])
        if own and own["labels"].get(LABEL) != "true":
            writes.append((own, "true"))
        for meta, value in writes:
            if (reason := self._not_deciding_reason()) is not None:
                raise RetryLater(reason)
            # The version makes the write fail if another leader has labelled the pod since.
            self._write(meta["name"], value, uid=meta["uid"], resourceVersion=meta["resourceVersion"])
        if own is None:
            raise ApiError(404, "NotFound", f"no pod has uid {self._uid} and the labels {REPLICAS}")

    def _write(self, name: str, value: str | None, **preconditions: str) -> None:
        """Set or remove the label.

        Args:
            value: The value of the label, or None to remove it.
            preconditions: The UID, so that a new pod of the same name is not changed, and perhaps a resourceVersion.
        """
        try:
            self._api.patch(f"{self._path}/{name}", {"metadata": {**preconditions, "labels": {LABEL: value}}})
        except ApiError as error:
            if value or error.status != 404:
                raise

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except RetryLater:
            return False
        except (ApiError, Unreachable) as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.warning("cannot write label %s: %s", LABEL, error)
            return False
        self._logged_error = None
        return True


class OwnKubeScheduler:
    """Finds out which replica's kube-scheduler leads, if each replica has one in its pod.

    A kube-scheduler calls the extender in its own pod. A pod that the filter of a replica has rejected is known only to
    this replica, and only the leader makes partition plans for such pods. So the replica whose kube-scheduler leads
    should lead too. A kube-scheduler's identity is its host name, `_` and a UUID, and all containers of a pod have the
    same host name.

    Args:
        lease: The name of the Lease of the kube-schedulers, in `namespace`.
        host: The host name of this process's own pod.
    """

    def __init__(
        self, api: Api, namespace: str, lease: str, host: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
        self._host = host
        self._clock = clock
        # The resourceVersion of the Lease, and the time at which this version was first observed.
        self._observed: tuple[str, float] = ("", 0.0)
        self._logged_error: str | None = None

    def elsewhere(self, leads: bool) -> bool:
        """Return whether a replica in another pod should lead.

        Returns False if the Lease cannot be read or has expired, because cards must be decided even if no
        kube-scheduler runs. If the Lease was just released, a kube-scheduler is about to acquire it. Until then a
        replica that leads continues to lead, and a replica that does not lead waits.

        Args:
            leads: Whether this replica leads.

        Raises:
            Unreachable: The API server does not answer.
        """
        try:
            lease = self._api.get(self._path)
        except ApiError as error:
            if error.status != 404 and str(error) != self._logged_error:
                self._logged_error = str(error)
                log.warning("cannot find out which kube-scheduler leads: %s", error)
            return False
        self._logged_error = None
        version = lease["metadata"]["resourceVersion"]
        now = self._clock()
        if version != self._observed[0]:
            self._observed = (version, now)
        # The age of the last renewal is measured by this process's own clock, because clocks of machines may differ.
        if now >= self._observed[1] + LEASE_SECONDS:
            return False
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if not holder:
            return not leads
        return holder.rpartition("_")[0] != self._host

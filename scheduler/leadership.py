"""Leadership as the rest of the cluster sees it: the label of the leader's pod, and a lease that ours follows.

`LeaderLabel` labels the pod of the replica that decides, and the Service selects that label. `OwnKubeScheduler` tells
which replica should lead where each has a kube-scheduler in its pod. Neither is needed for safety: the Lease
(`mgpu.kube.leader`) says who may decide, and a replica that may not answers 503 whatever its pod is labelled. So all
replicas can be ready, which Deployments, PodDisruptionBudgets and alerts expect.
"""

import logging
import threading
import time
from collections.abc import Callable

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.leader import LABEL, LEASE_SECONDS

log = logging.getLogger(__name__)

REPLICAS = "app.kubernetes.io/name=mgpu,app.kubernetes.io/component=scheduler"
_ROUND_SECONDS = 0.2
_RETRY_SECONDS = 2.0
_REPEAT_SECONDS = 15.0
"""A user may edit labels, and a former leader's last write may come late."""


class LeaderLabel:
    """Keeps the label on the pod of the replica that decides, and on no other.

    Args:
        namespace: The namespace of the replicas' pods.
        uid: The UID of this process's own pod.
        not_deciding_reason: Why this process does not decide now, or None where it does.

    Attributes:
        written: Whether this process decides and its pod alone had the label at the last round.
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

    def run(self, stop: threading.Event, given_up: Callable[[], object]) -> None:
        """Keep the label until `stop`, then remove it. given_up: blocks until another replica may lead."""
        while not stop.wait(_ROUND_SECONDS):
            self.round()
        given_up()
        self.end()

    def round(self) -> None:
        """Label this pod alone, if that is due. Raises nothing."""
        if self._not_deciding_reason() is not None:
            self._due = 0.0
            self.written = False
        elif self._clock() >= self._due:
            self.written = self._tried(self._label)
            self._due = self._clock() + (_REPEAT_SECONDS if self.written else _RETRY_SECONDS)

    def end(self) -> None:
        """Remove the label from this pod, which decides no more. Raises nothing."""
        self.written = False
        name = self._name
        if name is not None:
            self._tried(lambda: self._write(name, None, uid=self._uid))

    def _label(self) -> None:
        """Remove the label from the other pods, then add it to this one.

        In this order, because a process that dies half-way leaves no pod labelled rather than a follower's.
        """
        replicas = [pod["metadata"] for pod in self._api.list(self._path, labelSelector=REPLICAS)[0]]
        own = next((meta for meta in replicas if meta["uid"] == self._uid), None)
        writes = [(meta, None) for meta in replicas if meta is not own and LABEL in meta["labels"]]
        self._name = own["name"] if own else None
        for meta, value in [*writes, *([(own, "true")] if own and own["labels"].get(LABEL) != "true" else [])]:
            if self._not_deciding_reason() is not None:
                return
            # With the version: a pod that another leader has labelled since has a newer one, and the write fails.
            self._write(meta["name"], value, uid=meta["uid"], resourceVersion=meta["resourceVersion"])
        if own is None:
            raise ApiError(404, "NotFound", f"no pod has uid {self._uid} and the labels {REPLICAS}")

    def _write(self, name: str, value: str | None, **only: str) -> None:
        """Set or remove the label. only: preconditions, so that a new pod of the same name stays as it is."""
        try:
            self._api.patch(f"{self._path}/{name}", {"metadata": {**only, "labels": {LABEL: value}}})
        except ApiError as error:
            if value or error.status != 404:
                raise

    def _tried(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except (ApiError, Unreachable) as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.warning("label %s: %s", LABEL, error)
            return False
        self._logged_error = None
        return True


class OwnKubeScheduler:
    """Tells which replica's own kube-scheduler leads, where each replica has one in its pod.

    A kube-scheduler calls the extender in its own pod, and only the replica that decides plans slices for the pods that
    it was asked about. So mgpu's lease follows theirs. A kube-scheduler's identity is HOST_UUID, and all containers of
    a pod have one host name.
    """

    def __init__(
        self, api: Api, namespace: str, lease: str, host: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
        self._host = host
        self._clock = clock
        self._observed: tuple[str, float] = ("", 0.0)  # resourceVersion of the lease, and since when it is known
        self._logged_error: str | None = None

    def elsewhere(self, leads: bool) -> bool:
        """Return whether the replica in another pod should lead. leads: whether this one does.

        False where that is not known, or where no kube-scheduler has renewed the lease for as long as it lasts: cards
        are decided without one too. A lease that was released just now is about to be taken: this replica goes on if
        it leads, and waits if it does not.

        Raises:
            Unreachable: The API server does not answer.
        """
        try:
            lease = self._api.get(self._path)
        except ApiError as error:
            if error.status != 404 and str(error) != self._logged_error:
                self._logged_error = str(error)
                log.warning("which kube-scheduler leads is not known: %s", error)
            return False
        self._logged_error = None
        version = lease["metadata"]["resourceVersion"]
        now = self._clock()
        if version != self._observed[0]:
            self._observed = (version, now)
        # Renewals are timed by this process's own clock: those of other machines may differ.
        if now >= self._observed[1] + LEASE_SECONDS:
            return False
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        return holder.rpartition("_")[0] != self._host if holder else not leads

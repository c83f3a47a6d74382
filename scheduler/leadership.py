"""Which pod the Service leads to, a label on the pod of the replica that decides; and which replica that should be.

Nothing is safe by either: who may decide says the Lease, and a replica that may not answers 503 whatever its pod is
labelled. All replicas can be ready so, which Deployments, disruption budgets and alerts want.
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
"""Somebody may edit labels, and a former leader's last write may come late."""


class LeaderLabel:
    """uid: of this process's own pod in `namespace`. leads: why it does not decide now, "": it does.

    written: whether it decides and its pod had the label, alone, when that was looked at last.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        uid: str,
        leads: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._path = api, f"/api/v1/namespaces/{namespace}/pods"
        self._uid, self._leads, self._clock = uid, leads, clock
        self._due = 0.0
        self.written = False
        self._name = self._told = ""

    def run(self, stop: threading.Event, given_up: Callable[[], object]) -> None:
        """Until `stop`; then take the label away. given_up: returns when another one may lead."""
        while not stop.wait(_ROUND_SECONDS):
            self.round()
        given_up()
        self.end()

    def round(self) -> None:
        """Label this pod alone, if that is due. Raises nothing."""
        if self._leads():
            self._due, self.written = 0.0, False
        elif self._clock() >= self._due:
            self.written = self._tried(self._label)
            self._due = self._clock() + (_REPEAT_SECONDS if self.written else _RETRY_SECONDS)

    def end(self) -> None:
        """The label is not left on a pod that decides no more. Raises nothing."""
        self.written = False
        if self._name:
            self._tried(lambda: self._write(self._name, None, uid=self._uid))

    def _label(self) -> None:
        """The others first: if this ends half-way nobody has it, and the Service leads to no follower."""
        replicas = [pod["metadata"] for pod in self._api.list(self._path, labelSelector=REPLICAS)[0]]
        own = next((meta for meta in replicas if meta["uid"] == self._uid), None)
        writes = [(meta, None) for meta in replicas if meta is not own and LABEL in meta["labels"]]
        self._name = own["name"] if own else ""
        for meta, value in [*writes, *([(own, "true")] if own and own["labels"].get(LABEL) != "true" else [])]:
            if self._leads():
                return
            # Written by another leader since, it is in another version.
            self._write(meta["name"], value, uid=meta["uid"], resourceVersion=meta["resourceVersion"])
        if own is None:
            raise ApiError(404, "NotFound", f"no pod has uid {self._uid} and the labels {REPLICAS}")

    def _write(self, name: str, value: str | None, **only: str) -> None:
        """only: `uid`, `resourceVersion`: another pod of that name stays as it is."""
        try:
            self._api.patch(f"{self._path}/{name}", {"metadata": {**only, "labels": {LABEL: value}}})
        except ApiError as error:
            if value or error.status != 404:
                raise

    def _tried(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except (ApiError, Unreachable) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("label %s: %s", LABEL, error)
            return False
        self._told = ""
        return True


class OwnKubeScheduler:
    """Of a kube-scheduler in this process's own pod, and of those in the other replicas' pods: which of them leads.

    It asks the mgpu process beside it, and only the one that decides plans slices for pods that it was asked about. So
    mgpu's lease follows theirs: a kube-scheduler calls itself HOST_UUID, and all of a pod have one host name.
    """

    def __init__(
        self, api: Api, namespace: str, lease: str, host: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._path = api, f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
        self._host, self._clock = host, clock
        self._seen: tuple[str, float] = ("", 0.0)
        self._told = ""

    def elsewhere(self, leads: bool) -> bool:
        """Whether the replica in another pod is to lead. leads: whether this one does.

        Not where that is not known, or no kube-scheduler has renewed the lease for as long as it lasts: cards are
        decided without one too. A lease that was given up just now is another's in a moment, but who leads can wait.
        Raises Unreachable.
        """
        try:
            lease = self._api.get(self._path)
        except ApiError as error:
            if error.status != 404 and str(error) != self._told:
                self._told = str(error)
                log.warning("which kube-scheduler leads is not known: %s", error)
            return False
        self._told = ""
        version, now = lease["metadata"]["resourceVersion"], self._clock()
        if version != self._seen[0]:
            self._seen = (version, now)
        if now >= self._seen[1] + LEASE_SECONDS:
            return False
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        return holder.rpartition("_")[0] != self._host if holder else not leads

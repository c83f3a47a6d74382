"""Makes kube-scheduler retry pods whose claims fit by the ledger, although kube-scheduler has found no node for them.

While an allocation is being written, kube-scheduler counts it on the card that it has chosen itself, and afterwards on
the card that mgpu has chosen. If the write is denied, the amount is free again. kube-scheduler registers no event for
either change, so a pod that it has rejected in between waits for up to five minutes (docs/design/dra.md,
"Observations", stranded pods). Any change of a ResourceSlice makes it retry the pods with claims. So the waker changes
an annotation of the slice of a node on which such a pod fits.

A pod may wait for a reason that mgpu does not know, such as cpu. So the pauses between two attempts for the same pod
grow. One annotation makes kube-scheduler retry all pods that wait, so pods with equal pauses are examined at the same
time, and share it. Users choose how long their claims take to examine, so the time for each pod and each round is
limited, and namespaces take turns. A pod for which the time does not suffice is examined on further nodes in the next
rounds.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, zip_longest
from urllib.parse import quote

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.resource_claims import SLICES, Claim
from mgpu.model.resource_slices import WAKE, slice_name
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.claim_pods import WaitingPod
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.claim_selectors import Patience
from scheduler.decisions.effort_budgets import EffortExceeded
from scheduler.decisions.open_claims import sets_of_alternatives

log = logging.getLogger(__name__)

ROUND_SECONDS = 1.0
"""The interval between two rounds, each of which writes at most one annotation."""
PAUSE_SECONDS = 1.0
"""The pause before a pod is examined again."""
_DOUBLINGS = 6
MAX_PAUSE = PAUSE_SECONDS * 2**_DOUBLINGS
_QUICK_WAKES = 5
"""The number of attempts for a pod after which the pause doubles with each further one."""
_MOST_PODS = 50
"""The most pods that one round examines."""
_ROUND_WORK = 0.3
"""The seconds of CPU time after which a round examines no more pods. Other threads need the time, too."""
_NODE_WORK = 0.1
"""The seconds of CPU time after which no more claims and alternatives of a pod are examined on one node. A pod that
needs longer counts as one that does not fit there."""
_POD_WORK = 0.1
"""The seconds of CPU time after which a round examines no more nodes for a pod."""


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attempts for one pod.

    Attributes:
        due: When the pod is examined again.
        wakes: How often it was woken because it fits.
        rejected_at: The version of the cluster at which it was found that the pod fits on no node; -1 if it was not.
        last_node: The last node that was examined, if further ones are to be examined; "" otherwise.
        version: The version of the cluster when the first node was examined.
    """

    due: float
    wakes: int = 0
    rejected_at: int = -1
    last_node: str = ""
    version: int = -1


class ClaimWaker:
    """Wakes pods. One thread calls `work` every `ROUND_SECONDS`.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        may_decide: Raises RetryLater while this replica must not decide.
        cpu_clock: Returns the CPU time of the thread.
    """

    def __init__(
        self,
        state: ClusterCache,
        decider: ClaimDecider,
        api: Api,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._state = state
        self._decider = decider
        self._api = api
        self._may_decide = may_decide
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._attempts: dict[str, _Attempts] = {}
        self._without_slice: dict[str, float] = {}  # By node, until when it is left out.

    def work(self) -> None:
        """Wake the waiting pods once, if any of them fits."""
        waiting = self._state.claims.waiting_pods()
        now = self._clock()
        # The first pause lets kube-scheduler's own retry come first.
        self._attempts = {pod.uid: self._attempts.get(pod.uid) or _Attempts(now + PAUSE_SECONDS) for pod in waiting}
        self._without_slice = {node: until for node, until in self._without_slice.items() if until > now}
        version = self._state.version
        due = [pod for pod in waiting if self._is_due(pod, version)]
        # Those that were examined longest ago come first, so that the first pods do not keep the others from it.
        due.sort(key=lambda pod: (self._attempts[pod.uid].due, pod.uid))
        if not due:
            return
        try:
            self._may_decide()
        except RetryLater:
            return
        end = self._cpu_clock() + _ROUND_WORK
        has_announced = False
        for pod in _in_turns(due)[:_MOST_PODS]:
            if self._cpu_clock() > end:
                return
            node = self._fitting_node(pod, version)
            if node is None:
                continue
            if not has_announced and not self._announce(node):
                return
            has_announced = True
            self._note_wake(pod)

    def _is_due(self, pod: WaitingPod, version: int) -> bool:
        attempts = self._attempts[pod.uid]
        overdue = self._clock() - attempts.due
        # Claims, classes and slices do not change the version, so a pod is examined again after some time anyway.
        return overdue >= 0 and (attempts.rejected_at != version or overdue >= MAX_PAUSE)

    def _note_wake(self, pod: WaitingPod) -> None:
        """Note that an annotation made kube-scheduler retry this pod, which fits.

        Its pause ends at a multiple of the pause, so all pods with equal pauses are due at the same time.
        """
        wakes = self._attempts[pod.uid].wakes + 1
        doublings = min(max(0, wakes - _QUICK_WAKES), _DOUBLINGS)
        pause = PAUSE_SECONDS * 2**doublings
        self._attempts[pod.uid] = _Attempts((self._clock() // pause + 1) * pause, wakes)

    def _fitting_node(self, pod: WaitingPod, version: int) -> str | None:
        """Return a node on which all claims of the pod fit that are not allocated yet, or None, and note that.

        Args:
            version: The present version of the cluster.
        """
        now = self._clock()
        attempts = self._attempts[pod.uid]
        if not attempts.last_node:
            attempts = replace(attempts, version=version)
        claims = [claim for name in pod.claims if (claim := self._state.claims.named(pod.namespace, name)) is not None]
        open_claims = [claim for claim in claims if not claim.allocated]
        nodes = [node for node in self._state.nodes_for_claims() if node not in self._without_slice]
        end = self._cpu_clock() + _POD_WORK
        for node in nodes[bisect_right(nodes, attempts.last_node) :] if open_claims else ():
            until = self._cpu_clock() + _NODE_WORK
            patience = Patience(_NODE_WORK)
            if all(self._fits(claim, node, until, patience) for claim in open_claims):
                return node
            if self._cpu_clock() > end:
                self._attempts[pod.uid] = replace(attempts, due=now, rejected_at=-1, last_node=node)
                return None
        # Nodes that have changed since they were examined are examined again, because the version differs then.
        rejected = replace(attempts, due=now + PAUSE_SECONDS, rejected_at=attempts.version, last_node="")
        self._attempts[pod.uid] = rejected
        return None

    def _fits(self, claim: Claim, node: str, until: float, patience: Patience) -> bool:
        snapshot = self._state.node_snapshot(node, claim.uid)
        if snapshot.node is None or self._state.agent_problem(node) is not None:
            return False
        for names in sets_of_alternatives(request for request in claim.requests if not request.admin):
            if self._cpu_clock() > until:
                return False
            try:
                if self._decider.assess(claim, names, snapshot, patience) is None:
                    return True
            except EffortExceeded:
                continue  # The pod is examined again. It must not keep the others from being examined.
        return False

    def _announce(self, node: str) -> bool:
        """Make kube-scheduler retry the pods with claims. Return whether that was written."""
        change = {"metadata": {"annotations": {WAKE: datetime.now(UTC).isoformat(timespec="milliseconds")}}}
        try:
            self._api.patch(f"{SLICES}/{quote(slice_name(node), safe='')}", change)
        except ApiError as error:
            if error.status == 404:
                # The agent has not published the node's cards (yet).
                self._without_slice[node] = self._clock() + MAX_PAUSE
            else:
                log.warning("cannot wake pods with claims: %s", error, extra={"node": node})
        except Unreachable as error:
            log.warning("cannot wake pods with claims: %s", error, extra={"node": node})
        else:
            metrics.CLAIM_WAKES.inc()
            return True
        return False


def _in_turns(pods: Sequence[WaitingPod]) -> list[WaitingPod]:
    """Return the first pod of each namespace, then the second ones, and so on."""
    by_namespace: dict[str, list[WaitingPod]] = {}
    for pod in pods:
        by_namespace.setdefault(pod.namespace, []).append(pod)
    return [pod for pod in chain.from_iterable(zip_longest(*by_namespace.values())) if pod is not None]

"""Makes the kubelet repeat what has failed before it has called this driver.

Before the kubelet has the claims of a pod prepared, it reads them from the API server. The Node authorizer allows that
only once it has seen that the pod is on the node, and the kubelet is often faster, in particular in a burst of pods
(`no relationship found`, docs/design/dra.md, "Observations"). It also calls no driver that is not registered, as while
an agent starts. After such a failure it tries the pod again only at its next regular synchronization, after 60 to 90 s.
It synchronizes a pod at once if its annotations have changed.

So if a pod waits on this node, and the kubelet has not called for one of its claims, its annotation changes.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from deviceplugin.dra.claim_users import ClaimPod, ClaimUsers
from deviceplugin.dra.prepared_claims import PreparedClaims
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.claim_object import read_stored_claim
from mgpu.model.errors import BadObject
from mgpu.model.resource_claims import claim_path
from mgpu.settings import CARD_POLICIES

log = logging.getLogger(__name__)

RETRY = "mgpu.io/claims-retry"
"""The annotation of a pod whose change makes the kubelet synchronize the pod. Nobody reads it."""
FIRST_PAUSE = 2.0
"""How long the kubelet may take until it calls. In general it calls within 0.5 s."""
LONGEST_PAUSE = 30.0
_ROUND_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attempts for one pod.

    Attributes:
        due: When the pod is examined again.
        pause: The pause after that.
    """

    due: float
    pause: float = FIRST_PAUSE


class KubeletRetries:
    """The loop that changes the annotations. Use it on one event loop.

    Args:
        is_registered: A function that returns whether the kubelet can call this driver.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        claims: PreparedClaims,
        users: ClaimUsers,
        is_registered: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._node = node
        self._claims = claims
        self._users = users
        self._is_registered = is_registered
        self._clock = clock
        self._attempts: dict[str, _Attempts] = {}

    async def run(self) -> None:
        """Examine the pods until cancelled."""
        while True:
            await asyncio.sleep(_ROUND_SECONDS)
            await self.work()

    async def work(self) -> None:
        """Examine the pods once."""
        if not self._is_registered():
            self._attempts = {}
            return
        now = self._clock()
        waiting = [pod for pod in self._users.waiting() if not self._has_records(pod)]
        # A kubelet that has just seen the pod, or the driver, needs some time.
        self._attempts = {pod.uid: self._attempts.get(pod.uid) or _Attempts(now + FIRST_PAUSE) for pod in waiting}
        for pod in waiting:
            attempts = self._attempts[pod.uid]
            if attempts.due > now:
                continue
            self._attempts[pod.uid] = _Attempts(now + attempts.pause, min(2 * attempts.pause, LONGEST_PAUSE))
            try:
                await self._examine(pod)
            except (ApiError, Unreachable, BadObject) as error:
                log.debug("cannot make the kubelet retry pod %s/%s: %s", pod.namespace, pod.name, error)

    def _has_records(self, pod: ClaimPod) -> bool:
        return all(self._claims.named(pod.namespace, claim) is not None for claim in pod.claims)

    async def _examine(self, pod: ClaimPod) -> None:
        for name in sorted(pod.claims):
            if await self._is_left_out(pod, name):
                await asyncio.to_thread(self._touch, pod)
                log.info("the kubelet has not called for claim %s/%s", pod.namespace, name, extra={"pod": pod.uid})
                return

    async def _is_left_out(self, pod: ClaimPod, name: str) -> bool:
        """Return whether the kubelet should have called for this claim, and has not."""
        if self._claims.named(pod.namespace, name) is not None:
            return False
        raw = await asyncio.to_thread(self._api.get, claim_path(pod.namespace, name))
        claim = read_stored_claim(raw, CARD_POLICIES)
        if claim.node != self._node or pod.uid not in {consumer.uid for consumer in claim.consumers}:
            return False  # It has no cards of this driver, or the pod may not use it (yet).
        return not self._claims.is_active(claim.uid)

    def _touch(self, pod: ClaimPod) -> None:
        change = {"uid": pod.uid, "annotations": {RETRY: datetime.now(UTC).isoformat(timespec="milliseconds")}}
        path = f"/api/v1/namespaces/{quote(pod.namespace)}/pods/{quote(pod.name)}"
        self._api.patch(path, {"metadata": change})

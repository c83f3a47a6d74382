"""Removes the records of claims that the kubelet will not have unprepared any more.

In general the kubelet has every claim unprepared. It does not if it has lost its state file, as when a node is set up
again. A record is removed only if all of these agree, in two rounds:

- The claim does not exist any more, or has another allocation or none. So no further pod can start with it.
- The pods that use the claim are gone or have ended, and according to the container runtime none of them has a running
  container or a ready sandbox.
- The container runtime runs no pod that the API does not have. The kubelet has a claim prepared once for all its pods,
  so a pod that is not in the record, and was deleted by force, may still use it.

If one of these cannot be found out, the record stays. A record that stays too long wastes a share of a card; one that
is removed too early gives away a share that is in use. The kubelet's state file would tell whether it knows the claim,
but it lies in the folder with the volumes of all pods, which the agent must not read.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.dra.claim_status import ClaimApi, ClaimGone
from deviceplugin.dra.claim_users import ClaimUsers
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_ROUND_SECONDS = 60.0


class Runtime(Protocol):
    """The part of `ContainerRuntime` that is used here."""

    async def live_pods(self) -> frozenset[str]:
        """Return the UIDs of the pods of which a container runs or may still start. Raises RetryLater."""


class ClaimCleanup:
    """The loop that removes records. Use it on one event loop."""

    def __init__(
        self, claims: PreparedClaims, api: ClaimApi, pods: NodePods, users: ClaimUsers, runtime: Runtime
    ) -> None:
        self._claims = claims
        self._api = api
        self._pods = pods
        self._users = users
        self._runtime = runtime
        self._suspects: Mapping[str, ClaimRecord] = {}

    async def run(self) -> None:
        """Remove records until cancelled. Call this after all pods of the node have been read."""
        while True:
            await asyncio.sleep(_ROUND_SECONDS)
            await self.clean()

    async def clean(self) -> None:
        """Remove the records for which all conditions hold now and did hold at the last call."""
        found = {record.uid: record for record in self._claims.all() if await self._is_abandoned(record)}
        before = self._suspects
        self._suspects = found
        for uid, record in found.items():
            if before.get(uid) == record and self._claims.get(uid) == record and not self._claims.is_preparing(uid):
                log.warning("the record of claim %s is removed: the claim is gone, and nothing uses it", record.key)
                try:
                    self._claims.remove(uid)
                except OSError as error:
                    log.warning("the record of claim %s is not removed: %s", record.key, error)

    async def _is_abandoned(self, record: ClaimRecord) -> bool:
        try:
            if await asyncio.to_thread(self._is_allocated, record):
                return False
            return not await self._may_be_used(record)
        except RetryLater as error:
            log.debug("cannot find out whether claim %s is still used: %s", record.key, error)
            return False

    def _is_allocated(self, record: ClaimRecord) -> bool:
        """Return whether the claim still has the allocation of the record. Raises RetryLater."""
        try:
            claim = self._api.read(record.namespace, record.name, record.uid).claim
        except ClaimGone:
            return False
        places = {(result.pool, result.device, result.share_id) for result in claim.results}
        return any((device.pool, device.device, device.share_id) in places for device in record.devices)

    async def _may_be_used(self, record: ClaimRecord) -> bool:
        """Return whether a container that uses the claim may run or may still start. Raises RetryLater."""
        live = await self._runtime.live_pods()
        users = {*record.consumers, *(pod.uid for pod in self._users.users_of(record.namespace, record.name))}
        present = self._pods.presences()
        if live & users or live - present.keys():
            return True
        return any(uid in present and not present[uid].ended for uid in users)

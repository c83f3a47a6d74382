"""Removes the records of claims that the kubelet will not have unprepared any more.

In general the kubelet has every claim unprepared. It does not if its state file was removed, as when a node is set up
again. A record is removed only if all of these agree, in two rounds:

- The claim does not exist any more, or has another allocation or none.
- The kubelet's state file can be read and does not contain the claim. The kubelet writes a claim into the file before
  it has the claim prepared, and removes it only after the claim was unprepared.
- The pods that used the claim are gone or have ended, and according to the container runtime none of their containers
  runs.

If one of these cannot be found out, the record stays. A record that stays too long wastes a share of a card; one that
is removed too early gives away a share that is in use.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.dra.claim_status import ClaimApi, ClaimGone
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

STATE_FILE = "dra_manager_state"
"""The file in the kubelet's folder in which it stores the claims that it has had prepared."""
_ROUND_SECONDS = 60.0


class Runtime(Protocol):
    """The part of `ContainerRuntime` that is used here."""

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs, or with `sandbox` may still start. Raises RetryLater."""


class ClaimCleanup:
    """The loop that removes records. Use it on one event loop."""

    def __init__(
        self, claims: PreparedClaims, api: ClaimApi, state_file: Path, pods: NodePods, runtime: Runtime
    ) -> None:
        self._claims = claims
        self._api = api
        self._state_file = state_file
        self._pods = pods
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
                log.warning(
                    "the record of claim %s is removed: the kubelet does not know the claim any more", record.key
                )
                try:
                    self._claims.remove(uid)
                except OSError as error:
                    log.warning("the record of claim %s is not removed: %s", record.key, error)

    async def _is_abandoned(self, record: ClaimRecord) -> bool:
        try:
            if await asyncio.to_thread(self._is_known, record.uid):
                return False
            if await asyncio.to_thread(self._is_allocated, record):
                return False
            return not await self._may_run(record.consumers)
        except (RetryLater, OSError) as error:
            log.debug("cannot find out whether claim %s is still used: %s", record.key, error)
            return False

    def _is_known(self, uid: str) -> bool:
        """Return whether the kubelet's state file contains the claim. Raises OSError."""
        return uid in self._state_file.read_text(errors="replace")

    def _is_allocated(self, record: ClaimRecord) -> bool:
        """Return whether the claim still has the allocation of the record. Raises RetryLater."""
        try:
            claim = self._api.read(record.namespace, record.name, record.uid).claim
        except ClaimGone:
            return False
        places = {(result.pool, result.device, result.share_id) for result in claim.results}
        return any((device.pool, device.device, device.share_id) in places for device in record.devices)

    async def _may_run(self, uids: Iterable[str]) -> bool:
        """Return whether a container of these pods runs or may still start. Raises RetryLater."""
        present = self._pods.presences()
        for uid in uids:
            if uid in present and not present[uid].ended:
                return True
            if await self._runtime.is_running(uid, sandbox=uid not in present):
                return True
        return False

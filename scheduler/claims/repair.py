"""Replaces allocations of ResourceClaims that do not fit, before their cards are delivered.

Such an allocation was written without a decision of mgpu: the webhook was not installed, another client wrote it, or
two replicas decided at the same time. The agent of the node does not deliver cards that do not fit
(`deviceplugin.dra`), so the pod, which is bound already, waits. The API server denies any change of an allocation, but
not its removal. So a repair consists of four writes, each with the resourceVersion of the one before:

1. The annotation `mgpu.io/repair` is a lock: from now on the agent does not deliver the claim. If the agent has
   delivered it just before, this write fails, because the agent writes the condition `Prepared` first. The annotation
   contains the new allocation, so that another replica can finish.
2. The allocation is removed.
3. The new allocation is written. It passes the admission of claims like any other.
4. The annotation is removed.

If the process ends in between, the next leader continues: it writes the allocation of the annotation if the claim has
none, and removes the annotation. A shared claim could be allocated on another node between 2 and 3, and the pods that
are bound already could not start, so claims with several pods are not moved.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.claim_object import read_claim, read_stored_claim
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.gpu_requests import Rejection, cards_by_index
from mgpu.model.ledger import shares_of
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import (
    API,
    DRIVER,
    REPAIR,
    Claim,
    claim_path,
    gpu_request,
    is_newer,
)
from mgpu.settings import CARD_POLICIES
from scheduler import metrics
from scheduler.claims.suspects import Suspects
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.decisions.claim_allocation import changes, with_changes
from scheduler.decisions.claim_decider import ClaimDecider

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.5
REASON = "MgpuNoCards"
_REPEAT_SECONDS = 60.0
"""The interval at which the Event about a claim that fits on no card is repeated."""
_OBSERVE_SECONDS = 30.0
"""The longest time for which a moved claim holds both its former and its new cards, while the watch is late."""


class _Move(NamedTuple):
    """A claim whose new allocation was written, and for which the watch may still be late.

    Attributes:
        version: The resourceVersion that the write gave.
        since: The time of the write.
    """

    version: str
    since: float
    node: str


class ClaimRepair:
    """Moves claims. One thread calls `work` every `ROUND_SECONDS`.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        warn: Creates an Event of type Warning.
        may_decide: Raises RetryLater while this replica must not decide.
    """

    def __init__(
        self,
        state: ClusterCache,
        decider: ClaimDecider,
        api: Api,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._decider = decider
        self._api = api
        self._warn = warn
        self._may_decide = may_decide
        self._clock = clock
        self._suspects = Suspects(state)
        self._warned: dict[str, float] = {}
        self._moved: dict[str, _Move] = {}  # By UID.

    def work(self) -> None:
        """Examine all claims once."""
        self._end_observed_moves()
        try:
            self._may_decide()
        except RetryLater:
            return
        interrupted = self._state.claims.interrupted()
        for claim in interrupted:
            if claim.uid not in self._moved:
                self._try(claim, self._finish)
        before = self._suspects.uids
        for claim in self._suspects.find():
            # In the first round, a claim that does not fit may only be observed earlier than the end of another pod.
            if claim.uid in before and not self._is_moving_on(claim.node) and not self._suspects.fits(claim):
                self._try(claim, self._repair)
        present = self._suspects.uids.union(claim.uid for claim in interrupted)
        self._warned = {uid: at for uid, at in self._warned.items() if uid in present}

    def _is_moving_on(self, node: str) -> bool:
        """Return whether a move on this node has not been observed yet.

        The moved claim still holds its former cards, too, for which another claim seems not to fit.
        """
        return any(move.node == node for move in self._moved.values())

    def _try(self, claim: Claim, step: Callable[[Claim], None]) -> None:
        extra = {"claim": claim.uid}
        try:
            step(claim)
        except ApiError as error:
            # After a conflict the claim has changed, and the next round sees it as it is then.
            level = logging.DEBUG if error.status in (404, 409) else logging.WARNING
            log.log(level, "repair of claim %s will be retried: %s", claim.key, error, extra=extra)
        except (Unreachable, RetryLater) as error:
            log.warning("repair of claim %s will be retried: %s", claim.key, error, extra=extra)

    def _repair(self, claim: Claim) -> None:
        """Move a claim to cards on which it fits."""
        path = claim_path(claim.namespace, claim.name)
        raw = self._api.get(path)
        now = read_stored_claim(raw, CARD_POLICIES)
        if now.uid != claim.uid or now.results != claim.results or now.is_prepared or now.repair:
            return
        if len(now.consumers) > 1:
            self._warn_once(claim, "it does not fit on its cards, and several pods use it; delete these pods")
            return
        if any(row.get("driver") != DRIVER for row in raw["status"]["allocation"]["devices"]["results"]):
            # Their drivers may have delivered these devices, and would lose the claim between the writes.
            self._warn_once(claim, "it does not fit on its cards, and has devices of other drivers; delete its pod")
            return
        if any(result.pool != now.node for result in now.results):
            self._warn_once(claim, "its devices are of several nodes; delete the pod that uses the claim")
            return
        request = gpu_request(now)
        snapshot = self._state.node_snapshot(now.node, now.uid)
        if snapshot.node is None:
            return  # The node is gone, or not known yet.
        placement = self._decider.place(now, request, snapshot)
        if isinstance(placement, Rejection):
            self._warn_once(claim, f"it does not fit on its cards or on any others of {now.node}: {placement}")
            return
        allocation = raw["status"]["allocation"]
        cards = cards_by_index(self._state.cards(now.node))
        moved = with_changes(allocation, changes(allocation, now, request, placement, cards))
        if not self._state.claims.begin_move(now.uid, now.node, shares_of(request, placement), snapshot.version):
            return
        try:
            desired = {"allocation": moved, "reservedFor": raw["status"].get("reservedFor", [])}
            locked = self._annotate(path, now.version, orjson.dumps(desired).decode())
            removed = self._write_status(path, locked, {})
            self._allocate(path, removed, desired, now)
        finally:
            if now.uid not in self._moved:
                # The next round continues from what the API server has.
                self._state.claims.end_move(now.uid)
        metrics.CLAIM_REPAIRS.inc()
        log.info("claim moved", extra={"claim": now.uid, "node": now.node})

    def _finish(self, claim: Claim) -> None:
        """Continue a repair that another replica, or an earlier attempt, has begun."""
        path = claim_path(claim.namespace, claim.name)
        raw = self._api.get(path)
        now = read_stored_claim(raw, CARD_POLICIES)
        if now.uid != claim.uid or not now.repair:
            return
        if now.allocated:
            self._annotate(path, now.version, None)
            return
        desired = _read_desired_status(now.repair)
        if desired is None:
            self._warn_once(claim, f"its annotation {REPAIR} cannot be read; delete the pod that uses the claim")
            return
        try:
            self._allocate(path, raw, desired, now)
        except ApiError as error:
            if error.status not in (403, 422):
                raise
            self._warn_once(claim, f"its cards cannot be replaced, it waits: {error}")

    def _allocate(self, path: str, raw: Mapping[str, Any], status: Mapping[str, Any], claim: Claim) -> None:
        written = self._write_status(path, raw, status)
        node = read_stored_claim(written, CARD_POLICIES).node
        self._moved[claim.uid] = _Move(_version(written), self._clock(), node)
        self._annotate(path, _version(written), None)

    def _annotate(self, path: str, version: str, text: str | None) -> dict[str, Any]:
        meta = {"resourceVersion": version, "annotations": {REPAIR: text}}
        return self._api.patch(path, {"metadata": meta})

    def _write_status(self, path: str, raw: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        return self._api.replace(
            f"{path}/status", {**raw, "apiVersion": API, "kind": "ResourceClaim", "status": status}
        )

    def _end_observed_moves(self) -> None:
        """End the moves of the claims whose new allocation the watch has delivered."""
        for uid, move in sorted(self._moved.items()):
            claim = self._state.claims.get(uid)
            is_observed = claim is None or not is_newer(move.version, claim.version)
            if is_observed or self._clock() - move.since > _OBSERVE_SECONDS:
                del self._moved[uid]
                self._state.claims.end_move(uid)

    def _warn_once(self, claim: Claim, message: str) -> None:
        last = self._warned.get(claim.uid)
        if last is None or self._clock() - last >= _REPEAT_SECONDS:
            self._warned[claim.uid] = self._clock()
            self._warn(claim_reference(claim), REASON, message)


def claim_reference(claim: Claim) -> dict[str, Any]:
    """Return the reference to a claim for an Event."""
    return {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "namespace": claim.namespace,
        "name": claim.name,
        "uid": claim.uid,
    }


def _read_desired_status(text: str) -> Mapping[str, Any] | None:
    """Return the new allocation and the pods in the annotation of a repair, or None if it cannot be read."""
    try:
        desired = orjson.loads(text)
        read_claim({"metadata": {}, "status": desired}, CARD_POLICIES)
    except (orjson.JSONDecodeError, BadObject):
        return None
    return desired if table_at(desired, "allocation") else None


def _version(raw: Mapping[str, Any]) -> str:
    return str(table_at(raw, "metadata").get("resourceVersion", ""))

"""Answers the kubelet's calls for a ResourceClaim: decides whether the claim may have its cards now, and delivers them.

The scheduler process decides the cards of a claim, but an allocation can also be written without it, and another client
can write records of pods that overlap. So the agent counts once more before it delivers a claim. If the claim has to
wait, for a card, for remnants, or for the scheduler to replace its allocation, the call waits too, because the kubelet
repeats a failed call only after up to 77 s.

The steps are in this order, so that the agent may die between any two of them:

0. The MIG instances of the claim are created, each after a file that says so was written (`mig_instances`). If the
   claim gets no record, they are destroyed again.
1. The claim is reserved in memory, then its record is written, and then its CDI spec. Nothing uses the spec yet, since
   the kubelet does not know the names of its devices. If the agent dies, the next one counts the claim by its record.
   The allocation can still be replaced, and then the record is replaced, too.
2. The condition `Prepared` is written with the resourceVersion that was read. From now on the scheduler process does
   not replace the allocation. If it has done so just before, this write fails, and everything starts again with the new
   allocation. If the agent dies after the write, the kubelet repeats the call, and the next agent finds its own
   allocation in the record.
3. The record is marked as delivered. From now on it stays until the kubelet has the claim unprepared, whatever the
   claim says.
4. The kubelet gets the names of the devices. If it does not get the answer, it repeats the call.

In any other order there is a moment at which a container can have cards that no process counts, or at which a claim
that can no longer be moved has not got its cards yet.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from deviceplugin.delivery.cdi import Edits
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.dra.claim_cdi import make_spec
from deviceplugin.dra.claim_instances import create_instances, missing_reason, overlap_reason, started_pods
from deviceplugin.dra.claim_records import ClaimRecord, allocation_of
from deviceplugin.dra.claim_references import conflict, is_view_shared, requests_of, used_views
from deviceplugin.dra.claim_status import ClaimApi, ClaimGone, ReadClaim
from deviceplugin.dra.claim_users import ClaimPod, ClaimUsers
from deviceplugin.dra.claim_views import (
    WHOLE_CLAIM,
    View,
    card_of,
    devices_of,
    held_shares,
    holder_of,
    own_device,
    own_environment,
    target_of,
    view_device,
    views_of,
)
from deviceplugin.dra.mig_instances import MigInstances
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.isolation import Isolation
from deviceplugin.pods.capacity_check import Grants
from deviceplugin.pods.identity import VISIBLE, Refused
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.resource_claims import Claim, claim_holding

log = logging.getLogger(__name__)

WAIT_SECONDS = 40.0
"""How long a call waits for what is missing. The kubelet waits 45 s for the answer."""
_POLL_SECONDS = 1.0
"""The longest pause before the claim is read again. A change of the claim itself wakes nothing."""
_LEAST_PAUSE = 0.1


class _NotYet(Exception):
    """The claim cannot be delivered now. The message is the reason."""


class Devices(Protocol):
    """The part of `deviceplugin.node_devices.NodeDevices` that is used here."""

    def gpus(self) -> tuple[Card, ...]: ...
    def devices(self) -> tuple[Card, ...]: ...
    def whole(self) -> tuple[Card, ...] | None: ...
    def mig_cards(self) -> tuple[Card, ...]: ...
    def cards_in_mig_mode(self) -> frozenset[int]: ...
    def foreign_instances(self) -> tuple[Holding, ...]: ...


class Holders(Protocol):
    """The part of `Remnants` and of `WholeCards` that is used here."""

    def holdings(self) -> Sequence[Holding]: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `ClaimPreparation` knows of the node.

    Attributes:
        unrecorded: The holdings of pods that got cards from another plugin or have no allocation record.
        changed: A signal that wakes coroutines when pods, cards, slices, remnants or claims change.
        is_resumed: A function that returns whether pods, cards and remnants have been read.
        isolation: The part that limits containers to their shares.
        instances: The part that creates MIG instances; None if the agent cannot.
    """

    node: str
    devices: Devices
    pods: NodePods
    grants: Grants
    unrecorded: Holders
    remnants: Holders
    users: ClaimUsers
    changed: Wakeup
    is_resumed: Callable[[], bool]
    isolation: Isolation | None = None
    exposure: Exposure = field(default_factory=Exposure)
    lingering: LingeringProcesses | None = None
    instances: MigInstances | None = None


class ClaimPreparation:
    """Prepares and unprepares claims. Use it on one event loop. Calls for the API server run on threads."""

    def __init__(self, api: ClaimApi, claims: PreparedClaims, surroundings: Surroundings) -> None:
        self._api = api
        self._claims = claims
        self._around = surroundings

    async def prepare(self, namespace: str, name: str, uid: str, deadline: float) -> ClaimRecord:
        """Deliver the cards of the claim, and return its record.

        A claim that was delivered before gets the same answer. What a reboot may have removed is made again.

        Args:
            deadline: The time of the event loop's clock until which the call may wait.

        Raises:
            Refused: The claim cannot be delivered until the deadline, or at all.
        """
        with self._claims.preparing(uid):
            while True:
                try:
                    return await self._try(await asyncio.to_thread(self._api.read, namespace, name, uid), deadline)
                except ClaimGone as error:
                    self._cancel(uid)
                    raise Refused(str(error), uid) from error
                except (_NotYet, RetryLater) as error:
                    reason = str(error)
                # Here nothing refers to the claim, of which users choose the size, while many calls may wait.
                if not await self._pause(deadline):
                    raise Refused(reason, uid)

    def unprepare(self, uid: str) -> None:
        """Take the cards from the claim, whose containers have ended. Raises OSError."""
        self._claims.remove(uid)

    async def _pause(self, deadline: float) -> bool:
        """Wait for a change, but not for long. Return False if the deadline is reached."""
        remaining = deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            return False
        await asyncio.sleep(min(_LEAST_PAUSE, remaining))
        await self._around.changed.wait(max(0.0, min(_POLL_SECONDS, remaining - _LEAST_PAUSE)))
        return True

    async def _try(self, found: ReadClaim, deadline: float) -> ClaimRecord:
        """Deliver the claim as it was read. Raises Refused, and _NotYet if it has to wait."""
        claim = found.claim
        self._drop_outdated(claim)
        self._check_allocation(claim)
        users = self._users(claim)
        self._check_references(claim, users)
        self._check_cards(claim)
        if self._around.lingering is not None:
            await self._around.lingering.wait_until_ended(holder_of(claim), self._around.devices.devices(), deadline)
        limits = await self._limits(claim, users, deadline)
        self._check_capacity(claim)  # No MIG instance is created for a claim that does not fit.
        around = self._around
        instances = await create_instances(claim, around.devices.gpus(), around.instances, deadline)
        # From here to the end of `reserve` nothing awaits, so no other start is granted in between.
        self._check_references(claim, users)
        self._check_cards(claim)
        self._check_capacity(claim)
        record = self._record(claim, users, limits, instances)
        try:
            self._claims.reserve(record)
        except OSError as error:
            raise _NotYet(f"{claim.key}: the record or the CDI file of the claim is not written: {error}") from error
        return await self._commit(found, record, limits)

    async def _commit(
        self, found: ReadClaim, record: ClaimRecord, limits: Mapping[tuple[str, str], Edits]
    ) -> ClaimRecord:
        claim = found.claim
        if not await asyncio.to_thread(self._api.mark_prepared, found, record):
            raise _NotYet(f"{claim.key}: the claim has changed while its cards were delivered")
        now = self._claims.get(claim.uid)
        if now is None or now.allocation != record.allocation:
            raise _NotYet(f"{claim.key}: the claim was unprepared while its cards were delivered")
        try:
            delivered = self._claims.deliver(claim.uid)
        except OSError as error:
            raise _NotYet(f"{claim.key}: the record of the claim is not written: {error}") from error
        assert delivered is not None
        if self._around.isolation is not None:
            self._around.isolation.mark_started(limits)
        log.info("claim prepared", extra={"claim": claim.uid, "devices": [d.device for d in delivered.devices]})
        return delivered

    # What a claim waits for

    def _drop_outdated(self, claim: Claim) -> None:
        """Release the reservation of another allocation. Nothing was delivered by it (see the module)."""
        before = self._claims.get(claim.uid)
        if before is not None and (claim.repair or before.allocation != allocation_of(claim)):
            self._claims.cancel(before)

    def _cancel(self, uid: str) -> None:
        before = self._claims.get(uid)
        if before is not None:
            self._claims.cancel(before)

    def _check_allocation(self, claim: Claim) -> None:
        if not self._around.is_resumed():
            raise _NotYet("the pods and cards of this node have not been read yet")
        if claim.repair and not self._is_delivered(claim):
            raise _NotYet(f"{claim.key}: mgpu is replacing its allocation")
        if not claim.results:
            raise _NotYet(f"{claim.key}: the claim has no allocation of mgpu's cards")
        others = {result.pool for result in claim.results} - {self._around.node}
        if others:
            raise Refused(f"{claim.key}: the claim is allocated on {', '.join(sorted(others))}", claim.uid)

    def _is_delivered(self, claim: Claim) -> bool:
        before = self._claims.get(claim.uid)
        return before is not None and before.delivered and before.allocation == allocation_of(claim)

    def _users(self, claim: Claim) -> tuple[ClaimPod, ...]:
        """Return the pods that may use the claim and are on this node. There is at least one."""
        allowed = {consumer.uid for consumer in claim.consumers}
        is_of_pods = all(consumer.resource == "pods" for consumer in claim.consumers)
        users = self._around.users.users_of(claim.namespace, claim.name)
        # A claim can also be reserved for a group of pods, of which the kubelet checks the members.
        found = tuple(user for user in users if user.uid in allowed or not is_of_pods)
        if not found:
            raise _NotYet(f"{claim.key}: the API server has not delivered a pod that uses the claim yet")
        return found

    def _check_references(self, claim: Claim, users: Sequence[ClaimPod]) -> None:
        """Refuse containers that would see too few or too many cards. Their pods do not change."""
        reason = self._conflict(claim.namespace, claim.name, requests_of(claim), users)
        if reason is not None:
            raise Refused(f"{claim.key}: {reason}", claim.uid)

    def late_conflicts(self) -> Iterator[tuple[ClaimPod, str]]:
        """Yield the pods with a container that does not see exactly its cards, each with the reason.

        A pod that uses a claim which was delivered before cannot be refused, since the kubelet does not call again.
        """
        for record in self._claims.all():
            requests = frozenset(device.request for device in record.devices if device.is_result)
            for user in self._around.users.users_of(record.namespace, record.name) if record.delivered else ():
                reason = self._conflict(record.namespace, record.name, requests, (user,))
                if reason is not None:
                    yield user, reason

    def _conflict(self, namespace: str, name: str, requests: frozenset[str], users: Sequence[ClaimPod]) -> str | None:
        exposure = self._around.exposure
        if exposure.mounts or exposure.nodes:
            return None
        others = frozenset(one.name for one in self._claims.all() if one.namespace == namespace)
        return conflict(name, requests, users, others - {name}, self._has_pods_cards)

    def _has_pods_cards(self, uid: str, container: str) -> bool:
        gpu_pod = self._around.pods.by_uid(uid)
        return gpu_pod is not None and bool(gpu_pod.container_requests(container))

    def _check_cards(self, claim: Claim) -> None:
        """Wait until each card exists, is healthy and is not reserved for slices."""
        gpus = self._around.devices.gpus()
        whole = self._around.devices.whole()
        if whole is None:
            raise _NotYet("the partitions of the cards have not been read yet")
        unpartitioned = {card.uuid for card in self._around.devices.devices()} & {card.uuid for card in whole}
        mig_cards = self._around.devices.mig_cards()
        missing = missing_reason(claim, gpus, mig_cards, delivered=self._is_delivered(claim))
        if missing is not None:
            raise _NotYet(f"{claim.key}: {missing}")
        for result in claim.results:
            if result.mig_device is not None:
                continue
            card = card_of(result, gpus)
            if card is None:
                raise _NotYet(f"{claim.key}: this node has no device {result.device}")
            if not card.healthy:
                raise _NotYet(f"{claim.key}: card {card.index} ({card.uuid}) is unhealthy")
            if card.uuid not in unpartitioned and not self._is_delivered(claim):
                raise _NotYet(f"{claim.key}: card {card.index} ({card.uuid}) is partitioned, or will be")

    def _check_capacity(self, claim: Claim) -> None:
        """Wait until the cards have room for the claim beside everything that was granted before."""
        held = claim_holding(claim)
        if held is None or self._is_delivered(claim):
            return
        around = self._around
        cards = around.devices.devices()
        others = (*around.unrecorded.holdings(), *self._other_claims(claim))
        reason = around.grants.refusal_of(held, around.pods.all(), cards, others)
        if reason is not None:
            raise _NotYet(f"{claim.key}: {reason}")
        with_remnants = (*others, *around.remnants.holdings())
        if around.grants.refusal_of(held, around.pods.all(), cards, with_remnants) is not None:
            # Remnants may belong to another tenant, so the text names nothing of them.
            raise _NotYet(f"{claim.key}: containers of a deleted pod still run on its cards")
        started = started_pods(around.pods.all(), around.grants, cards)
        if (overlap := overlap_reason(claim, around.devices.gpus(), (*with_remnants, *started))) is not None:
            raise _NotYet(f"{claim.key}: {overlap}")

    def _other_claims(self, claim: Claim) -> Iterator[Holding]:
        """Yield what other claims hold, and what this one may still hold by an allocation that was delivered before."""
        for held in self._claims.holdings():
            if held.uid != claim.uid:
                yield held
            elif self._was_delivered(claim):
                yield replace(held, uid=f"{held.uid}/former")

    def _was_delivered(self, claim: Claim) -> bool:
        """Return whether the claim was delivered, by its present allocation or by an earlier one."""
        before = self._claims.get(claim.uid)
        return before is not None and before.delivered

    # What the claim gets

    async def _limits(
        self, claim: Claim, users: Sequence[ClaimPod], deadline: float
    ) -> Mapping[tuple[str, str], Edits]:
        """Wait until the limits of the claim's containers are in place. Raises Refused."""
        isolation = self._around.isolation
        if isolation is None:
            return {}
        views = {view.name: view for view in views_of(claim, self._around.devices.gpus())}
        targets = [
            target_of(claim, views[name], is_shared=is_view_shared(claim, users, name))
            for name in used_views(claim, users, tuple(views))
            if views[name].cards  # MIG itself limits its instances.
        ]
        return await isolation.ready(targets, deadline)

    def _record(
        self,
        claim: Claim,
        users: Sequence[ClaimPod],
        limits: Mapping[tuple[str, str], Edits],
        instances: Sequence[Card],
    ) -> ClaimRecord:
        gpus = (*self._around.devices.gpus(), *instances)
        views = views_of(claim, gpus)
        before = self._claims.get(claim.uid)
        former = before.former if before is not None else ()
        if before is not None and before.delivered and before.allocation != allocation_of(claim):
            former = (*former, *before.shares)
        return ClaimRecord(
            claim.uid,
            claim.namespace,
            claim.name,
            tuple(devices_of(claim, views, gpus)),
            held_shares(claim, gpus),
            former,
            tuple(sorted(user.uid for user in users)),
            spec=make_spec(self._cdi_devices(claim, views, gpus, limits, self._served(claim, users, views))),
        )

    def _served(self, claim: Claim, users: Sequence[ClaimPod], views: Sequence[View]) -> Sequence[str]:
        """Return the views that containers can have.

        The limits of the others are not in place. Another pod may name the claim that was made for the pod that uses
        it, and the kubelet does not call again for it. So a container with another view must not start.
        """
        names = tuple(view.name for view in views)
        return names if self._around.isolation is None else used_views(claim, users, names)

    def _cdi_devices(
        self,
        claim: Claim,
        views: Sequence[View],
        gpus: Sequence[Card],
        limits: Mapping[tuple[str, str], Edits],
        served: Sequence[str],
    ) -> Iterator[tuple[str, Edits]]:
        """Yield the CDI devices of the results, and then those of the views. Raises Refused."""
        target = target_of(claim, views[0], is_shared=False)
        for position, result in enumerate(claim.results):
            card = card_of(result, gpus)
            assert card is not None
            shown = self._around.exposure.edits(target, {VISIBLE: card.uuid}, gpus, gpus)
            edits = replace(shown, env=own_environment(claim.uid, position, card))
            yield own_device(claim.uid, position), edits
        isolation = self._around.isolation
        for view in (one for one in views if one.name in served):
            edits = limits.get((claim.uid, view.name), Edits())
            if view.name == WHOLE_CLAIM and isolation is not None:
                # The container gets the devices of all views, and this one last (`claim_views`).
                others = [limits[key] for key in sorted(limits) if key[1] != WHOLE_CLAIM]
                edits = isolation.without_others(edits, others)
            if len(views) > 1:
                # Hooks of several views add up, but their variables do not. The back end sets the limits itself.
                edits = replace(edits, hooks=())
            yield view_device(claim.uid, view.name), Edits(view.environment()) | edits

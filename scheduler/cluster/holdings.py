"""Derives what GPU pods hold from allocation records, from reservations, and from what nodes report as given to pods.

Only `Holdings` writes holdings to the ledger of the cluster cache. `MtgpuPodHoldings` and `ClaimHoldings` determine
what MtgpuPods and ResourceClaims hold, and write it through `Holdings`. Apart from reservations, the holdings of Pods
follow from the present objects of the API server, in whatever order these have arrived. The cluster cache uses
`Holdings` with its lock held.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.kube.events import pod_reference
from mgpu.model.cards import GPU
from mgpu.model.device_checkpoints import UNLISTED_PODS
from mgpu.model.errors import BadObject
from mgpu.model.groups import format_group_cards
from mgpu.model.ledger import Holding, Ledger, Share, missing_cards, shares_of, unknown_shares
from mgpu.model.node_slices import LABEL
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Pod
from mgpu.model.resource_claims import DRA
from mgpu.model.slice_names import RESOURCE_PREFIX, mode_of, place_of, slice_of_resource
from scheduler.cluster.events import HoldingsChanged, ObjectWarning, PodUndecided, Publisher
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid, recorded_shares, shares_on_unknown_cards
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.pods import Pods
from scheduler.cluster.remnants import Remnants
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.cluster.resize_promises import Promises
from scheduler.engine import nvidia_plugin


class _OtherPod(NamedTuple):
    """A pod without a GPU request, or an unknown pod of which a node has only reported the UID.

    Attributes:
        gpuid: The GPUID for which the pod occupies a card of its node; "" if it is no occupy pod.
    """

    uid: str
    namespace: str = ""
    name: str = ""
    ended: bool = False
    gpuid: str = ""
    node: str = ""


class Holdings:
    """Part of the ClusterCache, which holds its lock around every call.

    It publishes HoldingsChanged with every change of a holding, and PodUndecided for each pod that needs a late binding
    decision.

    Attributes:
        ledger: The cards of all nodes, which `ClusterCache` stores there, and all holdings.
        promises: What pods will hold once a live resize is written.
    """

    def __init__(
        self,
        nodes: Nodes,
        pods: Pods,
        reservations: Reservations,
        events: Publisher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._pods = pods
        self._reservations = reservations
        self._events = events
        self._other_pods: dict[str, _OtherPod] = {}
        self._undecided: set[str] = set()
        self.ledger = Ledger()
        self.remnants = Remnants(events, clock)
        self.promises = Promises()

    def undecided(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that need a late binding decision, sorted by namespace and name of the pod."""
        pods = [gpu_pod.pod for uid in self._undecided if (gpu_pod := self._pods.get(uid)) is not None]
        return tuple(pod.uid for pod in sorted(pods, key=lambda pod: (pod.key, pod.uid)))

    def is_undecided(self, uid: str) -> bool:
        return uid in self._undecided

    def publish_undecided_on(self, node: str) -> None:
        """Publish PodUndecided again for the undecided pods of this node, because its cards have changed."""
        for uid in self._undecided:
            gpu_pod = self._pods.get(uid)
            if gpu_pod is not None and gpu_pod.pod.node == node:
                self._events.publish(PodUndecided(uid))

    def has_cards(self, uid: str) -> bool:
        """Return whether the pod is bound and its cards have been decided."""
        holding = self.ledger.holding(uid)
        return holding is not None and holding.bound and uid not in self._undecided

    def settle(self, gpu_pod: GpuPod) -> None:
        """Derive what this pod holds from the present state of the pod and its node."""
        pod = gpu_pod.pod
        self._undecided.discard(pod.uid)
        if pod.ended:
            self.release(pod.uid)
            self._hold_given(pod.uid, pod.node)
            return
        if not pod.node:
            return  # A reservation stays: this event may be older than the decision.
        shares: tuple[Share, ...] | None = None
        unreadable: str | None = None
        try:
            shares = recorded_shares(gpu_pod)
            shares = shares and self.promises.with_promised(gpu_pod, shares)
        except BadObject as error:
            unreadable = str(error)
        has_record = unreadable is not None or gpu_pod.finding is not None
        dialect = gpu_pod.dialect
        given = self._nodes.given(pod.node).get(pod.uid, ())
        slices = tuple(share for share in given if share.type != GPU) if given else ()
        is_bare = shares is None and self._is_bare(gpu_pod, has_record=has_record)
        if shares is None and slices:
            shares = ()
        elif shares is None and not is_bare and (given or self._is_chosen_by_nvidia(gpu_pod)):
            dialect, shares = nvidia_plugin.NVIDIA, nvidia_plugin.held_shares(gpu_pod.request, given)
        is_unknown = shares is None
        if shares is None:
            if not dialects.has_run(pod, gpu_pod.request) or (is_bare and self._is_decided_late(gpu_pod)):
                self._await_decision(gpu_pod, unreadable)
                return
            shares = () if is_bare else shares_on_unknown_cards(gpu_pod, has_record=has_record)
        # A slice that the node reports as given to the pod is not free, whatever the record says.
        if slices:
            named = {(share.type, share.card) for share in shares}
            shares = (*shares, *(s for s in slices if (s.type, s.card) not in named))
        holding = self._holding_of(gpu_pod, dialect, shares)
        if holding == self.ledger.holding(pod.uid) and not pod.deleting:
            # Most events end here. If the pod is being deleted, HoldingsChanged must be published all the same,
            # because nominated pods may now count on its cards.
            return
        self.release(pod.uid)
        self.hold(holding)
        if is_unknown:
            self._warn_of_unknown(pod, unreadable, shares)
        self._warn_of_split_group(gpu_pod)
        if dialect != nvidia_plugin.NVIDIA:  # The shares of this dialect do not come from a record.
            self._warn_of_absent_cards(pod, shares)

    def _is_chosen_by_nvidia(self, gpu_pod: GpuPod) -> bool:
        return nvidia_plugin.chooses_cards(self._nodes.get(gpu_pod.pod.node), gpu_pod.request)

    def _is_bare(self, gpu_pod: GpuPod, *, has_record: bool) -> bool:
        """Return whether this pod, which has no valid record, runs without having been given any card.

        The kubelet starts a container without asking a device plugin if the node does not offer the container's
        resource, or does not offer it yet. So a pod that was created with `nodeName` may run without cards, and must
        not hold any. If the agent lists all pods that have cards without a record (`UNLISTED_PODS`), a pod that is not
        listed has none. If such a pod has a card all the same, the agent gives that card to no other pod. A pod with an
        invalid record, or one that NVIDIA's plugin serves, is bare only if the agent lists it without cards.
        """
        given = self._nodes.given(gpu_pod.pod.node)
        if gpu_pod.pod.uid in given:
            return not given[gpu_pod.pod.uid] and dialects.has_run(gpu_pod.pod, gpu_pod.request)
        if has_record or self._is_chosen_by_nvidia(gpu_pod):
            return False
        return UNLISTED_PODS in given

    def _is_decided_late(self, gpu_pod: GpuPod) -> bool:
        """Return whether a bare pod needs a late binding decision, which gives it cards or makes it fail.

        A bare pod needs a decision if one of its containers still waits for cards. It also needs one if it requests
        only slices and the agent lists it: while the pod runs, the kubelet counts its slices as used, and fails other
        pods that request slices of the same profile.
        """
        if gpu_pod.request is None:
            return False
        is_listed = gpu_pod.pod.uid in self._nodes.given(gpu_pod.pod.node)
        return dialects.has_waiting_container(gpu_pod.pod, gpu_pod.request) or (
            is_listed and not gpu_pod.request.containers
        )

    def _holding_of(self, gpu_pod: GpuPod, dialect: str, shares: tuple[Share, ...]) -> Holding:
        pod = gpu_pod.pod
        all_shares = (*shares, *self._cards_of_other_partitioning(shares, pod.node))
        gpuid = occupied_gpuid(pod, pod.node)
        return _holding(pod, pod.node, dialect, all_shares, constraints=gpu_pod.constraints, gpuid=gpuid)

    def settle_all_on(self, node: str) -> None:
        for gpu_pod in self._pods.on(node):
            self.settle(gpu_pod)

    def given_changed(self, uid: str, node: str) -> None:
        """Derive what a pod holds after the node has reported other shares for it.

        A node is trusted only about its own pods, because its agent's token could be used to report pods of other
        nodes.
        """
        holding = self.ledger.holding(uid)
        gpu_pod = self._pods.get(uid)
        if gpu_pod is not None:
            self.settle(gpu_pod)
        elif holding is not None and (holding.node != node or holding.dialect in (mtgpu.NAME, DRA)):
            return  # The UID belongs to a pod of another node, or to an MtgpuPod or a ResourceClaim and not to a Pod.
        elif self._reservations.get(uid) is None:
            self.release(uid)
            if self._other_pods.get(uid, _OtherPod(uid)).node in ("", node):
                self._hold_given(uid, node)

    def other_pod_changed(self, pod: Pod, uid: str) -> None:
        """Store a pod that requests no GPU. If its node reports that it has given the pod cards, the pod holds them."""
        node = sys.intern(pod.node)
        self._other_pods[uid] = _OtherPod(uid, pod.namespace, pod.name, pod.ended, occupied_gpuid(pod, node), node)
        self._hold_given(uid, pod.node)

    def pod_gone(self, uid: str, gpu_pod: GpuPod | None) -> None:
        """Remove a deleted pod. It goes on holding what its node still reports for it.

        Args:
            gpu_pod: The last state of the pod, or None if it was no GPU pod.
        """
        other_pod = self._other_pods.pop(uid, _OtherPod(uid))
        if gpu_pod is None:
            self._hold_given(uid, other_pod.node)
            return
        pod = gpu_pod.pod
        if pod.node and not pod.ended and not occupied_gpuid(pod, pod.node):
            self.remnants.deleted(uid, pod.namespace, pod.name, pod.node)
        self._hold_given(uid, pod.node)

    def claim_released(self, uid: str, node: str) -> None:
        """Release what a claim holds. It goes on holding what its node still reports for it, as a deleted pod does."""
        self.release(uid)
        self._hold_given(uid, node)

    def reserve(self, reservation: Reservation, *, provisional: bool) -> None:
        """Hold the cards of a reservation, in place of the pod's previous one. See `ReservationCache.reserve`."""
        request = reservation.request
        dialect = request.dialect
        shares = shares_of(request, reservation.placement)
        if nvidia_plugin.chooses_cards(self._nodes.get(reservation.node), request):
            dialect = nvidia_plugin.NVIDIA
            shares = unknown_shares(request)
        constraints, gpuid = request.constraints, reservation.gpuid
        self.hold(
            _holding(reservation, reservation.node, dialect, shares, bound=False, constraints=constraints, gpuid=gpuid)
        )
        self._reservations.put(reservation, provisional=provisional)

    def forget(self, uid: str) -> None:
        """Release what a pod holds, because it was deleted or no longer requests GPUs."""
        self.release(uid)
        self.promises.drop(uid)
        self._undecided.discard(uid)

    def release(self, uid: str) -> None:
        """Remove the holding and the reservation of a UID."""
        self._reservations.drop(uid)
        before = self.ledger.release(uid)
        self.remnants.release(uid)
        if before is not None:
            self._events.publish(HoldingsChanged(before.node, before.constraints.same_card))

    def hold(self, holding: Holding) -> None:
        """Add a holding in place of the previous one of its UID."""
        before = self.ledger.holding(holding.uid)
        if before is not None:
            self._events.publish(HoldingsChanged(before.node, before.constraints.same_card))
        self.ledger.hold(holding)
        self._events.publish(HoldingsChanged(holding.node, holding.constraints.same_card))

    def _hold_given(self, uid: str, node: str) -> None:
        """Hold what the node reports for the pod: cards until the pod has ended, slices until the node frees them."""
        pod = self._other_pods.get(uid, _OtherPod(uid))
        gpu_pod = self._pods.get(uid)
        if gpu_pod is not None and uid not in self._other_pods:
            pod = _OtherPod(uid, gpu_pod.pod.namespace, gpu_pod.pod.name, gpu_pod.pod.ended)
        shares = tuple(s for s in self._nodes.given(node).get(uid, ()) if not (pod.ended and s.type == GPU))
        if shares:
            self.remnants.hold(uid, node)
            self.hold(_holding(pod, node, nvidia_plugin.NVIDIA, shares, gpuid=pod.gpuid))

    def _await_decision(self, gpu_pod: GpuPod, unreadable: str | None) -> None:
        """Publish that a bound pod needs a late binding decision, unless it is being deleted.

        Args:
            unreadable: Why its record cannot be read, or None if it has no valid record.
        """
        pod = gpu_pod.pod
        reservation = self._reservations.get(pod.uid)
        if reservation is None or reservation.node != pod.node:
            self.release(pod.uid)
            if unreadable is not None and gpu_pod.request is not None:
                # Another scheduler may have written the record, and may rely on any of the cards. So the pod holds its
                # share on all of them until its cards are decided.
                shares = unknown_shares(gpu_pod.request)
                self.hold(_holding(pod, pod.node, gpu_pod.dialect, shares, constraints=gpu_pod.constraints))
        if unreadable is not None:
            self._warn(pod, "UnreadableRecord", f"the record of its cards cannot be read: {unreadable}")
        if not pod.deleting:
            self._undecided.add(pod.uid)
            self._events.publish(PodUndecided(pod.uid))

    def _cards_of_other_partitioning(self, shares: Iterable[Share], name: str) -> Iterator[Share]:
        """Yield a share of the whole card for each slice that the node's present partitioning cannot have."""
        node = self._nodes.get(name)
        mode = node.labels.get(LABEL) if node else None
        for share in shares:
            if share.type == GPU:
                continue
            slice_name = slice_of_resource(RESOURCE_PREFIX + share.type)
            if slice_name and mode_of(slice_name) != mode:
                card = place_of(share.card)[0] if isinstance(share.card, int) else None
                yield Share(share.container, card, whole=True, stage=share.stage)

    def _warn_of_unknown(self, pod: Pod, unreadable: str | None, shares: Sequence[Share]) -> None:
        message = "without a readable record of its cards; its share is held on every card there"
        if not shares:
            message = (
                "without a record of its cards, and was given no cards; it holds nothing. "
                "Delete it and create it again without nodeName"
            )
        why = f": {unreadable}" if unreadable is not None else ""
        self._warn(pod, "UnknownCards", f"runs on {pod.node} {message}{why}")

    def _warn_of_split_group(self, gpu_pod: GpuPod) -> None:
        """Warn if a same-card group is on several cards, because a user wrote a record or a record was lost."""
        group = gpu_pod.constraints.same_card
        group_cards = self.ledger.group_cards(group)
        if len(group_cards) > 1:
            message = f"{group} is on {format_group_cards(group_cards)}; more of its pods fit only on these cards"
            self._warn(gpu_pod.pod, "GroupSplit", message)

    def _warn_of_absent_cards(self, pod: Pod, shares: Sequence[Share]) -> None:
        """Warn if the record names cards that the node does not have.

        There is no warning for a node without cards: when the scheduler starts, pods may arrive before the cards.
        """
        cards = self.ledger.nodes().get(pod.node, ())
        names = ", ".join(missing_cards(shares, cards)) if cards else ""
        if names:
            message = f"its record names {names}, which {pod.node} does not have; they are held once the node has them"
            self._warn(pod, "UnknownCards", message)

    def _warn(self, pod: Pod, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(pod_reference(pod.namespace, pod.name, pod.uid), reason, message))


def _holding(
    pod: Pod | Reservation | _OtherPod,
    node: str,
    dialect: str,
    shares: tuple[Share, ...],
    *,
    bound: bool = True,
    constraints: Constraints = NO_CONSTRAINTS,
    gpuid: str = "",
) -> Holding:
    return Holding(
        pod.uid, pod.namespace, pod.name, node, dialect, shares, bound, constraints, gpuid, occupies=bool(gpuid)
    )
